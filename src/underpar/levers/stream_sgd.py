"""Train the whole model on the text while scoring it, by SGD on chunks already priced.

The chunks are those of score.adapt_tokens (32,768 as published); a chunk's own price never sees
them. The rate is constant: a decoder does not know how many chunks there will be. The published
cosine over all of them needs `horizon_chunks`, which is side information: a header would have to
carry it. Source: score-first test-time training in PR 461, PR 549 (lr 0.002) and PR 1413 (lr
0.005), three epochs each, -0.0015 to -0.0031 BPB. Legal: a chunk is learned from only after its
price was committed, and is never priced again.
"""

from __future__ import annotations

from dataclasses import dataclass

from underpar.infer.sgd import SGD, Descent
from underpar.recipe import ModelSpec

STAGE = "infer"


@dataclass(frozen=True)
class Settings(Descent):
    """SGD on the tensors that `patterns` name, `epochs` steps a chunk; `clip` 0: none.

    With `horizon_chunks` the rate falls as a cosine to 0 at the last of so many chunks.
    """

    lr: float = 0.005
    epochs: int = 3
    patterns: tuple[str, ...] = ("*",)

    def __post_init__(self) -> None:
        self.check("stream_sgd")


def plug(settings: Settings, spec: ModelSpec) -> SGD:
    """The adapter for the scorer."""
    return SGD(settings, settings.patterns)
