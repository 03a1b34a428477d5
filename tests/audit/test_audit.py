"""The audit: an honest run passes, and each kind of cheating is caught by its rule."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tiny import TinyRun
from underpar.audit import behaviour, scores
from underpar.audit import data as data_rules
from underpar.audit.case import Case, Limits
from underpar.audit.clock import training_time
from underpar.audit.data import byte_count
from underpar.audit.finding import (
    DEVIATION,
    FAIL,
    NOT_SHOWN,
    PASS,
    PRECEDENT,
    STRICT,
    Finding,
    overall,
)
from underpar.audit.probes import first_documents
from underpar.audit.rules import run_audit
from underpar.audit.scores import coded_bits, coverage, reproduction, score_files, scoring_time
from underpar.audit.size import size
from underpar.build.artifact import read_artifact
from underpar.build.levers import plug_levers
from underpar.build.model import build_predictor
from underpar.build.scoring import ScoringRequest, open_method, run_method
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime
from underpar.data.batch import Batch
from underpar.data.shards import Shard
from underpar.errors import CodecError, UnderparError
from underpar.infer.experts import Expert, Proposals
from underpar.infer.predictor import Predictor
from underpar.infer.tilt import Mixture
from underpar.score.ledger import Entry, Score
from underpar.score.method import PUBLISHED, Method
from underpar.score.tally import OnCommit
from underpar.score.ttt.lanes import Hints, LaneBatch
from underpar.score.ttt.schedule import Chunk
from underpar.stages.audit import AuditRequest, audit_run, open_case
from watcher import Watcher


@pytest.fixture(scope="module")
def case(tiny_run: TinyRun, runtime: Runtime) -> Case:
    request = AuditRequest(tiny_run.data, code_tokens=1500, seed=0)
    case = open_case(tiny_run.folder, runtime, request)
    artifact, _ = read_artifact(tiny_run.folder.artifact_file)

    def open_predictor(dtype: torch.dtype = torch.float32) -> Predictor:
        adapters = list(plug_levers(artifact.recipe, "infer").values())
        return build_predictor(artifact, runtime.device, adapters, dtype)

    return dataclasses.replace(case, open_predictor=open_predictor)


def cheating(case: Case, cheat: type[Predictor]) -> Case:
    def open_cheat(*args: torch.dtype) -> Predictor:
        predictor = case.open_predictor(*args)
        predictor.__class__ = cheat
        return predictor

    return dataclasses.replace(case, open_predictor=open_cheat)


def with_plain(case: Case, change: Callable[[list[Entry]], list[Entry]]) -> Case:
    plain = case.scores["plain"]
    forged = dataclasses.replace(plain, entries=change(list(plain.entries)))
    return dataclasses.replace(case, scores=case.scores | {"plain": forged})


def test_an_honest_run_passes_every_rule(
    tiny_run: TinyRun, tmp_path: Path, runtime: Runtime
) -> None:
    shutil.copytree(tiny_run.folder.path, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    progress = Watcher()
    audited = audit_run(folder, runtime, progress=progress)
    findings = audited.findings
    # No codec follows adapt_scales, so its score is not decoded.
    [(rule, summary)] = [(f.rule, f.summary) for f in findings if f.verdict != PASS]
    assert rule == "coded bits" and "not decoded: the method 'adapt' cannot be coded" in summary
    assert audited.verdict == NOT_SHOWN
    [task] = progress.tasks
    said = [f"{finding.rule}: {finding.verdict}" for finding in findings]
    assert [remark for _, remark in task.updates] == said
    stored = json.loads(folder.audit_file.read_text())
    assert [f["rule"] for f in stored["findings"]] == [f.rule for f in findings]


def test_missing_scores_are_not_shown_and_never_a_pass(case: Case) -> None:
    empty = dataclasses.replace(case, scores={}, claims={})
    verdicts = {f.rule: f.verdict for f in run_audit(empty)}
    unshown = {"score files", "coverage", "bytes", "random text", "score before update", "order"}
    unshown |= {"script", "memorization", "reproduction", "scoring time", "coded bits"}
    assert {rule for rule, verdict in verdicts.items() if verdict == NOT_SHOWN} == unshown
    assert FAIL not in verdicts.values()


def test_a_file_over_the_cap_fails(case: Case) -> None:
    assert size(dataclasses.replace(case, limits=Limits(cap_bytes=100_000))).verdict == FAIL


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
    assert coverage(with_plain(case, change)).verdict == FAIL
    assert coverage(case).verdict == PASS


def test_a_better_denominator_fails(case: Case) -> None:
    def grow(entries: list[Entry]) -> list[Entry]:
        return [dataclasses.replace(e, num_bytes=e.num_bytes + e.num_targets) for e in entries]

    assert byte_count(with_plain(case, grow)).verdict == FAIL


def test_tokens_that_are_not_the_text_fail(case: Case) -> None:
    val = case.data.val
    tokens = np.array(val.tokens)
    tokens[5] = tokens[5] % 500 + 5
    data = dataclasses.replace(case.data, val=dataclasses.replace(val, tokens=tokens))
    finding = byte_count(dataclasses.replace(case, data=data))
    assert finding.verdict == FAIL


def test_bytes_are_counted_from_the_source_while_it_is_there(case: Case) -> None:
    finding = byte_count(case)
    assert (finding.verdict, finding.evidence["source"]) == (PASS, "read")
    manifest = case.data.manifest | {
        "inputs": [{"path": "gone.jsonl", "sha256": "", "split": "train"}]
    }
    data = dataclasses.replace(case.data, manifest=manifest)
    unread = byte_count(dataclasses.replace(case, data=data))
    assert (unread.verdict, unread.evidence["source"]) == (NOT_SHOWN, "missing")
    assert unread.evidence["decoded_bytes"] == finding.evidence["decoded_bytes"]


class Cheat(Predictor):
    """Prices of targets change by a factor; those of hints do not."""

    def factor(self, batch: Batch) -> torch.Tensor:
        raise NotImplementedError

    def price(self, batch: Batch, tokens: torch.Tensor | None = None) -> torch.Tensor:
        log_p = super().price(batch, tokens)
        log_p[:, 0] *= self.factor(batch)
        return log_p


class PeeksAhead(Cheat):
    """Prices a token better when the one after it is known."""

    def factor(self, batch: Batch) -> torch.Tensor:
        return torch.where(torch.roll(batch.targets, -1) % 2 == 0, 0.99, 1.0)


class SeesTarget(Cheat):
    """Halves the price of even tokens: the prices are no distribution."""

    def factor(self, batch: Batch) -> torch.Tensor:
        return torch.where(batch.targets % 2 == 0, 0.5, 1.0)


class ForgetsBorders(Cheat):
    """Lets a document see the size of the pack it is in."""

    def factor(self, batch: Batch) -> torch.Tensor:
        return torch.tensor(1 - 1e-4 * len(batch.targets) / 1000)


class LearnsFirst(Predictor):
    """Adapts to a batch before pricing it."""

    def price(self, batch: Batch, tokens: torch.Tensor | None = None) -> torch.Tensor:
        super().price(batch)
        super().adapt(batch)
        return super().price(batch, tokens)

    def adapt(self, batch: Batch) -> None:
        self._priced = None


@pytest.mark.parametrize(
    ("cheat", "rule"),
    [
        (PeeksAhead, behaviour.causality),
        (ForgetsBorders, behaviour.causality),
        (LearnsFirst, behaviour.causality),
        (SeesTarget, behaviour.normalization),
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
        assert (
            behaviour.score_before_update(dataclasses.replace(case, scores=scores)).verdict == FAIL
        )
    assert behaviour.score_before_update(case).verdict == PASS


def test_reading_ahead_is_seen_by_replacing_what_comes(case: Case) -> None:
    def reads_ahead(score: Score, shard: Shard, on_commit: OnCommit) -> Score:
        """Prices every document with an eye on the whole stream."""
        hint = 1 - 1e-3 * (int(shard.tokens.sum()) % 97)

        def commit(document: int, first: int, nats: np.ndarray) -> None:
            on_commit(document, first, nats * hint)

        return case.rescore(score, shard, commit)

    cheat = dataclasses.replace(case, rescore=reads_ahead)
    assert behaviour.score_before_update(cheat).verdict == FAIL
    assert behaviour.decodable_order(cheat).verdict == FAIL


def scored_with(tiny_run: TinyRun, case: Case, method: Method) -> Case:
    """The case of a few documents and one score of them, by a method of small settings."""
    artifact, _ = read_artifact(tiny_run.folder.artifact_file)
    changes = ["levers.lora_ttt={rank=4, lanes=2, group=2, lr=0.01}", "levers.tilt={order=2}"]
    levers = [change for change in changes if change.split("=")[0][7:] in method.levers]
    method, recipe = open_method(artifact.recipe, method, levers)
    val = first_documents(case.data.val, 4)
    request = ScoringRequest(method, case.runtime)
    score = run_method(dataclasses.replace(artifact, recipe=recipe), val, request)
    data = dataclasses.replace(case.data, val=val)
    return dataclasses.replace(case, data=data, scores={score.method: score})


@pytest.mark.parametrize(
    "method",
    [Method(("lora_ttt", "tilt")), Method(("tilt",), stride=64, flat=True)],
    ids=lambda method: method.label,
)
def test_methods_that_can_be_decoded_pass(tiny_run: TinyRun, case: Case, method: Method) -> None:
    mine = scored_with(tiny_run, case, method)
    for rule in (coverage, behaviour.score_before_update, behaviour.decodable_order):
        finding = rule(mine)
        assert finding.verdict == PASS, finding.summary


def test_the_published_order_cannot_be_decoded(tiny_run: TinyRun, case: Case) -> None:
    mine = scored_with(tiny_run, case, Method(("lora_ttt", "tilt"), order=PUBLISHED))
    finding = behaviour.decodable_order(mine)
    assert finding.verdict == DEVIATION
    assert finding.evidence["deviations"] == ["D1", "D2"]
    assert "no decoder could follow lora_ttt+tilt+published" in finding.summary
    assert finding.evidence["changed_prices"]["lora_ttt+tilt+published"] > 0
    # Experts follow the file, adapters the lengths: there is no order for both.
    finding = behaviour.score_before_update(mine)
    assert finding.verdict == DEVIATION
    assert finding.evidence["deviations"] == ["D3"]
    assert finding.evidence["wrong_events"] == {"lora_ttt+tilt+published": 0}
    assert finding.evidence["changed_prices"]["lora_ttt+tilt+published"] > 0
    assert overall([finding], STRICT) == FAIL
    assert overall([finding], PRECEDENT) == DEVIATION


def test_the_published_order_excuses_no_other_look_ahead(
    tiny_run: TinyRun, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = scored_with(tiny_run, case, Method(("lora_ttt", "tilt"), order=PUBLISHED))
    honest = LaneBatch.price

    def learn_first(
        self: LaneBatch, chunks: list[Chunk], hints: Hints, adapted: bool = True
    ) -> dict[int, np.ndarray]:
        honest(self, chunks, hints, adapted)
        self.learn(chunks)
        return honest(self, chunks, hints, adapted)

    monkeypatch.setattr(LaneBatch, "price", learn_first)
    assert behaviour.score_before_update(mine).verdict == FAIL


def test_a_gpu_tries_methods_on_more_and_longer_documents(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = (behaviour.probe_size(torch.device(kind)) for kind in ("cpu", "cuda:1"))
    assert few == (6, 160) and many == (24, 320)
    seen = []

    def rescore(score: Score, shard: Shard, on_commit: OnCommit) -> Score:
        seen.append((shard.num_documents, int(np.diff(shard.starts).max())))
        return case.rescore(score, shard, on_commit)

    assert behaviour.decodable_order(dataclasses.replace(case, rescore=rescore)).verdict == PASS
    assert seen[0][0] == 6 and seen[0][1] <= 160
    seen.clear()
    # What runs the method again keeps to its own device.
    runtime = Runtime(torch.device("cuda"))
    monkeypatch.setattr(behaviour, "CUDA_PROBE_DOCUMENTS", 7)
    monkeypatch.setattr(behaviour, "CUDA_PROBE_TOKENS", 200)
    other = dataclasses.replace(case, rescore=rescore, runtime=runtime)
    assert behaviour.decodable_order(other).verdict == PASS
    assert seen[0][0] == 7 and 160 < seen[0][1] <= 200


def test_hints_that_know_their_targets_fail(tiny_run: TinyRun, case: Case) -> None:
    mine = scored_with(tiny_run, case, Method(("tilt",)))
    assert behaviour.score_before_update(mine).verdict == PASS

    class Gated:
        """Silent where the target is even, as experts for words in PR 1967 are."""

        def __init__(self, expert: Expert) -> None:
            self.expert, self.strength = expert, expert.strength
            self.open = expert.open

        def propose(self, history: int, targets: np.ndarray) -> Proposals:
            found = self.expert.propose(history, targets)
            return Proposals(np.where(targets % 2 == 0, -1, found.hints), found.confidence)

    def open_mixture(score: Score) -> Mixture:
        return Mixture([Gated(e) for e in case.open_mixture(score).experts])  # type: ignore[misc]

    finding = behaviour.score_before_update(dataclasses.replace(mine, open_mixture=open_mixture))
    assert finding.verdict == FAIL
    assert finding.evidence["changed_hints"]["tilt"] > 0


def test_a_score_that_does_not_say_how_is_not_shown(case: Case) -> None:
    for how in ({}, {"products": "torch.load"}):
        plain = dataclasses.replace(case.scores["plain"], how=how)
        mine = dataclasses.replace(case, scores={"plain": plain})
        with pytest.raises(UnderparError, match="precision"):
            reproduction(dataclasses.replace(mine, repeated={}))


def test_a_codec_that_cannot_decode_fails(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> int:
        raise CodecError("the decoder did not give the documents back")

    monkeypatch.setattr(scores, "code_documents", broken)
    [finding] = [f for f in run_audit(case) if f.rule == "coded bits"]
    assert (finding.verdict, finding.rule) == (FAIL, "coded bits")
    assert "did not give" in finding.summary


def test_a_score_better_than_the_code_fails(case: Case) -> None:
    def shrink(entries: list[Entry]) -> list[Entry]:
        return [dataclasses.replace(e, bits=0.97 * e.bits) for e in entries]

    # No codec follows windows or adapters of the whole stream.
    assert coded_bits(case).verdict == NOT_SHOWN
    assert {*coded_bits(case).evidence["not_coded"]} == {*case.scores} - {"plain"}
    plain = dataclasses.replace(case, scores={"plain": case.scores["plain"]})
    assert coded_bits(plain).verdict == PASS
    assert coded_bits(with_plain(case, shrink)).verdict == FAIL
    assert reproduction(with_plain(case, shrink)).verdict == FAIL


def test_one_long_document_says_nothing_about_memorization(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_rules, "LARGEST_SHARE", 0.0)
    found = data_rules.memorization(case)
    assert found.verdict == NOT_SHOWN
    assert "one document holds" in found.summary
    assert "'underpar data build TEXT --out DATA --split-documents 4000'" in found.summary


@pytest.mark.parametrize("name", ["num_documents", "code_tokens", "num_retrained"])
def test_negative_counts_are_refused(name: str) -> None:
    with pytest.raises(UnderparError, match="-3: expected 0 or more"):
        AuditRequest(**{name: -3})


def test_a_folder_that_is_no_run_is_refused(runtime: Runtime, tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    for path in (tmp_path, tmp_path / "a file", tmp_path / "missing"):
        with pytest.raises(UnderparError, match="is not a run folder"):
            audit_run(RunFolder(path), runtime)
    assert [path.name for path in tmp_path.iterdir()] == ["a file"]


def test_scores_of_another_artifact_are_refused(
    tiny_run: TinyRun, tmp_path: Path, runtime: Runtime
) -> None:
    shutil.copytree(tiny_run.folder.path, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    stored = json.loads(folder.score_file("plain").read_text())
    folder.score_file("plain").write_text(json.dumps(stored | {"artifact_sha256": "0" * 64}))
    case = open_case(folder, runtime, AuditRequest(tiny_run.data))
    finding = score_files(case)
    assert finding.verdict == FAIL
    assert finding.evidence["wrong"] == {
        "score-plain.json": f"it scores another artifact; run 'underpar score {folder.path}' again"
    }


def test_time_with_training_text_is_training_time(case: Case) -> None:
    case = dataclasses.replace(case, spent_seconds={"train": 8.0, "calibrate": 1.5})
    for budget, verdict in ((10.0, PASS), (9.45, PASS), (9.0, FAIL), (0.0, PASS)):
        part = dataclasses.replace(case.recipe.train, budget_seconds=budget, budget_steps=30)
        recipe = dataclasses.replace(case.recipe, train=part)
        finding = training_time(dataclasses.replace(case, recipe=recipe))
        assert finding.verdict == verdict, budget
        assert "calibrate 1.5" in finding.summary


def test_a_score_fits_the_limit_of_its_recipe(case: Case) -> None:
    scores = {name: score for name, score in case.scores.items() if name == "adapt"}
    took = sum(scores["adapt"].seconds.values())
    load = scores["adapt"].seconds["load"]

    def with_limit(seconds: float) -> Finding:
        limits = dataclasses.replace(case.recipe.limits, score_seconds=seconds)
        recipe = dataclasses.replace(case.recipe, limits=limits)
        return scoring_time(dataclasses.replace(case, recipe=recipe, scores=scores))

    assert (with_limit(100 * took).verdict, with_limit(0.0).evidence["limit_seconds"]) == (
        PASS,
        600,
    )
    # Loading counts: without it the score would fit.
    found = with_limit(took - load / 2)
    assert (found.verdict, found.evidence["limit_seconds"]) == (FAIL, took - load / 2)
    assert f"adapt {took:.1f}, of them load {load:.1f}" in found.summary
    # A recipe cannot give itself more time than the auditor does.
    assert with_limit(10_000.0).evidence["limit_seconds"] == 600


def test_a_rate_over_the_whole_text_is_paid_for(case: Case) -> None:
    name, adapted = "stream_sgd", case.scores["adapt"]
    settings = {"settings": {name: {"cosine": True}}, "levers": [name], "name": ""}

    def found(side_bits: float) -> Finding:
        how = {**adapted.how, **settings}
        forged = dataclasses.replace(adapted, method=name, how=how, side_bits=side_bits)
        claims = {name: case.claims["adapt"]}
        return score_files(dataclasses.replace(case, scores={name: forged}, claims=claims))

    assert (
        "0 bits of side information do not belong"
        in found(0.0).evidence["wrong"][f"score-{name}.json"]
    )
    assert found(32.0).verdict == PASS
