"""The levers of a model, sorted by seam once, when it is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from underpar.recipe import require
from underpar.seams import MODEL_SEAMS, SINGLE_SEAMS

Hook = Callable[..., Any]


class Hooks:
    """Seam -> its hooks as an attribute: a list, or one hook or None where there is one place."""

    def __init__(self, levers: Mapping[str, nn.Module]) -> None:
        self._levers = levers
        for seam in MODEL_SEAMS:
            setattr(self, seam, [hook for _, hook in self._having(seam)])
        for seam in SINGLE_SEAMS:
            setattr(self, seam, self._one(self._having(seam), f"the seam {seam!r}"))

    if TYPE_CHECKING:

        def __getattr__(self, seam: str) -> Any: ...

    def wiring(self, layer: int) -> Hook | None:
        """What visits this layer's block in place of its own forward."""
        wires = dict(self._having("wires"))
        having = [(name, hook) for name, hook in self._having("wire") if wires[name](layer)]
        return self._one(having, f"the wiring of layer {layer}")

    def _having(self, seam: str) -> list[tuple[str, Hook]]:
        levers = self._levers.items()
        return [(name, getattr(lever, seam)) for name, lever in levers if hasattr(lever, seam)]

    @staticmethod
    def _one(having: list[tuple[str, Hook]], what: str) -> Hook | None:
        names = " and ".join(name for name, _ in having)
        require(len(having) < 2, f"levers {names}: both take {what}; name one of them")
        return having[0][1] if having else None
