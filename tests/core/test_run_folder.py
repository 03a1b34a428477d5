"""The run folder: whole files or none, and errors that say what to run."""

import json
import os
import resource
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from killing import killed_before
from underpar.core.run_folder import RunFolder, write_atomic, write_json
from underpar.errors import RunError
from underpar.recipe import load_recipe


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def fail(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(RunError, match="file cannot be written: disk full; no file was replaced"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_folder_is_not_written_over(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is a folder"):
        write_atomic(tmp_path, b"x")


def test_a_device_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RunError, match="pipe is a device; give the name of a file"):
        write_atomic(tmp_path / "pipe", b"x")
    assert (tmp_path / "pipe").is_fifo()


@contextmanager
def small_disk(num_bytes: int) -> Iterator[None]:
    """Inside, no file of this process can grow beyond so many bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_names_the_file_and_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "model.upar"
    write_atomic(path, b"old")
    with pytest.raises(RunError) as caught, small_disk(100_000):
        write_atomic(path, bytes(200_000))
    assert str(caught.value) == f"{path} cannot be written: File too large; no file was replaced"
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["model.upar"]


def test_a_link_is_replaced_and_what_it_points_to_stays(tmp_path: Path) -> None:
    (tmp_path / "far").write_bytes(b"old")
    (tmp_path / "near").symlink_to("far")
    write_atomic(tmp_path / "near", b"new")
    assert not (tmp_path / "near").is_symlink()
    assert ((tmp_path / "near").read_bytes(), (tmp_path / "far").read_bytes()) == (b"new", b"old")
    (tmp_path / "nowhere").symlink_to("missing")
    write_atomic(tmp_path / "nowhere", b"new")
    assert not (tmp_path / "missing").exists()


def test_the_next_write_clears_what_killed_writes_left(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    stale = [f".file.{process}-0123abcd-7.part" for process in (gone.pid, os.getpid())]
    kept = [f".file.{os.getppid()}-0123abcd-7.part", ".other.1-0123abcd-7.part", ".file.x.part"]
    for name in (*stale, *kept):
        (tmp_path / name).touch()
    write_atomic(tmp_path / "file", b"x")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*kept, "file"])


def test_many_writers_of_one_name_leave_one_whole_file(tmp_path: Path) -> None:
    contents = [bytes([i]) * 50_000 for i in range(8)]
    threads = [
        threading.Thread(target=write_atomic, args=(tmp_path / "file", content))
        for content in contents
        for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "file").read_bytes() in contents
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_the_longest_name_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("\u00e4" * 127)
    write_atomic(path, b"x")
    assert path.read_bytes() == b"x"


def test_a_write_is_whole_whenever_it_is_killed(tmp_path: Path) -> None:
    path, number = tmp_path / "file", 0
    write_atomic(path, b"old")
    while killed_before(number, lambda: write_atomic(path, b"new")):
        assert path.read_bytes() in (b"old", b"new")
        number += 1
    assert number >= 2 and path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_json_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "value.json"
    write_json(path, {"a": [1, 2.5]})
    assert json.loads(path.read_text()) == {"a": [1, 2.5]}


def test_a_line_cut_by_a_kill_is_left_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics_file.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [m["step"] for m in folder.metrics()] == [1, 2]


def test_a_missing_file_names_its_command(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for path, verb in (
        (folder.weights_file, "train"),
        (folder.artifact_file, "pack"),
        (folder.score_file("plain"), "score"),
    ):
        with pytest.raises(RunError, match=f"underpar {verb}"):
            folder.need(path)


def test_a_damaged_json_file_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.budget_file.write_text("{")
    with pytest.raises(RunError, match=r"budget\.json"):
        folder.read_json(folder.budget_file)


def test_the_recipe_comes_back(tmp_path: Path) -> None:
    # Stacked recipes put a '+' into the default folder name.
    folder, recipe = RunFolder(tmp_path / "baseline+cpu"), load_recipe("demo")
    folder.write_recipe(recipe)
    assert folder.read_recipe() == recipe
