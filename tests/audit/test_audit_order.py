"""The order of a score: honest methods depend on nothing that comes later, and mutants do."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from lane_runs import ticks
from lever_stacks import randomized
from underpar.artifact.unpack import Artifact
from underpar.audit.order import wrong_events
from underpar.audit.probes import own_targets_matter
from underpar.audit.traces import (
    PROBE_CHUNKS,
    TOLERANCE,
    Commit,
    Experiment,
    Trace,
    for_probes,
)
from underpar.build.levers import resolve_levers
from underpar.build.scoring import ScoringRequest, mixture_of, open_method, run_method
from underpar.core.runtime import Runtime
from underpar.data.batch import Batch
from underpar.data.shards import Shard
from underpar.infer.experts import Ints, Proposals
from underpar.infer.ngram import CountExpert
from underpar.infer.predictor import Predictor
from underpar.quant.rounding import round_tensor
from underpar.quant.schemes import parse_scheme
from underpar.recipe import load_recipe
from underpar.score.ledger import Score
from underpar.score.method import COUNT_BITS, PUBLISHED, Method
from underpar.score.ttt import loop
from underpar.score.ttt.lanes import Hints, LaneBatch
from underpar.score.ttt.reading import KeptLanes, Reread
from underpar.score.ttt.schedule import Chunk, published_window

CONTEXT, VOCAB = 16, 64
SIZES = {"vocab_size": VOCAB, "dim": 32, "num_heads": 2, "num_kv_heads": 1, "mlp_dim": 32}
SIZES |= {"num_layers": 2, "context": CONTEXT}
RECIPE = load_recipe("cpu", [f"model.{key}={value}" for key, value in SIZES.items()])
# Chunks of two sizes, documents that follow one another in a lane, and steps that show at once.
LORA = "levers.lora_ttt={rank=3, chunk=6, short=['12:4'], lanes=2, group=2, lr=0.01}"
TILT = "levers.tilt={order=3, min_confidence=0.4}"
PHASES = "levers.phased_sgd={prefix=0.4, lr=0.1, chunk_tokens=16}"
EVERYTHING = ("lora_ttt", "tilt", "phased_sgd")

Event = tuple[str, int, int]
# A method, and the settings of its levers that differ.
Case = tuple[Method, tuple[str, ...]]
KEPT: Case = (Method(("lora_ttt",)), (LORA,))
FRESH: Case = (Method(("lora_ttt",)), (LORA, "levers.lora_ttt.keys=fresh"))
ALL: Case = (Method(EVERYTHING), (LORA, TILT, PHASES))
SORTED: Case = (Method(("lora_ttt",), order=PUBLISHED), (LORA,))
ALL_SORTED: Case = (Method(EVERYTHING, order=PUBLISHED), (LORA, TILT, PHASES))
SCALES: Case = (Method(("adapt_scales",)), ())
FIXED: Case = (Method(("tilt",)), (TILT,))
FLAT: Case = (Method(("tilt",), stride=4, flat=True), (TILT,))
SGD = "levers.stream_sgd={lr=0.1, horizon_chunks=20}"
CHUNKS: Case = (Method(("stream_sgd", "tilt"), stride=4, flat=True), (SGD, TILT))
HONEST = {
    "flat chunks": CHUNKS,
    "chunks of windows": (Method(("stream_sgd",), stride=4), (SGD,)),
    "adapt_scales": SCALES,
    "adapt_bias": (Method(("adapt_bias",)), ()),
    "kept": KEPT,
    "fresh": FRESH,
    "fixed": FIXED,
    "confidence": (Method(("tilt",)), (TILT, "levers.tilt.strength=confidence")),
    "hedge": (Method(("tilt",)), (TILT, "levers.tilt.strength=hedge")),
    "sliding": (Method(("tilt",), stride=4), (TILT,)),
    "flat": FLAT,
    "all": ALL,
}


def make_shard(lengths: list[int]) -> Shard:
    """Documents of few words, which often come again."""
    rng = np.random.default_rng(0)
    num = len(lengths)
    return Shard(
        tokens=np.concatenate([np.append(1, rng.integers(4, 8, n - 1)) for n in lengths]),
        starts=np.cumsum(np.array(lengths)) - np.array(lengths),
        doc_bytes=np.full(num, 50),
        doc_hashes=np.zeros((num, 32), dtype=np.uint8),
        flags=np.zeros(num, dtype=np.uint8),
    )


SHARD = make_shard([34, 20, 47, 9, 30])
NUM_TARGETS = [34, 20, 47, 9, 29]


@pytest.fixture(scope="module")
def artifact() -> Artifact:
    weights = randomized(RECIPE).state_dict()
    half = parse_scheme("fp16")
    tensors = {name: round_tensor(w.numpy(), half) for name, w in weights.items()}
    return Artifact(RECIPE, b"", tensors)


def run(
    artifact: Artifact, case: Case, shard: Shard = SHARD, **options: Any
) -> tuple[Score, list[Commit]]:
    """The score, of several units or steps, and the prices in the order they were entered."""
    part = replace(RECIPE.score, batch_tokens=60, adapt_tokens=20)
    method, recipe = open_method(replace(RECIPE, score=part), *case)
    commits: list[Commit] = []
    options["on_commit"] = lambda *commit: commits.append(commit)
    request = ScoringRequest(method, Runtime(torch.device("cpu")), **options)
    return run_method(replace(artifact, recipe=recipe), shard, request), commits


def tracer(artifact: Artifact, case: Case) -> Trace:
    return lambda shard: run(artifact, case, shard)[1]


def experiment(artifact: Artifact, case: Case, seed: int = 0) -> Experiment:
    rng = np.random.default_rng(seed)
    return Experiment(tracer(artifact, case), SHARD, np.arange(4, VOCAB), rng)


def tokens_matter(artifact: Artifact, case: Case) -> int:
    return experiment(artifact, case).later_tokens_matter()


def lengths_matter(artifact: Artifact, case: Case) -> int:
    return experiment(artifact, case).later_lengths_matter()


def hints_matter(artifact: Artifact, case: Case) -> int:
    score, _ = run(artifact, case)
    mixture, rng = mixture_of(score, artifact), np.random.default_rng(0)
    return own_targets_matter(mixture, SHARD.tokens[1:], VOCAB, rng)


@pytest.mark.parametrize("case", HONEST.values(), ids=HONEST)
def test_an_honest_method_depends_on_nothing_that_follows(artifact: Artifact, case: Case) -> None:
    score, _ = run(artifact, case)
    assert wrong_events(score, NUM_TARGETS) == 0
    assert tokens_matter(artifact, case) == 0
    assert lengths_matter(artifact, case) == 0
    assert experiment(artifact, case).later_documents_matter() == 0
    assert experiment(artifact, case).repetition_differs() == 0
    assert hints_matter(artifact, case) == 0


@pytest.mark.parametrize("case", [SCALES, KEPT, FRESH, FIXED, ALL])
def test_what_came_before_does_matter(artifact: Artifact, case: Case) -> None:
    """Else nothing would be shown by prices that stay."""
    commits = run(artifact, case)[1]
    tokens = SHARD.tokens.copy()
    tokens[2] = 4 + (tokens[2] - 3) % 4
    changed = run(artifact, case, replace(SHARD, tokens=tokens))[1]
    pairs = zip(commits, changed, strict=True)
    # Neither the document itself, nor those that a learner of documents reads beside it.
    later = [(old, new) for old, new in pairs if old[0] > 1]
    assert any(np.abs(old[2] - new[2]).max() > 2 * TOLERANCE for old, new in later)


def test_the_published_order_knows_lengths(artifact: Artifact) -> None:
    assert lengths_matter(artifact, SORTED) > 0
    # Of tokens alone, those of later groups are not known.
    assert tokens_matter(artifact, SORTED) == 0
    # Experts follow the file, adapters the lengths: there is no order for both.
    assert tokens_matter(artifact, ALL_SORTED) > 0
    for case in (SORTED, ALL_SORTED):
        assert wrong_events(run(artifact, case)[0], NUM_TARGETS) == 0


def test_a_rate_that_falls_over_the_text_knows_its_length_and_is_told(artifact: Artifact) -> None:
    told = "levers.stream_sgd={lr=0.1, cosine=true}"
    case = (CHUNKS[0], (told, TILT))
    assert run(artifact, case)[0].side_bits == COUNT_BITS
    assert lengths_matter(artifact, case) > 0
    # In a probe the number of chunks is the same whatever the lengths are, as if it had been told.
    _, recipe = open_method(RECIPE, *case)
    probed = for_probes(recipe, SHARD, stride=4).levers["stream_sgd"]
    assert (probed["cosine"], probed["horizon_chunks"]) == (False, PROBE_CHUNKS)


class LearnsFirst(Predictor):
    """Adapts to a batch before pricing it."""

    def price(self, batch: Batch, tokens: torch.Tensor | None = None) -> torch.Tensor:
        super().price(batch)
        super().adapt(batch)
        return super().price(batch, tokens)

    def adapt(self, batch: Batch) -> None:
        self._priced = None


def test_a_stream_that_adapts_before_pricing_is_caught(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("underpar.build.model.Predictor", LearnsFirst)
    assert tokens_matter(artifact, SCALES) > 0


def test_lanes_that_adapt_before_pricing_are_caught(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = LaneBatch.price

    def learn_first(
        self: LaneBatch, chunks: list[Chunk], hints: Hints, adapted: bool = True
    ) -> dict[int, np.ndarray]:
        honest(self, chunks, hints, adapted)
        self.learn(chunks)
        return honest(self, chunks, hints, adapted)

    monkeypatch.setattr(LaneBatch, "price", learn_first)
    assert tokens_matter(artifact, FRESH) > 0


def gate_by(place: int) -> Callable[[CountExpert, int, Ints], Proposals]:
    """Proposals that are withheld by the class of the target, or of the one so far behind it."""
    honest = CountExpert.propose

    def propose(self: CountExpert, history: int, targets: Ints) -> Proposals:
        found = honest(self, history, targets)
        seen = np.append(targets, np.zeros(place, dtype=np.int64))[place:]
        return Proposals(np.where(seen % 2 == 0, -1, found.hints), found.confidence)

    return propose


@pytest.mark.parametrize("case", [FIXED, ALL])
def test_experts_gated_by_their_targets_are_caught(
    artifact: Artifact, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(CountExpert, "propose", gate_by(0))
        assert hints_matter(artifact, case) > 0
    with monkeypatch.context() as patch:
        patch.setattr(CountExpert, "propose", gate_by(1))
        assert hints_matter(artifact, case) > 0


def test_an_expert_that_reads_documents_ahead_is_caught(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Units of 60 tokens hold several documents, whose prices are entered one by one.
    monkeypatch.setattr(CountExpert, "propose", gate_by(45))
    assert tokens_matter(artifact, FIXED) > 0


def test_windows_that_know_where_a_document_ends_are_caught(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "fresh_window", published_window)
    assert lengths_matter(artifact, FRESH) > 0


def test_caches_that_know_where_a_document_ends_are_caught(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = KeptLanes.reread

    def reread(self: KeptLanes, chunks: list[Chunk]) -> Reread | None:
        self.size_of = {chunk.first: chunk.count for chunk in chunks}.__getitem__
        return honest(self, chunks)

    monkeypatch.setattr(KeptLanes, "reread", reread)
    # A size for which one of the cuts is where a short chunk has room and a whole one has none.
    lora = "levers.lora_ttt={rank=3, lanes=1, chunk=9, short=[]}"
    assert lengths_matter(artifact, (KEPT[0], (lora,))) > 0


def test_so_little_text_has_lanes_that_go_on_and_chunks_of_all_sizes() -> None:
    recipe = resolve_levers(load_recipe("cpu", ["levers.lora_ttt={lanes=64}"]))
    for num_documents, lanes in ((5, 2), (24, 8), (600, 64)):
        shard = make_shard([3] * num_documents)
        found = for_probes(recipe, shard)
        own = found.levers["lora_ttt"]
        assert (own["lanes"], tuple(own["short"])) == (lanes, ("16:8", "125:24"))
        assert own["group"] == min(lanes, 24)
        assert found.score.adapt_tokens == min(160, recipe.score.adapt_tokens)
    plain = load_recipe("cpu")
    assert for_probes(plain, shard).levers == plain.levers


def forgeries(events: list[Event]) -> dict[str, list[Event]]:
    """Events in another order, without one of them, or with one of them twice."""
    forged = {}
    for i, event in enumerate(events):
        # Fewer documents may be trained on.
        if event[0] != "train":
            forged[f"without {i}"] = events[:i] + events[i + 1 :]
        forged[f"{i} twice"] = events[: i + 1] + events[i:]
    for i, (first, second) in enumerate(pairwise(events)):
        forged[f"{i} late"] = [*events[:i], second, first, *events[i + 2 :]]
    return forged


@pytest.mark.parametrize("case", [SCALES, FIXED, KEPT, SORTED, ALL], ids=lambda case: case[0].label)
def test_events_out_of_order_missing_or_doubled_are_caught(artifact: Artifact, case: Case) -> None:
    score, _ = run(artifact, case)
    assert len(score.events) > 1
    for what, events in forgeries(score.events).items():
        wrong = wrong_events(replace(score, events=events), NUM_TARGETS)
        assert wrong > 0, (what, score.events)


def test_windows_over_documents_may_share_one_and_leave_none_out(artifact: Artifact) -> None:
    score, _ = run(artifact, FLAT)
    assert any(first == last for (_, _, last), (_, first, _) in pairwise(score.events))
    forged = [[event for event in score.events if gone not in event] for gone in (0, 2, 4)]
    for events in (*forged, score.events[::-1]):
        assert wrong_events(replace(score, events=events), NUM_TARGETS) > 0
    apart = replace(score, how={**score.how, "flat": False})
    assert wrong_events(apart, NUM_TARGETS) > 0


@pytest.mark.parametrize("case", [SCALES, KEPT], ids=lambda case: case[0].label)
def test_learning_after_time_was_up_is_caught(artifact: Artifact, case: Case) -> None:
    method, changes = case
    score, _ = run(artifact, (replace(method, seconds=1), changes), now=ticks())
    learnt = [event for event in score.events if event[0] == "adapt"]
    assert score.stopped_at == len(learnt) == 1
    assert wrong_events(score, NUM_TARGETS) == 0
    more = ("adapt", *score.events[-1][1:])
    assert wrong_events(replace(score, events=[*score.events, more]), NUM_TARGETS) > 0
    assert wrong_events(replace(score, stopped_at=-1), NUM_TARGETS) > 0
    unknown = [*score.events, ("rescore", 0, 1)]
    assert wrong_events(replace(score, events=unknown), NUM_TARGETS) > 0
