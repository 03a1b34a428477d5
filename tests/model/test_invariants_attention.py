"""The invariants of the published network: what a token sees of others, and how."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from underpar.build.model import build_model
from underpar.data.batch import Segments, segments_from_starts
from underpar.infer.predictor import Predictor
from underpar.model.gpt import GPT, angles_of, rotate
from underpar.model.kv_cache import PackedCache
from underpar.recipe import load_recipe
from underpar.seams import BOS_ID

# Relative, in fp32; where nothing may change at all, tensors must be equal.
TOLERANCE = 1e-5

RECIPES = ["pr2014", "pr2135", "pr1894", "pr1493", "pr1219"]
SMEARED = ["pr2014", "pr2135"]


def randomized(name: str, overrides: Sequence[str] = ()) -> GPT:
    """Weights away from their start, so that every path carries something."""
    torch.manual_seed(0)
    model = build_model(load_recipe(f"{name}+cpu", overrides))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.startswith("blocks.") and parameter.ndim == 2:
                nn.init.normal_(parameter, std=parameter.size(1) ** -0.5)
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def document(num_tokens: int, seed: int = 1) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, 500, (num_tokens,), generator=source)
    tokens[0] = BOS_ID
    return tokens


def segments_of(tokens: Tensor, context: int = 128) -> Segments:
    return segments_from_starts((tokens == BOS_ID).numpy(), len(tokens), context)


def logits_of(model: GPT, tokens: Tensor, context: int = 128) -> Tensor:
    return model(tokens, PackedCache(segments_of(tokens, context)))


def states_of(model: GPT, tokens: Tensor) -> Tensor:
    """What enters and leaves attention on each visit, then what the head reads (., N, dim)."""
    states = []
    hooks = [
        block.attn.register_forward_hook(lambda attn, args, out: states.extend((args[0], out)))
        for block in model.blocks
    ]
    states.append(model.hidden(tokens, PackedCache(segments_of(tokens))))
    for hook in hooks:
        hook.remove()
    return torch.stack(states).detach()


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float(((ours - theirs).norm() / theirs.norm()).detach())


@pytest.mark.parametrize(
    ("name", "training", "leaks"),
    [
        ("pr2014", True, False),
        ("pr2014", False, False),
        ("pr2135", True, True),
        # Scoring is masked, however the network was trained.
        ("pr2135", False, False),
    ],
)
def test_04_smear_at_a_document_start(name: str, training: bool, leaks: bool) -> None:
    model = randomized(name).train(training)
    tokens = torch.cat((document(20), document(30, seed=2)))
    other = tokens.clone()
    other[19] += 1
    before, after = states_of(model, tokens), states_of(model, other)
    assert not torch.equal(before[:, 19], after[:, 19])
    assert torch.equal(before[:, 20:], after[:, 20:]) != leaks


@pytest.mark.parametrize("name", SMEARED)
def test_04_smear_formula_and_first_position(name: str) -> None:
    model = randomized(name).train()
    # No BOS in front and cut in pieces: neither the pack's edge nor a cut starts a document.
    tokens = torch.cat((document(20), document(30, seed=2)))[1:]
    smear, e = model.levers["smear"], model.embedding(tokens)
    smeared = smear.embed(e, tokens, PackedCache(segments_of(tokens, context=8)))
    assert torch.equal(smeared[0], e[0])
    gate = smear.strength * torch.sigmoid(e[:, :12] @ smear.gate)
    if name == "pr2014":
        gate = gate * (tokens != BOS_ID)
    assert relative(smeared[1:], e[1:] + gate[1:, None] * e[:-1]) < TOLERANCE


@pytest.mark.parametrize("name", SMEARED)
def test_05_smear_is_not_recursive(name: str) -> None:
    # What enters the first layer's attention is a function of the smeared token alone.
    model, tokens = randomized(name), document(12)
    before = states_of(model, tokens)[0]
    for t in range(1, 10):
        other = tokens.clone()
        other[t] += 1
        changed = (states_of(model, other)[0] != before).any(-1)
        assert changed.nonzero().flatten().tolist() == [t, t + 1]


@pytest.mark.parametrize("name", ["pr2014", "pr1219"])
def test_06_a_lone_token_gets_nothing_from_attention(name: str) -> None:
    model = randomized(name)
    tokens = torch.cat((document(20), document(1), document(150, seed=2)))
    attended = states_of(model, tokens)[1:-1:2]
    # The starts of documents, and of the second piece of the last.
    starts = torch.zeros(len(tokens), dtype=torch.bool)
    starts[[0, 20, 21, 21 + 128]] = True
    sizes = attended.norm(dim=-1)  # (visits, N)
    assert (sizes[:, starts] < TOLERANCE * sizes.mean()).all()
    assert (sizes[:, ~starts] > TOLERANCE * sizes.mean()).all()


@torch.no_grad()
def test_06_heads_are_orthogonal_to_the_own_value() -> None:
    model, inputs, heads = randomized("pr2014"), [], []
    for block in model.blocks:
        block.attn.register_forward_pre_hook(lambda attn, args: inputs.append((attn, args[0])))
        block.attn.o.register_forward_pre_hook(lambda o, args: heads.append(args[0]))
    logits_of(model, document(40))
    assert len(heads) == len(model.plan) == 17
    for (attn, x), y in zip(inputs, heads, strict=True):
        # Heads 2j and 2j + 1 share the value of key head j.
        v = attn.v(x).unflatten(-1, (2, 24)).repeat_interleave(2, dim=1)
        y = y.unflatten(-1, (4, 24))
        along = (y * v).sum(-1) / v.norm(dim=-1)
        assert along.abs().max() < TOLERANCE * y.norm(dim=-1).mean()


def alone_and_packed(model: GPT) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Logits of each document alone, and in packs of several orders."""
    documents = [document(n, seed=n) for n in (30, 2, 150, 47)]
    alone = [logits_of(model, tokens) for tokens in documents]
    packed = []
    for order in ([0, 1, 2, 3], [3, 0, 2, 1], [2, 1, 0, 3]):
        whole = logits_of(model, torch.cat([documents[i] for i in order]))
        parts = dict(zip(order, whole.split([len(documents[i]) for i in order]), strict=True))
        packed.append([parts[i] for i in range(4)])
    return alone, packed


