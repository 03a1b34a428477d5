"""A score that is stopped, and continues: all that its prices may depend on, in one file a rank.

The state between two steps is saved once a minute, and when a signal asks to stop. The same command
then prices the rest as if nothing had happened, on a CPU bit for bit. A file is written whole or
not at all; one of another artifact, text, method or machine is left aside.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from underpar import __version__
from underpar.core.dist import from_main, gather_objects
from underpar.core.runtime import Clock, Runtime
from underpar.core.tensor_files import read_about, read_tensors, save_tensors
from underpar.errors import RunError
from underpar.kernels.attention import backend_of

# Of the state's names and meaning: another version's file is another score's.
FORMAT = 1
SAVE_SECONDS = 60.0
# A save is followed by so many times its own time: large states cost 2 % of a score at most.
REST = 50.0

# What a step asks of all ranks.
GO_ON, SAVE, STOP = 0.0, 1.0, 2.0

# Names -> tensors, arrays, plain values of JSON, and states of parts.
State = dict[str, Any]
# Where the tree of plain values has a tensor or an array.
TENSOR, ARRAY = "=tensor", "=array"


class Stopped(RunError):
    """A score that was asked to stop before `step`, and can continue there."""

    def __init__(self, step: int) -> None:
        super().__init__(
            f"stopped at step {step}; the same command continues there, --fresh starts over"
        )
        self.step = step


@dataclass
class Partial:
    """The file of one score; `path` is the main rank's, others have theirs beside it.

    `about` is what the score is of, and how it is made. `is_asked` says whether to stop; `tell`
    hears in one line where the score continues, or why it does not.
    """

    path: Path
    about: Mapping[str, object]
    runtime: Runtime
    clock: Clock
    is_asked: Callable[[], bool]
    tell: Callable[[str], None]

    spent_seconds = 0.0
    """Used before the score was stopped, without those of loading."""

    def __post_init__(self) -> None:
        rank = self.runtime.rank
        self._file = self.path.with_name(f"{self.path.name}-{rank}") if rank else self.path
        whole = json.dumps({**self.about, **_machine(self.runtime)}, sort_keys=True)
        self._identity = hashlib.sha256(whole.encode()).hexdigest()
        self._due = time.monotonic() + SAVE_SECONDS

    def find(self) -> tuple[int, State] | None:
        """The step at which to continue, and the state before it; None: at the start."""
        saved, problem = None, ""
        try:
            saved = self._read()
        except RunError as error:
            problem = str(error)
        step = saved["step"] if saved else -1
        answers = gather_objects((problem, step, self._file.exists()), self.runtime)
        problems, steps, here = zip(*answers, strict=True)
        if any(problems):
            raise RunError(next(filter(None, problems)))
        if saved is None or len(set(steps)) > 1:
            if any(here):
                why = "belongs to another artifact, text, setting or machine"
                why = why if len(set(steps)) == 1 else "was not saved at the step of all ranks"
                self._tell(f"{self.path} {why}; starting over")
            return None
        self.clock.add(saved["seconds"])
        self.spent_seconds = sum(s for phase, s in saved["seconds"].items() if phase != "load")
        self._tell(f"continuing {self.path} at step {step}")
        return step, saved["state"]

    def offer(self, step: int, state: Callable[[], State]) -> None:
        """Save the state before a step if it is time; raise `Stopped` there if that is asked.

        The main rank's clock and signals decide for all.
        """
        wish = SAVE if time.monotonic() >= self._due else GO_ON
        wish = from_main(STOP if self.is_asked() else wish, self.runtime)
        if wish != GO_ON:
            with self.clock.phase("save"):
                self._save(step, state())
        if wish == STOP:
            raise Stopped(step)

    def remove(self) -> None:
        """The score is written: there is nothing to continue."""
        if self.runtime.is_main:
            forget(self.path)
        else:
            self._file.unlink(missing_ok=True)

    def _tell(self, line: str) -> None:
        if self.runtime.is_main:
            self.tell(line)

    def _save(self, step: int, state: State) -> None:
        began = time.monotonic()
        tensors: dict[str, Tensor] = {}
        tree = {"step": step, "seconds": self.clock.read(), "state": _lift(state, "", tensors)}
        about = {"identity": self._identity, "checksum": _checksum(tree, tensors), "saved": tree}
        following = self._file.with_name(f"{self._file.name}.next")
        save_tensors(following, tensors, about)
        # Renamed together: whenever ranks are killed, they find files of one step.
        gather_objects(None, self.runtime)
        os.replace(following, self._file)
        now = time.monotonic()
        self._due = now + max(SAVE_SECONDS, REST * (now - began))

    def _read(self) -> dict[str, Any] | None:
        """What `_save` wrote, if it is of this score; a damaged file is refused."""
        if not self._file.exists():
            return None
        try:
            if read_about(self._file)["identity"] != self._identity:
                return None
            tensors, about = read_tensors(self._file)
            saved: Any = about["saved"]
            if about["checksum"] != _checksum(saved, tensors):
                raise ValueError("its checksum is wrong")
            return {**saved, "state": _lower(saved["state"], tensors)}
        except (RunError, KeyError, TypeError, ValueError) as error:
            why = error.__cause__ or error
            raise RunError(
                f"{self._file} is damaged ({why}); remove it, or give --fresh to start over"
            ) from error


def _machine(runtime: Runtime) -> dict[str, object]:
    """What prices may depend on beside artifact, text and method."""
    attention = backend_of(runtime.device, runtime.dtype)
    return {
        "format": FORMAT,
        "versions": (__version__, str(torch.__version__)),
        "device": (runtime.device.type, runtime.compiled, attention),
        "ranks": runtime.world,
    }


def forget(path: Path) -> None:
    """Remove what a stopped score left, of all ranks: `path` is the main rank's file."""
    for file in path.parent.glob(f"*{glob.escape(path.name)}*"):
        file.unlink(missing_ok=True)


def _lift(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A tree of plain values; its tensors and arrays go to `tensors`, and leave their names."""
    if isinstance(value, Mapping):
        return {str(key): _lift(part, f"{name}/{key}", tensors) for key, part in value.items()}
    if isinstance(value, np.ndarray):
        tensors[name] = torch.from_numpy(value).contiguous()
        return {ARRAY: name}
    if isinstance(value, Tensor):
        tensors[name] = value.detach().cpu().contiguous()
        return {TENSOR: name}
    return value


def _lower(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `_lift` was given, on the host."""
    if not isinstance(value, dict):
        return value
    # In memory of their own: where it begins may decide how sums are rounded, and in a file it may
    # begin anywhere.
    if TENSOR in value:
        return tensors[value[TENSOR]].clone()
    if ARRAY in value:
        return tensors[value[ARRAY]].clone().numpy()
    return {key: _lower(part, tensors) for key, part in value.items()}


def _checksum(tree: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
    """CRC-32 of all values, with names and shapes."""
    found = zlib.crc32(json.dumps(tree).encode())
    for name, tensor in sorted(tensors.items()):
        found = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), found)
        # Of a single number the stride may be any, and bytes need one.
        flat = tensor.as_strided((tensor.numel(),), (1,))
        found = zlib.crc32(flat.view(torch.uint8).numpy().data, found)
    return found
