"""The batches of one rank, prepared ahead of the step that asks for them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from underpar.core.runtime import Runtime
from underpar.data.batch import Batch
from underpar.data.loader import Loader, micros_of_rank, prefetch


class Feed:
    """The micro-batches of this rank, in order.

    When the context changes, the prepared batches are dropped and prepared again from the same
    tokens, cut at the new length. A batch is a function of its place, so no token is skipped or
    read twice. The published loader loses the batches that it had prepared.
    """

    def __init__(self, loader: Loader, runtime: Runtime) -> None:
        self._loader = loader
        self._micros = micros_of_rank(loader.num_micro_batches, runtime.rank, runtime.world)
        self._pin = runtime.device.type == "cuda"
        self._context: int | None = None
        self._batches: Iterator[Batch] | None = None

    def at(self, step: int, context: int | None = None) -> Iterator[Batch]:
        """The batches from `step` on, cut at `context` or as planned; steps follow each other."""
        if self._batches is None or context != self._context:
            self.close()
            places = ((s, m, context) for s in itertools.count(step) for m in self._micros)
            self._batches = prefetch(self._loader, places, self._pin)
            self._context = context
        return self._batches

    def close(self) -> None:
        """Stop preparing."""
        if self._batches is not None:
            # The batches come from a generator; closing it ends its thread.
            self._batches.close()  # type: ignore[attr-defined]
            self._batches = None
