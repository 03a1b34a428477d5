"""Score a shard unit by unit: predict, commit, and only then adapt.

A unit is a few whole documents, or a group of windows that overlap or cross documents. Adapters
that follow the stream learn after every chunk of it. A chunk of windows is shared among ranks: each
prices some windows, then all learn from the chunk once more cut into plain windows (PR 461, 549).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from underpar.core.dist import gather_objects
from underpar.core.runtime import Clock, Runtime
from underpar.data.batch import Batch, pack_documents, segments_from_starts
from underpar.data.shards import Shard
from underpar.errors import RuleError
from underpar.infer.experts import Proposals
from underpar.infer.predictor import Predictor
from underpar.infer.tilt import Mixture
from underpar.recipe import ScorePart
from underpar.score.ledger import Score
from underpar.score.method import COUNT_BITS, PLAIN, Deadline, Method
from underpar.score.tally import OnCommit, OnShare, Tally
from underpar.score.windows import (
    STREAM,
    Window,
    chunk_documents,
    chunk_windows,
    flat_windows,
    group_windows,
    isolated_windows,
)
from underpar.seams import BOS_ID

if TYPE_CHECKING:
    from underpar.score.partial import Partial

# Mixers learn after this many targets.
SETTLE_EVERY = 1024
# Tokens before a window that its first token may look back on: `smear` mixes in the token before,
# to which `bigram` has added the one before that.
LOOK_BACK = 2


@dataclass(frozen=True)
class Unit:
    """Consecutive targets of the stream; without `windows` whole documents are packed.

    `lessons` are the windows that adapters learn from; they own all of their targets.
    """

    documents: range
    first: int
    num_targets: int
    windows: Sequence[Window] = ()
    lessons: Sequence[Window] = ()


@dataclass
class Scorer:
    """One score of a shard. It owns the loop, so that no adapter sees a token before its price.

    With `adapts` the predictor's adapters learn from each unit once it is priced.
    """

    predictor: Predictor
    shard: Shard
    runtime: Runtime
    clock: Clock
    part: ScorePart
    method: Method = PLAIN
    mixture: Mixture = field(default_factory=lambda: Mixture([]))
    adapts: bool = False
    on_share: OnShare | None = None
    on_commit: OnCommit | None = None
    partial: Partial | None = None
    now: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._tally = Tally(self.shard, self.on_commit)
        self._deadline = Deadline(self.method.seconds, self.runtime, self.now)
        self._stopped_at = -1

    def run(self) -> Score:
        """The score of the whole shard."""
        self._check()
        self.mixture.open(1, int(self._tally.expected.sum()))
        told_bits = self._foresee()
        first = self._resume()
        for index, units in islice(enumerate(self._rounds()), first, None):
            if self.partial:
                self.partial.offer(index, self._state)
            learns = self.adapts and not self._is_over(index, units[0])
            # Experts follow the whole stream on every rank; they need no device.
            with self.clock.phase("hints" if self.mixture.experts else "score"):
                proposals = [self.mixture.propose(0, self._targets(unit)) for unit in units]
            with self.clock.phase("score"):
                batch, log_probs = self._predict(units, proposals)
                for unit, proposed, log_p in zip(units, proposals, log_probs, strict=False):
                    self._commit(unit, proposed, log_p)
                # Shares of one chunk are one event, however many ranks there are.
                for unit in units[:1] if self.adapts else units:
                    self._tally.note("price", unit.documents[0], unit.documents[-1])
            if learns:
                with self.clock.phase("adapt"):
                    self._adapt(batch, units)
            self._show()
        return self._tally.score(self.method, self.clock, self._stopped_at, told_bits)

    def _check(self) -> None:
        method = self.method
        if self.adapts and not self.predictor.can_adapt:
            raise RuleError("this artifact's recipe names no adapter; add one under [levers]")
        if method.flat and not method.stride:
            raise RuleError("--flat is for sliding windows: give --stride")

    def _foresee(self) -> float:
        """Tell adapters the number of chunks; returns what it costs to tell a decoder."""
        if not self.adapts:
            return 0.0
        return COUNT_BITS * self.predictor.foresee(sum(1 for _ in self._units()))

    def _state(self) -> dict[str, Any]:
        """Everything that later prices depend on, between two rounds."""
        return {
            "tally": self._tally.state(),
            "mixture": self.mixture.state(),
            "predictor": self.predictor.state() if self.adapts else {},
            "stopped_at": self._stopped_at,
        }

    def _resume(self) -> int:
        """Restore what a stopped score left; returns the first round to price."""
        if self.partial is None or (left := self.partial.find()) is None:
            return 0
        index, state = left
        self._deadline.spend(self.partial.spent_seconds)
        self._tally.load(state["tally"])
        self.mixture.load(state["mixture"])
        if state["predictor"]:
            self.predictor.load(state["predictor"])
        self._stopped_at = state["stopped_at"]
        self._show()
        return index

    def _show(self) -> None:
        if self.on_share:
            self.on_share(self._tally.share, self._tally.bpb)

    def _is_over(self, index: int, unit: Unit) -> bool:
        """True from the round on in which the time is over."""
        if self._stopped_at < 0 and self._deadline.is_over():
            self._stopped_at = index
            self._tally.note("stop", index, unit.documents[0])
        return self._stopped_at >= 0

    def _rounds(self) -> Iterator[list[Unit]]:
        """Units of the stream, one per rank at a time; adapters make it one chunk at a time."""
        units = self._units()
        if self.adapts:
            yield from map(self._shares, units)
            return
        while round_ := list(islice(units, self.runtime.world)):
            yield round_

    def _shares(self, chunk: Unit) -> list[Unit]:
        """A chunk cut between windows, one part per rank; whole documents are not cut."""
        if not chunk.windows:
            return [chunk]
        num, world, first = len(chunk.windows), self.runtime.world, chunk.first
        shares = []
        for begin, end in pairwise(sorted({num * rank // world for rank in range(world + 1)})):
            windows = chunk.windows[begin:end]
            num_targets = sum(window.length - window.owned for window in windows)
            share = replace(chunk, first=first, num_targets=num_targets, windows=windows)
            shares.append(share)
            first += num_targets
        return shares

    def _units(self) -> Iterator[Unit]:
        totals, starts, stride = self._tally.expected, self.shard.starts, self.method.stride
        context, size = self.predictor.context, self.part.batch_tokens
        if self.adapts:
            size = self.part.adapt_tokens
        if self.method.flat:
            flat = flat_windows(totals.tolist(), context, stride)
            for group in chunk_windows(flat, size) if self.adapts else group_windows(flat, size):
                first, last = group[0], group[-1]
                begin, end = first.start + first.owned, last.start + last.length
                documents = np.searchsorted(starts, [begin, end - 1], side="right") - 1
                lessons = [
                    Window(STREAM, start, min(context, end - start), 0)
                    for start in range(begin, end, context)
                ]
                held = range(documents[0], documents[1] + 1)
                yield Unit(held, begin, end - begin, group, lessons)
            return
        lengths = np.diff(starts, append=self.shard.num_tokens).tolist()
        for chunk in chunk_documents(lengths, size):
            counts = totals[chunk.start : chunk.stop].tolist()
            windows, lessons = [], []
            if stride:
                windows = list(isolated_windows(counts, context, stride))
                lessons = list(isolated_windows(counts, context, context))
            yield Unit(chunk, int(starts[chunk.start]), sum(counts), windows, lessons)

    def _predict(
        self, units: Sequence[Unit], proposals: Sequence[Proposals]
    ) -> tuple[Batch | None, list[np.ndarray]]:
        """This rank's batch, and log-probabilities (n, 1 + K) of every rank's unit."""
        batch, priced, rank = None, None, self.runtime.rank
        if self.adapts and not units[0].windows:
            # Every rank prices and learns the whole chunk.
            batch, log_p = self._price(units[0], proposals[0].hints)
            return batch, [log_p]
        if rank < len(units):
            batch, log_p = self._price(units[rank], proposals[rank].hints)
            priced = (units[rank].first, log_p)
        log_probs = []
        for unit, share in zip(units, gather_objects(priced, self.runtime), strict=False):
            assert isinstance(share, tuple)
            first, log_p = share
            if first != unit.first:
                raise RuleError(f"a rank priced target {first} instead of its own, {unit.first}")
            log_probs.append(log_p)
        return batch, log_probs

    def _commit(self, unit: Unit, proposals: Proposals, log_p: np.ndarray) -> None:
        """Mix the prices and enter them; mixers learn from targets that are entered."""
        targets = self._targets(unit)
        for begin in range(0, len(targets), SETTLE_EVERY):
            rows = slice(begin, begin + SETTLE_EVERY)
            part = Proposals(proposals.hints[rows], proposals.confidence[rows])
            mixed = self.mixture.price(part, targets[rows], log_p[rows])
            self._tally.commit_stream(unit.first + begin, -mixed)
            self.mixture.settle()

    def _adapt(self, batch: Batch | None, units: Sequence[Unit]) -> None:
        """Learn from the chunk priced last."""
        first, last = units[0], units[-1]
        assert self._tally.has_priced(last.first + last.num_targets), "a target was not priced yet"
        if batch is not None:
            self.predictor.adapt(batch)
        else:
            num_targets = sum(unit.num_targets for unit in units)
            self.predictor.learn(self._own_lessons(first), num_targets, self.runtime)
        # A GPU works on after the call returns; that time belongs to this phase.
        self.runtime.synchronize()
        self._tally.note("adapt", first.documents[0], first.documents[-1])

    def _own_lessons(self, chunk: Unit) -> list[tuple[Batch, torch.Tensor | None]]:
        """This rank's share of a chunk's lessons: batches, and the rows of targets in each."""
        num, rank, world = len(chunk.lessons), self.runtime.rank, self.runtime.world
        own = chunk.lessons[num * rank // world : num * (rank + 1) // world]
        passes: list[tuple[Batch, torch.Tensor | None]] = []
        for group in group_windows(own, self.part.batch_tokens):
            batch, rows = self._pack_windows(group, self._begins(chunk, group))
            passes.append((batch, torch.from_numpy(rows)))
        return passes

    def _begins(self, unit: Unit, windows: Sequence[Window]) -> list[int]:
        """The token of the stream at which each window of a unit begins."""
        starts, own = self.shard.starts, unit.documents
        bases = (0 if w.document == STREAM else int(starts[own[w.document]]) for w in windows)
        return [base + window.start for base, window in zip(bases, windows, strict=True)]

    def _targets(self, unit: Unit) -> np.ndarray:
        return np.asarray(self.shard.tokens[unit.first + 1 : unit.first + unit.num_targets + 1])

    def _price(self, unit: Unit, hints: np.ndarray) -> tuple[Batch | None, np.ndarray]:
        """Log-probabilities (n, 1 + K) of a unit's targets and of `hints` (n, K).

        The batch is what adapters may learn from, once the prices are committed.
        """
        if unit.windows:
            return None, self._price_windows(unit, hints)
        docs = [self.shard.doc(i) for i in unit.documents]
        batch, _ = pack_documents(docs, BOS_ID, self.predictor.context)
        log_p = self._log_p(batch, hints, np.arange(unit.num_targets))
        return batch, log_p[: unit.num_targets]

    def _price_windows(self, unit: Unit, hints: np.ndarray) -> np.ndarray:
        """Each target in the window that owns it; windows share a pass but not their context."""
        done: list[np.ndarray] = []
        num_done = 0
        for group in group_windows(unit.windows, self.part.batch_tokens):
            batch, owned = self._pack_windows(group, self._begins(unit, group))
            # Windows own consecutive targets, in the order of the hints.
            rows = slice(num_done, num_done + len(owned))
            done.append(self._log_p(batch, hints[rows], owned)[owned])
            num_done += len(owned)
        return np.concatenate(done)

    def _pack_windows(
        self, windows: Sequence[Window], begins: Sequence[int]
    ) -> tuple[Batch, np.ndarray]:
        """Windows that begin at these tokens of the stream, and the rows of targets they own.

        The tokens before a window are packed before it, as a segment that owns no target. Levers
        that look one token back would otherwise see the window that happens to share the pass.
        """
        before = np.array([min(LOOK_BACK, window.start) for window in windows])
        lengths = np.array([window.length for window in windows])
        firsts = np.cumsum(before + lengths) - lengths
        rows = [
            np.asarray(self.shard.tokens[begin - num : begin + length + 1], dtype=np.int64)
            for begin, num, length in zip(begins, before, lengths, strict=True)
        ]
        cuts, size = np.append(firsts - before, firsts), int(before.sum() + lengths.sum())
        batch = Batch(
            torch.from_numpy(np.concatenate([row[:-1] for row in rows])),
            torch.from_numpy(np.concatenate([row[1:] for row in rows])),
            segments_from_starts(cuts, size, self.predictor.context),
        )
        pairs = zip(firsts, windows, strict=True)
        return batch, np.concatenate([np.arange(f + w.owned, f + w.length) for f, w in pairs])

    def _log_p(self, batch: Batch, hints: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Log-probabilities (N, 1 + K); `hints` belong to some `rows` of the batch."""
        tokens = np.full((len(batch.targets), hints.shape[1]), -1, dtype=np.int64)
        tokens[rows] = hints
        wanted = torch.from_numpy(tokens) if hints.shape[1] else None
        return self.predictor.price(batch, wanted).cpu().double().numpy()
