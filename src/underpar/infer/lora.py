"""Low-rank adapters, one set a lane, which learn a document while it is read.

y + (alpha / rank) B (A x) at each site of each visit (Hu et al. 2021, arXiv:2106.09685; for each
document on its own PR 77, PR 1530; scale and warm A PR 1767; sites of PR 2014). All adapters of all
lanes are columns of one buffer, and so are their gradients and second moments: an update is one
pass over them. Products read a copy, in which A and B each have the root of the scale already.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from underpar.compile.updates import compile_in_place
from underpar.model.gpt import GPT
from underpar.recipe import ModelSpec
from underpar.seams import Visit

# A site and the slot of the visit; the head has none.
Place = tuple[str, int | None]


class LoraSettings(Protocol):
    """What adapters need to know; the lever `lora_ttt` settles it."""

    @property
    def sites(self) -> tuple[str, ...]:
        """Products that have adapters, by the names of the seam `adjust`."""

    @property
    def rank(self) -> int:
        """Rows of A."""

    @property
    def alpha(self) -> float:
        """Scale of what adapters add, times the rank."""

    @property
    def lr(self) -> float:
        """Step of AdamW."""

    @property
    def decay(self) -> float:
        """Decoupled weight decay."""

    @property
    def decay_all(self) -> bool:
        """Whether lanes that do not learn decay too."""

    @property
    def beta2(self) -> float:
        """What second moments keep in a step."""

    @property
    def eps(self) -> float:
        """Added to the root of a second moment."""

    @property
    def warm(self) -> bool:
        """Whether a lane keeps its A from document to document."""

    @property
    def seed(self) -> int:
        """Of the first A."""


@dataclass(frozen=True)
class _Layout:
    """Columns of the buffers: all A, then all B."""

    width: int
    """Channels that every site reads."""
    rank: int
    outs: dict[Place, int]
    """Channels that each site writes."""

    @property
    def num_a(self) -> int:
        """Columns of all A."""
        return len(self.outs) * self.rank * self.width

    @property
    def num_columns(self) -> int:
        """Columns of all A and B."""
        return self.num_a + self.rank * sum(self.outs.values())

    def cut(self, flat: Tensor) -> dict[Place, tuple[Tensor, Tensor]]:
        """A (L, r, in) and B (L, out, r) of each site, as views of flat (L, columns)."""
        num = len(self.outs)
        sizes = [self.rank * self.width] * num + [out * self.rank for out in self.outs.values()]
        columns = flat.split(sizes, dim=1)
        pairs = zip(columns[:num], columns[num:], strict=True)
        return {
            place: (a.unflatten(1, (self.rank, -1)), b.unflatten(1, (-1, self.rank)))
            for place, (a, b) in zip(self.outs, pairs, strict=True)
        }


def _layout_of(model: GPT, settings: LoraSettings) -> _Layout:
    spec = model.spec
    places: list[Place] = [
        (site, visit.slot) for visit in model.plan for site in settings.sites if site != "head"
    ]
    places += [("head", None)] if "head" in settings.sites else []
    outs = {place: _channels(spec)[place[0]] for place in places}
    return _Layout(spec.dim, settings.rank, outs)


def _channels(spec: ModelSpec) -> dict[str, int]:
    """Site -> channels that it writes."""
    kv_dim = spec.num_kv_heads * spec.head_dim
    wide = dict.fromkeys(("q", "o", "mlp"), spec.dim)
    return wide | {"k": kv_dim, "v": kv_dim, "head": spec.vocab_size}


class Lora:
    """Adapters of L lanes, a row each, with their optimiser; products run in `dtype`."""

    def __init__(
        self,
        model: GPT,
        settings: LoraSettings,
        lanes: Sequence[int],
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
        compiled: bool = False,
    ) -> None:
        """`lanes`: the number of each row's lane. `compiled`: the update is one kernel."""
        self.settings = settings
        self.lanes = list(lanes)
        self._model = model
        self._layout = _layout_of(model, settings)
        self._weights = torch.zeros(len(lanes), self._layout.num_columns, device=device)
        self._moments = torch.zeros_like(self._weights)
        self._steps = torch.zeros(len(lanes), device=device)
        for row, lane in enumerate(lanes):
            self._draw(row, lane)
        self._root = math.sqrt(settings.alpha / settings.rank)
        self._work = self._leaf(dtype)
        # A and B of each place while they are attached: columns of what products read.
        self._pairs: dict[Place, tuple[Tensor, Tensor]] = {}
        self._descend: Callable[..., None] = _descend
        if compiled:
            self._descend = compile_in_place(_descend)

    @property
    def num_parameters(self) -> int:
        """Numbers that a lane learns."""
        return self._layout.num_columns

    @contextmanager
    def attached(self, rows: Tensor | None = None) -> Iterator[None]:
        """Inside, the model's products are adjusted: all rows are read, or these alone, by index.

        Some rows are a copy, which is good to read with and not to learn.
        """
        own = self if rows is None else self._select(rows)
        own._pairs = own._layout.cut(own._work)
        try:
            with self._model.hooks.change(adjust=own.adjust):
                yield
        finally:
            own._pairs = {}

    def adjust(self, site: str, visit: Visit | None, y: Tensor, x: Tensor) -> Tensor:
        """y (N, out) and what the site's adapter makes of x (N, in); N = L * C, lane by lane."""
        place = (site, None if visit is None else visit.slot)
        if place not in self._pairs:
            return y
        a, b = self._pairs[place]
        low = torch.bmm(x.to(a.dtype).unflatten(0, (len(a), -1)), a.mT)  # (L, C, r)
        return y.to(a.dtype) + torch.bmm(low, b.mT).flatten(0, 1)

    def differentiate(self, loss: Tensor) -> Tensor:
        """Gradients (L, P) of a loss that was computed with all rows attached, as `update` wants
        them: of what products read."""
        return torch.autograd.grad(loss, self._work)[0]

    @torch.no_grad()
    def update(self, active: Tensor, grads: Tensor | None = None) -> None:
        """One step of AdamW in the rows where `active` (L,) is true.

        The others are left as they are, or with `decay_all` decay; without gradients nothing else
        may happen.
        """
        own, on = self.settings, active.float()
        self._steps.add_(on)
        # -expm1: 1 - beta2 ** steps without losing digits; 1 in lanes that rest.
        fresh = 1 - on - on * torch.expm1(self._steps * math.log(own.beta2))
        decaying = torch.ones_like(on) if own.decay_all else on
        factors = ((1 - own.beta2) * on, fresh, 1 - own.lr * own.decay * decaying, own.lr * on)
        self._step(torch.zeros_like(self._work) if grads is None else grads, *factors)

    @torch.no_grad()
    def warm_up(self) -> None:
        """Have the update compiled: a step that changes nothing."""
        ones, zeros = torch.ones_like(self._steps), torch.zeros_like(self._steps)
        self._step(torch.zeros_like(self._work), zeros, ones, ones, zeros)

    def _step(self, grads: Tensor, *factors: Tensor) -> None:
        columns = tuple(factor[:, None] for factor in factors)
        state = (self._weights, self._moments, self._work.detach())
        self._descend(state, grads, columns, self.settings.eps, self._root)

    @torch.no_grad()
    def reset(self, rows: Sequence[int], documents: Sequence[int]) -> None:
        """Begin these documents, by number: B and the optimiser start anew, A unless it is warm."""
        for row, document in zip(rows, documents, strict=True):
            self._moments[row].zero_()
            self._steps[row].zero_()
            self._weights[row, self._layout.num_a :].zero_()
            if not self.settings.warm:
                self._draw(row, document)
            self._work[row].copy_(self._weights[row] * self._root)

    @torch.no_grad()
    def renew(self) -> None:
        """Begin as if nothing had been read, at the same addresses."""
        for buffer in (self._weights, self._moments, self._steps):
            buffer.zero_()
        for row, lane in enumerate(self.lanes):
            self._draw(row, lane)
        self._work.copy_(self._weights * self._root)

    def _draw(self, row: int, number: int) -> None:
        """A of one row from seed and number alone, so that ranks may share lanes as they like."""
        seeds = np.random.SeedSequence((self.settings.seed, number))
        generator = torch.Generator(self._weights.device)
        generator.manual_seed(int(seeds.generate_state(1, np.uint64)[0]))
        bound = self._layout.width**-0.5
        self._weights[row, : self._layout.num_a].uniform_(-bound, bound, generator=generator)

    def _select(self, rows: Tensor) -> Lora:
        other = copy.copy(self)
        other.keep(rows)
        return other

    def state(self) -> dict[str, Any]:
        """All that is learnt, between two steps: live tensors."""
        own = {"weights": self._weights, "moments": self._moments, "steps": self._steps}
        return {"lanes": self.lanes, **own}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of as many lanes, at the same addresses, or of fewer."""
        if len(state["lanes"]) < len(self.lanes):
            self.keep(torch.arange(len(state["lanes"]), device=self._weights.device))
        self.lanes = state["lanes"]
        self._weights.copy_(state["weights"])
        self._moments.copy_(state["moments"])
        self._steps.copy_(state["steps"])
        self._work.copy_(self._weights * self._root)

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these, by index, after an update."""
        self.lanes = [self.lanes[row] for row in rows.tolist()]
        self._weights = self._weights[rows]
        self._moments = self._moments[rows]
        self._steps = self._steps[rows]
        self._work = self._leaf(self._work.dtype)

    def _leaf(self, dtype: torch.dtype) -> Tensor:
        """What products read, as something that has gradients."""
        return (self._weights * self._root).to(dtype).requires_grad_()


def _descend(
    state: tuple[Tensor, Tensor, Tensor],
    grads: Tensor,
    factors: tuple[Tensor, Tensor, Tensor, Tensor],
    eps: float,
    root: float,
) -> None:
    """AdamW with beta1 = 0 on all columns (L, P), with factors (L, 1) for each lane.

    v += share (g^2 - v); p = keep p - rate g / (sqrt(v / fresh) + eps), and p for products: times
    `root`, as gradients are of what products read.
    """
    weights, moments, work = state
    share, fresh, keep, rate = factors
    g = grads.float() * root
    moments.lerp_(g.square(), share)
    step = g / (moments / fresh).sqrt().add_(eps)
    weights.mul_(keep).sub_(step.mul_(rate))
    work.copy_(weights * root)
