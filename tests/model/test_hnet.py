"""The byte-level hierarchy: shapes, causality, stepping, and what it starts as."""

import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from underpar.build.model import build_model, weight_shapes
from underpar.compile.regions import Sharing, inductor
from underpar.compile.traced_run import TracedRun
from underpar.compile.tracer import Compiler
from underpar.data.batch import Batch, pack_documents
from underpar.errors import RecipeError
from underpar.infer.predictor import Predictor
from underpar.model.gpt import norm
from underpar.model.hnet import ROUTER, HNet
from underpar.model.kv_cache import PackedCache
from underpar.model.router import Stride, boundaries_of
from underpar.recipe import Recipe, load_recipe
from underpar.seams import BOS_ID
from underpar.train.meter import network_flops
from underpar.train.step import mean_loss

CPU = torch.device("cpu")
# Largest difference in nats between two computations of the same prices in fp32.
TOLERANCE = 1e-4
TINY = [
    "model.num_layers=2",
    "model.dim=32",
    "model.mlp_dim=48",
    "model.context=64",
    "hnet.dim=16",
    "hnet.mlp_dim=24",
    "hnet.num_heads=2",
    "hnet.num_kv_heads=1",
    "hnet.encoder_layers=1",
    "levers.partial_rope.dims=4",
    "hnet.levers.partial_rope.dims=4",
    "train.context=64",
]


def tiny(*changes: str) -> Recipe:
    return load_recipe("hnet-m1-fixed+cpu", [*TINY, *changes])


def randomized(recipe: Recipe) -> HNet:
    """Weights away from where they start, so that every path carries something."""
    torch.manual_seed(0)
    model = build_model(recipe).eval()
    assert isinstance(model, HNet)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.3)
    return model


def batch_of(lengths: list[int], context: int = 64, seed: int = 0) -> Batch:
    """Random documents of so many bytes, packed."""
    rng = np.random.default_rng(seed)
    docs = [np.append(BOS_ID, rng.integers(4, 260, n)) for n in lengths]
    return pack_documents(docs, BOS_ID, context)[0]


def log_probs(model: HNet, batch: Batch) -> Tensor:
    return Predictor(model, CPU, []).log_probs(batch)


def changed_from(batch: Batch, place: int) -> Batch:
    """Every byte from `place` on is another one; documents begin where they began."""
    inputs = batch.inputs.clone()
    later = inputs[place:]
    inputs[place:] = torch.where(later >= 4, (later - 4 + 77) % 256 + 4, later)
    return Batch(inputs, batch.targets, batch.segments)


# Part -> number of weights, from the table of PR 1615 (33,907,824 in all).
PUBLISHED = {
    "byte_embedding": 65_536,
    "encoder": 1_181_712,
    "up": 131_072,
    "main": 31_742_040,
    "down": 131_072,
    "decoder": 590_856,
    "lm_head": 65_536,
}


@pytest.mark.parametrize("name", ["hnet-m1", "hnet-m1-fixed"])
def test_m1_has_the_published_number_of_parameters(name: str) -> None:
    recipe = load_recipe(name)
    # Published without separators, on 256 ids; four control ids are a row each of two tables.
    published = replace(recipe, model=replace(recipe.model, vocab_size=256))
    sizes: dict[str, int] = {}
    for weight, shape in weight_shapes(published).items():
        part = weight.split(".")[0]
        sizes[part] = sizes.get(part, 0) + math.prod(shape)
    assert sizes == PUBLISHED
    assert sum(sizes.values()) == 33_907_824
    ours = sum(math.prod(shape) for shape in weight_shapes(recipe).values())
    assert ours == 33_907_824 + 2 * 4 * 256


def test_the_operations_of_m1_are_the_published_ones() -> None:
    recipe = load_recipe("hnet-m1")
    with torch.device("meta"):
        model = build_model(replace(recipe, model=replace(recipe.model, vocab_size=256)))
    # Published: 87 million per byte, with keys counted alike and 256-wide projections of every byte
    # where ours are of every chunk.
    assert network_flops(model, 4096) == pytest.approx(87e6 - 6 * 131_072 * 3 / 4, rel=0.02)


@pytest.mark.parametrize("zero_init", ["true", "false"])
@pytest.mark.parametrize("vocab_size", [256, 260])
def test_the_first_loss_is_that_of_a_uniform_choice(zero_init: str, vocab_size: int) -> None:
    recipe = tiny(f"hnet.zero_init={zero_init}")
    recipe = replace(recipe, model=replace(recipe.model, vocab_size=vocab_size))
    torch.manual_seed(0)
    model = build_model(recipe).train()
    batch = batch_of([30, 2, 50])
    batch = Batch(batch.inputs % vocab_size, batch.targets % vocab_size, batch.segments)
    loss = float(mean_loss(model, batch).detach())
    assert loss == pytest.approx(math.log(vocab_size), abs=1e-6)


