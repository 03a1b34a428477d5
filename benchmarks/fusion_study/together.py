"""All candidates of this folder that compute the same function, together.

For `bench step`: what the kernels save alone does not add up, because each one ends a fusion of the
compiler on both of its sides.
"""

from __future__ import annotations

from pathlib import Path

import torch

from underpar.errors import BenchError, one_line
from underpar.lab.candidates import load_candidate
from underpar.model.network import Network
from underpar.recipe import Recipe
from underpar.train.optim import Optimizer

# Those that lose alone are taken out here.
PARTS = [
    load_candidate(Path(__file__).with_name(f"{name}.py"))
    for name in ("block_epilogue", "qkv", "xsa", "mlp", "ema_update")
]


def check(device: torch.device) -> None:
    """The checks of all of them; all that fail are named."""
    failed = []
    for part in PARTS:
        try:
            part.check(device)
        except Exception as error:
            assert part.path is not None
            failed.append(f"{part.path.stem}: {one_line(error, 200)}")
    if failed:
        raise BenchError(f"parts of together.py that fail their checks: {'; '.join(failed)}")


def apply(network: Network, recipe: Recipe) -> None:
    """Replace what they replace."""
    for part in PARTS:
        part.apply(network, recipe)


def apply_optimizer(optimizer: Optimizer, recipe: Recipe) -> None:
    """Replace what they replace."""
    for part in PARTS:
        part.apply_optimizer(optimizer, recipe)
