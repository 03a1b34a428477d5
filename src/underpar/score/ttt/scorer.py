"""Score-first test-time training: documents side by side, each with adapters of its own.

In every step each lane prices the next chunk of its document, the prices are committed, and only
then do the lane's adapters learn from the chunk (PR 1530, PR 2014). In the order `stream` a free
lane takes the next document of the file and a chunk's size follows from its place in the document:
a decoder, who knows what was priced before, can do the same. The order `published` sorts documents
by length, which nobody knows before the end of a document; it is there to repeat published figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from underpar.compile.startup import end_warm_up
from underpar.core.dist import from_main, gather_objects
from underpar.core.runtime import Clock, Runtime
from underpar.data.shards import Shard
from underpar.infer.experts import Proposals
from underpar.infer.lora import Lora, LoraSettings
from underpar.infer.predictor import Predictor
from underpar.infer.tilt import Mixture, join
from underpar.score.ledger import Score
from underpar.score.method import PUBLISHED, STOP_BITS, Method
from underpar.score.tally import OnCommit, Tally
from underpar.score.ttt.forward import CompiledPricing, price_rows
from underpar.score.ttt.lanes import Team
from underpar.score.ttt.reading import FreshLanes, KeptLanes, Reading, Sizes
from underpar.score.ttt.schedule import (
    Chunks,
    Turn,
    fresh_window,
    published_schedule,
    published_window,
    stream_schedule,
)
from underpar.seams import Phases

if TYPE_CHECKING:
    from underpar.score.partial import Partial

# Widths of windows: up to the limit in steps of so many tokens, then of twice as many.
WIDTH_STEP, WIDTH_LIMIT = 64, 1024

# (share of the targets done, bits per byte so far)
OnStep = Callable[[float, float], None]


class LaneSettings(LoraSettings, Protocol):
    """How documents are read; the lever `lora_ttt` settles it."""

    @property
    def lanes(self) -> int:
        """Documents side by side."""

    @property
    def chunk(self) -> int:
        """Targets between two updates of a document."""

    @property
    def short(self) -> tuple[str, ...]:
        """Smaller chunks up to a limit."""

    @property
    def keys(self) -> str:
        """Whether keys are "kept" from chunk to chunk, or "fresh"."""


@dataclass
class DocumentScorer:
    """Owns the loop, so that no adapter sees a token before it is priced."""

    predictor: Predictor
    shard: Shard
    runtime: Runtime
    clock: Clock
    mixture: Mixture
    phases: Phases | None = None
    on_commit: OnCommit | None = None
    partial: Partial | None = None

    def run(self, method: Method, lora: LaneSettings, on_step: OnStep | None = None) -> Score:
        """The score of the whole shard."""
        self.lora = lora
        self._tally = Tally(self.shard, self.on_commit)
        self._deadline = time.monotonic() + method.seconds if method.seconds else float("inf")
        self._stopped_at = -1
        self._num_steps = 0
        self._on_step = on_step
        self._finished: list[int] = []
        phases = self.phases.boundaries(self.shard.num_documents) if self.phases else ()
        self._boundaries = list(phases)
        self._ahead: Proposals | None = None
        self._left: dict[str, Any] | None = None
        self._chunks = Chunks(self.lora.chunk, self.lora.short)
        self._pricing = price_rows
        if self.runtime.compiled:
            self._pricing = CompiledPricing(vary=self.lora.keys != "kept")
        num_lanes = min(self.lora.lanes, self.shard.num_documents)
        self.mixture.open(num_lanes, int(self._tally.expected.sum()))
        if method.order == PUBLISHED:
            self._read_ahead()
        self._resume()
        if method.order == PUBLISHED:
            self._run_published(num_lanes)
        else:
            self._run_stream(num_lanes)
        return Score(
            method.label,
            self._tally.entries(),
            self.clock.read(),
            self._tally.events,
            order=method.order,
            stopped_at=self._stopped_at,
            side_bits=STOP_BITS if self._stopped_at >= 0 else 0.0,
            how=method.as_dict(),
        )

    def _run_stream(self, num_lanes: int) -> None:
        team = self._make_team(num_lanes, self._stream_reading(num_lanes))
        steps = stream_schedule(self._tally.expected.tolist(), num_lanes, self._chunks)
        for turns in islice(steps, self._num_steps, None):
            self._step(team, turns)
            if self._boundaries and len(self._finished) >= self._boundaries[0]:
                self._train(sorted(self._finished))

    def _read_ahead(self) -> None:
        # Experts followed the file in the records, whatever the order of documents (PR 2135).
        with self.clock.phase("hints" if self.mixture.experts else "score"):
            self._ahead = self.mixture.propose(0, np.asarray(self.shard.tokens[1:]))

    def _run_published(self, num_lanes: int) -> None:
        totals = self._tally.expected.tolist()
        lengths = [total + 1 for total in totals]
        groups = list(published_schedule(totals, lengths, num_lanes, self._chunks))
        # The order in which trained documents are put together: by length.
        place = {d: i for i, d in enumerate(sorted(range(len(lengths)), key=lengths.__getitem__))}
        team: Team | None = None
        size, num_done = 0, self._num_steps
        for group in groups:
            if 0 < len(group.steps) <= num_done:
                num_done -= len(group.steps)
                continue
            if team is None:
                team = self._make_team(num_lanes, self._published_reading(group.chunk))
            elif len(group.documents) != size:
                # Lanes without a document rest: as many as before, so that nothing is compiled.
                team.renew()
            size = len(group.documents)
            team.reading = self._published_reading(group.chunk)
            for turns in group.steps[num_done:]:
                self._step(team, turns)
            num_done = 0
            if self._boundaries and len(self._finished) >= self._boundaries[0]:
                # Cut to the boundary: the longest are left out (PR 2014).
                done = sorted(self._finished, key=place.__getitem__)[: self._boundaries[0]]
                self._train(done)
                team.renew()

    def _make_team(self, num_lanes: int, reading: Reading) -> Team:
        """This rank's share of the lanes, with new adapters."""
        predictor, lanes = self.predictor, self._own_lanes(num_lanes)
        lora = Lora(
            predictor.model,
            self.lora,
            lanes,
            predictor.device,
            predictor.dtype,
            self.runtime.compiled,
        )
        team = Team(predictor, reading, lora, self._pricing, self.clock)
        if self._left is not None:
            team.load(self._left)
            self._left = None
        if self.runtime.compiled and lanes:
            with self.clock.phase("warm-up"):
                team.record(self._sizes(reading), len(self.mixture.experts))
                self.runtime.synchronize()
            end_warm_up()
        return team

    def _sizes(self, reading: Reading) -> Sizes:
        """Few shapes for all steps: the widest chunk, as few steps are of smaller ones alone, or
        windows."""
        widest, context = max(self._chunks.sizes), self.predictor.context
        if isinstance(reading, KeptLanes):
            return Sizes((widest,), widest)
        small = range(WIDTH_STEP, WIDTH_LIMIT, WIDTH_STEP)
        large = range(WIDTH_LIMIT, context, 2 * WIDTH_STEP)
        widths = (*(width for width in (*small, *large) if width < context), context)
        return Sizes(widths, widest)

    def _state(self, team: Team) -> dict[str, Any]:
        """All that the prices to come depend on, between two steps."""
        return {
            "tally": self._tally.state(),
            "mixture": self.mixture.state(),
            "team": team.state(),
            "predictor": self.predictor.state() if self.phases else {},
            "finished": self._finished,
            "boundaries": self._boundaries,
            "stopped_at": self._stopped_at,
        }

    def _resume(self) -> None:
        """Go on from what a stopped score left; the first team takes over its lanes."""
        if self.partial is None or (found := self.partial.find()) is None:
            return
        self._num_steps, state = found
        self._deadline -= self.partial.spent_seconds
        self._tally.load(state["tally"])
        self.mixture.load(state["mixture"])
        self._left = state["team"]
        if self.phases:
            self.predictor.load(state["predictor"])
        self._finished, self._boundaries = state["finished"], state["boundaries"]
        self._stopped_at = state["stopped_at"]
        if self._on_step:
            self._on_step(self._tally.share, self._tally.bpb)

    def _own_lanes(self, num_lanes: int) -> range:
        return range(self.runtime.rank, num_lanes, self.runtime.world)

    def _stream_reading(self, num_lanes: int) -> Reading:
        spec, device, chunks = self.predictor.model.spec, self.predictor.device, self._chunks
        if self.lora.keys == "kept":
            num_own = len(self._own_lanes(num_lanes))
            return KeptLanes(spec, self._text_of, chunks.by_position, num_own, device)

        def window_of(turn: Turn) -> tuple[int, int, int]:
            chunk = chunks.by_position(turn.first)
            return fresh_window(turn.first, turn.count, chunk, spec.context)

        return FreshLanes(spec, self._text_of, window_of, self.runtime.compiled)

    def _published_reading(self, chunk: int) -> FreshLanes:
        spec = self.predictor.model.spec

        def window_of(turn: Turn) -> tuple[int, int, int]:
            return published_window(turn.first, turn.count, chunk, spec.context)

        return FreshLanes(spec, self._text_of, window_of, self.runtime.compiled)

    def _text_of(self, document: int) -> np.ndarray:
        # The BOS behind it is the next one's; the last document has none and no target there.
        begin = int(self.shard.starts[document])
        return self.shard.tokens[begin : begin + int(self._tally.expected[document]) + 1]

    def _targets(self, turn: Turn) -> np.ndarray:
        return self._text_of(turn.document)[turn.first + 1 : turn.first + turn.count + 1]

    def _propose(self, turn: Turn) -> Proposals:
        if self._ahead is None:
            return self.mixture.propose(turn.lane, self._targets(turn))
        begin = int(self.shard.starts[turn.document]) + turn.first
        own = slice(begin, begin + turn.count)
        return Proposals(self._ahead.hints[own], self._ahead.confidence[own])

    def _step(self, team: Team, turns: Sequence[Turn]) -> None:
        """Predict, commit, then adapt: the same on every rank, but for the lanes it reads."""
        if self.partial:
            self.partial.offer(self._num_steps, lambda: self._state(team))
        step, self._num_steps = self._num_steps, self._num_steps + 1
        adapted = not self._is_late(step)
        with self.clock.phase("hints" if self.mixture.experts else "score"):
            proposals = {turn.lane: self._propose(turn) for turn in turns}
        with self.clock.phase("score"):
            team.shrink(team.own(turns))
            own = team.own(turns)
            priced: dict[int, np.ndarray] = {}
            if own:
                team.begin(own)
                hints = {lane: found.hints for lane, found in proposals.items()}
                priced = team.price(own, hints, adapted)
            for share in gather_objects(priced, self.runtime):
                assert isinstance(share, dict)
                priced |= share
            self._commit(turns, [proposals[t.lane] for t in turns], [priced[t.lane] for t in turns])
            self._tally.note("price", step, sum(turn.count for turn in turns))
        learning = sum(turn.count for turn in turns if not turn.is_last)
        if adapted and learning:
            with self.clock.phase("adapt"):
                team.learn(own)
            self._tally.note("adapt", step, learning)
        if self._on_step:
            self._on_step(self._tally.share, self._tally.bpb)

    def _commit(
        self, turns: Sequence[Turn], proposals: Sequence[Proposals], priced: Sequence[np.ndarray]
    ) -> None:
        """Mix, and enter the prices, in the order of the lanes; only then do mixers learn."""
        targets = np.concatenate([self._targets(turn) for turn in turns])
        log_p = self.mixture.price(join(proposals), targets, np.concatenate(priced))
        ends = np.cumsum([turn.count for turn in turns])
        for turn, own in zip(turns, np.split(log_p, ends[:-1]), strict=True):
            self._tally.commit(turn.document, turn.first, -own)
        self.mixture.settle()
        self._finished += [turn.document for turn in turns if turn.is_last]

    def _is_late(self, step: int) -> bool:
        """True from the step on at which time is up: the main rank's clock decides."""
        is_over = time.monotonic() > self._deadline
        if self._stopped_at < 0 and from_main(float(is_over), self.runtime):
            self._stopped_at = step
            self._tally.note("stop", step, len(self._finished))
        return self._stopped_at >= 0

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
        self._tally.note("train", self._num_steps, len(documents))
