"""Scoring: full coverage, independence of batching and ranks, uniform models, adaptation."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tiny import TinyRun
from underpar import pipeline
from underpar.build import build_predictor, read_artifact
from underpar.data.folder import load_data
from underpar.data.loader import Batch
from underpar.data.shards import Shard
from underpar.errors import ArtifactError, RuleError
from underpar.infer.predictor import Predictor
from underpar.recipe import ScorePart
from underpar.runtime import Clock, Runtime
from underpar.score.ledger import Score
from underpar.score.score import Scorer


class Uniform:
    """Prices every token alike."""

    context, can_adapt = 64, False

    def __init__(self, vocab_size: int) -> None:
        self.nats = math.log(vocab_size)

    def nll(self, batch: Batch) -> torch.Tensor:
        return torch.full((len(batch.targets),), self.nats)


@pytest.fixture(scope="module")
def shard(tiny_run: TinyRun) -> Shard:
    return load_data(tiny_run.data).val


def open_predictor(tiny_run: TinyRun) -> Predictor:
    artifact, _ = read_artifact(tiny_run.folder.artifact_file)
    return build_predictor(artifact, torch.device("cpu"))


def score_of(
    tiny_run: TinyRun, shard: Shard, runtime: Runtime, part: ScorePart, **kw: bool
) -> Score:
    return Scorer(open_predictor(tiny_run), shard, runtime, Clock()).run(part, **kw)


def test_a_uniform_model_costs_log_v_a_target(shard: Shard, runtime: Runtime) -> None:
    predictor: object = Uniform(512)
    score = Scorer(predictor, shard, runtime, Clock()).run(ScorePart())  # type: ignore[arg-type]
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


def test_two_ranks_give_the_same_total(tiny_run: TinyRun, tmp_path: Path) -> None:
    artifact = tmp_path / "model.upar"
    artifact.write_bytes(tiny_run.folder.artifact_file.read_bytes())
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = [
        "-m",
        "underpar",
        "score",
        str(artifact),
        "--data",
        str(tiny_run.data),
        "--device",
        "cpu",
    ]
    subprocess.run(
        [*launcher, *words],
        check=True,
        capture_output=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    ours = json.loads((tmp_path / "score-plain.json").read_text())
    stored = json.loads(tiny_run.folder.score_file("plain").read_text())
    assert ours["bits"] == pytest.approx(stored["bits"], rel=1e-9)
    assert (ours["targets"], ours["bytes"]) == (stored["targets"], stored["bytes"])


def test_adapting_needs_an_adapter_and_one_rank(
    tiny_run: TinyRun, shard: Shard, runtime: Runtime
) -> None:
    artifact, _ = read_artifact(tiny_run.folder.artifact_file)
    without = {k: v for k, v in artifact.recipe.levers.items() if k != "adapt_scales"}
    recipe = dataclasses.replace(artifact.recipe, levers=without)
    bare = build_predictor(dataclasses.replace(artifact, recipe=recipe), torch.device("cpu"))
    with pytest.raises(RuleError, match="names no adapter"):
        Scorer(bare, shard, runtime, Clock()).run(ScorePart(), adapt=True)
    pair = Runtime(torch.device("cpu"), 0, 2)
    with pytest.raises(RuleError, match="single rank"):
        Scorer(open_predictor(tiny_run), shard, pair, Clock()).run(ScorePart(), adapt=True)


def test_data_of_another_tokenizer_is_refused(
    tiny_run: TinyRun, corpus_file: Path, tmp_path: Path, runtime: Runtime
) -> None:
    from underpar.data.build import BuildOptions, build_data

    build_data([corpus_file], tmp_path / "other", BuildOptions(450, 0.1))
    with pytest.raises(ArtifactError, match="built with"):
        pipeline.score_artifact(tiny_run.folder.artifact_file, tmp_path / "other", runtime)
