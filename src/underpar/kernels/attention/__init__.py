"""Causal attention over packed documents, as one operator.

Queries, keys and values of all documents are in one flat tensor. Boundaries say where each piece of
a document begins, and no query sees a key of another piece. A backend is chosen by name, or the
first one that works is taken.
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
