"""What the pages show can be typed: commands and options exist, code compiles, TOML parses."""

import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from underpar.audit.rules import RULES
from underpar.cli import app
from underpar.core import run_folder

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [ROOT / "src" / "underpar" / "compile" / "README.md"]
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
# A command inside a sentence.
SPAN = re.compile(r"`((?:python -m )?underpar [^`\n]+)`")


@dataclass(frozen=True)
class Shown:
    """Something that a page shows."""

    page: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text[:60]}"


def blocks(*languages: str) -> list[Shown]:
    """The fenced blocks in one of these languages; the commands' blocks have none."""
    pairs = ((page.name, block) for page in PAGES for block in FENCE.findall(page.read_text()))
    return [Shown(name, text) for name, (language, text) in pairs if language in languages]


def commands() -> list[Shown]:
    """Every line of a block, fenced or indented, that calls underpar."""
    lines = [Shown(b.page, line) for b in blocks("", "bash") for line in b.text.splitlines()]
    for page in PAGES:
        indented = re.findall(r"^    (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
        lines += [Shown(page.name, line) for line in indented]
    return [line for line in lines if re.search(r"(^|-m )underpar ", line.text)]


def until_redirection(words: list[str]) -> list[str]:
    return words[: words.index(">")] if ">" in words else words


def spans() -> list[Shown]:
    """The commands in sentences, which may leave arguments out."""
    texts = ((page.name, FENCE.sub("", page.read_text())) for page in PAGES)
    return [Shown(name, span) for name, text in texts for span in SPAN.findall(text)]


def find_command(sample: Shown) -> tuple[TyperCommand, list[str]]:
    """The command that words call, and the words after its name."""
    words = shlex.split(sample.text, comments=True)
    words = words[words.index("underpar") + 1 :]
    command: Any = get_command(app)
    while isinstance(command, TyperGroup) and words and not words[0].startswith("-"):
        name = words.pop(0)
        assert name in command.commands, f"{sample}: no command {name!r}"
        command = command.commands[name]
    return command, words


@pytest.fixture(autouse=True)
def files_need_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments that name an artifact or a run are taken as they are."""
    monkeypatch.setattr(run_folder, "artifact_at", lambda path: path)
    monkeypatch.setattr(run_folder, "run_at", run_folder.RunFolder)


@pytest.mark.parametrize("sample", commands(), ids=str)
def test_commands_of_blocks_are_understood(sample: Shown) -> None:
    command, words = find_command(sample)
    # Parsed as on the command line; the command is not called.
    command.make_context("underpar", until_redirection(words))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("underpar audit runs/a --depth 3", "No such option"),
        ("underpar recipe show --forward", "Missing"),
    ],
)
def test_commands_that_would_be_refused_are_noticed(text: str, why: str) -> None:
    # The class of the error differs between versions of typer.
    with pytest.raises(Exception, match=why):
        test_commands_of_blocks_are_understood(Shown("page", text))


@pytest.mark.parametrize("sample", spans(), ids=str)
def test_commands_in_sentences_exist(sample: Shown) -> None:
    command, words = find_command(sample)
    names = {"--help", *(name for param in command.params for name in all_names(param))}
    options = {word.partition("=")[0] for word in words if word.startswith("-")}
    assert options <= names, f"{sample}: no option {options - names}"


def all_names(param: Any) -> list[str]:
    return [*param.opts, *param.secondary_opts]


@pytest.mark.parametrize("sample", blocks("py", "python"), ids=str)
def test_python_compiles(sample: Shown) -> None:
    # Lines of a dictionary are shown without its braces.
    is_table = re.match(r' *"\w+": ', sample.text)
    compile(f"{{{sample.text}}}" if is_table else sample.text, sample.page, "exec")


@pytest.mark.parametrize("sample", blocks("toml"), ids=str)
def test_toml_parses(sample: Shown) -> None:
    assert tomllib.loads(sample.text)


def test_the_page_on_proof_names_every_rule() -> None:
    page = (ROOT / "docs" / "proof.md").read_text()
    table = page.partition("## What is computed again")[2].partition("\n## ")[0]
    cells = [line.split("|")[2] for line in table.splitlines() if line.startswith("| ")]
    named = {name.strip() for cell in cells[1:] for name in cell.split(",")}
    assert set(RULES) <= named


def test_the_pages_show_something() -> None:
    pages = {sample.page for sample in commands()}
    assert {"README.md", "data.md", "scoring.md"} <= pages
    assert len(spans()) > 20


@pytest.mark.parametrize(
    "text", ["underpar fly", "underpar lab parity --fast", "underpar score a --data b --adopt"]
)
def test_what_does_not_exist_is_noticed(text: str) -> None:
    with pytest.raises(AssertionError, match=r"no (command|option)"):
        test_commands_in_sentences_exist(Shown("page", text))
