"""Global phase: after a share of the documents is priced, trains all weights on them once.

Weights that training leaves alone stay: `asym_softcap` with `train = false`.

A phase is one pass of SGD over all documents priced so far, in chunks, with a rate that falls as a
cosine. With several phases each starts anew with more documents. It goes with `lora_ttt`.

Source: the global phase of PR 1610 (2,000 documents, -0.0006 BPB) and PR 2014 (2,500 of 50,000). PR
2140 measured -0.0002 for it on one artifact.

Legal: the documents were priced before. The place of a phase depends on the number of documents
only, which a header carries.

Cost: one forward and backward pass over these documents per phase.
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
    from underpar.model.network import Network

STAGE = "infer"


@dataclass(frozen=True)
class Settings:
    """`prefix`: share of the documents (0 to 1) after which the last phase runs.
    `phases`: number of phases, evenly spaced up to `prefix`.
    `lr`: learning rate at the start of a phase.
    `momentum`: momentum of SGD, 0 up to 1.
    `chunk_tokens`: tokens per step.
    `least_steps`: if there is little text, chunks are made smaller, for about so many steps.
    `clip`: largest norm of the gradient; 0 means no limit.
    """

    prefix: float = 0.05
    phases: int = 1
    lr: float = 0.001
    momentum: float = 0.9
    chunk_tokens: int = 32_768
    least_steps: int = 16
    clip: float = 1.0

    def __post_init__(self) -> None:
        self.descent.check("phased_sgd")
        prefix = self.prefix
        require(0 <= prefix <= 1, f"levers.phased_sgd.prefix = {prefix}: expected 0 to 1")
        for key in ("phases", "chunk_tokens", "least_steps"):
            value = getattr(self, key)
            require(value > 0, f"levers.phased_sgd.{key} = {value}: expected 1 or more")

    @property
    def descent(self) -> Descent:
        """The settings of SGD in a phase."""
        return Descent(self.lr, self.momentum, self.clip)


class PhasedSGD:
    """Says when a phase begins, and runs it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def boundaries(self, num_documents: int) -> tuple[int, ...]:
        """Rising numbers of documents after which phases begin; few documents have fewer phases."""
        phases = self.settings.phases
        # Rounded, so that 0.05 of 50,000 is 2,500 whatever the last bit of 0.05 is.
        last = round(self.settings.prefix * num_documents)
        ends = (last * (phase + 1) // phases for phase in range(phases))
        return tuple(sorted({end for end in ends if end}))

    def train(
        self, model: Network, documents: Sequence[npt.NDArray[Any]], context: int, runtime: Runtime
    ) -> int:
        """One pass over documents that begin with BOS; returns the number of steps.

        As published, each document is followed by its last target, a BOS, so two BOS tokens meet
        between documents.
        """
        if not documents:
            return 0
        end = np.array([BOS_ID])
        stream = np.concatenate([part for document in documents for part in (document, end)])
        part = self.settings
        chunk_tokens = min(part.chunk_tokens, max(1, len(stream) // part.least_steps))
        return train_on_stream(model, stream, chunk_tokens, context, part.descent, runtime)


def plug(settings: Settings, spec: ModelSpec) -> PhasedSGD:
    """The global phase for the scorer of documents."""
    return PhasedSGD(settings)
