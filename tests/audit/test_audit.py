"""The audit: an honest run passes, and each kind of cheating is caught by its rule."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tiny import TinyRun
from underpar import pipeline
from underpar.audit import rules
from underpar.audit.finding import FAIL, NOT_SHOWN, PASS, Finding
from underpar.audit.rules import Case
from underpar.build import build_predictor, build_tokenizer, read_artifact
from underpar.codec.stream import Codec
from underpar.data.folder import load_data
from underpar.data.loader import Batch
from underpar.errors import CodecError, RunError
from underpar.infer.predictor import Predictor
from underpar.run import RunFolder
from underpar.runtime import Runtime
from underpar.score.ledger import Entry, Score, score_from_dict
from underpar.score.score import Scorer


@pytest.fixture(scope="module")
def case(tiny_run: TinyRun, runtime: Runtime) -> Case:
    artifact, identity = read_artifact(tiny_run.folder.artifact_file)

    def open_predictor() -> Predictor:
        return build_predictor(artifact, runtime.device)

    scores = {
        method: score_from_dict(json.loads(tiny_run.folder.score_file(method).read_text()))
        for method in ("plain", "adapt")
    }
    return Case(
        recipe=artifact.recipe,
        open_predictor=open_predictor,
        codec=Codec(open_predictor(), build_tokenizer(artifact), identity),
        artifact_file=tiny_run.folder.artifact_file,
        code_bytes=1000,
        data=load_data(tiny_run.data),
        scores=scores,
        runtime=runtime,
        spent_seconds={"train": 8.0, "calibrate": 1.5},
        code_tokens=1500,
    )


def cheating(case: Case, cheat: type[Predictor]) -> Case:
    def open_cheat() -> Predictor:
        predictor = case.open_predictor()
        predictor.__class__ = cheat
        return predictor

    return dataclasses.replace(case, open_predictor=open_cheat)


def with_plain(case: Case, change: Callable[[list[Entry]], list[Entry]]) -> Case:
    plain = case.scores["plain"]
    forged = Score("plain", change(list(plain.entries)), plain.seconds, plain.events)
    return dataclasses.replace(case, scores=case.scores | {"plain": forged})


def test_an_honest_run_passes_every_rule(
    tiny_run: TinyRun, tmp_path: Path, runtime: Runtime
) -> None:
    shutil.copytree(tiny_run.folder.path, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    seen: list[Finding] = []
    verdict, findings = pipeline.audit_run(folder, runtime, on_rule=seen.append)
    assert [(f.rule, f.verdict) for f in findings if f.verdict != PASS] == []
    assert verdict == PASS
    assert seen == findings
    stored = json.loads(folder.audit_file.read_text())
    assert [f["rule"] for f in stored["findings"]] == [f.rule for f in findings]


def test_missing_scores_are_not_shown_and_never_a_pass(case: Case) -> None:
    empty = dataclasses.replace(case, scores={})
    verdicts = {f.rule: f.verdict for f in rules.run_audit(empty)}
    unshown = {"coverage", "bytes", "score before update", "reproduction", "coded bits"}
    assert {rule for rule, verdict in verdicts.items() if verdict == NOT_SHOWN} == unshown
    assert FAIL not in verdicts.values()


def test_a_file_over_the_cap_fails(case: Case) -> None:
    assert rules.size(dataclasses.replace(case, code_bytes=16_000_000)).verdict == FAIL


@pytest.mark.parametrize(
    "change",
    [
        lambda entries: entries[:-1],
        lambda entries: [*entries, entries[0]],
        lambda entries: [dataclasses.replace(entries[0], num_targets=1), *entries[1:]],
        lambda entries: entries[::-1],
    ],
    ids=["dropped", "twice", "short", "other order"],
)
def test_uncovered_targets_fail(case: Case, change: Callable[[list[Entry]], list[Entry]]) -> None:
    assert rules.coverage(with_plain(case, change)).verdict == FAIL
    assert rules.coverage(case).verdict == PASS


def test_a_better_denominator_fails(case: Case) -> None:
    def grow(entries: list[Entry]) -> list[Entry]:
        return [dataclasses.replace(e, num_bytes=e.num_bytes + e.num_targets) for e in entries]

    assert rules.byte_count(with_plain(case, grow)).verdict == FAIL


def test_tokens_that_are_not_the_text_fail(case: Case) -> None:
    val = case.data.val
    tokens = np.array(val.tokens)
    tokens[5] = tokens[5] % 500 + 5
    data = dataclasses.replace(case.data, val=dataclasses.replace(val, tokens=tokens))
    finding = rules.byte_count(dataclasses.replace(case, data=data))
    assert finding.verdict == FAIL


def test_bytes_are_counted_from_the_source_while_it_is_there(case: Case) -> None:
    finding = rules.byte_count(case)
    assert finding.evidence["source_bytes"] == finding.evidence["decoded_bytes"]
    manifest = case.data.manifest | {
        "inputs": [{"path": "gone.jsonl", "sha256": "", "split": "train"}]
    }
    data = dataclasses.replace(case.data, manifest=manifest)
    assert rules.byte_count(dataclasses.replace(case, data=data)).evidence["source_bytes"] is None


class PeeksAhead(Predictor):
    """Prices a token better when the one after it is known."""

    def nll(self, batch: Batch) -> torch.Tensor:
        nats = super().nll(batch)
        following = torch.roll(batch.targets, -1)
        return nats * torch.where(following % 2 == 0, 0.99, 1.0)


class SeesTarget(Predictor):
    """Halves the price of even tokens: the prices are no distribution."""

    def nll(self, batch: Batch) -> torch.Tensor:
        return super().nll(batch) * torch.where(batch.targets % 2 == 0, 0.5, 1.0)


class ForgetsBorders(Predictor):
    """Lets a document see the size of the pack it is in."""

    def nll(self, batch: Batch) -> torch.Tensor:
        return super().nll(batch) * (1 - 1e-4 * len(batch.targets) / 1000)


class LearnsFirst(Predictor):
    """Adapts to a batch before pricing it."""

    def nll(self, batch: Batch) -> torch.Tensor:
        super().nll(batch)
        super().adapt(batch)
        return super().nll(batch)

    def adapt(self, batch: Batch) -> None:
        self._priced = None


class ReadsAhead(Scorer):
    """Prices every document with an eye on the whole stream."""

    def price(self, documents: Sequence[int]) -> Batch:
        batch = super().price(documents)
        hint = 1 - 1e-6 * (int(self.shard.tokens.sum()) % 97)
        entry = self.entries[-1]
        self.entries[-1] = dataclasses.replace(entry, bits=entry.bits * hint)
        return batch


class LearnsQuietly(LearnsFirst):
    """Learns while it pretends to score plainly."""


@pytest.mark.parametrize(
    ("cheat", "rule"),
    [
        (PeeksAhead, rules.causality),
        (ForgetsBorders, rules.causality),
        (LearnsFirst, rules.causality),
        (SeesTarget, rules.normalization),
        (PeeksAhead, rules.reproduction),
        (LearnsQuietly, rules.reproduction),
    ],
)
def test_cheating_predictors_fail(
    case: Case, cheat: type[Predictor], rule: Callable[[Case], Finding]
) -> None:
    assert rule(case).verdict == PASS
    assert rule(cheating(case, cheat)).verdict == FAIL


def test_learning_before_pricing_is_seen_in_the_events(case: Case) -> None:
    adapted = case.scores["adapt"]
    for events in (
        [("adapt", 0, 0), *adapted.events],
        [*adapted.events, adapted.events[0]],
    ):
        forged = dataclasses.replace(adapted, events=events)
        scores = case.scores | {"adapt": forged}
        assert rules.score_before_update(dataclasses.replace(case, scores=scores)).verdict == FAIL
    assert rules.score_before_update(case).verdict == PASS


def test_reading_ahead_is_seen_by_replacing_what_comes(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "Scorer", ReadsAhead)
    assert rules.score_before_update(case).verdict == FAIL


def test_a_codec_that_cannot_decode_fails(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> int:
        raise CodecError("the decoder did not give the documents back")

    monkeypatch.setattr(rules, "code_documents", broken)
    finding = rules.run_audit(case)[-1]
    assert (finding.verdict, finding.rule) == (FAIL, "coded bits")
    assert "did not give" in finding.summary


def test_a_score_better_than_the_code_fails(case: Case) -> None:
    def shrink(entries: list[Entry]) -> list[Entry]:
        return [dataclasses.replace(e, bits=0.97 * e.bits) for e in entries]

    assert rules.coded_bits(case).verdict == PASS
    assert rules.coded_bits(with_plain(case, shrink)).verdict == FAIL
    assert rules.reproduction(with_plain(case, shrink)).verdict == FAIL


def test_scores_of_another_artifact_are_refused(
    tiny_run: TinyRun, tmp_path: Path, runtime: Runtime
) -> None:
    shutil.copytree(tiny_run.folder.path, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    stored = json.loads(folder.score_file("plain").read_text())
    folder.score_file("plain").write_text(json.dumps(stored | {"artifact_sha256": "0" * 64}))
    with pytest.raises(RunError, match="another artifact"):
        pipeline.audit_run(folder, runtime)


def test_time_with_training_text_is_training_time(case: Case) -> None:
    for budget, verdict in ((10.0, PASS), (9.45, PASS), (9.0, FAIL), (0.0, PASS)):
        part = dataclasses.replace(case.recipe.train, budget_seconds=budget, budget_steps=30)
        recipe = dataclasses.replace(case.recipe, train=part)
        finding = rules.data_time(dataclasses.replace(case, recipe=recipe))
        assert finding.verdict == verdict, budget
        assert "calibrate 1.5" in finding.summary
