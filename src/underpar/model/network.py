"""What training, scoring and compiling know of a network, and how its forward pass is run.

A network embeds tokens into a stream, takes the stream through the visits of its plan, and reads
logits from what comes out. `GPT` is one, `HNet` another; each is a subclass of `Network`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from underpar.kernels.capped import soft_cap
from underpar.model.hooks import Hooks
from underpar.schema import ModelSpec
from underpar.seams import KVCache, Stream, Visit

if TYPE_CHECKING:
    from underpar.model.gpt import Trunk
    from underpar.model.hnet import HNet

# Rows of logits made at a time: all logits of a long text take gigabytes.
ROWS = 8192


def products(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
    """Inside, matrix products run in `dtype`; fp32 leaves everything as it is."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)


class Visited(Protocol):
    """What a stream visits: a network, or one of its trunks."""

    def before_block(self, visit: Visit, stream: Stream) -> None:
        """Prepare the stream for a visit."""

    def run_block(self, visit: Visit, stream: Stream, run: Eager = ...) -> None:
        """Take the stream through one visit."""


class Eager:
    """Runs each part of a forward pass as it is written; a compiler overrides what it compiles."""

    fused = False
    """Whether the head and the loss use the formulas made for compilers (`kernels/capped.py`)."""
    rewrites: frozenset[str] = frozenset()
    """Names of the other forms that it computes the network in (`compile/rewrites.py`)."""

    def embed(self, network: Network, tokens: Tensor, cache: KVCache) -> Stream:
        """The stream that the first block reads. Every forward pass begins here."""
        return network.embed(tokens, cache)

    def cut(self, network: HNet, stream: Stream) -> Stream:
        """The stream of chunks that the main network of an H-Net reads."""
        return network.cut(stream)

    def join(self, network: HNet, stream: Stream, chunks: Stream) -> Stream:
        """The stream that the decoder of an H-Net reads."""
        return network.join(stream, chunks)

    def before_block(self, trunk: Visited, visit: Visit, stream: Stream) -> None:
        """Apply what levers do to the stream before a visit."""
        trunk.before_block(visit, stream)

    def block(self, trunk: Visited, visit: Visit, stream: Stream) -> None:
        """Take the stream through a block, and apply what levers do after it."""
        trunk.run_block(visit, stream, self)

    def attention(self, block: Any, x: Tensor, visit: Visit, stream: Stream) -> Tensor:
        """What the attention branch of a block adds (N, dim), reading x (N, dim)."""
        y: Tensor = block.attend(x, visit, stream)
        return y

    def mlp(self, block: Any, x: Tensor, visit: Visit) -> Tensor:
        """What the MLP branch of a block adds (N, dim), reading x (N, dim)."""
        y: Tensor = block.mlp_branch(x, visit)
        return y

    def end(
        self, function: Callable[..., Any], network: Network, stream: Stream, *rest: Any
    ) -> Any:
        """What a function makes of the stream after the last block, such as a loss."""
        return function(network, stream, *rest)


EAGER = Eager()


class Network(nn.Module, ABC):
    """Tokens to logits. Shapes: N tokens, V vocabulary."""

    spec: ModelSpec
    plan: tuple[Visit, ...]
    """The visits of one forward pass, in order."""
    main: Trunk
    """The blocks that `spec` describes."""
    hooks: Hooks
    """What levers do in the forward pass. Adapters add theirs with `hooks.change`."""
    head_name = "embedding.weight"
    """The weight that makes the logits."""
    table_name = "embedding"
    """The module that looks tokens up; if the head is tied, of the same weight."""

    @property
    def trunks(self) -> tuple[Trunk, ...]:
        """Its runs of blocks, in the order of the forward pass."""
        return ()

    @property
    def variant(self) -> Hashable:
        """What graphs of a forward pass depend on besides shapes, at the present progress."""
        return self.plan

    @property
    def flops_outside(self) -> float:
        """Operations per token, in the forward pass, of the products outside of blocks."""
        return 2.0 * self.spec.dim * self.spec.vocab_size

    def chunk_starts(self, tokens: Tensor, cache: KVCache) -> Tensor | None:
        """Where chunks of tokens (N,) begin, in a network that reads chunks; else None."""
        return None

    def auxiliary_loss(self, stream: Stream) -> Tensor | None:
        """What training adds to the loss, from the stream after the last block; None: nothing."""
        return None

    def watch(self, stream: Stream) -> None:
        """Training tells the stream after the last block of each pass, for `figures`."""

    def figures(self) -> dict[str, float]:
        """What a line of metrics says of the last pass."""
        return {}

    @abstractmethod
    def set_progress(self, p: float) -> None:
        """Say how far training is, from 0 to 1; the plan may change."""

    @abstractmethod
    def embed(self, tokens: Tensor, cache: KVCache) -> Stream:
        """The stream that the first block reads, from tokens (N,) that continue the cache."""

    @abstractmethod
    def run_blocks(self, tokens: Tensor, cache: KVCache, run: Eager = EAGER) -> Stream:
        """The stream after the last block: the one loop over the plan. `run` runs each part."""

    @abstractmethod
    def finish(self, stream: Stream) -> Tensor:
        """What the head reads (N, dim), from the stream after the last block."""

    @abstractmethod
    def head(self, x: Tensor, fused: bool = False) -> Tensor:
        """Logits (N, V) of hidden states (N, dim); each row is computed on its own.

        `fused`: with the formulas made for compilers, which round differently.
        """

    def cap(self, logits: Tensor, fused: bool = False) -> Tensor:
        """Bound the raw logits (N, V); `fused`: with the formula made for compilers."""
        lever = self.hooks.cap
        if lever is not None:
            return lever(logits, fused)
        return soft_cap(logits, self.spec.softcap, fused=fused)

    def hidden(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """What the head reads (N, dim), after each of tokens (N,)."""
        return self.finish(self.run_blocks(tokens, cache))

    def forward(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """Logits (N, V) after each of tokens (N,), which continue what `cache` holds."""
        return self.head(self.hidden(tokens, cache))


@contextmanager
def as_scored(network: Network) -> Iterator[None]:
    """Inside, modes and plan are those of scoring; afterwards they are what they were."""
    modes = [(module, module.training) for module in network.modules()]
    plans = [(module, module.plan) for module, _ in modes if hasattr(module, "plan")]
    network.eval()
    network.set_progress(1.0)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        # The plans alone: set_progress is called again before another plan is made.
        for module, plan in plans:
            module.plan = plan
