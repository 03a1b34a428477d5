"""Adapters: they start as nothing, learn lane by lane as AdamW says, and lanes stay apart."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from lever_stacks import CPU, randomized
from underpar.build.levers import lever_settings, plug_levers
from underpar.build.model import build_model
from underpar.errors import RecipeError
from underpar.infer.lora import SITES, AdapterKey, Lora
from underpar.levers.lora_ttt import Settings
from underpar.model.chunk_cache import ChunkCache
from underpar.model.gpt import GPT
from underpar.recipe import load_recipe

ALL_SITES = Settings(sites=SITES, rank=3, lr=0.01)
LANES, CHUNK = 3, 12


@pytest.fixture(scope="module")
def model() -> GPT:
    return randomized(load_recipe("pr2014+cpu")).requires_grad_(False)


def make_lora(model: GPT, settings: Settings, half: bool = False) -> Lora:
    dtype = torch.bfloat16 if half else torch.float32
    return Lora(model, settings, range(LANES), CPU, dtype)


def make_tokens(seed: int, num_lanes: int = LANES) -> torch.Tensor:
    tokens = np.random.default_rng(seed).integers(4, 500, (num_lanes, CHUNK + 1))
    return torch.from_numpy(tokens)


def read(model: GPT, tokens: torch.Tensor) -> torch.Tensor:
    """Nats (L, C) of the first chunk of each lane."""
    num_lanes = len(tokens)
    cache = ChunkCache(model.spec, num_lanes, CPU)
    cache.begin(torch.full((num_lanes,), CHUNK), CHUNK, CHUNK)
    logits = model(tokens[:, :-1].flatten(), cache)
    nats = F.cross_entropy(logits.float(), tokens[:, 1:].flatten(), reduction="none")
    return nats.unflatten(0, (num_lanes, CHUNK))


def learn_from(
    model: GPT, lora: Lora, tokens: torch.Tensor, active: list[bool]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Price, then update; the nats (L, C) before it, and the gradients (L, P) of all weights."""
    with lora.attached():
        nats = read(model, tokens)
    on = torch.tensor(active)
    grads = lora.differentiate(nats[on].mean(1).sum())
    lora.update(on, grads)
    return nats.detach(), grads * lora.root


def learn(model: GPT, lora: Lora, tokens: torch.Tensor, active: list[bool]) -> torch.Tensor:
    """Price, then update; the nats (L, C) before it."""
    return learn_from(model, lora, tokens, active)[0]


def adapters(lora: Lora) -> dict[AdapterKey, tuple[torch.Tensor, torch.Tensor]]:
    return lora.layout.cut(lora.weights)


def fill(lora: Lora, seed: int = 0) -> None:
    """Random B, as after some learning."""
    generator = torch.Generator().manual_seed(seed)
    for _, b in adapters(lora).values():
        b.normal_(std=0.05, generator=generator)
    with torch.no_grad():
        lora.work.copy_(lora.weights * lora.root)


@pytest.mark.parametrize(
    ("sites", "expected"),
    [(("k", "o", "mlp", "head"), 4_526_080), (("q", "v", "o", "mlp", "head"), 5_918_720)],
)
def test_the_published_numbers_of_parameters(sites: tuple[str, ...], expected: int) -> None:
    with torch.device("meta"):
        full = build_model(load_recipe("pr2014"))
    lora = Lora(full, Settings(sites=sites), [], CPU)
    assert lora.num_parameters == expected
    assert lora.weights.shape == (0, expected)


def test_looped_layers_have_adapters_for_each_visit(model: GPT) -> None:
    places = adapters(make_lora(model, ALL_SITES))
    slots = [visit.slot for visit in model.plan]
    assert len(slots) == 17 > model.spec.num_layers
    assert set(places) == {(s, slot) for s in SITES[:-1] for slot in slots} | {("head", None)}
    addresses = {t.data_ptr() for pair in places.values() for t in pair}
    assert len(addresses) == 2 * len(places)


