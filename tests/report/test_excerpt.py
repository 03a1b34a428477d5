"""What the page shows of texts: prices that add up to the score, names, and reasons for neither."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiny import TinyRun
from underpar.build.artifact import build_tokenizer, read_artifact
from underpar.build.model import build_predictor
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime
from underpar.data.folder import load_data
from underpar.report import build as page_module
from underpar.report import excerpt as module
from underpar.report.build import build_report
from underpar.report.excerpt import Excerpt, Texts, beginning, price, read_texts
from underpar.report.gather import gather
from underpar.report.surprise import LEVELS, characters


@pytest.fixture
def folder(tiny_run: TinyRun, tmp_path: Path) -> RunFolder:
    """A copy that a test may change; its data folder is a copy too."""
    copy = RunFolder(shutil.copytree(tiny_run.folder.path, tmp_path / "run"))
    data = shutil.copytree(tiny_run.data, tmp_path / "data")
    change_about(copy, data=str(data))
    return copy


def change_about(folder: RunFolder, **values: Any) -> None:
    about = folder.read_json(folder.about_file)
    folder.about_file.write_text(json.dumps(about | values))


def test_prices_are_those_of_the_score(tiny_run: TinyRun, runtime: Runtime) -> None:
    artifact, _ = read_artifact(tiny_run.folder.artifact_file)
    data = load_data(tiny_run.data)
    predictor = build_predictor(artifact, runtime.device)
    # Of the last document alone the end is not priced, and an excerpt has no end.
    entry = gather(tiny_run.folder).scores["plain"].score.entries[-1]
    raw = data.tokenizer.decode(data.val.doc(entry.document))
    pieces = list(price(artifact, predictor, build_tokenizer(artifact), raw, runtime))
    assert "".join(text for text, _ in pieces).encode() == raw
    assert sum(bits for _, bits in pieces) == pytest.approx(entry.bits, rel=1e-4)


def test_an_excerpt_is_the_beginning_of_a_held_out_document(folder: RunFolder) -> None:
    texts = read_texts(folder, gather(folder))
    assert texts.excerpt and not texts.why_not
    data = load_data(Path(folder.read_json(folder.about_file)["data"]))
    raw = data.tokenizer.decode(data.val.doc(texts.excerpt.document)).decode()
    shown = "".join(text for text, _ in texts.excerpt.pieces)
    assert raw.startswith(shown) and 0 < len(shown.encode()) <= module.EXCERPT_BYTES
    assert " ".join(raw.split()).startswith(texts.excerpt.prompt)
    assert texts.excerpt.sample
    # The same folder gives the same page.
    assert read_texts(folder, gather(folder)) == texts


def test_documents_are_named_by_their_first_words(folder: RunFolder, tmp_path: Path) -> None:
    run = gather(folder)
    names = read_texts(folder, run).names
    data = load_data(Path(folder.read_json(folder.about_file)["data"]))
    assert names.keys() == set(range(data.val.num_documents))
    for number, name in names.items():
        text = " ".join(data.tokenizer.decode(data.val.doc(number)).decode().split())
        assert name and text.startswith(name.rstrip("\u2026"))
        assert len(name) <= module.NAME_CHARACTERS + 1
    page = build_report([folder], tmp_path / "report.html").read_text()
    table = page.partition('<table class="extremes">')[2].partition("</table>")[0]
    assert table.count("<tr><th>") == min(6, len(names)) + 1
    assert not re.search(r"document \d", table)


@pytest.mark.parametrize("level", range(len(LEVELS) + 1))
def test_levels_merge_neighbours_and_lose_no_text(level: int) -> None:
    bounds = [0.0, *LEVELS]
    pieces = (("a", bounds[level]), ("b", bounds[level] + 0.5), (" c", 99.0))
    runs = Excerpt(0, pieces, "", "").levels
    assert "".join(text for _, text in runs) == "ab c"
    assert runs[0] == ((level, "ab") if level < len(LEVELS) else (level, "ab c"))


def test_characters_of_several_tokens_and_operators_are_kept_whole() -> None:
    spans = [b"", b"\xc3", b"\xa9", b"", b"\xff"]
    bits = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    assert list(characters(spans, bits)) == [("\u00e9", 6.0), ("\ufffd", 9.0)]


def test_a_text_is_cut_after_a_word() -> None:
    assert beginning(b"one two three", 100) == b"one two three"
    assert beginning(b"one two three", 9) == b"one two"
    assert beginning("\u00e9\u00e9\u00e9".encode(), 3) == "\u00e9".encode()


def damaged(folder: RunFolder) -> None:
    folder.artifact_file.write_bytes(b"UPAR" + bytes(100))


def without_data(folder: RunFolder) -> None:
    change_about(folder, data="/nowhere/data")


def with_other_data(folder: RunFolder) -> None:
    for path in folder.score_files():
        tree = json.loads(path.read_text()) | {"data_identity": "0" * 16}
        path.write_text(json.dumps(tree))


def unpacked(folder: RunFolder) -> None:
    folder.artifact_file.unlink()


def with_other_documents(folder: RunFolder) -> None:
    for path in folder.score_files():
        tree = json.loads(path.read_text())
        tree["ledger"] = [entry | {"document": 10**9} for entry in tree["ledger"]]
        path.write_text(json.dumps(tree))


def with_damaged_data(folder: RunFolder) -> None:
    path = Path(folder.read_json(folder.about_file)["data"]) / "val.shard"
    raw = bytearray(path.read_bytes())
    raw[-2:] = b"\xff\xff"
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (damaged, "model.upar"),
        (without_data, "the data folder /nowhere/data is not here"),
        (with_other_data, "holds other data than were scored"),
        (unpacked, "run &#39;underpar pack"),
        (with_other_documents, "no held-out document has any text"),
        (with_damaged_data, "val.shard"),
    ],
)
def test_a_page_without_an_excerpt_says_why(
    folder: RunFolder, tmp_path: Path, change: Any, why: str
) -> None:
    change(folder)
    page = build_report([folder], tmp_path / "report.html").read_text()
    section = page.partition('id="run-0-text"')[2].partition("</section>")[0]
    assert "not shown: " in section and why in section


def test_the_model_may_be_left_out(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "read_texts", None)
    page = build_report([folder], tmp_path / "report.html", with_text=False).read_text()
    assert '<blockquote class="excerpt">' not in page


def test_texts_stay_texts(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = "<script>alert(1)</script>"
    excerpt = Excerpt(0, ((hostile, 5.0), (hostile, 0.5)), hostile, hostile)
    texts = Texts({0: hostile, 1: hostile}, excerpt)
    monkeypatch.setattr(page_module, "read_texts", lambda *_: texts)
    page = build_report([folder], tmp_path / "report.html").read_text()
    assert "<script" not in page and page.count("&lt;script&gt;") >= 4
