"""Data folders in parts: merged they are what one build makes, and parts that disagree are not."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from underpar.data import hold_out, merge
from underpar.data.build import BuildOptions, build_data
from underpar.data.folder import load_data
from underpar.data.merge import merge_folders, write_part
from underpar.data.sources.corpus import REPAIR, Reading, demo_corpus, is_held_out, read_documents
from underpar.data.sources.corpus import document_hash as sha256
from underpar.data.tokens import byte260
from underpar.data.tokens.train_bpe import train_tokenizer
from underpar.data.value_files import open_values
from underpar.errors import DataError

HOLDOUT = 0.2


def find_text(pattern: str, held_out: bool) -> str:
    """The first text of a pattern that falls on that side of the split."""
    texts = (pattern.format(number) for number in range(1000))
    return next(text for text in texts if is_held_out(sha256(text), HOLDOUT) is held_out)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files and their parts (one with an escape in validation, one without, one without
    validation), the tokenizer, and the build of all three files."""
    folder = tmp_path_factory.mktemp("merge")
    documents = read_documents([demo_corpus()])
    texts = [next(documents).text[:1500] for _ in range(36)]
    (folder / "caseops.model").write_bytes(train_tokenizer(texts, 400, "caseops"))
    escaped = [find_text("Stray \ue001 operator {}", held_out) for held_out in (True, False)]
    plain = find_text("A plain text of NO length {}", True)
    rows = {"a": texts[:14] + escaped, "b": [*texts[14:30], plain], "c": texts[30:]}
    rows["c"] = [text for text in rows["c"] if not is_held_out(sha256(text), HOLDOUT)]
    for name, part in rows.items():
        write_lines(folder / f"{name}.jsonl", part)
        write_part(pairs(folder / f"{name}.jsonl"), folder / name, options(folder))
    build_data([folder / f"{name}.jsonl" for name in rows], folder / "whole", options(folder))
    return folder


def options(root: Path) -> BuildOptions:
    return BuildOptions(None, HOLDOUT, tokenizer=root / "caseops.model", transform="caseops")


def write_lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def pairs(path: Path) -> list[tuple[str, str]]:
    return [(str(path), document.text) for document in read_documents([path])]


def files(folder: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in folder.iterdir() if f.name != "manifest.json"}


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("batch_tokens", [1, 3000, 1 << 20])
def test_parts_merge_into_what_one_build_makes(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_tokens: int
) -> None:
    monkeypatch.setattr(merge, "BATCH_TOKENS", batch_tokens)
    manifest = merge_folders([root / name for name in "abc"], tmp_path)
    whole = load_data(root / "whole").manifest
    assert files(tmp_path) == files(root / "whole")
    assert load_data(tmp_path).manifest == manifest
    for key in ("format", "split", "tally", "tokenizer", "train", "val", "shared_documents"):
        assert manifest[key] == whole[key]
    assert [(row["path"], row["documents"]) for row in manifest["inputs"]] == [
        (row["path"], row["documents"]) for row in whole["inputs"]
    ]


def test_a_sidecar_joins_escaped_and_plain_parts(root: Path, tmp_path: Path) -> None:
    ledgers = [load_data(root / name).manifest["val"]["ledger"] for name in "abc"]
    assert ledgers == ["sidecar", "table", "table"]
    assert merge_folders([root / name for name in "cba"], tmp_path)["val"]["ledger"] == "sidecar"
    data = load_data(tmp_path)
    source_bytes = open_values(tmp_path / "val_bytes.bin")
    sums = np.add.reduceat(source_bytes, data.val.starts, dtype=np.int64)
    assert sums.tolist() == data.val.doc_bytes.tolist()
    # The literal operator weighs its three bytes; a table has none for it.
    by_table = data.tokenizer.token_bytes[data.val.tokens]
    assert int((source_bytes - by_table).sum()) == 3


def test_without_an_escape_there_is_no_sidecar(root: Path, tmp_path: Path) -> None:
    merge_folders([root / "a"], tmp_path)
    assert (tmp_path / "val_bytes.bin").exists()
    merged = merge_folders([root / "b", root / "c"], tmp_path, overwrite=True)
    assert merged["val"]["ledger"] == "table"
    assert not (tmp_path / "val_bytes.bin").exists()


def test_inputs_still_point_at_their_documents(root: Path, tmp_path: Path) -> None:
    manifest = merge_folders([root / name for name in "cba"], tmp_path)
    data = load_data(tmp_path)
    assert [Path(row["path"]).name for row in manifest["inputs"]] == [f"{n}.jsonl" for n in "cba"]
    for row in manifest["inputs"]:
        for split, shard in (("train", data.train), ("val", data.val)):
            hashes = [sha256(text) for _, text in pairs(Path(row["path"]))]
            wanted = [h for h in hashes if is_held_out(h, HOLDOUT) is (split == "val")]
            first, end = row["documents"].get(split, (0, 0))
            assert [h.tobytes() for h in shard.doc_hashes[first:end]] == wanted


