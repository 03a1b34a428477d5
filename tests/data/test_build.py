"""Building a data folder: the split, the manifest, determinism, interruption, refusals."""

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from small_data import contents, decoded, held_out, prose, published_model, write_file, write_jsonl
from underpar import __version__
from underpar.data import build
from underpar.data.build import BuildOptions, build_data
from underpar.data.folder import load_data
from underpar.data.hold_out import (
    BY_FILE,
    BY_HASH,
    BY_PLACE,
    by_hash,
    labelled_documents,
    stated_hold_out,
)
from underpar.data.sources import corpus
from underpar.data.sources.corpus import (
    Reading,
    cut_text,
    document_hash,
    is_held_out,
    read_documents,
)
from underpar.data.tokens.train_bpe import train_tokenizer
from underpar.errors import DataError

HOLDOUT = 0.2
OPTIONS = BuildOptions(400, HOLDOUT, licence="CC0 1.0")
BYTES = BuildOptions(None, HOLDOUT, kind="bytes")


@pytest.fixture(scope="module")
def corpus_texts() -> list[str]:
    texts = list(prose(40))
    return [*texts, texts[0], texts[1], "odd \u2581\x00 text  \n"]


@pytest.fixture(scope="module")
def docs(corpus_texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("corpus") / "docs.jsonl", corpus_texts)