@pytest.mark.parametrize(
    ("name", "training"),
    [("pr2014", True), ("pr2014", False), ("pr2135", False), ("pr1894", True), ("pr1219", True)],
)
def test_07_packed_documents_equal_lone_ones(name: str, training: bool) -> None:
    alone, packed = alone_and_packed(randomized(name).train(training))
    for parts in packed:
        assert all(relative(*pair) < TOLERANCE for pair in zip(parts, alone, strict=True))


def test_07_without_a_mask_packs_leak_in_training() -> None:
    alone, packed = alone_and_packed(randomized("pr2135").train())
    for first, parts in zip((0, 3, 2), packed, strict=True):
        equal = [relative(*pair) < TOLERANCE for pair in zip(parts, alone, strict=True)]
        assert equal == [i == first for i in range(4)]


def test_08_rotation_pairs_norms_and_untouched_channels() -> None:
    frequencies = randomized("pr2014").hooks.frequencies(3072)
    assert torch.allclose(frequencies, 10_000.0 ** (-torch.arange(8) / 8))
    x, positions = torch.randn(5, 8, 64), torch.tensor([0, 1, 2, 100, 3071])
    y = rotate(x, angles_of(positions, frequencies))
    assert torch.equal(y[..., 16:], x[..., 16:])
    assert torch.equal(y[0], x[0]) and not torch.equal(y[1, :, :16], x[1, :, :16])
    assert relative(y.norm(dim=-1), x.norm(dim=-1)) < TOLERANCE
    angle = positions[:, None] * 10_000.0 ** (-3 / 8)
    a, b = x[..., 3], x[..., 11]
    assert relative(y[..., 3], a * angle.cos() + b * angle.sin()) < TOLERANCE
    assert relative(y[..., 11], -a * angle.sin() + b * angle.cos()) < TOLERANCE