def test_what_all_folders_say_about_reading_is_kept(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By hash, as the parts: of so few documents the ends are held out.
    monkeypatch.setattr(hold_out, "FEWEST_DOCUMENTS", 2)
    for name in "ab":
        build_data([root / f"{name}.jsonl"], tmp_path / name, options(root))
    merged = merge_folders([tmp_path / "a", tmp_path / "b"], tmp_path / "both")
    assert merged["reading"] == {"field": "text", "bad_input": "refuse"}
    assert all(len(row["sha256"]) == 64 for row in merged["inputs"])
    # A part may have left texts out, so its sources cannot be counted again.
    assert "reading" not in merge_folders([tmp_path / "a", root / "b"], tmp_path / "mixed")
    dropped = {"similarity": 0.7, "train": ["00" * 32], "val": []}
    edit_manifest(tmp_path / "a", lambda manifest: manifest.update(dropped=dropped))
    assert "reading" not in merge_folders([tmp_path / "a", tmp_path / "b"], tmp_path / "dropped")
    edit_manifest(tmp_path / "a", lambda manifest: manifest.pop("tally"))
    assert "tally" not in merge_folders([tmp_path / "a", tmp_path / "b"], tmp_path / "neither")


def test_a_part_may_lack_a_split_or_all_documents(root: Path, tmp_path: Path) -> None:
    held_out = find_text("only {}", True)
    write_part([("one", held_out)], tmp_path / "val", options(root))
    write_part([], tmp_path / "none", options(root))
    sizes = [
        (data.train.num_documents, data.val.num_documents)
        for data in (load_data(folder) for folder in (root / "c", tmp_path / "val"))
    ]
    assert sizes == [(len(pairs(root / "c.jsonl")), 0), (0, 1)]
    assert load_data(tmp_path / "none").train.num_tokens == 0
    folders = [tmp_path / "none", root / "c", tmp_path / "val"]
    merged = merge_folders(folders, tmp_path / "out")
    assert (merged["train"]["documents"], merged["val"]["documents"]) == (sizes[0][0], 1)
    with pytest.raises(DataError, match="none of 2 folders has a val document"):
        merge_folders(folders[:2], tmp_path / "other")
    with pytest.raises(DataError, match="none of 2 folders has a train document"):
        merge_folders([folders[0], folders[2]], tmp_path / "other")


Texts = st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=6), max_size=5)


@settings(deadline=None, max_examples=20)
@given(st.lists(Texts, min_size=1, max_size=4))
def test_any_parts_hold_the_documents_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[str]]
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    (folder / "bytes.json").write_bytes(byte260.CONTENT)
    by_bytes = BuildOptions(None, 0.5, tokenizer=folder / "bytes.json")
    for number, texts in enumerate(parts):
        write_part([(str(number), text) for text in texts], folder / str(number), by_bytes)
    hashes = [sha256(text) for texts in parts for text in texts]
    sides = [is_held_out(digest, 0.5) for digest in hashes]
    folders = [folder / str(number) for number in range(len(parts))]
    if len(set(sides)) < 2:
        with pytest.raises(DataError, match="none of"):
            merge_folders(folders, folder / "out")
        return
    merged = merge_folders(folders, folder / "out")
    data = load_data(folder / "out")
    digests = [h.tobytes() for shard in (data.train, data.val) for h in shard.doc_hashes]
    assert digests == sorted(hashes, key=lambda digest: is_held_out(digest, 0.5))
    num_bytes = sum(len(text.encode()) for texts in parts for text in texts)
    assert merged["train"]["bytes"] + merged["val"]["bytes"] == num_bytes
    assert merged["tally"]["documents"] == len(hashes)


