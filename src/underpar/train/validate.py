"""Bits per byte of the held-out text while weights are still whole. It only reports.

Documents are isolated and cut at the model's context, and every visit of a loop is made, as `score`
has it, with products in the same precision. Nothing in training may follow from these figures: no
step, no rate, no stop, no choice of weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from underpar.core.dist import sum_over_ranks
from underpar.core.runtime import Runtime
from underpar.data.batch import pack_documents
from underpar.data.shards import Shard
from underpar.model.kv_cache import PackedCache
from underpar.model.network import ROWS, Network, as_scored, products


@dataclass(frozen=True)
class Validation:
    """The whole held-out text, priced with the live weights and with their average."""

    live_nats: float
    """Mean nats per target."""
    average_nats: float | None
    """The same with averaged weights; None where the recipe does not average."""
    num_bytes: int
    num_targets: int
    seconds: float

    @property
    def live_bpb(self) -> float:
        """Bits per byte of the live weights."""
        return self._bpb(self.live_nats)

    @property
    def average_bpb(self) -> float | None:
        """Bits per byte of the averaged weights."""
        return None if self.average_nats is None else self._bpb(self.average_nats)

    def as_dict(self) -> dict[str, float | None]:
        """Plain values for JSON."""
        return {
            "live_bpb": self.live_bpb,
            "average_bpb": self.average_bpb,
            "live_nats": self.live_nats,
            "average_nats": self.average_nats,
            "num_bytes": self.num_bytes,
            "num_targets": self.num_targets,
            "validation_seconds": self.seconds,
        }

    def _bpb(self, nats: float) -> float:
        return nats * self.num_targets / math.log(2) / self.num_bytes


class Validator:
    """Prices a shard. `passes` names the documents that share a forward pass, over all ranks."""

    def __init__(self, shard: Shard, passes: Sequence[range], runtime: Runtime) -> None:
        self._shard = shard
        self._passes = passes
        self._runtime = runtime
        # Called when it begins, which takes seconds.
        self.on_begin: Callable[[], None] = lambda: None

    @torch.no_grad()
    def run(self, model: Network, average: Mapping[str, Tensor] | None) -> Validation:
        """Price with the model's weights, then with `average`; all ranks take part.

        The model comes back as it was.
        """
        started = time.perf_counter()
        self.on_begin()
        with as_scored(model):
            rows = [self._price(model)]
            if average is not None:
                with _holding(model, average):
                    rows.append(self._price(model))
        nats = torch.stack(rows)  # (1 or 2, P)
        sum_over_ranks([nats], self._runtime)
        # Everything before this was only handed to the device; here it is waited for.
        totals = nats.cpu().double().sum(dim=1).tolist()
        # The first token of the stream is an input only; everything else is a target.
        num_targets = self._shard.num_tokens - 1
        means = [total / num_targets for total in totals]
        return Validation(
            live_nats=means[0],
            average_nats=means[1] if average is not None else None,
            num_bytes=self._shard.num_bytes,
            num_targets=num_targets,
            seconds=time.perf_counter() - started,
        )

    def _price(self, model: Network) -> Tensor:
        """Nats (P,) of each pass. Other ranks' stay 0, so that a sum does not depend on ranks."""
        nats = torch.zeros(len(self._passes), device=self._runtime.device)
        with products(self._runtime.device, self._runtime.dtype):
            for index in range(self._runtime.rank, len(self._passes), self._runtime.world):
                nats[index] = self._price_pass(model, self._passes[index])
        return nats

    def _price_pass(self, model: Network, documents: range) -> Tensor:
        """Nats of all targets of some documents."""
        docs = [self._shard.doc(i) for i in documents]
        batch, _ = pack_documents(docs, int(docs[0][0]), model.spec.context)
        if self._runtime.device.type == "cuda":
            batch = batch.pin()
        batch = batch.to(self._runtime.device, non_blocking=True)
        hidden = model.hidden(batch.inputs, PackedCache(batch.segments))
        slices = zip(hidden.split(ROWS), batch.targets.split(ROWS), strict=True)
        nats = torch.cat(
            [F.cross_entropy(model.head(x).float(), t, reduction="none") for x, t in slices]
        )
        # The stream ends with its last document: nothing follows it, so nothing is predicted.
        is_last = documents.stop == self._shard.num_documents
        return nats[: len(nats) - is_last].sum()


@contextmanager
def _holding(model: Network, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the model has `weights`; afterwards those it had before, bit for bit and in place."""
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    try:
        model.load_state_dict(weights)
        yield
    finally:
        model.load_state_dict(before)
