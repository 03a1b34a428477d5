"""Documents side by side, each with adapters of its own: price a step, then learn from it.

In every step each lane prices the next chunk of its document, the prices are committed, and only
then do the lane's adapters learn from the chunk (PR 1530, PR 2014). In the order `stream` a free
lane takes the next document of the file, and the size of a chunk follows from its position in the
document. A decoder, who knows what was priced before, can do the same: `scorer.py` prices chunks of
a text that is known, `codec/adapted.py` codes them token by token, both in this loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from underpar.compile.startup import end_warm_up
from underpar.core.runtime import Clock, Runtime
from underpar.infer.lora import Lora, LoraSettings
from underpar.infer.predictor import Predictor
from underpar.infer.step import forward_step
from underpar.infer.tilt import Mixture
from underpar.score.ttt.forward import CompiledForward, Forward
from underpar.score.ttt.lanes import LaneBatch
from underpar.score.ttt.reading import FreshLanes, KeptLanes, Reading, StepShapes
from underpar.score.ttt.schedule import Chunk, ChunkSizes, fresh_window
from underpar.seams import Phases

# Widths of windows differ by this many tokens up to the limit, and by twice as many after it.
WIDTH_STEP, WIDTH_LIMIT = 64, 1024


class DocumentLoop(ABC):
    """The loop of documents that adapt. It owns the order: no adapter sees a token too early."""

    def __init__(
        self,
        predictor: Predictor,
        num_documents: int,
        runtime: Runtime,
        clock: Clock,
        settings: LoraSettings,
        mixture: Mixture,
        phases: Phases | None = None,
    ) -> None:
        """`phases` train the whole model between steps, at fixed numbers of finished documents."""
        self.predictor = predictor
        self.runtime = runtime
        self.clock = clock
        self.settings = settings
        self.mixture = mixture
        self.phases = phases
        self._sizes = ChunkSizes(settings.chunk, settings.short)
        self._num_lanes = min(settings.lanes, num_documents)
        self._forward: Forward = forward_step
        if runtime.compiled:
            self._forward = CompiledForward(vary=settings.keys != "kept")
        # What changes from step to step.
        self._step = 0
        self._adapts = True
        self._finished: list[int] = []
        self._boundaries = list(phases.boundaries(num_documents)) if phases else []
        # What a stopped score left of its lanes, until the first batch of lanes takes it over.
        self._lanes_left: dict[str, Any] | None = None

    @abstractmethod
    def text_of(self, document: int) -> np.ndarray:
        """The tokens of a document and the BOS that ends it, as far as they are known."""

    @abstractmethod
    def doc(self, document: int) -> np.ndarray:
        """The tokens of a document that is priced, without the BOS that ends it."""

    @abstractmethod
    def price(self, batch: LaneBatch, chunks: Sequence[Chunk], adapted: bool) -> Sequence[Chunk]:
        """Price and commit the chunks of a step; returns them as they turned out to be.

        A chunk of a text that is read from a compressed file may end early.
        """

    def adapts(self, batch: LaneBatch) -> bool:
        """Asked before each step: whether adapters act and learn in it."""
        return True

    @abstractmethod
    def note(self, kind: str, first: int, last: int) -> None:
        """Told what is learned from, as it happens."""

    def run_stream(self, steps: Iterable[Sequence[Chunk]]) -> None:
        """Price the steps of a `stream_schedule` and learn from them."""
        batch = self._make_batch(self._stream_reading())
        for chunks in steps:
            self._do_step(batch, chunks)
            if self._phase_is_due():
                self._train(sorted(self._finished))

    def _do_step(self, batch: LaneBatch, chunks: Sequence[Chunk]) -> None:
        """Predict, commit, then adapt. Every rank does the same, on lanes of its own."""
        self._adapts = self.adapts(batch)
        with self.clock.phase("score"):
            batch.shrink(batch.rows_of(chunks))
        chunks = self.price(batch, chunks, self._adapts)
        self._finished += [chunk.document for chunk in chunks if chunk.is_last]
        num_learnt = sum(chunk.count for chunk in chunks if not chunk.is_last)
        if self._adapts and num_learnt:
            with self.clock.phase("adapt"):
                batch.learn(batch.rows_of(chunks))
            self.note("adapt", self._step, num_learnt)
        self._step += 1

    def _phase_is_due(self) -> bool:
        return bool(self._boundaries) and len(self._finished) >= self._boundaries[0]

    def _train(self, documents: Sequence[int]) -> None:
        """Train the whole model on documents that are priced (PR 1610, PR 2014)."""
        assert self.phases is not None
        self._boundaries = self._boundaries[1:]
        if not self._adapts:
            return
        assert set(documents) <= set(self._finished), "a document was not priced yet"
        model = self.predictor.model
        with self.clock.phase("train"):
            texts = [self.doc(document) for document in documents]
            self.phases.train(model, texts, model.spec.context, self.runtime)
            self.runtime.synchronize()
        self.note("train", self._step, len(documents))

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
            return KeptLanes(spec, self.text_of, sizes.by_position, num_own, device)

        def window_of(chunk: Chunk) -> tuple[int, int, int]:
            size = sizes.by_position(chunk.first)
            return fresh_window(chunk.first, chunk.count, size, spec.context)

        return FreshLanes(spec, self.text_of, window_of, self.runtime.compiled)
