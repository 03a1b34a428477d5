"""Every file of a run names the command that writes it, and that command exists."""

import ast
import re
import shlex
from pathlib import Path

import pytest
import typer

import underpar
from underpar.cli import app
from underpar.core.fields import read_fields, read_lines
from underpar.core.makers import MAKERS, again, maker_of
from underpar.core.run_folder import RunFolder, artifact_at, run_at
from underpar.errors import RunError
from underpar.score.method import ADAPT, PLAIN, PUBLISHED, Method

LORA = " --with lora_ttt"
# Continued or written beside; nobody asks for them.
NO_MAKER = {"checkpoint.safetensors", "failure.json", "report.html"}


def test_every_file_of_a_run_has_a_maker(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    names = [name for name in dir(RunFolder) if name.endswith("_file")]
    files = [getattr(folder, name) for name in names]
    assert len(files) > 12
    nameless = {file.name for file in files if isinstance(file, Path) and not maker_of(file)}
    assert nameless == NO_MAKER


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (PLAIN, ""),
        (ADAPT, " --adapt"),
        (Method(stride=64), " --stride 64"),
        (Method(("tilt",), stride=512, flat=True), " --stride 512 --flat --with tilt"),
        (Method(("lora_ttt", "tilt"), order=PUBLISHED), LORA + " --with tilt --order published"),
        (Method(name="$(rm x)"), " --with '$(rm x)'"),
    ],
    ids=lambda value: value.label if isinstance(value, Method) else "",
)
def test_a_score_names_the_options_that_it_was_made_with(method: Method, options: str) -> None:
    path = RunFolder(Path("my runs") / "a").score_file(method.label)
    assert maker_of(path) == f"underpar score 'my runs/a'{options}"


# A stage that shall be repeated, or done before: its command has to be in the message too.
REPEAT = re.compile(
    r"\b(build|train|calibrate|quantize|pack|score|audit|fetch|merge|make)s? "
    r"(it |them |the folder )?(again|anew|first)\b"
)
NAMED = ("underpar ", "again(", "remedy", "the same command")
# Methods of a predictor have no command.
NO_COMMAND = ("infer/predictor.py",)


def test_an_error_that_asks_for_a_stage_names_its_command() -> None:
    sources = Path(underpar.__file__).parent
    nameless = []
    others = {sources / name for name in NO_COMMAND}
    for path in sorted({*sources.rglob("*.py")} - others):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and node.exc is not None:
                words = ast.unparse(node.exc)
                if REPEAT.search(words) and not any(name in words for name in NAMED):
                    nameless.append(f"{path.relative_to(sources)}:{node.lineno} {words}")
    assert nameless == []


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


def test_a_key_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "score-plain.json"
    for text in ('{"bpb": 0.9, "bpb": 2.0}', '{"how": [{"a": 1, "b": 2, "a": 1}]}'):
        path.write_text(text)
        with pytest.raises(RunError, match="occurs twice"):
            read_fields(path)
    path.write_text('{"a": {"a": 1}, "b": {"a": 2}}')
    assert read_fields(path).values == {"a": {"a": 1}, "b": {"a": 2}}


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
