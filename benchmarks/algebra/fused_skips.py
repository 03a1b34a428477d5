"""Skips and what else levers do before a visit, in one region with the visit.

Training compiles them as regions of their own, so that visits with and without a skip share a graph
and a start takes less time. The stream then is written and read once more at each skip, and its
gradient too.

Why it could win: apart, skips cost 2.4 % of a step with the loop off and 2.6 % with it on
(docs/speed.md). Why it could lose: two graphs more to compile, which a start pays for.

Source: PR 2014 compiles the whole network as one graph.
"""

from __future__ import annotations

import types

from underpar.model.gpt import GPT
from underpar.model.network import EAGER, Eager
from underpar.recipe import Recipe
from underpar.seams import Stream, Visit


def apply(network: GPT, recipe: Recipe) -> None:
    """Move what is done before a visit into the visit."""
    network.before_block = types.MethodType(_nothing, network)  # type: ignore[method-assign]
    network.run_block = types.MethodType(_run_block, network)  # type: ignore[method-assign]


def _nothing(network: GPT, visit: Visit, stream: Stream) -> None:
    """The visit does it."""


def _run_block(network: GPT, visit: Visit, stream: Stream, run: Eager = EAGER) -> None:
    GPT.before_block(network, visit, stream)
    GPT.run_block(network, visit, stream, run)
