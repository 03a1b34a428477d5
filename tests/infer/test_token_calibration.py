"""Calibrated logits: the arithmetic, who may set the numbers, and the way from pack to audit."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lane_runs import MODEL, SHARD, VOCAB
from lever_stacks import batch_of, randomized
from tiny import TinyRun
from underpar.artifact.unpack import Artifact
from underpar.audit.finding import NOT_SHOWN, PASS
from underpar.audit.probes import distribution_errors, substitution_sums
from underpar.build.artifact import read_artifact
from underpar.build.levers import lever_settings
from underpar.build.model import build_model
from underpar.build.scoring import ScoringRequest, method_of, open_method, run_method
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime
from underpar.data.folder import load_data
from underpar.errors import RecipeError, RuleError
from underpar.infer.predictor import Predictor
from underpar.levers.token_calibration import FIRST_MERGE, Settings, plug
from underpar.quant.files import read_quantized
from underpar.quant.schemes import QuantizedTensor, Scheme
from underpar.recipe import ModelSpec, Recipe, from_tree, load_recipe, merge, to_tree
from underpar.score.ledger import Score
from underpar.score.method import ADAPT, PLAIN, Method
from underpar.stages.audit import AuditRequest, audit_run
from underpar.stages.pack import pack_run
from underpar.stages.score import score_artifact
from underpar.stages.train import train
from underpar.submit.bundle import bundle

CPU = torch.device("cpu")
NAME = "token_calibration"
ALONE = Method((NAME,))
NEUTRAL = Settings()
ODD = Settings((1.2, 0.7, 0.9, 1.1, 1.0, 0.8, 1.3), (0.5, -0.5, 0.2, 0.0, -1.0, 0.3, 0.1))
GRIDS = ("embedding.weight grid1", "blocks.*.weight grid1+columns", "*.weight int6:12", "* fp16")


def predictor_of(
    settings: Settings | None, *levers: str, dtype: torch.dtype = torch.float32
) -> Predictor:
    recipe = load_recipe("cpu", ["model.num_layers=2", *levers])
    predictor = Predictor(randomized(recipe), CPU, [], dtype)
    if settings is not None:
        plug(settings, recipe.model).attach(predictor.model)
    return predictor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("levers", [(), ("levers.asym_softcap=true",)])
def test_identity_leaves_prices_bit_for_bit(levers: tuple[str, ...], dtype: torch.dtype) -> None:
    batch = batch_of([30, 40], 128)
    plain, same, other = (
        predictor_of(settings, *levers, dtype=dtype).log_probs(batch)
        for settings in (None, NEUTRAL, ODD)
    )
    assert torch.equal(plain, same)
    assert not torch.allclose(plain, other, atol=1e-2)


def test_logits_get_the_numbers_of_their_class_behind_the_cap() -> None:
    predictor, plain = predictor_of(ODD), predictor_of(None)
    hidden = torch.randn(5, plain.model.spec.dim)
    classes = plug(ODD, plain.model.spec).classes
    capped = plain.model.head(hidden)
    expected = capped * torch.tensor(ODD.scales)[classes] + torch.tensor(ODD.biases)[classes]
    torch.testing.assert_close(predictor.model.head(hidden), expected)
    assert set(classes.tolist()) == set(range(7))


@pytest.mark.parametrize("levers", [(), ("levers.softcap=true",)])
def test_a_compiler_takes_it(levers: tuple[str, ...]) -> None:
    model = predictor_of(ODD, *levers).model
    hidden = torch.randn(5, model.spec.dim)
    compiled = torch.compile(model.head, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(hidden), model.head(hidden), rtol=0, atol=1e-4)
    torch._dynamo.reset()


def test_prices_are_a_distribution() -> None:
    predictor = predictor_of(ODD)
    document = np.append(1, np.random.default_rng(0).integers(4, 500, 40))
    vocab = predictor.model.spec.vocab_size
    for total in substitution_sums(predictor, document, [1, 8], vocab):
        assert abs(total - 1) < 1e-4
    assert max(distribution_errors(predictor, document, vocab)) < 1e-4


@settings(max_examples=60, deadline=None)
@given(vocab=st.integers(4, 70_000))
def test_classes_are_ranges_of_ids_that_grow(vocab: int) -> None:
    classes = plug(NEUTRAL, ModelSpec(vocab_size=vocab)).classes
    assert len(classes) == vocab and bool((classes.diff() >= 0).all())
    assert bool((classes[:FIRST_MERGE] == 0).all()) and bool((classes[FIRST_MERGE:] > 0).all())
    sizes = torch.bincount(classes, minlength=7)[1:]
    assert len(sizes) == 6 and bool((sizes.diff() >= -1).all())
    if vocab > 2 * FIRST_MERGE:
        assert bool((sizes > 0).all()) and sizes[-1] > 1.5 * sizes[0]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("scales=[1, 1, 1]", "scales = .*: expected 7 numbers"),
        ("biases=[]", "biases = .*: expected 7 numbers"),
        ("scales=[1, 1, 1, 0, 1, 1, 1]", "scales = .*: expected more than 0"),
        ("scales=[1, 1, 1, -2.5, 1, 1, 1]", "scales = .*: expected more than 0"),
        ("scales=[1, 1, 1, 200, 1, 1, 1]", "scales = .*: expected more than 0, up to 100"),
        ("scales=[1, 1, 1, nan, 1, 1, 1]", "scales = nan: expected a finite number"),
        ("biases=[0, 0, 0, inf, 0, 0, 0]", "biases = inf: expected a finite number"),
        ("biases=[0, 0, 0, -101, 0, 0, 0]", "biases = .*: expected -100 to 100"),
        ("biases=3", "biases = 3: expected a list"),
        ("scale=[1, 1, 1, 1, 1, 1, 1]", "token_calibration.scale; did you mean 'scales'"),
    ],
)
def test_bad_numbers_are_refused_in_one_line(setting: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words) as caught:
        lever_settings(load_recipe("cpu", [f"levers.{NAME}.{setting}"]))
    assert "\n" not in str(caught.value)
    with pytest.raises(RecipeError, match="expected more than 0"):
        Settings(scales=(1.0, math.nan, *NEUTRAL.scales[2:]))


def artifact_of(settings: Settings | None) -> Artifact:
    """A tiny random model; all of its ids are of the first class."""
    levers = [f"levers.{NAME}.scales={list(settings.scales)}"] if settings else []
    recipe = load_recipe("cpu", [*MODEL, *levers, "score.adapt_tokens=20"])
    weights = randomized(load_recipe("cpu", MODEL)).state_dict()
    tensors = {
        name: QuantizedTensor(tuple(w.shape), Scheme(), w.numpy().astype(np.float16).ravel())
        for name, w in weights.items()
    }
    return Artifact(recipe, b"", tensors)


def score_of(artifact: Artifact, method: Method, *changes: str) -> Score:
    opened, recipe = open_method(artifact.recipe, method, changes)
    return run_method(replace(artifact, recipe=recipe), SHARD, ScoringRequest(opened, Runtime(CPU)))


LORA = "levers.lora_ttt={rank=2, chunk=8, short=[], lanes=3, lr=0.01}"
PHASED = "levers.phased_sgd={prefix=0.4, lr=0.1, chunk_tokens=16}"


@pytest.mark.parametrize(
    ("levers", "changes"),
    [
        ((), ()),
        (("tilt",), ("levers.tilt.order=2",)),
        (("adapt_scales", "adapt_bias"), ()),
        (("lora_ttt",), (LORA,)),
        (("lora_ttt", "phased_sgd", "tilt"), (LORA, PHASED, "levers.tilt.order=2")),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else None,
)
def test_it_goes_with_every_way_to_score(levers: tuple[str, ...], changes: tuple[str, ...]) -> None:
    method, without = Method((*levers, NAME)), Method(levers)
    same = score_of(artifact_of(NEUTRAL), method, *changes)
    plain = score_of(artifact_of(NEUTRAL), without, *changes)
    other = score_of(artifact_of(ODD), method, *changes)
    assert [e.bits for e in same.entries] == [e.bits for e in plain.entries]
    assert same.events == plain.events == other.events
    assert math.isfinite(other.bits) and abs(other.bits / plain.bits - 1) > 1e-3
    # Without its name in the method the artifact's numbers do nothing.
    assert score_of(artifact_of(ODD), without, *changes).bits == plain.bits
    assert VOCAB < FIRST_MERGE and other.method.endswith(NAME)


def test_a_score_has_the_numbers_of_its_artifact_and_no_others() -> None:
    artifact = artifact_of(ODD)
    score = score_of(artifact, ALONE)
    assert score.how["settings"][NAME]["scales"] == ODD.scales
    assert method_of(score, artifact.recipe)[1].levers[NAME]["scales"] == ODD.scales
    # What was asked for is checked, and what a score says of itself.
    for bad in (artifact_of(None), artifact_of(NEUTRAL)):
        with pytest.raises(RuleError, match="'underpar pack' fitted and no others"):
            method_of(score, bad.recipe)
    with pytest.raises(RuleError, match="'underpar pack' fitted and no others"):
        open_method(artifact.recipe, ALONE, [f"levers.{NAME}.biases={[1.0] * 7}"])
    with pytest.raises(RuleError, match="name it in the recipe") as caught:
        open_method(artifact_of(None).recipe, ALONE)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def recipe(tiny_run: TinyRun) -> Recipe:
    return changed(tiny_run.recipe, {"train": {"budget_steps": 12}})


def changed(recipe: Recipe, change: dict[str, Any]) -> Recipe:
    return from_tree(merge(to_tree(recipe), {"levers": {NAME: {}}, **change}))


@pytest.fixture(scope="module")
def packed(
    recipe: Recipe, tiny_run: TinyRun, runtime: Runtime, tmp_path_factory: pytest.TempPathFactory
) -> RunFolder:
    folder = RunFolder(tmp_path_factory.mktemp("packed") / "run")
    assert train(recipe, tiny_run.data, folder, runtime)["finished"]
    pack_run(folder)
    return folder


def test_packing_fits_the_numbers_into_the_artifact(packed: RunFolder, recipe: Recipe) -> None:
    artifact, _ = read_artifact(packed.artifact_file)
    settings = lever_settings(artifact.recipe)[NAME]
    assert settings != NEUTRAL
    # The artifact's recipe is the run's but for them.
    assert packed.read_recipe().levers[NAME]["scales"] == list(NEUTRAL.scales)
    emptied = replace(artifact.recipe, levers={**artifact.recipe.levers, NAME: {}})
    assert emptied == replace(packed.read_recipe(), levers=emptied.levers)
    assert emptied.levers.keys() == recipe.levers.keys()
    about = read_quantized(packed.quantized_file)[1]
    before, after = about["fit_nats"][NAME]
    assert after < before and about["tune_seconds"] > 0
    without = replace(recipe, levers={n: v for n, v in recipe.levers.items() if n != NAME})
    assert len(bundle(recipe)) > len(bundle(without)) + 200


def test_packing_again_gives_the_same_bytes(packed: RunFolder) -> None:
    first = packed.artifact_file.read_bytes()
    pack_run(packed)
    assert packed.artifact_file.read_bytes() == first
    packed.quantized_file.unlink()
    pack_run(packed)
    assert packed.artifact_file.read_bytes() == first


@pytest.mark.slow
def test_a_filled_cap_has_room_for_them(
    tiny_run: TinyRun, runtime: Runtime, tmp_path: Path
) -> None:
    grids = {"quant": {"rules": list(GRIDS)}, "train": {"budget_steps": 6}}
    folder, cap = RunFolder(tmp_path), 225_000
    assert train(changed(tiny_run.recipe, grids), tiny_run.data, folder, runtime)["finished"]
    assert 0.99 * cap < pack_run(folder, cap).total_bytes <= cap
    assert lever_settings(read_artifact(folder.artifact_file)[0].recipe)[NAME] != NEUTRAL


def test_scores_use_them_and_the_audit_agrees(
    packed: RunFolder, tiny_run: TinyRun, runtime: Runtime
) -> None:
    plain, alone, adapted = (
        score_artifact(packed.artifact_file, tiny_run.data, runtime, method).score
        for method in (PLAIN, ALONE, ADAPT)
    )
    artifact, _ = read_artifact(packed.artifact_file)
    levers = {n: v for n, v in artifact.recipe.levers.items() if n != NAME}
    bare = replace(artifact, recipe=replace(artifact.recipe, levers=levers))
    data = load_data(tiny_run.data)
    assert run_method(bare, data.val, ScoringRequest(PLAIN, runtime)).bits == plain.bits
    # New text is predicted better, if only a little.
    assert 0 < 1 - alone.bits / plain.bits < 0.1
    assert adapted.how["levers"] == ["adapt_scales", NAME]
    audited = audit_run(packed, runtime, AuditRequest(tiny_run.data, code_tokens=300))
    # No codec follows adapters of the whole stream.
    verdicts = {finding.rule: finding.verdict for finding in audited.findings}
    assert verdicts.pop("coded bits") == NOT_SHOWN
    assert set(verdicts.values()) == {PASS}, verdicts
    told = next(finding for finding in audited.findings if finding.rule == "score before update")
    assert told.evidence["changed_prices"] == {"plain": 0, "adapt": 0, NAME: 0}


def test_the_model_has_no_weights_of_it(recipe: Recipe) -> None:
    assert not [name for name in build_model(recipe).state_dict() if NAME in name]
