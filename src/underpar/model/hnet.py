"""H-Net: a network that reads bytes, and a main network in it that reads chunks of them.

    bytes -> encoder -> cut into chunks -> up -> main network -> down -> one vector per byte,
    added to what the encoder made of it -> decoder -> head

This is the hierarchy of arXiv:2507.07955: with chunks of a fixed stride, as in Parameter Golf PR
1615 (M1), or with learned ones (M2), which model/router.py cuts. Encoder, main network and decoder
are trunks of the baseline's blocks, each with levers of its own.

No byte sees a later one. A chunk is represented by its first byte, and the bytes of a chunk get
what the main network made of chunks up to their own: what reaches a byte comes from bytes up to the
first of its chunk, and through the skip from the byte itself. A chunk that took in more than its
first byte (its last, or a mean) would have to be given to the bytes of the next chunk instead.

Shapes: N bytes, C chunks, D0 the width at byte level, dim that of the main network.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from underpar.errors import RecipeError
from underpar.model.chunks import Chunks, cut
from underpar.model.gpt import Trunk, init_blocks, norm
from underpar.model.network import EAGER, Eager, Network
from underpar.model.router import (
    Router,
    Stride,
    boundaries_of,
    ratio_loss,
    straight_through,
)
from underpar.schema import HNetPart, ModelSpec
from underpar.seams import KVCache, Stream, Visit

# A batch has room for a multiple of this many chunks.
ROOM = 128
# Among what a stream keeps: the probability (N,) that a chunk begins at each byte.
ROUTER = "router"
# Hooks that read what the byte level alone has: bytes one by one.
BYTE_HOOKS = ("embed", "stem")

Levers = Mapping[str, nn.Module]


class HNet(Network):
    """Byte encoder -> chunks -> main network -> bytes again, with a skip -> byte decoder."""

    head_name = "lm_head.weight"
    table_name = "byte_embedding"

    def __init__(
        self,
        spec: ModelSpec,
        part: HNetPart,
        levers: Levers,
        outer_levers: Callable[[ModelSpec], Levers],
    ) -> None:
        """`levers` are those of the main network; `outer_levers` makes those of byte blocks."""
        super().__init__()
        self.spec, self.part = spec, part
        for name, lever in levers.items():
            if any(hasattr(lever, hook) for hook in BYTE_HOOKS):
                raise RecipeError(
                    f"levers.{name}: reads tokens one by one, and the main network of an H-Net "
                    f"reads chunks; name it under [hnet.levers.{name}]"
                )
        encoder, decoder = (
            part.spec_of(spec, num) for num in (part.encoder_layers, part.decoder_layers)
        )
        after = outer_levers(decoder)
        # The decoder continues a stream that the encoder began.
        after = {n: v for n, v in after.items() if not any(hasattr(v, h) for h in BYTE_HOOKS)}
        self.byte_embedding = nn.Embedding(spec.vocab_size, part.dim)
        self.encoder = Stage(encoder, outer_levers(encoder))
        self.up = nn.Linear(part.dim, spec.dim, bias=False)
        self.main = Stage(spec, levers, part.bytes_per_chunk)
        # Also those of the head.
        self.hooks = self.main.hooks
        self.down = nn.Linear(spec.dim, part.dim, bias=False)
        self.decoder = Stage(decoder, after)
        self.router = Stride(part.stride) if part.stride else Router(part.dim)
        learned_skip = part.skip and not part.stride
        self.residual = nn.Linear(part.dim, part.dim, bias=False) if learned_skip else None
        self.lm_head = nn.Linear(part.dim, spec.vocab_size, bias=False)
        # Not a tensor: that would be part of what graphs are found by.
        self._seen: list[Tensor] = []
        self.set_progress(1.0)
        # Shapes alone need no numbers.
        if not self.byte_embedding.weight.is_meta:
            self.init_weights()

    def init_weights(self) -> None:
        """A head of zeros: the first loss is ln V, whatever the rest is."""
        nn.init.normal_(self.byte_embedding.weight, std=self.spec.embed_std)
        nn.init.zeros_(self.lm_head.weight)
        if self.residual is not None:
            nn.init.zeros_(self.residual.weight)
        if self.part.zero_init:
            init_blocks(self)

    @property
    def trunks(self) -> tuple[Trunk, ...]:
        """Encoder, main network and decoder."""
        return (self.encoder, self.main, self.decoder)

    @property
    def levers(self) -> nn.ModuleDict:
        """Those of the main network."""
        return self.main.levers

    @property
    def variant(self) -> Hashable:
        """Plan, and room for chunks."""
        return self.plan, self.room

    @property
    def flops_outside(self) -> float:
        """Operations per byte, in the forward pass, of the products outside of blocks."""
        between = (self.up.weight.numel() + self.down.weight.numel()) / self.part.bytes_per_chunk
        of_bytes = (*self.router.parameters(), self.lm_head.weight)
        if self.residual is not None:
            of_bytes += (self.residual.weight,)
        return 2.0 * (between + sum(weight.numel() for weight in of_bytes))

    def set_progress(self, p: float) -> None:
        """Say how far training is, from 0 to 1; the plan is that of all trunks."""
        # Shares of the bytes of a batch for which a training pass has chunks.
        settled = self.part.stride or p >= self.part.settled
        self.room = (1 + self.part.spare_room) / self.part.bytes_per_chunk if settled else 0.5
        self.plan: tuple[Visit, ...] = ()
        for trunk in self.trunks:
            trunk.first_slot = len(self.plan)
            trunk.set_progress(p)
            self.plan += trunk.plan

    def run_blocks(self, tokens: Tensor, cache: KVCache, run: Eager = EAGER) -> Stream:
        """The stream after the decoder's last block."""
        stream = self.encoder.visit_blocks(run.embed(self, tokens, cache), run)
        chunks = self.main.visit_blocks(run.cut(self, stream), run)
        return self.decoder.visit_blocks(run.join(self, stream, chunks), run)

    def embed(self, tokens: Tensor, cache: KVCache) -> Stream:
        """The stream that the encoder's first block reads."""
        x = self.byte_embedding(tokens)
        for hook in self.encoder.hooks.embed:
            x = hook(x, tokens, cache)
        return self.encoder.begin(norm(x), tokens, cache)

    def cut(self, stream: Stream) -> Stream:
        """The stream of chunks that the main network reads, from what the encoder made."""
        x, cache = self.encoder.close(replace(stream)), stream.cache
        p = self.router(x, cache)
        cache_of_chunks = cut(cache, boundaries_of(p), self._room(len(x)))
        # Before the projection: the same as after it, and it costs a fraction.
        coarse = self.up(cache_of_chunks.gather(x))
        tokens = cache_of_chunks.gather(stream.tokens)
        chunks = self.main.begin(coarse, tokens, cache_of_chunks)
        chunks.kept[ROUTER] = p
        return chunks

    def join(self, stream: Stream, chunks: Stream) -> Stream:
        """The stream that the decoder's first block reads, from both of `cut`."""
        skip = self.encoder.close(replace(stream))
        cache: Chunks = chunks.cache  # type: ignore[assignment]
        p = chunks.kept[ROUTER]
        # In the precision of the stream of bytes. Gradients of many bytes add up in each chunk, and
        # a GPU adds numbers of half precision one by one.
        x = self.down(self.main.close(replace(chunks))).to(skip.dtype)
        if self.part.stride:
            x = cache.spread(x)
        else:
            x = cache.spread(cache.smooth(x, cache.gather(p)))
            x = straight_through(p)[:, None].to(x.dtype) * x
        # All of the skip is there at the start of training; the reference begins with none of it.
        if self.part.skip:
            x = x + skip
        if self.residual is not None:
            x = x + self.residual(skip)
        start = skip if self.part.skip else x
        return Stream(x, start, stream.tokens, stream.cache, stream.angles, {ROUTER: p})

    @torch.no_grad()
    def chunk_starts(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """Where chunks begin among bytes (N,)."""
        stream = self.encoder.visit_blocks(self.embed(tokens, cache))
        return boundaries_of(self.router(self.encoder.close(stream), cache))

    def auxiliary_loss(self, stream: Stream) -> Tensor | None:
        """The ratio loss of learned chunks."""
        if self.part.stride:
            return None
        return self.part.ratio_weight * ratio_loss(stream.kept[ROUTER], self.part.target_bytes)

    def watch(self, stream: Stream) -> None:
        """Keep the probabilities of boundaries."""
        self._seen[:] = [stream.kept[ROUTER].detach()]

    def figures(self) -> dict[str, float]:
        """Bytes per chunk, and the share of chunks that did not fit in the batch."""
        [p] = self._seen
        num_chunks = int(boundaries_of(p).sum())
        lost = max(0, num_chunks - self._room(len(p)))
        return {"bytes_per_chunk": len(p) / num_chunks, "lost_chunks": lost / num_chunks}

    def _room(self, num_bytes: int) -> int:
        """Chunks that a batch has room for; 0: exactly as many as there are."""
        if not self.training:
            # With a stride their number follows from places alone. Learned, it must not show.
            return 0 if self.part.stride else num_bytes
        return min(num_bytes, -(-int(self.room * num_bytes) // ROOM) * ROOM)

    def finish(self, stream: Stream) -> Tensor:
        """What the head reads (N, D0), from the stream after the decoder."""
        return norm(self.decoder.close(stream))

    def head(self, x: Tensor, fused: bool = False) -> Tensor:
        """Logits (N, V) of hidden states (N, D0)."""
        logits = F.linear(x, self.lm_head.weight)
        for hook in self.hooks.adjust:
            logits = hook("head", None, logits, x)
        return self.cap(logits, fused)


class Stage(Trunk):
    """One of the three trunks."""

    def __init__(self, spec: ModelSpec, levers: Levers, tokens_per_position: float = 1.0) -> None:
        super().__init__()
        self.tokens_per_position = tokens_per_position
        self._build(spec, levers)