def test_fresh_adapters_change_no_bit(model: GPT) -> None:
    lora, tokens = make_lora(model, ALL_SITES), make_tokens(0)
    with torch.no_grad():
        plain = read(model, tokens)
        with lora.attached():
            assert torch.equal(read(model, tokens), plain)
            fill(lora)
            assert not torch.equal(read(model, tokens), plain)
        assert torch.equal(read(model, tokens), plain)
    assert model.hooks.adjust == []


def test_a_first_a_is_uniform_within_its_bound(model: GPT) -> None:
    lora = make_lora(model, replace(ALL_SITES, rank=20))
    bound = model.spec.dim**-0.5
    for a, b in adapters(lora).values():
        assert a.abs().max() <= bound and a.std() == pytest.approx(bound / math.sqrt(3), rel=0.05)
        assert not b.any()


class ByAutograd:
    """The same adapters with every A and B a leaf of its own."""

    def __init__(self, lora: Lora) -> None:
        self.scale = lora.settings.alpha / lora.settings.rank
        self.leaves = {
            place: tuple(t.clone().requires_grad_() for t in pair)
            for place, pair in adapters(lora).items()
        }

    def adjust(self, site: str, visit: object, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        a, b = self.leaves[site, getattr(visit, "slot", None)]
        x = x.unflatten(0, (len(a), -1))
        return y + self.scale * torch.einsum("lor,lri,lci->lco", b, a, x).flatten(0, 1)


def test_outputs_and_gradients_are_those_of_the_formula(model: GPT) -> None:
    lora, tokens = make_lora(model, ALL_SITES), make_tokens(1)
    fill(lora)
    exact = ByAutograd(lora)
    with lora.attached():
        adapted = read(model, tokens)
    grads = lora.layout.cut(lora.differentiate(adapted.mean()) * lora.root)
    model.hooks.adjust.append(exact.adjust)
    try:
        wanted = read(model, tokens)
    finally:
        model.hooks.adjust.clear()
    wanted.mean().backward()
    torch.testing.assert_close(adapted, wanted, rtol=0, atol=1e-4)
    for place, pair in grads.items():
        for grad, leaf in zip(pair, exact.leaves[place], strict=True):
            assert leaf.grad is not None and leaf.grad.any()
            largest = float(leaf.grad.abs().max())
            torch.testing.assert_close(grad, leaf.grad, rtol=0, atol=1e-3 * largest)


def test_gradients_are_those_of_one_pass(model: GPT) -> None:
    lora, grads = make_lora(model, ALL_SITES), []
    fill(lora)
    for seed in (1, 2, 1):
        with lora.attached():
            nats = read(model, make_tokens(seed))
        grads.append(lora.differentiate(nats.mean()))
    assert torch.equal(grads[0], grads[2]) and not torch.equal(grads[0], grads[1])
    assert lora.work.grad is None


def test_the_first_step_is_a_step_of_the_sign(model: GPT) -> None:
    settings = replace(ALL_SITES, decay=0.5)
    lora = make_lora(model, settings)
    fill(lora)
    before = lora.weights.clone()
    _, g = learn_from(model, lora, make_tokens(0), [True] * LANES)
    wanted = before * (1 - settings.lr * settings.decay) - settings.lr * g / (
        g.abs() + settings.eps
    )
    torch.testing.assert_close(lora.weights, wanted, rtol=1e-6, atol=1e-7)


def test_a_stays_in_the_first_step_as_b_is_zero(model: GPT) -> None:
    lora = make_lora(model, replace(ALL_SITES, decay=0.0))
    before = {place: a.clone() for place, (a, _) in adapters(lora).items()}
    learn(model, lora, make_tokens(0), [True] * LANES)
    for place, (a, b) in adapters(lora).items():
        assert torch.equal(a, before[place]) and b.any()


def test_steps_are_those_of_adamw(model: GPT) -> None:
    settings = replace(ALL_SITES, decay=0.5)
    lora = make_lora(model, settings)
    leaf = lora.weights.clone().requires_grad_()
    theirs = torch.optim.AdamW(
        [leaf], settings.lr, (0.0, settings.beta2), settings.eps, settings.decay
    )
    for seed in range(4):
        _, leaf.grad = learn_from(model, lora, make_tokens(seed), [True] * LANES)
        theirs.step()
        torch.testing.assert_close(lora.weights, leaf.detach(), rtol=1e-5, atol=1e-6)


def test_lanes_count_their_own_steps(model: GPT) -> None:
    settings = replace(ALL_SITES, decay=0.0)
    lora, fresh = make_lora(model, settings), make_lora(model, settings)
    learn(model, lora, make_tokens(0), [True, False, True])
    learn(model, lora, make_tokens(1), [True, True, False])
    learn(model, fresh, make_tokens(1), [False, True, False])
    assert lora.steps.tolist() == [2, 1, 1]
    torch.testing.assert_close(lora.weights[1], fresh.weights[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("decay_all", [False, True])
def test_lanes_at_rest_do_not_change_or_only_decay(model: GPT, decay_all: bool) -> None:
    settings = replace(ALL_SITES, decay=2.0, decay_all=decay_all)
    lora = make_lora(model, settings)
    learn(model, lora, make_tokens(0), [True] * LANES)
    before = [t.clone() for t in (lora.weights, lora.moments, lora.steps)]
    learn(model, lora, make_tokens(1), [True, False, True])
    factor = 1 - settings.lr * settings.decay if decay_all else 1
    after = (lora.weights, lora.moments, lora.steps)
    torch.testing.assert_close(after[0][1], factor * before[0][1], rtol=1e-7, atol=0)
    assert torch.equal(after[1][1], before[1][1]) and after[2][1] == before[2][1]
    assert not torch.equal(after[0][0], before[0][0])


def test_without_a_rate_nothing_is_learned(model: GPT) -> None:
    lora = make_lora(model, replace(ALL_SITES, lr=0.0, decay=0.0))
    before = lora.weights.clone()
    learn(model, lora, make_tokens(0), [True] * LANES)
    assert torch.equal(lora.weights, before)


def test_learning_a_chunk_makes_it_cheaper(model: GPT) -> None:
    lora, tokens = make_lora(model, replace(ALL_SITES, lr=1e-3)), make_tokens(0)
    nats = [learn(model, lora, tokens, [True] * LANES).mean(1) for _ in range(3)]
    assert (nats[1] < nats[0]).all() and (nats[2] < nats[1]).all()


def test_lanes_learn_apart(model: GPT) -> None:
    def run(beside: int) -> torch.Tensor:
        lora = make_lora(model, ALL_SITES)
        tokens = [make_tokens(seed) for seed in (0, 1)]
        for t in tokens:
            t[1:] = make_tokens(beside)[1:]
        for t in tokens:
            nats = learn(model, lora, t, [True] * LANES)
        return nats[0]

    assert torch.equal(run(7), run(8))


def test_a_token_changes_what_is_learned(model: GPT) -> None:
    nats = []
    for change in (0, 1):
        lora, first = make_lora(model, ALL_SITES), make_tokens(0)
        first[0, 5] += change
        learn(model, lora, first, [True] * LANES)
        nats.append(learn(model, lora, make_tokens(1), [True] * LANES)[0])
    assert not torch.equal(nats[0], nats[1])


def test_a_document_begins_with_a_warm_a(model: GPT) -> None:
    lora = make_lora(model, ALL_SITES)
    for seed in range(2):
        learn(model, lora, make_tokens(seed), [True] * LANES)
    kept = {place: (a.clone(), b.clone()) for place, (a, b) in adapters(lora).items()}
    lora.reset([1], [9])
    assert lora.steps.tolist() == [2, 0, 2]
    assert not lora.moments[1].any() and lora.moments[0].any()
    for place, (a, b) in adapters(lora).items():
        assert torch.equal(a, kept[place][0])
        assert not b[1].any() and torch.equal(b[[0, 2]], kept[place][1][[0, 2]])


def test_a_cold_a_follows_from_seed_and_document(model: GPT) -> None:
    def run(settings: Settings, first: int, second: int) -> list[torch.Tensor]:
        lora = Lora(model, settings, [3], CPU)
        weights = []
        for document in (first, second):
            lora.reset([0], [document])
            weights.append(lora.weights.clone())
            learn(model, lora, make_tokens(0, 1), [True])
            weights.append(lora.weights.clone())
        return weights

    cold = replace(ALL_SITES, warm=False)
    same = run(cold, 4, 4)
    assert torch.equal(same[0], same[2]) and torch.equal(same[1], same[3])
    other = run(cold, 4, 5)
    assert torch.equal(other[0], same[0]) and not torch.equal(other[2], same[2])
    assert torch.equal(run(cold, 5, 4)[2], same[0])
    assert not torch.equal(run(replace(cold, seed=1), 4, 4)[0], same[0])


def test_a_first_a_follows_from_seed_and_lane(model: GPT) -> None:
    def first(*lanes: int, seed: int = 0) -> torch.Tensor:
        return Lora(model, replace(ALL_SITES, seed=seed), lanes, CPU).weights

    assert torch.equal(first(0, 1, 2, 3)[1::2], first(1, 3))
    assert not torch.equal(first(0), first(1)) and not torch.equal(first(0), first(0, seed=1))


def test_lanes_are_kept_in_the_order_given(model: GPT) -> None:
    lora, tokens = make_lora(model, ALL_SITES), make_tokens(3)
    learn(model, lora, make_tokens(0), [True, True, False])
    with lora.attached(), torch.no_grad():
        whole = read(model, tokens)
    before, steps = lora.weights.clone(), lora.steps.clone()
    kept = torch.tensor([2, 0])
    # Read with two lanes, without dropping any.
    with lora.attached(kept), torch.no_grad():
        some = read(model, tokens[kept])
    assert lora.lanes == [0, 1, 2] and torch.equal(lora.weights, before)
    lora.keep(kept)
    with lora.attached(), torch.no_grad():
        left = read(model, tokens[kept])
    assert lora.lanes == [2, 0] and torch.equal(lora.steps, steps[kept])
    for adapters in (some, left):
        torch.testing.assert_close(adapters, whole[kept], rtol=0, atol=1e-5)
    learn(model, lora, tokens[kept], [True, True])
    assert not torch.equal(lora.weights, before[kept])


def test_products_run_as_autocast_has_them(model: GPT) -> None:
    lora, tokens = make_lora(model, ALL_SITES, half=True), make_tokens(0)
    seen = []

    def watch(site: str, visit: object, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        seen.append(y.dtype)
        return y

    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = read(model, tokens)
        with lora.attached():
            model.hooks.adjust.append(watch)
            nats = read(model, tokens)
            model.hooks.adjust.remove(watch)
    assert torch.equal(nats, plain) and set(seen) == {torch.bfloat16}
    lora.update(torch.tensor([True, True, False]), lora.differentiate(nats.mean(1).sum()))
    assert lora.weights.dtype == lora.moments.dtype == torch.float32
    assert lora.work.dtype == torch.bfloat16
    assert torch.equal(lora.work, (lora.weights * lora.root).bfloat16()) and lora.moments.any()
    lora.reset([0], [5])
    assert torch.equal(lora.work, (lora.weights * lora.root).bfloat16())


def test_half_precision_learns_what_full_precision_does(model: GPT) -> None:
    tokens, moved = make_tokens(0), []
    for enabled in (False, True):
        lora = make_lora(model, replace(ALL_SITES, decay=0.0), enabled)
        fill(lora)
        before = lora.weights.clone()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled), lora.attached():
            nats = read(model, tokens)
        grads = lora.differentiate(nats.mean(1).sum())
        lora.update(torch.ones(LANES, dtype=torch.bool), grads)
        moved.append((lora.weights - before).flatten())
    assert float(F.cosine_similarity(moved[0], moved[1], dim=0)) > 0.8


def test_the_compiled_update_is_the_same(model: GPT) -> None:
    plain, other = make_lora(model, ALL_SITES), make_lora(model, ALL_SITES)
    other.adamw = torch.compile(other.adamw, fullgraph=True, backend="aot_eager")
    for lora in (plain, other):
        learn(model, lora, make_tokens(0), [True, True, False])
        learn(model, lora, make_tokens(1), [True, False, True])
    torch._dynamo.reset()
    torch.testing.assert_close(other.weights, plain.weights, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(other.moments, plain.moments, rtol=1e-6, atol=0)


@pytest.mark.parametrize("half", [False, True])
def test_no_step_reads_a_number_back(half: bool) -> None:
    levers = ["levers.smear=true", "levers.window={layers=[1], size=4}"]
    recipe = load_recipe("cpu", ["model.num_layers=2", *levers])
    # Tensors without numbers: whatever asks for one, or for a shape that hangs on one, fails.
    mode = FakeTensorMode()
    # Initialization may ask for numbers.
    with FakeCopyMode(mode):
        model = copy.deepcopy(build_model(recipe).requires_grad_(False))
    with mode, torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        dtype = torch.bfloat16 if half else torch.float32
        lora = Lora(model, Settings(), [0, 1], "cpu", dtype)
        cache = ChunkCache(model.spec, 2, "cpu")
        counts, tokens = torch.zeros(2, dtype=torch.long), torch.zeros(16, dtype=torch.long)
        for farthest in (8, 16):
            cache.begin(counts, 8, farthest)
            with lora.attached():
                logits = model(tokens, cache)
            cache.commit()
            grads = lora.differentiate(F.cross_entropy(logits.float(), tokens))
            lora.update(counts > 4, grads)
            cache.reset(counts > 4)
    assert logits.shape == (16, model.spec.vocab_size)


def test_the_lever_hands_over_its_settings() -> None:
    recipe = load_recipe("pr2014+cpu", ["levers.lora_ttt.rank=7"])
    lever = plug_levers(recipe, "infer")["lora_ttt"]
    assert lever.lora is lever.settings
    assert lever.lora == lever_settings(recipe)["lora_ttt"] == Settings(rank=7)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("sites=[]", "sites"),
        ("sites=['k', 'k']", "each once"),
        ("sites=['w']", "'w' is not one of q, k"),
        ("rank=0", "rank = 0"),
        ("lr=-1.0", "lr = -1.0"),
        ("decay=1e6", "less than 1"),
        ("beta2=1.0", "beta2 = 1.0"),
        ("beta2=0.0", "beta2 = 0.0"),
        ("eps=0.0", "eps"),
        ("chunk=0", "chunk = 0"),
        ("chunk=500", "a chunk of 500 tokens, but model.context is 128"),
        ("short=['256:500']", "a chunk of 500 tokens"),
        ("short=['256:8:4']", "'256:8:4' is not 'limit:chunk'"),
        ("short=['256:0']", "short"),
        ("lanes=0", "lanes"),
        ("keys=old", "'kept' or 'fresh'"),
        ("seed=-1", "seed"),
    ],
)
def test_a_setting_that_does_not_fit_is_named(override: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        plug_levers(load_recipe("cpu", [f"levers.lora_ttt.{override}"]), "infer")
    assert words in str(caught.value) and "lora_ttt" in str(caught.value)


def test_renewed_adapters_are_new_ones_where_the_old_ones_were(model: GPT) -> None:
    lora, new = make_lora(model, ALL_SITES), make_lora(model, ALL_SITES)
    where = [lora.weights.data_ptr(), lora.work.data_ptr()]
    learn(model, lora, make_tokens(0), [True, True, False])
    assert not torch.equal(lora.weights, new.weights)
    lora.renew()
    for name in ("weights", "moments", "steps", "work"):
        assert torch.equal(getattr(lora, name), getattr(new, name))
    assert [lora.weights.data_ptr(), lora.work.data_ptr()] == where
