"""The audit of any predictor: silent about an honest toy, and each cheat is seen by its rule."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from toy import Toy, toy_text
from underpar.audit.finding import FAIL, NOT_SHOWN, PASS, Finding
from underpar.audit.protocol import check
from underpar.audit.traces import Commit
from underpar.errors import RuleError

# The rules that must see each cheat (section 6.5 of the field guide); others may see it too.
CHEATS: dict[str, set[str]] = {
    "gated hint": {"normalization"},
    "counts first": {"normalization", "random text", "score before update"},
    "boost": {"normalization"},
    "bucket ratio": {"normalization"},
    "learns first": {"score before update", "random text", "causality"},
    "second epoch": {"score before update", "causality", "random text"},
    "slot": {"causality", "normalization", "random text"},
    "better of two": {"normalization"},
    "chunks by length": {"order"},
    "learns the next document": {"score before update", "causality"},
    "twice and dropped": {"coverage"},
    "smear": {"isolation"},
    "random order": {"determinism"},
    "sorts by length": {"order"},
    "knows the end": {"order"},
    "warm-up": {"score before update", "causality"},
    "peeks": {"causality"},
}


def audit(seed: int, cheat: str = "") -> list[Finding]:
    return check(
        Toy(seed, cheat),
        toy_text(seed),
        uniform=Toy(seed, cheat, is_uniform=True),
        frozen=Toy(seed, cheat, learns=False),
        rng=np.random.default_rng(seed),
    )


def failed(findings: list[Finding]) -> set[str]:
    return {finding.rule for finding in findings if finding.verdict == FAIL}


@pytest.mark.parametrize("seed", range(5))
def test_an_honest_toy_passes_every_rule(seed: int) -> None:
    findings = audit(seed)
    assert [(f.rule, f.summary) for f in findings if f.verdict != PASS] == []
    assert len(findings) == 8


@pytest.mark.slow
def test_an_honest_toy_passes_with_a_hundred_seeds() -> None:
    assert [(seed, failed(audit(seed))) for seed in range(5, 105) if failed(audit(seed))] == []


@pytest.mark.parametrize("cheat", CHEATS)
def test_each_cheat_is_seen_by_its_rules(cheat: str) -> None:
    assert CHEATS[cheat] <= failed(audit(1, cheat))
