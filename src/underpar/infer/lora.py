"""Low-rank adapters, one set per lane, which learn a document while it is scored.

An adapter turns a product y of x into y + (alpha / rank) B (A x), at each site of each visit (Hu et
al. 2021, arXiv:2106.09685; one set per document: PR 77, PR 1530; scale and warm A: PR 1767; sites:
PR 2014). All adapters of a lane are one row of a buffer. Gradients and second moments have the same
layout, so an update is one pass over three buffers. Products read a copy of the adapters in which A
and B are each multiplied by the root of alpha / rank.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from underpar.compile.updates import compile_in_place
from underpar.model.network import Network
from underpar.recipe import ModelSpec, require
from underpar.seams import Visit

# Products that may have adapters, by the names of the seam `adjust`.
SITES = ("q", "k", "v", "o", "mlp", "head")
# Names one adapter: a site and the slot of the visit. The head has no slot.
AdapterKey = tuple[str, int | None]


@dataclass(frozen=True)
class LoraSettings:
    """How documents are read and what their adapters are; the lever `lora_ttt` explains each."""

    sites: tuple[str, ...] = ("k", "o", "mlp", "head")
    rank: int = 80
    alpha: float = 144.0
    lr: float = 7.5e-5
    decay: float = 0.5
    decay_all: bool = False
    beta2: float = 0.99
    eps: float = 1e-10
    chunk: int = 48
    short: tuple[str, ...] = ("256:8", "2000:24")
    warm: bool = True
    lanes: int = 64
    group: int = 24
    keys: str = "kept"
    seed: int = 0

    @property
    def as_published(self) -> LoraSettings:
        """What the published order implies: groups of documents whose chunks read their whole
        window again, and adapters that decay whether or not their document goes on (PR 2014)."""
        return replace(self, lanes=self.group, keys="fresh", decay_all=True)

    def check(self, lever: str) -> None:
        """Refuse values that make no sense, naming the lever that has them."""
        where = f"levers.{lever}."
        for site in self.sites:
            require(site in SITES, f"{where}sites: {site!r} is not one of {', '.join(SITES)}")
        once = 0 < len(self.sites) == len(set(self.sites))
        require(once, f"{where}sites = {self.sites}: name one or more, each once")
        for key in ("rank", "chunk", "lanes", "group"):
            value = getattr(self, key)
            require(value > 0, f"{where}{key} = {value}: expected at least 1")
        for key in ("alpha", "lr", "decay", "seed"):
            value = getattr(self, key)
            require(value >= 0, f"{where}{key} = {value}: expected 0 or more")
        shrink = self.lr * self.decay
        require(shrink < 1, f"{where}lr * decay = {shrink}: expected less than 1")
        require(0 < self.beta2 < 1, f"{where}beta2 = {self.beta2}: expected between 0 and 1")
        require(self.eps > 0, f"{where}eps = {self.eps}: expected more than 0")
        for entry in self.short:
            pair = re.fullmatch(r"[1-9]\d{0,8}:[1-9]\d{0,8}", entry)
            require(pair is not None, f"{where}short: {entry!r} is not 'limit:chunk', as '256:8'")
        known = self.keys in ("kept", "fresh")
        require(known, f"{where}keys = {self.keys!r}: expected 'kept' or 'fresh'")


@dataclass(frozen=True)
class Layout:
    """Columns of the buffers: all A, then all B."""

    rank: int
    shapes: dict[AdapterKey, tuple[int, int]]
    """Channels that each adapter reads, and those that it writes."""

    @property
    def num_a(self) -> int:
        """Columns of all A."""
        return self.rank * sum(width for width, _ in self.shapes.values())

    @property
    def num_columns(self) -> int:
        """Columns of all A and B."""
        return self.rank * sum(map(sum, self.shapes.values()))

    def cut(self, flat: Tensor) -> dict[AdapterKey, tuple[Tensor, Tensor]]:
        """A (L, r, in) and B (L, out, r) of each adapter, as views of flat (L, columns)."""
        num = len(self.shapes)
        sizes = [
            self.rank * size for sizes in zip(*self.shapes.values(), strict=True) for size in sizes
        ]
        columns = flat.split(sizes, dim=1)
        pairs = zip(columns[:num], columns[num:], strict=True)
        return {
            key: (a.unflatten(1, (self.rank, -1)), b.unflatten(1, (-1, self.rank)))
            for key, (a, b) in zip(self.shapes, pairs, strict=True)
        }


def _layout_of(model: Network, settings: LoraSettings) -> Layout:
    shapes: dict[AdapterKey, tuple[int, int]] = {
        (site, visit.slot): (trunk.spec.dim, _channels(trunk.spec)[site])
        for trunk in model.trunks
        for visit in trunk.plan
        for site in settings.sites
        if site != "head"
    }
    if "head" in settings.sites:
        vocab_size, width = model.get_parameter(model.head_name).shape
        shapes["head", None] = (width, vocab_size)
    return Layout(settings.rank, shapes)


def _channels(spec: ModelSpec) -> dict[str, int]:
    """Site of a block -> channels that it writes."""
    kv_dim = spec.num_kv_heads * spec.head_dim
    return {"q": spec.dim, "k": kv_dim, "v": kv_dim, "o": spec.dim, "mlp": spec.dim}


class Lora:
    """Adapters of L lanes, one row per lane, and their optimiser; products run in `dtype`."""

    def __init__(
        self,
        model: Network,
        settings: LoraSettings,
        lanes: Sequence[int],
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
        compiled: bool = False,
    ) -> None:
        """`lanes`: the lane number of each row. `compiled`: the update is one kernel."""
        self.settings = settings
        self.lanes = list(lanes)
        self._model = model
        self.layout = _layout_of(model, settings)
        self.weights = torch.zeros(len(lanes), self.layout.num_columns, device=device)
        self.moments = torch.zeros_like(self.weights)
        self.steps = torch.zeros(len(lanes), device=device)
        for row, lane in enumerate(lanes):
            self._draw(row, lane)
        self.root = math.sqrt(settings.alpha / settings.rank)
        self.work = self._leaf(dtype)
        # A and B of each adapter while attached: views of `_work`.
        self._pairs: dict[AdapterKey, tuple[Tensor, Tensor]] = {}
        self.adamw: Callable[..., None] = _adamw
        if compiled:
            self.adamw = compile_in_place(_adamw)

    @property
    def num_parameters(self) -> int:
        """Numbers that a lane learns."""
        return self.layout.num_columns

    @contextmanager
    def attached(self, rows: Tensor | None = None) -> Iterator[None]:
        """Inside, the adapters act on the model's products: all rows, or these alone, by index.

        Some rows are a copy: they serve to read, and gradients do not reach the adapters.
        """
        adapters = self if rows is None else self._select(rows)
        adapters._pairs = adapters.layout.cut(adapters.work)
        try:
            with self._model.hooks.change(adjust=adapters.adjust):
                yield
        finally:
            adapters._pairs = {}

    def adjust(self, site: str, visit: Visit | None, y: Tensor, x: Tensor) -> Tensor:
        """y (N, out) plus what the adapter makes of x (N, in); N = L * C, lane by lane."""
        key = (site, None if visit is None else visit.slot)
        if key not in self._pairs:
            return y
        a, b = self._pairs[key]
        low = torch.bmm(x.to(a.dtype).unflatten(0, (len(a), -1)), a.mT)  # (L, C, r)
        return y.to(a.dtype) + torch.bmm(low, b.mT).flatten(0, 1)

    def differentiate(self, loss: Tensor) -> Tensor:
        """Gradients (L, P) for `update`, of a loss that was computed with all rows attached.

        They are gradients of the copy that products read.
        """
        return torch.autograd.grad(loss, self.work)[0]

    @torch.no_grad()
    def update(self, active: Tensor, grads: Tensor | None = None) -> None:
        """One step of AdamW in the rows where `active` (L,) is true.

        Other rows stay as they are; with `decay_all` they decay. Without gradients no row may be
        active.
        """
        settings, on = self.settings, active.float()
        self.steps.add_(on)
        # 1 - beta2 ** steps, by expm1 so that no digits are lost; 1 in rows that are not active.
        fresh = 1 - on - on * torch.expm1(self.steps * math.log(settings.beta2))
        decays = torch.ones_like(on) if settings.decay_all else on
        keep = 1 - settings.lr * settings.decay * decays
        factors = ((1 - settings.beta2) * on, fresh, keep, settings.lr * on)
        self._step(torch.zeros_like(self.work) if grads is None else grads, *factors)

    @torch.no_grad()
    def warm_up(self) -> None:
        """Compile the update by a step that changes nothing."""
        ones, zeros = torch.ones_like(self.steps), torch.zeros_like(self.steps)
        self._step(torch.zeros_like(self.work), zeros, ones, ones, zeros)

    def _step(self, grads: Tensor, *factors: Tensor) -> None:
        columns = tuple(factor[:, None] for factor in factors)
        state = (self.weights, self.moments, self.work.detach())
        self.adamw(state, grads, columns, self.settings.eps, self.root)

    @torch.no_grad()
    def reset(self, rows: Sequence[int], documents: Sequence[int]) -> None:
        """Begin these documents, by number: reset B, the optimiser, and A unless it is warm."""
        for row, document in zip(rows, documents, strict=True):
            self.moments[row].zero_()
            self.steps[row].zero_()
            self.weights[row, self.layout.num_a :].zero_()
            if not self.settings.warm:
                self._draw(row, document)
            self.work[row].copy_(self.weights[row] * self.root)

    @torch.no_grad()
    def renew(self) -> None:
        """Reset all rows to their first state, in the same memory."""
        for buffer in (self.weights, self.moments, self.steps):
            buffer.zero_()
        for row, lane in enumerate(self.lanes):
            self._draw(row, lane)
        self.work.copy_(self.weights * self.root)

    def _draw(self, row: int, number: int) -> None:
        """Draw A of one row; it depends on seed and number alone, not on the number of ranks."""
        seeds = np.random.SeedSequence((self.settings.seed, number))
        generator = torch.Generator(self.weights.device)
        generator.manual_seed(int(seeds.generate_state(1, np.uint64)[0]))
        end = 0
        # Neighbours of one width are drawn at once.
        for width, same in groupby(width for width, _ in self.layout.shapes.values()):
            begin, end = end, end + self.settings.rank * width * len(list(same))
            bound = width**-0.5
            self.weights[row, begin:end].uniform_(-bound, bound, generator=generator)

    def _select(self, rows: Tensor) -> Lora:
        other = copy.copy(self)
        other.keep(rows)
        return other

    def state(self) -> dict[str, Any]:
        """Everything that was learnt, between two steps, as live tensors."""
        buffers = {"weights": self.weights, "moments": self.moments, "steps": self.steps}
        return {"lanes": self.lanes, **buffers}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state of as many lanes, in the same memory, or of fewer lanes."""
        if len(state["lanes"]) < len(self.lanes):
            self.keep(torch.arange(len(state["lanes"]), device=self.weights.device))
        self.lanes = state["lanes"]
        self.weights.copy_(state["weights"])
        self.moments.copy_(state["moments"])
        self.steps.copy_(state["steps"])
        self.work.copy_(self.weights * self.root)

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows, by index, after an update."""
        self.lanes = [self.lanes[row] for row in rows.tolist()]
        self.weights = self.weights[rows]
        self.moments = self.moments[rows]
        self.steps = self.steps[rows]
        self.work = self._leaf(self.work.dtype)

    def _leaf(self, dtype: torch.dtype) -> Tensor:
        """The copy that products read, a leaf for gradients."""
        return (self.weights * self.root).to(dtype).requires_grad_()


def _adamw(
    state: tuple[Tensor, Tensor, Tensor],
    grads: Tensor,
    factors: tuple[Tensor, Tensor, Tensor, Tensor],
    eps: float,
    root: float,
) -> None:
    """AdamW with beta1 = 0 on all columns (L, P), with factors (L, 1) per lane.

    v += share (g^2 - v); p = keep p - rate g / (sqrt(v / fresh) + eps). Products read p times
    `root`, so gradients of that copy are multiplied by `root` too.
    """
    weights, moments, work = state
    share, fresh, keep, rate = factors
    g = grads.float() * root
    moments.lerp_(g.square(), share)
    step = g / (moments / fresh).sqrt().add_(eps)
    weights.mul_(keep).sub_(step.mul_(rate))
    work.copy_(weights * root)
