"""`underpar bench operator NAME A B` and `bench scoring A B`: one part of a network, alone.

A part runs as in training, compiled in the same way and on as many tokens as a micro-batch, forward
and backward, on random inputs. Alone it cannot fuse with its neighbours, so a gain here is an upper
bound of the gain of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from underpar.compile.regions import CompiledRun
from underpar.core.progress import SILENT, Progress
from underpar.core.runtime import Runtime, seed_everything
from underpar.data.loader import MicroBatch
from underpar.data.made_up import made_up_batch
from underpar.errors import BenchError
from underpar.infer.predictor import Predictor
from underpar.lab.bench import Bench, BenchResult, Instruments, run_benches
from underpar.lab.clocks import clock_log
from underpar.lab.step_bench import (
    FLOORS,
    LETTERS,
    TrainingStep,
    Variant,
    device_seconds,
    make_sides,
    noise_of,
    plain_network,
    relative_errors,
    require_small,
)
from underpar.model.kv_cache import PackedCache
from underpar.model.network import EAGER, Eager, Network, products
from underpar.recipe import nearest
from underpar.seams import Stream, Visit
from underpar.train.optim import Optimizer
from underpar.train.step import stream_loss

# A traced function: the network and inputs -> the output.
Work = Callable[..., Tensor]


class PartCall:
    """A part of one side. A call computes it, forward and backward if it learns."""

    def __init__(self, side: TrainingStep) -> None:
        self.side, self.runtime = side, side.runtime

    def __call__(self) -> object:
        """Compute the part once."""
        raise NotImplementedError

    def results(self) -> dict[str, Tensor]:
        """What it computes, by name."""
        raise NotImplementedError

    def exact(self) -> dict[str, Tensor]:
        """The same by the network as it is, in fp32."""
        raise NotImplementedError

    def seconds(self, calls: int) -> float:
        """Seconds of so many calls on the device."""
        return device_seconds(self, calls, self.runtime)


class TracedPart(PartCall):
    """A function of the network and of random inputs, compiled as training compiles it."""

    def __init__(
        self, side: TrainingStep, work: Work, inputs: Sequence[Tensor], *constants: Any
    ) -> None:
        super().__init__(side)
        self._work, self._inputs, self._constants = work, inputs, constants
        self._upstream: Tensor | None = None

    def __call__(self) -> None:
        """Forward and backward."""
        self.side.prepare()
        self._run(self.side.model, self.side.run, self._inputs, self.runtime.dtype)

    def results(self) -> dict[str, Tensor]:
        """The output, and the gradients of inputs and weights."""
        self.side.prepare()
        return self._results(self.side.model, self.side.run, self._inputs, self.runtime.dtype)

    def exact(self) -> dict[str, Tensor]:
        """The same in fp32."""
        inputs = [x.detach().float().requires_grad_() for x in self._inputs]
        return self._results(plain_network(self.side), EAGER, inputs, torch.float32)

    def _run(
        self, model: Network, run: Eager, inputs: Sequence[Tensor], dtype: torch.dtype
    ) -> Tensor:
        model.zero_grad(set_to_none=True)
        for x in inputs:
            x.grad = None
        work = self._work
        if isinstance(run, CompiledRun) and self.side.sharing is not None:
            self.side.sharing.begin_pass()
            work = run.region(work)
        with products(self.runtime.device, dtype):
            out = work(model, *inputs, *self._constants)
        if self._upstream is None:
            self._upstream = torch.randn_like(out)
        out.backward(self._upstream.to(out.dtype))
        return out

    def _results(self, model: Network, *rest: Any) -> dict[str, Tensor]:
        out = self._run(model, *rest)
        found = {"output": out.detach()}
        found |= {f"input {n}": x.grad for n, x in enumerate(rest[1]) if x.grad is not None}
        weights = model.named_parameters()
        return found | {name: w.grad for name, w in weights if w.grad is not None}


class MuonPart(PartCall):
    """Muon's update of all matrices from random gradients."""

    def __init__(self, side: TrainingStep) -> None:
        super().__init__(side)
        weights = side.model.named_parameters()
        self._gradients = {name: torch.randn_like(weight) for name, weight in weights}

    def __call__(self) -> None:
        """Update; gradients stay."""
        for name, weight in self.side.model.named_parameters():
            weight.grad = self._gradients[name]
        self.side.optimizer.muon.step(1e-3, 0.95)

    def results(self) -> dict[str, Tensor]:
        """The update of every weight, the AdamW ones too."""
        return self.side.update_from(self._gradients)

    def exact(self) -> dict[str, Tensor]:
        """The update of the optimizer as it is."""
        plain = plain_network(self.side)
        side = copy(self.side)
        side.model = plain
        side.optimizer = Optimizer(plain, side.recipe.train, side.runtime)
        side.optimizer.load(self.side.optimizer.state())
        return side.update_from(self._gradients)


