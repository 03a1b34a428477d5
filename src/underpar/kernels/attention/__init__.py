"""Causal attention over packed documents, as one operator.

Queries, keys and values are flat; boundaries say where each document piece begins, and no query
sees a key of another piece. Further backends are chosen here, by name.
"""

from __future__ import annotations

from torch import Tensor

from underpar.kernels.attention.reference import Pack, attend_packed
from underpar.seams import Attend


def attend_within(cu: Tensor, max_len: int) -> Attend:
    """The `attend` of a flat pack with piece boundaries `cu` (S+1,), none longer than `max_len`."""
    pack = Pack.from_boundaries(cu, max_len)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_packed(q, k, v, pack)

    return attend


__all__ = ["Pack", "attend_packed", "attend_within"]
