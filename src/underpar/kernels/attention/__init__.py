"""Causal attention over packed documents, as one operator.

Queries, keys and values are flat; boundaries say where each document piece begins, and no query
sees a key of another piece. Backends are chosen by name, or by trying them in order.
"""

from underpar.kernels.attention.op import attend
from underpar.kernels.attention.select import (
    available,
    backend_of,
    choose,
    set_backend,
    set_backend_aside,
)
from underpar.kernels.attention.table import BACKENDS

__all__ = [
    "BACKENDS",
    "attend",
    "available",
    "backend_of",
    "choose",
    "set_backend",
    "set_backend_aside",
]
