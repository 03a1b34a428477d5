"""Kill commands at a chosen moment, in forks of a process that has imported everything.

Started by itself this file is that process: each line of its standard input is a request, and each
line of its standard output the answer. A fork of the tests' own process could not train, because
torch forbids gradients in forks of a process that has computed some.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Before such an event of the interpreter a process can be killed: each changes files.
EVENTS = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "open", "fcntl.flock")


@dataclass(frozen=True)
class End:
    """How a command ended: exit code (-9: killed), output, seconds, events before the end."""

    code: int
    output: str
    seconds: float


class Killer:
    """The forking process, seen from the tests."""

    def __init__(self, folder: Path) -> None:
        self._output = folder / "output"
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(self._output)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        words: list[object],
        seconds: float | None = None,
        event: int | None = None,
        copies: int = 1,
        file_bytes: int | None = None,
    ) -> list[End]:
        """Run a command, so many times at once; kill it after `seconds` or before an event.

        `file_bytes` is the most that a file can grow to, as on a full disk.
        """
        assert self._process.stdin and self._process.stdout
        request = {"words": [*map(str, words)], "seconds": seconds, "event": event}
        request |= {"copies": copies, "file_bytes": file_bytes}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return [End(**end) for end in json.loads(self._process.stdout.readline())]

    def close(self) -> None:
        """End the forking process."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def kill_before(event: int) -> None:
    """From now on, count changes of files and kill this process before number `event`, from 0."""
    left = event

    def count(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        # Reading changes nothing.
        if name not in EVENTS or (name == "open" and not arguments[2] & os.O_ACCMODE):
            return
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    sys.addaudithook(count)


def killed_before(event: int, work: Callable[[], object]) -> bool:
    """Do `work` in a fork that is killed before its change number `event`; False if it ended."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            kill_before(event)
            work()
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


def start(request: dict[str, Any], output: Path) -> int:
    """Fork a process for a command."""
    child = os.fork()
    if child:
        return child
    from underpar import cli

    code = 70
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.argv[1:] = request["words"]
        if request["file_bytes"] is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_bytes"],) * 2)
        if request["event"] is not None:
            kill_before(request["event"])
        cli.main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve(folder: Path) -> None:
    """Answer requests until there are no more."""
    for line in sys.stdin:
        request = json.loads(line)
        began = time.monotonic()
        outputs = [folder.with_name(f"output-{i}") for i in range(request["copies"])]
        children = {start(request, output): output for output in outputs}
        limit = request["seconds"]
        ends: dict[int, dict[str, Any]] = {}
        while len(ends) < len(children):
            for child in children.keys() - ends.keys():
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    code = os.waitstatus_to_exitcode(status)
                    output = children[child].read_text(errors="replace")
                    spent = time.monotonic() - began
                    ends[child] = {"code": code, "output": output, "seconds": spent}
                elif limit is not None and time.monotonic() - began >= limit:
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.001)
        print(json.dumps([ends[child] for child in children]), flush=True)


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    serve(Path(sys.argv[1]))
