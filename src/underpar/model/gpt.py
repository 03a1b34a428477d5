"""The baseline transformer, from embedding to logits, top to bottom.

Shapes: N tokens (a flat pack of documents, or one token of each lane when stepping), H heads,
K key heads, D head channels, V vocabulary. Loops over `hooks` are where levers act; the baseline
has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from underpar.model.hooks import Hooks
from underpar.model.network import EAGER, Eager, Network
from underpar.recipe import ModelSpec
from underpar.seams import KVCache, Stream, Visit


class Trunk(nn.Module):
    """Blocks in the order of a plan, and the levers that act on them."""

    frequencies: Tensor
    plan: tuple[Visit, ...]
    tokens_per_position = 1.0
    """Tokens per position of the stream; more where the stream is one of chunks."""
    first_slot = 0
    """Slot of the first visit: trunks that read the same cache have slots of their own."""

    def _build(self, spec: ModelSpec, levers: Mapping[str, nn.Module] | None) -> None:
        """Make the blocks. Not __init__, so that an embedding may come before them."""
        self.spec = spec
        self.hooks = hooks = Hooks(levers or {})
        self.blocks = nn.ModuleList(Block(spec, layer, hooks) for layer in range(spec.num_layers))
        self.levers = nn.ModuleDict(dict(levers or {}))
        frequencies = frequencies_of(spec.head_dim, spec.rope_base)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.set_progress(1.0)
        for hook in hooks.check:
            hook(self.plan)

    def set_progress(self, p: float) -> None:
        """Say how far training is, from 0 to 1: levers may visit the blocks in another order."""
        order = tuple(range(self.spec.num_layers))
        for tell_progress in self.hooks.progress:
            tell_progress(p)
        for reorder in self.hooks.order:
            order = reorder(order)
        self.plan = make_plan(order, self.first_slot)

    def begin(self, x: Tensor, tokens: Tensor, cache: KVCache) -> Stream:
        """The stream that the first block reads, from x (N, dim)."""
        for hook in self.hooks.stem:
            x = hook(x, tokens, cache)
        lever = self.hooks.frequencies
        frequencies = self.frequencies if lever is None else lever(cache.context)
        return Stream(x, x, tokens, cache, angles_of(cache.positions, frequencies))

    def visit_blocks(self, stream: Stream, run: Eager = EAGER) -> Stream:
        """Take the stream through the blocks, in the order of the plan.

        The only loop over blocks. A compiler passes its own `run`, which compiles the parts.
        """
        # Loops, skips and lanes change the plan or the hooks, never this loop.
        for visit in self.plan:
            run.before_block(self, visit, stream)
            run.block(self, visit, stream)
        return stream

    def before_block(self, visit: Visit, stream: Stream) -> None:
        """Apply what levers do before a visit."""
        for hook in self.hooks.before:
            hook(visit, stream)

    def run_block(self, visit: Visit, stream: Stream, run: Eager = EAGER) -> None:
        """Take the stream through one block, then apply what levers do after it."""
        x_in = stream.x
        self.blocks[visit.layer](visit, stream, run)
        for hook in self.hooks.after:
            hook(visit, x_in, stream)

    def close(self, stream: Stream) -> Tensor:
        """What the blocks made of the stream (N, dim)."""
        for hook in self.hooks.finish:
            hook(stream)
        return stream.x


class GPT(Trunk, Network):
    """Embed -> blocks in the order of the plan -> tied head with a soft cap."""

    head_name = "embedding.weight"

    def __init__(self, spec: ModelSpec, levers: Mapping[str, nn.Module] | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(spec.vocab_size, spec.dim)
        self._build(spec, levers)
        # Shapes alone need no numbers.
        if not self.embedding.weight.is_meta:
            nn.init.normal_(self.embedding.weight, std=spec.embed_std)
            init_blocks(self)

    @property
    def main(self) -> Trunk:  # type: ignore[override]
        """The blocks, which are those of the network itself."""
        return self

    @property
    def trunks(self) -> tuple[Trunk, ...]:
        """The same."""
        return (self,)

    def run_blocks(self, tokens: Tensor, cache: KVCache, run: Eager = EAGER) -> Stream:
        """The stream after the last block."""
        return self.visit_blocks(run.embed(self, tokens, cache), run)

    def embed(self, tokens: Tensor, cache: KVCache) -> Stream:
        """The stream that the first block reads."""
        x = _autocast(self.embedding(tokens))
        for hook in self.hooks.embed:
            x = hook(x, tokens, cache)
        return self.begin(norm(x), tokens, cache)

    def finish(self, stream: Stream) -> Tensor:
        """What the head reads (N, dim), from the stream after the last block."""
        return norm(self.close(stream))

    def head(self, x: Tensor, fused: bool = False) -> Tensor:
        """Logits (N, V) of hidden states (N, dim); each row is computed on its own."""
        logits = F.linear(x, self.embedding.weight)
        for hook in self.hooks.adjust:
            logits = hook("head", None, logits, x)
        return self.cap(logits, fused)


def init_blocks(model: nn.Module) -> None:
    """Zero output projections: every block starts as the identity (PR 2014)."""
    for module in model.modules():
        if isinstance(module, Attention):
            for projection in (module.q, module.k, module.v):
                orthogonal_(projection.weight)
            nn.init.zeros_(module.o.weight)
        elif isinstance(module, MLP):
            orthogonal_(module.up.weight)
            nn.init.zeros_(module.down.weight)


class Block(nn.Module):
    """Pre-norm attention and MLP, each with a learned scale per channel."""

    def __init__(self, spec: ModelSpec, layer: int, hooks: Hooks) -> None:
        super().__init__()
        self.layer = layer
        self.hooks = hooks
        self.wiring = hooks.wiring(layer)
        self.attn = Attention(spec, layer, hooks)
        self.mlp = MLP(spec, layer, hooks)
        self.attn_scale = nn.Parameter(torch.ones(spec.dim))
        self.mlp_scale = nn.Parameter(torch.ones(spec.dim))

    def forward(self, visit: Visit, stream: Stream, run: Eager = EAGER) -> None:
        """Take the stream through this block: attention, then the MLP, unless a lever rewires it.

        `run` runs the two branches.
        """
        if self.wiring is not None:
            self.wiring(RunBranches(self, run), visit, stream)
            return
        x = self.mix(stream.x, stream)
        x = x + run.attention(self, x, visit, stream)
        stream.x = x + run.mlp(self, x, visit)

    def mix(self, x: Tensor, stream: Stream) -> Tensor:
        """What the block starts from: the stream x (N, dim), unless a lever says otherwise."""
        for hook in self.hooks.mix:
            x = hook(self.layer, x, stream)
        return x

    def attend(self, x: Tensor, visit: Visit, stream: Stream) -> Tensor:
        """What attention adds (N, dim), reading x (N, dim)."""
        y = self.attn(self.normed(x), visit, stream)
        return self.branched(self.attn_scale.to(y.dtype) * y)

    def mlp_branch(self, x: Tensor, visit: Visit) -> Tensor:
        """What the MLP adds (N, dim), reading x (N, dim)."""
        y = self.mlp(self.normed(x), visit)
        return self.branched(self.mlp_scale.to(y.dtype) * y)

    def normed(self, x: Tensor) -> Tensor:
        """What a branch reads, from the stream x (N, dim)."""
        x = norm(x)
        for hook in self.hooks.normed:
            x = hook(self.layer, x)
        return x

    def branched(self, y: Tensor) -> Tensor:
        """What is added to the stream, from the scaled output y (N, dim) of a branch."""
        for hook in self.hooks.branch:
            y = hook(self.layer, y)
        return y


class RunBranches:
    """A block as a lever that rewires it sees it: branches go through the runner."""

    def __init__(self, block: Block, run: Eager) -> None:
        self._block, self._run = block, run

    def mix(self, x: Tensor, stream: Stream) -> Tensor:
        """What the block starts from."""
        return self._block.mix(x, stream)

    def attend(self, x: Tensor, visit: Visit, stream: Stream) -> Tensor:
        """What attention adds (N, dim), reading x."""
        return self._run.attention(self._block, x, visit, stream)

    def mlp_branch(self, x: Tensor, visit: Visit) -> Tensor:
        """What the MLP adds (N, dim), reading x."""
        return self._run.mlp(self._block, x, visit)


class Attention(nn.Module):
    """Project, norm and rotate, attend to the cache, project back."""

    def __init__(self, spec: ModelSpec, layer: int, hooks: Hooks) -> None:
        super().__init__()
        self.layer = layer
        self.hooks = hooks
        self.head_dim = spec.head_dim
        # The nearest reach counts; 0 is no limit.
        self.window = min((r for hook in hooks.reach if (r := hook(layer)) > 0), default=0)
        kv_dim = spec.num_kv_heads * spec.head_dim
        self.q = nn.Linear(spec.dim, spec.dim, bias=False)
        self.k = nn.Linear(spec.dim, kv_dim, bias=False)
        self.v = nn.Linear(spec.dim, kv_dim, bias=False)
        self.o = nn.Linear(spec.dim, spec.dim, bias=False)

    def forward(self, x: Tensor, visit: Visit, stream: Stream) -> Tensor:
        """x (N, dim), already normed -> (N, dim)."""
        q, k, v = self.project(x)
        for adjust in self.hooks.adjust:
            q, k, v = (adjust(site, visit, y, x) for site, y in (("q", q), ("k", k), ("v", v)))
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))
        # Unit-RMS queries and keys bound the scores (Henry et al. 2020, arXiv:2010.04245).
        q, k = (F.rms_norm(t, (self.head_dim,)).to(v.dtype) for t in (q, k))
        q, k = rotate(q, stream.angles), rotate(k, stream.angles)
        for change_qkv in self.hooks.qkv:
            q, k, v = change_qkv(visit, q, k, v, stream)
        if self.hooks.attend is None:
            y = stream.cache.attend(visit.slot, q, k, v, self.window)
        else:
            y = self.hooks.attend(visit, q, k, v, stream.cache, self.window)
        for hook in self.hooks.attn_out:
            y = hook(self.layer, y, x, v)
        out: Tensor = self.o(y.flatten(-2))
        for adjust in self.hooks.adjust:
            out = adjust("o", visit, out, x)
        return out

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (N, dim), keys and values (N, kv_dim) of x (N, dim), before norms."""
        return self.q(x), self.k(x), self.v(x)


