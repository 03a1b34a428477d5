"""Loading a data folder: everything must agree with the manifest."""

import dataclasses
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from small_data import (
    edit_manifest,
    published_model,
    read_published,
    rewrite_sidecar,
    rewrite_split,
    write_file,
    write_jsonl,
)
from underpar.data.build import BuildOptions, build_data
from underpar.data.folder import DataFolder, load_data
from underpar.data.shards import CHANGED, Columns
from underpar.data.sources.corpus import document_hash
from underpar.data.tokens.train_bpe import train_tokenizer
from underpar.errors import DataError

VOCAB_SIZE = 300
# Held-out texts of the lossy folder and whether nmt_nfkc changes them.
LOSSY_TEXTS = {
    "Plain words, nothing else.": False,
    "Two  spaces and a half \u00bd cup.": True,
    " Space at both edges. ": True,
    "A bird\u2019s wing and caf\u00e9 \u4e2d\u6587.": False,
    "line\nbreak": True,
    "Again plain words.": False,
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folder")
    texts = [f"entry {i} of a short list of words" for i in range(600)]
    docs = write_jsonl(root / "docs.jsonl", texts)
    build_data([docs], root / "data", BuildOptions(VOCAB_SIZE, 0.1))
    return root / "data"


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "data"))


@pytest.fixture(scope="module")
def built_lossy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lossy")
    train = write_jsonl(root / "train.jsonl", ["one document of plain text", "a \u00bd"])
    val = write_jsonl(root / "val.jsonl", list(LOSSY_TEXTS))
    model = write_file(root / "m.model", published_model())
    build_data([train], root / "data", BuildOptions(None, [val], tokenizer=model))
    return root / "data"


@pytest.fixture
def lossy(built_lossy: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built_lossy, tmp_path / "data"))


def refusal(folder: Path, verify: bool = True) -> str:
    with pytest.raises(DataError) as caught:
        load_data(folder, verify=verify)
    assert "\n" not in str(caught.value)
    message, _, remedy = str(caught.value).rpartition("; ")
    if not folder.exists():
        assert remedy == f"run 'underpar data build TEXT --out {folder}'"
    elif (folder / "manifest.json").exists():
        assert remedy == f"run 'underpar data build TEXT --out {folder} --overwrite'"
    else:
        assert remedy == f"if it holds texts, run 'underpar data build {folder} --out DATA'"
    return message


def add_bytes(num_bytes: int, document: int = 3) -> Callable[[Columns], Columns]:
    def change(columns: Columns) -> Columns:
        doc_bytes = columns.doc_bytes.copy()
        doc_bytes[document] += num_bytes
        return dataclasses.replace(columns, doc_bytes=doc_bytes)

    return change


def test_a_folder_loads_with_and_without_full_verification(folder: Path) -> None:
    full, quick = load_data(folder), load_data(folder, verify=False)
    assert full.train.num_documents + full.val.num_documents == 600
    assert np.array_equal(full.train.tokens, quick.train.tokens)
    assert (
        full.tokenizer.identity
        == hashlib.sha256((folder / "tokenizer.model").read_bytes()).hexdigest()
    )