@pytest.mark.parametrize("stride", [1, 3, 4, 100])
def test_no_byte_sees_a_later_one_at_any_phase(stride: int) -> None:
    model = randomized(tiny(f"hnet.stride={stride}"))
    batch = batch_of([25, 9])
    whole = log_probs(model, batch)
    for place in range(1, 12):
        changed = log_probs(model, changed_from(batch, place))
        assert torch.equal(changed[:place], whole[:place])
        assert not torch.allclose(changed[place], whole[place])


def test_no_byte_sees_a_later_one_through_learned_chunks() -> None:
    model = randomized(tiny("hnet.stride=0"))
    batch = batch_of([25, 9])
    cache = PackedCache(batch.segments)
    whole = log_probs(model, batch)
    with torch.no_grad():
        p = model.run_blocks(batch.inputs, cache).kept[ROUTER]
        numbers = set()
        for place in range(1, 24):
            other = changed_from(batch, place)
            changed = log_probs(model, other)
            assert torch.equal(changed[:place], whole[:place])
            assert not torch.allclose(changed[place], whole[place])
            # A boundary depends on bytes up to its own, and on that one.
            moved = model.run_blocks(other.inputs, cache).kept[ROUTER]
            assert torch.equal(moved[:place], p[:place]) and moved[place] != p[place]
            numbers.add(int(boundaries_of(moved).sum()))
    assert len(numbers) > 3


