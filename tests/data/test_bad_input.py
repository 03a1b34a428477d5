"""Odd and bad input through a whole build: nothing is lost, changed or dropped without a word."""

import gzip
import hashlib
from pathlib import Path

import numpy as np
import pytest

from small_data import contents, decoded, prose, read_published, write_file, write_jsonl
from underpar.data.build import BuildOptions, build_data
from underpar.data.folder import load_data
from underpar.data.shards import REPAIRED
from underpar.data.sources.corpus import Reading, document_hash
from underpar.data.tokens.train_bpe import train_tokenizer
from underpar.data.transforms import TRANSFORMS
from underpar.errors import DataError

BYTES = BuildOptions(None, 0.2, kind="bytes")
REPAIR = Reading(bad_input="repair")
# Every operator, its neighbors, escapes before letters and spaces, marks of the tokenizer, NUL.
PRIVATE_USE = "".join(f" {chr(c)}The {chr(c)} A{chr(c)} {chr(c)}" for c in range(0xE000, 0xE008))
ODD_TEXTS = (
    "odd \u2581\x00 text  \n",
    "NUL \x00\x00 and \x01 controls \x7f\r\n",
    PRIVATE_USE,
    "\ue004\ue001\ue002 ESCAPE\ue004",
    "\ue003X \ue005y\ue006 \uf8ff\U000f0000",
    "caf\u00e9 \U0001f600 \u4e2d\u6587 \u0130 \ufb01 \u00bd a\u0301",
)


def refusal(inputs: list[Path], out: Path, options: BuildOptions) -> str:
    with pytest.raises(DataError) as caught:
        build_data(inputs, out, options)
    assert "\n" not in str(caught.value)
    assert not (out / "manifest.json").exists()
    return str(caught.value)


@pytest.mark.parametrize("transform", ["identity", *TRANSFORMS])
def test_odd_characters_come_back_under_every_transform(tmp_path: Path, transform: str) -> None:
    train_texts = [*prose(10), *ODD_TEXTS]
    val_texts = [text + "." for text in ODD_TEXTS]
    train = write_jsonl(tmp_path / "train.jsonl", train_texts)
    val = write_jsonl(tmp_path / "val.jsonl", val_texts)
    model = write_file(tmp_path / "m.model", train_tokenizer(prose(40), 400, transform))
    options = BuildOptions(None, [val], tokenizer=model, transform=transform)
    manifest = build_data([train], tmp_path / "out", options)
    data = load_data(tmp_path / "out")
    assert manifest["tokenizer"]["transform"] == transform == data.tokenizer.transform_name
    assert manifest["tokenizer"]["lossless"] is True
    for shard, texts in ((data.train, train_texts), (data.val, val_texts)):
        assert decoded(data, shard) == [text.encode() for text in texts]
        assert [row.tobytes() for row in shard.doc_hashes] == list(map(document_hash, texts))
        assert shard.doc_bytes.tolist() == [len(text.encode()) for text in texts]
        assert not shard.flags.any()


@pytest.mark.parametrize("transform", ["identity", *TRANSFORMS])
@pytest.mark.parametrize("has_operator", [False, True])
def test_only_an_escaped_operator_needs_a_sidecar(
    tmp_path: Path, transform: str, has_operator: bool
) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", [*prose(10), "In training \ue001 it is free."])
    val_texts = ["Held-out Text of NASA.", "One \ue001 Operator" if has_operator else "None"]
    val = write_jsonl(tmp_path / "val.jsonl", val_texts)
    options = BuildOptions(350, [val], transform=transform)
    manifest = build_data([train], tmp_path / "out", options)
    needs = has_operator and transform != "identity"
    assert manifest["val"]["ledger"] == ("sidecar" if needs else "table")
    assert manifest["val"]["off_table"] == needs
    assert manifest["train"]["off_table"] == (transform != "identity")
    assert ("val_bytes.bin" in contents(tmp_path / "out")) == needs
    data = load_data(tmp_path / "out")
    source_bytes = data.tokenizer.token_bytes[data.val.tokens]
    if needs:
        source_bytes = np.array(read_published(tmp_path / "out" / "val_bytes.bin"))
    sums = np.add.reduceat(source_bytes, data.val.starts)
    assert sums.tolist() == [len(text.encode()) for text in val_texts]


