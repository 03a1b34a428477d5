"""MUDD-lite: before each block every token chooses how much of each earlier output to add again.

The sources are the embedding and the latest output of each layer. Their weights have a static part
per layer and a dynamic part, which a small network reads from the stream. The full form has four
such inputs per block (queries, keys, values, residual); this one has one. Both parts start at 0,
which is the plain stack.

Source: MUDDFormer (Xiao et al. 2025, arXiv:2502.12170); PR 1936 (4.1 mBPB against PR 1493, where it
replaces `unet` and `x0_mix`).

Legal: it reads the token's own earlier states.

Cost: a small network per layer, one multiply-add over the stream per source and layer, and the
memory of all outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from underpar.recipe import ModelSpec, require
from underpar.seams import Stream, Visit

STAGE = "model"


@dataclass(frozen=True)
class Settings:
    """`width`: hidden channels of the small network."""

    width: int = 16

    def __post_init__(self) -> None:
        require(self.width > 0, f"levers.mudd.width = {self.width}: expected at least 1")


class Lever(nn.Module):
    """x + sum_j (static_j + (V gelu(U norm(x)))_j) source_j; source 0 is the embedding."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        layers, sources = spec.num_layers, spec.num_layers + 1
        self.static = nn.Parameter(torch.zeros(layers, sources))
        self.read = nn.Parameter(torch.empty(layers, spec.dim, settings.width))
        self.weigh = nn.Parameter(torch.zeros(layers, settings.width, sources))
        nn.init.normal_(self.read, std=spec.dim**-0.5)

    def neutral_(self) -> None:
        """Set both parts of the weights to 0: nothing is added."""
        nn.init.zeros_(self.static)
        nn.init.zeros_(self.weigh)

    def dead(self, plan: Sequence[Visit]) -> dict[str, Tensor]:
        """The weights of sources that do not exist yet at any visit of a layer."""
        unused = torch.ones(self.static.shape, dtype=torch.bool)
        written = {0}
        for visit in plan:
            unused[visit.layer, sorted(written)] = False
            written.add(visit.layer + 1)
        return {
            "static": unused,
            "weigh": unused[:, None].expand_as(self.weigh),
        }

    def before(self, visit: Visit, stream: Stream) -> None:
        """Add the weighted sources (N, dim) to the stream."""
        x = stream.x
        sources = stream.kept.setdefault("mudd", {0: stream.start})
        read, weigh, static = (
            t[visit.layer].to(x.dtype) for t in (self.read, self.weigh, self.static)
        )
        weights = static + F.gelu(F.rms_norm(x, (x.size(-1),)).to(x.dtype) @ read) @ weigh
        for j, source in sources.items():
            x = x + weights[:, j : j + 1] * source
        stream.x = x

    def after(self, visit: Visit, x_in: Tensor, stream: Stream) -> None:
        """Keep the latest output of the layer."""
        stream.kept["mudd"][visit.layer + 1] = stream.x