@pytest.mark.parametrize("stride", [0, 4])
def test_documents_do_not_see_each_other(stride: int) -> None:
    model = randomized(tiny(f"hnet.stride={stride}"))
    batch = batch_of([25, 9, 0, 1, 30])
    whole = log_probs(model, batch)
    # The second document: tokens 26 to 35.
    inputs = batch.inputs.clone()
    inputs[27:36] = (inputs[27:36] - 4 + 50) % 256 + 4
    changed = log_probs(model, Batch(inputs, batch.targets, batch.segments))
    assert torch.equal(changed[:26], whole[:26]) and torch.equal(changed[36:], whole[36:])
    # And a document alone has the prices that it has among others.
    alone = log_probs(model, batch_of([25]))
    torch.testing.assert_close(alone, whole[:26], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("change", ["hnet.spare_room=0", "hnet.stride=0"])
def test_chunks_that_do_not_fit_leak_nothing(change: str) -> None:
    # With learned chunks as many as can be wanted, and room for few.
    model = randomized(tiny(change, *["hnet.target_bytes=8"] * ("stride" in change)))
    # Short documents: twice as many chunks as bytes / 4, and room for one multiple of 128.
    batch = batch_of([1] * 300 + [40, 40, 40])
    model.train()
    cache = PackedCache(batch.segments)
    with torch.no_grad():
        p = model.run_blocks(batch.inputs, cache).kept[ROUTER]
        assert boundaries_of(p).sum() > model._room(len(batch.inputs)) > 0
        whole = model(batch.inputs, cache)
        assert whole.isfinite().all()
        for place in (50, 401, 510, 560, 603, 651, 690):
            other = changed_from(batch, place)
            changed = model(other.inputs, cache)
            torch.testing.assert_close(changed[:place], whole[:place], rtol=0, atol=1e-5)
            assert not torch.allclose(changed[place:], whole[place:], rtol=0, atol=1e-3)


@pytest.mark.parametrize("stride", [0, 4])
def test_room_changes_no_loss_and_no_gradient(stride: int) -> None:
    model = randomized(tiny(f"hnet.stride={stride}", "hnet.spare_room=3"))
    batch = batch_of([70, 3, 120, 0, 20])
    losses, gradients = [], []
    for training in (True, False):
        model.train(training).zero_grad()
        loss = mean_loss(model, batch)
        loss.backward()
        losses.append(loss.detach())
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(losses[0], losses[1])
    assert len(gradients[0]) == len(list(model.parameters()))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_calibration_sees_the_chunks_of_the_text_alone() -> None:
    model = randomized(tiny("hnet.stride=0"))
    batch = batch_of([70, 3, 120, 0, 20])
    seen: list[Tensor] = []
    for linear in model.main.modules():
        if isinstance(linear, nn.Linear):
            linear.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        p = model.run_blocks(batch.inputs, PackedCache(batch.segments)).kept[ROUTER]
    assert len(seen) == 2 * 6
    num_chunks = int(boundaries_of(p).sum())
    assert 0 < num_chunks < len(batch.inputs)
    assert [int(x.any(dim=1).sum()) for x in seen] == [num_chunks] * len(seen)


@pytest.mark.parametrize("stride", [0, 1, 4, 5])
def test_stepping_equals_pricing(stride: int) -> None:
    predictor = Predictor(randomized(tiny(f"hnet.stride={stride}")), CPU, [])
    # Longer than two contexts, shorter than a stride, and nothing at all.
    for length in (150, 2, 0):
        batch = batch_of([length])
        priced = predictor.log_probs(batch)
        stepper = predictor.stepper(1)
        for token, expected in zip(batch.inputs, priced, strict=True):
            torch.testing.assert_close(
                stepper.step(token[None])[0], expected, rtol=0, atol=TOLERANCE
            )


@pytest.mark.parametrize("stride", [0, 4])
def test_lanes_are_independent(stride: int) -> None:
    predictor = Predictor(randomized(tiny(f"hnet.stride={stride}")), CPU, [])
    # Two documents follow each other in the first lane; the third lane ends early.
    lanes = [[6, 13], [21], [10]]
    texts = [[batch_of([n], seed=10 * i + n) for n in lane] for i, lane in enumerate(lanes)]
    priced = [torch.cat([predictor.log_probs(b) for b in lane]) for lane in texts]
    tokens = [torch.cat([b.inputs for b in lane]) for lane in texts]
    stepper, alive = predictor.stepper(3), [0, 1, 2]
    for t in range(max(map(len, tokens))):
        left = [lane for lane in alive if t < len(tokens[lane])]
        if left != alive:
            stepper.keep(torch.tensor([alive.index(lane) for lane in left]))
            alive = left
        here = torch.stack([tokens[lane][t] for lane in alive])
        stepper.reset(here == BOS_ID)
        for row, lane in zip(stepper.step(here), alive, strict=True):
            torch.testing.assert_close(row, priced[lane][t], rtol=0, atol=TOLERANCE)


def test_blocks_of_zeros_leave_embedding_plus_its_chunk() -> None:
    torch.manual_seed(0)
    model = build_model(tiny("hnet.zero_init=true")).eval()
    assert isinstance(model, HNet)
    batch = batch_of([13, 6])
    cache = PackedCache(batch.segments)
    first = torch.arange(len(batch.inputs)) - cache.positions % 4
    with torch.no_grad():
        x = norm(model.byte_embedding(batch.inputs))
        through = F.linear(F.linear(x, model.up.weight), model.down.weight)
        hidden = model.hidden(batch.inputs, cache)
    torch.testing.assert_close(hidden, norm(through[first] + x))


@pytest.mark.parametrize("stride", [0, 4])
def test_without_the_skip_bytes_inside_a_chunk_are_not_seen(stride: int) -> None:
    model = randomized(tiny(f"hnet.stride={stride}", "hnet.skip=false", "hnet.decoder_layers=1"))
    cache = PackedCache(batch_of([40]).segments)
    joined = []
    for place in (21, 22):
        # Byte 20 begins a chunk.
        batch = changed_from(batch_of([40]), place)
        model.router = Stride(4)
        stream = model.encoder.visit_blocks(model.embed(batch.inputs, cache))
        joined.append(model.join(stream, model.main.visit_blocks(model.cut(stream))))
    for ours, theirs in (
        (a[:24], b[:24]) for a, b in zip(*((s.x, s.start) for s in joined), strict=True)
    ):
        assert torch.equal(ours, theirs)
    assert model.residual is None


def test_without_the_main_network_bytes_inside_a_chunk_are_still_seen() -> None:
    model = randomized(tiny())
    nn.init.zeros_(model.down.weight)
    batch = batch_of([20])
    # Byte 6 is inside the second chunk: only the skip carries it to the decoder.
    whole, changed = log_probs(model, batch), log_probs(model, changed_from(batch, 6))
    assert not torch.allclose(whole[6], changed[6])


def as_traced(graph: fx.GraphModule, inputs: object) -> fx.GraphModule:
    return graph


needs_cc = pytest.mark.skipif(not shutil.which("cc"), reason="inductor needs a C compiler")
COMPILERS = [as_traced, pytest.param(inductor, marks=[pytest.mark.slow, needs_cc])]


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("stride", [0, 4])
def test_it_compiles_once_for_all_texts(stride: int, compiler: Compiler) -> None:
    model = randomized(tiny(f"hnet.stride={stride}")).train()
    run = TracedRun(Sharing(compiler))
    graphs = []
    for seed, lengths in enumerate(([120, 60], [10, 30, 138], [1] * 60 + [59])):
        batch = batch_of(lengths, seed=seed)
        assert len(batch.inputs) in (182, 181, 180)
        batch = batch if len(batch.inputs) == 180 else cropped(batch, 180, lengths, seed)
        loss = mean_loss(model, batch, run)
        model.zero_grad()
        loss.backward()
        compiled = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        plain = mean_loss(model, batch)
        plain.backward()
        torch.testing.assert_close(loss, plain)
        for ours, parameter in zip(compiled, model.parameters(), strict=True):
            torch.testing.assert_close(ours, parameter.grad)
        graphs.append(run.num_graphs)
    assert graphs[0] == graphs[1] == graphs[2]


def cropped(batch: Batch, num_tokens: int, lengths: list[int], seed: int) -> Batch:
    """The same documents, the last one shorter, in so many tokens."""
    shorter = [*lengths[:-1], lengths[-1] - (len(batch.inputs) - num_tokens)]
    return batch_of(shorter, seed=seed)


def test_learned_chunks_of_a_stride_are_those_of_m1() -> None:
    fixed, learned = (randomized(tiny(f"hnet.stride={stride}")) for stride in (4, 0))
    learned.router = Stride(4)
    assert learned.residual is not None
    nn.init.zeros_(learned.residual.weight)
    learned.load_state_dict(fixed.state_dict(), strict=False)
    batch = batch_of([25, 9, 0, 70])
    # p is 0 or 1, the factor 1, and the skip the identity; chunks stand in other places.
    torch.testing.assert_close(log_probs(learned, batch), log_probs(fixed, batch))


def test_without_boundaries_a_document_is_one_chunk() -> None:
    model = randomized(tiny("hnet.stride=0"))
    nn.init.eye_(model.router.k.weight)
    with torch.no_grad():
        # Equal neighbours: what the encoder made is the same for every byte.
        model.byte_embedding.weight.fill_(1.0)
        for block in model.encoder.blocks:
            block.attn_scale.zero_()
            block.mlp_scale.zero_()
        nn.init.eye_(model.router.q.weight)
        batch = batch_of([25, 9, 0, 3])
        p = model.run_blocks(batch.inputs, PackedCache(batch.segments)).kept[ROUTER]
    assert torch.equal(boundaries_of(p), batch.inputs == BOS_ID)
    assert (p[batch.inputs == BOS_ID] == 1).all()


def test_what_training_adds_is_the_ratio_loss() -> None:
    batch = batch_of([70, 30])
    losses, gradients = [], []
    for weight in (0.0, 0.5):
        model = randomized(tiny("hnet.stride=0", f"hnet.ratio_weight={weight}"))
        loss = mean_loss(model, batch)
        loss.backward()
        losses.append(loss.detach())
        gradients.append([p.grad for p in model.router.parameters()])
    # The value is that of the text alone; the gradient is not.
    assert torch.equal(losses[0], losses[1])
    assert all(not torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert all(g is not None and g.any() for g in gradients[0])


def test_room_for_chunks_follows_progress() -> None:
    model = randomized(tiny("hnet.stride=0", "hnet.settled=0.2", "hnet.spare_room=0.2")).train()
    rooms, variants = [], set()
    for p in (0.0, 0.19, 0.2, 1.0):
        model.set_progress(p)
        rooms.append(model._room(12_800))
        variants.add(model.variant)
    assert rooms == [6400, 6400, 3840, 3840]
    # The warm-up compiles both.
    assert len(variants) == 2
    model.eval()
    assert model._room(12_800) == 12_800


def test_a_lever_that_reads_tokens_belongs_to_the_bytes() -> None:
    with pytest.raises(RecipeError, match=r"name it under \[hnet.levers.smear\]"):
        build_model(tiny("levers.smear={}"))
    model = build_model(tiny("hnet.levers.smear={}"))
    names = [name for name in model.state_dict() if "smear" in name]
    assert names and all(name.startswith("encoder.levers.smear.") for name in names)
    with pytest.raises(RecipeError, match="a lever of stage train"):
        build_model(tiny("hnet.levers.ema={}"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("hnet.stride=-1", "hnet.stride = -1: expected 0 to"),
        ("hnet.dim=30", "hnet.dim = 30"),
        ("hnet.spare_room=-1", "hnet.spare_room = -1"),
        ("hnet.target_bytes=1", "hnet.target_bytes = 1.0: expected above 1"),
        ("hnet.ratio_weight=3", "hnet.ratio_weight = 3.0: expected 0 up to 1"),
        ("hnet.strides=4", "unknown key hnet.strides; did you mean 'stride'"),
        ("model.network=mamba", "model.network = 'mamba': expected 'gpt' or 'hnet'"),
        ("hnet.levers.xsaa={}", "unknown lever 'xsaa'"),
    ],
)
def test_bad_settings_are_one_clear_line(change: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message.replace("[", r"\[")) as error:
        build_model(tiny(change))
    assert "\n" not in str(error.value)