def test_a_sidecar_of_an_older_build_does_not_stay(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", prose(10))
    for number, text in enumerate(("One \ue001 operator", "None")):
        val = write_jsonl(tmp_path / "val.jsonl", [text])
        options = BuildOptions(320, [val], transform="caseops")
        build_data([train], tmp_path / "out", options, overwrite=True)
        assert (tmp_path / "out" / "val_bytes.bin").exists() == (number == 0)


def bad_files(root: Path) -> list[Path]:
    """Three documents to repair, a good one, two empty ones and blank lines."""
    lines = [b'{"text": "\xff one"}', b"", b'{"text": "\\ud800 two"}', b'{"text": ""}', b"  "]
    return [
        write_file(root / "a.jsonl", b"\n".join(lines)),
        write_file(root / "b.txt", b"three \xe2\x82"),
        write_file(root / "c.txt", b""),
        write_file(root / "d.jsonl.gz", gzip.compress(b'{"text": "four \\u0000"}')),
    ]


def test_bad_input_is_refused_by_file_and_number(tmp_path: Path) -> None:
    messages = [
        "a.jsonl: line 1: invalid UTF-8 at byte 11",
        "b.txt: document 1: invalid UTF-8 at byte 7",
        "c.txt: document 1: empty document",
    ]
    for path, message in zip(bad_files(tmp_path), messages, strict=False):
        assert message in refusal([path], tmp_path / "out", BYTES)
    surrogate = write_file(tmp_path / "s.jsonl", b'{"text": "ok"}\n{"text": "a\\udfff"}')
    assert "s.jsonl: line 2: lone surrogate at character 2" in refusal(
        [surrogate], tmp_path / "out", BYTES
    )


def test_repairs_are_counted_flagged_and_never_silent(tmp_path: Path) -> None:
    val = write_file(tmp_path / "val.jsonl", b'{"text": "val \xfe\xfe"}\n{"text": ""}\n')
    options = BuildOptions(None, [val], kind="bytes", reading=REPAIR)
    manifest = build_data(bad_files(tmp_path), tmp_path / "out", options)
    data = load_data(tmp_path / "out")
    texts = ["\ufffd one", "\ufffd two", "three \ufffd", "four \x00"]
    assert decoded(data, data.train) == [text.encode() for text in texts]
    assert [row.tobytes() for row in data.train.doc_hashes] == list(map(document_hash, texts))
    assert data.train.flags.tolist() == [REPAIRED, REPAIRED, REPAIRED, 0]
    assert data.val.flags.tolist() == [REPAIRED]
    assert manifest["tally"] == {
        "documents": 8,
        "left_out_empty": 3,
        "repaired": 4,
        "replaced_characters": 5,
    }
    kept = manifest["train"]["documents"] + manifest["val"]["documents"]
    assert manifest["tally"]["documents"] == kept + manifest["tally"]["left_out_empty"]
    assert (manifest["train"]["repaired"], manifest["val"]["repaired"]) == (3, 1)
    assert manifest["reading"]["bad_input"] == "repair"


@pytest.mark.parametrize("num_bytes", [1_500_000, pytest.param(50_000_000, marks=pytest.mark.slow)])
def test_one_large_document_comes_back(tmp_path: Path, num_bytes: int) -> None:
    passage = "\n".join(prose(40)) + " \u4e2d\u6587 \U0001f600 \x00"
    text = (passage * (num_bytes // len(passage.encode()) + 1)).encode()
    large = write_file(tmp_path / "large.txt", text)
    val = write_file(tmp_path / "val.txt", b"A short one.")
    for name, options in {
        "bpe": BuildOptions(400, [val], transform="caseops_before"),
        "bytes": BuildOptions(None, [val], kind="bytes"),
    }.items():
        build_data([large], tmp_path / name, options)
        data = load_data(tmp_path / name)
        assert decoded(data, data.train) == [text]
        assert data.train.doc_bytes.tolist() == [len(text)]
        assert data.train.doc_hashes[0].tobytes() == hashlib.sha256(text).digest()


def test_a_tokenizer_may_learn_an_operator_as_a_character(tmp_path: Path) -> None:
    texts = [f"icon \ue001 number {i}" for i in range(50)]
    docs = write_jsonl(tmp_path / "docs.jsonl", texts)
    build_data([docs], tmp_path / "out", BuildOptions(285, 0.2))
    data = load_data(tmp_path / "out")
    assert sorted(decoded(data, data.train) + decoded(data, data.val)) == sorted(
        text.encode() for text in texts
    )
