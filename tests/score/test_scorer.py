"""Scoring: full coverage, independence of batching and ranks, windows, experts, adaptation.

Started by torchrun this file is one rank that runs its arguments as commands.
"""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lane_runs import ticks
from lever_stacks import randomized
from tiny import TinyRun
from underpar import cli
from underpar.build.artifact import read_artifact
from underpar.build.levers import plug_levers
from underpar.build.model import build_predictor
from underpar.core.runtime import Clock, Runtime
from underpar.data.batch import Batch, segments_from_starts
from underpar.data.folder import load_data
from underpar.data.shards import Shard
from underpar.errors import ArtifactError, RuleError
from underpar.infer.experts import Proposals
from underpar.infer.predictor import Predictor
from underpar.infer.tilt import Mixture
from underpar.levers import counts, tilt
from underpar.recipe import ScorePart, load_recipe
from underpar.score.ledger import Score
from underpar.score.method import ADAPT, PLAIN, STOP_BITS, Method
from underpar.score.scorer import Scorer
from underpar.stages.score import score_artifact

# Long and short documents, one of a BOS alone, and one that fills its window.
LENGTHS = (37, 2, 1, 16, 9, 17)


class Uniform:
    """Prices every token alike."""

    context, can_adapt = 64, False

    def __init__(self, vocab_size: int) -> None:
        self.nats = math.log(vocab_size)

    def price(self, batch: Batch, tokens: torch.Tensor | None = None) -> torch.Tensor:
        num_hints = 0 if tokens is None else tokens.shape[1]
        return torch.full((len(batch.targets), 1 + num_hints), -self.nats)


@pytest.fixture(scope="module")
def shard(tiny_run: TinyRun) -> Shard:
    return load_data(tiny_run.data).val


@pytest.fixture(scope="module")
def stream() -> Shard:
    """A few tiny documents of random tokens that often repeat."""
    rng = np.random.default_rng(0)
    tokens = np.concatenate([np.append(1, rng.integers(4, 9, n - 1)) for n in LENGTHS])
    lengths, num = np.array(LENGTHS), len(LENGTHS)
    hashes, flags = np.zeros((num, 32), dtype=np.uint8), np.zeros(num, dtype=np.uint8)
    starts = np.cumsum(lengths) - lengths
    return Shard(tokens.astype(np.uint16), starts, 3 * lengths, hashes, flags)


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    """Random weights and a short context."""
    recipe = load_recipe("baseline+cpu", ["model.num_layers=2", "model.context=16"])
    return Predictor(randomized(recipe), torch.device("cpu"), [])


@pytest.fixture(scope="module")
def looking_back() -> Predictor:
    """The same with levers that mix in the token before, strongly."""
    levers = ["levers.bigram={buckets=50, width=8}", "levers.smear.init=1.0"]
    sizes = ["model.num_layers=2", "model.context=16"]
    recipe = load_recipe("baseline+cpu", sizes + levers)
    return Predictor(randomized(recipe), torch.device("cpu"), [])


def open_predictor(tiny_run: TinyRun, adapts: bool = True) -> Predictor:
    artifact, _ = read_artifact(tiny_run.folder.artifact_file)
    adapters = list(plug_levers(artifact.recipe, "infer").values()) if adapts else []
    return build_predictor(artifact, torch.device("cpu"), adapters)


def score_of(
    tiny_run: TinyRun, shard: Shard, runtime: Runtime, part: ScorePart, adapt: bool = False
) -> Score:
    predictor, method = open_predictor(tiny_run), ADAPT if adapt else PLAIN
    return Scorer(predictor, shard, runtime, Clock(), part, method, adapts=adapt).run()


def test_a_uniform_model_costs_log_v_a_target(shard: Shard, runtime: Runtime) -> None:
    predictor: object = Uniform(512)
    scorer = Scorer(predictor, shard, runtime, Clock(), ScorePart())  # type: ignore[arg-type]
    score = scorer.run()
    assert score.num_targets == shard.num_tokens - 1
    assert score.bits == pytest.approx(9 * score.num_targets, rel=1e-6)
    assert score.num_bytes == shard.num_bytes


