"""From the name of a method to its score: levers and settings, engines, and what is refused."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from lane_runs import CONTEXT, MODEL, NUM_TARGETS, SHARD, SORTED, Run
from lever_stacks import CPU, randomized
from underpar.artifact.unpack import Artifact
from underpar.build.levers import lever_settings, resolve_levers
from underpar.build.model import build_predictor
from underpar.build.scoring import ScoringRequest, method_of, open_method, run_method
from underpar.core.runtime import Runtime
from underpar.errors import ArtifactError, RecipeError, RuleError, UnderparError
from underpar.levers.lora_ttt import Settings
from underpar.quant.schemes import QuantizedTensor, Scheme
from underpar.recipe import load_recipe
from underpar.score.ledger import Score
from underpar.score.method import ADAPT, PLAIN, PUBLISHED, Method

LEVERS = ["levers.smear.init=0.5", "levers.adapt_scales=true"]
LEVERS += ["levers.lora_ttt={rank=2, chunk=8, short=[]}", "score.adapt_tokens=20"]
RECIPE = load_recipe("cpu", [*MODEL, *LEVERS])
LANES = Method(("lora_ttt",))
SMALL = [f"levers.lora_ttt.{value}" for value in ("lr=0.01", "lanes=3", "group=3")]


@pytest.fixture(scope="module")
def artifact() -> Artifact:
    weights = randomized(RECIPE).state_dict()
    tensors = {
        name: QuantizedTensor(tuple(w.shape), Scheme(), w.numpy().astype(np.float16).ravel())
        for name, w in weights.items()
    }
    return Artifact(RECIPE, b"", tensors)


def score_of(artifact: Artifact, method: Method, *changes: str) -> Score:
    opened, recipe = open_method(artifact.recipe, method, changes)
    request = ScoringRequest(opened, Runtime(torch.device("cpu")))
    return run_method(replace(artifact, recipe=recipe), SHARD, request)


def test_levers_have_the_settings_of_the_recipe_or_their_defaults() -> None:
    method = Method(("lora_ttt", "tilt"))
    changes = ["levers.lora_ttt.alpha=3.0", "levers.tilt={order=4}", "score.batch_tokens=7"]
    opened, recipe = open_method(RECIPE, method, changes)
    stored = lever_settings(recipe)
    assert opened == method and set(recipe.levers) == {*RECIPE.levers, "tilt"}
    assert (stored["lora_ttt"].rank, stored["lora_ttt"].chunk, stored["lora_ttt"].alpha) == (
        2,
        8,
        3.0,
    )
    assert (stored["tilt"].order, stored["tilt"].boost) == (4, 2.625)
    assert (recipe.score.batch_tokens, recipe.score.adapt_tokens) == (7, 20)
    assert open_method(RECIPE, PLAIN)[0] is PLAIN


def test_adapt_means_the_levers_of_the_recipe() -> None:
    levers = {name: RECIPE.levers[name] for name in ("smear", "lora_ttt")}
    assert open_method(replace(RECIPE, levers=levers), ADAPT)[0] == replace(
        ADAPT, levers=("lora_ttt",)
    )
    with pytest.raises(RuleError, match="does not say how to adapt: it names no scoring lever"):
        open_method(replace(RECIPE, levers={}), ADAPT)


WINDOWS = load_recipe(
    "cpu", [*MODEL, LEVERS[0], "score.stride=6", "score.flat=true", "score.context=12"]
)


def test_adapt_has_the_windows_of_the_recipe_and_other_methods_do_not() -> None:
    method, recipe = open_method(WINDOWS, ADAPT)
    assert (method.label, method.stride, method.flat) == ("adapt", 6, True)
    assert (recipe.model.context, WINDOWS.model.context) == (12, CONTEXT)
    # What the command changes is not the recipe's way any more.
    method, _ = open_method(WINDOWS, ADAPT, ["score.stride=3", "score.flat=false"])
    assert (method.label, method.stride, method.flat) == ("sliding3", 3, False)
    method, recipe = open_method(WINDOWS, PLAIN)
    assert method is PLAIN
    assert recipe.model.context == CONTEXT and recipe.score == replace(
        RECIPE.score, adapt_tokens=1024
    )
    with pytest.raises(RuleError, match="set with --stride, --flat and --order"):
        open_method(WINDOWS, PLAIN, ["score.flat=true"])


def test_a_score_by_the_windows_of_its_recipe_says_how_to_repeat_it(artifact: Artifact) -> None:
    windows = replace(artifact, recipe=WINDOWS)
    plain, adapt = score_of(windows, PLAIN), score_of(windows, ADAPT)
    assert adapt.method == "adapt" and adapt.bits != plain.bits
    assert method_of(adapt, WINDOWS) == open_method(WINDOWS, ADAPT)
    assert method_of(plain, WINDOWS) == open_method(WINDOWS, PLAIN)
    # The same windows, asked for by hand.
    by_hand = score_of(windows, Method(stride=6, flat=True), "score.context=12")
    assert by_hand.bits == adapt.bits


@pytest.mark.parametrize(
    ("method", "changes", "kind", "words"),
    [
        (Method(("lora_tt",)), "", RecipeError, "--with lora_tt: no such lever; did you mean 'lor"),
        (Method(("smear",)), "", RecipeError, "--with smear: it is no lever of scoring"),
        # It needs another lever, which is not what is wrong with it here.
        (Method(("pass_embed",)), "", RecipeError, "--with pass_embed: it is no lever of scoring"),
        (LANES, "levers.tilt.order=4", RecipeError, "--set levers.tilt.order=4: expected a value"),
        (LANES, "model.dim=64", RecipeError, "--set model.dim=64: expected a value of a lever of"),
        (LANES, "levers=3", RecipeError, "--set levers=3: expected a value"),
        (LANES, "levers.lora_ttt=false", RecipeError, "--set levers.lora_ttt=false: expected a v"),
        (LANES, "levers.lora_ttt.rang=4", RecipeError, "levers.lora_ttt.rang; did you mean 'rank'"),
        (LANES, "levers.lora_ttt.chunk=99", RecipeError, "a chunk of 99 tokens"),
        (LANES, "score=3", RecipeError, "score = 3: expected a table"),
        (LANES, "score.adapt_tokens=0", RecipeError, "score.adapt_tokens = 0"),
        (
            Method(("lora_ttt", "stream_sgd")),
            "",
            RuleError,
            "lora_ttt and stream_sgd: documents or",
        ),
        (ADAPT, "", RuleError, "lora_ttt and adapt_scales: documents or the stream adapt, not bo"),
        (Method(("phased_sgd",)), "", RuleError, "phased_sgd goes with lora_ttt: add --with lora"),
        (Method(order=PUBLISHED), "", RuleError, "the published order .* add --with lora_ttt"),
        (Method(stride=17), "", RuleError, "stride 17: a window has 16 tokens"),
        (Method(stride=9), "score.context=8", RuleError, "stride 9: a window has 8 tokens"),
        (replace(LANES, stride=8), "", RuleError, "lora_ttt has windows of its own: leave out --s"),
        (replace(LANES, flat=True), "", RuleError, "lora_ttt has windows of its own: leave out"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(
    method: Method, changes: str, kind: type[UnderparError], words: str
) -> None:
    with pytest.raises(kind, match=words) as caught:
        open_method(RECIPE, method, [changes] if changes else [])
    assert "\n" not in str(caught.value)


def test_a_stored_method_is_checked_again(artifact: Artifact) -> None:
    request = ScoringRequest(replace(LANES, stride=8), Runtime(torch.device("cpu")))
    with pytest.raises(RuleError, match="windows of its own"):
        run_method(artifact, SHARD, request)


def test_the_published_order_implies_groups_fresh_keys_and_decay(artifact: Artifact) -> None:
    changes = [*SMALL, "levers.lora_ttt.group=2", "levers.lora_ttt.decay=20.0"]
    score = score_of(artifact, replace(LANES, order=PUBLISHED), *changes)
    settings = Settings(rank=2, chunk=8, short=(), lr=0.01, decay=20.0, lanes=2, keys="fresh")

    def by_hand(decay_all: bool) -> float:
        model = build_predictor(artifact, CPU).model
        whole = replace(settings, decay_all=decay_all)
        return Run(settings=whole, method=SORTED, model=model).go().score.bits

    assert score.bits == by_hand(decay_all=True) != by_hand(decay_all=False)
    with pytest.raises(RecipeError, match="group = 0: expected at least 1"):
        score_of(artifact, LANES, "levers.lora_ttt.group=0")


def test_documents_and_the_stream_have_their_engines(artifact: Artifact) -> None:
    plain = score_of(artifact, PLAIN)
    stream = score_of(artifact, Method(("adapt_scales",)))
    lanes = score_of(artifact, LANES, *SMALL)
    wide = score_of(artifact, Method(stride=CONTEXT // 2))
    tilted = score_of(artifact, Method(("lora_ttt", "tilt")), *SMALL, "levers.tilt.order=2")
    scores = (plain, stream, lanes, wide, tilted)
    for score in scores:
        assert [entry.num_targets for entry in score.entries] == NUM_TARGETS
        assert math.isfinite(score.bits)
    assert len({score.bits for score in scores}) == len(scores)
    labels = ["plain", "adapt_scales", "lora_ttt", "sliding8", "lora_ttt+tilt"]
    assert [score.method for score in scores] == labels
    # Documents by number on the one side, steps and targets on the other.
    assert plain.events == [("price", 0, 7)]
    assert lanes.events[:2] == [("price", 0, 11), ("adapt", 0, 8)]
    assert plain.how["settings"] == {} and plain.how["products"] == "torch.float32"
    assert lanes.how["settings"]["lora_ttt"]["lr"] == 0.01


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        (LANES, SMALL),
        (replace(LANES, order=PUBLISHED, name="mine"), SMALL),
        (Method(("adapt_scales",)), ["score.adapt_tokens=30", "levers.adapt_scales.lr=0.1"]),
    ],
)
def test_a_score_says_how_to_repeat_it(
    artifact: Artifact, method: Method, changes: list[str]
) -> None:
    score = score_of(artifact, method, *changes)
    stored = replace(score, how=json.loads(json.dumps(score.how)))
    named, recipe = method_of(stored, artifact.recipe)
    assert (named, recipe) == open_method(RECIPE, method, changes)
    again = run_method(
        replace(artifact, recipe=recipe), SHARD, ScoringRequest(named, Runtime(torch.device("cpu")))
    )
    assert again.entries == score.entries and again.how == score.how
    assert again.entries != score_of(artifact, method).entries


def test_a_score_that_does_not_say_how_is_refused() -> None:
    for settings in ({}, {"tilt": {}}, 3):
        score = Score("lora_ttt", [], how={"levers": ["lora_ttt"], "settings": settings})
        with pytest.raises(RuleError, match="'lora_ttt' does not say how its levers were set"):
            method_of(score, RECIPE)
    score = Score("plain", [], how={"score": {"adapt_tokens": -1}})
    with pytest.raises(RecipeError, match=r"score\.adapt_tokens"):
        method_of(score, RECIPE)
    assert method_of(Score("plain", []), RECIPE)[0] == PLAIN


def test_shares_and_prices_are_heard_of(artifact: Artifact) -> None:
    shares, commits = [], []
    method, recipe = open_method(RECIPE, LANES, SMALL)
    request = ScoringRequest(
        method,
        Runtime(torch.device("cpu")),
        on_share=lambda share, bpb: shares.append((share, bpb)),
        on_commit=lambda document, first, nats: commits.append(len(nats)),
    )
    score = run_method(replace(artifact, recipe=recipe), SHARD, request)
    assert sum(commits) == score.num_targets == sum(NUM_TARGETS)
    assert [share for share, _ in shares] == sorted(share for share, _ in shares)
    assert shares[-1][0] == 1.0 and shares[-1][1] == pytest.approx(score.bpb)


def test_an_expert_of_words_needs_the_tokenizer(artifact: Artifact) -> None:
    with pytest.raises(ArtifactError, match="artifact's tokenizer cannot be used") as caught:
        score_of(artifact, Method(("ngram",)))
    assert "\n" not in str(caught.value)
    # The token expert does not.
    assert score_of(artifact, Method(("ngram",)), 'levers.ngram.experts=["token"]').bits > 0


def test_published_recipes_say_how_they_are_scored() -> None:
    def opened(name: str) -> Method:
        return open_method(resolve_levers(load_recipe(name)), ADAPT)[0]

    assert opened("pr2014").levers == opened("h200-300s").levers == ("lora_ttt", "phased_sgd")
    assert opened("pr2135").levers == ("lora_ttt", "phased_sgd", "tilt")
    stream, experts = opened("pr1894"), opened("pr1219")
    assert (stream.levers, stream.stride, stream.flat) == (("stream_sgd",), 64, True)
    assert (experts.levers, experts.stride, experts.flat) == (("ngram",), 128, True)
    assert {opened(name).label for name in ("pr2014", "pr2135", "pr1894", "pr1219")} == {"adapt"}
