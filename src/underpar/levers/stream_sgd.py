"""Trains the whole model on the text while scoring it, by SGD on chunks already priced.

Chunks have score.adapt_tokens tokens (32,768 as published). With sliding windows a chunk is the
targets of consecutive windows: it is priced by these, then learnt from in plain windows, on all
ranks together. Without a stride a chunk is a few whole documents. The rate is constant, because a
decoder does not know how many chunks there will be; with `cosine` it falls over all of them.

Source: score-first test-time training in PR 461, PR 549 (lr 0.002) and PR 1413 (lr 0.005), three
epochs each, -0.0015 to -0.0031 BPB; PR 1894 scores with the values of PR 1413.

Legal: a chunk is learned from only after its price was committed, and it is never priced again. The
number of chunks, which `cosine` needs, is side information that the score pays for.

Cost: `epochs` forward and backward passes per chunk, and a velocity for every weight.
"""

from __future__ import annotations

from dataclasses import dataclass

from underpar.infer.sgd import SGD, Descent
from underpar.recipe import ModelSpec

STAGE = "infer"


@dataclass(frozen=True)
class Settings(Descent):
    """`lr`: learning rate.
    `momentum`: momentum of SGD, 0 up to 1.
    `clip`: largest norm of the gradient; 0 means no limit.
    `epochs`: SGD steps per chunk.
    `horizon_chunks`: number of chunks over which the rate falls to 0 as a cosine; 0 keeps it
    constant.
    `cosine`: true lets the rate fall over all chunks of the text, as published; their number costs
    32 bits.
    `patterns`: name patterns of the tensors that are trained.
    """

    lr: float = 0.005
    epochs: int = 3
    patterns: tuple[str, ...] = ("*",)

    def __post_init__(self) -> None:
        self.check("stream_sgd")


def plug(settings: Settings, spec: ModelSpec) -> SGD:
    """The adapter for the scorer."""
    return SGD(settings, settings.patterns)
