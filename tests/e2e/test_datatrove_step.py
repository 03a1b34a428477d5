"""The datatrove example: ranks write what one build writes, and a second run goes on."""

import json
import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
from typer.testing import CliRunner

from underpar.cli import app
from underpar.data.build import BuildOptions, build_data
from underpar.data.folder import load_data
from underpar.data.merge import merge_folders
from underpar.data.sources.corpus import demo_corpus, read_documents
from underpar.errors import DataError

pytest.importorskip("datatrove")

EXAMPLE = Path(__file__).parents[2] / "examples" / "datatrove_step.py"
NUM_FILES = 3


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of three files in `texts`, and the build of all of it in `whole`."""
    folder = tmp_path_factory.mktemp("datatrove")
    documents = read_documents([demo_corpus()])
    (folder / "texts").mkdir()
    for number in range(NUM_FILES):
        lines = [json.dumps({"text": next(documents).text[:1500]}) + "\n" for _ in range(20)]
        (folder / "texts" / f"{number}.jsonl").write_text("".join(lines))
    build_data([folder / "texts"], folder / "whole", BuildOptions(400, holdout=0.1))
    return folder


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = spec_from_file_location("datatrove_step", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ranks(out: Path) -> list[Path]:
    return sorted(out.glob("[0-9]*"))


def written(out: Path) -> dict[Path, tuple[int, bytes]]:
    """Every file of the ranks with the time it was written."""
    paths = (path for folder in ranks(out) for path in folder.iterdir())
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}


def hashes(folder: Path) -> list[list[bytes]]:
    data = load_data(folder)
    return [sorted(h.tobytes() for h in s.doc_hashes) for s in (data.train, data.val)]


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 40


def test_ranks_merge_into_one_build_and_are_not_run_twice(
    root: Path, example: ModuleType, tmp_path: Path
) -> None:
    def run() -> None:
        # Datatrove tells its steps about the machine through the environment.
        with mock.patch.dict(os.environ):
            example.main(root / "texts", root / "whole" / "tokenizer.model", tmp_path, 3, 1)

    run()
    assert [folder.name for folder in ranks(tmp_path)] == ["00000", "00001", "00002"]
    manifest = merge_folders(ranks(tmp_path), tmp_path / "merged")
    whole = load_data(root / "whole").manifest
    # One file a rank, in order: even the order of documents is that of the build.
    assert [manifest[split] for split in ("train", "val")] == [whole["train"], whole["val"]]
    assert manifest["tally"] == whole["tally"]
    first = written(tmp_path)
    run()
    assert written(tmp_path) == first
    (tmp_path / "logs" / "completions" / "00001").unlink()
    run()
    again = written(tmp_path)
    changed = {path.parent.name for path in first if again[path][0] != first[path][0]}
    assert changed == {"00001"}
    assert {p: content for p, (_, content) in again.items()} == {
        p: content for p, (_, content) in first.items()
    }


def test_the_script_runs_more_ranks_than_files_on_two_processes(root: Path, tmp_path: Path) -> None:
    words = [root / "texts", root / "whole" / "tokenizer.model", tmp_path, NUM_FILES + 1, 2]
    subprocess.run(
        [sys.executable, EXAMPLE, *map(str, words)], check=True, capture_output=True, timeout=120
    )
    folders = ranks(tmp_path)
    assert len(folders) == NUM_FILES + 1
    assert hashes(folders[-1]) == [[], []]
    out = tmp_path / "merged"
    command = ["data", "merge", *map(str, reversed(folders)), "--out", str(out), "--json"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0
    assert hashes(out) == hashes(root / "whole")
    manifest, whole = json.loads(result.stdout), load_data(root / "whole").manifest
    for split in ("train", "val"):
        for count in ("documents", "tokens", "bytes", "off_table"):
            assert manifest[split][count] == whole[split][count]


def test_a_line_that_cannot_be_parsed_stops_its_rank(
    root: Path, example: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "0.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    with mock.patch.dict(os.environ), pytest.raises(DataError, match="line 2: invalid JSON"):
        example.main(tmp_path / "texts", root / "whole" / "tokenizer.model", tmp_path / "out", 1, 1)
    assert not (tmp_path / "out" / "logs" / "completions").exists()
    with pytest.raises(DataError, match="no finished data folder"):
        load_data(tmp_path / "out" / "00000")
