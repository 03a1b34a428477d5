"""Candidates: files with faster versions of parts of a network, timed against the network as it is.

    underpar bench step h200-300s h200-300s --candidate B=benchmarks/fusion_study/fused_mlp.py

A candidate is one Python file. It imports underpar, torch and triton, and no file beside it. The
harness imports the file, and calls its functions in this order:

    check(device)
        Optional. Compares the kernels with their plain-torch reference, at real shapes on a GPU and
        at small shapes elsewhere. Raises an exception if they differ, or if the device cannot run
        them; then nothing is timed.
    apply(network, recipe)
        Required. `network` is the uncompiled `model.gpt.GPT` of one side, on its device, with its
        weights; `recipe` is the recipe of that side. Replaces functions of the network. Returns
        nothing.
    loss(network, stream, targets, fused, levers)
        Optional. Takes the place of the loss of training (`train.step.loss_for`): mean nats per
        target.
    apply_optimizer(optimizer, recipe)
        Optional. Replaces functions of the `train.optim.Optimizer` of one side.

What `apply` may replace, on the objects it is given and never on their classes, because the other
side runs in the same process with the same classes:

    block.mlp.forward         (x, visit) -> y                   block = network.blocks[layer]
    block.attn.forward        (x, visit, stream) -> y
    block.mlp_branch          (x, visit) -> y: norm, MLP and scale of the branch
    block.attend              (x, visit, stream) -> y: norm, attention and scale
                              Both only without the rewrite folded_scales, which calls neither.
    block.forward             (visit, stream, run) -> None: sets stream.x
    network.head              (x, fused) -> logits
    network.hooks.SEAM[i]     a hook of a lever; `vars(network.hooks)` has them by seam. To replace
                              a method of a lever module alone has no effect.

A whole candidate:

    import types
    import torch.nn.functional as F

    def _forward(mlp, x, visit):
        return mlp.down(F.leaky_relu(mlp.up(x), 0.5).square())

    def apply(network, recipe):
        for block in network.blocks:
            block.mlp.forward = types.MethodType(_forward, block.mlp)

Rules for the functions that it sets:

- They run compiled by `compile.traced_run.TracedRun`: once on tensors without values, whose
  operations become a graph. The regions are `network.embed`, `network.before_block`,
  `network.run_block` and the loss. What they read from a tensor's values at that time is lost.
- They read tensors from their arguments or from modules of the network. Another tensor must be
  registered first: `module.register_buffer(name, tensor, persistent=False)`. `apply` adds and
  removes no parameters, so that both sides have the same weights and the same optimizer groups.
- Use `types.MethodType`: the tracer then knows which function a module runs.
- Kernels are registered operators with a fake implementation (`torch.library`), as in
  `kernels/attention/op.py`. Importing the file must work without a GPU and without Triton; a kernel
  is built when it is first called, or in `check`.
- Hooks of levers that a replaced function passed by are dropped. The harness notices: it compares
  losses and gradients of both sides with the same weights, and refuses to time a difference.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from underpar.errors import BenchError, UnderparError, one_line
from underpar.model.network import Network
from underpar.recipe import Recipe
from underpar.train.optim import Optimizer


@dataclass(frozen=True)
class Candidate:
    """The functions of a candidate file; the defaults leave the network as it is."""

    path: Path | None = None
    apply: Callable[[Network, Recipe], None] = lambda network, recipe: None
    loss: Callable[..., Tensor] | None = None
    apply_optimizer: Callable[[Optimizer, Recipe], None] = lambda optimizer, recipe: None
    check: Callable[[torch.device], None] = lambda device: None


AS_IT_IS = Candidate()


def load_candidate(path: Path) -> Candidate:
    """Import a candidate file; another file with its functions is an error."""
    module = _import(path.resolve())
    names = ("apply", "loss", "apply_optimizer", "check")
    found = {name: getattr(module, name) for name in names if hasattr(module, name)}
    for name, function in found.items():
        if not callable(function):
            raise BenchError(f"candidate {path}: {name} is no function")
    if "apply" not in found:
        raise BenchError(
            f"candidate {path} has no function 'apply(network, recipe)'; "
            "underpar/lab/candidates.py says what a candidate is"
        )
    return Candidate(path, **found)


# An operator can be registered only once in a process, so a file is imported only once.
@cache
def _import(path: Path) -> ModuleType:
    if not path.is_file():
        raise BenchError(f"candidate {path} is not a file")
    name = f"underpar_candidate_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise BenchError(f"candidate {path} is no Python file; its name must end with .py")
    module = importlib.util.module_from_spec(spec)
    # Triton and dataclasses look the module up by its name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except UnderparError:
        raise
    except Exception as error:
        del sys.modules[name]
        raise BenchError(
            f"candidate {path} cannot be imported ({type(error).__name__}: {one_line(error, 200)})"
        ) from error
    return module
