"""Score documents that adapt, in one of two orders.

`stream` is the order of the file, which a decoder can follow (`loop.py`). `published` sorts
documents by length, which a decoder learns only at the end of a document; it serves to reproduce
published figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from underpar.core.dist import gather_objects
from underpar.core.runtime import Clock, Runtime
from underpar.data.shards import Shard
from underpar.infer.experts import Ints, Proposals
from underpar.infer.lora import LoraSettings
from underpar.infer.predictor import Predictor
from underpar.infer.tilt import Mixture, join
from underpar.score.ledger import Score
from underpar.score.method import PUBLISHED, Deadline, Method
from underpar.score.tally import OnCommit, OnShare, Tally
from underpar.score.ttt.lanes import LaneBatch
from underpar.score.ttt.loop import DocumentLoop
from underpar.score.ttt.reading import FreshLanes
from underpar.score.ttt.schedule import (
    Chunk,
    published_schedule,
    published_window,
    stream_schedule,
)
from underpar.seams import Phases

if TYPE_CHECKING:
    from underpar.score.partial import Partial


class DocumentScorer(DocumentLoop):
    """One score of a shard."""

    def __init__(
        self,
        predictor: Predictor,
        shard: Shard,
        runtime: Runtime,
        clock: Clock,
        settings: LoraSettings,
        method: Method,
        mixture: Mixture,
        phases: Phases | None = None,
        on_share: OnShare | None = None,
        on_commit: OnCommit | None = None,
        partial: Partial | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(predictor, shard.num_documents, runtime, clock, settings, mixture, phases)
        self.shard = shard
        self.method = method
        self._on_share = on_share
        self._partial = partial
        # What changes from step to step.
        self._tally = Tally(shard, on_commit)
        self._deadline = Deadline(method.seconds, runtime, now)
        self._stopped_at = -1
        # Proposals for the whole stream, if experts read it in advance.
        self._ahead: Proposals | None = None

    def run(self) -> Score:
        """The score of the whole shard."""
        self.mixture.open(self._num_lanes, int(self._tally.expected.sum()))
        is_published = self.method.order == PUBLISHED
        if is_published:
            self._read_ahead()
        self._resume()
        if is_published:
            self._run_published()
        else:
            steps = stream_schedule(self._tally.expected.tolist(), self._num_lanes, self._sizes)
            self.run_stream(islice(steps, self._step, None))
        return self._tally.score(self.method, self.clock, self._stopped_at)

    def _run_published(self) -> None:
        totals = self._tally.expected.tolist()
        lengths = [total + 1 for total in totals]
        by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
        rank_of = {document: rank for rank, document in enumerate(by_length)}
        batch: LaneBatch | None = None
        size, num_done = 0, self._step
        for group in published_schedule(totals, lengths, self._num_lanes, self._sizes):
            if 0 < len(group.steps) <= num_done:
                num_done -= len(group.steps)
                continue
            reading = self._published_reading(group.chunk_size)
            if batch is None:
                batch = self._make_batch(reading)
            elif len(group.documents) != size:
                # The batch keeps its number of lanes, so that nothing is compiled again; lanes
                # without a document rest.
                batch.renew()
            size, batch.reading = len(group.documents), reading
            for chunks in group.steps[num_done:]:
                self._do_step(batch, chunks)
            num_done = 0
            if self._phase_is_due():
                # Cut to the boundary: the longest documents are left out (PR 2014).
                done = sorted(self._finished, key=rank_of.__getitem__)
                self._train(done[: self._boundaries[0]])
                batch.renew()

    def adapts(self, batch: LaneBatch) -> bool:
        """False once the time is over; before that a stop is possible."""
        if self._partial:
            self._partial.offer(self._step, lambda: self._state(batch))
        return not self._is_over()

    def price(self, batch: LaneBatch, chunks: Sequence[Chunk], adapted: bool) -> Sequence[Chunk]:
        """Price whole chunks, and enter them in the ledger."""
        with self.clock.phase("hints" if self.mixture.experts else "score"):
            proposals = self._propose(chunks)
        with self.clock.phase("score"):
            priced = self._predict(batch, batch.rows_of(chunks), proposals, adapted)
            self._commit(chunks, proposals, priced)
        self._show()
        return chunks

    def note(self, kind: str, first: int, last: int) -> None:
        """An event of the ledger."""
        self._tally.note(kind, first, last)

    def doc(self, document: int) -> np.ndarray:
        """The document in the shard."""
        return self.shard.doc(document)

    def _predict(
        self,
        batch: LaneBatch,
        rows: Sequence[Chunk],
        proposals: dict[int, Proposals],
        adapted: bool,
    ) -> dict[int, np.ndarray]:
        """Lane -> log-probabilities (count, 1 + K) of targets and hints, from all ranks."""
        priced: dict[int, np.ndarray] = {}
        if rows:
            batch.begin(rows)
            hints = {lane: proposed.hints for lane, proposed in proposals.items()}
            priced = batch.price(rows, hints, adapted)
        for share in gather_objects(priced, self.runtime):
            assert isinstance(share, dict)
            priced |= share
        return priced

    def _commit(
        self,
        chunks: Sequence[Chunk],
        proposals: dict[int, Proposals],
        priced: dict[int, np.ndarray],
    ) -> None:
        """Mix the prices and enter them, lane by lane; then mixers learn."""
        targets = np.concatenate([self._targets(chunk) for chunk in chunks])
        log_p = np.concatenate([priced[chunk.lane] for chunk in chunks])
        mixed = self.mixture.price(join([proposals[c.lane] for c in chunks]), targets, log_p)
        ends = np.cumsum([chunk.count for chunk in chunks])
        if self.mixture.experts and self._ahead is None:
            # Experts learn target by target, so prices are entered in this order too.
            owners = [chunk for chunk in chunks for _ in range(chunk.count)]
            places = _places(chunks)
            for row in _in_turns(chunks):
                first = owners[row].first + int(places[row])
                self._tally.commit(owners[row].document, first, -mixed[row : row + 1])
        else:
            for chunk, part in zip(chunks, np.split(mixed, ends[:-1]), strict=True):
                self._tally.commit(chunk.document, chunk.first, -part)
        self.mixture.settle()
        self._tally.note("price", self._step, int(ends[-1]))

    def _is_over(self) -> bool:
        """True from the step on at which the time is over."""
        if self._stopped_at < 0 and self._deadline.is_over():
            self._stopped_at = self._step
            self._tally.note("stop", self._step, len(self._finished))
        return self._stopped_at >= 0

    def _state(self, batch: LaneBatch) -> dict[str, Any]:
        """Everything that later prices depend on, between two steps."""
        return {
            "tally": self._tally.state(),
            "mixture": self.mixture.state(),
            # The name in files of stopped scores.
            "team": batch.state(),
            "predictor": self.predictor.state() if self.phases else {},
            "finished": self._finished,
            "boundaries": self._boundaries,
            "stopped_at": self._stopped_at,
        }

    def _resume(self) -> None:
        """Restore what a stopped score left; the first batch takes over its lanes."""
        if self._partial is None or (left := self._partial.find()) is None:
            return
        self._step, state = left
        self._deadline.spend(self._partial.spent_seconds)
        self._tally.load(state["tally"])
        self.mixture.load(state["mixture"])
        self._lanes_left = state["team"]
        if self.phases:
            self.predictor.load(state["predictor"])
        self._finished, self._boundaries = state["finished"], state["boundaries"]
        self._stopped_at = state["stopped_at"]
        self._show()

    def _show(self) -> None:
        if self._on_share:
            self._on_share(self._tally.share, self._tally.bpb)

    def _published_reading(self, chunk_size: int) -> FreshLanes:
        spec = self.predictor.model.spec

        def window_of(chunk: Chunk) -> tuple[int, int, int]:
            return published_window(chunk.first, chunk.count, chunk_size, spec.context)

        return FreshLanes(spec, self.text_of, window_of, self.runtime.compiled)

    def text_of(self, document: int) -> np.ndarray:
        """The document in the shard, with the next BOS."""
        # The BOS that ends a document begins the next one. The last document has none, and no
        # target there.
        begin = int(self.shard.starts[document])
        return self.shard.tokens[begin : begin + int(self._tally.expected[document]) + 1]

    def _targets(self, chunk: Chunk) -> np.ndarray:
        return self.text_of(chunk.document)[chunk.first + 1 : chunk.first + chunk.count + 1]

    def _read_ahead(self) -> None:
        # In the records experts followed the file, whatever the order of documents (PR 2135).
        with self.clock.phase("hints" if self.mixture.experts else "score"):
            self._ahead = self.mixture.propose(0, np.asarray(self.shard.tokens[1:]))

    def _propose(self, chunks: Sequence[Chunk]) -> dict[int, Proposals]:
        """Lane -> proposals (count, K) for its chunk."""
        if self._ahead is not None:
            begins = {c.lane: int(self.shard.starts[c.document]) + c.first for c in chunks}
            rows = {c.lane: slice(begins[c.lane], begins[c.lane] + c.count) for c in chunks}
            return {lane: self._ahead.rows(own) for lane, own in rows.items()}
        order = _in_turns(chunks)
        lanes = np.repeat([c.lane for c in chunks], [c.count for c in chunks])
        targets = np.concatenate([self._targets(chunk) for chunk in chunks])
        said = self.mixture.propose(lanes[order], targets[order]).rows(np.argsort(order))
        ends = np.cumsum([chunk.count for chunk in chunks])
        return {
            c.lane: said.rows(slice(end - c.count, end))
            for c, end in zip(chunks, ends, strict=True)
        }


def _places(chunks: Sequence[Chunk]) -> Ints:
    """The place of each target in its chunk."""
    return np.concatenate([np.arange(chunk.count) for chunk in chunks])


def _in_turns(chunks: Sequence[Chunk]) -> npt.NDArray[np.intp]:
    """The first targets of all chunks, then the second ones, and so on.

    Lanes that decode side by side learn their tokens in this order.
    """
    return np.argsort(_places(chunks), kind="stable")
