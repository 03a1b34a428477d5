"""`underpar bench step A B [C ...]`: training steps in one process, timed in turns.

A step is what training does: forward and backward passes of all micro-batches, the optimizers, the
averages of weights. Penalties, weights of tokens and fake quantization are left out. Documents are
made up and lie on the device already, the same ones for both sides.

Before anything is timed, each side computes loss and gradients of one micro-batch. They are
compared with the exact ones: those of the network as it is, eager, in fp32. A may have an error
that rounding explains. If A and B claim to be the same function (equal recipes), B gets A's random
weights. B's errors may then be as large as errors that are drawn like those of A (`noise_of`).
Otherwise B is judged as A is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from underpar.build.levers import plug_levers
from underpar.build.model import build_model
from underpar.build.recipe import load_checked
from underpar.compile.modes import sharing_in
from underpar.compile.regions import CompiledRun, Sharing
from underpar.compile.rewrites import FOLDED_SCALES, choose_rewrites
from underpar.compile.startup import end_warm_up, warm_compiler
from underpar.compile.traced_run import TracedRun
from underpar.core.progress import SILENT, Progress
from underpar.core.runtime import Runtime, seed_everything
from underpar.core.stats import variance_limit
from underpar.core.words import count_text
from underpar.data.batch import Batch, Segments
from underpar.data.loader import weights_of
from underpar.data.made_up import made_up_batch
from underpar.errors import BenchError
from underpar.kernels.attention import backend_of, set_backend
from underpar.kernels.attention.grids import SDPA
from underpar.lab.bench import Bench, BenchResult, Instruments, run_benches
from underpar.lab.candidates import AS_IT_IS, load_candidate
from underpar.lab.clocks import clock_log
from underpar.model.network import EAGER, Eager, Network, products
from underpar.recipe import Recipe, to_tree
from underpar.seams import BOS_ID
from underpar.train import schedule
from underpar.train.meter import flops_per_token, peak_flops
from underpar.train.optim import Optimizer
from underpar.train.step import accumulate, loss_for, mean_loss, step_of

LETTERS = "ABCDEFGH"
# Steps with different documents, in turn.
NUM_STEPS = 4
# The exact gradients are computed in parts of about so many tokens.
EXACT_TOKENS = 8192
# By precision: an error that needs no explanation. In bf16 it is that of rounding a result once.
FLOORS = {torch.float32: 1e-4, torch.bfloat16: 2.0**-8}
# By precision: the largest error of all gradients together. A visit rounds about 26 tensors, there
# and back. Independent roundings to bf16, of 1.7e-3 each, add up to 0.05 in 35 visits; measured in
# 11 visits on an H200: 0.006.
LARGEST = {torch.float32: 1e-3, torch.bfloat16: 0.05}
# The same where a lever rounds products to 8-bit floats: what bf16 changes a little may then be
# rounded to another neighbour, 2^-3 away. That is 1 % per product in the mean.
LARGEST_FP8 = {torch.float32: 1e-3, torch.bfloat16: 0.25}
# Errors of A that are drawn, the probability that an error of B drawn like them is refused, and
# the number of numbers in a gradient that are taken to err independently.
DRAWS, REFUSED, INDEPENDENT = 8, 1e-6, 128
# How far an update of the weights may be from another one: orthogonalized in bf16 on a GPU.
UPDATE_LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.05}


@dataclass(frozen=True)
class Variant:
    """What one side runs.

    `compiled`: "off", or a mode of torch.compile. `rewrites`: as for `choose_rewrites`.
    """

    recipe: str
    overrides: tuple[str, ...] = ()
    candidates: tuple[Path, ...] = ()
    attention: str = "auto"
    compiled: str = "default"
    rewrites: str = "auto"
    revision: str = ""
    """A git revision of underpar; it runs in a process of its own (revisions.py)."""

    def words(self) -> list[str]:
        """What is special about it, in a few words each."""
        words = [*self.overrides]
        words += [candidate.stem for candidate in self.candidates]
        words += [f"attention {self.attention}"] if self.attention != "auto" else []
        words += [f"compile {self.compiled}"] if self.compiled != "default" else []
        words += [f"revision {self.revision}"] if self.revision else []
        words += [f"rewrites {self.rewrites}"] if self.rewrites != "auto" else []
        return words

    def label(self, other: Variant) -> str:
        """Its recipe, and what the other side does not have."""
        return " + ".join([self.recipe, *(w for w in self.words() if w not in other.words())])


def read_variants(
    names: Sequence[str], options: Mapping[str, Sequence[str]], fewest: int = 2
) -> list[Variant]:
    """The sides from their recipes and from options, "VALUE" for all or "B=VALUE" for one.

    Options are by field of `Variant`.
    """
    if not fewest <= len(names) <= len(LETTERS):
        wanted = "A and B, which may be equal" if fewest > 1 else "one"
        raise BenchError(f"{count_text(len(names), 'recipe')} named; name {wanted}")
    letters = LETTERS[: len(names)]
    for text in (text for texts in options.values() for text in texts):
        if text[1:2] == "=" and text[0] not in letters:
            raise BenchError(f"{text!r} is for a side that does not exist; sides are {letters}")
    return [_read_variant(*pair, options) for pair in zip(letters, names, strict=True)]


def _read_variant(letter: str, name: str, options: Mapping[str, Sequence[str]]) -> Variant:
    mine = {
        field: [text.removeprefix(f"{letter}=") for text in texts if _is_for(letter, text)]
        for field, texts in options.items()
    }
    overrides = tuple(mine.pop("overrides", ()))
    candidates = tuple(map(Path, mine.pop("candidates", ())))
    # Of the others the last one counts.
    last = {field: texts[-1] for field, texts in mine.items() if texts}
    return Variant(name, overrides, candidates, **last)


def _is_for(letter: str, text: str) -> bool:
    return text[:2] not in {f"{other}=" for other in LETTERS if other != letter}


class Side(Protocol):
    """What is compared and timed: a training step of this process, or of another one."""

    variant: Variant
    at: float
    on_gpu: bool
    dtype: torch.dtype
    has_own_optimizer: bool

    @property
    def step_tokens(self) -> int:
        """Tokens of a step."""

    @property
    def sharing(self) -> HasGraphs | None:
        """What compiles it; sides may share it."""

    def claims(self) -> dict[str, Any]:
        """Sides with equal claims must compute the same numbers."""

    def weights(self) -> Mapping[str, Tensor]:
        """The weights of now, by name."""

    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Put these in place of the weights."""

    def gradients(self) -> dict[str, Tensor]:
        """The loss of the first micro-batch, and its gradients by name; no step is taken."""

    def exact_gradients(self) -> dict[str, Tensor]:
        """The same by the network as it is, in fp32."""

    def update_from(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Update the weights from these gradients; returns how much each weight changed."""

    def optimizer_state(self) -> dict[str, Tensor]:
        """Moments of the optimizer, by name."""

    def take_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Put these in place of the optimizer's."""

    def synchronize(self) -> None:
        """Wait for the device."""

    def __call__(self) -> object:
        """Take a step."""

    def seconds(self, calls: int) -> float:
        """Seconds of so many steps on the device, after one that is not timed."""

    def describe(self, seconds: float) -> dict[str, Any]:
        """What this side is, and its speed if a step takes so many seconds."""

    def memory_bytes(self) -> int:
        """Most memory of the device that its process has taken."""


class HasGraphs(Protocol):
    """A compiler that counts."""

    @property
    def num_graphs(self) -> int:
        """Graphs compiled so far."""


class TrainingStep:
    """One side: a network, its optimizer and its compiler. A call takes a step."""

    def __init__(
        self,
        variant: Variant,
        recipe: Recipe,
        runtime: Runtime,
        at: float,
        batches: Sequence[Batch],
        sharing: Sharing | None,
        make: Callable[[Recipe, Runtime], Network] | None = None,
    ) -> None:
        """`at`: progress of training; `batches`: the micro-batches of some steps.

        `make` makes the network, by default with random weights.
        """
        self.variant, self.recipe, self.runtime = variant, recipe, runtime
        self.on_gpu, self.dtype = runtime.device.type == "cuda", runtime.dtype
        candidates = [load_candidate(path) for path in variant.candidates]
        for candidate in candidates:
            candidate.check(runtime.device)
        self.model = (make or random_network)(recipe, runtime)
        self.optimizer = Optimizer(self.model, recipe.train, runtime)
        for candidate in candidates:
            candidate.apply(self.model, recipe)
            candidate.apply_optimizer(self.optimizer, recipe)
        losses = [c.loss for c in candidates if c.loss is not None]
        if len(losses) > 1:
            raise BenchError(f"{len(losses)} candidates have a loss; name one of them")
        optimizers = {candidate.apply_optimizer for candidate in candidates}
        self.has_own_optimizer = bool(optimizers - {AS_IT_IS.apply_optimizer})
        levers = plug_levers(recipe, "train").values()
        self.equippers = [lever for lever in levers if hasattr(lever, "equip")]
        for equipper in self.equippers:
            equipper.equip(self.model)
        self.averagers = [lever for lever in levers if hasattr(lever, "average")]
        for averager in self.averagers:
            averager.start(dict(self.model.state_dict()))
        self.sharing: Sharing | None = sharing
        # Compiled or not is the choice of each side.
        compiled = replace(runtime, compiled=sharing is not None)
        rewrites = choose_rewrites(variant.rewrites, self.model, compiled).names
        _require_called(self.model, rewrites)
        self.run: Eager = EAGER if sharing is None else TracedRun(sharing, rewrites)
        self.loss = losses[0] if losses else loss_for(self.run)
        # The exact gradients for the weights of now, once they are known.
        self.exact: dict[str, Tensor] | None = None
        self.batches = batches
        self._next: Iterator[Batch] = cycle(batches)
        self._weights = weights_of(step_of(recipe.train))
        self.go_to(at, recipe.train.momentum_warmup_steps)

    def go_to(self, at: float, step: int) -> None:
        """The next steps are those at progress `at`, after `step` steps."""
        part, self.at = self.recipe.train, at
        self._rates = (
            schedule.lr_scale(part, at),
            schedule.momentum(part, at, step),
            schedule.decay_scales(part, at),
        )

    def read(self, batches: Iterator[Batch]) -> None:
        """The next steps read these micro-batches."""
        self._next = batches

    @property
    def step_tokens(self) -> int:
        """Tokens of a step."""
        return sum(len(batch.inputs) for batch in self.batches) // NUM_STEPS

    def describe(self, seconds: float) -> dict[str, Any]:
        """What this side is, and its speed if a step takes so many seconds."""
        part, runtime = self.recipe.train, self.runtime
        context = fmean(batch.segments.context for batch in self.batches)
        flops = flops_per_token(self.model.spec, self.model.plan, context)
        peak = peak_flops(runtime.device)
        speed = self.step_tokens / seconds
        return {
            "recipe": self.variant.recipe,
            "overrides": list(self.variant.overrides),
            "recipe_hash": self.recipe.hash,
            "candidates": [str(path) for path in self.variant.candidates],
            "attention": backend_of(runtime.device, runtime.dtype),
            "compiled": self.variant.compiled if self.sharing else "off",
            "rewrites": sorted(self.run.rewrites),
            "step_tokens": self.step_tokens,
            "micro_batches": len(step_of(part)),
            "context": context,
            "visits": len(self.model.plan),
            "flops_per_token": flops,
            "step_ms": 1000 * seconds,
            "tokens_per_second": speed,
            "mfu": speed * flops / peak if peak else None,
        }

    def prepare(self) -> None:
        """Say to the process what this side needs."""
        set_backend(self.variant.attention, self.runtime.device, self.runtime.dtype)
        self.model.set_progress(self.at)

    def __call__(self) -> Tensor:
        """Take a step; its loss."""
        return self.step(nullcontext())

    def step(self, update: AbstractContextManager[object]) -> Tensor:
        """Take a step, the update of the weights inside a context; its loss."""
        self.prepare()
        self.exact = None
        for equipper in self.equippers:
            equipper.begin_step()
        loss = self._accumulate(self._next, self._weights)
        with update:
            self.optimizer.step(*self._rates)
            for averager in self.averagers:
                averager.update(dict(self.model.state_dict()), 1)
        return loss

    def seconds(self, calls: int) -> float:
        """Seconds of so many steps on the device, after one that is not timed."""
        return device_seconds(self, calls, self.runtime)

    def trace(self) -> None:
        """Trace and compile all regions and compute nothing, so that they compile in parallel."""
        if not isinstance(self.run, CompiledRun):
            return
        self.prepare()
        batch = self.batches[0]
        with self.run.trace_only(), products(self.runtime.device, self.runtime.dtype):
            mean_loss(self.model, batch, self.run, loss_of=self.loss)

    def gradients(self) -> dict[str, Tensor]:
        """The loss of the first micro-batch, and its gradients by name; no step is taken."""
        self.prepare()
        loss = self._accumulate(iter(self.batches), [1.0])
        return {"loss": loss} | _take_gradients(self.model)

    def exact_gradients(self) -> dict[str, Tensor]:
        """The same by the network as it is, in fp32."""
        return exact_gradients(self)

    def claims(self) -> dict[str, Any]:
        """Parts of the recipe: sides with equal ones must compute the same numbers."""
        tree = to_tree(self.recipe)
        return {part: tree.get(part) for part in ("model", "levers", "train")}

    def weights(self) -> Mapping[str, Tensor]:
        """The weights of now, by name."""
        return self.model.state_dict()

    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Put these in place of the weights."""
        self.model.load_state_dict(weights)
        self.exact = None

    def optimizer_state(self) -> dict[str, Tensor]:
        """Moments of the optimizer, by name."""
        return self.optimizer.state()

    def take_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Put these in place of the optimizer's."""
        self.optimizer.load(state)

    def synchronize(self) -> None:
        """Wait for the device."""
        self.runtime.synchronize()

    def memory_bytes(self) -> int:
        """Most memory of the device that tensors of this process have taken."""
        return torch.cuda.max_memory_allocated() if self.on_gpu else 0

    def update_from(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Update the weights from these gradients; returns how much each weight changed."""
        self.exact = None
        weights = dict(self.model.named_parameters())
        before = {name: weight.detach().clone() for name, weight in weights.items()}
        for name, weight in weights.items():
            weight.grad = gradients[name].clone() if name in gradients else None
        self.optimizer.step(*self._rates)
        return {name: weight.detach() - before[name] for name, weight in weights.items()}

    def _accumulate(self, batches: Iterator[Batch], weights: Sequence[float]) -> Tensor:
        parts = (self.model, batches, weights, self.runtime, self.run)
        return accumulate(*parts, loss_of=self.loss)


def _require_called(model: Network, rewrites: Collection[str]) -> None:
    """Refuse a candidate's function that a rewrite passes by."""
    blocks = [block for trunk in model.trunks for block in trunk.blocks]
    names = {name for block in blocks for name in ("attend", "mlp_branch") if name in vars(block)}
    if names and FOLDED_SCALES in rewrites:
        raise BenchError(
            f"a candidate replaces block.{min(names)}, which {FOLDED_SCALES} does not call: name "
            "the other rewrites with --rewrites, or 'none'"
        )


def device_seconds(call: Callable[[], object], calls: int, runtime: Runtime) -> float:
    """Seconds of so many calls by the clock of the device, after one call that is not timed.

    A GPU still has that call to do when the others are asked for, as in training.
    """
    call()
    if runtime.device.type != "cuda":
        started = time.perf_counter()
        for _ in range(calls):
            call()
        return time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def random_network(recipe: Recipe, runtime: Runtime) -> Network:
    """A network whose every path carries something: fresh networks multiply with zeros.

    Zeros hide mistakes, and a GPU multiplies them faster.
    """
    seed_everything(recipe.train.seed)
    model = build_model(recipe)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if name.startswith("levers."):
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif parameter.ndim > 1:
                parameter.normal_(std=parameter.size(-1) ** -0.5)
    return model.to(runtime.device).train()


def made_up_steps(recipe: Recipe, at: float, runtime: Runtime) -> list[Batch]:
    """The micro-batches of some steps as at progress `at`, on the device."""
    part, rng = recipe.train, np.random.default_rng(recipe.train.seed)
    context = schedule.context_at(part, at)
    micros = [replace(micro, context=context or micro.context) for micro in step_of(part)]
    return [
        made_up_batch(micro, recipe.model.vocab_size, rng, part.order, part.longest_context).to(
            runtime.device
        )
        for _ in range(NUM_STEPS)
        for micro in micros
    ]


def open_sides(
    variants: Sequence[Variant],
    at: float,
    runtime: Runtime,
    progress: Progress = SILENT,
    sharings: dict[str, Sharing] | None = None,
) -> list[TrainingStep]:
    """All sides, compiled.

    `sharings`: compilers by mode, of sides that were opened earlier.
    """
    warm_compiler(runtime)
    sides = make_sides(variants, at, runtime, sharings)
    with progress.task("compile", 2 * len(sides)) as task:
        for number, side in enumerate(sides):
            side.trace()
            task.update(number + 1)
        for number, side in enumerate(sides):
            side.gradients()
            task.update(len(sides) + number + 1)
    end_warm_up()
    return sides


def make_sides(
    variants: Sequence[Variant],
    at: float,
    runtime: Runtime,
    sharings: dict[str, Sharing] | None = None,
    make: Callable[[Recipe, Runtime], Network] | None = None,
) -> list[TrainingStep]:
    """All sides; those in the same mode share the graphs that are equal."""
    if not 0 <= at <= 1:
        raise BenchError(f"progress of training is {at}; use 0 to 1")
    sharings = {} if sharings is None else sharings
    batches: dict[object, list[Batch]] = {}
    sides = []
    for variant in variants:
        recipe = load_checked(variant.recipe, variant.overrides)
        shapes = recipe.model.vocab_size, recipe.train
        if shapes not in batches:
            batches[shapes] = made_up_steps(recipe, at, runtime)
        mode = variant.compiled if runtime.compiled else "off"
        if mode != "off" and mode not in sharings:
            sharings[mode] = sharing_in(mode)
        parts = (variant, recipe, runtime, at, batches[shapes], sharings.get(mode))
        sides.append(TrainingStep(*parts, make))
    return sides


def plain_network(side: TrainingStep) -> Network:
    """The network of a side as it is, with the same weights; in fp32 it attends by SDPA."""
    device = side.runtime.device
    set_backend(SDPA.name, device, torch.float32)
    seed_everything(side.recipe.train.seed)
    plain = build_model(side.recipe).to(device).train()
    plain.load_state_dict(side.model.state_dict())
    levers = plug_levers(side.recipe, "train").values()
    equippers = [lever for lever in levers if hasattr(lever, "equip")]
    for equipper, state in zip(equippers, side.equippers, strict=True):
        # What a lever rounds, it rounds here too: in fp32, by its reference, with the same scales.
        equipper.equip(plain)
        equipper.load(state.state())
    plain.set_progress(side.at)
    return plain


def exact_gradients(side: TrainingStep) -> dict[str, Tensor]:
    """Loss and gradients of the first micro-batch by the network as it is, in fp32.

    They are computed some documents at a time, because fp32 needs more memory.
    """
    if side.exact is not None:
        return side.exact
    device, plain = side.runtime.device, plain_network(side)
    batch = side.batches[0]
    total = torch.zeros((), device=device)
    for part in cut(batch, EXACT_TOKENS):
        loss = mean_loss(plain, part) * (len(part.inputs) / len(batch.inputs))
        loss.backward()
        total += loss.detach()
    side.exact = {"loss": total} | _take_gradients(plain)
    return side.exact


def cut(batch: Batch, num_tokens: int) -> Iterator[Batch]:
    """A batch in parts of at least `num_tokens`, but for the last; no document is cut."""
    cu, size = batch.segments.cu.tolist(), len(batch.inputs)
    begins = [at for at in cu if at < size and int(batch.inputs[at]) == BOS_ID]
    start = 0
    for at in [*begins, size]:
        if at - start < num_tokens and at < size:
            continue
        bounds = [bound - start for bound in cu if start <= bound <= at]
        segments = Segments(
            torch.tensor(bounds, dtype=torch.int32, device=batch.inputs.device),
            min(batch.segments.max_len, at - start),
            batch.segments.positions[start:at],
            batch.segments.context,
        )
        yield Batch(batch.inputs[start:at], batch.targets[start:at], segments)
        start = at


def _take_gradients(model: Network) -> dict[str, Tensor]:
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return grads


def require_agreement(a: Side, b: Side, letter: str = "B") -> dict[str, Any]:
    """The errors of both sides' loss and gradients; raises if they are no rounding errors."""
    same = a.claims() == b.claims()
    if same and b is not a:
        b.take_weights(a.weights())
    exact = a.exact_gradients()
    errors = {"A": _errors("A", a, exact)}
    noise = noise_of(a, exact, a.gradients) if same and b is not a else {}
    if b is not a:
        errors["B"] = _errors(letter, b, exact if same else b.exact_gradients())
    if same and b is not a:
        require_small(letter, errors["B"], noise, exact, b.dtype)
        if a.has_own_optimizer or b.has_own_optimizer:
            errors["update"] = _require_equal_updates(a, b, letter)
    shown = {
        name: {key: table[key] for key in ("loss", "all") if key in table}
        | dict([max(table.items(), key=_size)])
        for name, table in errors.items()
    }
    return {"same_function": same, "errors": shown}


def noise_of(
    side: Side, exact: Mapping[str, Tensor], results: Callable[[], Mapping[str, Tensor]]
) -> dict[str, float]:
    """The root of the mean square of a side's errors, when its roundings fall in other ways.

    Each draw moves every weight by less than its rounding (Monte Carlo arithmetic, Parker 1997).
    The move itself counts as one more rounding of each weight: the noise is that of the side, or up
    to 1.4 times as large if nothing but weights were rounded.
    """
    weights = {name: weight.detach().clone() for name, weight in side.weights().items()}
    torch.manual_seed(0)
    unit = torch.finfo(side.dtype).eps / 4
    squares: dict[str, float] = {}
    for _ in range(DRAWS):
        side.take_weights({name: _moved(weight, unit) for name, weight in weights.items()})
        for name, error in relative_errors(results(), exact).items():
            squares[name] = squares.get(name, 0.0) + error**2 / DRAWS
    side.take_weights(weights)
    return {name: math.sqrt(square) for name, square in squares.items()}


def _moved(weight: Tensor, unit: float) -> Tensor:
    if not weight.is_floating_point():
        return weight
    return weight * (1.0 + unit * (2.0 * torch.rand_like(weight) - 1.0))


def require_small(
    letter: str,
    errors: Mapping[str, float],
    noise: Mapping[str, float],
    exact: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> None:
    """Refuse errors that are larger than the noise of A explains.

    The mean square of n numbers, over that of n numbers of each draw, has an F distribution. Few
    numbers vary much: a vector is a sum over all tokens in which most cancels.
    """
    for name, error in errors.items():
        num = min(INDEPENDENT, exact[name].numel() if name in exact else INDEPENDENT)
        limit = FLOORS[dtype] + math.sqrt(variance_limit(REFUSED, num, num * DRAWS)) * noise[name]
        if not error <= limit:
            raise BenchError(
                f"{letter} is not the same function as A: its error of {name} is {error:.1e}, "
                f"that of A {noise[name]:.1e}, the limit {limit:.1e}"
            )


def _require_equal_updates(a: Side, b: Side, letter: str) -> dict[str, float]:
    """Errors of B's update of the weights, against that of A from the same gradients."""
    gradients = a.gradients()
    # Twice, because the first update of all has no momentum.
    for _ in range(2):
        b.take_optimizer_state(a.optimizer_state())
        table = relative_errors(*(side.update_from(gradients) for side in (b, a)))
    limit = UPDATE_LIMITS[a.dtype]
    worst = max(table, key=table.__getitem__)
    if not table[worst] <= limit:
        raise BenchError(
            f"{letter} updates {worst} in another way than A, by {table[worst]:.1e} of the update; "
            f"the limit is {limit:g}"
        )
    return table


def relative_errors(got: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, float]:
    """By name, and of all tensors but the loss together ("all")."""
    table, wrong, whole = {}, 0.0, 0.0
    for name, want in exact.items():
        difference = float((got[name].double() - want.double()).norm())
        size = float(want.double().norm())
        table[name] = difference / size if size else difference
        if name != "loss":
            wrong, whole = wrong + difference**2, whole + size**2
    return table | {"all": math.sqrt(wrong / whole) if whole else 0.0}


def _size(item: tuple[str, float]) -> float:
    return item[1]


def _errors(letter: str, side: Side, exact: Mapping[str, Tensor]) -> dict[str, float]:
    """The relative error of the loss, of each gradient, and of all gradients together ("all")."""
    got = side.gradients()
    if got.keys() != exact.keys():
        name = min(got.keys() ^ exact.keys())
        raise BenchError(
            f"{letter} and its network as it is differ in whether {name} has a gradient"
        )
    table = relative_errors(got, exact)
    limit = (LARGEST_FP8 if side.claims()["levers"].get("fp8") else LARGEST)[side.dtype]
    if not max(table["all"], table["loss"]) <= limit:
        raise BenchError(
            f"{letter} is wrong: its loss differs by {table['loss']:.1e} and its gradients by "
            f"{table['all']:.1e} from those of its network as it is; the limit is {limit:g}"
        )
    return table


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What `bench step` found out; `sides` has what each side is and its speed."""

    bench: BenchResult
    sides: dict[str, dict[str, Any]]
    at: float
    check: dict[str, Any]
    num_graphs: int
    memory_bytes: int
    processes: int

    def details(self) -> dict[str, Any]:
        """What is known besides the timing, as plain values for JSON."""
        return {name: value for name, value in vars(self).items() if name != "bench"}


def compare_steps(
    sides: Sequence[Side],
    quads: int = 12,
    block_seconds: float = 2.0,
    warmup_seconds: float = 30.0,
    progress: Progress = SILENT,
    twin: Side | None = None,
) -> list[StepResult]:
    """Check that all sides are right, then time the first one, A, and the others in turns.

    `twin`: A once more in another process, for the control; each side then has its own process.
    """
    a, *others = sides
    for letter, side in zip(LETTERS[1:], others, strict=False):
        if a.step_tokens != side.step_tokens:
            raise BenchError(
                f"a step of A has {a.step_tokens} tokens, one of {letter} {side.step_tokens}: "
                "make them equal"
            )
    checks: list[dict[str, Any]] = [{} for _ in others]
    benches = [
        Bench(
            name="step",
            what=f"a training step of {a.step_tokens:,} tokens at {a.at:.0%} of training",
            a=a,
            b=side,
            label_a=a.variant.label(side.variant),
            label_b=side.variant.label(a.variant),
            synchronize=a.synchronize,
            check=partial(_check, a, side, letter, check),
            twin=twin,
        )
        for side, letter, check in zip(others, LETTERS[1:], checks, strict=False)
    ]
    before = num_graphs(*sides)
    if isinstance(a, TrainingStep) and a.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    settings = (quads, block_seconds, warmup_seconds, progress)
    with clock_log() as start_sample:
        results = run_benches(benches, *settings, Instruments(start_sample=start_sample))
    if num_graphs(*sides) > before:
        raise BenchError("a graph was compiled while steps were timed; nothing was measured")
    resident = [a] if twin is None else [*sides, twin]
    return [
        StepResult(
            bench=result,
            sides={
                letter: each.describe(result.median_seconds(letter))
                for letter, each in (("A", a), ("B", side))
            },
            at=a.at,
            check=check,
            num_graphs=before,
            memory_bytes=sum(each.memory_bytes() for each in resident),
            processes=len(resident),
        )
        for side, check, result in zip(others, checks, results, strict=True)
    ]


def _check(a: Side, b: Side, letter: str, found: dict[str, Any]) -> None:
    found |= require_agreement(a, b, letter)


def num_graphs(*sides: Side) -> int:
    """Graphs compiled so far; sides that share a compiler count once."""
    runs = {id(side.sharing): side.sharing.num_graphs for side in sides if side.sharing}
    return sum(runs.values())
