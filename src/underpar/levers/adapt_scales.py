"""Adapts the soft cap and the scale vectors while scoring, by SGD on tokens already priced.

A few thousand numbers follow the style of the text; the matrices stay as packed.

Source: bias- and scale-only test-time training in the manner of Tent (Wang et al. 2020,
arXiv:2006.10726), score first as ruled in PR 549.

Legal: the scorer prices a chunk, commits the prices, and only then hands the chunk to this lever.
The schedule depends on the number of tokens seen only, which a decoder knows too.

Cost: one backward pass per chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

from underpar.infer.sgd import SGD, Descent
from underpar.recipe import ModelSpec, require

STAGE = "infer"


@dataclass(frozen=True)
class Settings:
    """`lr`: learning rate of the scale vectors.
    `cap_lr`: learning rate of the soft cap.
    `momentum`: momentum of SGD, 0 up to 1.
    `patterns`: name patterns of the tensors that adapt.
    """

    lr: float = 0.5
    cap_lr: float = 5.0
    momentum: float = 0.9
    patterns: tuple[str, ...] = ("levers.*softcap.cap_*", "blocks.*_scale")

    def __post_init__(self) -> None:
        for key in ("lr", "cap_lr"):
            rate = getattr(self, key)
            require(rate >= 0, f"levers.adapt_scales.{key} = {rate}: expected 0 or more")
        momentum = self.momentum
        require(0 <= momentum < 1, f"levers.adapt_scales.momentum = {momentum}: expected 0 up to 1")


class ScaleSGD(SGD):
    """SGD with momentum; the soft cap has a learning rate of its own."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(Descent(settings.lr, settings.momentum, clip=0.0), settings.patterns)
        self.settings = settings

    def rate(self, name: str) -> float:
        """The learning rate of one tensor."""
        is_cap = name.rpartition(".")[2].startswith("cap_")
        return self.settings.cap_lr if is_cap else self.settings.lr


def plug(settings: Settings, spec: ModelSpec) -> ScaleSGD:
    """The adapter for the scorer."""
    return ScaleSGD(settings)
