"""Every command and the Python lines of the README run, in their order, at tiny size."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from underpar.cli import app
from underpar.data.sources.corpus import read_documents

README = (Path(__file__).parents[2] / "README.md").read_text()
TINY = [
    "model.vocab_size=512",
    "model.num_layers=1",
    "train.budget_seconds=0",
    "train.budget_steps=4",
    "levers.bigram.buckets=64",
]
# Where recipes are named, tiny sizes are set; a short document keeps coding short.
TAKES_SET = ("data build", "train")


def commands() -> list[str]:
    blocks = re.findall(r"```\n(underpar .*?)```", README, re.DOTALL)
    return [line for block in blocks for line in block.strip().splitlines()]


def test_the_guide_runs_as_written(
    corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = tmp_path / "my-texts"
    texts.mkdir()
    for number, document in enumerate(read_documents([corpus_file])):
        (texts / f"{number}.txt").write_text(document.text[:600])
    Path("book.txt").write_text("A very short book. " * 10)
    assert len(commands()) >= 10
    for line in commands():
        words = shlex.split(line, comments=True)[1:]
        if " ".join(words).startswith(TAKES_SET):
            words += [word for override in TINY for word in ("--set", override)]
        result = CliRunner().invoke(app, words, catch_exceptions=False)
        assert result.exit_code == 0, f"{line}\n{result.output}"
    assert Path("book.back").read_bytes() == Path("book.txt").read_bytes()
    [code] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(code, "README", "exec"), {})


def test_names_in_the_readme_exist() -> None:
    for path in re.findall(r"`((?:docs|src)/[\w./]+|[A-Z]+\.md)`", README):
        assert (Path(__file__).parents[2] / path).exists(), path
