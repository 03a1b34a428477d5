"""What is worked out from the boundaries of a batch, once a batch and not once a layer."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")


class Memo:
    """Values by boundaries and key, kept as long as the boundaries live and stay unchanged.

    Boundaries are told apart by identity and version, so that asking costs no wait for a device.
    A miss only costs time.
    """

    def __init__(self) -> None:
        self._kept: Any = WeakTensorKeyDictionary()

    def recall(self, cu: Tensor, key: Hashable, make: Callable[[], T]) -> T:
        """The value of `make`, from the last call with the same boundaries if there was one."""
        # A tensor made in inference mode has no version: whether it was changed cannot be told.
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
