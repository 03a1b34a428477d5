"""Experts: what they propose is what counting by hand proposes, and never a hint of the target."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from underpar.build.levers import find_lever
from underpar.errors import RecipeError, RuleError
from underpar.infer import ngram, scans
from underpar.infer.experts import Proposals
from underpar.infer.ngram import CountExpert, Gate, MatchExpert, WordExpert, table_bits
from underpar.infer.panel import Panel
from underpar.infer.strengths import Steady
from underpar.infer.tilt import Mixture
from underpar.recipe import ModelSpec

STRENGTH = Steady(1.0)
PUBLISHED = Gate(min_count=1, min_confidence=0.8, prior=0.0)
BACK_OFF = Gate(min_count=2, min_confidence=0.3, prior=1.0)

# A third of all tokens start a word, and token 0 stands outside of words, as BOS does.
PIECES = [b"", *(b" a" if token % 3 == 1 else b"a" for token in range(1, 1000))]
OFTEN = Gate(min_count=1, min_confidence=0.25, prior=0.0)


def of_words(num_words: int, plain: bool, nats: float = 1.0) -> WordExpert:
    expert = WordExpert(num_words, OFTEN, Steady(nats), plain)
    expert.read_pieces(PIECES)
    return expert


def panel(plain: bool, bonus: float = 0.5) -> Panel:
    gates = {2: Gate(2, 0.7, 0.0), 3: Gate(1, 0.6, 0.0)}
    tokens = CountExpert((2, 3), gates, Steady(1.0, by_confidence=True), plain)
    return Panel([tokens, of_words(0, plain, 0.55), of_words(2, plain, 0.5)], 1.0, bonus)


EXPERTS: dict[str, Callable[[bool], Any]] = {
    "tilt": lambda plain: CountExpert((15,), PUBLISHED, STRENGTH, plain),
    "short": lambda plain: CountExpert((2,), PUBLISHED, STRENGTH, plain),
    "counts": lambda plain: CountExpert((1, 2, 3, 4, 5), BACK_OFF, STRENGTH, plain),
    "match": lambda plain: MatchExpert((3, 8, 16), STRENGTH, plain),
    "word": lambda plain: of_words(0, plain),
    "start": lambda plain: of_words(2, plain),
    "panel": panel,
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


class TableByHand:
    """The two tables as published: a count of every pair, replaced best when it is beaten."""

    def __init__(self) -> None:
        self.totals: Counter[Any] = Counter()
        self.pairs: Counter[Any] = Counter()
        self.best: dict[Any, int] = {}

    def ask(self, context: Any, gate: Gate) -> tuple[int, float]:
        if self.totals[context] < max(gate.min_count, 1):
            return -1, 0.0
        best = self.best[context]
        share = self.pairs[context, best] / (self.totals[context] + gate.prior)
        return (best, share) if share >= gate.min_confidence else (-1, 0.0)

    def count(self, context: Any, token: int) -> None:
        self.totals[context] += 1
        self.pairs[context, token] += 1
        best = self.best.setdefault(context, token)
        if self.pairs[context, token] > self.pairs[context, best]:
            self.best[context] = token


class ByHand:
    """An expert of lists and dictionaries."""

    def look(self, history: int) -> tuple[int, float]:
        raise NotImplementedError

    def learn(self, history: int, token: int) -> None:
        raise NotImplementedError

    def propose(self, history: int, tokens: np.ndarray) -> Proposals:
        said = []
        for token in tokens.tolist():
            said.append(self.look(history))
            self.learn(history, token)
        hints, shares = zip(*said, strict=True) if said else ((), ())
        return Proposals(np.array(hints, np.int64), np.array(shares, np.float32))


class CountsByHand(ByHand):
    """The longest context of the history whose gate opens."""

    def __init__(self, lengths: tuple[int, ...], gate: Gate | dict[int, Gate]) -> None:
        self.lengths, self.gate = sorted(lengths, reverse=True), gate
        self.table = TableByHand()
        self.histories: dict[int, list[int]] = defaultdict(list)

    def contexts(self, history: int) -> list[tuple[int, ...]]:
        past = self.histories[history]
        return [tuple(past[-n:]) for n in self.lengths if len(past) >= n]

    def look(self, history: int) -> tuple[int, float]:
        for context in self.contexts(history):
            gate = self.gate if isinstance(self.gate, Gate) else self.gate[len(context)]
            token, share = self.table.ask(context, gate)
            if token >= 0:
                return token, share
        return -1, 0.0

    def learn(self, history: int, token: int) -> None:
        for context in self.contexts(history):
            self.table.count(context, token)
        self.histories[history].append(token)


class WordsByHand(ByHand):
    """Words as lists of tokens: all closed ones, and the open one at the end (it may be empty)."""

    def __init__(self, num_words: int) -> None:
        self.num_words = num_words
        self.table = TableByHand()
        self.words: dict[int, list[list[int]]] = defaultdict(lambda: [[]])

    def context(self, history: int) -> Any:
        *closed, word = self.words[history]
        if self.num_words == 0:
            return tuple(word) or None
        last = tuple(map(tuple, closed[-self.num_words :]))
        return last if len(last) == self.num_words else None

    def look(self, history: int) -> tuple[int, float]:
        context = self.context(history)
        return self.table.ask(context, OFTEN) if context else (-1, 0.0)

    def learn(self, history: int, token: int) -> None:
        piece, words = PIECES[token], self.words[history]
        continues = piece and not piece.startswith(b" ")
        if not self.num_words and continues and (context := self.context(history)):
            self.table.count(context, token)
        if not continues and words[-1]:
            words.append([])
        if piece.startswith(b" ") and self.num_words and (context := self.context(history)):
            self.table.count(context, token)
        if piece:
            words[-1].append(token)


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


@settings(deadline=None, max_examples=60)
@given(
    tokens=st.lists(st.integers(0, 5), max_size=200),
    num_words=st.integers(0, 3),
    num_histories=st.integers(1, 3),
    plain=st.booleans(),
)
def test_words_are_those_read_by_hand(
    tokens: list[int], num_words: int, num_histories: int, plain: bool
) -> None:
    turns = turns_of(np.array(tokens, np.int64), num_histories, 5)
    by_hand = WordsByHand(num_words)
    theirs = [by_hand.propose(history, part) for history, part in turns]
    assert_same(run(of_words(num_words, plain), turns), theirs)


def test_a_panel_says_what_the_published_rule_says() -> None:
    """Boosts by hand: the bonus for agreement, then the largest, the first of equal ones."""
    tokens = stream(6000, 12)
    ours = panel(False)
    said = run(ours, [(0, tokens)])[0]
    boosts = ours.strength.boost(said.confidence, np.zeros(len(tokens)))
    gates = {2: Gate(2, 0.7, 0.0), 3: Gate(1, 0.6, 0.0)}
    members = [CountsByHand((2, 3), gates), WordsByHand(0), WordsByHand(2)]
    table = [member.propose(0, tokens) for member in members]
    num_agreed = 0
    for t in range(len(tokens)):
        found = []
        for k, member in enumerate(table):
            if member.hints[t] >= 0:
                nats = (float(member.confidence[t]), 0.55, 0.5)[k]
                found.append([int(member.hints[t]), nats])
        hints = [hint for hint, _ in found]
        raised = [(hint, nats + 0.5 * (hints.count(hint) > 1)) for hint, nats in found]
        hint, nats = max(raised, key=lambda pair: pair[1]) if raised else (-1, 0.0)
        assert said.hints[t] == hint
        assert boosts[t] == pytest.approx(nats, rel=1e-6)
        num_agreed += len(hints) > len(set(hints))
    assert num_agreed > 10
    assert 0 < np.mean(said.hints >= 0) < 1


def test_a_decoder_has_the_distribution_that_was_priced() -> None:
    """It knows the prefix and not the target: the same bits, whatever it puts in its place."""
    tokens, vocab = stream(300, 12), 12
    log_p = np.log(np.full(vocab, 1 / vocab))
    said = run(panel(False), [(0, tokens)])[0]
    encoder = Mixture([panel(False)])
    for t in range(100, 300, 10):
        decoder = Mixture([panel(False)])
        decoder.open(1, len(tokens))
        decoder.propose(0, tokens[:t])
        guess = decoder.propose(0, np.array([(tokens[t] + 1) % vocab]))
        here = Proposals(said.hints[t : t + 1, None], said.confidence[t : t + 1, None])
        priced = encoder.distribution(here, log_p)
        np.testing.assert_array_equal(decoder.distribution(guess, log_p), priced)
        assert np.exp(priced).sum() == pytest.approx(1, abs=1e-12)
    assert (said.hints[100::10] >= 0).any()


def test_experts_of_words_need_a_tokenizer() -> None:
    expert = find_lever("ngram").plug(find_lever("ngram").Settings(), ModelSpec())  # type: ignore
    assert expert.needs_pieces
    expert.open(1, 10)
    with pytest.raises(RuleError, match=r"^experts of words need a tokenizer"):
        expert.propose(0, np.arange(10))
    tokens_alone = find_lever("ngram").Settings(experts=("token",))
    assert not find_lever("ngram").plug(tokens_alone, ModelSpec()).needs_pieces  # type: ignore


def test_a_class_of_the_target_would_show() -> None:
    """The experts of PR 1105 were silent where the target is of the other class."""

    class Published(WordExpert):
        def propose(self, history: int, targets: np.ndarray) -> Proposals:
            said = super().propose(history, targets)
            continues = np.array([PIECES[t] == b"a" for t in targets])
            return Proposals(np.where(continues, said.hints, -1), said.confidence)

    expert = Published(0, OFTEN, STRENGTH)
    expert.read_pieces(PIECES)
    assert suffix_changes_hints(expert)


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
    for part in getattr(expert, "members", [expert]):
        held = {name for name, value in vars(part).items() if isinstance(value, tables)}
        # One byte per piece of the vocabulary.
        assert held <= {"_kinds"}
        part.open(1, 10)
        assert any(isinstance(v, tables) for n, v in vars(part).items() if n not in held)


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
        ("ngram", "experts", ()),
        ("ngram", "experts", ("token", "letters")),
        ("ngram", "experts", ("token", "token")),
        ("ngram", "contexts", ()),
        ("ngram", "contexts", (8, 65)),
        ("ngram", "contexts", (4, 8)),
        ("ngram", "gates", ("8:0.7",)),
        ("ngram", "gates", ("8:0.7:3", "8:0.6:2")),
        ("ngram", "gates", ("8:1.7:3",)),
        ("ngram", "gates", ("8:nan:3",)),
        ("ngram", "gates", ("8:0.7:0",)),
        ("ngram", "gates", ()),
        ("ngram", "boost", float("nan")),
        ("ngram", "bonus", -0.1),
        ("ngram", "start_words", 0),
        ("ngram", "start_count", 0),
        ("ngram", "within_confidence", 1.1),
    ],
)
def test_wrong_settings_are_named(lever: str, key: str, value: object) -> None:
    # Contexts that no gate covers are an error of the gates.
    named = "(contexts|gates)" if key == "contexts" else key
    with pytest.raises(RecipeError, match=rf"^levers\.{lever}\.{named} = .*expected"):
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
