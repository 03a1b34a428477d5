"""`underpar inspect`: the bits of each token add up to the score, in every form that is shown."""

import html
import re
from pathlib import Path

import pytest

from commands import invoke, run, run_json
from tiny import TinyRun
from underpar import load
from underpar.cli import console
from underpar.cli.console import SURPRISE, show_colored
from underpar.errors import DataError, UnderparError
from underpar.report.surprise import LEVELS, characters, legend, levels_of, page_of

TEXT = "The caf\u00e9 of Zurich <b>reopened</b>.\n\tIt was Monday."


@pytest.mark.parametrize("adapt", [False, True])
def test_bits_of_tokens_are_those_of_the_score(tiny_run: TinyRun, adapt: bool) -> None:
    folder = tiny_run.folder.path
    told = run_json("inspect", folder, TEXT, *(["--adapt"] if adapt else []))
    assert (told["bytes"], told["adapted"]) == (len(TEXT.encode()), adapt)
    assert sum(token["bytes"] for token in told["tokens"]) == len(TEXT.encode())
    bits = [token["bits"] for token in told["tokens"]]
    score = load(folder).score(TEXT, adapt=adapt)
    assert sum(bits) == pytest.approx(told["bits"]) == pytest.approx(score.bits, rel=1e-5)
    assert told["bits_per_byte"] == pytest.approx(score.bpb, rel=1e-5)
    # The last token ends the document and stands for no text.
    assert told["tokens"][-1]["bytes"] == 0
    assert told["tokens"][-1]["token"] == load(folder).tokenizer.bos_id


def test_a_file_of_any_bytes_is_read(tiny_run: TinyRun, tmp_path: Path) -> None:
    path = tmp_path / "page.txt"
    path.write_bytes(b"\xff\x00caf\xc3")
    told = run_json("inspect", tiny_run.folder.path, "--file", path)
    assert sum(token["bytes"] for token in told["tokens"]) == told["bytes"] == 6
    assert run_json("inspect", tiny_run.folder.path, "caf")["bytes"] == 3


def test_people_see_a_sentence_a_legend_and_the_text(tiny_run: TinyRun) -> None:
    printed = run("inspect", tiny_run.folder.path, TEXT)
    assert re.match(r"\d+\.\d{4} bits per byte\.\n", printed)
    assert "below 1 bit" in printed and "10 bits or more" in printed
    assert "most surprising" in printed
    assert printed.endswith("of Zurich <b>reopened</b>.\n        It was Monday.\n")


def test_the_page_shows_the_text_in_its_levels(tiny_run: TinyRun, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    told = run_json("inspect", tiny_run.folder.path, TEXT, "--html", page)
    shown = page.read_text()
    assert shown.startswith("<!doctype html>") and "http" not in shown.partition("<body>")[2]
    [block] = re.findall(r'<blockquote class="excerpt">(.*?)</blockquote>', shown, re.DOTALL)
    assert html.unescape(re.sub(r"</?span[^>]*>", "", block)) == TEXT
    model = load(tiny_run.folder.path)
    tokens = model.log_probs(TEXT)
    pieces = list(characters([t.text for t in tokens], [t.bits for t in tokens]))
    wanted = [(level, text) for level, text in levels_of(pieces) if level]
    found = [
        (int(n), html.unescape(text))
        for n, text in re.findall(r'<span class="s(\d)">(.*?)</span>', block, re.DOTALL)
    ]
    assert found == wanted
    assert f"{told['bits_per_byte']:.4f} bits per byte" in shown


def test_a_page_keeps_foreign_markup_as_text() -> None:
    page = page_of("<i>", [("<u>", "&")], [("<script>", 12.0)])
    assert "&lt;script&gt;" in page and "<script>" not in page and "<i>" not in page


def test_every_level_has_a_color_and_a_name() -> None:
    assert len(SURPRISE) == len(legend()) == len(LEVELS) + 1
    assert [name for _, name in legend()][:2] == ["below 1 bit", "1 bit or more"]
    style = (Path(console.__file__).parents[1] / "report" / "style.css.j2").read_text()
    # The first colors of the styles are those of a light page.
    for level, background in enumerate(SURPRISE[1:], start=1):
        assert f"--s{level}: {background.removeprefix('black on ')};" in style


def test_colors_reach_a_terminal_and_sequences_of_the_text_do_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = console.PlainConsole(
        highlight=False, force_terminal=True, color_system="truecolor", width=80
    )
    monkeypatch.setattr(console, "OUT", terminal)
    show_colored([(0, "plain "), (4, "rare\x1b[2J"), (1, "\nnext")])
    assert capsys.readouterr().out == (
        "plain \x1b[30;48;2;232;144;111mrare\\x1b[2J\x1b[0m\n\x1b[30;48;2;248;236;210mnext\x1b[0m\n"
    )


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ([], UnderparError, "give a text, or the name of its file with --file"),
        (["text", "--file", "page.txt"], UnderparError, "give a text, or"),
        (["--file", "nowhere.txt"], UnderparError, "cannot read nowhere.txt"),
    ],
)
def test_mistakes(
    tiny_run: TinyRun, words: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        invoke("inspect", tiny_run.folder.path, *words)


def test_an_empty_file_is_refused(tiny_run: TinyRun, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match="empty text"):
        invoke("inspect", tiny_run.folder.path, "--file", tmp_path / "empty.txt")
