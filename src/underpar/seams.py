"""Every hook a lever may implement, by stage.

A lever is one file in `levers/`: a docstring, a frozen dataclass `Settings`, and a class `Lever`,
made from settings and spec, with one or more of the methods below. A lever whose object is made in
another way has a function `plug(settings, spec)` instead. `build` plugs levers in.
"""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import isfunction, signature
from typing import TYPE_CHECKING, Any, Protocol

from underpar.errors import LeverError
from underpar.schema import require

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import numpy as np
    import numpy.typing as npt
    import torch
    from torch import Tensor, nn

    from underpar.schema import ModelSpec

# The token that begins every document, in every tokenizer here.
BOS_ID = 1


def methods_of(kind: type) -> list[str]:
    """Names of the public methods that a class or protocol itself defines."""
    return [n for n, value in vars(kind).items() if isfunction(value) and not n.startswith("_")]


def check_call(what: str, hook: Callable[..., Any], method: Callable[..., Any]) -> None:
    """Refuse a hook that cannot be called with the arguments of a protocol's method."""
    # The first parameter of the method is its object.
    wanted = list(signature(method).parameters)[1:]
    try:
        signature(hook).bind(*wanted)
    except TypeError:
        name = method.__name__
        raise LeverError(
            f"{what}: its hook {name}{signature(hook)} does not fit its seam, which calls "
            f"{name}({', '.join(wanted)}); see underpar/seams.py"
        ) from None


def check_layers(lever: str, layers: tuple[int, ...], spec: ModelSpec) -> tuple[int, ...]:
    """The same layers, or a RecipeError if the model lacks one or one is named twice."""
    for layer in layers:
        require(
            0 <= layer < spec.num_layers,
            f"levers.{lever}: layer {layer} is not one of 0 to {spec.num_layers - 1}; name others "
            "or set model.num_layers",
        )
    require(len(set(layers)) == len(layers), f"levers.{lever}: {layers} names a layer twice")
    return layers


def check_sites(lever: str, sites: int, plan: Sequence[Visit]) -> None:
    """Refuse a number of `sites` other than the number of repeated visits in the plan."""
    num = 1 + max(visit.site for visit in plan)
    require(sites == num, f"levers.{lever}.sites = {sites}: the plan has {num} repeated visits")


def check_no_return(lever: str, start: int, plan: Sequence[Visit]) -> None:
    """Refuse a plan in which a loop returns to a layer before `start` after a later layer."""
    layers = [visit.layer for visit in plan]
    first = next(i for i, layer in enumerate(layers) if layer >= start)
    early = [layer for layer in layers[first:] if layer < start]
    require(
        not early,
        f"levers.{lever}.start = {start}: a loop returns to layer {min(early, default=0)} "
        "after it; start after the loop",
    )


def take_turns(start: int, *stacks: Sequence[Any]) -> None:
    """From block `start` on, silence attention in even layers and the MLP in odd ones.

    Branches side by side then compute the same as branches one after the other: for `agree_`.
    """
    for blocks in stacks:
        for layer in range(start, len(blocks)):
            block = blocks[layer]
            (block.mlp_scale if layer % 2 else block.attn_scale).zero_()


@dataclass(frozen=True)
class Visit:
    """One application of a block: a step of the plan."""

    slot: int
    """Place in the plan; keys and values are cached by it."""
    layer: int
    repeat: int
    """Earlier visits of the same layer."""
    site: int
    """Place among the repeated visits; -1 on a first visit."""
    decoder: int
    """Place in the second half of the plan; -1 in the first."""


@dataclass
class Stream:
    """What flows through the blocks in one forward pass."""

    x: Tensor  # (N, dim), what the next block reads
    start: Tensor  # (N, dim), what the first block read
    tokens: Tensor  # (N,)
    cache: KVCache
    angles: tuple[Tensor, Tensor]  # cosines and sines of the rotary positions
    kept: dict[str, Any] = field(default_factory=dict)
    """What levers carry from one visit to later ones, each under its own name."""


class LeverModule(Protocol):
    """The module that implements a lever; its name is its key in recipes, code and docs."""

    STAGE: str
    Settings: type

    # One of these two makes the object whose methods are the hooks:
    # - Lever, a class whose arguments are the settings and the ModelSpec,
    # - plug(settings, spec), a function that returns the object.
    #
    # Optional: NEEDS, names of levers without which this one does nothing; NEUTRAL, the settings
    # that equal the stack without it, for a lever that has no parameters; TINY, a tuple of settings
    # for the contract tests, where the defaults would not show in a small model or not be all;
    # ENGINE, the module that scores with it, where that is not the usual one.


