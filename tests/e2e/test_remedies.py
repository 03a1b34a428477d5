"""The command that an error names is the one that helps: typed as it is printed, it works."""

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from commands import invoke, run
from small_data import prose, write_jsonl
from tiny import TinyRun
from underpar.core.run_folder import RunFolder
from underpar.core.tensor_files import read_tensors, save_tensors
from underpar.errors import DivergedError

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


def test_a_run_that_diverged(
    tiny_run: TinyRun, tmp_path: Path, fails: Fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(shutil.copytree(tiny_run.folder.path, tmp_path / "my run"))
    tensors, about = read_tensors(folder.weights_file)
    for tensor in (t for t in tensors.values() if t.ndim == 2):
        tensor.fill_(3e38)[0] *= -1
    save_tensors(folder.weights_file, tensors, about)
    slower = quoted_words(fails("calibrate", folder.path))

    def diverge(*_: object) -> None:
        raise DivergedError("a Hessian is NaN or infinite")

    monkeypatch.setattr("underpar.stages.pack.open_pack_job", diverge)
    for stage in ("quantize", "pack"):
        assert quoted_words(fails(stage, folder.path)) == slower
    run(*slower, "--set", "train.budget_steps=2")
    new = RunFolder(tmp_path / "my run-lower-rate").read_recipe()
    assert new.train.matrix_lr == tiny_run.recipe.train.matrix_lr / 2


def test_a_file_in_place_of_a_text(tiny_run: TinyRun, tmp_path: Path, fails: Fails) -> None:
    file = tmp_path / "my page.txt"
    file.write_text("The government announced")
    words = quoted_words(fails("inspect", tiny_run.folder.path, file))
    assert "24 bytes in 13 tokens" in run(*words)
    run("inspect", tiny_run.folder.path, "The " * 100)


def test_a_text_whose_name_begins_with_a_dash(
    tmp_path: Path, fails: Fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "-x.jsonl", prose(60))
    words = ["data", "build", "-x.jsonl", "--out", "data", "--set", "model.vocab_size=400"]
    result = invoke(*words)
    assert result.exit_code == 2
    assert "name the file as ./-x.jsonl" in result.output
    assert "name the file" not in invoke("data", "build", "-y.jsonl", "--out", "data").output
    run(*("./-x.jsonl" if word == "-x.jsonl" else word for word in words))


def test_an_option_that_repairs_a_call_is_shown_in_the_whole_call(
    tmp_path: Path, fails: Fails
) -> None:
    texts = write_jsonl(tmp_path / "my texts.jsonl", [*prose(60), ""])
    words = ["data", "build", texts, "--out", tmp_path / "data", "--set", "model.vocab_size=400"]
    run(*quoted_words(fails(*words)))
    again = quoted_words(fails(*words, "--bad-input", "repair"))
    assert again[-1] == "--overwrite"
    run(*again)
    assert "as in" not in fails("data", "build", tmp_path / "nothing", "--out", tmp_path / "new")


def test_a_folder_of_texts_in_place_of_data(tmp_path: Path, fails: Fails) -> None:
    texts, data = tmp_path / "my texts", tmp_path / "data"
    texts.mkdir()
    write_jsonl(texts / "texts.jsonl", prose(60))
    words = quoted_words(fails("train", "demo", "--data", texts), DATA=data)
    run(*words, "--set", "model.vocab_size=400")
    run("data", "inspect", data)


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
