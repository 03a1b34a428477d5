"""Locks on folders: one process at a time writes a run, a data folder, an export, a demo.

A lock is flock(2) on a file that holds the process and its command for the message of the others.
The system ends the lock with its process, so a kill leaves nothing to clean up; a file that a kill
left is taken over. Reading needs no lock: files and data folders appear whole or not at all.
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from underpar.core.run_folder import writing
from underpar.errors import RunError

if TYPE_CHECKING:
    from underpar.core.runtime import Runtime

LOCK_NAME = ".lock"
MAX_COMMAND_CHARACTERS = 60
# What file systems without locks answer.
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

_OPEN_LOCKS: set[int] = set()


def _close_in_child() -> None:
    # A forked worker shares the lock and could outlive a killed parent.
    for lock in _OPEN_LOCKS:
        os.close(lock)
    _OPEN_LOCKS.clear()


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def lock_folder(folder: Path, create: bool = False) -> Iterator[None]:
    """Inside, no other process writes `folder`; refused if one does.

    A folder that does not exist is created if asked. Otherwise there is nothing to lock, and the
    caller will say what is missing.
    """
    if create:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
    if not folder.is_dir():
        yield
        return
    with lock_file(folder / LOCK_NAME, folder):
        yield


@contextmanager
def lock_on_main(folder: Path, runtime: Runtime, create: bool = False) -> Iterator[None]:
    """`lock_folder` on the main rank only; its refusal ends the other ranks too."""
    # Not at the top: data are built without torch.
    from underpar.core.dist import ask_main

    with ExitStack() as stack:
        ask_main(lambda: stack.enter_context(lock_folder(folder, create)), runtime)
        yield


@contextmanager
def lock_file(file: Path, folder: Path) -> Iterator[None]:
    """Hold the lock `file`, which stands for `folder`; the file is removed at the end."""
    with writing(folder):
        lock = _acquire(file, folder)
    _OPEN_LOCKS.add(lock)
    try:
        with writing(folder):
            os.ftruncate(lock, 0)
            about = f"{os.getpid()} {platform.node()} {_own_command()}"
            os.write(lock, about.encode("ascii", errors="replace"))
        yield
    finally:
        # Not in a forked child, which has no lock.
        if lock in _OPEN_LOCKS:
            # Removed before it is released, so that whoever opened it meanwhile finds out.
            if _is_still(lock, file):
                file.unlink(missing_ok=True)
            _OPEN_LOCKS.remove(lock)
            os.close(lock)


def _acquire(file: Path, folder: Path) -> int:
    while True:
        lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _read_holder(lock)
            os.close(lock)
            if error.errno in UNSUPPORTED:
                raise RunError(
                    f"{folder} cannot be locked ({error.strerror}): its file system has no locks; "
                    "choose a folder on a local disk"
                ) from error
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise RunError(
                f"{folder} is in use by {holder}; wait for it to end, or choose another folder"
            ) from error
        # The last holder may have removed the file after it was opened here.
        if _is_still(lock, file):
            return lock
        os.close(lock)


def _is_still(lock: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock), os.lstat(file))
    except FileNotFoundError:
        return False


def _own_command() -> str:
    program = Path(sys.argv[0] or "python").name
    # Without options: an access token may be among them, and others can read the file.
    words = takewhile(lambda word: not word.startswith("-"), sys.argv[1:])
    return " ".join(["underpar" if program == "__main__.py" else program, *words])


def _read_holder(lock: int) -> str:
    """The process that holds a lock, in words; what it wrote is not trusted to be text."""
    raw = os.pread(lock, 4096, 0).decode("ascii", errors="replace")
    content = "".join(c if c.isprintable() and c.isascii() else "?" for c in raw)
    match = re.fullmatch(r"([0-9]{1,9}) (\S*) (.*)", content)
    if match is None:
        return "another process"
    process, host, command = match.groups()
    if len(command) > MAX_COMMAND_CHARACTERS:
        command = command[: MAX_COMMAND_CHARACTERS - 3] + "..."
    where = "" if host == platform.node() else f" on {host:.40}"
    return f"process {process}{where} ({command})"
