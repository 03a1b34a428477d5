"""Uniform initialization: small uniform matrices, and attention outputs that do not start at zero.

Queries, keys, values, attention outputs and the MLP's up matrices start uniform, with a standard
deviation of `scale` / sqrt(inputs); down matrices stay zero. Norms of queries and keys make their
scale a matter of step size only: half the scale turns them twice as far per step. With outputs of
attention away from zero, its other matrices get a gradient from the first step on.

Source: modded-nanogpt, record 53 (PR 178: half the scale) and record 64 (values and outputs).

Legal: training only; it chooses where the weights start.

Cost: none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from underpar.recipe import ModelSpec, require

STAGE = "train"


@dataclass(frozen=True)
class Settings:
    """`scale`: standard deviation times the root of the number of inputs. The baseline's
    orthogonal matrices have 1.
    `outputs`: false leaves the outputs of attention at zero.
    """

    scale: float = 0.5
    outputs: bool = True

    def __post_init__(self) -> None:
        require(
            0 < self.scale <= 100,
            f"levers.uniform_init.scale = {self.scale:g}: expected more than 0, at most 100",
        )


class Lever:
    """Draws the matrices of all blocks again."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        self.settings = settings

    @torch.no_grad()
    def initialize(self, model: nn.Module) -> None:
        """Change the initial weights."""
        drawn = {"q", "k", "v", "up"} | ({"o"} if self.settings.outputs else set())
        matrices = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and name.rpartition(".")[2] in drawn
        }
        matrices = {name: m for name, m in matrices.items() if name.startswith("blocks.")}
        require(bool(matrices), "levers.uniform_init: this network has no blocks of q, k, v and up")
        for module in matrices.values():
            # A uniform variable between -b and b has the standard deviation b / sqrt(3).
            bound = self.settings.scale * (3.0 / module.in_features) ** 0.5
            nn.init.uniform_(module.weight, -bound, bound)