class ScoringPart(PartCall):
    """Prices of one batch of the recipe's scoring, eager as scoring is."""

    def __init__(self, side: TrainingStep) -> None:
        super().__init__(side)
        recipe = side.recipe
        micro = MicroBatch(recipe.score.batch_tokens, recipe.model.context)
        rng = np.random.default_rng(recipe.train.seed)
        self._batch = made_up_batch(micro, recipe.model.vocab_size, rng, recipe.train.order)
        self._predictor = Predictor(side.model, side.runtime.device, [], side.runtime.dtype)

    def __call__(self) -> Tensor:
        """Nats of each target."""
        self.side.prepare()
        return self._predictor.nll(self._batch)

    def results(self) -> dict[str, Tensor]:
        """The same by name."""
        return {"nats": self()}

    def exact(self) -> dict[str, Tensor]:
        """The same in fp32."""
        plain = Predictor(plain_network(self.side), self.runtime.device, [])
        return {"nats": plain.nll(self._batch)}


def _random(side: TrainingStep, *shape: int) -> Tensor:
    size = (len(side.batches[0].inputs), *shape)
    return torch.randn(size, device=side.runtime.device).to(side.runtime.dtype).requires_grad_()


def _hidden(side: TrainingStep) -> Tensor:
    return _random(side, side.model.spec.dim)


def _heads(side: TrainingStep) -> tuple[Tensor, Tensor, Tensor]:
    spec = side.model.spec
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    q, k, v = (_random(side, num, spec.head_dim) for num in heads)
    return q, k, v


def _visit(side: TrainingStep) -> Visit:
    """The first visit of the middle layer, which has one lane in all shipped recipes."""
    layer = side.model.spec.num_layers // 2
    return next(visit for visit in side.model.plan if visit.layer == layer)


def _attention(side: TrainingStep) -> PartCall:
    def work(network: Network, q: Tensor, k: Tensor, v: Tensor, cache: PackedCache) -> Tensor:
        return cache.attend(0, q, k, v, 0)

    return TracedPart(side, work, _heads(side), PackedCache(side.batches[0].segments))


def _qkv(side: TrainingStep) -> PartCall:
    layer = _visit(side).layer

    def work(network: Any, x: Tensor) -> Tensor:
        return torch.cat(network.blocks[layer].attn.project(x), -1)

    return TracedPart(side, work, [_hidden(side)])


def _xsa(side: TrainingStep) -> PartCall:
    layer = _visit(side).layer
    if not side.model.hooks.attn_out:
        raise BenchError(f"recipe {side.variant.recipe!r} does nothing to the output of attention")

    def work(network: Network, y: Tensor, v: Tensor, x: Tensor) -> Tensor:
        for hook in network.hooks.attn_out:
            y = hook(layer, y, x, v)
        return y

    q, _, v = _heads(side)
    return TracedPart(side, work, [q, v, _hidden(side)])


