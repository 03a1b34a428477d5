"""Train the MLPs of the last blocks while scoring, by SGD on chunks already priced.

Embeddings, attention, norms and scalars stay as packed. Source: end-to-end test-time training
(arXiv:2512.23675) as PR 1894 has it, in chunks of 32,768 tokens (score.adapt_tokens): lr 0.005, 3
epochs and a share of 0.25 gave -0.0009 BPB, 0.015, 2 and 0.5 gave -0.0019. Legal: a chunk is
learned from only after its price was committed, and is never priced again; the rate is constant
unless `horizon_chunks`, side information that a header would have to carry, says otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from underpar.infer.sgd import SGD, Descent
from underpar.recipe import ModelSpec, require

STAGE = "infer"


@dataclass(frozen=True)
class Settings(Descent):
    """SGD on the MLPs of the last `share` of the blocks, `epochs` steps a chunk; `clip` 0: none.

    With `horizon_chunks` the rate falls as a cosine to 0 at the last of so many chunks.
    """

    lr: float = 0.015
    epochs: int = 2
    share: float = 0.25

    def __post_init__(self) -> None:
        self.check("ttt_e2e")
        share = self.share
        require(0 < share <= 1, f"levers.ttt_e2e.share = {share}: expected above 0, at most 1")


def plug(settings: Settings, spec: ModelSpec) -> SGD:
    """The adapter for the scorer."""
    # Rounded first: 10 blocks without 0.9 of them are 0.99... in floats, and 1 is meant.
    first = math.floor(round(spec.num_layers * (1 - settings.share), 6))
    first = min(first, spec.num_layers - 1)
    return SGD(settings, [f"blocks.{layer}.mlp.*" for layer in range(first, spec.num_layers)])
