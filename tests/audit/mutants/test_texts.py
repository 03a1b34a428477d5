"""Cheats that need texts, tokenizers or models other than those of the shared run."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from forge import CPU, copy_of

from small_data import edit_manifest, prose, train_sentencepiece, write_jsonl, write_published
from tiny import TinyRun
from underpar.audit.case import Case, Limits
from underpar.audit.data import byte_count, memorization, splits
from underpar.audit.finding import (
    DEVIATION,
    FAIL,
    NOT_SHOWN,
    PASS,
    PRECEDENT,
    STRICT,
    overall,
)
from underpar.core.run_folder import RunFolder
from underpar.data import build
from underpar.data.build import BuildOptions, build_data
from underpar.data.copies import Drops
from underpar.data.folder import hash_file, load_data
from underpar.data.sources.corpus import document_hash, is_held_out
from underpar.data.value_files import open_values
from underpar.score.ledger import Entry
from underpar.score.method import PLAIN
from underpar.stages.audit import AuditRequest, open_case
from underpar.stages.pack import pack_run
from underpar.stages.score import score_artifact
from underpar.stages.train import train


@pytest.fixture(scope="module")
def case(tiny_run: TinyRun) -> Case:
    return open_case(tiny_run.folder, CPU, AuditRequest(tiny_run.data, seed=0))


def about(case: Case, folder: Path) -> Case:
    """The case with other data, and a plain score that agrees with their bytes."""
    data = load_data(folder, refuse_shared=False)
    sizes = data.val.doc_bytes.tolist()
    entries = [Entry(i, 2.0 * size, size, 1) for i, size in enumerate(sizes)]
    plain = replace(case.scores["plain"], entries=entries)
    return replace(case, data=data, data_path=folder, scores={"plain": plain}, repeated={})


def built(out: Path, end: str = "", **options: object) -> Path:
    source = write_jsonl(out / "source.jsonl", [text[:800] + end for text in prose(200)])
    build_data([source], out / "data", BuildOptions(**{"vocab_size": 500, **options}))  # type: ignore[arg-type]
    return out / "data"


def test_a_sidecar_that_is_shifted_by_one_token(case: Case, tmp_path: Path) -> None:
    # Operators in the text are escaped, so tokens have other bytes than in the table.
    data = built(tmp_path, end=" \ue001 end", transform="caseops")
    honest = byte_count(about(case, data))
    assert honest.verdict == PASS, honest.summary
    # Each document keeps its sum, so that the folder opens.
    shard = load_data(data).val
    values = np.array(open_values(data / "val_bytes.bin"))
    for index in range(shard.num_documents):
        first = int(shard.starts[index])
        inside = slice(first + 1, first + len(shard.doc(index)))
        values[inside] = np.roll(values[inside], 1)
    write_published(data / "val_bytes.bin", values.tolist())
    sha256 = hash_file(data / "val_bytes.bin")
    edit_manifest(data, lambda m: m["val"].update(sidecar_sha256=sha256))
    finding = byte_count(about(case, data))
    assert finding.verdict == FAIL
    assert "val_bytes.bin gives other bytes" in finding.summary


def test_a_tokenizer_with_a_document_as_one_piece(case: Case, tmp_path: Path) -> None:
    symbol = "held-out text that the tokenizer knows by heart and that costs one token, no more"
    model = tmp_path / "tokenizer.model"
    options = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    model.write_bytes(train_sentencepiece(prose(60), 500, user_defined_symbols=[symbol], **options))
    data = built(tmp_path, tokenizer=model, vocab_size=None)
    finding = byte_count(about(case, data))
    assert finding.verdict == FAIL
    assert "a piece of the tokenizer holds 81 bytes" in finding.summary


@pytest.mark.parametrize(
    ("rule", "verdict"),
    [("nmt_nfkc", DEVIATION), ("nmt_nfkc_cf", FAIL)],
    ids=["NFKC", "case folded"],
)
def test_a_tokenizer_that_makes_text_easier(
    case: Case, tmp_path: Path, rule: str, verdict: str
) -> None:
    """Folding case scores another text than the one whose bytes count (PR 1578 and others)."""
    model = tmp_path / "tokenizer.model"
    model.write_bytes(train_sentencepiece(prose(60), 400, normalization_rule_name=rule))
    data = built(tmp_path, tokenizer=model, vocab_size=None)
    assert not load_data(data).tokenizer.lossless
    finding = byte_count(about(case, data))
    assert finding.verdict == verdict, finding.summary


def test_text_of_a_published_tokenizer_passes_by_precedent_alone(
    case: Case, tmp_path: Path
) -> None:
    """The published tokenizers normalize text: a deviation of every accepted record."""
    model = tmp_path / "tokenizer.model"
    model.write_bytes(train_sentencepiece(prose(60), 400, normalization_rule_name="nmt_nfkc"))
    mine = about(case, built(tmp_path, tokenizer=model, vocab_size=None))
    findings = [byte_count(mine), splits(mine)]
    assert [finding.verdict for finding in findings] == [DEVIATION, DEVIATION]
    assert all(finding.evidence.get("deviations", ["D8"]) == ["D8"] for finding in findings)
    assert (overall(findings, STRICT), overall(findings, PRECEDENT)) == (FAIL, DEVIATION)


def leave_out(data: Path, share: float) -> None:
    """Held-out documents left out of source and shard: the rest are all that there ever were."""
    manifest = json.loads((data / "manifest.json").read_text())
    source = Path(manifest["inputs"][0]["path"])
    folder = load_data(data)
    kept = range(int(folder.val.num_documents * share))
    shards = [folder.train, *([folder.val] if share else [])]
    texts = []
    for shard in shards:
        chosen = kept if shard is folder.val else range(shard.num_documents)
        texts += [folder.tokenizer.decode(shard.doc(i)).decode() for i in chosen]
    write_jsonl(source, texts)
    tokenizer = data / "tokenizer.model"
    shutil.copy(tokenizer, source.parent / "t.model")
    options = BuildOptions(None, tokenizer=source.parent / "t.model")
    shutil.rmtree(data)
    build_data([source], data, options)


def test_held_out_documents_that_are_missing_everywhere(case: Case, tmp_path: Path) -> None:
    texts = [f"{text[i : i + 90]} {i}" for text in prose(120) for i in range(0, 900, 90)]
    source = write_jsonl(tmp_path / "source.jsonl", list(dict.fromkeys(texts)))
    data = tmp_path / "data"
    build_data([source], data, BuildOptions(500))
    assert "are held out" not in splits(about(case, data)).summary
    leave_out(data, 0.4)
    finding = splits(about(case, data))
    assert finding.verdict == FAIL
    assert "texts are held out, expected" in finding.summary


def test_files_that_decide_the_split_need_expected_data(case: Case, tmp_path: Path) -> None:
    texts = [text[:800] for text in prose(60)]
    files = [
        write_jsonl(tmp_path / f"{i}.jsonl", part)
        for i, part in enumerate((texts[10:], texts[:10]))
    ]
    build_data(files[:1], tmp_path / "data", BuildOptions(500, holdout=files[1:]))
    mine = about(case, tmp_path / "data")
    finding = splits(mine)
    assert finding.verdict == NOT_SHOWN, finding.summary
    assert splits(replace(mine, limits=Limits(data_sha256="0" * 64))).verdict == PASS


@pytest.mark.slow
def test_a_model_that_was_trained_on_the_held_out_text(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Trained on the held-out documents alone, many times, and scored by clean code."""
    forge = copy_of(tiny_run.folder, tiny_run.data, tmp_path)
    texts = forge.texts("val")
    shutil.copytree(forge.data, tmp_path / "cheat")
    cheat = replace(forge, data=tmp_path / "cheat", run=RunFolder(tmp_path / "scratch"))
    shutil.copytree(forge.run.path, cheat.run.path)
    cheat.write_texts("train", texts)
    part = replace(tiny_run.recipe.train, budget_steps=200)
    recipe = replace(tiny_run.recipe, train=part)
    run = RunFolder(tmp_path / "trained")
    edit_manifest(cheat.data, lambda m: m.update(shared_documents=len(texts)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "underpar.stages.train.load_data", lambda p: load_data(p, refuse_shared=False)
        )
        train(recipe, cheat.data, run, CPU)
    pack_run(run)
    tree = json.loads(run.about_file.read_text())
    honest = json.loads(forge.run.about_file.read_text())
    for key in ("data", "data_identity", "train_tokens"):
        tree[key] = honest[key]
    run.about_file.write_text(json.dumps(tree))
    score_artifact(run.artifact_file, forge.data, CPU, PLAIN)
    finding = memorization(open_case(run, CPU, AuditRequest(forge.data)))
    assert finding.verdict == FAIL, finding.summary


def test_held_out_documents_that_are_no_copies_cannot_be_left_out(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [text[:800] for text in prose(200)]
    val = [text for text in texts if is_held_out(document_hash(text), 0.1)]
    # A held-out text and one that nearly repeats it.
    twin = next(t for i in range(1000) if is_held_out(document_hash(t := f"{val[0]} {i}"), 0.1))
    source = write_jsonl(tmp_path / "source.jsonl", [*texts, twin])
    options = BuildOptions(500, 0.1, drop_near=0.7)
    manifest = build_data([source], tmp_path / "honest", options)
    assert manifest["dropped"]["val"] == [document_hash(twin).hex()]
    assert manifest["val"]["documents"] == len(val)
    for rule in (byte_count, splits):
        honest = rule(about(case, tmp_path / "honest"))
        assert honest.verdict == PASS, honest.summary

    def without_hard_ones(*_: object) -> Drops:
        hard = {document_hash(text) for text in (twin, *val[1:3])}
        return Drops(frozenset(), frozenset(hard), has_repeats=False)

    monkeypatch.setattr(build, "find_drops", without_hard_ones)
    build_data([source], tmp_path / "forged", options)
    forged = byte_count(about(case, tmp_path / "forged"))
    assert forged.verdict == FAIL
    assert "2 held-out documents were left out that repeat no other" in forged.summary
