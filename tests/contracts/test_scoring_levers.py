"""What every lever of stage "infer" must do: predict before learning, in an order a decoder has."""

from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lever_stacks import ALL, CPU, randomized
from underpar.artifact.unpack import Artifact
from underpar.audit.order import wrong_events
from underpar.audit.probes import own_targets_matter
from underpar.audit.traces import TOLERANCE, Commit, Experiment
from underpar.build.levers import plug_levers, resolve_levers
from underpar.build.scoring import ScoringRequest, mixture_of, open_method, run_method
from underpar.core.runtime import Clock, Runtime
from underpar.data.shards import Shard
from underpar.levers import lever_module
from underpar.quant.rounding import round_tensor
from underpar.quant.schemes import parse_scheme
from underpar.recipe import Recipe, load_recipe
from underpar.score.ledger import Score
from underpar.score.method import Method
from underpar.score.partial import Partial, Stopped

SCORING = [name for name in ALL if lever_module(name).STAGE == "infer"]

CONTEXT, VOCAB = 16, 64
SIZES = {"vocab_size": VOCAB, "dim": 32, "num_heads": 2, "num_kv_heads": 1, "mlp_dim": 32}
SIZES |= {"num_layers": 2, "context": CONTEXT}
CHANGES = [f"model.{key}={value}" for key, value in SIZES.items()]
# Several units of pricing and chunks of learning for so little text.
CHANGES += ["score.batch_tokens=60", "score.adapt_tokens=20"]
BYTES = {"dim": 16, "num_heads": 2, "num_kv_heads": 1, "mlp_dim": 16, "encoder_layers": 1}
CHANGES_OF_BYTES = [f"hnet.{key}={value}" for key, value in BYTES.items()]
CHANGES_OF_BYTES += [f"{where}levers.partial_rope.dims=4" for where in ("", "hnet.")]
PLAIN = {
    "gpt": load_recipe("cpu", CHANGES),
    "stride": load_recipe("hnet-m1-fixed+cpu", [*CHANGES, *CHANGES_OF_BYTES]),
    "learned": load_recipe("hnet-m2+cpu", [*CHANGES, *CHANGES_OF_BYTES]),
}
PLAIN = {network: replace(recipe, levers={}) for network, recipe in PLAIN.items()}
# Experts guess from the text alone, without a network.
EXPERTS = ("tilt", "match", "counts", "ngram")
CASES = pytest.mark.parametrize(
    ("name", "network"),
    [
        (name, network)
        for name in SCORING
        for network in PLAIN
        if network == "gpt" or name == "lora_ttt" or (network == "learned" and name not in EXPERTS)
    ],
)

# Settings that act on so little text, where the defaults would not.
SMALL: dict[str, dict[str, Any]] = {
    "lora_ttt": {"rank": 3, "chunk": 6, "short": ("12:4",), "lanes": 2, "group": 2, "lr": 0.01},
    "adapt_scales": {"patterns": ("*blocks.*_scale",)},
    "phased_sgd": {"prefix": 0.4, "lr": 0.1, "chunk_tokens": 16},
    "token_calibration": {"scales": (0.9,) * 7, "biases": (0.1, 0.0, 0.2, 0.0, 0.0, 0.0, 0.0)},
    "tilt": {"order": 3, "min_confidence": 0.4},
    "match": {"lengths": (1, 2)},
    "counts": {"orders": (2, 3), "min_count": 1, "min_confidence": 0.0},
    # Experts of words need a tokenizer, which these artifacts do not have.
    "ngram": {"experts": ("token",), "contexts": (1, 2), "gates": ("1:0.4:1",)},
}


def shard_of(*lengths: int) -> Shard:
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


# Documents longer than the context too; after the last one there is no target.
LENGTHS = (34, 20, 47, 9, 30)
NUM_TARGETS = (*LENGTHS[:-1], LENGTHS[-1] - 1)
SHARD = shard_of(*LENGTHS)
# Documents that leave room for a chunk in the context, so that all methods read the same windows.
WHOLE = shard_of(12, 9, 11, 10, 7)


