"""Train all weights on the first documents, once they are priced, before going on.

After a share of the documents one pass of SGD over all of them, in chunks, with a rate that falls
as a cosine; in several phases each pass begins anew, with more documents. Source: the global phase
of PR 1610 (2,000 documents, -0.0006 BPB) and PR 2014 (2,500 of 50,000); PR 2140 measured -0.0002
for it on one artifact. Legal: the documents were priced before, and where a phase begins depends on
the number of documents alone, which a header carries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from underpar.infer.sgd import Descent, train_on_stream
from underpar.recipe import ModelSpec, require
from underpar.seams import BOS_ID

if TYPE_CHECKING:
    import numpy.typing as npt

    from underpar.core.runtime import Runtime
    from underpar.model.gpt import GPT

STAGE = "infer"


@dataclass(frozen=True)
class Settings:
    """The first `prefix` (a share) of the documents in `phases`; a step is `chunk_tokens`, or less
    where documents are few, so that a phase has about `least_steps`."""

    prefix: float = 0.05
    phases: int = 1
    lr: float = 0.001
    momentum: float = 0.9
    chunk_tokens: int = 32_768
    least_steps: int = 16
    clip: float = 1.0

    def __post_init__(self) -> None:
        self.descent.check("phased_sgd")
        share = self.prefix
        require(0 <= share <= 1, f"levers.phased_sgd.prefix = {share}: expected 0 to 1")
        for key in ("phases", "chunk_tokens", "least_steps"):
            value = getattr(self, key)
            require(value > 0, f"levers.phased_sgd.{key} = {value}: expected 1 or more")

    @property
    def descent(self) -> Descent:
        """The steps of a phase."""
        return Descent(self.lr, self.momentum, self.clip)


class PhasedSGD:
    """Where phases begin, and what one does."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def boundaries(self, num_documents: int) -> tuple[int, ...]:
        """Numbers of documents after which a phase begins, rising; few documents, fewer phases."""
        phases = self.settings.phases
        # Rounded: a share of 0.05 is meant as 2,500 of 50,000 whatever its last bit.
        last = round(self.settings.prefix * num_documents)
        ends = (last * (phase + 1) // phases for phase in range(phases))
        return tuple(sorted({end for end in ends if end}))

    def train(
        self, model: GPT, documents: Sequence[npt.NDArray[Any]], context: int, runtime: Runtime
    ) -> int:
        """One pass over documents that begin with BOS; returns the number of steps.

        As published each is followed by its last target, a BOS: two meet at every joint.
        """
        if not documents:
            return 0
        end = np.array([BOS_ID])
        stream = np.concatenate([part for document in documents for part in (document, end)])
        part = self.settings
        chunk_tokens = min(part.chunk_tokens, max(1, len(stream) // part.least_steps))
        return train_on_stream(model, stream, chunk_tokens, context, part.descent, runtime)


def plug(settings: Settings, spec: ModelSpec) -> PhasedSGD:
    """What the document engine asks."""
    return PhasedSGD(settings)
