"""Score-first test-time training: documents side by side, each with adapters of its own.

In every step each lane prices the next chunk of its document, the prices are committed, and only
then do the lane's adapters learn from the chunk (PR 1530, PR 2014). In the order `stream` a free
lane takes the next document of the file, and the size of a chunk follows from its position in the
document. A decoder, who knows what was priced before, can do the same. The order `published` sorts
documents by length, which a decoder learns only at the end of a document; it serves to reproduce
published figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from underpar.compile.startup import end_warm_up
from underpar.core.dist import gather_objects
from underpar.core.runtime import Clock, Runtime
from underpar.data.shards import Shard
from underpar.infer.experts import Proposals
from underpar.infer.lora import Lora, LoraSettings
from underpar.infer.predictor import Predictor
from underpar.infer.step import forward_step
from underpar.infer.tilt import Mixture, join
from underpar.score.ledger import Score
from underpar.score.method import PUBLISHED, Deadline, Method
from underpar.score.tally import OnCommit, OnShare, Tally
from underpar.score.ttt.forward import CompiledForward, Forward
from underpar.score.ttt.lanes import LaneBatch
from underpar.score.ttt.reading import FreshLanes, KeptLanes, Reading, StepShapes
from underpar.score.ttt.schedule import (
    Chunk,
    ChunkSizes,
    fresh_window,
    published_schedule,
    published_window,
    stream_schedule,
)
from underpar.seams import Phases

if TYPE_CHECKING:
    from underpar.score.partial import Partial

# Widths of windows differ by this many tokens up to the limit, and by twice as many after it.
WIDTH_STEP, WIDTH_LIMIT = 64, 1024


class DocumentScorer:
    """One score of a shard. It owns the loop, so that no adapter sees a token before its price."""

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
        """`phases` train the whole model between steps, at fixed numbers of finished documents."""
        self.predictor = predictor
        self.shard = shard
        self.runtime = runtime
        self.clock = clock
        self.settings = settings
        self.method = method
        self.mixture = mixture
        self.phases = phases
        self._on_share = on_share
        self._partial = partial
        self._sizes = ChunkSizes(settings.chunk, settings.short)
        self._num_lanes = min(settings.lanes, shard.num_documents)
        self._forward: Forward = forward_step
        if runtime.compiled:
            self._forward = CompiledForward(vary=settings.keys != "kept")
        # What changes from step to step.
        self._tally = Tally(shard, on_commit)
        self._deadline = Deadline(method.seconds, runtime, now)
        self._step = 0
        self._stopped_at = -1
        self._finished: list[int] = []
        self._boundaries = list(phases.boundaries(shard.num_documents)) if phases else []
        # Proposals for the whole stream, if experts read it in advance.
        self._ahead: Proposals | None = None
        # What a stopped score left of its lanes, until the first batch of lanes takes it over.
        self._lanes_left: dict[str, Any] | None = None

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
            self._run_stream()
        return self._tally.score(self.method, self.clock, self._stopped_at)

    def _run_stream(self) -> None:
        batch = self._make_batch(self._stream_reading())
        steps = stream_schedule(self._tally.expected.tolist(), self._num_lanes, self._sizes)
        for chunks in islice(steps, self._step, None):
            self._do_step(batch, chunks)
            if self._phase_is_due():
                self._train(sorted(self._finished))

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

    def _do_step(self, batch: LaneBatch, chunks: Sequence[Chunk]) -> None:
        """Predict, commit, then adapt. Every rank does the same, on lanes of its own."""
        if self._partial:
            self._partial.offer(self._step, lambda: self._state(batch))
        adapted = not self._is_over()
        with self.clock.phase("hints" if self.mixture.experts else "score"):
            proposals = {chunk.lane: self._propose(chunk) for chunk in chunks}
        with self.clock.phase("score"):
            batch.shrink(batch.rows_of(chunks))
            rows = batch.rows_of(chunks)
            priced = self._predict(batch, rows, proposals, adapted)
            self._commit(chunks, proposals, priced)
        num_learnt = sum(chunk.count for chunk in chunks if not chunk.is_last)
        if adapted and num_learnt:
            with self.clock.phase("adapt"):
                batch.learn(rows)
            self._tally.note("adapt", self._step, num_learnt)
        self._step += 1
        self._show()

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
        for chunk, part in zip(chunks, np.split(mixed, ends[:-1]), strict=True):
            self._tally.commit(chunk.document, chunk.first, -part)
        self.mixture.settle()
        self._finished += [chunk.document for chunk in chunks if chunk.is_last]
        self._tally.note("price", self._step, int(ends[-1]))

    def _is_over(self) -> bool:
        """True from the step on at which the time is over."""
        if self._stopped_at < 0 and self._deadline.is_over():
            self._stopped_at = self._step
            self._tally.note("stop", self._step, len(self._finished))
        return self._stopped_at >= 0

    def _phase_is_due(self) -> bool:
        return bool(self._boundaries) and len(self._finished) >= self._boundaries[0]

    def _train(self, documents: Sequence[int]) -> None:
        """Train the whole model on documents that are priced (PR 1610, PR 2014)."""
        assert self.phases is not None
        self._boundaries = self._boundaries[1:]
        if self._stopped_at >= 0:
            return
        assert all(map(self._tally.is_finished, documents)), "a document was not priced yet"
        model = self.predictor.model
        with self.clock.phase("train"):
            texts = [self.shard.doc(document) for document in documents]
            self.phases.train(model, texts, model.spec.context, self.runtime)
            self.runtime.synchronize()
        self._tally.note("train", self._step, len(documents))

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

    def _make_batch(self, reading: Reading) -> LaneBatch:
        """This rank's lanes, with new adapters."""
        predictor, compiled, lanes = self.predictor, self.runtime.compiled, self._own_lanes()
        model, device, dtype = predictor.model, predictor.device, predictor.dtype
        lora = Lora(model, self.settings, lanes, device, dtype, compiled)
        batch = LaneBatch(predictor, reading, lora, self._forward, self.clock)
        if self._lanes_left is not None:
            batch.load(self._lanes_left)
            self._lanes_left = None
        if compiled and lanes:
            with self.clock.phase("warm-up"):
                batch.capture(self._step_shapes(reading), len(self.mixture.experts))
                self.runtime.synchronize()
            end_warm_up()
        return batch

    def _step_shapes(self, reading: Reading) -> StepShapes:
        """Few shapes for all steps.

        Kept lanes have one width, the largest chunk, because few steps consist of smaller chunks
        alone. Windows have several widths.
        """
        largest, context = self._sizes.largest, self.predictor.context
        if isinstance(reading, KeptLanes):
            return StepShapes((largest,), largest)
        small = range(WIDTH_STEP, WIDTH_LIMIT, WIDTH_STEP)
        large = range(WIDTH_LIMIT, context, 2 * WIDTH_STEP)
        widths = (*(width for width in (*small, *large) if width < context), context)
        return StepShapes(widths, largest)

    def _own_lanes(self) -> range:
        return range(self.runtime.rank, self._num_lanes, self.runtime.world)

    def _stream_reading(self) -> Reading:
        spec, sizes = self.predictor.model.spec, self._sizes
        if self.settings.keys == "kept":
            num_own, device = len(self._own_lanes()), self.predictor.device
            return KeptLanes(spec, self._text_of, sizes.by_position, num_own, device)

        def window_of(chunk: Chunk) -> tuple[int, int, int]:
            size = sizes.by_position(chunk.first)
            return fresh_window(chunk.first, chunk.count, size, spec.context)

        return FreshLanes(spec, self._text_of, window_of, self.runtime.compiled)

    def _published_reading(self, chunk_size: int) -> FreshLanes:
        spec = self.predictor.model.spec

        def window_of(chunk: Chunk) -> tuple[int, int, int]:
            return published_window(chunk.first, chunk.count, chunk_size, spec.context)

        return FreshLanes(spec, self._text_of, window_of, self.runtime.compiled)

    def _text_of(self, document: int) -> np.ndarray:
        # The BOS that ends a document begins the next one. The last document has none, and no
        # target there.
        begin = int(self.shard.starts[document])
        return self.shard.tokens[begin : begin + int(self._tally.expected[document]) + 1]

    def _targets(self, chunk: Chunk) -> np.ndarray:
        return self._text_of(chunk.document)[chunk.first + 1 : chunk.first + chunk.count + 1]

    def _read_ahead(self) -> None:
        # In the records experts followed the file, whatever the order of documents (PR 2135).
        with self.clock.phase("hints" if self.mixture.experts else "score"):
            self._ahead = self.mixture.propose(0, np.asarray(self.shard.tokens[1:]))

    def _propose(self, chunk: Chunk) -> Proposals:
        if self._ahead is None:
            return self.mixture.propose(chunk.lane, self._targets(chunk))
        begin = int(self.shard.starts[chunk.document]) + chunk.first
        rows = slice(begin, begin + chunk.count)
        return Proposals(self._ahead.hints[rows], self._ahead.confidence[rows])
