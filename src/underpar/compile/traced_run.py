"""The runner of training: whole visits as regions, traced by our own tracer.

It computes the network in the forms of `compile/rewrites.py` that fit it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from underpar.compile.regions import CompiledRun, Sharing, another_object, mark_sized
from underpar.compile.rewrites import FOLDED_SCALES, FUSED_SKIPS
from underpar.compile.tracer import Traced, settings_of
from underpar.model.kv_cache import PackedCache
from underpar.model.network import Network, Visited
from underpar.seams import KVCache, Stream, Visit

if TYPE_CHECKING:
    from underpar.model.hnet import HNet


class TracedRun(CompiledRun):
    """For passes over packs of few sizes, as in training. Our own tracer traces them.

    With the rewrite `fused_skips`, what levers do before a visit is part of the visit's region.
    Without it, it is a region of its own; visits with and without skips then share a graph.
    """

    def __init__(self, sharing: Sharing | None = None, rewrites: Collection[str] = ()) -> None:
        """`rewrites`: those of `compile/rewrites.py` that fit the network."""
        super().__init__(sharing)
        self.rewrites = frozenset(rewrites)
        # Of the network in this pass: part of what a graph is found by.
        self._settings: Hashable = None

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A traced function may change no argument: it gets copies, and returns what it made."""
        traced = Traced(function, self._sharing)
        return lambda *args: traced(*args, settings=self._settings)

    def embed(self, network: Network, tokens: Tensor, cache: KVCache) -> Stream:
        """The stream that the first block reads, whose cache does not tell the context."""
        assert isinstance(cache, PackedCache)
        self._sharing.begin_pass()
        self._settings = settings_of(network)
        # One graph serves all numbers of pieces.
        mark_sized(cache.cu)
        self._cache = cache
        x, start, angles = self.region(_embed)(network, tokens, cache)
        # Every attribute of the cache is part of what a graph is found by. Visits do not read the
        # context, so it is taken away: one graph then serves all contexts, and a visit that reads
        # the context after all is an AttributeError instead of a wrong result.
        without_context = copy(cache)
        del without_context.context
        return Stream(x, start, tokens, without_context, angles)

    def cut(self, network: HNet, stream: Stream) -> Stream:
        """The stream of chunks, a region; like that of tokens, its cache tells no context."""
        kind, fields, parts = self.region(_cut)(network, replace(stream, cache=self._cache))
        cache = kind.__new__(kind)
        vars(cache).update(fields)
        mark_sized(cache.cu)
        x, start, chunk_tokens, angles, kept = parts
        return Stream(x, start, chunk_tokens, cache, angles, kept)

    def join(self, network: HNet, stream: Stream, chunks: Stream) -> Stream:
        """The stream of tokens again, from that of chunks: a region."""
        x, start, kept = self.region(_join)(network, stream, chunks)
        return Stream(x, start, stream.tokens, stream.cache, stream.angles, kept)

    def before_block(self, trunk: Visited, visit: Visit, stream: Stream) -> None:
        """Apply what levers do to the stream before a visit: a region, unless the visit does it."""
        if FUSED_SKIPS not in self.rewrites:
            self._advance(_before_block, trunk, visit, stream)

    def block(self, trunk: Visited, visit: Visit, stream: Stream) -> None:
        """Take the stream through a visit of a block: a region."""
        self._advance(self._visit, trunk, visit, stream)

    def attention(self, block: Any, x: Tensor, visit: Visit, stream: Stream) -> Tensor:
        """What the attention branch of a block adds: part of the region of the visit."""
        if FOLDED_SCALES not in self.rewrites:
            return super().attention(block, x, visit, stream)
        weight = {"o.weight": _scaled(block.attn_scale, block.attn.o)}
        added: Tensor = functional_call(block.attn, weight, (block.normed(x), visit, stream))
        return block.branched(added)

    def mlp(self, block: Any, x: Tensor, visit: Visit) -> Tensor:
        """What the MLP branch of a block adds: part of the region of the visit."""
        if FOLDED_SCALES not in self.rewrites:
            return super().mlp(block, x, visit)
        weight = {"down.weight": _scaled(block.mlp_scale, block.mlp.down)}
        added: Tensor = functional_call(block.mlp, weight, (block.normed(x), visit))
        return block.branched(added)

    def _visit(self, trunk: Visited, visit: Visit, stream: Stream) -> tuple[Tensor, dict[str, Any]]:
        stream = _copy_of(stream)
        if FUSED_SKIPS in self.rewrites:
            trunk.before_block(visit, stream)
        # The branches are those of this runner.
        trunk.run_block(visit, stream, self)
        return stream.x, stream.kept

    def _advance(
        self, part: Callable[..., Any], trunk: Visited, visit: Visit, stream: Stream
    ) -> None:
        stream.x = another_object(stream.x)
        stream.x, stream.kept = self.region(part)(trunk, visit, stream)

    def end(
        self, function: Callable[..., Any], network: Network, stream: Stream, *rest: Any
    ) -> Any:
        """What a function makes of the stream after the last block: a region."""
        return super().end(self.region(function), network, stream, *rest)


def _embed(network: Network, tokens: Tensor, cache: KVCache) -> tuple[Any, ...]:
    stream = network.embed(tokens, cache)
    return stream.x, stream.start, stream.angles


def _cut(network: HNet, stream: Stream) -> tuple[type, dict[str, Any], tuple[Any, ...]]:
    chunks = network.cut(stream)
    fields = {name: value for name, value in vars(chunks.cache).items() if name != "context"}
    parts = (chunks.x, chunks.start, chunks.tokens, chunks.angles, chunks.kept)
    return type(chunks.cache), fields, parts


def _join(network: HNet, stream: Stream, chunks: Stream) -> tuple[Any, ...]:
    joined = network.join(stream, chunks)
    return joined.x, joined.start, joined.kept


def _before_block(trunk: Visited, visit: Visit, stream: Stream) -> tuple[Tensor, dict[str, Any]]:
    stream = _copy_of(stream)
    trunk.before_block(visit, stream)
    return stream.x, stream.kept


def _scaled(scale: Tensor, product: nn.Linear) -> Tensor:
    """The weight that gives the outputs of a product multiplied by a scale per channel.

    scale * (W h) = (scale * W) h, as scales of normalizations are folded in Jacob et al. 2017
    (arXiv:1712.05877). In the backward pass no output of the product is read again: the gradient of
    the scale is a sum over the gradient of the weight.
    """
    return scale[:, None] * product.weight


def _copy_of(stream: Stream) -> Stream:
    return replace(stream, kept=tree_map(lambda kept: kept, stream.kept))
