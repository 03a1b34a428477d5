"""The process of one side of `bench step` that is a git revision; revisions.py starts it.

    python -P revision_side.py FOLDER     FOLDER has the source of the revision

This file is that of the process that asks. All else comes from the revision, so it may use no more
than revisions with `bench step` have. Requests and answers are lines of JSON on standard input and
output. Tensors travel as files.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def main(source: str) -> None:
    """Answer requests until there are no more."""
    # What libraries print goes to the log.
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        sys.path.insert(0, source)
        side = _Side(source)
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = {"found": getattr(side, request.pop("do"))(**request)}
            except Exception as error:
                told = str(error) if _is_ours(error) else f"{type(error).__name__}: {error}"
                answer = {"error": told}
            answers.write(json.dumps(answer) + "\n")


def _is_ours(error: Exception) -> bool:
    return type(error).__module__.startswith("underpar.")


class _Side:
    """A `TrainingStep` of the revision, and what it is asked for."""

    def __init__(self, source: str) -> None:
        import torch

        import underpar
        from underpar.lab import step_bench

        # Else another version would be timed under this name.
        assert Path(str(underpar.__file__)).is_relative_to(source)
        self._torch, self._module = torch, step_bench

    def open(self, variant: dict[str, Any], at: float, device: str) -> dict[str, Any]:
        """Make the network and compile it; returns what the other process must know."""
        from underpar.core.runtime import open_runtime
        from underpar.recipe import to_tree

        variant["overrides"] = tuple(variant["overrides"])
        variant["candidates"] = tuple(map(Path, variant["candidates"]))
        sides = [self._module.Variant(**variant)]
        [self._step] = self._module.open_sides(sides, at, open_runtime(device))
        step, digest = self._step, hashlib.sha256()
        for batch in step.batches:
            for tensor in (batch.inputs, batch.targets, batch.segments.cu):
                digest.update(tensor.cpu().numpy().tobytes())
        tree = to_tree(step.recipe)
        return {
            "claims": {part: tree.get(part) for part in ("model", "levers", "train")}
            | {"weights": {name: list(w.shape) for name, w in step.model.state_dict().items()}},
            "documents": digest.hexdigest(),
            "step_tokens": step.step_tokens,
            "on_gpu": step.runtime.device.type == "cuda",
            "precision": str(step.runtime.dtype).removeprefix("torch."),
        }

    def weights(self, to: str) -> None:
        """Write the weights of now."""
        self._save(self._step.model.state_dict(), to)

    def take_weights(self, path: str) -> None:
        """Put those of a file in place of the weights."""
        self._step.model.load_state_dict(self._load(path))
        self._step.exact = None

    def gradients(self, to: str) -> None:
        """Write the loss of the first micro-batch and its gradients."""
        self._save(self._step.gradients(), to)

    def exact_gradients(self, to: str) -> None:
        """Write the same by the network as it is, in fp32."""
        self._save(self._module.exact_gradients(self._step), to)

    def update_from(self, path: str, to: str) -> None:
        """Update the weights from the gradients of a file; write how much each changed."""
        self._save(self._step.update_from(self._load(path)), to)

    def optimizer_state(self, to: str) -> None:
        """Write the moments of the optimizer."""
        self._save(self._step.optimizer.state(), to)

    def take_optimizer_state(self, path: str) -> None:
        """Put those of a file in place of the optimizer's."""
        self._step.optimizer.load(self._load(path))

    def step(self) -> None:
        """Take a step and wait for the device."""
        self._step()
        self._step.runtime.synchronize()

    def seconds(self, calls: int) -> float:
        """Seconds of so many steps on the device, after one that is not timed."""
        return self._step.seconds(calls)

    def describe(self, seconds: float) -> dict[str, Any]:
        """What this side is, and its speed if a step takes so many seconds."""
        return self._step.describe(seconds)

    def num_graphs(self) -> int:
        """Graphs compiled so far."""
        return self._module.num_graphs(self._step)

    def memory_bytes(self) -> int:
        """Most memory of the device that tensors have taken."""
        cuda = self._torch.cuda
        return cuda.max_memory_allocated() if self._step.runtime.device.type == "cuda" else 0

    def _save(self, tensors: Mapping[str, Any], path: str) -> None:
        self._torch.save({name: value.detach().cpu() for name, value in tensors.items()}, path)

    def _load(self, path: str) -> dict[str, Any]:
        device = self._step.runtime.device
        return self._torch.load(path, map_location=device, weights_only=True)


if __name__ == "__main__":
    main(sys.argv[1])