@pytest.mark.parametrize("name", ["manifest.json", "tokenizer.model", "train.shard", "val.shard"])
def test_a_missing_file_is_refused(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert str(folder / name) in refusal(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "manifest.json: invalid JSON"),
        ("[" * 100_000, "manifest.json: invalid JSON"),
        ("[]", "format is [], expected 2"),
        ("{}", "format is None, expected 2"),
        ('{"format": 1}', "format is 1, expected 2"),
        ('{"format": 2}', "tokenizer.model: no text transform 'None'"),
        ('{"format": 2, "tokenizer": 5}', "tokenizer.model: no text transform 'None'"),
        ('{"format": 2, "tokenizer": {"transform": "caseops"}}', "tokenizer.model: transform"),
        (
            '{"format": 2, "tokenizer": {"transform": "identity"}}',
            "says tokenizer.identity = None",
        ),
    ],
)
def test_a_bad_manifest_is_refused(folder: Path, text: str, message: str) -> None:
    (folder / "manifest.json").write_text(text)
    assert message in refusal(folder)


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("field", ["documents", "tokens", "bytes", "sha256"])
def test_a_manifest_that_disagrees_is_refused(folder: Path, split: str, field: str) -> None:
    edit_manifest(folder, lambda manifest: manifest[split].update({field: 7}))
    message = refusal(folder)
    assert message.startswith(f"{folder}/{split}.shard: ")
    assert message.endswith(f"says {split}.{field} = 7")


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("lossless", "losslessness is True, manifest.json says tokenizer.lossless = None"),
        ("identity", "manifest.json says tokenizer.identity = None"),
    ],
)
def test_what_the_manifest_leaves_out_is_not_believed(folder: Path, key: str, message: str) -> None:
    edit_manifest(folder, lambda manifest: manifest["tokenizer"].pop(key))
    assert message in refusal(folder)


def test_another_tokenizer_is_refused(folder: Path) -> None:
    proto = train_tokenizer(["other words in another text " * 20], VOCAB_SIZE)
    (folder / "tokenizer.model").write_bytes(proto)
    with pytest.raises(
        DataError, match=r"tokenizer\.model: SHA-256 is .* says tokenizer\.identity"
    ):
        load_data(folder)


def test_a_damaged_tokenizer_is_refused_by_name(folder: Path) -> None:
    (folder / "tokenizer.model").write_bytes(b"not a model")
    assert f"{folder}/tokenizer.model: not a usable SentencePiece model" in refusal(folder)


def test_a_giant_manifest_is_refused(folder: Path) -> None:
    with (folder / "manifest.json").open("wb") as file:
        file.truncate((1 << 26) + 1)
    assert "not a manifest" in refusal(folder)


@pytest.mark.parametrize("split", ["train", "val"])
def test_byte_counts_that_the_tokens_do_not_have_are_refused(folder: Path, split: str) -> None:
    rewrite_split(folder, split, lambda columns: columns)
    load_data(folder)
    rewrite_split(folder, split, add_bytes(1))
    assert refusal(folder) == (
        f"{folder}/{split}.shard: 1 documents have another length than their tokens, "
        "manifest.json says 0; document 3 is the first"
    )
    # A manifest that allows for it must still show where the bytes come from.
    edit_manifest(folder, lambda manifest: manifest["val"].update(off_table=1))
    if split == "val":
        assert "ledger is sidecar, manifest.json says val.ledger = 'table'" in refusal(folder)
        edit_manifest(folder, lambda manifest: manifest["val"].update(ledger="sidecar"))
        assert f"{folder}/val_bytes.bin: cannot be read" in refusal(folder)


@pytest.mark.parametrize("verify", [True, False])
def test_a_document_on_both_sides_is_refused(folder: Path, verify: bool) -> None:
    val = load_data(folder).val

    def swap_first(columns: Columns) -> Columns:
        first, document = int(columns.counts[0]), np.array(val.doc(0))
        return dataclasses.replace(
            columns,
            tokens=np.append(document, columns.tokens[first:]),
            counts=np.append(len(document), columns.counts[1:]),
            doc_bytes=np.append(val.doc_bytes[0], columns.doc_bytes[1:]),
            doc_hashes=np.concatenate([val.doc_hashes[:1], columns.doc_hashes[1:]]),
        )

    rewrite_split(folder, "train", swap_first)
    digest = val.doc_hashes[0].tobytes().hex()[:16]
    assert refusal(folder, verify) == (
        f"{folder}: 1 training documents are also in validation (first SHA-256 {digest}), "
        "manifest.json says 0"
    )
    assert load_data(folder, verify, refuse_shared=False).val.num_documents == val.num_documents


def test_copies_that_the_manifest_counts_must_be_there(folder: Path) -> None:
    edit_manifest(folder, lambda manifest: manifest.update(shared_documents=1))
    assert "0 training documents are also in validation" in refusal(folder)


