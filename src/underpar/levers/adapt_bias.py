"""A bias on the logit of every token, learned while scoring, by SGD on tokens already priced.

It starts at zero and follows how often the text uses each token; one number a token, before the
soft cap. Source: the logit bias of PR 1399 (-0.002 BPB), by the gradient steps of dynamic
evaluation (Krause et al. 2017, arXiv:1709.07432). Legal: unlike the bias of SLOT it is fitted only
to tokens whose price was committed before; on PR 1399, which also trained before packing, there was
no ruling.
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
    """SGD on the bias, `epochs` steps a chunk; `clip` 0: none.

    With `horizon_chunks` the rate falls as a cosine to 0 at the last of so many chunks.
    """

    lr: float = 2.0
    clip: float = 0.0

    def __post_init__(self) -> None:
        self.check(NAME)


class Bias(nn.Module):
    """Logits + bias."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def adjust(self, site: str, visit: Visit | None, y: Tensor, x: Tensor) -> Tensor:
        """Shift the logits y (N, V)."""
        return y + self.bias if site == "head" else y


class BiasSGD(SGD):
    """SGD on a bias that is no part of the artifact."""

    def __init__(self, settings: Settings, vocab_size: int) -> None:
        super().__init__(settings, (f"levers.{NAME}.bias",))
        self._vocab_size = vocab_size

    def attach(self, model: Any) -> None:
        """Put a bias of zeros before the cap."""
        assert NAME not in model.levers, "attached twice"
        bias = Bias(self._vocab_size)
        model.levers[NAME] = bias
        model.hooks.change(adjust=bias.adjust)


def plug(settings: Settings, spec: ModelSpec) -> BiasSGD:
    """The adapter for the scorer."""
    return BiasSGD(settings, spec.vocab_size)
