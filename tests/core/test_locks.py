"""Locks on folders: refused with the holder's name, gone with the holder, nothing left behind."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from underpar.core.locks import lock_folder
from underpar.errors import RunError

HOLD = """
import os, sys, time
from pathlib import Path
from underpar.core.locks import lock_folder
with lock_folder(Path(sys.argv[1]), create=True):
    worker = os.fork() if sys.argv[2:] == ["fork"] else 0
    if not worker:
        # A worker speaks once it runs.
        print(os.getpid(), flush=True)
    time.sleep(60)
"""


def start_holder(folder: Path, *words: str) -> tuple["subprocess.Popen[str]", int]:
    """A process that holds the lock, and the number that it printed."""
    command = [sys.executable, "-c", HOLD, str(folder), *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    return process, int(process.stdout.readline())


def refusal(folder: Path) -> str:
    with pytest.raises(RunError) as caught, lock_folder(folder):
        raise AssertionError("the lock was given twice")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_second_holder_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    with lock_folder(folder, create=True):
        assert f"{folder} is in use by process {os.getpid()} (" in refusal(folder)
    assert list(folder.iterdir()) == []
    with lock_folder(folder):
        pass


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    process, _ = start_holder(tmp_path / "run", "--token", "secret")
    message = refusal(tmp_path / "run")
    assert f"in use by process {process.pid} (-c {tmp_path}"[:80] in message
    assert b"secret" not in (tmp_path / "run" / ".lock").read_bytes()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with lock_folder(tmp_path / "run"):
        assert f"process {os.getpid()} " in refusal(tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []


def test_a_worker_that_outlives_its_killed_parent_holds_no_lock(tmp_path: Path) -> None:
    process, worker = start_holder(tmp_path / "run", "fork")
    process.send_signal(signal.SIGKILL)
    process.wait()
    try:
        os.kill(worker, 0)
        with lock_folder(tmp_path / "run"):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)
        process.communicate()


def test_a_forked_child_that_goes_on_leaves_the_lock_to_its_parent(tmp_path: Path) -> None:
    child = 1
    try:
        with lock_folder(tmp_path):
            child = os.fork()
            if child:
                status = os.waitpid(child, 0)[1]
                assert os.waitstatus_to_exitcode(status) == 7
                assert "is in use by process" in refusal(tmp_path)
    finally:
        if child == 0:
            os._exit(7)


def test_words_that_are_no_text_are_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/underpar", "train", "caf\udce9"])
    with lock_folder(tmp_path):
        assert f"process {os.getpid()} (underpar train caf?)" in refusal(tmp_path)


def test_a_folder_that_is_not_there_is_only_made_if_asked(tmp_path: Path) -> None:
    with lock_folder(tmp_path / "run"):
        assert not (tmp_path / "run").exists()
    (tmp_path / "file").touch()
    with (
        pytest.raises(RunError, match="run cannot be written: Not a directory"),
        lock_folder(tmp_path / "file" / "run", create=True),
    ):
        pass


def test_one_of_many_at_a_time(tmp_path: Path) -> None:
    """Holders remove the file of the lock, which must not let two others in."""
    inside, most, entered = 0, 0, 0

    def work() -> None:
        nonlocal inside, most, entered
        for _ in range(50):
            try:
                with lock_folder(tmp_path):
                    inside += 1
                    most, entered = max(most, inside), entered + 1
                    inside -= 1
            except RunError:
                pass

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1 and entered > 8
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(*args: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", fail)
    message = refusal(tmp_path)
    assert f"{tmp_path} cannot be locked" in message and "local disk" in message


@pytest.mark.parametrize(
    ("content", "holder"),
    [
        (b"", "another process;"),
        (b"\xff" * 5000, "another process;"),
        (b"12 else\x1b[31m \x1b[31mred\n\xff", "process 12 on else?[31m (?[31mred??)"),
        (b"12 " + os.uname().nodename.encode() + b" " + b"x" * 500, f"process 12 ({'x' * 57}...)"),
    ],
)
def test_what_a_lock_says_is_not_trusted(tmp_path: Path, content: bytes, holder: str) -> None:
    with lock_folder(tmp_path):
        (tmp_path / ".lock").write_bytes(content)
        message = refusal(tmp_path)
    assert holder in message
    assert message.isprintable()


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("text")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(precious)
    assert "run cannot be written" in refusal(tmp_path / "run")
    assert precious.read_text() == "text"
