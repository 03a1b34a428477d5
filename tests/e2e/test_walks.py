"""The guide's commands, as they are typed, on text that nobody prepared: each ends in a report."""

import gzip
import pydoc
import re
import shlex
import sys
import unicodedata
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest

from commands import invoke
from small_data import write_file, write_jsonl
from underpar.data.folder import read_manifest
from underpar.data.sources.corpus import demo_corpus, read_documents

README = (Path(__file__).parents[2] / "README.md").read_text()
TINY = [
    "model.vocab_size=512",
    "model.num_layers=1",
    "train.budget_seconds=0",
    # Long enough for the guard, which once ended a run in the middle of a long table.
    "train.budget_steps=250",
    "levers.bigram.buckets=64",
]
MANUALS = ("argparse", "json", "logging", "pathlib", "random", "statistics", "string", "textwrap")

pytestmark = pytest.mark.slow


def own_text_commands() -> list[list[str]]:
    """The words of the section "Your own text", from the build to the report."""
    [block] = re.findall(r"## Your own text\n```\n(.*?)```", README, re.DOTALL)
    return [shlex.split(line, comments=True)[1:] for line in block.strip().splitlines()]


def demo_texts(number: int, source: str = "") -> Iterator[str]:
    """Texts of the embedded corpus."""
    found = (d.text for d in read_documents([demo_corpus()]) if d.source.startswith(source))
    return islice(found, number)


def write_manuals(folder: Path) -> None:
    """Licences, manuals and one long table, as a folder of an engineer might hold them."""
    root = Path(__file__).parents[2]
    (folder / "licences").mkdir(parents=True)
    for name in ("LICENSE", "src/underpar/data/demo/NOTICE.md"):
        (folder / "licences" / Path(name).name).write_bytes((root / name).read_bytes())
    python = sorted(Path(sys.base_prefix).glob("lib/python3*/LICENSE.txt"))
    for licence in python[:1]:
        (folder / "licences" / "PYTHON").write_bytes(licence.read_bytes())
    for name in MANUALS:
        manual = pydoc.plain(pydoc.render_doc(name))
        write_file(folder / "manuals" / f"{name}.rst", manual.encode())
    letters = map(chr, range(0x2FFF))
    rows = (
        f"{ord(letter):04X};{unicodedata.name(letter, '<none>')};{unicodedata.category(letter)}"
        for letter in letters
    )
    write_file(folder / "table.txt", "\n".join(rows).encode())


def write_novel(folder: Path) -> None:
    """One file, one document."""
    write_file(folder / "novel.txt", "\n\n".join(demo_texts(40, "books_novels")).encode())


def write_mixed(folder: Path) -> None:
    """Endings of all kinds, some that are no text, marks, copies and near copies."""
    texts = [text[:4000] for text in demo_texts(120)]
    write_jsonl(folder / "many.jsonl", texts[:60])
    for number, text in enumerate(texts[60:]):
        name, raw = f"{number}", text.encode()
        ending = (".md", ".rst", ".html", "", ".txt.gz", ".txt", ".tex")[number % 7]
        raw = gzip.compress(raw) if ending == ".txt.gz" else raw
        raw = b"\xef\xbb\xbf" + raw if ending == ".md" else raw
        write_file(folder / "files" / f"{name}{ending}", raw)
    write_file(folder / "files" / "utf16.txt", texts[3][:900].encode("utf-16"))
    write_file(folder / "photo.png", b"\x89PNG\r\n\x1a\n\x00")
    write_file(folder / "table.csv", b"a,b\n")
    for number, text in enumerate(texts):
        write_file(folder / "copies" / f"{number}.txt", f"{text} (copy)".encode())
        write_file(folder / "copies" / f"{number}-again.txt", text.encode())


@pytest.fixture
def walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Type every command of the guide on `my-texts`; more words for the build may be given."""
    monkeypatch.chdir(tmp_path)

    def type_all(*build_words: str) -> str:
        printed = ""
        for words in own_text_commands():
            if words[:2] == ["data", "build"]:
                words += build_words
            if words[0] in ("data", "train"):
                words += [word for override in TINY for word in ("--set", override)]
            result = invoke(*words)
            assert result.exit_code == 0, f"{' '.join(words)}\n{result.output}"
            printed += result.output
        assert Path("runs/mine/report.html").read_text().startswith("<!doctype html>")
        return " ".join(printed.split())

    return type_all


def test_a_folder_of_licences_manuals_and_a_table(walk: Callable[..., str]) -> None:
    write_manuals(Path("my-texts"))
    # Manuals have common parts, which the guide's build leaves out.
    printed = walk()
    # So few documents: the end of each is held out, also that of the table.
    assert "of each, the last 10% is held out" in printed
    assert len(read_manifest(Path("data"))["inputs"]) >= 11


def test_one_novel(walk: Callable[..., str]) -> None:
    write_novel(Path("my-texts"))
    assert "of each, the last 10% is held out" in walk()


def test_a_folder_of_mixed_endings_with_duplicates(walk: Callable[..., str]) -> None:
    write_mixed(Path("my-texts"))
    [build, *_] = own_text_commands()
    # Without leaving out copies, the build says that there are some.
    build = build[: build.index("--drop-near")]
    words = [word for override in TINY for word in ("--set", override)]
    result = invoke(*build, *words)
    said = " ".join(result.output.split())
    assert result.exit_code == 0, said
    assert "2 files skipped (1 .png, 1 .csv), such as my-texts/photo.png" in said
    assert re.search("[1-9][0-9]* documents repaired", said)
    assert "nearly repeat training text or each other" in said
    printed = walk("--overwrite")
    assert "left out as copies: " in printed
    assert invoke("data", "audit", "data").exit_code == 0