class MLP(nn.Module):
    """Up, squared ReLU (So et al. 2021, arXiv:2109.08668), down."""

    def __init__(self, spec: ModelSpec, layer: int, hooks: Hooks) -> None:
        super().__init__()
        self.layer = layer
        self.hooks = hooks
        self.up = nn.Linear(spec.dim, spec.mlp_dims[layer], bias=False)
        self.down = nn.Linear(spec.mlp_dims[layer], spec.dim, bias=False)

    def forward(self, x: Tensor, visit: Visit) -> Tensor:
        """x (N, dim), already normed -> (N, dim)."""
        h = self.up(x)
        lever = self.hooks.activate
        h = F.relu(h).square() if lever is None else lever(h)
        y: Tensor = self.down(h)
        for hook in self.hooks.mlp_out:
            y = hook(self.layer, y, x)
        for adjust in self.hooks.adjust:
            y = adjust("mlp", visit, y, x)
        return y


@lru_cache(maxsize=64)
def make_plan(order: tuple[int, ...], first_slot: int = 0) -> tuple[Visit, ...]:
    """One visit for each entry of `order`; the first half (rounded down) is the encoder."""
    half = len(order) // 2
    seen: dict[int, int] = {}
    visits, num_sites = [], 0
    for place, layer in enumerate(order):
        repeat = seen.get(layer, 0)
        seen[layer] = repeat + 1
        site = num_sites if repeat else -1
        num_sites += repeat > 0
        decoder = place - half if place >= half else -1
        visits.append(Visit(first_slot + place, layer, repeat, site, decoder))
    return tuple(visits)


