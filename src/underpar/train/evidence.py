"""Evidence of training: a hash chain over a run, and kept checkpoints from which it is repeated.

Training writes evidence.jsonl, an entry per line. The hash of an entry covers the entry and the
hash before it, so the last hash covers the run.

    kind        written                          says
    start       before the first step            recipe, data, seed, machine, files that are kept
    resume      when a stopped run continues     machine, files that are kept
    metrics     with each line of metrics.jsonl  SHA-256 of the line; after a checkpoint: of weights
    checkpoint  before each checkpoint, and at 0 position; SHA-256 of model, optimizer, averages
    end         with weights.safetensors         SHA-256 of the file

`metrics` and `checkpoint` also have the training clock after each step since the entry before:
progress follows from the clock, and so does everything else that a repeated step needs.

The chain alone proves nothing: who owns the folder can write another one. It fixes one account of
the run, and repeated steps check the account (audit/retrain.py). To forge a run that any of its
steps may be asked for, one has to train it. The idea is Proof-of-Learning (Jia et al. 2021,
arXiv:2103.05633); what such a proof cannot exclude is in Fang et al. 2022, arXiv:2208.03567.

A run that was killed loses the entries after its checkpoint, as it loses their lines of metrics.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

from underpar.core.run_folder import RunFolder, write_atomic, writing
from underpar.core.runtime import Runtime
from underpar.core.tensor_files import raw_bytes
from underpar.core.versions import device_name, processor_name, versions
from underpar.data.folder import hash_file
from underpar.errors import DAMAGE, RunError
from underpar.kernels.attention import backend_of
from underpar.train.checkpoint import Parts, Position

Entry = dict[str, Any]

# Checkpoints that stay in the run folder beside the last one. Each is some twelve bytes per weight.
KEPT = 8

# The hash before the first entry.
NOTHING = "0" * 64


def environment(runtime: Runtime) -> dict[str, Any]:
    """What decides the last bits of a float besides the code: equal values, equal floats on a CPU.

    On a GPU some sums are added in an order that varies.
    """
    return {
        "device": device_name(runtime.device),
        "processor": processor_name(),
        "precision": str(runtime.dtype),
        "attention": backend_of(runtime.device, runtime.dtype),
        "compiled": runtime.compiled,
        "ranks": runtime.world,
        "versions": versions("underpar", "torch", "numpy"),
    }


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and values of tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def hash_parts(parts: Parts) -> dict[str, str]:
    """The hash of each part of a checkpoint, without parts that are empty."""
    return {name: hash_tensors(tensors) for name, tensors in parts.items() if tensors}


def thin(steps: Iterable[int], most: int) -> list[int]:
    """Of checkpoints at rising `steps`, those that stay: at most `most`, evenly spread.

    Whenever there is one too many, the checkpoint goes that leaves the smallest gap. The answer
    depends on the steps alone, so an audit knows which files must be there.
    """
    kept = [0]
    for step in steps:
        kept += [step] if step > kept[-1] else []
        if len(kept) - 1 > most:
            gaps = {kept[i]: kept[i + 1] - kept[i - 1] for i in range(1, len(kept) - 1)}
            kept.remove(min(gaps, key=lambda s: gaps[s]) if gaps else kept[-1])
    return kept[1:]


def next_hash(before: str, entry: Entry) -> str:
    """The hash of an entry that follows the hash `before`."""
    return hashlib.sha256(f"{before} {json.dumps(entry)}".encode()).hexdigest()


def read_chain(path: Path) -> list[Entry]:
    """The entries of a chain, without a last line that a kill cut short.

    An entry that does not follow from those before it is an error.
    """
    entries: list[Entry] = []
    before = NOTHING
    try:
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                entry = json.loads(line)
                before = next_hash(before, {k: v for k, v in entry.items() if k != "hash"})
                if entry["hash"] != before:
                    raise RunError(
                        f"{path}: entry {len(entries) + 1} does not follow from the others"
                    )
                entries.append(entry)
    except (OSError, *DAMAGE) as error:
        raise RunError(f"{path} is no evidence of training ({error!r:.80}); remove it") from error
    return entries


@dataclass(frozen=True)
class Account:
    """What the chain of a finished run says."""

    origin: Entry
    # The training clock after each step.
    seconds: list[float]
    # Entries of metrics and of checkpoints by step. The first checkpoint is the start, the last one
    # the end.
    metrics: dict[int, Entry]
    checkpoints: dict[int, Entry]
    # The environment of each start, by the steps that were taken before it.
    environments: dict[int, Any]
    weights_sha256: str

    @property
    def kept_steps(self) -> list[int]:
        """Steps from which the run can be repeated: the start, and each kept checkpoint."""
        *before, _ = self.checkpoints
        return [0, *thin(before, self.origin["num_kept"])]

    def environment(self, step: int) -> Any:
        """The environment in which the step after `step` was taken."""
        return self.environments[max(s for s in self.environments if s <= step)]


def read_account(entries: Sequence[Entry]) -> Account:
    """The account of a finished run; a chain that does not tell all of it is an error."""
    try:
        kinds = [entry["kind"] for entry in entries]
        if kinds[0] != "start" or kinds[-1] != "end" or {"start", "end"} & set(kinds[1:-1]):
            raise RunError("the chain does not tell of a run from its start to its end")
        account = Account(entries[0], [], {}, {}, {}, str(entries[-1]["weights_sha256"]))
        for entry in entries[:-1]:
            account.seconds.extend(map(float, entry.get("seconds", ())))
            step, clock = len(account.seconds), account.seconds[-1] if account.seconds else 0.0
            place = entry.get("position", {"step": entry.get("step", step), "seconds": clock})
            if (place["step"], place["seconds"]) != (step, clock):
                raise RunError(f"the chain: an entry at step {step} says another step or clock")
            if entry["kind"] == "checkpoint":
                account.checkpoints[step] = entry
            if entry["kind"] == "metrics":
                account.metrics[step] = entry
            if "environment" in entry:
                account.environments[step] = entry["environment"]
        rises = all(a < b for a, b in pairwise([0.0, *account.seconds]))
        if not rises or step not in account.checkpoints:
            raise RunError("the chain: its clock runs backwards, or its end has no checkpoint")
    except DAMAGE as error:
        raise RunError(f"the chain is no account of a run ({error!r:.80})") from error
    return account


@dataclass
class Evidence:
    """Writes the chain of one run and keeps some of its checkpoints; the main rank's work."""

    folder: RunFolder
    # What the first entry says: recipe, data, seed.
    origin: Mapping[str, Any]
    runtime: Runtime
    num_kept: int = KEPT
    entries: list[Entry] = field(default_factory=list)
    # The training clock after each step that no entry has yet.
    _seconds: list[float] = field(default_factory=list)

    def begin(self, position: Position, parts: Parts) -> None:
        """Start a chain at step 0, in place of what an earlier start left."""
        for file in self.folder.kept_files():
            file.unlink()
        self._write([])
        self._append("start", **self.origin, **self._setting())
        self._append("checkpoint", position=asdict(position), parts=hash_parts(parts), seconds=[])

    def resume(self, step: int) -> None:
        """Continue after the checkpoint of `step`; entries after it are dropped.

        A run that began without a chain gets one that does not begin with its start.
        """
        file = self.folder.evidence_file
        entries = read_chain(file) if file.exists() else []
        places = [i for i, e in enumerate(entries) if _checkpoint_step(e) == step]
        self._write(entries[: places[-1] + 1] if places else [])
        self._append("resume", step=step, **self._setting())

    def add_step(self, seconds: float) -> None:
        """A step was taken; `seconds` is the training clock after it."""
        self._seconds.append(seconds)

    def add_metrics(self, line: str, weights: Mapping[str, Tensor]) -> None:
        """A line of metrics; in the first one after a checkpoint, the weights too."""
        follows = self.entries[-1]["kind"] != "metrics"
        also = {"weights": hash_tensors(weights)} if follows else {}
        sha256 = hashlib.sha256(line.encode()).hexdigest()
        self._append("metrics", sha256=sha256, **also, seconds=self._take_seconds())

    def add_checkpoint(self, position: Position, parts: Parts) -> None:
        """A checkpoint is about to be written; the one that it replaces is kept, if not too many.

        The entry comes first. So no kill leaves a checkpoint without an entry, and an entry without
        its checkpoint is dropped by `resume`.
        """
        steps = self._checkpoint_steps()
        if steps and position.step == steps[-1]:
            return
        if steps and self.folder.checkpoint_file.exists():
            kept = self.folder.kept_file(steps[-1])
            kept.parent.mkdir(exist_ok=True)
            kept.unlink(missing_ok=True)
            _link(self.folder.checkpoint_file, kept)
        seconds = self._take_seconds()
        hashes = hash_parts(parts)
        self._append("checkpoint", position=asdict(position), parts=hashes, seconds=seconds)
        kept_files = {self.folder.kept_file(step) for step in thin(steps, self.num_kept)}
        for file in set(self.folder.kept_files()) - kept_files:
            file.unlink()

    def end(self) -> None:
        """The final weights were written."""
        self._append("end", weights_sha256=hash_file(self.folder.weights_file))

    def _setting(self) -> dict[str, Any]:
        return {"environment": environment(self.runtime), "num_kept": self.num_kept}

    def _checkpoint_steps(self) -> list[int]:
        steps = map(_checkpoint_step, self.entries)
        return [step for step in steps if step is not None]

    def _take_seconds(self) -> list[float]:
        seconds, self._seconds = self._seconds, []
        return seconds

    def _write(self, entries: list[Entry]) -> None:
        self.entries = entries
        lines = (json.dumps(entry) + "\n" for entry in entries)
        write_atomic(self.folder.evidence_file, "".join(lines))

    def _append(self, kind: str, **body: Any) -> None:
        before = self.entries[-1]["hash"] if self.entries else NOTHING
        entry = {"kind": kind, **body}
        entry |= {"hash": next_hash(before, entry)}
        self.entries.append(entry)
        path = self.folder.evidence_file
        with writing(path), path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
            if kind == "checkpoint":
                # To disk before the checkpoint is.
                file.flush()
                os.fsync(file.fileno())


def _checkpoint_step(entry: Entry) -> int | None:
    return int(entry["position"]["step"]) if entry["kind"] == "checkpoint" else None


def _link(source: Path, target: Path) -> None:
    """A second name for a file, which takes no space; a copy where links cannot be made."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
