"""Building a data folder: the split, determinism, samples, interruption, refusals."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from underpar.data import build
from underpar.data.build import build_data, sample_by_hash
from underpar.data.corpus import demo_corpus, document_hash, is_held_out, read_documents
from underpar.data.folder import load_data
from underpar.errors import DataError

HOLDOUT = 0.2
VOCAB_SIZE = 400


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    documents = read_documents([demo_corpus()])
    texts = [next(documents).text[:3000] for _ in range(40)]
    texts += [texts[0], texts[1], "odd \u2581\x00 text  \n"]
    path = tmp_path_factory.mktemp("corpus") / "docs.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def folder(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data") / "new" / "folder"
    build_data([corpus], out, VOCAB_SIZE, HOLDOUT)
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_document_is_on_its_side_and_decodes_to_its_text(corpus: Path, folder: Path) -> None:
    data = load_data(folder)
    for shard, wanted in ((data.train, False), (data.val, True)):
        texts = [
            document.text
            for document in read_documents([corpus])
            if is_held_out(document_hash(document.text), HOLDOUT) is wanted
        ]
        docs = [shard.doc(i) for i in range(shard.num_documents)]
        assert [data.tokenizer.decode(doc).decode() for doc in docs] == texts
        assert shard.doc_bytes.tolist() == [len(text.encode()) for text in texts]
        assert [row.tobytes().hex() for row in shard.doc_hashes] == list(map(document_hash, texts))


def test_the_manifest_says_what_is_there(corpus: Path, folder: Path) -> None:
    data = load_data(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest == data.manifest
    assert manifest["inputs"] == [
        {
            "path": str(corpus),
            "split": "train",
            "bytes": corpus.stat().st_size,
            "sha256": hashlib.sha256(corpus.read_bytes()).hexdigest(),
        }
    ]
    assert manifest["tokenizer"] == {"identity": data.tokenizer.identity, "vocab_size": VOCAB_SIZE}
    assert manifest["split"]["fraction"] == HOLDOUT
    for split, shard in (("train", data.train), ("val", data.val)):
        stated = manifest[split]
        file = folder / f"{split}.shard"
        assert stated["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
        assert stated["bytes"] == shard.num_bytes
        text_tokens = shard.num_tokens - shard.num_documents
        assert stated["bytes_per_token"] == pytest.approx(shard.num_bytes / text_tokens, abs=1e-6)
    assert sorted(contents(folder)) == [
        "manifest.json",
        "tokenizer.model",
        "train.shard",
        "val.shard",
    ]


def test_building_again_gives_the_same_bytes(corpus: Path, folder: Path, tmp_path: Path) -> None:
    build_data([corpus], tmp_path, VOCAB_SIZE, HOLDOUT)
    assert contents(tmp_path) == contents(folder)


def test_a_given_tokenizer_is_used_as_it_is(corpus: Path, folder: Path, tmp_path: Path) -> None:
    model = folder / "tokenizer.model"
    build_data([corpus], tmp_path, None, HOLDOUT, tokenizer=model)
    assert contents(tmp_path) == contents(folder)
    with pytest.raises(DataError, match="tokenizer has 400 pieces, vocab_size says 512"):
        build_data([corpus], tmp_path, 512, HOLDOUT, tokenizer=model)


def test_the_tokenizer_never_sees_validation_text(folder: Path, tmp_path: Path) -> None:
    texts = [f"document {i} with some words" for i in range(200)]
    held_out = [is_held_out(document_hash(text), HOLDOUT) for text in texts]
    outs = []
    for name, extra in (("a", ""), ("b", " zzzyyyxxx" * 50)):
        # The marker goes into a text only where the changed text is held out as well.
        rows = [
            text + extra
            if out and is_held_out(document_hash(text + " zzzyyyxxx" * 50), HOLDOUT)
            else text
            for text, out in zip(texts, held_out, strict=True)
        ]
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
        build_data([path], tmp_path / name, 300, HOLDOUT)
        outs.append(contents(tmp_path / name))
    assert outs[0]["tokenizer.model"] == outs[1]["tokenizer.model"]
    assert outs[0]["train.shard"] == outs[1]["train.shard"]
    assert outs[0]["val.shard"] != outs[1]["val.shard"]


def test_batching_changes_nothing(
    corpus: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_BATCH_CHARACTERS", 5000)
    build_data([corpus], tmp_path, VOCAB_SIZE, HOLDOUT)
    assert contents(tmp_path) == contents(folder)


def test_progress_counts_the_documents_of_both_passes(corpus: Path, tmp_path: Path) -> None:
    calls: list[tuple[str, int]] = []
    build_data([corpus], tmp_path, 380, HOLDOUT, progress=lambda *call: calls.append(call))
    assert ("tokenizer", 43) in calls and calls[-1] == ("encode", 43)


def test_an_interrupted_build_is_not_accepted(corpus: Path, folder: Path, tmp_path: Path) -> None:
    build_data([corpus], tmp_path, VOCAB_SIZE, HOLDOUT)

    def interrupt(stage: str, num_documents: int) -> None:
        if stage == "encode":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_data([corpus], tmp_path, 380, HOLDOUT, progress=interrupt)
    with pytest.raises(DataError, match="no finished data folder here"):
        load_data(tmp_path)
    assert not list(tmp_path.glob("*.part"))


def test_bad_inputs_leave_an_old_folder_alone(corpus: Path, folder: Path, tmp_path: Path) -> None:
    before = contents(folder)
    with pytest.raises(DataError, match="no such file"):
        build_data([tmp_path / "gone.jsonl"], folder, VOCAB_SIZE, HOLDOUT)
    with pytest.raises(DataError, match="too small for vocab_size 60000"):
        build_data([corpus], folder, 60_000, HOLDOUT)
    assert contents(folder) == before


@pytest.mark.parametrize("holdout", [0, 1, -0.1, 1.5, float("nan")])
def test_a_fraction_out_of_range_is_refused(corpus: Path, tmp_path: Path, holdout: float) -> None:
    with pytest.raises(DataError, match=r"holdout is .*, expected a fraction between 0 and 1"):
        build_data([corpus], tmp_path, VOCAB_SIZE, holdout)


def test_an_empty_split_is_refused(corpus: Path, folder: Path, tmp_path: Path) -> None:
    model = folder / "tokenizer.model"
    for holdout, split in ((1e-9, "val"), (1 - 1e-9, "train")):
        with pytest.raises(DataError, match=f"none of 43 documents falls into {split}"):
            build_data([corpus], tmp_path, None, holdout, tokenizer=model)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.model"]


def test_no_vocab_size_and_no_tokenizer_is_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="vocab_size is needed"):
        build_data([corpus], tmp_path, None, HOLDOUT)


def pairs(texts: list[str]) -> Iterator[tuple[str, str]]:
    return ((document_hash(text), text) for text in texts)


def test_the_sample_is_the_same_in_any_order() -> None:
    rng = np.random.default_rng(0)
    texts = [f"{i} " * int(rng.integers(1, 60)) for i in range(200)]
    sample = sample_by_hash(pairs(texts), 5000)
    num_bytes = sum(len(text) for text in sample)
    assert 5000 - 200 <= num_bytes <= 5000
    for _ in range(5):
        shuffled = [texts[i] for i in rng.permutation(len(texts))] + texts[:20]
        assert sample_by_hash(pairs(shuffled), 5000) == sample


def test_a_long_document_does_not_fill_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_SAMPLE_CHARACTERS_PER_DOCUMENT", 10)
    assert sample_by_hash(pairs(["x" * 1000]), 100) == ["x" * 10]


def test_a_published_split_is_kept(corpus: Path, tmp_path: Path) -> None:
    val = tmp_path / "val.txt"
    val.write_text("A held-out document of its own.")
    manifest = build_data([corpus], tmp_path / "out", VOCAB_SIZE, [val])
    data = load_data(tmp_path / "out")
    assert data.val.num_documents == 1
    assert data.tokenizer.decode(data.val.doc(0)) == val.read_bytes()
    assert data.train.num_documents == len(list(read_documents([corpus])))
    assert [row["split"] for row in manifest["inputs"]] == ["train", "val"]
    assert manifest["split"]["fraction"] is None


def test_a_held_out_document_among_the_training_files_is_refused(
    corpus: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="also in the training files"):
        build_data([corpus], tmp_path / "out", VOCAB_SIZE, [corpus])
