"""Experts: what they propose is what counting by hand proposes, and never a hint of the target."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from underpar.build.levers import find_lever
from underpar.errors import RecipeError
from underpar.infer import ngram, scans
from underpar.infer.experts import Proposals
from underpar.infer.ngram import CountExpert, Gate, MatchExpert, table_bits
from underpar.infer.strengths import Steady
from underpar.recipe import ModelSpec

STRENGTH = Steady(1.0)
PUBLISHED = Gate(min_count=1, min_confidence=0.8, prior=0.0)
BACK_OFF = Gate(min_count=2, min_confidence=0.3, prior=1.0)

EXPERTS: dict[str, Callable[[bool], Any]] = {
    "tilt": lambda plain: CountExpert((15,), PUBLISHED, STRENGTH, plain),
    "short": lambda plain: CountExpert((2,), PUBLISHED, STRENGTH, plain),
    "counts": lambda plain: CountExpert((1, 2, 3, 4, 5), BACK_OFF, STRENGTH, plain),
    "match": lambda plain: MatchExpert((3, 8, 16), STRENGTH, plain),
}


@pytest.fixture(params=list(EXPERTS))
def make(request: pytest.FixtureRequest) -> Callable[[bool], Any]:
    return EXPERTS[str(request.param)]


def stream(num_tokens: int, vocab: int, seed: int = 0) -> np.ndarray:
    """Zipf's law, with passages that come back."""
    rng = np.random.default_rng(seed)
    tokens = rng.zipf(1.5, num_tokens) % vocab
    for _ in range(num_tokens // 100):
        start, back = rng.integers(0, num_tokens - 40, 2)
        size = rng.integers(40)
        tokens[start : start + size] = tokens[back : back + size]
    return tokens


def run(expert: Any, turns: Iterable[tuple[int, np.ndarray]]) -> list[Proposals]:
    turns = list(turns)
    expert.open(1 + max(h for h, _ in turns), sum(len(t) for _, t in turns))
    return [expert.propose(history, tokens) for history, tokens in turns]


def turns_of(tokens: np.ndarray, num_histories: int, num_turns: int) -> list[Any]:
    return [(i % num_histories, part) for i, part in enumerate(np.array_split(tokens, num_turns))]


def assert_same(ours: list[Proposals], theirs: list[Proposals]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a.hints, b.hints)
        np.testing.assert_array_equal(a.confidence, b.confidence)


class CountsByHand:
    """The two tables as published: a count of every pair, replaced best when it is beaten."""

    def __init__(self, lengths: tuple[int, ...], gate: Gate) -> None:
        self.lengths, self.gate = sorted(lengths, reverse=True), gate
        self.totals: Counter[Any] = Counter()
        self.pairs: Counter[Any] = Counter()
        self.best: dict[Any, int] = {}
        self.histories: dict[int, list[int]] = defaultdict(list)

    def contexts(self, history: int) -> list[tuple[int, ...]]:
        past = self.histories[history]
        return [tuple(past[-n:]) for n in self.lengths if len(past) >= n]

    def look(self, history: int) -> tuple[int, float]:
        for context in self.contexts(history):
            if self.totals[context] < max(self.gate.min_count, 1):
                continue
            best = self.best[context]
            share = self.pairs[context, best] / (self.totals[context] + self.gate.prior)
            if share >= self.gate.min_confidence:
                return best, share
        return -1, 0.0

    def learn(self, history: int, token: int) -> None:
        for context in self.contexts(history):
            self.totals[context] += 1
            self.pairs[context, token] += 1
            best = self.best.setdefault(context, token)
            if self.pairs[context, token] > self.pairs[context, best]:
                self.best[context] = token
        self.histories[history].append(token)

    def propose(self, history: int, tokens: np.ndarray) -> Proposals:
        said = []
        for token in tokens.tolist():
            said.append(self.look(history))
            self.learn(history, token)
        hints, shares = zip(*said, strict=True) if said else ((), ())
        return Proposals(np.array(hints, np.int64), np.array(shares, np.float32))


@settings(deadline=None, max_examples=40)
@given(
    tokens=st.lists(st.integers(0, 3), max_size=150),
    lengths=st.sampled_from([(15,), (1,), (2,), (1, 2, 3, 4, 5), (3, 7)]),
    gate=st.sampled_from([PUBLISHED, BACK_OFF]),
    num_histories=st.integers(1, 3),
    plain=st.booleans(),
)
def test_counts_are_those_made_by_hand(
    tokens: list[int], lengths: tuple[int, ...], gate: Gate, num_histories: int, plain: bool
) -> None:
    turns = turns_of(np.array(tokens, np.int64), num_histories, 5)
    by_hand = CountsByHand(lengths, gate)
    theirs = [by_hand.propose(history, part) for history, part in turns]
    assert_same(run(CountExpert(lengths, gate, STRENGTH, plain), turns), theirs)


def test_counts_over_a_long_stream_are_those_made_by_hand() -> None:
    tokens = stream(20_000, 500)
    for lengths, gate in (((15,), PUBLISHED), ((1, 2, 3, 4, 5), BACK_OFF)):
        ours = run(CountExpert(lengths, gate, STRENGTH), [(0, tokens)])
        assert_same(ours, [CountsByHand(lengths, gate).propose(0, tokens)])
        assert 0 < np.mean(ours[0].hints >= 0) < 1


def matches_by_hand(tokens: list[int], lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    """Hint and length of the match behind it: follow while it agrees, else the longest lead."""
    said, last, expected, agreed = [], {}, None, 0
    for i, token in enumerate(tokens):
        said.append((tokens[expected], agreed) if expected is not None else (-1, 0))
        hit = expected is not None and tokens[expected] == token
        expected, agreed = (expected + 1, agreed + 1) if expected is not None and hit else (None, 0)
        for n in sorted(lengths, reverse=True):
            context = tuple(tokens[i + 1 - n : i + 1]) if i + 1 >= n else None
            if context in last and agreed < n:
                expected, agreed = last[context] + 1, n
            if context:
                last[context] = i
    return said


@pytest.mark.parametrize("seed", range(3))
def test_matches_are_those_made_by_hand(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # So many rows that no context loses its own to another.
    monkeypatch.setattr(ngram, "MIN_BITS", 24)
    tokens = stream(600, 30, seed)
    hints, agreed = np.array(matches_by_hand(tokens.tolist(), (3, 8, 16))).T
    ours = run(EXPERTS["match"](False), [(0, tokens)])[0]
    np.testing.assert_array_equal(ours.hints, hints)
    sure = 1 - 2.0 ** (-np.minimum(agreed, 16) / 5)
    np.testing.assert_allclose(ours.confidence, sure, rtol=1e-6)
    assert agreed.max() > 16


def test_a_passage_is_followed_from_one_history_into_another() -> None:
    passage = np.arange(30)
    said = run(EXPERTS["match"](False), [(0, passage), (1, passage[:20])])[1]
    np.testing.assert_array_equal(said.hints, [-1, -1, -1, *passage[3:20]])
    assert np.all(np.diff(said.confidence[3:17]) > 0)


def test_plain_and_compiled_scans_agree_bit_for_bit(make: Callable[[bool], Any]) -> None:
    for vocab in (3, 1000):
        turns = turns_of(stream(2000, vocab), 2, 7)
        plain, fast = make(True), make(False)
        assert_same(run(plain, turns), run(fast, turns))
        ours, theirs = plain.state(), fast.state()
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def suffix_changes_hints(expert: Any, num_trials: int = 40) -> bool:
    """True when another suffix ever changes what is said up to its first token (A01)."""
    rng = np.random.default_rng(1)
    tokens = stream(600, 8, 2)
    whole = run(expert, [(0, tokens)])[0]
    for _ in range(num_trials):
        t = int(rng.integers(1, len(tokens)))
        other = np.concatenate([tokens[:t], rng.integers(0, 8, len(tokens) - t)])
        said = run(expert, [(0, other)])[0]
        same = np.array_equal(said.hints[: t + 1], whole.hints[: t + 1])
        if not same or not np.array_equal(said.confidence[: t + 1], whole.confidence[: t + 1]):
            return True
    return False


def test_hints_do_not_depend_on_their_target_or_later(make: Callable[[bool], Any]) -> None:
    expert = make(False)
    assert not suffix_changes_hints(expert)
    assert (run(expert, [(0, stream(600, 8, 2))])[0].hints >= 0).any()


class GatedByTheTarget:
    """The fault of PR 1967: silent where the target is of the other class."""

    def __init__(self) -> None:
        self._expert = EXPERTS["counts"](False)
        self.open = self._expert.open

    def propose(self, history: int, targets: np.ndarray) -> Proposals:
        said = self._expert.propose(history, targets)
        return Proposals(np.where(targets % 2 == 0, said.hints, -1), said.confidence)


def test_an_expert_gated_by_its_target_is_caught() -> None:
    assert suffix_changes_hints(GatedByTheTarget())


@pytest.mark.parametrize("name", ["tilt", "match"])
def test_a_second_copy_is_proposed_in_full(name: str) -> None:
    # No context of 15 or of 3 comes twice in a permutation.
    once = np.random.default_rng(0).permutation(2000)
    hints = run(EXPERTS[name](False), [(0, np.tile(once, 2))])[0].hints
    assert np.all(hints[: len(once)] == -1)
    np.testing.assert_array_equal(hints[len(once) + 15 :], once[15:])


def test_a_full_table_ends_every_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "MAX_BITS", 12)
    tokens = np.random.default_rng(0).integers(0, 50, 20_000)
    expert = EXPERTS["counts"](False)
    said = run(expert, [(0, np.concatenate([tokens, tokens[:3000]]))])[0]
    assert len(expert.state()["taken"]) == int(ngram.LARGEST_LOAD * (1 << 12))
    # What came early is still counted and proposed.
    assert (said.hints[-3000:] >= 0).any()


def test_the_tables_of_a_stream_never_fill() -> None:
    for seed in range(3):
        tokens = np.random.default_rng(seed).integers(0, 4, 3000)
        expert = EXPERTS["counts"](False)
        run(expert, [(0, tokens)])
        assert len(expert.state()["taken"]) <= 5 * len(tokens)


def test_tables_have_the_published_size() -> None:
    assert [table_bits(n) for n in (1, 2252, 2253, 47_853_343)] == [12, 12, 13, 27]
    assert table_bits(10**12) == ngram.MAX_BITS


def test_a_state_goes_on_where_it_was_left(make: Callable[[bool], Any]) -> None:
    turns = turns_of(stream(3000, 40), 3, 12)
    expert = make(False)
    whole = run(expert, turns)
    expert.open(3, 3000)
    for history, part in turns[:6]:
        expert.propose(history, part)
    state = expert.state()
    # What was saved is not what is changed.
    run(expert, turns[::-1])
    other = make(False)
    other.open(3, 3000)
    other.load(state)
    assert_same([other.propose(h, part) for h, part in turns[6:]], whole[6:])


def test_opening_forgets(make: Callable[[bool], Any]) -> None:
    expert, turns = make(False), turns_of(stream(500, 10), 1, 1)
    assert_same(run(expert, turns), run(expert, turns))


def test_targets_may_come_as_they_lie_in_a_shard(make: Callable[[bool], Any]) -> None:
    tokens = stream(500, 10)
    narrow = tokens.astype(np.uint16)
    narrow.flags.writeable = False
    assert_same(run(make(False), [(0, narrow)]), run(make(False), [(0, tokens)]))


def test_an_expert_that_is_not_opened_holds_nothing(make: Callable[[bool], Any]) -> None:
    tables = (np.ndarray, scans.Counts, scans.Links, ngram.Histories)
    expert = make(False)
    assert not any(isinstance(value, tables) for value in vars(expert).values())
    expert.open(1, 10)
    assert any(isinstance(value, tables) for value in vars(expert).values())


def test_more_targets_than_opened_for_are_refused() -> None:
    expert = EXPERTS["match"](False)
    expert.open(1, 10)
    with pytest.raises(AssertionError, match="opened for 10 more"):
        expert.propose(0, np.arange(11))


def test_without_numba_the_scan_itself_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scans, "_numba", lambda: None)
    assert scans.compiled.__wrapped__(scans.scan_counts) is scans.scan_counts


def test_where_nothing_can_be_written_compiled_code_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NoPlace:
        @staticmethod
        def njit(cache: bool = False, nogil: bool = False) -> Callable[[Any], Any]:
            if cache:
                raise RuntimeError("cannot cache function: no locator available")
            return lambda scan: ("compiled", scan)

    monkeypatch.setattr(scans, "_numba", lambda: NoPlace)
    made = scans.compiled.__wrapped__(scans.scan_counts)
    assert made == ("compiled", scans.scan_counts)


@pytest.mark.parametrize(
    "lever, key, value",
    [
        ("tilt", "order", 1),
        ("tilt", "order", 66),
        ("tilt", "min_confidence", 1.5),
        ("tilt", "strength", "loud"),
        ("tilt", "boost", -1.0),
        ("counts", "orders", ()),
        ("counts", "orders", (1, 2)),
        ("counts", "orders", (3, 3)),
        ("counts", "min_count", 0),
        ("counts", "min_confidence", -0.1),
        ("counts", "prior", -1.0),
        ("counts", "boost", 17.0),
        ("match", "lengths", ()),
        ("match", "lengths", (8, 65)),
        ("match", "lengths", (8, 8)),
        ("match", "strength", ""),
    ],
)
def test_wrong_settings_are_named(lever: str, key: str, value: object) -> None:
    with pytest.raises(RecipeError, match=rf"^levers\.{lever}\.{key} = .*expected"):
        find_lever(lever).Settings(**{key: value})


def test_levers_plug_the_experts_they_describe() -> None:
    experts = {}
    for name in ("tilt", "counts", "match"):
        module: Any = find_lever(name)
        experts[name] = module.plug(module.Settings(), ModelSpec())
    # The published expert: the fifteen tokens before, a share of 0.8, 2.625 nats.
    assert (experts["tilt"].lengths, experts["tilt"].gate) == ((15,), PUBLISHED)
    said = run(experts["tilt"], [(0, np.tile(np.arange(20), 2))])[0]
    boost = experts["tilt"].strength.boost(said.confidence, np.zeros(40))
    np.testing.assert_array_equal(boost, np.full(40, 2.625))
    assert experts["counts"].lengths == (1, 2, 3, 4, 5)
    assert experts["match"].lengths == (8, 16, 32)