@pytest.mark.parametrize("batch_tokens", [1, 700, 10**6])
def test_batching_does_not_matter(
    batch_tokens: int, tiny_run: TinyRun, shard: Shard, runtime: Runtime
) -> None:
    part = ScorePart(batch_tokens=batch_tokens)
    score = score_of(tiny_run, shard, runtime, part)
    stored = json.loads(tiny_run.folder.score_file("plain").read_text())
    assert score.bits == pytest.approx(stored["bits"], rel=1e-6)
    assert [e.num_targets for e in score.entries] == [e["num_targets"] for e in stored["ledger"]]


def test_every_second_of_a_score_has_a_name(tiny_run: TinyRun) -> None:
    for method, phases in (("plain", {"load", "score"}), ("adapt", {"load", "score", "adapt"})):
        stored = json.loads(tiny_run.folder.score_file(method).read_text())
        assert set(stored["seconds"]) == phases
        assert stored["side_bits"] == 0


def test_adaptation_changes_later_documents_only(
    tiny_run: TinyRun, shard: Shard, runtime: Runtime
) -> None:
    part = ScorePart(adapt_tokens=1)
    plain = score_of(tiny_run, shard, runtime, ScorePart(batch_tokens=1))
    adapted = score_of(tiny_run, shard, runtime, part, adapt=True)
    assert adapted.entries[0].bits == plain.entries[0].bits
    assert all(
        a.bits != b.bits for a, b in zip(adapted.entries[1:], plain.entries[1:], strict=True)
    )
    kinds = [event[0] for event in adapted.events]
    assert kinds == ["price", "adapt"] * shard.num_documents


def test_adaptation_helps(tiny_run: TinyRun) -> None:
    plain, adapted = (
        json.loads(tiny_run.folder.score_file(m).read_text())["bpb"] for m in ("plain", "adapt")
    )
    assert adapted < plain


