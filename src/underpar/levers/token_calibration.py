"""Logit calibration: scales and shifts the logits of each class of tokens, fitted at packing.

z -> scale z + bias after the soft cap, with one pair for each of seven classes. The first class is
control and byte tokens. The others are ranges of ids that grow geometrically, because BPE numbers
its tokens in the order of its merges. `underpar pack` fits the pairs to the rounded model, on
training text that the run did not read (`quant/logit_fit.py`), and writes them into the artifact's
recipe.

Source: PR 1884 and PR 1924 (one scale, biases by the spelling of a token, 100,000 training tokens).

Legal: the numbers are fitted to training text before the artifact is written, the artifact's bytes
hold them, and they are the same for every token scored.

Cost: 14 numbers in the artifact's recipe, and one multiply-add per logit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from underpar.kernels.capped import soft_cap
from underpar.recipe import ModelSpec, require

STAGE = "infer"

NUM_CLASSES = 7
# The first id that a merge made: ids below are control and byte tokens, in every tokenizer here.
FIRST_MERGE = 260
# A larger number is not a calibration.
LARGEST = 100.0


@dataclass(frozen=True)
class Settings:
    """The defaults leave logits as they are; packing starts from the values of the recipe.

    `scales`: factor per class, above 0; control and byte tokens first.
    `biases`: nats added per class, in the same order.
    """

    scales: tuple[float, ...] = (1.0,) * NUM_CLASSES
    biases: tuple[float, ...] = (0.0,) * NUM_CLASSES

    def __post_init__(self) -> None:
        where = "levers.token_calibration."
        for key in ("scales", "biases"):
            values = getattr(self, key)
            fits = len(values) == NUM_CLASSES
            require(fits, f"{where}{key} = {values}: expected {NUM_CLASSES} numbers")
        # NaN fails both comparisons, so it is refused too.
        positive = all(0 < scale <= LARGEST for scale in self.scales)
        require(positive, f"{where}scales = {self.scales}: expected more than 0, up to {LARGEST:g}")
        small = all(abs(bias) <= LARGEST for bias in self.biases)
        require(small, f"{where}biases = {self.biases}: expected -{LARGEST:g} to {LARGEST:g}")


class TokenCalibration:
    """The calibration by class: a fixed part of the model that scores."""

    def __init__(self, settings: Settings, vocab_size: int) -> None:
        self.settings = settings
        growth = max(1.0, vocab_size / FIRST_MERGE) ** (1 / (NUM_CLASSES - 1))
        firsts = [round(FIRST_MERGE * growth**i) for i in range(NUM_CLASSES - 1)]
        self.classes = torch.bucketize(torch.arange(vocab_size), torch.tensor(firsts), right=True)

    def attach(self, model: Any) -> None:
        """Calibrate the capped logits of the model."""
        device = next(model.parameters()).device
        scales, biases = (
            torch.tensor(values)[self.classes].to(device)  # (V,)
            for values in (self.settings.scales, self.settings.biases)
        )
        cap = model.hooks.cap or partial(soft_cap, cap=model.spec.softcap)

        def calibrated(logits: Tensor, fused: bool) -> Tensor:
            return torch.addcmul(biases, cap(logits, fused=fused), scales)

        model.hooks.change(cap=calibrated)


def plug(settings: Settings, spec: ModelSpec) -> TokenCalibration:
    """The calibration for packing and for the scorer."""
    return TokenCalibration(settings, spec.vocab_size)