def test_08_only_distances_count() -> None:
    model, tokens = randomized("pr2014"), document(60)
    segments = segments_of(tokens)

    def shifted(positions: Tensor) -> Tensor:
        return model(tokens, PackedCache(replace(segments, positions=positions)))

    here = shifted(segments.positions)
    assert relative(shifted(segments.positions + 100), here) < TOLERANCE
    assert relative(shifted(segments.positions * 2), here) > 1e-2


def test_09_a_zero_gate_is_one_half() -> None:
    model, tokens = randomized("pr2014"), document(40)
    gate = model.levers["sparse_attn_gate"]
    nn.init.zeros_(gate.gate)
    y, x, v = torch.randn(5, 4, 24), torch.randn(5, 96), torch.randn(5, 2, 24)
    assert torch.equal(gate.attn_out(7, y, x, v), 0.5 * y)
    gated = logits_of(model, tokens)
    plain = randomized("pr2014", ["levers.sparse_attn_gate=false"])
    plain.load_state_dict({k: t for k, t in model.state_dict().items() if "attn_gate" not in k})
    assert relative(logits_of(plain, tokens), gated) > 1e-2
    with torch.no_grad():
        for block in plain.blocks:
            block.attn_scale.mul_(0.5)
    assert relative(logits_of(plain, tokens), gated) < TOLERANCE


def test_09_the_gate_reads_twelve_channels() -> None:
    gate = randomized("pr2014").levers["sparse_attn_gate"]
    y, x, v = torch.randn(5, 4, 24), torch.randn(5, 96), torch.randn(5, 2, 24)
    share = torch.sigmoid(0.5 * x[:, :12] @ gate.gate[7].T)
    assert relative(gate.attn_out(7, y, x, v), share[:, :, None] * y) < TOLERANCE
    far, near = x.clone(), x.clone()
    far[:, 12:] += 1.0
    near[:, 11] += 1.0
    assert torch.equal(gate.attn_out(7, y, far, v), gate.attn_out(7, y, x, v))
    assert not torch.equal(gate.attn_out(7, y, near, v), gate.attn_out(7, y, x, v))


@pytest.mark.parametrize("name", RECIPES)
def test_10_scales_of_queries_and_keys_do_not_count(name: str) -> None:
    model, tokens = randomized(name), document(40)
    before = logits_of(model, tokens)
    for kind, factor in [("q", 3.0), ("k", 0.5), ("v", 0.5)]:
        with torch.no_grad():
            for block in model.blocks:
                getattr(block.attn, kind).weight.mul_(factor)
        change = relative(logits_of(model, tokens), before)
        assert change < TOLERANCE if kind != "v" else change > 1e-2


def test_11_activation_and_its_slope() -> None:
    model = randomized("pr2014").double()
    mlp, activate = model.blocks[3].mlp, model.hooks.activate
    x = torch.randn(20, model.spec.dim, dtype=torch.double)
    z = (x @ mlp.up.weight.T).detach().requires_grad_()
    phi = torch.where(z > 0, z**2, 0.25 * z**2)
    assert relative(mlp(x, model.plan[3]), phi @ mlp.down.weight.T) < TOLERANCE
    assert (activate(z) >= 0).all()
    (slope,) = torch.autograd.grad(activate(z).sum(), z)
    assert relative(slope, torch.where(z > 0, 2 * z, 0.5 * z)) < TOLERANCE
    step = 1e-6
    assert relative((activate(z + step) - activate(z - step)) / (2 * step), slope) < TOLERANCE


