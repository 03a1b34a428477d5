"""Trains the MLPs of the last blocks while scoring, by SGD on chunks already priced.

Embeddings, attention, norms and scalars stay as packed. Chunks are those of `stream_sgd`.

Source: end-to-end test-time training (arXiv:2512.23675) as in PR 1894, in chunks of 32,768 tokens
(score.adapt_tokens). Published runs: lr 0.005, 3 epochs and a share of 0.25 gave -0.0009 BPB; lr
0.015, 2 epochs and a share of 0.5 gave -0.0019 BPB, and are the defaults.

Legal: a chunk is learned from only after its price was committed, and it is never priced again. The
rate is constant unless `horizon_chunks` or `cosine` is set; the score pays for what `cosine` has to
know.

Cost: `epochs` forward and backward passes per chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from underpar.infer.sgd import SGD, Descent
from underpar.recipe import ModelSpec, require

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
    `share`: share of the blocks, counted from the last, whose MLPs are trained.
    """

    lr: float = 0.015
    epochs: int = 2
    share: float = 0.5

    def __post_init__(self) -> None:
        self.check("ttt_e2e")
        share = self.share
        require(0 < share <= 1, f"levers.ttt_e2e.share = {share}: expected above 0, at most 1")


def plug(settings: Settings, spec: ModelSpec) -> SGD:
    """The adapter for the scorer."""
    # Round first: 10 * (1 - 0.9) is 0.99... in floats, and 1 is meant.
    first = math.floor(round(spec.num_layers * (1 - settings.share), 6))
    first = min(first, spec.num_layers - 1)
    layers = range(first, spec.num_layers)
    # In an H-Net those of the main network.
    return SGD(settings, [f"{where}blocks.{n}.mlp.*" for n in layers for where in ("", "main.")])
