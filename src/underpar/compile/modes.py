"""Other ways to compile a network, by the names of torch.compile's modes."""

from __future__ import annotations

from functools import partial

from underpar.compile.regions import Sharing, inductor
from underpar.errors import BenchError


def sharing_in(mode: str) -> Sharing:
    """A compiler of regions in a mode of torch.compile: its options come on top of ours."""
    from torch._inductor import list_mode_options

    modes = list_mode_options()
    if mode not in modes:
        raise BenchError(f"no compile mode {mode!r}; use off, {', '.join(modes)}")
    return Sharing(partial(inductor, **modes[mode]))
