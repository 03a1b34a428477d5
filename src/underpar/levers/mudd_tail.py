"""MUDD tail: before the head, every token chooses how much of a few earlier outputs to add.

The sources are the embedding and the outputs of some layers. A small network reads the stream as it
is, without a norm, and gives one weight per source. Its biases start so that the output of layer
`backout` is subtracted by half and nothing else is added. `mudd` does so before every layer; the
tail touches one place, or two: a second network of this kind adds sources to the values of one
layer, of which there are fewer channels than in the stream, so the first ones are taken.

Source: modded-nanogpt, record 81 (PR 259), with the values of the last layer; MUDDFormer (Xiao et
al. 2025, arXiv:2502.12170).

Legal: it reads the token's own earlier states.

Cost: `width` x (channels + sources) weights, one multiply-add over the stream per source, and the
memory of the sources.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    `values`: layer whose values get the embedding, the outputs of the `layers` before it and the
    stream that enters it, all weighted; -1: none.
    """

    layers: tuple[int, ...] = (3, 7, 9)
    backout: int = 7
    width: int = 64
    values: int = -1

    def __post_init__(self) -> None:
        require(self.width > 0, f"levers.mudd_tail.width = {self.width}: expected at least 1")
        require(
            self.backout == -1 or self.backout in self.layers,
            f"levers.mudd_tail.backout = {self.backout}: expected -1 or one of {self.layers}",
        )


TINY = (Settings(), Settings(values=10))


class Weights(nn.Module):
    """c = 0.1 (V gelu(U x) + b): one weight per token and source, at the start from b alone."""

    def __init__(self, spec: ModelSpec, width: int, num_sources: int) -> None:
        super().__init__()
        self.read = nn.Parameter(torch.empty(spec.dim, width))
        self.weigh = nn.Parameter(torch.zeros(width, num_sources))
        self.bias = nn.Parameter(torch.zeros(num_sources))
        nn.init.uniform_(self.read, -(spec.dim**-0.5), spec.dim**-0.5)

    def neutral_(self) -> None:
        """Set all weights of sources to 0."""
        nn.init.zeros_(self.weigh)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (N, dim) -> weights (N, sources)."""
        read, weigh, bias = (t.to(x.dtype) for t in (self.read, self.weigh, self.bias))
        return SCALE * (F.gelu(x @ read) @ weigh + bias)


class Lever(nn.Module):
    """x + sum_j c_j source_j before the head, and as much for the values; source 0: embedding."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        self.layers = check_layers("mudd_tail", settings.layers, spec)
        self.tail = Weights(spec, settings.width, 1 + len(self.layers))
        if settings.backout >= 0:
            with torch.no_grad():
                self.tail.bias[1 + self.layers.index(settings.backout)] = -0.5 / SCALE
        self.value_layer = settings.values
        if self.value_layer >= 0:
            check_layers("mudd_tail", (self.value_layer,), spec)
            self.before_values = tuple(n for n in self.layers if n < self.value_layer)
            self.values = Weights(spec, settings.width, 2 + len(self.before_values))

    def neutral_(self) -> None:
        """Set all weights of sources to 0: nothing is added."""
        self.tail.neutral_()
        if self.value_layer >= 0:
            self.values.neutral_()

    def after(self, visit: Visit, x_in: Tensor, stream: Stream) -> None:
        """Keep the latest output of a source."""
        if visit.layer in self.layers:
            stream.kept[f"mudd_tail.{visit.layer}"] = stream.x

    def qkv(
        self, visit: Visit, q: Tensor, k: Tensor, v: Tensor, stream: Stream
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Add the weighted sources to the values (N, K, D) of one layer."""
        if visit.layer != self.value_layer:
            return q, k, v
        weights = self.values(stream.x)
        for j, source in enumerate((*self._sources(stream, self.before_values), stream.x)):
            added = weights[:, j : j + 1] * source[:, : v[0].numel()]
            v = v + added.view_as(v).to(v.dtype)
        return q, k, v

    def finish(self, stream: Stream) -> None:
        """Add the weighted sources (N, dim) to the stream."""
        x = stream.x
        weights = self.tail(x)
        for j, source in enumerate(self._sources(stream, self.layers)):
            x = x + weights[:, j : j + 1] * source
        stream.x = x

    def _sources(self, stream: Stream, layers: Sequence[int]) -> list[Tensor]:
        return [stream.start, *(stream.kept[f"mudd_tail.{layer}"] for layer in layers)]
