"""The command that an error names is the one that helps: typed as it is printed, it works."""

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

from commands import run
from small_data import prose, write_jsonl
from tiny import TinyRun

Fails = Callable[..., str]


def quoted_words(line: str, **values: object) -> list[str]:
    """The words of the command in a message; names in capitals are replaced."""
    command = re.search(r"'underpar (.+?)'(?: again| first)?$", line.strip())
    assert command, line
    text = command[1]
    for name, value in values.items():
        text = re.sub(rf"\b{name}\b", shlex.quote(str(value)), text)
    return shlex.split(text)


def test_data_of_another_tokenizer(tiny_run: TinyRun, tmp_path: Path, fails: Fails) -> None:
    texts = write_jsonl(tmp_path / "texts.jsonl", prose(60))
    run("data", "build", texts, "--out", tmp_path / "data", "--set", "model.vocab_size=400")
    folder = Path(shutil.copytree(tiny_run.folder.path, tmp_path / "my run"))
    line = fails("score", folder, "--data", tmp_path / "data")
    new = tmp_path / "new"
    run(*quoted_words(line, TEXT=texts, NEW=new, RUN=folder))
    run("score", folder, "--data", new)


def test_files_of_a_run_in_a_folder_with_a_space(
    tiny_run: TinyRun, tmp_path: Path, fails: Fails
) -> None:
    folder = Path(shutil.copytree(tiny_run.folder.path, tmp_path / "my 'run'"))
    (folder / "model.upar").unlink()
    run(*quoted_words(fails("score", folder)))
    (folder / "score-plain.json").write_text("{")
    run(*quoted_words(fails("report", folder)))
    run("report", folder)


def test_a_damaged_data_folder(tiny_run: TinyRun, tmp_path: Path, fails: Fails) -> None:
    data = tmp_path / "my data"
    texts = write_jsonl(tmp_path / "texts.jsonl", prose(60))
    words = quoted_words(fails("train", "demo", "--data", data), TEXT=texts)
    run(*words, "--set", "model.vocab_size=400")
    for name, at in (("train.shard", -1), ("val.shard", 4), ("manifest.json", 0)):
        raw = bytearray((data / name).read_bytes())
        raw[at] ^= 1
        (data / name).write_bytes(raw)
        words = quoted_words(fails("data", "inspect", data), TEXT=texts)
        run(*words, "--set", "model.vocab_size=400")
        run("data", "inspect", data)