class TextTransform(Protocol):
    """Data stage, seam `text`: a bijection of text that runs before the tokenizer.

    Words are transformed one by one: forward(x + y) == forward(x) + forward(y) if y begins with a
    space.
    """

    symbols: str
    """Code points that the tokenizer keeps as pieces of their own, in the order of their ids."""

    def forward(self, text: str) -> str:
        """The text to tokenize."""

    def inverse(self, text: str) -> str:
        """The source text; a DataError if `forward` never gives this `text`."""

    def source_bytes(self, text: str) -> npt.NDArray[np.int64]:
        """The byte law: source bytes behind each code point of a transformed text."""


class KVCache(Protocol):
    """Earlier tokens: in the same flat pack, or in a cache of lanes (`model/kv_cache.py`)."""

    context: int
    """Tokens at which a piece is cut. Embedding may read it; visits may not, as one compiled graph
    of a visit serves all contexts."""
    positions: Tensor
    """(N,) place of each token in its piece."""

    def attend(self, slot: int, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        """Causal attention of q (N, H, D) over the keys and values (N, K, D) of this slot so far.

        With a `window` above 0 a token sees that many tokens before it, and itself.
        """

    def previous(self, name: str, x: Tensor) -> Tensor:
        """x (N, ...) of the token before each, zeros if there is none; `name` tells callers apart.

        The token before may belong to another document: mask it if the token is BOS_ID.
        """


class Branches(Protocol):
    """The parts of a block, for a lever that puts them together in another way (`wire`)."""

    def mix(self, x: Tensor, stream: Stream) -> Tensor:
        """What the block starts from, given the stream x (N, dim)."""

    def attend(self, x: Tensor, visit: Visit, stream: Stream) -> Tensor:
        """What attention adds (N, dim), reading x."""

    def mlp_branch(self, x: Tensor, visit: Visit) -> Tensor:
        """What the MLP adds (N, dim), reading x."""


class ModelHook:
    """Model stage, seams at which every lever that has the method acts, in the order of the table.

    A lever is an nn.Module with any of the methods of ModelHook, ModelPlace and ModelLever. Nothing
    derives from these classes: names and arguments of a lever's methods are checked against them,
    and types of hooks are taken from them (`model/hooks.py`).

    Hooks are applied to each token on its own. Tensors are flat, tokens first, and may be half
    precision: cast your parameters to theirs. The same hooks run in training, scoring and
    stepping. A hook that looks back asks `stream.cache`.
    """

    def progress(self, p: float) -> None:
        """Training is at p (0 to 1) of its budget; scoring is always at 1."""

    def order(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        """Change the order in which layers are visited; every layer stays in it."""

    def embed(self, x: Tensor, tokens: Tensor, cache: KVCache) -> Tensor:
        """Change the embedded tokens (N, dim) before they are normed."""

    def stem(self, x: Tensor, tokens: Tensor, cache: KVCache) -> Tensor:
        """Change the normed embeddings (N, dim), which become the stream and its start."""

    def before(self, visit: Visit, stream: Stream) -> None:
        """Change the stream before a visit."""

    def mix(self, layer: int, x: Tensor, stream: Stream) -> Tensor:
        """Change what the block starts from (N, dim)."""

    def normed(self, layer: int, x: Tensor) -> Tensor:
        """Change the normed input (N, dim) of attention and of the MLP."""

    def qkv(
        self, visit: Visit, q: Tensor, k: Tensor, v: Tensor, stream: Stream
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Change queries (N, H, D), keys and values (N, K, D) after norm and rotation."""

    def reach(self, layer: int) -> int:
        """Tokens before its own that a layer sees; 0 for all. Asked once, at the start."""

    def attn_out(self, layer: int, y: Tensor, x: Tensor, v: Tensor) -> Tensor:
        """Change the heads' output y (N, H, D), given attention's input x (N, dim) and values."""

    def mlp_out(self, layer: int, y: Tensor, x: Tensor) -> Tensor:
        """Change the MLP's output y (N, dim), given its input x (N, dim)."""

    def branch(self, layer: int, y: Tensor) -> Tensor:
        """Change what attention or the MLP is about to add to the stream."""

    def adjust(self, site: str, visit: Visit | None, y: Tensor, x: Tensor) -> Tensor:
        """Change what a product made of x (N, dim): y is that of site "q", "k" or "v" before norm
        and rotation, "o" or "mlp" before its scale, or "head" (visit None) before the cap.

        At "o" and "mlp" x is what the branch read, not what its last product read.
        """

    def after(self, visit: Visit, x_in: Tensor, stream: Stream) -> None:
        """Change the stream after a visit; x_in (N, dim) is what it was just before it."""

    def finish(self, stream: Stream) -> None:
        """Change the stream after the last visit."""

    def check(self, plan: Sequence[Visit]) -> None:
        """Refuse the visits of scoring, with a RecipeError, where the settings do not fit them."""


class ModelPlace:
    """Model stage, places for one lever each: it replaces what the baseline does there."""

    def frequencies(self, context: int) -> Tensor:
        """Rotary frequencies (dims / 2,): the first `dims` channels of a head are rotated."""

    def attend(
        self, visit: Visit, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, window: int
    ) -> Tensor:
        """The heads' output (N, H, D), in place of one call of `cache.attend` in the visit's slot.

        A lever that calls more than once takes slots below 0 for the others.
        """

    def activate(self, x: Tensor) -> Tensor:
        """The MLP's nonlinearity, in place of the squared ReLU."""

    def cap(self, logits: Tensor, fused: bool) -> Tensor:
        """Cap the raw logits (N, V), in place of the constant soft cap; `fused` as for soft_cap."""


class ModelLever(ModelHook, ModelPlace):
    """Model stage: what else a lever may define; asked per layer, or outside of forward passes."""

    def wires(self, layer: int) -> bool:
        """Whether `wire` replaces the block's own order of attention and MLP."""

    def wire(self, block: Branches, visit: Visit, stream: Stream) -> None:
        """Visit a block in another way than attention first, MLP second."""

    def neutral_(self) -> None:
        """Set the parameters with which the model equals the one without this lever."""

    def agree_(self, blocks: Sequence[Any], plain: Sequence[Any]) -> None:
        """Change blocks of this stack and of the plain one so that both compute the same.

        For a lever that none of its own parameters makes neutral.
        """

    def dead(self, plan: Sequence[Visit]) -> dict[str, Tensor]:
        """Parameter -> mask of elements that this plan never uses, so no gradient reaches them."""


class Averager(Protocol):
    """Train stage, seam `average`: keeps an average of the weights beside the live ones."""

    def start(self, weights: Mapping[str, Tensor]) -> None:
        """Take the initial weights."""

    def update(self, weights: Mapping[str, Tensor], step: int, lr_scale: float) -> None:
        """Fold in the weights after `step` steps; `lr_scale` (0 to 1) was the rates' schedule."""

    def average(self) -> dict[str, Tensor]:
        """The average, by weight name; what packing gets."""

    def state(self) -> dict[str, Tensor]:
        """What is checkpointed, by names of its own."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Put a checkpointed state back."""


class Penalty(Protocol):
    """Train stage, seam `penalty`: a term of the loss that reads the weights alone."""

    def penalty(self, model: nn.Module, step: int, p: float) -> Tensor | None:
        """What is added to the loss after `step` steps, at p (0 to 1) of the budget; None: nothing.

        In nats per token, once for the whole batch.
        """


class Weigher(Protocol):
    """Train stage, seam `weigh`: weights of the tokens of a micro-batch in the mean of its loss."""

    def weigh(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The weight (N,) of each target, given logits (N, V) without gradient; never all 0.

        The loss is divided by the sum of the weights. Weights of several levers are multiplied.
        """


class MoreTargets(Protocol):
    """Train stage, seam `more_targets`: what else the logits of a token are trained to predict."""

    def begin(self, pieces: Sequence[bytes], device: torch.device) -> None:
        """Called once before the first step, with the text of each token (`Tokenizer.pieces`)."""

    def progress(self, p: float) -> None:
        """Called before each step, at p (0 to 1) of the budget.

        A compiled loss reads tensors anew and numbers once: keep what changes in tensors.
        """

    def more_targets(self, targets: Tensor, positions: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
        """Pairs of other targets (N,) and their weights (N,), beside weight 1 for `targets`.

        `positions` (N,) are the places of the tokens in their pieces. The loss is divided by the
        sum of all weights, and the loss that is shown is that of `targets` alone.
        """


class Initializer(Protocol):
    """Train stage, seam `initialize`: other weights to start from."""

    def initialize(self, model: nn.Module) -> None:
        """Change the initial weights once, before the first step, with torch's global generator."""


class Pusher(Protocol):
    """Train stage, seam `push`: moves the weights before the passes of a step.

    The optimizer steps from where they were moved to.
    """

    def start(self, weights: Mapping[str, Tensor]) -> None:
        """Take the initial weights."""

    def push(self, weights: Mapping[str, Tensor], p: float, lr_scale: float) -> None:
        """Move the weights in place, the same on every rank; `lr_scale` is as in Averager."""

    def see(self, weights: Mapping[str, Tensor]) -> None:
        """Take the weights after the step."""

    def state(self) -> dict[str, Tensor]:
        """What is checkpointed, by names of its own."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Put a checkpointed state back."""


class Equipper(Protocol):
    """Train stage, seam `equip`: other ways to compute parts of the network, in training alone.

    A module computes them while its mode is `training`; scoring and validation change the mode.
    """

    def equip(self, model: Any) -> None:
        """Replace functions of the live network, on its device, once; the weights stay."""

    def begin_step(self) -> None:
        """Called before the passes of each step."""

    def state(self) -> dict[str, Tensor]:
        """What is checkpointed, by names of its own."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Put a checkpointed state back."""


class FakeQuantizer(Protocol):
    """Train stage, seam `fake_quantize`: other weights for the passes of a step."""

    def fake_quantize(
        self, weights: Mapping[str, Tensor], p: float
    ) -> AbstractContextManager[None]:
        """Inside, the weights are others; afterwards they are what they were, bit for bit.

        They are changed in place, the same on every rank: gradients are taken at the fake-quantized
        weights and applied to the true ones. Asked in every step; p (0 to 1) is that of the budget.
        """


class Adapter(Protocol):
    """Infer stage, seam `parameters`: learns from tokens that were already priced.

    One backward pass serves all adapters: each finds the gradients of the chunk's mean price.
    """

    epochs: int
    """Passes over each chunk, with one update after each."""

    def attach(self, model: Any) -> None:
        """Add what the adapter needs to the model, once: hooks, and parameters under `levers`."""

    def foresee(self, num_chunks: int) -> bool:
        """Called once before the first chunk, with the number of chunks of the text; True if the
        adapter uses it, as a score pays for what a decoder must be told."""

    def parameters(self, named: Mapping[str, Tensor]) -> list[Tensor]:
        """The tensors that this adapter changes, out of those that no adapter before it took."""

    def state(self) -> dict[str, Tensor]:
        """What it remembers beside the model's tensors, by names of its own, to go on later."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Put a state back."""

    def update(self, parameters: list[Tensor]) -> None:
        """One step from the gradients on `parameters`."""


class Phases(Protocol):
    """Infer stage, seam `boundaries`: passes over all text priced so far, at fixed documents."""

    def boundaries(self, num_documents: int) -> tuple[int, ...]:
        """Numbers of documents, rising, after which `train` is called with those documents."""

    def train(
        self, model: Any, documents: Sequence[npt.NDArray[Any]], context: int, runtime: Any
    ) -> int:
        """Change the weights, the same on every rank; returns the number of steps.

        Documents are their tokens with BOS first, all of them priced to the end.
        """


class Proposer(Protocol):
    """Infer stage, seam `propose`: an expert that guesses tokens (`Expert` in infer/experts.py)."""

    def open(self, num_histories: int, num_targets: int) -> None:
        """Forget everything; make room for so many targets over all histories."""

    def propose(self, history: int, targets: npt.NDArray[np.int64]) -> Any:
        """The guesses for the next targets (n,) of a history, made from targets before them."""

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """What a resumed scoring needs, by names of its own."""

    def load(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Put a state back."""


class DocumentAdapters(Protocol):
    """Infer stage, seam `lora`: adapters per document, which a scoring engine of their own uses."""

    engine: str
    """The module whose DocumentScorer scores with them."""

    @property
    def lora(self) -> Any:
        """Settings of the adapters (`LoraSettings` in infer/lora.py)."""


class TokenClasses(Protocol):
    """Infer stage, seam `classes`: a scale and a bias for the logits of each class of tokens.

    Packing fits both, `settings.scales` and `settings.biases`, and writes them into the artifact's
    recipe; a score can have no others.
    """

    settings: Any
    classes: Tensor
    """(V,) class of each token."""

    def attach(self, model: Any) -> None:
        """Apply scales and biases to the model's logits."""


# Stage -> seam, an attribute by which the lever is found -> what a lever with it must have.
STAGE_SEAMS: dict[str, dict[str, type]] = {
    "data": {"inverse": TextTransform},
    "train": {
        "average": Averager,
        "penalty": Penalty,
        "weigh": Weigher,
        "more_targets": MoreTargets,
        "initialize": Initializer,
        "push": Pusher,
        "equip": Equipper,
        "fake_quantize": FakeQuantizer,
    },
    "infer": {
        "parameters": Adapter,
        "boundaries": Phases,
        "propose": Proposer,
        "lora": DocumentAdapters,
        "classes": TokenClasses,
    },
}


def check_stage(name: str, stage: str, lever: Any) -> None:
    """Refuse a lever without a seam of its stage, or with methods that a seam cannot call.

    Levers of the stage "model" are checked when the model is built (`model/hooks.py`).
    """
    seams = STAGE_SEAMS.get(stage)
    if seams is None:
        return
    has = [seam for seam in seams if hasattr(lever, seam)]
    if not has:
        raise LeverError(
            f"lever {name!r} has no seam of the stage {stage!r}; define one of {', '.join(seams)}"
        )
    for seam in has:
        for method in methods_of(seams[seam]):
            if not hasattr(lever, method):
                raise LeverError(f"lever {name!r}: the seam {seam!r} needs a method {method!r} too")
            check_call(f"lever {name!r}", getattr(lever, method), getattr(seams[seam], method))