@pytest.fixture(scope="module")
def folder(docs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data") / "new" / "folder"
    build_data([docs], out, OPTIONS)
    return out


def refusal(inputs: list[Path], out: Path, options: BuildOptions) -> str:
    with pytest.raises(DataError) as caught:
        build_data(inputs, out, options)
    assert "\n" not in str(caught.value)
    assert not (out / "manifest.json").exists()
    return str(caught.value)


def test_every_document_is_on_its_side_and_decodes_to_its_text(docs: Path, folder: Path) -> None:
    data = load_data(folder)
    for shard, wanted in ((data.train, False), (data.val, True)):
        texts = [
            document.text
            for document in read_documents([docs])
            if is_held_out(document_hash(document.text), HOLDOUT) is wanted
        ]
        assert decoded(data, shard) == [text.encode() for text in texts]
        assert shard.doc_bytes.tolist() == [len(text.encode()) for text in texts]
        assert [row.tobytes() for row in shard.doc_hashes] == list(map(document_hash, texts))
        assert not shard.flags.any()


def test_the_manifest_says_what_is_there(docs: Path, folder: Path) -> None:
    data = load_data(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest == data.manifest
    num_train, num_val = data.train.num_documents, data.val.num_documents
    assert manifest["inputs"] == [
        {
            "path": str(docs),
            "split": "train",
            "bytes": docs.stat().st_size,
            "sha256": hashlib.sha256(docs.read_bytes()).hexdigest(),
            "licence": "CC0 1.0",
            "documents": {"train": [0, num_train], "val": [0, num_val]},
        }
    ]
    model = (folder / "tokenizer.model").read_bytes()
    assert manifest["tokenizer"] == {
        "kind": "sentencepiece",
        "identity": hashlib.sha256(model).hexdigest(),
        "vocab_size": 400,
        "transform": "identity",
        "lossless": True,
    }
    assert manifest["split"] == {"rule": BY_HASH, "fraction": HOLDOUT}
    assert manifest["tool"] == f"underpar {__version__}"
    assert manifest["reading"] == {"field": "text", "bad_input": "refuse"}
    assert manifest["shared_documents"] == 0
    assert manifest["tally"] == {
        "documents": num_train + num_val,
        "left_out_empty": 0,
        "repaired": 0,
        "replaced_characters": 0,
    }
    for split, shard in (("train", data.train), ("val", data.val)):
        stated = manifest[split]
        file = folder / f"{split}.shard"
        assert stated["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
        assert (stated["documents"], stated["tokens"]) == (shard.num_documents, shard.num_tokens)
        assert stated["bytes"] == shard.num_bytes
        text_tokens = shard.num_tokens - shard.num_documents
        assert stated["bytes_per_token"] == pytest.approx(shard.num_bytes / text_tokens, abs=1e-6)
        assert (stated["changed"], stated["repaired"], stated["off_table"]) == (0, 0, 0)
        names = hashlib.sha256(shard.doc_hashes.tobytes()).hexdigest()
        assert stated["documents_sha256"] == names
    assert manifest["val"]["ledger"] == "table"
    assert sorted(contents(folder)) == [
        "manifest.json",
        "tokenizer.model",
        "train.shard",
        "val.shard",
    ]


def test_ranges_partition_the_documents_and_point_to_the_texts(tmp_path: Path) -> None:
    groups = {
        "a.jsonl": [f"first file {i}" for i in range(30)],
        "b.txt": ["one document"],
        "c.jsonl": [f"third file {i}" for i in range(25)],
        "d.jsonl": [],
    }
    for name, texts in groups.items():
        write_jsonl(tmp_path / "in" / name, texts)
    (tmp_path / "in" / "b.txt").write_text("one document")
    manifest = build_data([tmp_path / "in"], tmp_path / "out", BYTES)
    data = load_data(tmp_path / "out")
    for split, shard in (("train", data.train), ("val", data.val)):
        texts, covered = decoded(data, shard), []
        for row in manifest["inputs"]:
            begin, end = row["documents"].get(split, (len(covered), len(covered)))
            covered += range(begin, end)
            members = groups[Path(row["path"]).name]
            keeps = {
                text.encode()
                for text in members
                if (text in held_out(members, HOLDOUT)) == (split == "val")
            }
            assert set(texts[begin:end]) == keeps
            assert end - begin == len(keeps)
        assert covered == list(range(shard.num_documents))
    assert manifest["inputs"][3]["documents"] == {}


def test_building_again_gives_the_same_bytes(docs: Path, folder: Path, tmp_path: Path) -> None:
    build_data([docs], tmp_path, OPTIONS)
    assert contents(tmp_path) == contents(folder)


@pytest.mark.parametrize("kind", ["bpe", "lossy"])
def test_two_workers_give_the_same_bytes_as_one(
    corpus_texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    halves = [f"{i} and a half: {i}\u00bd" for i in range(20)]
    docs = write_jsonl(tmp_path / "docs.jsonl", corpus_texts + halves)
    # Small batches in this process, where files are cut into jobs.
    monkeypatch.setattr(corpus, "BATCH_BYTES", 4000)
    options = OPTIONS
    if kind == "lossy":
        model = write_file(tmp_path / "m.model", published_model())
        options = replace(OPTIONS, vocab_size=None, tokenizer=model)
    for workers in (1, 2):
        build_data([docs], tmp_path / str(workers), replace(options, workers=workers))
    one, two = contents(tmp_path / "1"), contents(tmp_path / "2")
    assert one == two
    assert ("val_bytes.bin" in one) == (kind == "lossy")


def test_a_given_tokenizer_is_used_as_it_is(docs: Path, folder: Path, tmp_path: Path) -> None:
    options = replace(OPTIONS, vocab_size=None, tokenizer=folder / "tokenizer.model")
    build_data([docs], tmp_path, options)
    assert contents(tmp_path) == contents(folder)
    message = refusal([docs], tmp_path / "other", replace(options, vocab_size=512))
    assert "tokenizer has 400 pieces, vocab_size says 512" in message
    message = refusal([docs], tmp_path / "other", replace(options, tokenizer=tmp_path / "gone"))
    assert "gone: tokenizer cannot be read: No such file" in message


def test_the_tokenizer_never_sees_validation_text(tmp_path: Path) -> None:
    texts = [f"document {i} with some words" for i in range(200)]
    marker = " zzzyyyxxx" * 50
    # The marker goes into a text only where the changed text is held out as well.
    planted = [
        t + marker if t in held_out(texts, HOLDOUT) and held_out([t + marker], HOLDOUT) else t
        for t in texts
    ]
    outs = []
    for name, rows in (("a", texts), ("b", planted)):
        path = write_jsonl(tmp_path / f"{name}.jsonl", rows)
        build_data([path], tmp_path / name, replace(OPTIONS, vocab_size=300))
        outs.append(contents(tmp_path / name))
    assert outs[0]["tokenizer.model"] == outs[1]["tokenizer.model"]
    assert outs[0]["train.shard"] == outs[1]["train.shard"]
    assert outs[0]["val.shard"] != outs[1]["val.shard"]


@pytest.mark.parametrize("by_file", [False, True])
def test_the_sample_lacks_what_only_validation_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_file: bool
) -> None:
    texts = [f"document {i} of plain words" for i in range(100)]
    secret = next(t for i in range(100) if held_out([t := f"qqzzxxjj {i}"], HOLDOUT))
    seen: list[str] = []

    def spy(sample: list[str], *rest: Any) -> bytes:
        seen.extend(sample)
        return train_tokenizer(sample, *rest)

    monkeypatch.setattr(build, "train_tokenizer", spy)
    inputs = [write_jsonl(tmp_path / "train.jsonl", texts if by_file else [*texts, secret])]
    val = write_jsonl(tmp_path / "val.jsonl", [secret])
    options = BuildOptions(300, [val] if by_file else HOLDOUT)
    build_data(inputs, tmp_path / "out", options)
    data = load_data(tmp_path / "out")
    assert secret.encode() in decoded(data, data.val)
    assert sorted(seen) == sorted(t.decode() for t in decoded(data, data.train))
    assert not any("qqzzxxjj" in text for text in seen)


def test_batching_changes_nothing(
    docs: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "BATCH_BYTES", 5000)
    build_data([docs], tmp_path, OPTIONS)
    assert contents(tmp_path) == contents(folder)


def test_the_order_of_files_does_not_move_the_split(
    corpus_texts: list[str], tmp_path: Path
) -> None:
    parts = [write_jsonl(tmp_path / f"{i}.jsonl", corpus_texts[i::3]) for i in range(3)]
    sides, models = [], []
    for number, order in enumerate((parts, parts[::-1], [parts[1], parts[2], parts[0]])):
        build_data(order, tmp_path / str(number), OPTIONS)
        data = load_data(tmp_path / str(number))
        sides.append([sorted(decoded(data, shard)) for shard in (data.train, data.val)])
        models.append(data.tokenizer.identity)
    assert sides[0] == sides[1] == sides[2]
    assert sides[0][1] == sorted(t.encode() for t in held_out(corpus_texts, HOLDOUT))
    assert len(set(models)) == 1


def test_progress_counts_the_documents_of_both_passes(docs: Path, tmp_path: Path) -> None:
    calls: list[tuple[str, int]] = []
    build_data([docs], tmp_path, OPTIONS, progress=lambda *call: calls.append(call))
    assert ("tokenizer", 43) in calls and calls[-1] == ("encode", 43)


def test_an_interrupted_build_leaves_the_old_folder(docs: Path, tmp_path: Path) -> None:
    build_data([docs], tmp_path / "out", OPTIONS)
    before = contents(tmp_path / "out")

    def interrupt(stage: str, num_documents: int) -> None:
        if stage == "encode":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_data([docs], tmp_path / "out", replace(OPTIONS, vocab_size=380), interrupt, True)
    assert contents(tmp_path / "out") == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_bad_inputs_leave_an_old_folder_alone(docs: Path, folder: Path, tmp_path: Path) -> None:
    before = contents(folder)
    with pytest.raises(DataError, match="no such file"):
        build_data([tmp_path / "gone.jsonl"], folder, OPTIONS, overwrite=True)
    with pytest.raises(DataError, match="too small for vocab_size 60000"):
        build_data([docs], folder, replace(OPTIONS, vocab_size=60_000), overwrite=True)
    with pytest.raises(DataError, match=r"docs\.jsonl: named 2 times"):
        build_data([docs, docs], folder, OPTIONS, overwrite=True)
    assert contents(folder) == before


@pytest.mark.parametrize("holdout", [0, 1, -0.1, 1.5, float("nan")])
def test_a_fraction_out_of_range_is_refused(holdout: float) -> None:
    with pytest.raises(DataError, match=r"holdout is .*, expected a fraction between 0 and 1"):
        BuildOptions(400, holdout)


def test_options_that_cannot_be_are_refused() -> None:
    with pytest.raises(DataError, match="tokenizer kind is 'words', expected 'bpe' or 'bytes'"):
        BuildOptions(400, kind="words")
    with pytest.raises(DataError, match="workers is 0, expected at least 1"):
        BuildOptions(400, workers=0)


def test_an_empty_split_is_refused(docs: Path, folder: Path, tmp_path: Path) -> None:
    options = replace(OPTIONS, vocab_size=None, tokenizer=folder / "tokenizer.model")
    message = refusal([docs], tmp_path, replace(options, holdout=1e-9))
    assert "none of 43 documents falls into val with holdout 1e-09: change holdout" in message
    message = refusal([docs], tmp_path, replace(options, holdout=1 - 1e-9))
    assert re.search("none of [0-9]+ documents falls into train", message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("split", ["train", "val"])
def test_files_without_one_document_left_are_refused(tmp_path: Path, split: str) -> None:
    paths = {
        name: write_jsonl(tmp_path / f"{name}.jsonl", [""] if name == split else ["text"])
        for name in ("train", "val")
    }
    options = BuildOptions(None, [paths["val"]], kind="bytes", reading=Reading(bad_input="repair"))
    message = refusal([paths["train"]], tmp_path / "out", options)
    assert f"none of 2 documents falls into {split}" in message


def test_no_vocab_size_and_no_tokenizer_is_refused(docs: Path, tmp_path: Path) -> None:
    message = refusal([docs], tmp_path, replace(OPTIONS, vocab_size=None))
    assert "vocab_size is needed" in message


def test_a_published_split_is_kept(docs: Path, tmp_path: Path) -> None:
    val = write_file(tmp_path / "val.txt", b"A held-out document of its own.")
    manifest = build_data([docs], tmp_path / "out", replace(OPTIONS, holdout=[val]))
    data = load_data(tmp_path / "out")
    assert decoded(data, data.val) == [val.read_bytes()]
    texts = [document.text.encode() for document in read_documents([docs])]
    assert decoded(data, data.train) == texts
    assert [row["split"] for row in manifest["inputs"]] == ["val", "train"]
    assert [row["documents"] for row in manifest["inputs"]] == [
        {"val": [0, 1]},
        {"train": [0, len(texts)]},
    ]
    assert manifest["split"] == {"rule": BY_FILE, "fraction": None}


def test_a_held_out_document_among_the_training_files_is_refused(
    docs: Path, folder: Path, tmp_path: Path
) -> None:
    options = BuildOptions(None, [docs], kind="bytes")
    assert "43 training documents are also held out" in refusal([docs], tmp_path, options)
    val = write_jsonl(tmp_path / "val.jsonl", ["unique", prose(40)[7]])
    digest = document_hash(prose(40)[7]).hex()[:16]
    message = refusal([docs], tmp_path / "out", replace(options, holdout=[val]))
    assert message == (
        f"{docs}: 1 training documents are also held out (the last one SHA-256 {digest}...), "
        "at most 0 may be; remove them from one split"
    )
    assert not (tmp_path / "out").exists()


def test_labels_are_those_of_the_build(docs: Path, folder: Path) -> None:
    data = load_data(folder)
    labelled = list(labelled_documents(data.manifest["inputs"], by_hash(HOLDOUT), Reading()))
    for split, shard in (("train", data.train), ("val", data.val)):
        digests = [digest for name, digest, _ in labelled if name == split]
        assert digests == [row.tobytes() for row in shard.doc_hashes]


@pytest.mark.parametrize("num_first", [1, 5, 6, 7, 20])
def test_the_first_documents_are_held_out(
    tmp_path: Path, num_first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Batches of a document or two, so that ends of batches and of the first file are met.
    monkeypatch.setattr(corpus, "BATCH_BYTES", 300)
    texts = list(prose(40))
    # A copy of the first document in each file, and lines that are no documents.
    files = [
        write_jsonl(tmp_path / "a.jsonl", [*texts[:6], texts[0]]),
        write_jsonl(tmp_path / "b.jsonl", [*texts[6:], texts[0]]),
    ]
    files[0].write_text("\n\n" + files[0].read_text())
    options = replace(BYTES, val_docs=num_first)
    manifest = build_data(files, tmp_path / "out", options)
    data = load_data(tmp_path / "out")
    read = [*texts[:6], texts[0], *texts[6:], texts[0]]
    wanted = {"val": read[:num_first], "train": [t for t in read if t not in read[:num_first]]}
    for split, shard in (("val", data.val), ("train", data.train)):
        assert decoded(data, shard) == [text.encode() for text in wanted[split]]
    rule = {"rule": BY_PLACE, "fraction": None, "first_documents": num_first}
    assert manifest["split"] == rule
    # An audit finds the same split from the manifest and the files.
    hold_out = stated_hold_out(manifest)
    labelled = list(labelled_documents(manifest["inputs"], hold_out, Reading()))
    for split, documents in wanted.items():
        assert [document.text for name, _, document in labelled if name == split] == documents
    build_data(files, tmp_path / "two", replace(options, workers=2))
    assert contents(tmp_path / "two") == contents(tmp_path / "out")


def test_pieces_of_the_first_documents_are_held_out(tmp_path: Path) -> None:
    texts = list(prose(6))
    file = write_jsonl(tmp_path / "docs.jsonl", texts)
    options = replace(BYTES, val_docs=2, reading=Reading(split_documents=80))
    build_data([file], tmp_path / "out", options)
    data = load_data(tmp_path / "out")
    assert data.val.num_documents > 2
    assert b"".join(decoded(data, data.val)) == "".join(texts[:2]).encode()


def test_a_number_of_first_documents_that_cannot_be_is_refused(docs: Path, tmp_path: Path) -> None:
    num = len(list(read_documents([docs])))
    message = refusal([docs], tmp_path / "out", replace(BYTES, val_docs=num + 1))
    assert f"the first {num + 1} documents cannot be held out of {num}" in message
    message = refusal([docs], tmp_path / "out", replace(BYTES, val_docs=num))
    assert f"falls into train with val_docs {num}: change val_docs" in message
    with pytest.raises(DataError, match="val_docs is -1"):
        replace(BYTES, val_docs=-1)
    with pytest.raises(DataError, match="val_docs and files"):
        replace(BYTES, val_docs=1, holdout=[docs])


def test_repair_changes_nothing_where_nothing_is_wrong(
    docs: Path, folder: Path, tmp_path: Path
) -> None:
    build_data([docs], tmp_path, replace(OPTIONS, reading=Reading(bad_input="repair")))
    ours, plain = contents(tmp_path), contents(folder)
    assert ours.pop("manifest.json") != plain.pop("manifest.json")
    assert ours == plain


def on_side(pattern: str, is_val: bool) -> str:
    """The first text of a pattern that the hash puts on that side."""
    texts = (pattern.format(number) for number in range(1000))
    return next(t for t in texts if is_held_out(document_hash(t), HOLDOUT) is is_val)


def test_copies_are_dropped_as_if_they_had_never_been_there(tmp_path: Path) -> None:
    texts = [f"{text} {i} {i}" for i, text in enumerate(prose(40))]
    val = held_out(texts, HOLDOUT)
    in_training = [on_side(f"{text} end{{}}", is_val=False) for text in val[:3]]
    # Half of it is in one training document, half in another.
    halves = [on_side(f"{half} {{}}", is_val=False) for half in cut_text(val[3], 1200)]
    in_val = [on_side(f"{val[4]} end{{}}", is_val=True), val[4]]
    docs = write_jsonl(tmp_path / "docs.jsonl", [*texts, *in_training, *halves, *in_val])
    clean = write_jsonl(tmp_path / "clean.jsonl", texts)
    options = replace(OPTIONS, drop_near=0.7)
    manifest = build_data([docs], tmp_path / "dropped", options)
    build_data([clean], tmp_path / "clean", OPTIONS)
    # They do not train the tokenizer either.
    ours, theirs = contents(tmp_path / "dropped"), contents(tmp_path / "clean")
    assert ours.pop("manifest.json") != theirs.pop("manifest.json")
    assert ours == theirs
    assert manifest["dropped"] == {
        "similarity": 0.7,
        "train": sorted(document_hash(text).hex() for text in [*in_training, *halves]),
        "val": [document_hash(in_val[0]).hex()],
    }
    hold_out = stated_hold_out(manifest)
    labelled = labelled_documents(manifest["inputs"], hold_out, Reading())
    assert [document.text for _, _, document in labelled] == texts
    # With nothing to drop, the manifest says nothing.
    assert "dropped" not in build_data([clean], tmp_path / "again", options)
    assert "dropped" not in build_data([docs], tmp_path / "kept", OPTIONS)


def test_a_held_out_text_counts_once(tmp_path: Path) -> None:
    texts = list(prose(40))
    docs = write_jsonl(tmp_path / "docs.jsonl", [*texts, *reversed(texts)])
    manifest = build_data([docs], tmp_path / "data", replace(OPTIONS, drop_near=1.0, workers=2))
    assert manifest["dropped"] == {"similarity": 1.0, "train": [], "val": []}
    data = load_data(tmp_path / "data")
    val = held_out(texts, HOLDOUT)
    assert decoded(data, data.val) == [text.encode() for text in val]
    assert data.train.num_documents == 2 * (len(texts) - len(val))


def test_copies_of_held_out_files_are_dropped(tmp_path: Path) -> None:
    # A text without words shares no run of words with its copy.
    docs = write_jsonl(tmp_path / "docs.jsonl", [*prose(40)[:9], "?!"])
    val = write_jsonl(tmp_path / "val.jsonl", [prose(40)[0], "?!", "Another one."])
    options = BuildOptions(None, [val], kind="bytes")
    assert "2 training documents are also held out" in refusal([docs], tmp_path / "out", options)
    build_data([docs], tmp_path / "out", replace(options, drop_near=0.7))
    data = load_data(tmp_path / "out")
    assert decoded(data, data.train) == [text.encode() for text in prose(40)[1:9]]
    assert data.val.num_documents == 3


@pytest.mark.parametrize("similarity", [0, -0.1, 7, float("nan")])
def test_a_similarity_out_of_range_is_refused(similarity: float) -> None:
    with pytest.raises(DataError, match=r"drop_near is .*, expected above 0 and at most 1"):
        BuildOptions(400, drop_near=similarity)
