"""The table of levers: name -> module. A new lever is its file and one line here."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from underpar.data.transforms import TRANSFORMS
from underpar.seams import LeverModule

# Modules by name, imported when used: a bundle carries the levers of its recipe and no others.
# Text transforms live with the data they change, so that a data folder opens without a recipe.
LEVERS = {
    **TRANSFORMS,
    "adapt_scales": "underpar.levers.adapt_scales",
    "bigram": "underpar.levers.bigram",
    "ema": "underpar.levers.ema",
    "qk_gain": "underpar.levers.qk_gain",
    "smear": "underpar.levers.smear",
}


def lever_module(name: str) -> LeverModule:
    """The module of a lever in the table."""
    return cast(LeverModule, import_module(LEVERS[name]))
