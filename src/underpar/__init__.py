"""underpar: the best language model that fits in a byte budget, with a score it can prove."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from underpar.core.runtime import guard_cpu

__version__ = "0.1.0"

# Before the first operation of torch: oneDNN reads the setting only once.
guard_cpu()

# The counted script has neither branch: it has no use for the interface.
if TYPE_CHECKING:
    from underpar.api import Model as Model
    from underpar.api import audit as audit
    from underpar.api import build_data as build_data
    from underpar.api import load as load
    from underpar.api import pack as pack
    from underpar.api import report as report
    from underpar.api import score as score
    from underpar.api import train as train
else:
    __all__ = ["Model", "audit", "build_data", "load", "pack", "report", "score", "train"]
    # Four functions have names of packages, and a package becomes an attribute when it is first
    # imported. So they are imported now, and their attributes removed: `underpar.train` is the
    # function, `from underpar.train.loop import Trainer` finds the package.
    for _name in ("audit", "report", "score", "train"):
        import_module(f"underpar.{_name}")
        del globals()[_name]

    def __getattr__(name):
        # Only now, so that `import underpar` and `underpar --help` do not wait for torch.
        if name in __all__:
            return getattr(import_module("underpar.api"), name)
        raise AttributeError(f"module 'underpar' has no attribute {name!r}")

    def __dir__():
        return [*globals(), *__all__]
