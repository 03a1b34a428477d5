"""The audit of any predictor: silent about an honest toy, and each cheat is seen by its rule."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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


def test_a_predictor_that_learns_needs_one_that_does_not_to_show_isolation() -> None:
    rng = np.random.default_rng(0)
    findings = check(Toy(0), toy_text(0), rng=rng)
    assert {f.rule for f in findings if f.verdict == NOT_SHOWN} == {"isolation"}
    fixed = check(Toy(0, learns=False), toy_text(0), rng=rng)
    assert [finding.rule for finding in fixed if finding.verdict != PASS] == []


def test_a_warm_up_that_forgets_is_seen_if_it_does_not() -> None:
    """The state before the first price must be that of the untouched model."""

    class Remembers(Toy):
        def reset(self) -> None:
            shared = getattr(self, "shared", np.zeros(self.vocab_size))
            super().reset()
            self.shared = shared

    assert {"score before update", "determinism"} <= failed(check(Remembers(0), toy_text(0)))


def test_a_large_vocabulary_is_priced_in_part() -> None:
    class Large:
        vocab_size = 1000

        def __init__(self, price: float) -> None:
            self.price = price

        def score(self, documents: Sequence[np.ndarray]) -> Iterator[Commit]:
            for index, document in enumerate(documents):
                yield index, 0, np.full(len(document) - 1, self.price)

        def state_hash(self) -> str:
            return ""

    assert failed(check(Large(np.log(1000)), toy_text(0))) == set()
    # 64 tokens at a price of one in 60.
    assert failed(check(Large(np.log(60)), toy_text(0))) == {"normalization", "random text"}


@pytest.mark.parametrize("documents", [[], [np.array([0])], [np.array([0, 1]), np.array([0])]])
def test_documents_without_targets_are_refused(documents: list[np.ndarray]) -> None:
    with pytest.raises(RuleError, match="start token and one token more"):
        check(Toy(0), documents)


def test_a_predictor_that_prices_nothing_fails_by_coverage() -> None:
    class Silent(Toy):
        def score(self, documents: Sequence[np.ndarray]) -> Iterator[Commit]:
            return iter([])

    assert failed(check(Silent(0), toy_text(0))) == {"coverage"}


def test_the_example_of_the_docs_is_honest() -> None:
    text = (Path(__file__).parents[2] / "docs/audit.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    others = {finding.rule: finding.verdict for finding in names["findings"]}
    assert others.pop("isolation") == NOT_SHOWN
    assert set(others.values()) == {PASS}