def frequencies_of(num_dims: int, base: float) -> Tensor:
    """Radians per token (num_dims / 2,) of each pair of channels.

    fp32 always: half-precision frequencies give distant neighbours the same angle.
    """
    return base ** -(torch.arange(0, num_dims, 2, dtype=torch.float32) / num_dims)


def angles_of(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines (N, 1, pairs) of positions (N,)."""
    angle = positions[:, None, None].float() * frequencies
    return angle.cos(), angle.sin()


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x (N, heads, D) by its position (RoPE, Su et al. 2021, arXiv:2104.09864).

    Channel j is rotated with channel j + pairs; channels after the pairs stay as they are.
    """
    cos, sin = (a.to(x.dtype) for a in angles)
    half = cos.size(-1)
    a, b, rest = x.split((half, half, x.size(-1) - 2 * half), dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin, rest), dim=-1)


@torch.no_grad()
def orthogonal_(weight: Tensor) -> None:
    """Random with orthonormal rows or columns, as nn.init.orthogonal_ but ten times as fast.

    Cholesky QR, A = Q R with R'R = A'A; in fp64, as A'A squares the condition of A.
    """
    a = torch.empty_like(weight).normal_().double()
    a = a.T if a.size(0) < a.size(1) else a
    r = torch.linalg.cholesky_ex(a.T @ a, upper=True)[0]
    sizes = r.diagonal()
    if weight.is_meta or sizes.min() > 1e-6 * sizes.max():
        q = torch.linalg.solve_triangular(r, a, upper=True, left=False)
    else:
        # One square matrix in many thousands is too near to a singular one.
        q = torch.linalg.qr(a)[0]
    weight.copy_(q.T if q.shape != weight.shape else q)


def norm(x: Tensor) -> Tensor:
    """x (N, dim) with rows of unit RMS."""
    # Autocast may norm in fp32; the stream keeps its precision.
    return F.rms_norm(x, (x.size(-1),)).to(x.dtype)


def _autocast(x: Tensor) -> Tensor:
    """x in the precision that products run in: the stream needs no more."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))
