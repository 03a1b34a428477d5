"""Which documents are held out: by hash, or the ends of few documents, cut into pieces."""

import random
from pathlib import Path

import pytest

from small_data import decoded, prose, write_file, write_jsonl
from underpar.data import hold_out
from underpar.data.build import BuildOptions, build_data
from underpar.data.folder import load_data
from underpar.data.hold_out import (
    BY_END,
    BY_HASH,
    FEWEST_DOCUMENTS,
    by_hash,
    labelled_documents,
    stated_hold_out,
)
from underpar.data.sources.corpus import Reading, cut_text, document_hash, read_documents
from underpar.errors import DataError

BYTES = BuildOptions(None, 0.1, kind="bytes")
NOVEL = "\n\n".join(prose(20))


def pieces_of(folder: Path) -> tuple[list[str], list[str]]:
    data = load_data(folder)
    train, val = (decoded(data, shard) for shard in (data.train, data.val))
    return [d.decode() for d in train], [d.decode() for d in val]


def test_the_end_of_a_single_text_is_held_out(tmp_path: Path) -> None:
    novel = write_file(tmp_path / "novel.txt", NOVEL.encode())
    manifest = build_data([novel], tmp_path / "data", BYTES)
    train, val = pieces_of(tmp_path / "data")
    assert "".join([*train, *val]) == NOVEL
    assert 0.08 * len(NOVEL) < len("".join(val)) < 0.12 * len(NOVEL)
    assert len(val) > 1
    assert manifest["split"] == {"rule": BY_END, "fraction": None, "end_fraction": 0.1}
    assert max(map(len, [*train, *val])) <= manifest["reading"]["split_documents"]
    assert manifest["tally"]["documents"] == len(train) + len(val)


def test_of_few_documents_each_end_is_held_out(tmp_path: Path) -> None:
    texts = {name: NOVEL[i::3] for i, name in enumerate("abc")}
    for name, text in texts.items():
        write_file(tmp_path / "in" / f"{name}.txt", text.encode())
    write_file(tmp_path / "in" / "short.txt", b"A note, too short to be cut.")
    build_data([tmp_path / "in"], tmp_path / "data", BYTES)
    train, val = pieces_of(tmp_path / "data")
    for text in texts.values():
        ours = [piece for piece in val if piece in text]
        assert ours and text.endswith("".join(ours))
        assert text.startswith(next(piece for piece in train if piece in text))
    assert "A note, too short to be cut." in train


def test_a_piece_that_equals_a_held_out_one_is_held_out_too(tmp_path: Path) -> None:
    other = "".join(random.Random(0).choices("abc \n", k=30_000))
    # Cut into equal parts, so that the copies of a piece are whole pieces.
    page = ("x" * 99 + "\n") * 10
    novel = write_file(tmp_path / "a.txt", (page * 5 + other + page * 5).encode())
    build_data([novel], tmp_path / "data", BYTES)
    train, val = pieces_of(tmp_path / "data")
    assert not set(train) & set(val)


@pytest.mark.parametrize("number", [FEWEST_DOCUMENTS - 1, FEWEST_DOCUMENTS])
def test_the_rule_depends_on_the_number_of_documents(tmp_path: Path, number: int) -> None:
    texts = [prose(40)[0] * 3 + str(i) for i in range(number)]
    docs = write_jsonl(tmp_path / "docs.jsonl", texts)
    manifest = build_data([docs], tmp_path / "data", BuildOptions(None, 0.3, kind="bytes"))
    assert manifest["split"]["rule"] == (BY_HASH if number >= FEWEST_DOCUMENTS else BY_END)


def test_many_documents_that_are_all_on_one_side_are_cut_too(tmp_path: Path) -> None:
    texts = [prose(40)[0] * 3 + str(i) for i in range(60)]
    training = [t for t in texts if by_hash(0.1).split_of(document_hash(t), "train") == "train"]
    docs = write_jsonl(tmp_path / "docs.jsonl", training[: FEWEST_DOCUMENTS + 1])
    manifest = build_data([docs], tmp_path / "data", BYTES)
    assert manifest["split"]["rule"] == BY_END


def test_documents_too_short_to_be_cut_are_held_out_by_hash(tmp_path: Path) -> None:
    texts = [f"Note {i}." for i in range(FEWEST_DOCUMENTS - 1)]
    docs = write_jsonl(tmp_path / "docs.jsonl", texts)
    manifest = build_data([docs], tmp_path / "data", BuildOptions(None, 0.3, kind="bytes"))
    assert manifest["split"] == {"rule": BY_HASH, "fraction": 0.3}


def test_documents_can_be_cut_and_held_out_by_hash(tmp_path: Path) -> None:
    novel = write_file(tmp_path / "novel.txt", NOVEL.encode())
    options = BuildOptions(None, 0.1, kind="bytes", reading=Reading(split_documents=500))
    manifest = build_data([novel], tmp_path / "data", options)
    assert manifest["split"] == {"rule": BY_HASH, "fraction": 0.1}
    assert manifest["reading"]["split_documents"] == 500
    train, val = pieces_of(tmp_path / "data")
    pieces = cut_text(NOVEL, 500)
    is_val = [by_hash(0.1).split_of(document_hash(piece), "train") == "val" for piece in pieces]
    assert val == [piece for piece, held_out in zip(pieces, is_val, strict=True) if held_out]
    assert train == [piece for piece, held_out in zip(pieces, is_val, strict=True) if not held_out]


def test_the_manifest_and_the_source_give_the_rule_again(tmp_path: Path) -> None:
    novel = write_file(tmp_path / "novel.txt", NOVEL.encode())
    manifest = build_data([novel], tmp_path / "data", BYTES)
    reading = Reading(**manifest["reading"])
    labelled = list(labelled_documents(manifest["inputs"], stated_hold_out(manifest), reading))
    for split, texts in zip(("train", "val"), pieces_of(tmp_path / "data"), strict=True):
        assert [document.text for side, _, document in labelled if side == split] == texts


@pytest.mark.parametrize("text", ["", "word", NOVEL, "x" * 5000, "a b\n" * 999, "\r\n\n\n " * 400])
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_pieces_are_the_text_and_none_is_longer(text: str, size: int) -> None:
    pieces = cut_text(text, size)
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= size
    assert "" not in pieces or text == ""
    assert cut_text(text, 0) == [text]


def test_a_text_is_cut_between_paragraphs_lines_or_words() -> None:
    text = ("one two three\n" * 5 + "\n") * 20
    assert all(piece.endswith("\n\n") for piece in cut_text(text, 200))
    assert all(piece.endswith("\n") for piece in cut_text("one two three\n" * 50, 200))
    assert all(piece.endswith((" ", "o")) for piece in cut_text("one two " * 50 + "o", 200))
    # No tiny rest: the pieces are of about equal length.
    assert [len(piece) for piece in cut_text("x" * 1001, 1000)] == [501, 500]


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(DataError, match="split_documents is -1, expected characters, or 0"):
        Reading(split_documents=-1)


def test_cut_documents_keep_their_source_and_repair(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.txt", b"\xef\xbb\xbf" + b"word " * 100)
    documents = list(read_documents([path], Reading(split_documents=100)))
    assert {(d.source, d.is_repaired) for d in documents} == {("a.txt", True)}
    assert hold_out.PIECE_CHARACTERS[0] > 100 and len(documents) > 4
