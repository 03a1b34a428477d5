"""Tilts: one distribution whatever is proposed, and strengths that learn after the commit alone."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from underpar.build.levers import find_lever
from underpar.infer.experts import Proposals
from underpar.infer.ngram import CountExpert, Gate, MatchExpert
from underpar.infer.strengths import Hedge, Steady, make_strength
from underpar.infer.tilt import Mixture, join, tilted
from underpar.recipe import ModelSpec

VOCAB = 16
SEEDS = st.integers(0, 2**32 - 1)


def random_log_p(rng: np.random.Generator, *shape: int) -> np.ndarray:
    logits = 4 * rng.standard_normal(shape)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def experts(*kinds: str) -> list[Any]:
    """Counts, a match and longer counts, with these strengths."""
    gate = Gate(min_count=1, min_confidence=0.2, prior=0.5)
    strengths = [make_strength(kind, 1.5) for kind in kinds]
    makers = [
        lambda strength: CountExpert((1, 2), gate, strength),
        lambda strength: MatchExpert((2, 4), strength),
        lambda strength: CountExpert((3,), gate, strength),
    ]
    return [make(strength) for make, strength in zip(makers, strengths, strict=False)]


def columns(log_p: np.ndarray, targets: np.ndarray, proposals: Proposals) -> np.ndarray:
    """What the model is asked for (n, 1 + K): the target and every hint; 0 where there is none."""
    tokens = np.concatenate([targets[:, None], proposals.hints], axis=1)
    return np.where(tokens < 0, 0.0, np.take_along_axis(log_p, np.maximum(tokens, 0), axis=1))


def price(mixture: Mixture, log_p: np.ndarray, targets: np.ndarray, history: int = 0) -> np.ndarray:
    proposals = mixture.propose(history, targets)
    return mixture.price(proposals, targets, columns(log_p, targets, proposals))


@settings(deadline=None, max_examples=50)
@given(seed=SEEDS, boost=st.floats(-2, 16))
def test_a_tilt_is_what_its_definition_says(seed: int, boost: float) -> None:
    rng = np.random.default_rng(seed)
    log_p, hint = random_log_p(rng, VOCAB), int(rng.integers(VOCAB))
    everything = np.arange(VOCAB)[None]
    ours = tilted(log_p[None], everything, np.array([hint]), log_p[hint][None], np.array([boost]))[
        0
    ]
    assert abs(np.exp(ours).sum() - 1) < 1e-12
    raised = np.exp(log_p + boost * (np.arange(VOCAB) == hint))
    np.testing.assert_allclose(ours, np.log(raised / raised.sum()), rtol=0, atol=1e-11)
    others = np.arange(VOCAB) != hint
    np.testing.assert_allclose(np.ptp((ours - log_p)[others]), 0, atol=1e-12)


def test_no_boost_changes_nothing() -> None:
    log_p = random_log_p(np.random.default_rng(0), 5, 3)
    hints = np.arange(5)
    still = tilted(log_p, np.zeros((5, 3), np.int64), hints, log_p[:, 0], np.zeros(5))
    np.testing.assert_array_equal(still, log_p)


def test_a_probability_over_one_by_rounding_is_one() -> None:
    above, one = (
        tilted(np.array([[x]]), np.array([[2]]), np.array([2]), np.array([x]), np.array([3.0]))
        for x in (1e-6, 0.0)
    )
    np.testing.assert_allclose(above - 1e-6, one, atol=1e-12)


@pytest.mark.parametrize("kinds", [("fixed",), ("confidence", "hedge"), ("hedge",) * 3])
def test_the_price_of_a_target_is_its_share_of_one(kinds: Sequence[str]) -> None:
    """A02: at every target, the prices of all tokens in its place sum to one."""
    rng = np.random.default_rng(0)
    mixture = Mixture(experts(*kinds))
    mixture.open(1, 400)
    num_tilted = 0
    for start in range(0, 200, 10):
        log_p, targets = random_log_p(rng, 10, VOCAB), rng.integers(0, 4, 10)
        before = copy.deepcopy(mixture)
        paid = price(mixture, log_p, targets)
        mixture.settle()
        at = int(rng.integers(10))
        total = 0.0
        for token in range(VOCAB):
            other = copy.deepcopy(before)
            instead = np.append(targets[:at], token)
            total += math.exp(price(other, log_p[: at + 1], instead)[-1])
        assert abs(total - 1) < 1e-12, start
        said = copy.deepcopy(before).propose(0, targets)
        here = Proposals(said.hints[at : at + 1], said.confidence[at : at + 1])
        whole = before.distribution(here, log_p[at])
        assert abs(np.exp(whole).sum() - 1) < 1e-12
        assert whole[targets[at]] == pytest.approx(paid[at], abs=1e-12)
        num_tilted += not np.array_equal(whole, log_p[at])
    assert num_tilted > 10


class GatedByTheTarget:
    """The fault of PR 1967: silent where the target is of the other class."""

    def __init__(self) -> None:
        self._expert = experts("fixed")[0]
        self.strength = self._expert.strength
        self.open = self._expert.open

    def propose(self, history: int, targets: np.ndarray) -> Proposals:
        said = self._expert.propose(history, targets)
        return Proposals(np.where(targets % 2 == 0, said.hints, -1), said.confidence)


def test_an_expert_gated_by_its_target_does_not_sum_to_one() -> None:
    mixture: Any = Mixture([GatedByTheTarget()])  # type: ignore[list-item]
    mixture.open(1, 100)
    cache, log_p = np.zeros(50, np.int64), np.full((51, VOCAB), -math.log(VOCAB))
    prices = [price(copy.deepcopy(mixture), log_p, np.append(cache, a))[-1] for a in range(VOCAB)]
    assert abs(np.exp(prices).sum() - 1) > 1e-3


def test_experts_tilt_in_turn() -> None:
    rng = np.random.default_rng(3)
    first, second = experts("fixed", "confidence")
    log_p, targets = random_log_p(rng, 60, VOCAB), rng.integers(0, 3, 60)
    both = Mixture([first, second])
    both.open(1, 60)
    proposals = both.propose(0, targets)
    paid = both.price(proposals, targets, columns(log_p, targets, proposals))
    for t in range(60):
        p = np.exp(log_p[t])
        for k, nats in enumerate((1.5, 1.5 * float(proposals.confidence[t, 1]))):
            if proposals.hints[t, k] >= 0:
                p[proposals.hints[t, k]] *= math.exp(nats)
                p /= p.sum()
        assert paid[t] == pytest.approx(math.log(p[targets[t]]), abs=1e-10)
    assert (proposals.hints >= 0).all(axis=1).any()


@settings(deadline=None, max_examples=40)
@given(seed=SEEDS, right=st.floats(0, 1), log_p=st.floats(-12, -1e-3))
def test_a_hedge_costs_no_more_than_its_prior(seed: int, right: float, log_p: float) -> None:
    """One target a commit, one bucket: within ln(1 / prior) of every boost, so of none at all."""
    hits = np.random.default_rng(seed).random(200) < right
    hedge, one = Hedge(), np.ones(1, np.float32)
    prior = np.exp(hedge.state()["log_weights"][0])
    assert prior.sum() == pytest.approx(1)
    assert prior[hedge.GRID == 0] == pytest.approx(0.5)
    gains, given_p = 0.0, np.array([log_p])
    q = math.exp(log_p)
    for hit in hits:
        boost = float(hedge.boost(one, given_p)[0])
        gains += boost * hit - math.log1p(q * math.expm1(boost))
        hedge.settle(one, given_p, np.array([hit]))
    alone = hits.sum() * hedge.GRID - len(hits) * np.log1p(q * np.expm1(hedge.GRID))
    assert np.all(gains >= alone + np.log(prior) - 1e-9)


def test_a_hedge_is_the_mixture_of_its_tilts() -> None:
    rng = np.random.default_rng(0)
    hedge = Hedge()
    confidence = rng.random(300).astype(np.float32)
    log_p = -rng.exponential(3, 300)
    hedge.settle(confidence[:200], log_p[:200], rng.random(200) < 0.5)
    weights = np.exp(hedge.state()["log_weights"][hedge.buckets(confidence, log_p)])
    weights /= weights.sum(axis=1, keepdims=True)
    q = np.exp(log_p)[:, None]
    of_hint = (weights * q * np.exp(hedge.GRID) / (1 + q * np.expm1(hedge.GRID))).sum(axis=1)
    hints = np.zeros(300, np.int64)
    boost = hedge.boost(confidence, log_p)
    ours = tilted(log_p[:, None], hints[:, None], hints, log_p, boost)[:, 0]
    np.testing.assert_allclose(np.exp(ours), of_hint, rtol=1e-10)


def test_a_hedge_learns_the_boost_that_pays_where_it_pays() -> None:
    rng = np.random.default_rng(0)
    hedge = Hedge()
    sure, log_p = np.ones(2000, np.float32), np.full(2000, math.log(0.1))
    hedge.settle(sure, log_p, rng.random(2000) < 0.8)
    # The best boost, from the odds of being right and of the model's.
    best = math.log(0.8 / 0.2) - math.log(0.1 / 0.9)
    assert hedge.boost(sure[:1], log_p[:1])[0] == pytest.approx(best, abs=0.6)
    fresh = Hedge().boost(sure[:1], np.array([-3.0]))
    assert hedge.boost(sure[:1], np.array([-6.0]))[0] != hedge.boost(sure[:1], log_p[:1])[0]
    assert hedge.boost(sure[:1] / 2, np.array([-3.0])) == fresh
    hedge.settle(sure / 2, np.full(2000, -3.0), np.zeros(2000, bool))
    assert hedge.boost(sure[:1] / 2, np.array([-3.0]))[0] < 0


def test_every_confidence_and_probability_has_a_bucket() -> None:
    confidence = np.array([0, 0.3, 0.5, 0.99, 1, 1], np.float32)
    log_p = np.array([-np.inf, -800, -1, -1e-20, 0.0, 1e-7])
    hedge = Hedge()
    assert np.isfinite(hedge.boost(confidence, log_p)).all()
    hedge.settle(confidence, log_p, np.ones(6, bool))
    assert np.isfinite(hedge.state()["log_weights"]).all()
    assert len(set(hedge.buckets(confidence, log_p).tolist())) == 4


def test_strengths_learn_after_the_commit_alone() -> None:
    rng = np.random.default_rng(0)
    mixture = Mixture(experts("hedge", "hedge"))
    mixture.open(1, 200)
    log_p, targets = random_log_p(rng, 100, VOCAB), rng.integers(0, 2, 100)

    def weights() -> list[np.ndarray]:
        return [e.strength.state()["log_weights"] for e in mixture.experts]

    prior = weights()
    price(mixture, log_p, targets)
    assert all(np.array_equal(a, b) for a, b in zip(weights(), prior, strict=True))
    with pytest.raises(AssertionError, match="not been settled"):
        price(mixture, log_p, targets)
    with pytest.raises(AssertionError, match="not been settled"):
        mixture.state()
    mixture.settle()
    assert not any(np.array_equal(a, b) for a, b in zip(weights(), prior, strict=True))
    with pytest.raises(AssertionError, match="nothing has been priced"):
        mixture.settle()
    mixture.open(1, 200)
    assert all(np.array_equal(a, b) for a, b in zip(weights(), prior, strict=True))


def test_several_histories_are_priced_at_once() -> None:
    rng = np.random.default_rng(0)
    log_p, targets = random_log_p(rng, 90, VOCAB), rng.integers(0, 3, 90)
    paid = []
    for at_once in (True, False):
        mixture = Mixture(experts("fixed", "confidence", "fixed"))
        mixture.open(3, 90)
        parts = [mixture.propose(lane, targets[30 * lane : 30 * lane + 30]) for lane in range(3)]
        groups = [join(parts)] if at_once else parts
        start = 0
        for proposals in groups:
            rows = slice(start, start + len(proposals.hints))
            asked = columns(log_p[rows], targets[rows], proposals)
            paid.append(mixture.price(proposals, targets[rows], asked))
            mixture.settle()
            start = rows.stop
    np.testing.assert_array_equal(paid[0], np.concatenate(paid[1:]))


def test_a_mixture_goes_on_from_its_state() -> None:
    rng = np.random.default_rng(0)
    log_p, targets = random_log_p(rng, 300, VOCAB), rng.integers(0, 3, 300)

    def go_on(mixture: Mixture, start: int, stop: int) -> list[np.ndarray]:
        paid = []
        for t in range(start, stop, 30):
            paid.append(price(mixture, log_p[t : t + 30], targets[t : t + 30], t % 2))
            mixture.settle()
        return paid

    whole = Mixture(experts("hedge", "hedge", "fixed"))
    whole.open(2, 300)
    go_on(whole, 0, 150)
    state = whole.state()
    rest = go_on(whole, 150, 300)
    other = Mixture(experts("hedge", "hedge", "fixed"))
    other.open(2, 300)
    other.load(state)
    np.testing.assert_array_equal(go_on(other, 150, 300), rest)


def test_no_experts_price_as_the_model_does() -> None:
    mixture = Mixture([])
    mixture.open(1, 3)
    targets, log_p = np.array([1, 2, 3]), np.array([[-1.0], [-2.0], [-0.5]])
    proposals = mixture.propose(0, targets)
    assert proposals.hints.shape == (3, 0)
    np.testing.assert_array_equal(mixture.price(proposals, targets, log_p), log_p[:, 0])
    mixture.settle()
    assert mixture.state() == {}


@pytest.mark.parametrize("name", ["tilt", "counts", "match"])
def test_neutral_settings_price_as_the_model_does(name: str) -> None:
    module: Any = find_lever(name)
    mixture = Mixture([module.plug(module.NEUTRAL, ModelSpec())])
    mixture.open(1, 100)
    targets = np.tile(np.arange(VOCAB), 6)
    log_p = random_log_p(np.random.default_rng(0), len(targets), VOCAB)
    expected = log_p[np.arange(len(targets)), targets]
    np.testing.assert_array_equal(price(mixture, log_p, targets), expected)


def all_levers() -> Mixture:
    modules: list[Any] = [find_lever(name) for name in ("tilt", "match", "counts")]
    return Mixture([module.plug(module.Settings(), ModelSpec()) for module in modules])


def saved_bits(mixture: Mixture, tokens: np.ndarray, vocab: int) -> np.ndarray:
    """Bits (n,) below a uniform model's, in commits of 256 targets of one history."""
    mixture.open(1, len(tokens))
    paid = []
    for start in range(0, len(tokens), 256):
        part = tokens[start : start + 256]
        proposals = mixture.propose(0, part)
        log_p = np.full((len(part), 1 + proposals.hints.shape[1]), -math.log(vocab))
        paid.append(mixture.price(proposals, part, log_p))
        mixture.settle()
    return np.concatenate(paid) / math.log(2) + math.log2(vocab)


def test_noise_cannot_be_compressed_but_its_copy_can() -> None:
    """K2 and K4: uniform tokens from 64; for a legal price P(saved > s bits) <= 2^-s."""
    once = np.random.default_rng(0).integers(0, 64, 20_000)
    saved = saved_bits(all_levers(), np.tile(once, 2), 64)
    assert saved[: len(once)].sum() < 40
    # Next to nothing is lost, either: less than a hundredth of a bit a target.
    assert saved[: len(once)].sum() > -0.01 * len(once)
    assert saved[len(once) :].sum() > 5 * len(once)


def test_steady_strengths() -> None:
    confidence = np.array([0.25, 1.0], np.float32)
    np.testing.assert_array_equal(Steady(2.0).boost(confidence, np.zeros(2)), [2.0, 2.0])
    np.testing.assert_array_equal(Steady(2.0, True).boost(confidence, np.zeros(2)), [0.5, 2.0])
    assert isinstance(make_strength("hedge", 0.0), Hedge)
