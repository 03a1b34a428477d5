"""Write a folder whole or not at all: beside its place, then move it there.

    .NAME.lock           held by the process that writes the folder
    .NAME.underpar-new   the folder while it is written
    .NAME.underpar-old   the folder that it replaces, for the moment between two renames

A failed or killed writer leaves the old folder as it was. If the kill came between the renames, the
old folder has its other name; whoever writes the folder next moves it back first.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from underpar.core.locks import LOCK_NAME, lock_file
from underpar.core.run_folder import rename_to_stay, wait_for_disk, writing
from underpar.data.folder import folder_aside
from underpar.errors import DataError

# Raises an error unless the folder may be replaced.
MayReplace = Callable[[Path], None]


def refuse_all(folder: Path) -> None:
    """Refuse to replace any folder that holds something."""
    raise DataError(f"{folder} is not empty; choose a new folder, or remove it first")


@contextmanager
def new_folder(out: Path, may_replace: MayReplace = refuse_all) -> Iterator[Path]:
    """An empty folder to write in, which becomes `out` if the block ends without an error.

    If `out` is a link, the folder that it names is replaced and the link stays.
    """
    target = Path(os.path.realpath(out))
    _refuse_places(out, target)
    with writing(out):
        target.parent.mkdir(parents=True, exist_ok=True)
    with lock_file(target.with_name(f".{target.name}{LOCK_NAME}"), out):
        new, old = target.with_name(f".{target.name}.underpar-new"), folder_aside(target)
        with writing(out):
            _recover(target, new, old)
        _refuse_replacing(out, target, may_replace)
        with writing(out):
            new.mkdir()
        try:
            yield new
            # Again: a file that came meanwhile would be removed with the old folder.
            _refuse_replacing(out, target, may_replace)
            with writing(out):
                _swap(target, new, old)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise


def _refuse_places(out: Path, target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise DataError(f"{out} is a file; give the name of a folder")
    # The shell of the user would stay in the folder that was removed.
    if target == Path.cwd() or os.path.ismount(target):
        kind = "a mount point" if os.path.ismount(target) else "the current folder"
        raise DataError(f"{out} is {kind}, which cannot be replaced; choose a folder in it")


def _refuse_replacing(out: Path, target: Path, may_replace: MayReplace) -> None:
    if target.exists() and any(target.iterdir()):
        may_replace(out)


def _recover(target: Path, new: Path, old: Path) -> None:
    """Clear what a killed writer left; the lock says that none is left alive."""
    _remove(new)
    if target.exists():
        _remove(old)
    elif old.is_dir():
        rename_to_stay(old, target)


def _remove(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def _swap(target: Path, new: Path, old: Path) -> None:
    for path in [*new.rglob("*"), new]:
        wait_for_disk(path)
    if not target.exists() or not any(target.iterdir()):
        rename_to_stay(new, target)
        return
    try:
        os.replace(target, old)
        os.replace(new, target)
    except BaseException:
        if not target.exists():
            os.replace(old, target)
        raise
    wait_for_disk(target.parent)
    _remove(old)
