"""Every file of a run names the command that writes it, and that command exists."""

import shlex
from pathlib import Path

import pytest
import typer

from underpar.cli import app
from underpar.core.fields import read_fields, read_lines
from underpar.core.makers import MAKERS, again, maker_of
from underpar.core.run_folder import RunFolder, artifact_at, run_at
from underpar.errors import RunError

# Continued or written beside; nobody asks for them.
NO_MAKER = {"checkpoint.safetensors", "failure.json", "report.html"}


def test_every_file_of_a_run_has_a_maker(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    names = [name for name in dir(RunFolder) if name.endswith("_file")]
    files = [getattr(folder, name) for name in names]
    assert len(files) > 12
    nameless = {file.name for file in files if isinstance(file, Path) and not maker_of(file)}
    assert nameless == NO_MAKER
    assert maker_of(folder.score_file("sliding64")) == f"underpar score {tmp_path}"
    assert maker_of(folder.score_file("adapt")) == f"underpar score {tmp_path} --adapt"


@pytest.mark.parametrize("words", sorted(set(MAKERS.values())))
def test_the_command_of_a_maker_exists(words: str) -> None:
    command = typer.main.get_command(app)
    verb, *arguments = shlex.split(words)
    context = command.commands[verb].make_context(verb, arguments, resilient_parsing=True)  # type: ignore[attr-defined]
    assert context.params


def test_a_damaged_file_names_its_command(tmp_path: Path) -> None:
    (tmp_path / "budget.json").write_text("{")
    with pytest.raises(RunError, match=f"run 'underpar pack {tmp_path}' again"):
        read_fields(tmp_path / "budget.json")
    (tmp_path / "audit.json").write_text("{}")
    with pytest.raises(RunError, match=f"run 'underpar audit {tmp_path}' again"):
        read_fields(tmp_path / "audit.json").text("verdict")
    (tmp_path / "metrics.jsonl").write_text("x\n")
    with pytest.raises(RunError, match=f"'underpar train .* --out {tmp_path}' again"):
        list(read_lines(tmp_path / "metrics.jsonl"))
    assert again(tmp_path / "else.json") == "make it again"


def test_a_run_and_its_artifact_name_each_other(tmp_path: Path) -> None:
    artifact = tmp_path / "model.upar"
    with pytest.raises(RunError, match="is not a run folder"):
        artifact_at(tmp_path)
    (tmp_path / "recipe.toml").write_text("")
    for path in (tmp_path, artifact):
        with pytest.raises(RunError, match=f"run 'underpar pack {tmp_path}' first"):
            artifact_at(path)
    artifact.write_bytes(b"")
    assert artifact_at(tmp_path) == artifact_at(artifact) == artifact
    assert run_at(artifact).path == run_at(tmp_path).path == tmp_path
    with pytest.raises(RunError, match="run 'underpar pack RUN' first"):
        artifact_at(tmp_path / "other.upar")
