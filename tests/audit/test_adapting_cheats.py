"""Scoring methods that look ahead: score and audit both run with the fault, and a rule sees it.

Lanes and adapters are the method here. `mutants/` has the other case: the scorer cheats and the
auditor's package is honest.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tiny import TinyRun
from underpar.audit.behaviour import causality, normalization
from underpar.audit.case import Case
from underpar.audit.finding import FAIL, PASS, Finding
from underpar.audit.rules import RULES
from underpar.build.artifact import read_artifact
from underpar.build.scoring import ScoringRequest, open_method, run_method
from underpar.core.runtime import Runtime
from underpar.data.batch import pack_documents
from underpar.levers.smear import Lever as Smear
from underpar.score.method import Method
from underpar.score.ttt import scorer
from underpar.score.ttt.lanes import Hints, LaneBatch
from underpar.score.ttt.schedule import Chunk, ChunkSizes
from underpar.score.ttt.scorer import DocumentScorer
from underpar.seams import BOS_ID
from underpar.stages.audit import AuditRequest, open_case

Patch = Callable[[pytest.MonkeyPatch], None]
LORA = "levers.lora_ttt={rank=4, lanes=2, lr=0.02, chunk=16}"


@pytest.fixture(scope="module")
def case(tiny_run: TinyRun, runtime: Runtime) -> Case:
    """The tiny run with one score, by two lanes whose adapters learn fast."""
    case = open_case(tiny_run.folder, runtime, AuditRequest(tiny_run.data, seed=0))
    artifact, _ = read_artifact(tiny_run.folder.artifact_file)
    method, recipe = open_method(artifact.recipe, Method(("lora_ttt",)), [LORA])
    artifact = dataclasses.replace(artifact, recipe=recipe)
    score = run_method(artifact, case.data.val, ScoringRequest(method, runtime))
    return dataclasses.replace(case, scores={score.method: score})


def verdict(case: Case, rule: str) -> str:
    """The verdict of one rule; every call draws the same places."""
    return RULES[rule](dataclasses.replace(case, rng=np.random.default_rng(1))).verdict


@pytest.mark.parametrize("rule", ["score before update", "order"])
def test_honest_lanes_pass(case: Case, rule: str) -> None:
    assert verdict(case, rule) == PASS


def learn_from(shift: int) -> Patch:
    """Adapters learn from a chunk before a lane prices it: from its own, or its neighbour's."""

    def patch(patch: pytest.MonkeyPatch) -> None:
        honest = LaneBatch.price

        def ahead(
            self: LaneBatch, chunks: Sequence[Chunk], hints: Hints, adapted: bool = True
        ) -> dict[int, np.ndarray]:
            honest(self, chunks, hints, adapted)
            if self._grads is not None:
                self._grads = self._grads.roll(shift, 0)
                self.learn(chunks)
            return honest(self, chunks, hints, adapted)

        patch.setattr(LaneBatch, "price", ahead)

    return patch


def scale_by(number_of: Callable[[DocumentScorer, int], int]) -> Patch:
    """Adapters are stronger or weaker by a number that belongs to a later document."""

    def patch(patch: pytest.MonkeyPatch) -> None:
        honest = DocumentScorer._predict

        def ahead(self: DocumentScorer, batch: LaneBatch, rows: Sequence[Chunk], *rest: Any) -> Any:
            for chunk in rows:
                later = min(chunk.document + len(rows), self.shard.num_documents - 1)
                factor = 1 + (number_of(self, later) % 7) / 7
                with torch.no_grad():
                    lora = batch.lora
                    lora.work[chunk.lane] = lora.weights[chunk.lane] * lora.root * factor
            return honest(self, batch, rows, *rest)

        patch.setattr(DocumentScorer, "_predict", ahead)

    return patch


def shortest_first(patch: pytest.MonkeyPatch) -> None:
    """A free lane takes the shortest document that waits, as if its length were known."""
    honest = scorer.stream_schedule

    def sorted_schedule(
        num_targets: Sequence[int], num_lanes: int, sizes: ChunkSizes
    ) -> Iterator[list[Chunk]]:
        order = sorted(range(len(num_targets)), key=num_targets.__getitem__)
        for step in honest([num_targets[document] for document in order], num_lanes, sizes):
            yield [dataclasses.replace(chunk, document=order[chunk.document]) for chunk in step]

    patch.setattr(scorer, "stream_schedule", sorted_schedule)


def length_of(scorer: DocumentScorer, document: int) -> int:
    return len(scorer.doc(document))


def first_token_of(scorer: DocumentScorer, document: int) -> int:
    return int(scorer.doc(document)[1])


CHEATS: dict[str, tuple[Patch, str]] = {
    "learns from a target before its price": (learn_from(0), "score before update"),
    "learns from the neighbour's lane": (learn_from(1), "score before update"),
    "knows how long a later document is": (scale_by(length_of), "order"),
    "knows how a later document begins": (scale_by(first_token_of), "score before update"),
    "takes the shortest document first": (shortest_first, "order"),
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_method_that_looks_ahead_fails(
    case: Case, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch, rule = CHEATS[name]
    patch(monkeypatch)
    assert verdict(case, rule) == FAIL


@pytest.mark.parametrize(("ahead", "rule"), [(1, normalization), (2, causality)])
def test_a_leak_that_the_neutral_state_hides_fails(
    case: Case,
    ahead: int,
    rule: Callable[[Case], Finding],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lever reads the target, or the token after it, with a strength that begins at 0."""
    case = dataclasses.replace(case, scores={})
    document = np.array(case.data.val.doc(0))[:40]

    def neutral_prices() -> torch.Tensor:
        # Hooks are bound when a predictor is opened.
        predictor = case.open_predictor()
        with torch.no_grad():
            predictor.model.levers["smear"].neutral_()
        return predictor.price(pack_documents([document], BOS_ID, predictor.context)[0])

    honest, prices = Smear.embed, neutral_prices()
    assert rule(case).verdict == PASS

    def reads_on(self: Smear, x: torch.Tensor, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        inside = honest(self, x, tokens, cache)
        return inside + 0.1 * self.strength * torch.roll(x, -ahead, dims=0)

    monkeypatch.setattr(Smear, "embed", reads_on)
    assert torch.equal(neutral_prices(), prices)
    assert rule(case).verdict == FAIL
