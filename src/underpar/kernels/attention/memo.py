"""Values computed from the boundaries of a batch: once per batch instead of once per layer."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")


class Memo:
    """A cache of values by boundaries and key, valid while the boundaries exist unchanged.

    Boundaries are compared as objects, by identity and version, and not by content: comparing their
    content would wait for the device. Equal boundaries in another tensor are a miss, which only
    costs time.
    """

    def __init__(self) -> None:
        self._kept: Any = WeakTensorKeyDictionary()

    def recall(self, cu: Tensor, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns; from the cache, if these boundaries and this key are known."""
        # A tensor made in inference mode has no version, so a change of it would not be noticed.
        if cu.is_inference():
            return make()
        version, values = self._kept.get(cu, (-1, {}))
        if version != cu._version:
            values = {}
            self._kept[cu] = cu._version, values
        if key not in values:
            values[key] = make()
        value: T = values[key]
        return value