def stream_bytes(data: DataFolder, sidecar: list[int]) -> list[int]:
    starts = data.val.starts.tolist()
    ends = [*starts[1:], data.val.num_tokens]
    return [sum(sidecar[a:b]) for a, b in zip(starts, ends, strict=True)]


def test_a_lossy_tokenizer_gets_a_sidecar_and_its_changes_are_stamped(lossy: Path) -> None:
    data = load_data(lossy)
    assert data.manifest["val"]["ledger"] == "sidecar"
    assert data.manifest["tokenizer"]["lossless"] is False
    changed = []
    for index, text in enumerate(LOSSY_TEXTS):
        assert data.val.doc_hashes[index].tobytes() == document_hash(text)
        assert data.val.doc_bytes[index] == len(text.encode())
        changed.append(data.tokenizer.decode(data.val.doc(index)) != text.encode())
    assert changed == list(LOSSY_TEXTS.values())
    assert ((data.val.flags & CHANGED) != 0).tolist() == changed
    assert data.manifest["val"]["changed"] == 3
    sums = stream_bytes(data, read_published(lossy / "val_bytes.bin"))
    # The third text loses a space at each edge; nothing else is lost.
    expected = [len(text.encode()) - 2 * (index == 2) for index, text in enumerate(LOSSY_TEXTS)]
    assert sums == expected


def test_a_changed_byte_in_the_sidecar_is_refused(lossy: Path) -> None:
    path = lossy / "val_bytes.bin"
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    assert f"{path}: SHA-256 is " in refusal(lossy)
    assert load_data(lossy, verify=False).val.num_documents == len(LOSSY_TEXTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entries: entries[:-1], r"\d+ entries for \d+ tokens"),
        (lambda entries: [*entries, 0], r"\d+ entries for \d+ tokens"),
        (lambda entries: [0, entries[1] + 1, *entries[2:]], "document 0 do not add up to its 26"),
        (lambda entries: [0, entries[1] - 1, *entries[2:]], "document 0 do not add up to its 26"),
        (lambda entries: [*entries[:-1], entries[-1] - 1], "document 5 do not add up to its 18"),
    ],
    ids=["short", "long", "first up", "first down", "last down"],
)
def test_a_sidecar_that_does_not_add_up_is_refused(
    lossy: Path, change: Callable[[list[int]], list[int]], message: str
) -> None:
    source_bytes = read_published(lossy / "val_bytes.bin")
    rewrite_sidecar(lossy, source_bytes)
    load_data(lossy)
    rewrite_sidecar(lossy, change(source_bytes))
    with pytest.raises(DataError, match=rf"val_bytes\.bin: .*{message}"):
        load_data(lossy)


def test_not_even_a_changed_document_may_have_more_bytes_than_its_text(lossy: Path) -> None:
    start = int(load_data(lossy).val.starts[2])
    source_bytes = read_published(lossy / "val_bytes.bin")
    # Two bytes at the edges belong to no token, so two may be added unseen, but not three.
    source_bytes[start + 1] += 2
    rewrite_sidecar(lossy, source_bytes)
    load_data(lossy)
    source_bytes[start + 1] += 1
    rewrite_sidecar(lossy, source_bytes)
    assert "val_bytes.bin: the entries of document 2 do not add up to its 22" in refusal(lossy)


def test_a_sidecar_that_is_missing_or_none_is_refused(lossy: Path) -> None:
    path = lossy / "val_bytes.bin"
    path.write_bytes(b"\0" * 2000)
    digest = hashlib.sha256(b"\0" * 2000).hexdigest()
    edit_manifest(lossy, lambda manifest: manifest["val"].update(sidecar_sha256=digest))
    assert f"{path}: not a published token file" in refusal(lossy)
    path.unlink()
    assert f"{path}: cannot be read: No such file" in refusal(lossy)


def test_a_lossy_folder_must_say_so(lossy: Path) -> None:
    edit_manifest(lossy, lambda manifest: manifest["tokenizer"].update(lossless=True))
    assert "losslessness is False" in refusal(lossy)
