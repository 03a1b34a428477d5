"""Sides of `bench step` that are git revisions: exported, and run in a process each.

A process can hold one version of a package, so each revision has its own, with its network on the
device. The processes take turns: one works, the others wait for a line. Each times its own steps by
the device. The control is A against A in another process, so it sees what two processes do to each
other. Gradients and updates are compared here, by the rules of sides in one process.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from underpar.core.progress import SILENT, Progress
from underpar.errors import BenchError, one_line
from underpar.lab import revision_side
from underpar.lab.step_bench import LETTERS, Side, Variant

SOURCE = "src/underpar"
# What the process of a side must find in its revision.
NEEDED = f"{SOURCE}/lab/step_bench.py"


def commit_of(revision: str) -> str:
    """The commit that a revision of the repository in the current folder names."""
    _git("rev-parse", "--show-toplevel", why="a revision needs a git repository in this folder")
    why = f"no git revision {revision!r} in this repository: use a commit, a branch or HEAD~3"
    if revision.startswith("-"):
        raise BenchError(why)
    commit = _git("rev-parse", "--verify", "--quiet", revision + "^{commit}", why=why)
    return commit.decode().strip()


def require_clean() -> None:
    """Refuse changes that no revision has: a side without a revision is HEAD."""
    found = _git("status", "--porcelain", "--", f":/{SOURCE}").decode().splitlines()
    if found:
        raise BenchError(
            f"{found[0][3:]} differs from HEAD, which a side without a revision would be: "
            "commit it, or name a revision for every side"
        )


def export(commit: str, folder: Path) -> Path:
    """Write the package of a commit into a folder; returns the folder to import it from."""
    why = f"revision {commit[:12]} has no {NEEDED}, which its process needs: use a later one"
    _git("cat-file", "-e", f"{commit}:{NEEDED}", why=why)
    top = _git("rev-parse", "--show-toplevel").decode().rstrip("\n")
    packed = _git("-C", top, "archive", "--format=tar", commit, SOURCE)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder / Path(SOURCE).parent


def _git(*words: str, why: str = "") -> bytes:
    try:
        done = subprocess.run(["git", *words], capture_output=True, check=False)
    except FileNotFoundError:
        raise BenchError("a revision needs git, which is not installed") from None
    if done.returncode:
        raise BenchError(
            why or f"git {words[0]} failed: {one_line(done.stderr.decode().strip(), 200)}"
        )
    return done.stdout


class RevisionSide:
    """A training step in a process of its own; calls go there and wait for the answer."""

    # Revisions may differ in their optimizer.
    has_own_optimizer = True

    def __init__(self, letter: str, variant: Variant, commit: str, source: Path) -> None:
        """Start the process; it imports, and waits."""
        self.letter, self.variant, self.commit = letter, variant, commit
        self._folder = Path(tempfile.mkdtemp(dir=source))
        self._log = self._folder / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", revision_side.__file__, str(source)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def start_to_open(self, at: float, device: str) -> None:
        """Ask the process to make its network and to compile it."""
        fields = asdict(self.variant)
        del fields["revision"]
        if self.variant.rewrites == "auto":
            # Earlier revisions have no rewrites.
            del fields["rewrites"]
        fields["candidates"] = [str(path.resolve()) for path in self.variant.candidates]
        self.at = at
        self._send("open", variant=fields, at=at, device=device)

    def wait_until_open(self) -> None:
        """Wait for it."""
        found = self._receive()
        self._claims, self.documents = found["claims"], found["documents"]
        self._step_tokens, self.on_gpu = found["step_tokens"], found["on_gpu"]
        self.dtype = getattr(torch, found["precision"])

    @property
    def step_tokens(self) -> int:
        """Tokens of a step."""
        return int(self._step_tokens)

    @property
    def sharing(self) -> Self:
        """Its compiler is that of its process."""
        return self

    @property
    def num_graphs(self) -> int:
        """Graphs compiled so far in its process."""
        return int(self._ask("num_graphs"))

    def claims(self) -> dict[str, Any]:
        """Parts of the recipe, and names and shapes of the weights."""
        return dict(self._claims)

    def weights(self) -> dict[str, Tensor]:
        """The weights of now, by name."""
        return self._tensors("weights")

    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Put these in place of the weights."""
        self._ask("take_weights", path=self._file(weights))

    def gradients(self) -> dict[str, Tensor]:
        """The loss of the first micro-batch, and its gradients by name; no step is taken."""
        return self._tensors("gradients")

    def exact_gradients(self) -> dict[str, Tensor]:
        """The same by the network of the revision as it is, in fp32."""
        return self._tensors("exact_gradients")

    def update_from(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Update the weights from these gradients; returns how much each weight changed."""
        return self._tensors("update_from", path=self._file(gradients))

    def optimizer_state(self) -> dict[str, Tensor]:
        """Moments of the optimizer, by name."""
        return self._tensors("optimizer_state")

    def take_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Put these in place of the optimizer's."""
        self._ask("take_optimizer_state", path=self._file(state))

    def synchronize(self) -> None:
        """Nothing to wait for: an answer comes when the device is done."""

    def __call__(self) -> None:
        """Take a step."""
        self._ask("step")

    def seconds(self, calls: int) -> float:
        """Seconds of so many steps by the clock of its device, after one that is not timed."""
        return float(self._ask("seconds", calls=calls))

    def describe(self, seconds: float) -> dict[str, Any]:
        """What this side is, and its speed if a step takes so many seconds."""
        return dict(self._ask("describe", seconds=seconds)) | {"revision": self.commit}

    def memory_bytes(self) -> int:
        """Most memory of the device that tensors of its process have taken."""
        return int(self._ask("memory_bytes"))

    def _tensors(self, do: str, **more: str) -> dict[str, Tensor]:
        path = self._folder / "out.pt"
        self._ask(do, to=str(path), **more)
        found: dict[str, Tensor] = torch.load(path, weights_only=True)
        return found

    def _file(self, tensors: Mapping[str, Tensor]) -> str:
        path = self._folder / "in.pt"
        torch.save(dict(tensors), path)
        return str(path)

    def _ask(self, do: str, **request: object) -> Any:
        self._send(do, **request)
        return self._receive()

    def _send(self, do: str, **request: object) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
        except BrokenPipeError:
            raise self._ended() from None

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer = json.loads(line)
        if "error" in answer:
            told = one_line(answer["error"], 400)
            raise BenchError(f"{self.letter}, revision {self.commit[:12]}: {told}")
        return answer["found"]

    def _ended(self) -> BenchError:
        code = self._process.wait()
        lines = self._log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
        return BenchError(
            f"{self.letter}, revision {self.commit[:12]}: its process ended with code {code}; "
            f"{one_line(lines[-1], 300)}"
        )


@contextmanager
def open_revisions(
    variants: Sequence[Variant], at: float, device: str, progress: Progress = SILENT
) -> Iterator[tuple[list[Side], Side]]:
    """All sides, each in a process of its own, and A once more for the control.

    A side without a revision is HEAD.
    """
    if not 0 <= at <= 1:
        raise BenchError(f"progress of training is {at}; use 0 to 1")
    commits = [commit_of(variant.revision or "HEAD") for variant in variants]
    if not all(variant.revision for variant in variants):
        require_clean()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())).resolve()
        sources = {commit: export(commit, folder / commit) for commit in sorted(set(commits))}
        letters = [*LETTERS[: len(variants)], "A of the control"]
        pairs = [*zip(variants, commits, strict=True), (variants[0], commits[0])]
        sides = [
            stack.enter_context(RevisionSide(letter, variant, commit, sources[commit]))
            for letter, (variant, commit) in zip(letters, pairs, strict=True)
        ]
        with progress.task("compile", len(sides)) as task:
            # The others find in the caches what A compiled.
            for done, group in ((1, sides[:1]), (len(sides), sides[1:])):
                for side in group:
                    side.start_to_open(at, device)
                for side in group:
                    side.wait_until_open()
                task.update(done)
        a, *others = sides
        for side in others:
            if side.claims() == a.claims() and side.documents != a.documents:
                raise BenchError(
                    f"A and {side.letter} make up other documents of the same recipe: times of "
                    "different work"
                )
        yield [*sides[:-1]], sides[-1]
