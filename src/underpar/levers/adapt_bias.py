"""Learns a bias for the logit of every token while scoring, by SGD on tokens already priced.

The bias starts at zero and follows how often the text uses each token. It is added before the soft
cap.

Source: the logit bias of PR 1399 (-0.002 BPB), with the gradient steps of dynamic evaluation
(Krause et al. 2017, arXiv:1709.07432).

Legal: unlike the bias of SLOT it is fitted only to tokens whose price was committed before. There
was no ruling on PR 1399, which also trained before packing.

Cost: one number per token of the vocabulary, none of them in the artifact, and one backward pass
per chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from underpar.infer.sgd import SGD, Descent
from underpar.recipe import ModelSpec
from underpar.seams import Visit

STAGE = "infer"

NAME = "adapt_bias"


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
    """

    lr: float = 2.0
    clip: float = 0.0

    def __post_init__(self) -> None:
        self.check(NAME)


class Bias(nn.Module):
    """Adds the bias to the logits."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def adjust(self, site: str, visit: Visit | None, y: Tensor, x: Tensor) -> Tensor:
        """Add the bias to the logits y (N, V)."""
        return y + self.bias if site == "head" else y


class BiasSGD(SGD):
    """SGD on a bias that is not part of the artifact."""

    def __init__(self, settings: Settings, vocab_size: int) -> None:
        super().__init__(settings, (f"*levers.{NAME}.bias",))
        self._vocab_size = vocab_size

    def attach(self, model: Any) -> None:
        """Add a bias of zeros to the model, before the cap."""
        assert NAME not in model.levers, "the bias is attached twice"
        bias = Bias(self._vocab_size)
        model.levers[NAME] = bias
        model.hooks.change(adjust=bias.adjust)


def plug(settings: Settings, spec: ModelSpec) -> BiasSGD:
    """The adapter for the scorer."""
    return BiasSGD(settings, spec.vocab_size)