def test_different_tokenizers_are_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "bytes.json").write_bytes(byte260.CONTENT)
    by_bytes = BuildOptions(None, HOLDOUT, tokenizer=tmp_path / "bytes.json")
    write_part(pairs(root / "b.jsonl"), tmp_path / "b", by_bytes)
    with pytest.raises(DataError, match=r"b: tokenizer is .*; merge folders with one tokenizer"):
        merge_folders([root / "a", tmp_path / "b"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_one_model_with_two_transforms_is_refused(root: Path, tmp_path: Path) -> None:
    other = replace(options(root), transform="caseops_before")
    write_part(pairs(root / "b.jsonl"), tmp_path / "b", other)
    with pytest.raises(DataError, match="one tokenizer and transform"):
        merge_folders([root / "a", tmp_path / "b"], tmp_path / "out")


def test_different_split_rules_are_refused(root: Path, tmp_path: Path) -> None:
    write_part(pairs(root / "b.jsonl"), tmp_path / "b", replace(options(root), holdout=0.3))
    by_file = replace(options(root), holdout=[root / "a.jsonl"])
    build_data([root / "c.jsonl"], tmp_path / "c", by_file)
    for name in "bc":
        with pytest.raises(DataError, match=f"{name}: split is .*; merge folders with one split"):
            merge_folders([root / "a", tmp_path / name], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("order", ["12", "21"])
def test_a_document_on_both_sides_is_refused(root: Path, tmp_path: Path, order: str) -> None:
    for name, train, val in (("1", ["one", "both"], ["x"]), ("2", ["two"], ["y", "both"])):
        held_out = write_lines(tmp_path / f"val{name}.jsonl", val)
        by_file = replace(options(root), holdout=[held_out])
        build_data([write_lines(tmp_path / f"{name}.jsonl", train)], tmp_path / name, by_file)
    with pytest.raises(DataError, match="1: 1 training documents are also held out"):
        merge_folders([tmp_path / name for name in order], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_input_in_two_folders_is_refused(root: Path, tmp_path: Path) -> None:
    write_part([*pairs(root / "a.jsonl"), ("new", "text")], tmp_path / "more", options(root))
    with pytest.raises(DataError, match=r"more and .*a share an input"):
        merge_folders([root / "a", root / "b", tmp_path / "more"], tmp_path / "out")


def test_folders_are_named_once_and_not_written_to(root: Path, tmp_path: Path) -> None:
    before = files(root / "a")
    with pytest.raises(DataError, match="a is named twice"):
        merge_folders([root / "a", root / "b", root / "b" / ".." / "a"], tmp_path / "out")
    with pytest.raises(DataError, match="a is an input and the output"):
        merge_folders([root / "a", root / "b"], root / "a")
    with pytest.raises(DataError, match="no data folders to merge"):
        merge_folders([], tmp_path / "out")
    assert files(root / "a") == before and load_data(root / "a")


def test_a_damaged_folder_leaves_an_old_merge_alone(root: Path, tmp_path: Path) -> None:
    old = merge_folders([root / "a", root / "c"], tmp_path / "out")
    shutil.copytree(root / "b", tmp_path / "b")
    shard = tmp_path / "b" / "train.shard"
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(DataError, match=r"train\.shard: checksum does not match"):
        merge_folders([root / "a", tmp_path / "b"], tmp_path / "out", overwrite=True)
    assert load_data(tmp_path / "out").manifest == old


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("inputs", 7, "a: inputs are not those of a data folder"),
        ("inputs", ["a.jsonl"], "a: inputs are not those of a data folder"),
        ("inputs", [{"path": "a", "documents": {"test": [0, 1]}}], "a: inputs are not those"),
        ("inputs", [{"path": "a", "documents": {"val": [0]}}], "a: inputs are not those"),
        ("inputs", [{"path": ["a"], "documents": {}}], "a: inputs are not those"),
        ("inputs", [{"documents": {}}], "a: inputs are not those of a data folder: 'path'"),
        ("tally", {"pages": 1}, "a: tally does not count documents"),
        ("tally", {"documents": "1"}, "a: tally does not count documents"),
        ("tally", None, "a: tally does not count documents"),
    ],
)
def test_a_manifest_that_is_none_is_refused(
    root: Path, tmp_path: Path, key: str, value: object, message: str
) -> None:
    shutil.copytree(root / "a", tmp_path / "a")
    edit_manifest(tmp_path / "a", lambda manifest: manifest.update({key: value}))
    with pytest.raises(DataError, match=message) as caught:
        merge_folders([tmp_path / "a", root / "b"], tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_texts_of_a_source_come_in_one_run(root: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="one: its texts are not consecutive"):
        write_part([("one", "a"), ("two", "b"), ("one", "c")], tmp_path / "out", options(root))
    assert list(tmp_path.iterdir()) == []


def test_a_part_needs_a_tokenizer_and_a_fraction(root: Path, tmp_path: Path) -> None:
    for wrong in ({"tokenizer": None}, {"holdout": [root / "a.jsonl"]}):
        with pytest.raises(DataError, match="a tokenizer file and a fraction"):
            write_part([("one", "a")], tmp_path / "out", replace(options(root), **wrong))
    assert not (tmp_path / "out").exists()


def test_bad_texts_of_a_part_are_refused_or_repaired(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "BATCH_TEXTS", 2)
    monkeypatch.setattr(merge, "BATCH_TOKENS", 1)
    texts = ["fine", "also fine", "lone \ud800", ""]
    whole = write_lines(tmp_path / "whole.jsonl", [*texts, find_text("held out {}", True)])
    stream = [("one", json.loads(line)["text"]) for line in whole.read_text().splitlines()]
    with pytest.raises(DataError, match="one: line 3: lone surrogate at character 6"):
        write_part(stream, tmp_path / "part", options(root))
    repair = replace(options(root), reading=Reading("text", REPAIR))
    part = write_part(stream, tmp_path / "part", repair)
    assert (part["tally"]["repaired"], part["tally"]["left_out_empty"]) == (1, 1)
    assert part["tally"] == build_data([whole], tmp_path / "whole", repair)["tally"]
    assert files(tmp_path / "part") == files(tmp_path / "whole")
    # Which documents were repaired is known after the merge too.
    merged = merge_folders([tmp_path / "part"], tmp_path / "merged")
    assert merged["train"]["repaired"] + merged["val"]["repaired"] == 1
    assert files(tmp_path / "merged") == files(tmp_path / "whole")
