"""The backends of packed attention, in order of preference."""

from __future__ import annotations

from underpar.errors import UnderparError
from underpar.kernels.attention.backend import Backend
from underpar.kernels.attention.fa3 import FA3
from underpar.kernels.attention.fa4 import FA4
from underpar.kernels.attention.flash import FLASH
from underpar.kernels.attention.flex import FLEX
from underpar.kernels.attention.grids import CUDNN, SDPA
from underpar.kernels.attention.reference import REFERENCE

# By speed on an H200. FlexAttention's kernels are faster than those of FlashAttention-2, but here
# the forward pass runs twice. cuDNN is fast on pieces of equal length; otherwise padding costs more
# than it gains.
BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (FA4, FA3, FLASH, FLEX, CUDNN, SDPA, REFERENCE)
}


def find_backend(name: str) -> Backend:
    """The backend called `name`."""
    if name not in BACKENDS:
        known = ", ".join(BACKENDS)
        raise UnderparError(f"no attention backend {name!r}; use auto or one of {known}")
    return BACKENDS[name]
