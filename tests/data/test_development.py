"""Development documents: kept apart from training, priced by a folder of their own."""

from dataclasses import replace
from pathlib import Path

import pytest

from small_data import decoded, prose, write_file, write_jsonl
from underpar.audit.case import Case
from underpar.audit.data import _breaks_split_rule
from underpar.data.build import BuildOptions, build_data, development_of
from underpar.data.folder import DataFolder, load_data
from underpar.data.hold_out import by_hash, labelled_documents, priced_documents, stated_hold_out
from underpar.data.merge import write_part
from underpar.data.sources.corpus import Reading, document_hash, is_kept_apart
from underpar.errors import DataError

TEXTS = [f"{text} Number {number}." for number, text in enumerate(prose(300))]
OPTIONS = BuildOptions(None, 0.2, kind="bytes")
SHARE = 0.25


def texts_of(data: DataFolder) -> tuple[list[bytes], list[bytes]]:
    train, val = (list(decoded(data, shard)) for shard in (data.train, data.val))
    return train, val


def folders(tmp_path: Path, options: BuildOptions, texts: list[str]) -> list[DataFolder]:
    docs = write_jsonl(tmp_path / "docs.jsonl", texts)
    build_data([docs], tmp_path / "data", options)
    return [load_data(folder) for folder in (tmp_path / "data", development_of(tmp_path / "data"))]


def test_each_document_is_in_one_of_three_parts(tmp_path: Path) -> None:
    main, development = folders(tmp_path, replace(OPTIONS, development=SHARE), TEXTS)
    train, val = texts_of(main)
    again, priced = texts_of(development)
    assert again == train and development.train.doc_hashes.tobytes() == (
        main.train.doc_hashes.tobytes()
    )
    assert sorted([*train, *val, *priced]) == sorted(text.encode() for text in TEXTS)
    assert main.manifest["train"]["sha256"] == development.manifest["train"]["sha256"]
    # Both choices are by hash, so the share is that of the training documents.
    assert 0.15 < len(priced) / (len(priced) + len(train)) < 0.35
    assert [priced_documents(data.manifest) for data in (main, development)] == [
        "val",
        "development",
    ]


def test_the_held_out_documents_are_those_of_a_build_without(tmp_path: Path) -> None:
    main, development = folders(tmp_path, replace(OPTIONS, development=SHARE), TEXTS)
    plain = build_data([tmp_path / "docs.jsonl"], tmp_path / "plain", OPTIONS)
    assert plain["val"]["sha256"] == main.manifest["val"]["sha256"]
    assert not development_of(tmp_path / "plain").exists()
    assert "development" not in plain["split"]
    train, _ = texts_of(load_data(tmp_path / "plain"))
    ours, priced = texts_of(development)
    assert train == [t.encode() for t in TEXTS if t.encode() in {*ours, *priced}]


def test_a_trained_tokenizer_reads_training_documents_only(tmp_path: Path) -> None:
    texts = [*TEXTS, *(text.replace("e", "\u00e9") for text in TEXTS)]
    rest = [text for text in texts if not is_kept_apart(document_hash(text), SHARE)]
    assert len(rest) < len(texts)
    options = replace(OPTIONS, vocab_size=400, kind="bpe")
    main, development = folders(tmp_path, replace(options, development=SHARE), texts)
    build_data([write_jsonl(tmp_path / "rest.jsonl", rest)], tmp_path / "rest", options)
    alone = load_data(tmp_path / "rest").tokenizer
    assert main.tokenizer.content == development.tokenizer.content == alone.content


def test_copies_are_left_out_of_both_folders_alike(tmp_path: Path) -> None:
    kept = [t for t in TEXTS if by_hash(0.2).split_of(document_hash(t), "train") == "train"]
    apart = next(t for t in kept if is_kept_apart(document_hash(t), SHARE) and len(t) > 300)
    # A training document that repeats a development document but for its last words.
    copy = next(
        text
        for text in (f"{apart} Once more, {i}." for i in range(100))
        if by_hash(0.2).split_of(document_hash(text), "train") == "train"
        and not is_kept_apart(document_hash(text), SHARE)
    )
    options = replace(OPTIONS, development=SHARE, drop_near=0.7)
    main, development = folders(tmp_path, options, [*TEXTS, copy])
    for data in (main, development):
        assert copy.encode() not in texts_of(data)[0]
    assert texts_of(main)[0] == texts_of(development)[0]
    assert apart.encode() in texts_of(development)[1]


def test_the_manifest_and_the_source_give_both_folders_again(tmp_path: Path) -> None:
    novel = write_file(tmp_path / "novel.txt", "\n\n".join(prose(60)).encode())
    build_data([novel], tmp_path / "data", replace(OPTIONS, development=SHARE))
    for folder in (tmp_path / "data", development_of(tmp_path / "data")):
        data = load_data(folder)
        rule, reading = stated_hold_out(data.manifest), Reading(**data.manifest["reading"])
        labelled = list(labelled_documents(data.manifest["inputs"], rule, reading))
        for split, texts in zip(("train", "val"), texts_of(data), strict=True):
            assert [d.text.encode() for side, _, d in labelled if side == split] == texts


def test_the_audit_knows_the_rule_of_both_folders(tmp_path: Path) -> None:
    for data in folders(tmp_path, replace(OPTIONS, development=SHARE), TEXTS):
        case = Case.__new__(Case)
        object.__setattr__(case, "data", data)
        assert _breaks_split_rule(case) == []
        # The same documents under another share: some are on the wrong side.
        data.manifest["split"] |= {"development": 0.9}
        assert _breaks_split_rule(case) != []


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"development is 1\.5, expected 0 or a fraction"):
        replace(OPTIONS, development=1.5)
    docs = write_jsonl(tmp_path / "docs.jsonl", TEXTS)
    with pytest.raises(DataError, match="falls into development with development 1e-09"):
        build_data([docs], tmp_path / "data", replace(OPTIONS, development=1e-9))
    # Neither folder is there after a build that failed.
    assert not any((tmp_path / name).exists() for name in ("data", "data-development"))
    tokenizer = tmp_path / "tokenizer.model"
    options = replace(OPTIONS, tokenizer=tokenizer, development=SHARE)
    with pytest.raises(DataError, match="a part keeps no development documents"):
        write_part([("a", "text")], tmp_path / "part", options)
