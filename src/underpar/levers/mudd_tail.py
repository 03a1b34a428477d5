"""MUDD tail: before the head, every token chooses how much of a few earlier outputs to add.

The sources are the embedding and the outputs of some layers. A small network reads the stream as it
is, without a norm, and gives one weight per source. Its biases start so that the output of layer
`backout` is subtracted by half and nothing else is added. `mudd` does so before every layer; the
tail touches one place.

Source: modded-nanogpt, record 81 (PR 259), which also mixes sources into the values of the last
layer; MUDDFormer (Xiao et al. 2025, arXiv:2502.12170).

Legal: it reads the token's own earlier states.

Cost: `width` x (channels + sources) weights, one multiply-add over the stream per source, and the
memory of the sources.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from underpar.recipe import ModelSpec, require
from underpar.seams import Stream, Visit, check_layers

STAGE = "model"
# Factor on all weights: their parameters learn at the rate of scalars, which is ten times too fast.
SCALE = 0.1


@dataclass(frozen=True)
class Settings:
    """`layers`: layers whose latest outputs are sources, beside the embedding.
    `backout`: the one of them that is subtracted at the start of training; -1: none.
    `width`: hidden channels of the small network.
    """

    layers: tuple[int, ...] = (3, 7, 9)
    backout: int = 7
    width: int = 64

    def __post_init__(self) -> None:
        require(self.width > 0, f"levers.mudd_tail.width = {self.width}: expected at least 1")
        require(
            self.backout == -1 or self.backout in self.layers,
            f"levers.mudd_tail.backout = {self.backout}: expected -1 or one of {self.layers}",
        )


class Lever(nn.Module):
    """x + sum_j c_j source_j with c = 0.1 (V gelu(U x) + b); source 0 is the embedding."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        self.layers = check_layers("mudd_tail", settings.layers, spec)
        num = 1 + len(self.layers)
        self.read = nn.Parameter(torch.empty(spec.dim, settings.width))
        self.weigh = nn.Parameter(torch.zeros(settings.width, num))
        self.bias = nn.Parameter(torch.zeros(num))
        nn.init.uniform_(self.read, -(spec.dim**-0.5), spec.dim**-0.5)
        if settings.backout >= 0:
            with torch.no_grad():
                self.bias[1 + self.layers.index(settings.backout)] = -0.5 / SCALE

    def neutral_(self) -> None:
        """Set all weights of sources to 0: nothing is added."""
        nn.init.zeros_(self.weigh)
        nn.init.zeros_(self.bias)

    def after(self, visit: Visit, x_in: Tensor, stream: Stream) -> None:
        """Keep the latest output of a source."""
        if visit.layer in self.layers:
            stream.kept[f"mudd_tail.{visit.layer}"] = stream.x

    def finish(self, stream: Stream) -> None:
        """Add the weighted sources (N, dim) to the stream."""
        x = stream.x
        sources = [stream.start, *(stream.kept[f"mudd_tail.{layer}"] for layer in self.layers)]
        read, weigh, bias = (t.to(x.dtype) for t in (self.read, self.weigh, self.bias))
        weights = SCALE * (F.gelu(x @ read) @ weigh + bias)
        for j, source in enumerate(sources):
            x = x + weights[:, j : j + 1] * source
        stream.x = x
