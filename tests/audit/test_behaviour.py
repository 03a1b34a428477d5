"""Prices through whole methods: sums over all tokens, and random text that saves nothing."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tiny import TinyRun
from underpar.audit import behaviour
from underpar.audit.case import Case
from underpar.audit.finding import FAIL, PASS, Finding
from underpar.audit.probes import first_documents
from underpar.build.artifact import read_artifact
from underpar.build.scoring import ScoringRequest, open_method, run_method
from underpar.core.runtime import Runtime
from underpar.infer.experts import Proposals
from underpar.infer.ngram import CountExpert
from underpar.infer.tilt import Mixture
from underpar.score.method import Method
from underpar.score.scorer import Scorer
from underpar.score.ttt.lanes import Hints, LaneBatch
from underpar.score.ttt.schedule import Chunk
from underpar.stages.audit import AuditRequest, open_case

LEVERS = ["levers.lora_ttt={rank=4, lanes=2, lr=0.02, chunk=16}", "levers.tilt={order=3}"]
TILT, LORA = Method(("tilt",)), Method(("lora_ttt", "tilt"))
# The experts of PR 1219, and two more one after the other.
EXPERTS = Method(("ngram", "match", "counts"))
RULES = {
    "normalization": behaviour.normalization,
    "random text": behaviour.random_text_saves_nothing,
}


@pytest.fixture(scope="module")
def cases(tiny_run: TinyRun, runtime: Runtime) -> dict[str, Case]:
    """A case with one score per method."""
    case = open_case(tiny_run.folder, runtime, AuditRequest(tiny_run.data, seed=0))
    artifact, _ = read_artifact(tiny_run.folder.artifact_file)
    made = {}
    for method in (Method(), TILT, LORA, EXPERTS, Method(("adapt_scales",))):
        changes = [line for line in LEVERS if line.split("=")[0][7:] in method.levers]
        opened, recipe = open_method(artifact.recipe, method, changes)
        val = first_documents(case.data.val, 2)
        request = ScoringRequest(opened, runtime)
        score = run_method(dataclasses.replace(artifact, recipe=recipe), val, request)
        made[method.label] = dataclasses.replace(case, scores={score.method: score})
    return made


@pytest.mark.parametrize("label", ["plain", "tilt", "lora_ttt+tilt", EXPERTS.label, "adapt_scales"])
@pytest.mark.parametrize("rule", RULES)
def test_honest_methods_pass(cases: dict[str, Case], label: str, rule: str) -> None:
    finding = RULES[rule](cases[label])
    assert finding.verdict == PASS, finding.summary


def verdicts(case: Case) -> set[str]:
    """The rules that fail."""
    return {name for name, rule in RULES.items() if rule(case).verdict == FAIL}


def test_a_boost_without_its_share_is_caught(
    cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unnormalized(
        log_p: np.ndarray, tokens: np.ndarray, hints: np.ndarray, _: np.ndarray, boost: np.ndarray
    ) -> np.ndarray:
        result: np.ndarray = log_p + boost[:, None] * (tokens == hints[:, None])
        return result

    monkeypatch.setattr("underpar.infer.tilt.tilted", unnormalized)
    for method in (TILT, LORA, EXPERTS):
        assert "normalization" in verdicts(cases[method.label])


def test_counts_that_know_their_target_are_caught(
    cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = CountExpert.propose

    def counted_first(self: CountExpert, history: int, targets: np.ndarray) -> Proposals:
        proposals = honest(self, history, targets)
        return Proposals(np.asarray(targets), np.ones_like(proposals.confidence))

    monkeypatch.setattr(CountExpert, "propose", counted_first)
    assert verdicts(cases["tilt"]) == set(RULES)


def test_the_better_of_two_predictors_is_caught(
    cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Mixture.price

    def better(self: Mixture, proposals: Proposals, targets: np.ndarray, log_p: Any) -> np.ndarray:
        return np.maximum(honest(self, proposals, targets, log_p), np.asarray(log_p)[:, 0])

    monkeypatch.setattr(Mixture, "price", better)
    assert "normalization" in verdicts(cases["tilt"])


def test_adapters_fitted_to_what_they_price_are_caught(
    cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = LaneBatch.price

    def fitted(
        self: LaneBatch, chunks: list[Chunk], hints: Hints, adapted: bool = True
    ) -> dict[int, np.ndarray]:
        honest(self, chunks, hints, adapted)
        self.learn(chunks)
        return honest(self, chunks, hints, adapted)

    monkeypatch.setattr(LaneBatch, "price", fitted)
    assert "normalization" in verdicts(cases["lora_ttt+tilt"])


def test_a_scorer_that_shrinks_its_prices_is_caught(
    cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Scorer._log_p

    def shrunk(self: Scorer, *args: Any) -> np.ndarray:
        return 0.97 * honest(self, *args)

    monkeypatch.setattr(Scorer, "_log_p", shrunk)
    assert verdicts(cases["plain"]) == set(RULES)


@pytest.mark.parametrize(
    "rule", [behaviour.causality, behaviour.normalization], ids=lambda rule: rule.__name__
)
def test_no_two_audits_try_the_same_positions(
    tiny_run: TinyRun, runtime: Runtime, rule: Callable[[Case], Finding]
) -> None:
    """Otherwise a scorer could know the text of the experiments."""
    cases = [open_case(tiny_run.folder, runtime, AuditRequest(tiny_run.data)) for _ in range(2)]
    key = "cuts" if rule is behaviour.causality else "prefix_tokens"
    first, second = (rule(dataclasses.replace(c, scores={})).evidence[key] for c in cases)
    assert first != second