def test_two_ranks_give_the_same_totals(
    tiny_run: TinyRun, tmp_path: Path, runtime: Runtime
) -> None:
    artifacts = [tmp_path / name / "model.upar" for name in ("alone", "pair")]
    for artifact in artifacts:
        artifact.parent.mkdir()
        artifact.write_bytes(tiny_run.folder.artifact_file.read_bytes())
    # Rounds of two units, and a last one that a single rank prices.
    changes = ["score.batch_tokens=1200"]
    for levers in ((), ("tilt", "counts")):
        score_artifact(artifacts[0], tiny_run.data, runtime, Method(levers), changes)
    words = ["score", str(artifacts[1]), "--data", str(tiny_run.data), "--device", "cpu"]
    words += ["--set", *changes]
    commands = [words, [*words, "--with", "tilt", "--with", "counts"]]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run(
        [*launcher, __file__, json.dumps(commands)],
        check=True,
        capture_output=True,
        # Bit for bit needs the same number of threads everywhere.
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    for method in ("plain", "tilt+counts"):
        one, two = (json.loads((a.parent / f"score-{method}.json").read_text()) for a in artifacts)
        assert len(one["events"]) % 2 == 1
        for key in ("bits", "targets", "bytes", "ledger", "events"):
            assert two[key] == one[key], (method, key)


def test_adapting_needs_an_adapter_and_flat_windows_a_stride(
    tiny_run: TinyRun, shard: Shard, runtime: Runtime
) -> None:
    bare = open_predictor(tiny_run, adapts=False)
    plain = Scorer(bare, shard, runtime, Clock(), ScorePart())
    with pytest.raises(RuleError, match="names no adapter"):
        replace(plain, adapts=True).run()
    with pytest.raises(RuleError, match="give --stride"):
        replace(plain, method=Method(flat=True)).run()


class Prices:
    """Every price that is entered, in order, by its place in the stream."""

    def __init__(self, shard: Shard) -> None:
        self.nats = np.full(shard.num_tokens - 1, np.nan)
        self.num = 0
        self._starts = shard.starts

    def __call__(self, document: int, first: int, nats: np.ndarray) -> None:
        begin = int(self._starts[document]) + first
        assert begin == self.num, "prices are entered in the order of the file"
        self.nats[begin : begin + len(nats)] = nats
        self.num += len(nats)


def stream_prices(
    predictor: Predictor, shard: Shard, method: Method, batch_tokens: int = 4096
) -> np.ndarray:
    """Nats of every target of the stream, each entered once."""
    prices = Prices(shard)
    runtime = Runtime(torch.device("cpu"))
    part = ScorePart(batch_tokens=batch_tokens)
    score = Scorer(predictor, shard, runtime, Clock(), part, method, on_commit=prices).run()
    assert score.num_targets == shard.num_tokens - 1 == prices.num
    assert score.bits == pytest.approx(float(prices.nats.sum()) / math.log(2), rel=1e-9)
    return prices.nats


def lone_prices(predictor: Predictor, shard: Shard, flat: bool) -> np.ndarray:
    """The same, each from as many tokens before it as the context holds, in a pass of its own."""
    spans = []
    for place in range(shard.num_tokens - 1):
        document = int(np.searchsorted(shard.starts, place, side="right")) - 1
        first = 0 if flat else int(shard.starts[document])
        begin = max(first, place + 1 - predictor.context)
        row = torch.from_numpy(shard.tokens[begin : place + 2].astype(np.int64))
        segments = segments_from_starts(np.array([0]), len(row) - 1, predictor.context)
        spans.append(float(predictor.nll(Batch(row[:-1], row[1:], segments))[-1]))
    return np.array(spans)


@pytest.mark.parametrize("batch_tokens", [1, 50, 4096])
def test_a_stride_of_the_context_is_plain_scoring(
    batch_tokens: int, predictor: Predictor, stream: Shard
) -> None:
    plain = stream_prices(predictor, stream, Method())
    sliding = stream_prices(predictor, stream, Method(stride=16), batch_tokens)
    np.testing.assert_allclose(sliding, plain, rtol=1e-6, atol=1e-6)


def test_pieces_look_back_on_the_piece_before(looking_back: Predictor, stream: Shard) -> None:
    plain = stream_prices(looking_back, stream, Method())
    sliding = stream_prices(looking_back, stream, Method(stride=16))
    np.testing.assert_allclose(sliding, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("stride", [3, 8, 15, 16])
def test_windows_do_not_look_back_on_what_shares_their_pass(
    stride: int, flat: bool, looking_back: Predictor, stream: Shard
) -> None:
    method = Method(stride=stride, flat=flat)
    alone, some, together = (
        stream_prices(looking_back, stream, method, batch_tokens) for batch_tokens in (1, 64, 4096)
    )
    # Of every target, so of documents and in total as well.
    np.testing.assert_allclose(some, together, rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(alone, together, rtol=1e-6, atol=1e-5)


def test_trained_weights_slide_as_well(tiny_run: TinyRun, shard: Shard, runtime: Runtime) -> None:
    predictor = open_predictor(tiny_run, adapts=False)
    stored = json.loads(tiny_run.folder.score_file("plain").read_text())
    method = Method(stride=tiny_run.recipe.model.context)
    score = Scorer(predictor, shard, runtime, Clock(), ScorePart(), method).run()
    assert score.bits == pytest.approx(stored["bits"], rel=1e-6)
    assert score.method == "sliding128"


@pytest.mark.parametrize("flat", [False, True])
def test_a_stride_of_one_is_scoring_one_by_one(
    flat: bool, predictor: Predictor, stream: Shard
) -> None:
    sliding = stream_prices(predictor, stream, Method(stride=1, flat=flat))
    np.testing.assert_allclose(sliding, lone_prices(predictor, stream, flat), atol=1e-5)


@pytest.mark.parametrize("stride", [3, 8, 16])
@pytest.mark.parametrize("batch_tokens", [1, 50, 4096])
def test_flat_windows_cross_documents(
    stride: int, batch_tokens: int, predictor: Predictor, stream: Shard
) -> None:
    flat = stream_prices(predictor, stream, Method(stride=stride, flat=True), batch_tokens)
    apart = stream_prices(predictor, stream, Method(stride=stride))
    # The first document is alone either way, but for the window that goes on behind it.
    alone = 16 if stride == 16 else LENGTHS[0]
    np.testing.assert_allclose(flat[:alone], apart[:alone], atol=1e-5)
    begins = [start for start in stream.starts[1:].tolist() if start % 16 or stride < 16]
    assert (np.abs(flat[begins] - apart[begins]) > 1e-3).all()


def test_experts_know_what_the_stream_repeats(predictor: Predictor, stream: Shard) -> None:
    experts = [counts.plug(counts.Settings(orders=(2,)), predictor.model.spec)]
    runtime = Runtime(torch.device("cpu"))
    plain = Scorer(predictor, stream, runtime, Clock(), ScorePart()).run()
    mixed = Scorer(predictor, stream, runtime, Clock(), ScorePart(), mixture=Mixture(experts)).run()
    # Random weights over 512 tokens; the stream has five.
    assert mixed.bits < plain.bits
    assert set(mixed.seconds) == {"start", "hints", "score"}
    assert set(plain.seconds) == {"start", "score"}


@pytest.mark.parametrize("method", [Method(), Method(stride=4), Method(stride=4, flat=True)])
def test_hints_of_no_weight_change_nothing(
    method: Method, predictor: Predictor, stream: Shard, runtime: Runtime
) -> None:
    expert = tilt.plug(tilt.Settings(order=2, boost=0.0), predictor.model.spec)
    part = ScorePart(batch_tokens=40)
    plain = Scorer(predictor, stream, runtime, Clock(), part, method)
    mixed = replace(plain, clock=Clock(), mixture=Mixture([expert])).run()
    for mine, theirs in zip(mixed.entries, plain.run().entries, strict=True):
        assert mine.bits == pytest.approx(theirs.bits, rel=1e-12)


@pytest.mark.parametrize("method", [Method(), Method(stride=4), Method(stride=4, flat=True)])
def test_hints_meet_the_targets_they_are_for(
    method: Method, predictor: Predictor, stream: Shard, runtime: Runtime
) -> None:
    """Whatever the windows, a sure expert that is always right makes every target nearly free."""

    class Oracle:
        strength = tilt.plug(tilt.Settings(boost=16.0), predictor.model.spec).strength

        def open(self, num_histories: int, num_targets: int) -> None:
            pass

        def propose(self, history: int, targets: np.ndarray) -> Proposals:
            sure = np.ones(len(targets), dtype=np.float32)
            return Proposals(targets.astype(np.int64), sure)

    mixture = Mixture([Oracle()])  # type: ignore[list-item]
    plain = Scorer(predictor, stream, runtime, Clock(), ScorePart(), method)
    score = replace(plain, clock=Clock(), mixture=mixture).run()
    assert score.bits < 1e-2 * score.num_targets < plain.run().bits


def test_time_that_is_up_at_once_leaves_a_plain_score(
    tiny_run: TinyRun, shard: Shard, runtime: Runtime
) -> None:
    part = ScorePart(batch_tokens=1, adapt_tokens=1)
    plain = score_of(tiny_run, shard, runtime, part)
    method = Method(name="adapt", seconds=1e-9)
    predictor = open_predictor(tiny_run)
    score = Scorer(predictor, shard, runtime, Clock(), part, method, adapts=True).run()
    assert score.stopped_at == 0
    assert score.events[0] == ("stop", 0, 0)
    assert score.entries == plain.entries
    assert (score.side_bits, score.bits) == (STOP_BITS, plain.bits + STOP_BITS)


def test_nothing_is_learnt_once_time_is_up(
    tiny_run: TinyRun, shard: Shard, runtime: Runtime
) -> None:
    part = ScorePart(batch_tokens=1, adapt_tokens=1)
    whole = score_of(tiny_run, shard, runtime, part, adapt=True)
    predictor, method = open_predictor(tiny_run), Method(name="adapt", seconds=2)
    scorer = Scorer(predictor, shard, runtime, Clock(), part, method, adapts=True)
    # The first tick is the start; units 0 and 1 are in time.
    score = replace(scorer, now=ticks()).run()
    assert (score.stopped_at, score.side_bits) == (2, STOP_BITS)
    kinds = [event[0] for event in score.events]
    assert kinds == ["price", "adapt"] * 2 + ["stop"] + ["price"] * (shard.num_documents - 2)
    assert score.num_targets == whole.num_targets
    # What was learnt before is kept: all that follows is scored with it.
    still = Scorer(predictor, shard, runtime, Clock(), part).run()
    assert score.entries[:3] == whole.entries[:3]
    assert score.entries[2:] == still.entries[2:]
    assert score.entries[3:] != whole.entries[3:]


def test_data_of_another_tokenizer_is_refused(
    tiny_run: TinyRun, corpus_file: Path, tmp_path: Path, runtime: Runtime
) -> None:
    from underpar.data.build import BuildOptions, build_data

    build_data([corpus_file], tmp_path / "other", BuildOptions(450, 0.1))
    with pytest.raises(ArtifactError, match="built with"):
        score_artifact(tiny_run.folder.artifact_file, tmp_path / "other", runtime)


if __name__ == "__main__":
    for words in json.loads(sys.argv[1]):
        cli.app(words, standalone_mode=False)
