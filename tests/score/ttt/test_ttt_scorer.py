"""The document engine: complete, score first, and followed by a decoder who knows no lengths."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lane_runs import (
    ALONE,
    CONTEXT,
    LONG,
    NUM_TARGETS,
    PLAIN,
    SETTINGS,
    SHARD,
    SORTED,
    STREAM,
    Run,
    changed,
    make_shard,
    shortened,
    stop_after,
    without,
)
from lever_stacks import randomized
from underpar.core.runtime import Clock
from underpar.data.batch import pack_documents
from underpar.infer.experts import Ints, Proposals
from underpar.infer.ngram import CountExpert, Gate, MatchExpert
from underpar.infer.strengths import make_strength
from underpar.infer.tilt import Mixture
from underpar.levers import phased_sgd
from underpar.model.gpt import GPT
from underpar.recipe import ScorePart
from underpar.score.method import STOP_BITS, Method
from underpar.score.scorer import Scorer

FROZEN = replace(SETTINGS, lr=0.0, decay=0.0)
KEYS = pytest.mark.parametrize("keys", ["kept", "fresh"])
WAYS = pytest.mark.parametrize(
    ("method", "keys"), [(STREAM, "kept"), (STREAM, "fresh"), (SORTED, "fresh")]
)
ORDERS = pytest.mark.parametrize("method", [STREAM, SORTED], ids=["stream", "published"])


@WAYS
@pytest.mark.parametrize(("chunk", "short"), [(4, ()), (5, ("8:2", "24:3")), (12, ()), (16, ())])
def test_every_target_is_priced_once(
    method: Method, keys: str, chunk: int, short: tuple[str, ...]
) -> None:
    run = Run(method=method, settings=replace(SETTINGS, keys=keys, chunk=chunk, short=short)).go()
    for document, entry in enumerate(run.score.entries):
        nats = run.nats(document)
        assert len(nats) == entry.num_targets == NUM_TARGETS[document]
        assert np.isfinite(nats).all() and (nats > 0).all()
        assert entry.bits == pytest.approx(nats.sum() / math.log(2))
    assert run.score.num_targets == SHARD.num_tokens - 1
    assert (run.score.order, run.score.stopped_at, run.score.side_bits) == (method.order, -1, 0.0)


def test_without_a_rate_adapters_change_no_bit() -> None:
    assert Run().go().bits != (frozen := Run(settings=FROZEN).go()).bits
    bare = Run(**stop_after(0)).go()
    assert {kind for kind, _, _ in bare.score.events} == {"price", "stop"}
    for document in range(SHARD.num_documents):
        assert np.array_equal(frozen.nats(document), bare.nats(document))


@pytest.mark.parametrize(("keys", "stride"), [("kept", CONTEXT // 2), ("fresh", 4)])
def test_without_a_rate_prices_are_those_of_sliding_windows(keys: str, stride: int) -> None:
    # A window that is read again begins without a token before it: no lever here looks back.
    scored = Run(settings=replace(FROZEN, keys=keys), model=randomized(PLAIN)).go()
    wanted = Run(model=scored.model)
    method, commits = Method(stride=stride), wanted.commits
    scorer = Scorer(wanted.predictor, SHARD, ALONE, Clock(), ScorePart(), method)
    replace(scorer, on_commit=lambda *commit: commits.append(commit)).run()
    for document in range(SHARD.num_documents):
        np.testing.assert_allclose(
            scored.nats(document), wanted.nats(document), rtol=0, atol=1e-4, strict=True
        )


@KEYS
def test_without_a_rate_prices_are_those_of_the_predictor(keys: str) -> None:
    shard = make_shard([CONTEXT, 5, 12, 2, 1])
    settings = replace(FROZEN, keys=keys, chunk=CONTEXT, lanes=1)
    run = Run(shard, settings).go()
    for document in range(shard.num_documents - 1):
        batch, _ = pack_documents([shard.doc(document)], 1, CONTEXT)
        nats, wanted = run.nats(document), run.predictor.nll(batch).double().numpy()
        if keys == "fresh":
            # The same shapes: one row is one packed document.
            assert np.array_equal(nats, wanted)
        # Kept lanes have another kernel for attention.
        np.testing.assert_allclose(nats, wanted, rtol=0, atol=1e-5)


@WAYS
def test_later_tokens_and_other_documents_do_not_matter(method: Method, keys: str) -> None:
    document, cut = 3, 16
    settings = replace(SETTINGS, keys=keys)
    others = changed(SHARD, lambda d, place: d == document and place <= cut)
    before, after = (Run(shard, settings, method).go() for shard in (SHARD, others))
    old, new = before.nats(document), after.nats(document)
    assert np.array_equal(old[:cut], new[:cut])
    assert (old[cut:] != new[cut:]).all() and (before.nats(LONG) != after.nats(LONG)).all()


@KEYS
@pytest.mark.parametrize("chunk", [4, 6, 16])
def test_the_length_of_a_document_does_not_matter_before_its_end(keys: str, chunk: int) -> None:
    settings = replace(SETTINGS, keys=keys, chunk=chunk)
    whole = Run(settings=settings).go().nats(LONG)
    for length in (14, 17, 27):
        ended = Run(shortened(SHARD, LONG, length), settings).go().nats(LONG)
        assert len(ended) == length
        np.testing.assert_allclose(ended[:-1], whole[: length - 1], rtol=0, atol=1e-5)


@KEYS
def test_a_token_changes_what_is_learnt(keys: str) -> None:
    place = 2
    others = changed(SHARD, lambda d, p: (d, p) != (LONG, place))
    for settings, is_learnt in ((SETTINGS, True), (FROZEN, False)):
        variant = replace(settings, keys=keys)
        old, new = (Run(shard, variant).go().nats(LONG) for shard in (SHARD, others))
        assert np.array_equal(old[: place - 1], new[: place - 1])
        assert (np.abs(old - new)[4:8] > 1e-6).all()
        # Beyond the reach of attention only what was learnt is left.
        assert (np.abs(old - new)[40:] > 1e-6).any() == is_learnt


# Of a chunk that leaves no room for half a window, what is read again is what a fresh one has.
@pytest.mark.parametrize(("chunk", "num_alike"), [(8, 8), (12, 24)])
def test_kept_and_fresh_keys_agree_where_they_read_alike(chunk: int, num_alike: int) -> None:
    kept, fresh = (
        Run(settings=replace(SETTINGS, chunk=chunk, keys=keys)).go() for keys in ("kept", "fresh")
    )
    for document in range(SHARD.num_documents):
        difference = np.abs(kept.nats(document) - fresh.nats(document))
        assert difference[:num_alike].max(initial=0) < 1e-5
        assert (difference.max(initial=0) > 1e-4) == (NUM_TARGETS[document] > num_alike)


def make_experts() -> Mixture:
    """Two experts that often propose, one of which learns how far it is believed."""
    gate = Gate(min_count=1, min_confidence=0.0, prior=0.0)
    counts = CountExpert((1,), gate, make_strength("hedge", 0.0), plain=True)
    return Mixture([MatchExpert((1, 2), make_strength("fixed", 2.0), plain=True), counts])


@ORDERS
def test_experts_see_no_later_token(method: Method) -> None:
    def go(tokens_from: Run | None = None) -> Run:
        shard = SHARD if tokens_from is None else later_changed(tokens_from)
        return Run(shard, method=method, mixture=make_experts()).go()

    def later_changed(run: Run) -> Any:
        kept = {
            (d, first + 1 + i) for d, first, nats in run.commits[:cut] for i in range(len(nats))
        }
        return changed(SHARD, lambda *token: token in kept)

    whole = go()
    assert whole.score.num_targets == SHARD.num_tokens - 1
    assert whole.bits != Run(method=method).go().bits
    hedges = [mixture.experts[1].strength.state() for mixture in (whole.mixture, make_experts())]
    assert not np.array_equal(*(hedge["log_weights"] for hedge in hedges))
    cut = 2 * len(whole.commits) // 3
    pairs = list(zip(whole.commits, go(whole).commits, strict=True))
    same = [a[:2] == b[:2] and np.array_equal(a[2], b[2]) for a, b in pairs]
    # The published order lets experts read the whole file ahead.
    assert all(same[:cut]) == (method is STREAM)
    assert not all(same[cut:])


@ORDERS
def test_time_for_hints_is_theirs(method: Method) -> None:
    class Watched(CountExpert):
        def propose(self, history: int, targets: Ints) -> Proposals:
            phases.add(run.clock._phase)
            return super().propose(history, targets)

    phases: set[str] = set()
    gate = Gate(min_count=1, min_confidence=0.0, prior=0.0)
    expert = Watched((1,), gate, make_strength("fixed", 1.0), plain=True)
    run = Run(method=method, mixture=Mixture([expert]))
    assert set(run.go().score.seconds) == {"load", "hints", "score", "adapt"}
    assert phases == {"hints"}


@ORDERS
@pytest.mark.parametrize("lr", [0.0, 0.1])
def test_phases_train_on_documents_that_are_priced(method: Method, lr: float) -> None:
    class Watched(phased_sgd.PhasedSGD):
        def train(self, model: GPT, documents: Sequence[np.ndarray], *rest: Any) -> int:
            numbers = [addresses.index(document.ctypes.data) for document in documents]
            assert [len(run.nats(n)) for n in numbers] == [NUM_TARGETS[n] for n in numbers]
            trained.append(numbers)
            return super().train(model, documents, *rest)

    addresses = [SHARD.doc(i).ctypes.data for i in range(SHARD.num_documents)]
    trained: list[list[int]] = []
    settings = phased_sgd.Settings(prefix=0.5, phases=2, lr=lr, chunk_tokens=16)
    run = Run(method=method, phases=Watched(settings))
    before = run.predictor.state_hash()
    run.go()
    assert (run.predictor.state_hash() == before) == (lr == 0)
    assert (run.bits == Run(method=method).go().bits) == (lr == 0)
    notes = [num for kind, _, num in run.score.events if kind == "train"]
    assert notes == [len(numbers) for numbers in trained]
    # After two and four documents: all that have ended, or of these the shortest.
    assert trained == ([[0, 2], [0, 1, 2, 4]] if method is STREAM else [[3, 6], [5, 4, 1, 3]])


def test_published_phases_are_followed_by_new_adapters() -> None:
    settings = replace(SETTINGS, lanes=2, warm=True)
    phases = phased_sgd.PhasedSGD(phased_sgd.Settings(prefix=0.25, lr=0.0, chunk_tokens=16))
    # The two longest come first; then it is as if they had not been there.
    phased = Run(settings=settings, method=SORTED, phases=phases).go()
    shard = without(SHARD, 3, LONG)
    fresh = Run(shard, settings, SORTED).go()
    assert [phased.bits[i] for i in (0, 1, 2, 4, 5, 7)] == fresh.bits
    assert phased.bits[4] != Run(settings=settings, method=SORTED).go().bits[4]


def test_learning_ends_when_time_is_over() -> None:
    whole = Run().go()
    phases = phased_sgd.PhasedSGD(phased_sgd.Settings(prefix=0.75, lr=0.1, chunk_tokens=16))
    late = Run(**stop_after(5), phases=phases)
    before = late.predictor.state_hash()
    score = late.go().score
    assert (score.stopped_at, score.side_bits) == (5, STOP_BITS)
    assert score.bits == pytest.approx(sum(late.bits) + 32)
    assert score.num_targets == SHARD.num_tokens - 1
    assert late.predictor.state_hash() == before
    stop = next(i for i, event in enumerate(score.events) if event[0] == "stop")
    early, late_kinds = score.events[:stop], {kind for kind, _, _ in score.events[stop + 1 :]}
    assert {kind for kind, _, _ in early} == {"price", "adapt"} and late_kinds == {"price"}
    num_early = sum(num for kind, _, num in early if kind == "price")
    ends = np.cumsum([len(nats) for _, _, nats in late.commits])
    pairs = zip(whole.commits, late.commits, ends, strict=True)
    same = {end: a[:2] == b[:2] and np.array_equal(a[2], b[2]) for a, b, end in pairs}
    assert all(is_same for end, is_same in same.items() if end <= num_early)
    assert not all(is_same for end, is_same in same.items() if end > num_early)
    documents = [late.commits[i][0] for i in range(len(ends)) if ends[i] <= num_early]
    done = [d for d in set(documents) if documents.count(d) == math.ceil(NUM_TARGETS[d] / 4)]
    assert score.events[stop] == ("stop", 5, len(done))