def test_16_a_window_ends_512_tokens_back() -> None:
    torch.manual_seed(0)
    cache = PackedCache(segments_from_starts(np.array([0]), 600, 600))
    q, k, v = torch.randn(600, 4, 24), torch.randn(600, 2, 24), torch.randn(600, 2, 24)
    before = cache.attend(0, q, k, v, 512)
    for changed in (k, v):
        for back, is_seen in [(512, True), (513, False)]:
            saved = changed[599 - back].clone()
            changed[599 - back] += 1.0
            after = cache.attend(0, q, k, v, 512)
            changed[599 - back] = saved
            assert torch.equal(after[599], before[599]) != is_seen


def test_16_window_layers() -> None:
    with torch.device("meta"):
        model = build_model(load_recipe("pr1219"))
    assert [block.attn.window for block in model.blocks] == [0, 0, *[512, 0] * 4, 512]
    # One layer, and nothing else that looks back.
    one = ["model.num_layers=1", "levers.value_embed.layers=[0]", "levers.window.layers=[0]"]
    lone = ["levers.static_smear=false", "levers.bigram=false", "levers.unet=false"]
    model, tokens = randomized("pr1219", [*one, *lone]), document(600)
    before = logits_of(model, tokens, context=600)[-1]
    for back, is_seen in [(512, True), (513, False)]:
        other = tokens.clone()
        other[599 - back] += 1
        assert torch.equal(logits_of(model, other, context=600)[-1], before) != is_seen


def test_16_stepping_has_the_same_window() -> None:
    model, tokens = randomized("pr1219", ["levers.window.size=16"]), document(60)
    stepper = Predictor(model, torch.device("cpu"), []).stepper(1)
    stepped = torch.cat([stepper.step(token[None]) for token in tokens])
    assert relative(stepped, logits_of(model, tokens).log_softmax(-1)) < TOLERANCE


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("progress", [0.0, 1.0])
@pytest.mark.parametrize("name", RECIPES)
def test_19_no_output_follows_later_tokens(name: str, progress: float, training: bool) -> None:
    model = randomized(name).train(training)
    model.set_progress(progress)
    tokens = torch.cat((document(30), document(140, seed=2)))
    before = logits_of(model, tokens)
    for cut in (1, 29, 31, 100, 169):
        other = tokens.clone()
        other[cut:] += 1
        after = model(other, PackedCache(segments_of(tokens)))
        assert torch.equal(after[:cut], before[:cut])
        assert not torch.equal(after[cut], before[cut])


@pytest.mark.parametrize("name", RECIPES)
def test_19_no_output_follows_a_later_document(name: str) -> None:
    model, tokens = randomized(name), document(100)
    before = logits_of(model, tokens)
    tokens[70] = BOS_ID
    assert relative(logits_of(model, tokens)[:70], before[:70]) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "context", "base"),
    [
        ("pr1219", 512, 10_000.0),
        ("pr1219", 1024, 10_000.0),
        ("pr1219", 2048, 22_081.8),
        ("pr1219", 6144, 77_503.1),
        ("pr1894", 2048, 10_000.0),
        ("pr1894", 4096, 22_081.8),
        ("pr2014", 98_304, 10_000.0),
        ("pr2135", 98_304, 10_000.0),
    ],
)
def test_20_ntk_base(name: str, context: int, base: float) -> None:
    model, tokens, angles = randomized(name), document(20), []
    model.blocks[0].attn.register_forward_pre_hook(lambda attn, args: angles.append(args[2].angles))
    logits_of(model, tokens, context)
    cos, sin = angles[0]
    # At position 1 the angles are the frequencies.
    frequencies = torch.atan2(sin, cos)[1, 0]
    assert relative(frequencies, base ** (-torch.arange(8) / 8)) < TOLERANCE
    assert float(frequencies[7]) ** (-8 / 7) == pytest.approx(base, rel=TOLERANCE)
