"""Causal attention over packed documents, as one operator.

Queries, keys and values are flat; boundaries say where each document piece begins, and no query
sees a key of another piece. Further backends are chosen here, by name.
"""

from underpar.kernels.attention.reference import Pack, attend_packed

__all__ = ["Pack", "attend_packed"]