def _mlp(side: TrainingStep) -> PartCall:
    visit, run = _visit(side), side.run

    def work(network: Any, x: Tensor) -> Tensor:
        # In the exact pass without compiler and rewrites.
        runner = run if network is side.model else EAGER
        return runner.mlp(network.blocks[visit.layer], x, visit)

    return TracedPart(side, work, [_hidden(side)])


def _loss(side: TrainingStep) -> PartCall:
    fused, loss = side.run.fused, side.loss

    def work(network: Network, x: Tensor, targets: Tensor, cache: PackedCache) -> Tensor:
        # The last block leaves two lanes, if there are lanes.
        stream = Stream(x, x, targets, cache, (x, x), {"lanes": x})
        # The exact loss is that of the network as it is.
        return (loss if network is side.model else stream_loss)(network, stream, targets, fused)

    batch = side.batches[0]
    return TracedPart(side, work, [_hidden(side)], batch.targets, PackedCache(batch.segments))


OPERATORS: dict[str, tuple[str, Callable[[TrainingStep], PartCall]]] = {
    "attention": ("attention of packed documents", _attention),
    "loss": ("last norm, head and loss", _loss),
    "mlp": ("norm, MLP and scale of a block", _mlp),
    "muon": ("Muon's update of all matrices", MuonPart),
    "qkv": ("queries, keys and values of a block", _qkv),
    "xsa": ("what levers do to the output of attention", _xsa),
}
SCORING = ("prices of one batch of scoring, eager", ScoringPart)


def compare_parts(
    name: str,
    variants: Sequence[Variant],
    at: float,
    runtime: Runtime,
    quads: int = 12,
    block_seconds: float = 2.0,
    warmup_seconds: float = 30.0,
    progress: Progress = SILENT,
) -> list[BenchResult]:
    """Check an operator of all sides, or "scoring", then time it: the first side is A."""
    if name != "scoring" and name not in OPERATORS:
        raise BenchError(f"no operator {name!r}{nearest(name, [*OPERATORS])}")
    what, make = SCORING if name == "scoring" else OPERATORS[name]
    sides = make_sides(variants, at, runtime)
    calls = []
    for side in sides:
        # The same random inputs for all.
        seed_everything(side.recipe.train.seed)
        calls.append(make(side))
    first = calls[0]
    tokens = len(sides[0].batches[0].inputs)
    benches = [
        Bench(
            name=name,
            what=what if name in ("scoring", "muon") else f"{what}, {tokens:,} tokens",
            a=first,
            b=call,
            label_a=sides[0].variant.label(call.side.variant),
            label_b=call.side.variant.label(sides[0].variant),
            synchronize=runtime.synchronize,
            check=_checker(first, call, letter),
        )
        for letter, call in zip(LETTERS[1:], calls[1:], strict=False)
    ]
    settings = (quads, block_seconds, warmup_seconds, progress)
    with clock_log() as start_sample:
        return run_benches(benches, *settings, Instruments(start_sample=start_sample))


def _checker(a: PartCall, b: PartCall, letter: str) -> Callable[[], None]:
    def check() -> None:
        same = a.side.claims() == b.side.claims()
        if same and b is not a:
            b.side.model.load_state_dict(a.side.model.state_dict())
        tables = []
        for who, call in (("A", a), (letter, b)):
            exact, got = call.exact(), call.results()
            if exact.keys() != got.keys():
                odd = min(exact.keys() ^ got.keys())
                raise BenchError(f"{who} and its network as it is differ in whether {odd} exists")
            tables.append(relative_errors(got, exact))
        dtype = a.runtime.dtype
        if same:
            noise = noise_of(a.side, a.exact(), a.results)
        else:
            # A part alone rounds its results a few times.
            noise = dict.fromkeys(tables[1], FLOORS[dtype])
        require_small(letter, tables[1], noise, exact, dtype)

    return check
