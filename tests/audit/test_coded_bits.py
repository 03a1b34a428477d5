"""The audit decodes an adapted score: the first documents, by the method of the score."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tiny_codec import ALONE, POEM, tiny_artifact, tiny_codec
from underpar.audit.finding import FAIL, NOT_SHOWN, PASS
from underpar.audit.scores import coded_bits
from underpar.build.adaptation import adaptation_for
from underpar.build.scoring import ScoringRequest, method_of, open_method, run_method
from underpar.data.shards import Shard
from underpar.data.texts import shard_of
from underpar.score.ledger import Score
from underpar.score.method import ADAPT, PLAIN, Method


@pytest.fixture(scope="module")
def shard() -> Shard:
    texts = [line * 4 for line in (POEM * 2).split(b"|") if line]
    tokens = [np.append(1, tiny_codec().tokenizer.encode(text)) for text in texts]
    return shard_of(texts, tokens)


def scored(method: Method, shard: Shard, *changes: str) -> Score:
    artifact = tiny_artifact()
    method, recipe = open_method(artifact.recipe, method, changes)
    artifact = dataclasses.replace(artifact, recipe=recipe)
    return run_method(artifact, shard, ScoringRequest(method, ALONE))


def case_of(shard: Shard, adapt: Score, code_tokens: int) -> Any:
    artifact = tiny_artifact()
    return SimpleNamespace(
        scores={"plain": scored(PLAIN, shard), "adapt": adapt},
        data=SimpleNamespace(val=shard),
        codec=tiny_codec(),
        open_adaptation=lambda score: adaptation_for(
            artifact, *method_of(score, artifact.recipe), ALONE
        ),
        code_tokens=code_tokens,
        rng=np.random.default_rng(0),
    )


@pytest.mark.parametrize(("code_tokens", "num_coded"), [(0, 7), (4 * 150, 2)])
def test_an_adapted_score_decodes(shard: Shard, code_tokens: int, num_coded: int) -> None:
    adapt = scored(ADAPT, shard)
    finding = coded_bits(case_of(shard, adapt, code_tokens))
    assert finding.verdict == PASS, finding.summary
    row = finding.evidence["scores"]["adapt"]
    assert row["chosen"] == list(range(num_coded))
    assert row["coded_bits"] == pytest.approx(row["scored_bits"], abs=20)
    better = [dataclasses.replace(e, bits=0.7 * e.bits) for e in adapt.entries]
    forged = dataclasses.replace(adapt, entries=better)
    finding = coded_bits(case_of(shard, forged, code_tokens))
    assert finding.verdict == FAIL and "adapt" in finding.summary


def test_a_score_with_experts_decodes_as_a_whole(shard: Shard) -> None:
    tilted = scored(Method(("lora_ttt", "tilt")), shard, "levers.tilt.order=2")
    case = case_of(shard, tilted, 0)
    finding = coded_bits(case)
    assert finding.verdict == PASS, finding.summary
    row = finding.evidence["scores"]["adapt"]
    # The number of targets takes 32 bits.
    assert row["coded_bits"] == pytest.approx(row["scored_bits"] + 32, abs=20)
    assert row["scored_bits"] != pytest.approx(case.scores["plain"].bits, rel=1e-3)
    part = coded_bits(case_of(shard, tilted, 4 * 150))
    assert part.verdict == NOT_SHOWN
    assert "only the whole text" in part.evidence["not_coded"]["adapt"]


def test_a_score_that_no_codec_follows_is_named(shard: Shard) -> None:
    fresh = scored(ADAPT, shard, "levers.lora_ttt.keys=fresh")
    finding = coded_bits(case_of(shard, fresh, 0))
    assert finding.verdict == NOT_SHOWN and "not decoded: " in finding.summary
    stopped = dataclasses.replace(scored(ADAPT, shard), stopped_at=3)
    finding = coded_bits(case_of(shard, stopped, 0))
    assert finding.verdict == NOT_SHOWN
    assert "stopped learning by its clock" in finding.evidence["not_coded"]["adapt"]
