"""Price the stream unit by unit: predict, commit, and only then adapt.

A unit is a chunk of whole documents, or the windows of a pass where they reach over documents.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from underpar.core.dist import from_main, gather_objects
from underpar.core.runtime import Clock, Runtime
from underpar.data.batch import Batch, pack_documents, segments_from_starts
from underpar.data.shards import Shard
from underpar.errors import RuleError
from underpar.infer.experts import Proposals
from underpar.infer.predictor import Predictor
from underpar.infer.tilt import Mixture
from underpar.recipe import ScorePart
from underpar.score.ledger import Score
from underpar.score.method import STOP_BITS, Method
from underpar.score.tally import OnCommit, Tally
from underpar.score.windows import (
    Window,
    chunk_documents,
    flat_windows,
    group_windows,
    isolated_windows,
)
from underpar.seams import BOS_ID

if TYPE_CHECKING:
    from underpar.score.partial import Partial

# Targets after which mixers learn.
SETTLE_EVERY = 1024
# Tokens before a window that its first one may look back on: `smear` mixes in the token before, to
# which `bigram` has added the one before that.
LOOK_BACK = 2

# (share of the targets done, bits per byte so far)
OnChunk = Callable[[float, float], None]


@dataclass(frozen=True)
class Unit:
    """Consecutive targets of the stream; `windows` are empty where documents are packed whole."""

    documents: range
    first: int
    num_targets: int
    windows: Sequence[Window] = ()


@dataclass
class Scorer:
    """Owns the loop, so that no adapter sees a token before it is priced."""

    predictor: Predictor
    shard: Shard
    runtime: Runtime
    clock: Clock
    mixture: Mixture = field(default_factory=lambda: Mixture([]))
    on_commit: OnCommit | None = None
    partial: Partial | None = None

    def run(
        self,
        part: ScorePart,
        adapt: bool = False,
        on_chunk: OnChunk | None = None,
        method: Method | None = None,
    ) -> Score:
        """The score of the whole shard; `adapt` learns from each unit once it is priced."""
        method = method or Method(name="adapt" if adapt else "plain")
        self._check(method, adapt)
        self._tally = tally = Tally(self.shard, self.on_commit)
        self._part = part
        self._stopped_at = -1
        self.mixture.open(1, int(tally.expected.sum()))
        self._deadline = time.monotonic() + method.seconds if method.seconds else float("inf")
        first = self._resume(on_chunk)
        for index, units in islice(enumerate(self._rounds(method, adapt)), first, None):
            if self.partial:
                self.partial.offer(index, lambda: self._state(adapt))
            if adapt and self._stopped_at < 0 and self._is_late():
                self._stopped_at = index
                tally.note("stop", index, units[0].documents[0])
            batch = self._round(units)
            if adapt and self._stopped_at < 0:
                assert batch is not None
                with self.clock.phase("adapt"):
                    self.adapt(batch, units[0].documents)
            if on_chunk:
                on_chunk(tally.share, tally.bpb)
        return Score(
            method.label,
            tally.entries(),
            self.clock.read(),
            tally.events,
            method.order,
            self._stopped_at,
            STOP_BITS if self._stopped_at >= 0 else 0.0,
            method.as_dict(),
        )

    def _state(self, adapt: bool) -> dict[str, Any]:
        """All that the prices to come depend on, between two rounds."""
        own = {"tally": self._tally.state(), "mixture": self.mixture.state()}
        learnt = self.predictor.state() if adapt else {}
        return {**own, "predictor": learnt, "stopped_at": self._stopped_at}

    def _resume(self, on_chunk: OnChunk | None) -> int:
        """Go on from what a stopped score left; returns the first round to price."""
        if self.partial is None or (found := self.partial.find()) is None:
            return 0
        index, state = found
        self._deadline -= self.partial.spent_seconds
        self._tally.load(state["tally"])
        self.mixture.load(state["mixture"])
        if state["predictor"]:
            self.predictor.load(state["predictor"])
        self._stopped_at = state["stopped_at"]
        if on_chunk:
            on_chunk(self._tally.share, self._tally.bpb)
        return index

    def _check(self, method: Method, adapt: bool) -> None:
        if adapt and not self.predictor.can_adapt:
            raise RuleError("this artifact's recipe names no adapter; add one under [levers]")
        if adapt and self.runtime.world > 1:
            raise RuleError("adapting follows one stream: score with --adapt on a single rank")
        if adapt and method.stride:
            raise RuleError("adapters learn from plain windows: leave out --stride")
        if method.flat and not method.stride:
            raise RuleError("--flat is for sliding windows: give --stride")

    def _is_late(self) -> bool:
        return bool(from_main(float(time.monotonic() > self._deadline), self.runtime))

    def _rounds(self, method: Method, adapt: bool) -> Iterator[list[Unit]]:
        """Units of the stream, one for each rank at a time."""
        units: list[Unit] = []
        for unit in self._units(method, self._part.adapt_tokens if adapt else 0):
            units.append(unit)
            if len(units) == self.runtime.world:
                yield units
                units = []
        if units:
            yield units

    def _units(self, method: Method, adapt_tokens: int) -> Iterator[Unit]:
        totals, starts = self._tally.expected, self.shard.starts
        context, size = self.predictor.context, self._part.batch_tokens
        if method.flat:
            for group in group_windows(flat_windows(totals.tolist(), context, method.stride), size):
                first, last = group[0], group[-1]
                begin, end = first.start + first.owned, last.start + last.length
                documents = np.searchsorted(starts, [begin, end - 1], side="right") - 1
                yield Unit(range(documents[0], documents[1] + 1), begin, end - begin, group)
            return
        lengths = np.diff(starts, append=self.shard.num_tokens).tolist()
        for chunk in chunk_documents(lengths, adapt_tokens or size):
            own = totals[chunk.start : chunk.stop]
            windows: Sequence[Window] = ()
            if method.stride:
                windows = list(isolated_windows(own.tolist(), context, method.stride))
            yield Unit(chunk, int(starts[chunk.start]), int(own.sum()), windows)

    def _round(self, units: Sequence[Unit]) -> Batch | None:
        """Price a unit on each rank and commit all of them, in order; returns what this one read.

        Experts follow the stream on every rank: they need all of it and no device.
        """
        with self.clock.phase("hints" if self.mixture.experts else "score"):
            proposals = [self.mixture.propose(0, self._targets(unit)) for unit in units]
        batch, own = None, None
        with self.clock.phase("score"):
            if self.runtime.rank < len(units):
                rank = self.runtime.rank
                batch, log_p = self.price(units[rank], proposals[rank].hints)
                own = (units[rank].first, log_p)
            found = gather_objects(own, self.runtime)
            for unit, proposed, share in zip(units, proposals, found, strict=False):
                assert isinstance(share, tuple)
                first, log_p = share
                if first != unit.first:
                    raise RuleError(f"a rank priced target {first}, {unit.first} was its own")
                self._commit(unit, proposed, log_p)
        return batch

    def _commit(self, unit: Unit, proposals: Proposals, log_p: np.ndarray) -> None:
        """Mix and enter the prices; mixers learn every few targets, once these are entered."""
        targets = self._targets(unit)
        for begin in range(0, len(targets), SETTLE_EVERY):
            own = slice(begin, begin + SETTLE_EVERY)
            part = Proposals(proposals.hints[own], proposals.confidence[own])
            priced = self.mixture.price(part, targets[own], log_p[own])
            self._tally.commit_stream(unit.first + begin, -priced)
            self.mixture.settle()
        self._tally.note("price", unit.documents[0], unit.documents[-1])

    def _targets(self, unit: Unit) -> np.ndarray:
        return np.asarray(self.shard.tokens[unit.first + 1 : unit.first + unit.num_targets + 1])

    def price(self, unit: Unit, hints: np.ndarray) -> tuple[Batch | None, np.ndarray]:
        """Log-probabilities (n, 1 + K) of a unit's targets and of `hints` (n, K).

        The batch is what adapters may learn from, once this is committed.
        """
        if unit.windows:
            return None, self._price_windows(unit, hints)
        docs = [self.shard.doc(i) for i in unit.documents]
        batch, _ = pack_documents(docs, BOS_ID, self.predictor.context)
        log_p = self._log_p(batch, hints, np.arange(unit.num_targets))
        return batch, log_p[: unit.num_targets]

    def _price_windows(self, unit: Unit, hints: np.ndarray) -> np.ndarray:
        """Each target in the window that owns it; windows share a pass, no window sees another."""
        is_flat = unit.windows[0].document < 0
        base = [0 if is_flat else int(self.shard.starts[d]) for d in unit.documents]
        done: list[np.ndarray] = []
        num_done = 0
        for group in group_windows(unit.windows, self._part.batch_tokens):
            begins = [base[max(0, window.document)] + window.start for window in group]
            batch, owned = self._pack_windows(group, begins)
            # Windows own targets one behind the other, as hints have them.
            own = slice(num_done, num_done + len(owned))
            done.append(self._log_p(batch, hints[own], owned)[owned])
            num_done += len(owned)
        return np.concatenate(done)

    def _pack_windows(
        self, windows: Sequence[Window], begins: Sequence[int]
    ) -> tuple[Batch, np.ndarray]:
        """Windows that begin there in the stream, and the rows of the targets that they own.

        The tokens that precede a window stand before it, as a piece that owns nothing: levers that
        look one token back would else see the window that happens to share the pass.
        """
        behind = np.array([min(LOOK_BACK, window.start) for window in windows])
        lengths = np.array([window.length for window in windows])
        firsts = np.cumsum(behind + lengths) - lengths
        rows = [
            np.asarray(self.shard.tokens[begin - num : begin + length + 1], dtype=np.int64)
            for begin, num, length in zip(begins, behind, lengths, strict=True)
        ]
        cuts, size = np.append(firsts - behind, firsts), int(behind.sum() + lengths.sum())
        batch = Batch(
            torch.from_numpy(np.concatenate([row[:-1] for row in rows])),
            torch.from_numpy(np.concatenate([row[1:] for row in rows])),
            segments_from_starts(cuts, size, self.predictor.context),
        )
        pairs = zip(firsts, windows, strict=True)
        return batch, np.concatenate([np.arange(f + w.owned, f + w.length) for f, w in pairs])

    def _log_p(self, batch: Batch, hints: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Log-probabilities (N, 1 + K); `hints` are those of some rows of the batch."""
        tokens = np.full((len(batch.targets), hints.shape[1]), -1, dtype=np.int64)
        tokens[rows] = hints
        wanted = torch.from_numpy(tokens) if hints.shape[1] else None
        return self.predictor.price(batch, wanted).cpu().double().numpy()

    def adapt(self, batch: Batch, documents: Sequence[int]) -> None:
        """Learn from the documents priced last."""
        self.predictor.adapt(batch)
        # A device works on behind the call; its time belongs here.
        self.runtime.synchronize()
        self._tally.note("adapt", documents[0], documents[-1])
