"""Replacing a data folder: the old or the new one at every moment, and nothing else is touched."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from killing import killed_before
from small_data import contents, prose, write_jsonl
from underpar.core.locks import lock_file
from underpar.data import folder as data_folder
from underpar.data.build import BuildOptions, build_data
from underpar.data.folder import load_data
from underpar.data.merge import merge_folders
from underpar.data.new_folder import new_folder
from underpar.errors import DataError, RunError, UnderparError

OLD, NEW = (BuildOptions(None, fraction, kind="bytes") for fraction in (0.2, 0.3))


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("docs") / "docs.jsonl", prose(30, 200))


@pytest.fixture(scope="module")
def versions(docs: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, bytes]]:
    """What the old and the new folder hold."""
    root = tmp_path_factory.mktemp("versions")
    for name, options in (("old", OLD), ("new", NEW)):
        build_data([docs], root / name, options)
    return [contents(root / name) for name in ("old", "new")]


@pytest.fixture
def folder(docs: Path, tmp_path: Path) -> Path:
    build_data([docs], tmp_path / "data", OLD)
    return tmp_path / "data"


def refusal(work: Callable[[], object]) -> str:
    with pytest.raises(UnderparError) as caught:
        work()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_old_folder_is_replaced_only_if_asked(
    docs: Path, folder: Path, versions: list[dict[str, bytes]]
) -> None:
    message = refusal(lambda: build_data([docs], folder, NEW))
    assert message == f"{folder} exists; give --overwrite to replace it, or choose another one"
    assert contents(folder) == versions[0]
    build_data([docs], folder, NEW, overwrite=True)
    assert contents(folder) == versions[1]
    assert names(folder.parent) == ["data"]


@pytest.mark.parametrize("name", ["notes.txt", ".git", "train.shard.bak"])
def test_a_folder_that_holds_anything_else_is_never_replaced(
    docs: Path, folder: Path, name: str
) -> None:
    (folder / name).mkdir()
    message = refusal(lambda: build_data([docs], folder, NEW, overwrite=True))
    assert f"{folder} is not a data folder (it holds '{name}'), so it stays" in message
    (folder / name).rmdir()
    (folder / "val.shard").unlink()
    (folder / "val.shard").mkdir()
    assert "it holds 'val.shard'" in refusal(lambda: build_data([docs], folder, NEW, None, True))


def test_a_folder_without_a_manifest_is_never_replaced(docs: Path, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tokenizer.model").write_bytes(b"precious")
    message = refusal(lambda: build_data([docs], tmp_path / "models", NEW, overwrite=True))
    assert "models is not a data folder (it has no manifest.json)" in message
    assert names(tmp_path / "models") == ["tokenizer.model"]


def test_a_damaged_data_folder_can_be_replaced(
    docs: Path, folder: Path, versions: list[dict[str, bytes]]
) -> None:
    (folder / "manifest.json").write_text("{")
    (folder / "train.shard").unlink()
    build_data([docs], folder, NEW, overwrite=True)
    assert contents(folder) == versions[1]


def test_a_file_that_comes_meanwhile_is_kept(docs: Path, folder: Path) -> None:
    def add_file(stage: str, num_documents: int) -> None:
        (folder / "late.txt").write_text("text")

    assert "late.txt" in refusal(lambda: build_data([docs], folder, NEW, add_file, True))
    assert "late.txt" in names(folder) and names(folder.parent) == ["data"]


def test_the_folder_behind_a_link_is_replaced(
    docs: Path, folder: Path, versions: list[dict[str, bytes]]
) -> None:
    near, far = folder.parent / "near", folder.parent / "far" / "data"
    near.symlink_to("data")
    build_data([docs], near, NEW, overwrite=True)
    assert near.is_symlink() and contents(folder) == versions[1]
    dangling = folder.parent / "dangling"
    dangling.symlink_to(far)
    build_data([docs], dangling, OLD)
    assert dangling.is_symlink() and contents(far) == versions[0]
    # Both names have one lock.
    with (
        lock_file(folder.parent / ".data.lock", folder),
        pytest.raises(RunError, match=f"near is in use by process {os.getpid()}"),
    ):
        build_data([docs], near, OLD, overwrite=True)


def test_places_that_cannot_be_replaced_are_refused_first(
    docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    assert "file is a file" in refusal(lambda: build_data([docs], tmp_path / "file", NEW))
    assert "is a mount point" in refusal(lambda: build_data([docs], Path("/proc"), NEW))
    assert "/ is a mount point" in refusal(lambda: build_data([docs], Path("/"), NEW))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert ". is the current folder" in refusal(lambda: build_data([docs], Path("."), NEW))
    assert names(tmp_path) == ["file", "here"]


def test_two_builds_into_one_folder_do_not_mix(docs: Path, tmp_path: Path) -> None:
    answers: list[str] = []

    def build_too(stage: str, num_documents: int) -> None:
        if not answers:
            answers.append(refusal(lambda: build_data([docs], tmp_path / "data", OLD)))
            answers.append(refusal(lambda: merge_folders([tmp_path / "a"], tmp_path / "data")))

    build_data([docs], tmp_path / "a", OLD)
    build_data([docs], tmp_path / "data", NEW, build_too)
    for answer in answers:
        assert f"{tmp_path / 'data'} is in use by process {os.getpid()}" in answer
    assert load_data(tmp_path / "data") and names(tmp_path) == ["a", "data"]


@pytest.mark.parametrize("has_old", [True, False])
def test_killed_at_any_moment_it_can_be_built_again(
    docs: Path, tmp_path: Path, versions: list[dict[str, bytes]], has_old: bool
) -> None:
    """Before each change of a file in turn: the old folder or the new one is there, and whole."""
    out, number, hints = tmp_path / "data", 0, 0
    build_data([docs], tmp_path / "old", OLD)

    def build() -> None:
        build_data([docs], out, NEW, overwrite=True)

    while True:
        shutil.rmtree(out, ignore_errors=True)
        if has_old:
            shutil.copytree(tmp_path / "old", out)
        if not killed_before(number, build):
            break
        if out.exists():
            assert contents(out) in versions[1 - has_old :]
        else:
            # Between the renames: readers say where the old folder is.
            aside = tmp_path / ".data.underpar-old"
            message = refusal(lambda: load_data(out))
            assert aside.exists() == has_old and (str(aside) in message) == has_old
            hints += has_old
            assert not has_old or contents(aside) == versions[0]
        build()
        assert contents(out) == versions[1]
        assert names(tmp_path) == ["data", "old"]
        number += 1
    assert number > 20 and (hints > 0) == has_old


def test_the_old_folder_comes_back_before_anything_is_refused(
    docs: Path, folder: Path, versions: list[dict[str, bytes]]
) -> None:
    folder.rename(folder.parent / ".data.underpar-old")
    (folder.parent / ".data.underpar-new").mkdir()
    assert "give --overwrite" in refusal(lambda: build_data([docs], folder, NEW))
    assert contents(folder) == versions[0] and names(folder.parent) == ["data"]


def test_a_link_among_the_leftovers_is_not_followed(docs: Path, folder: Path) -> None:
    for kind in ("new", "old"):
        (folder.parent / f".data.underpar-{kind}").symlink_to(folder)
    before = contents(folder)
    assert "give --overwrite" in refusal(lambda: build_data([docs], folder, NEW))
    assert contents(folder) == before and names(folder.parent) == ["data"]


def test_a_swap_that_fails_puts_the_old_folder_back(
    docs: Path, folder: Path, versions: list[dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def fail(source: Path, target: Path) -> None:
        if source.name.endswith("-new"):
            raise OSError(16, "Device or resource busy")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    message = refusal(lambda: build_data([docs], folder, NEW, overwrite=True))
    assert message == f"{folder} cannot be written: Device or resource busy; no file was replaced"
    assert contents(folder) == versions[0] and names(folder.parent) == ["data"]


def test_only_new_or_empty_folders_by_default(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "new"):
        with new_folder(tmp_path / name) as new:
            (new / "file").write_text(name)
        assert (tmp_path / name / "file").read_text() == name
    with pytest.raises(DataError, match="new is not empty"), new_folder(tmp_path / "new"):
        pass


@pytest.mark.parametrize("step", ["read_json", "read_model", "open_shard", "hash_file"])
def test_a_reader_gets_one_folder_while_it_is_replaced(
    docs: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The folder is replaced during a step of opening it; the step itself finds no folder."""
    wanted = build_data([docs], folder.parent / "other", NEW)
    original, num_calls = getattr(data_folder, step), 0

    def replace_meanwhile(*arguments: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 1:
            return original(*arguments)
        os.replace(folder, folder.parent / "aside")
        try:
            return original(*arguments)
        finally:
            os.replace(folder.parent / "other", folder)

    monkeypatch.setattr(data_folder, step, replace_meanwhile)
    data = load_data(folder)
    assert data.manifest == wanted and data.val.num_documents == wanted["val"]["documents"]
    assert num_calls > 1


def test_what_is_open_stays_readable_when_its_folder_is_replaced(docs: Path, folder: Path) -> None:
    data, again = load_data(folder), load_data(folder)
    build_data([docs], folder, NEW, overwrite=True)
    assert load_data(folder).manifest != data.manifest
    for old, new in ((data.train, again.train), (data.val, again.val)):
        assert old.tokens.tolist() == new.tokens.tolist()
