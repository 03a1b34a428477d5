"""Entropy-weighted loss: tokens that the model is unsure of weigh more in the training loss.

A token weighs `unsure` if the entropy of the model's own prediction is above the mean of the
micro-batch, and `sure` otherwise. The weighted sum is divided by the sum of the weights. Logs show
the plain loss.

Source: PR 1894, where an older study has the weights 1.5 and 0.5 and reports no gain; how it draws
the line between the two is not published. The idea is that of focal loss, arXiv:1708.02002.

Legal: training only. The score is the plain loss, which is therefore no longer what is minimized.

Cost: one more pass over the logits, forward, in training. Nothing in scoring.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from underpar.recipe import ModelSpec, require

STAGE = "train"


@dataclass(frozen=True)
class Settings:
    """`unsure`: weight of tokens whose prediction has more entropy than the mean.
    `sure`: weight of the others.
    """

    unsure: float = 1.5
    sure: float = 0.5

    def __post_init__(self) -> None:
        for key in ("unsure", "sure"):
            value = getattr(self, key)
            # A weight of 0 for all tokens of a micro-batch would make the loss 0 / 0.
            require(
                0 < value <= 100,
                f"levers.entropy_weight.{key} = {value}: expected more than 0, at most 100",
            )


NEUTRAL = Settings(unsure=1.0, sure=1.0)


class Lever:
    """Weights from the logits alone; it keeps no state."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        self.settings = settings

    def weigh(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The weight (N,) of each target, from the entropy of its prediction (N, V)."""
        log_probs = logits.float().log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return torch.where(entropy > entropy.mean(), self.settings.unsure, self.settings.sure)