def neutral(name: str) -> dict[str, Any]:
    """Settings with which the lever does nothing: NEUTRAL, or rates of 0, or else its defaults."""
    module: Any = lever_module(name)
    if hasattr(module, "NEUTRAL"):
        return asdict(module.NEUTRAL)
    rates = {f.name: 0.0 for f in fields(module.Settings) if f.name in ("lr", "cap_lr")}
    return small(name) | rates if rates else {}


def small(name: str) -> dict[str, Any]:
    return SMALL.get(name, {})


def recipe_with(
    name: str, network: str, settings: Callable[[str], dict[str, Any]] = small
) -> Recipe:
    """The recipe with the lever, and with per-document adapters if the lever goes with them."""
    names = ("lora_ttt", name) if name == "phased_sgd" else (name,)
    return resolve_levers(replace(PLAIN[network], levers={n: settings(n) for n in names}))


def artifact_of(recipe: Recipe) -> Artifact:
    half = parse_scheme("fp16")
    weights = randomized(recipe).state_dict()
    return Artifact(recipe, b"", {n: round_tensor(w.numpy(), half) for n, w in weights.items()})


def run(recipe: Recipe, shard: Shard = SHARD, **way: Any) -> tuple[Score, list[Commit]]:
    """The score with all scoring levers of the recipe, and its prices in the order of entry."""
    method, opened = open_method(recipe, Method(tuple(plug_levers(recipe, "infer"))))
    commits: list[Commit] = []
    settled = {"runtime": Runtime(CPU), "on_commit": lambda *new: commits.append(new)} | way
    return run_method(artifact_of(opened), shard, ScoringRequest(method, **settled)), commits


def nats_of(commits: list[Commit]) -> np.ndarray:
    """Prices in the order of the text, whatever the order of entry."""
    return np.concatenate([nats for _, _, nats in sorted(commits, key=lambda c: c[:2])])


@CASES
def test_a_price_depends_on_nothing_that_comes_later(name: str, network: str) -> None:
    recipe = recipe_with(name, network)
    score, _ = run(recipe)

    def trace(shard: Shard) -> list[Commit]:
        return run(recipe, shard)[1]

    assert wrong_events(score, NUM_TARGETS) == 0
    rng = np.random.default_rng(0)
    experiment = Experiment(trace, SHARD, np.arange(4, VOCAB), rng)
    assert experiment.later_tokens_matter() == 0
    # A decoder learns how long a document is at its end.
    assert experiment.later_lengths_matter() == 0
    assert experiment.later_documents_matter() == 0
    assert experiment.repetition_differs() == 0
    assert (
        own_targets_matter(mixture_of(score, artifact_of(recipe)), SHARD.tokens[1:], VOCAB, rng)
        == 0
    )


@CASES
def test_a_scoring_lever_changes_prices(name: str, network: str) -> None:
    """Otherwise prices that stay would show nothing."""
    recipes = recipe_with(name, network), PLAIN[network]
    ours, plain = (nats_of(run(recipe)[1]) for recipe in recipes)
    assert np.abs(ours - plain).max() > 10 * TOLERANCE


@CASES
def test_neutral_settings_price_as_the_plain_score_does(name: str, network: str) -> None:
    recipes = recipe_with(name, network, neutral), PLAIN[network]
    ours, plain = (nats_of(run(recipe, WHOLE)[1]) for recipe in recipes)
    np.testing.assert_allclose(ours, plain, rtol=0, atol=TOLERANCE)


@CASES
def test_a_stopped_score_continues_to_the_same_bits(
    name: str, network: str, tmp_path: Path
) -> None:
    recipe = recipe_with(name, network)
    whole, _ = run(recipe)
    runtime = Runtime(CPU)

    def start(num_steps: float) -> Score:
        steps = iter(range(1, 1000))
        clock = Clock("load")
        partial = Partial(
            tmp_path / "score",
            {"of": name},
            runtime,
            clock,
            lambda: next(steps) > num_steps,
            lambda line: None,
        )
        return run(recipe, runtime=runtime, clock=clock, partial=partial)[0]

    with pytest.raises(Stopped):
        start(num_steps=1)
    ours, theirs = (
        {key: value for key, value in score.as_dict().items() if key != "seconds"}
        for score in (start(num_steps=float("inf")), whole)
    )
    assert ours == theirs
