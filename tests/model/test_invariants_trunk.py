"""The invariants of the published network: counts, start, order of visits, MLP, soft caps."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from underpar.build.levers import plug_levers
from underpar.build.model import build_model
from underpar.data.batch import Batch, segments_from_starts
from underpar.infer.predictor import Predictor
from underpar.model.gpt import GPT
from underpar.model.kv_cache import PackedCache
from underpar.recipe import load_recipe
from underpar.seams import BOS_ID, Stream, Visit
from underpar.train.groups import group_parameters
from underpar.train.step import mean_loss

# Relative, in fp32 and above; where nothing may change at all, tensors must be equal.
TOLERANCE = 1e-5
# Relative, in half precision, for lanes that are rescaled.
HALF_TOLERANCE = 2**-7

COUNTS = {
    "pr2014": 35_945_673,
    "pr2135": 35_945_673,
    "pr1894": 35_947_108,
    "pr1493": 35_944_536,
    "pr1219": 30_125_660,
}
# Decoder layers in turn, each < the encoder layer whose output enters there, a mark for a repeat.
PAIRINGS = {
    ("pr2014", 0.0): "5<4 6<3 7<2 8<1 9<0 10",
    ("pr2014", 1.0): "5<4' 3<3' 4<5 5<4 6<3 7<2 8<1 9<0 10",
    ("pr1894", 0.0): "5<4 6<3 7<2 8<1 9<0 10",
    ("pr1894", 1.0): "5<4' 3<3' 4<5 5<4 6<3 7 8 9 10",
    ("pr1493", 0.0): "5<4 6<3 7<2 8<1 9<0 10",
    ("pr1493", 1.0): "5<4' 3<3' 4<5 5<4 6<3 7<2 8<1 9<0 10",
    ("pr1219", 1.0): "5<4 6<3 7<2 8<1 9<0 10",
}


class Recorder(nn.Module):
    """A lever that changes nothing: both lanes before and after each visit of the last pass."""

    def before(self, visit: Visit, stream: Stream) -> None:
        if visit.slot == 0:
            self.stream, self.entered, self.left = stream, [], []
        self.entered.append((stream.x, stream.kept.get("lanes", stream.x)))

    def after(self, visit: Visit, x_in: Tensor, stream: Stream) -> None:
        self.left.append((stream.x, stream.kept.get("lanes", stream.x)))


def randomized(name: str, overrides: Sequence[str] = ()) -> GPT:
    """Weights away from their start, so that every path carries something."""
    torch.manual_seed(0)
    recipe = load_recipe(f"{name}+cpu", overrides)
    model = GPT(recipe.model, {**plug_levers(recipe, "model"), "recorder": Recorder()})
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.startswith("blocks.") and parameter.ndim == 2:
                nn.init.normal_(parameter, std=parameter.size(1) ** -0.5)
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def pack(lengths: Sequence[int], vocab_size: int = 512) -> Batch:
    source = torch.Generator().manual_seed(1)
    tokens = torch.randint(4, vocab_size, (sum(lengths),), generator=source)
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    tokens[starts] = BOS_ID
    return Batch(tokens, tokens.roll(-1), segments_from_starts(starts.numpy(), len(tokens), 3072))


def logits_of(model: GPT, batch: Batch) -> Tensor:
    return model(batch.inputs, PackedCache(batch.segments))


def norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 2**-23).sqrt()


def compare(x: Tensor, embedding: Tensor) -> Tensor:
    """The logits of embedded tokens x (N, dim) that no block has changed."""
    # Normed on entry and before the head: short vectors are not of unit size after the first.
    return 30.0 * torch.tanh(norm(norm(x)) @ embedding.T / 30.0)


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float(((ours - theirs).norm() / theirs.norm()).detach())


def dead_rows(loss: Tensor, parameter: Tensor) -> list[bool]:
    """For each row: no gradient of the loss reaches it."""
    (grad,) = torch.autograd.grad(loss, parameter, allow_unused=True)
    return [grad is None or not grad[row].any() for row in range(len(parameter))]


@pytest.fixture(scope="module")
def full() -> GPT:
    torch.manual_seed(0)
    return build_model(load_recipe("pr2014"))


@pytest.mark.parametrize("name", COUNTS)
def test_01_parameter_counts(name: str) -> None:
    with torch.device("meta"):
        model = build_model(load_recipe(name))
    assert sum(p.numel() for p in model.parameters()) == COUNTS[name]


def test_01_group_counts(full: GPT) -> None:
    groups = group_parameters(full)
    counts = {name: sum(p.numel() for p in group.values()) for name, group in groups.items()}
    assert counts == {"embed": 4_194_304, "matrix": 31_719_424, "scalar": 31_943}
    assert sum(p.numel() for p in full.parameters() if not p.requires_grad) == 2


@pytest.mark.parametrize("half", [False, True])
@torch.no_grad()
def test_02_at_first_the_loop_changes_nothing(full: GPT, half: bool) -> None:
    logits = []
    for progress in (0.0, 1.0):
        full.set_progress(progress)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            logits.append(logits_of(full, pack([100, 156], 8192)).float())
    assert relative(logits[1], logits[0]) < (HALF_TOLERANCE if half else TOLERANCE)


@torch.no_grad()
def test_02_at_first_logits_compare_embeddings(full: GPT) -> None:
    batch, embedding = pack([100, 156], 8192), full.embedding.weight
    full.set_progress(1.0)
    logits = logits_of(full, batch)
    assert relative(logits, compare(embedding[batch.inputs], embedding)) < TOLERANCE
    assert 8.98 < float(F.cross_entropy(logits, batch.targets)) < 9.03


@torch.no_grad()
def test_02_first_weights(full: GPT) -> None:
    assert float(full.embedding.weight.std()) == pytest.approx(0.005, rel=1e-2)
    assert full.levers["lanes"].residual.unique().tolist() == [1.1015625]
    assert full.levers["qk_gain"].gain.unique().tolist() == [5.25]
    for block in full.blocks:
        assert not block.attn.o.weight.any() and not block.mlp.down.weight.any()
        attn = block.attn
        for rows in (attn.q.weight, attn.k.weight, attn.v.weight, block.mlp.up.weight.T):
            assert relative(rows @ rows.T, torch.eye(len(rows))) < TOLERANCE


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model.num_layers=9"],
        ["levers.loop.repeats=0"],
        ["levers.loop.repeats=3"],
        ["levers.loop.first=1", "levers.loop.last=6"],
        ["levers.unet.skips=3"],
        ["levers.lanes.start=6"],
        ["levers.lanes=false", "levers.parallel=true", "levers.recur_ab=true"],
    ],
    ids=" ".join,
)
def test_03_silent_blocks_make_depth_irrelevant(overrides: list[str]) -> None:
    model, batch = randomized("pr2014", overrides), pack([20, 30])
    for block in model.blocks:
        nn.init.zeros_(block.attn.o.weight)
        nn.init.zeros_(block.mlp.down.weight)
    # Where channels would be rescaled, each in its own way, weights are as at the start.
    nn.init.ones_(model.levers["unet"].weight)
    nn.init.zeros_(model.levers["unet"].gate)
    for name in {"x0_mix", "recur_ab", "asym_softcap"} & set(model.levers):
        model.levers[name].neutral_()
    embedding = model.embedding.weight
    cache = PackedCache(batch.segments)
    smeared = model.levers["smear"].embed(embedding[batch.inputs], batch.inputs, cache)
    assert relative(logits_of(model, batch), compare(smeared, embedding)) < TOLERANCE


@pytest.mark.parametrize(("repeats", "num_visits"), [(0, 11), (1, 14), (2, 17), (3, 20)])
def test_12_plans_by_repeats(repeats: int, num_visits: int) -> None:
    model = randomized("pr2014", [f"levers.loop.repeats={repeats}"])
    assert [v.layer for v in model.plan] == [0, 1, 2, *[3, 4, 5] * (repeats + 1), 6, 7, 8, 9, 10]
    assert len(model.plan) == num_visits
    half = num_visits // 2
    assert [v.decoder for v in model.plan] == [-1] * half + list(range(num_visits - half))


@pytest.mark.parametrize(
    ("name", "start"), [("pr2014", 0.35), ("pr2135", 0.35), ("pr1894", 0.42), ("pr1493", 0.35)]
)
def test_12_published_plans(name: str, start: float) -> None:
    model = randomized(name)
    unlooped = [0, 1, 2, 3, 4], [5, 6, 7, 8, 9, 10]
    looped = [0, 1, 2, 3, 4, 5, 3, 4], [5, 3, 4, 5, 6, 7, 8, 9, 10]
    for progress, lists in [(0.0, unlooped), (start - 1e-6, unlooped), (start, looped)]:
        model.set_progress(progress)
        encoder = [v.layer for v in model.plan if v.decoder < 0]
        assert (encoder, [v.layer for v in model.plan if v.decoder >= 0]) == lists


@pytest.mark.parametrize(("name", "progress"), PAIRINGS)
def test_12_skip_pairings(name: str, progress: float) -> None:
    model = randomized(name)
    model.set_progress(progress)
    # Shut gates: where a skip enters, the stream becomes twice what left the encoder layer.
    nn.init.constant_(model.levers["unet"].gate, -200.0)
    nn.init.constant_(model.levers["unet"].weight, 2.0)
    logits_of(model, pack([12]))
    entered, left = model.levers["recorder"].entered, model.levers["recorder"].left
    pairs = []
    for visit in (v for v in model.plan if v.decoder >= 0):
        x = entered[visit.slot][0]
        sources = [v for v in model.plan[: visit.slot] if torch.equal(x, 2.0 * left[v.slot][0])]
        assert sources or torch.equal(x, left[visit.slot - 1][0])
        marks = [f"<{v.layer}" + "'" * v.repeat for v in sources]
        pairs.append("".join([str(visit.layer), *marks]))
    assert " ".join(pairs) == PAIRINGS[name, progress]


def test_12_a_skip_is_blended_by_place_into_lane_0_only() -> None:
    model = randomized("pr2014")
    logits_of(model, pack([12]))
    entered, left = model.levers["recorder"].entered, model.levers["recorder"].left
    unet = model.levers["unet"]
    for place, slot in enumerate(range(8, 16)):
        gate, skip = torch.sigmoid(unet.gate[place]), unet.weight[place] * left[7 - place][0]
        blended = gate * left[slot - 1][0] + (1.0 - gate) * skip
        assert relative(entered[slot][0], blended) < TOLERANCE
    # Layers 8 to 10: the lanes open before a skip enters.
    assert all(torch.equal(entered[slot][1], left[slot - 1][1]) for slot in (14, 15, 16))


def test_13_skips_past_the_fifth_wait_for_the_loop() -> None:
    model, batch = randomized("pr2014"), pack([20])
    for parameter in (model.levers["unet"].weight, model.levers["unet"].gate):
        for progress, dead in [(0.0, True), (1.0, False)]:
            model.set_progress(progress)
            assert dead_rows(mean_loss(model, batch), parameter) == [False] * 5 + [dead] * 3


@pytest.mark.parametrize("routed", [False, True])
def test_14_lanes_are_two_streams_routed_by_source_and_lane(routed: bool) -> None:
    model = randomized("pr2014", ["levers.unet=false"])
    lanes, record = model.levers["lanes"], model.levers["recorder"]
    if not routed:
        nn.init.ones_(lanes.residual)
        with torch.no_grad():
            lanes.post.copy_(torch.eye(2).expand_as(lanes.post))
    batch = pack([20])
    merged = model.hidden(batch.inputs, PackedCache(batch.segments))
    one = two = record.left[-4][0]
    assert torch.equal(record.entered[-3][0], one) and torch.equal(record.entered[-3][1], two)
    for visit in model.plan[-3:]:
        block, keep, post = (t[visit.layer] for t in (model.blocks, lanes.residual, lanes.post))
        # The mix with x0 is for attention's eyes alone; both read the old lanes.
        a = block.attend(block.mix(one, record.stream), visit, record.stream)
        b = block.mlp_branch(two, visit)
        if routed:
            one, two = keep[0] * one, keep[1] * two
            a, b = post[0, 0] * a + post[1, 0] * b, post[0, 1] * a + post[1, 1] * b
        one, two = one + a, two + b
    assert relative(merged, norm((one + two) / 2)) < TOLERANCE


@pytest.mark.parametrize("progress", [0.0, 1.0])
def test_14_rows_of_layers_with_one_lane_get_no_gradient(progress: float) -> None:
    model, batch = randomized("pr2014"), pack([20])
    model.set_progress(progress)
    for parameter in (model.levers["lanes"].post, model.levers["lanes"].residual):
        assert dead_rows(mean_loss(model, batch), parameter) == [True] * 8 + [False] * 3


def test_15_neutral_pairs_are_the_plain_loop() -> None:
    model, plain = randomized("pr1894"), randomized("pr1894", ["levers.recur_ab=false"])
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "recur_ab" not in k})
    expected = logits_of(plain, pack([20]))
    assert not torch.equal(logits_of(model, pack([20])), expected)
    nn.init.ones_(model.levers["recur_ab"].pairs[:, 0])
    nn.init.zeros_(model.levers["recur_ab"].pairs[:, 1])
    assert torch.equal(logits_of(model, pack([20])), expected)


def test_15_a_repeat_is_blended_with_the_visit_before() -> None:
    model, outputs = randomized("pr1894"), []
    for block in model.blocks:
        block.register_forward_hook(lambda block, args, out: outputs.append(args[1].x))
    logits_of(model, pack([20]))
    left = [x for x, _ in model.levers["recorder"].left]
    for slot, output in enumerate(outputs):
        a, b = model.levers["recur_ab"].pairs[slot - 6] if 6 <= slot < 12 else (1.0, 0.0)
        assert relative(left[slot], a * output + b * left[slot - 3]) < TOLERANCE


def test_15_pairs_wait_for_the_loop() -> None:
    model, batch = randomized("pr1894"), pack([20])
    pairs = model.levers["recur_ab"].pairs
    model.set_progress(0.0)
    assert dead_rows(mean_loss(model, batch), pairs) == [True] * 6
    model.set_progress(1.0)
    (grad,) = torch.autograd.grad(mean_loss(model, batch), pairs)
    assert (grad != 0).all()


def set_caps(model: GPT, positive: float, negative: float) -> GPT:
    for name, parameter in model.named_parameters():
        if "softcap.cap_" in name:
            nn.init.constant_(parameter, negative if "negative" in name else positive)
    return model


@pytest.mark.parametrize(
    ("overrides", "caps"),
    [
        (["levers.asym_softcap=false"], (30.0, 30.0)),
        (["levers.asym_softcap=false", "levers.softcap=true"], (20.0, 20.0)),
        ([], (25.0, 15.0)),
    ],
)
def test_17_softcap_and_its_slope(overrides: list[str], caps: tuple[float, float]) -> None:
    model = set_caps(randomized("pr2014", overrides), *caps).double()
    embedding = model.embedding.weight.detach()
    x, way, weigh = 10.0 * torch.randn(3, 40, model.spec.dim, dtype=torch.double)
    raw = x @ embedding.T
    cap = torch.where(raw > 0, *caps).double()
    assert (raw > 1.5 * cap).any() and (raw < -1.5 * cap).any()
    z = model.head(x.requires_grad_())
    assert (z.abs() < cap).all()
    assert relative(z, cap * torch.tanh(raw / cap)) < TOLERANCE
    slope, weigh = 1.0 - torch.tanh(raw / cap) ** 2, weigh @ embedding.T
    (grad,) = torch.autograd.grad((z * weigh).sum(), x)
    assert relative(grad, (slope * weigh) @ embedding) < TOLERANCE
    step = 1e-6
    difference = (model.head(x + step * way) - model.head(x - step * way)) / (2 * step)
    assert relative(difference, slope * (way @ embedding.T)) < TOLERANCE


def test_17_training_and_scoring_have_one_loss() -> None:
    model, batch = set_caps(randomized("pr2014"), 30.0, 30.0), pack([40])
    loss = mean_loss(model, batch)
    raw = model.hidden(batch.inputs, PackedCache(batch.segments)) @ model.embedding.weight.T
    # A shift of all logits changes no loss: 2c sigmoid(2l / c) = c tanh(l / c) + c.
    shifted = F.cross_entropy(60.0 * torch.sigmoid(raw / 15.0), batch.targets)
    assert relative(loss, shifted) < TOLERANCE
    scored = Predictor(model, torch.device("cpu"), []).nll(batch).mean()
    assert relative(loss, scored) < TOLERANCE


@pytest.mark.parametrize(("overrides", "cap"), [([], 30.0), (["levers.softcap=true"], 20.0)])
def test_18_equal_caps_are_the_symmetric_cap(overrides: list[str], cap: float) -> None:
    asymmetric = set_caps(randomized("pr2014"), cap, cap)
    model = set_caps(randomized("pr2014", ["levers.asym_softcap=false", *overrides]), cap, cap)
    model.embedding.load_state_dict(asymmetric.embedding.state_dict())
    x = 10.0 * torch.randn(40, model.spec.dim)
    assert torch.equal(asymmetric.head(x), model.head(x))
    assert not torch.equal(set_caps(asymmetric, cap, cap / 2).head(x), model.head(x))
