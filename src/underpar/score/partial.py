"""Stop a score and continue it: everything that later prices depend on, in one file per rank.

The state between two steps is saved once a minute, and when a signal asks to stop. The same command
then scores the rest as if it had not stopped, on a CPU bit for bit. A file is replaced as a whole.
A file of another artifact, text, method or machine is ignored, and the score starts over.
"""

from __future__ import annotations

import glob
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from underpar import __version__
from underpar.core.dist import from_main, gather_objects
from underpar.core.fields import Fields, reading
from underpar.core.makers import maker_of
from underpar.core.run_folder import rename_to_stay
from underpar.core.runtime import Clock, Runtime
from underpar.core.tensor_files import read_tensors, save_tensors
from underpar.errors import RunError
from underpar.kernels.attention import backend_of

# The version of the state's names and their meaning; files of another version are ignored.
FORMAT = 2

# What all ranks do before a step.
GO_ON, SAVE, STOP = 0.0, 1.0, 2.0

# Names -> tensors, arrays, plain values of JSON, and states of parts.
State = dict[str, Any]
# Keys that stand for a tensor or an array in a tree of plain values.
TENSOR, ARRAY = "=tensor", "=array"


class Stopped(RunError):
    """Raised when a score stops before `step`; it can continue there."""

    # The label of the score, as the command reports it.
    method = ""

    def __init__(self, step: int) -> None:
        super().__init__(
            f"stopped at step {step}; the same command continues there, --fresh starts over"
        )
        self.step = step


@dataclass
class Partial:
    """The file of a stopped score. `path` is the main rank's file; other ranks add their number.

    `about` says what is scored and how. `is_asked` returns whether to stop. `tell` is called with
    one line that says where the score continues, or why it starts over.
    """

    path: Path
    about: Mapping[str, object]
    runtime: Runtime
    clock: Clock
    is_asked: Callable[[], bool]
    tell: Callable[[str], None]
    # Seconds between two saves: at least these, and at least `rest` times the seconds of a save, so
    # that saving takes at most 2 % of a score.
    save_seconds: float = 60.0
    rest: float = 50.0

    # Seconds before the score was stopped, without loading.
    spent_seconds = 0.0

    def __post_init__(self) -> None:
        rank = self.runtime.rank
        self._file = self.path.with_name(f"{self.path.name}-{rank}") if rank else self.path
        whole = json.dumps({**self.about, **_machine(self.runtime)}, sort_keys=True)
        self._identity = hashlib.sha256(whole.encode()).hexdigest()
        self._due = time.monotonic() + self.save_seconds

    def find(self) -> tuple[int, State] | None:
        """The step at which to continue, and the state before it; None: start over."""
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
        """Before a step: save the state if a save is due; raise `Stopped` if asked to stop.

        The main rank's clock and signals decide for all ranks.
        """
        action = SAVE if time.monotonic() >= self._due else GO_ON
        action = from_main(STOP if self.is_asked() else action, self.runtime)
        if action != GO_ON:
            with self.clock.phase("save"):
                self._save(step, state())
        if action == STOP:
            raise Stopped(step)

    def remove(self) -> None:
        """Remove the files: the score is finished."""
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
        about = {"identity": self._identity, "saved": tree}
        following = self._file.with_name(f"{self._file.name}.next")
        save_tensors(following, tensors, about)
        # All ranks write before any rank renames, so that a kill hardly ever leaves files of
        # different steps; `find` starts over if it does.
        gather_objects(None, self.runtime)
        rename_to_stay(following, self._file)
        now = time.monotonic()
        self._due = now + max(self.save_seconds, self.rest * (now - began))

    def _read(self) -> dict[str, Any] | None:
        """The saved state, or None if the file is missing or of another score."""
        if not self._file.exists():
            return None
        try:
            tensors, about = read_tensors(self._file)
            if about.get("identity") != self._identity:
                return None
            saved = Fields(self._file, about).table("saved")
            saved.count("step")
            saved.numbers("seconds")
            with reading(self._file, "start over"):
                state = _lower(saved.table("state").values, tensors)
        except RunError as error:
            why = error.__cause__ or error
            raise RunError(
                f"{self._file} is damaged ({why}); start over with --fresh, as in "
                f"'{maker_of(self.path.with_suffix('.json'))} --fresh'"
            ) from error
        return {**saved.values, "state": state}


def _machine(runtime: Runtime) -> dict[str, object]:
    """What prices depend on besides artifact, text and method."""
    attention = backend_of(runtime.device, runtime.dtype)
    return {
        "format": FORMAT,
        "versions": (__version__, str(torch.__version__)),
        "device": (runtime.device.type, runtime.compiled, attention),
        "ranks": runtime.world,
    }


def forget(path: Path) -> None:
    """Remove the files of a stopped score, of all ranks; `path` is the main rank's file."""
    for file in path.parent.glob(f"*{glob.escape(path.name)}*"):
        file.unlink(missing_ok=True)


def _lift(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The tree with names in place of its tensors and arrays, which are added to `tensors`."""
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
    """The tree that `_lift` got, on the host."""
    if not isinstance(value, dict):
        return value
    # Copied, because the alignment of memory may decide how sums are rounded, and a tensor in a
    # file may begin anywhere.
    if TENSOR in value:
        return tensors[value[TENSOR]].clone()
    if ARRAY in value:
        return tensors[value[ARRAY]].clone().numpy()
    return {key: _lower(part, tensors) for key, part in value.items()}
