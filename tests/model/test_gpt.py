"""The baseline network: the numbered invariants of its specification, at tiny size."""

import dataclasses
import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from underpar.model.gpt import GPT
from underpar.model.mlp import MLP
from underpar.model.past import PackedPast
from underpar.model.rotary import Rotary
from underpar.recipe import ModelSpec

SPEC = ModelSpec(
    vocab_size=64,
    num_layers=3,
    dim=32,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=48,
    rope_dims=4,
    context=64,
)


def logits_of(model: GPT, tokens: Tensor, cu: list[int] | None = None) -> Tensor:
    cu = cu or [0, len(tokens)]
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(cu)])
    out: Tensor = model(tokens, positions, PackedPast(torch.tensor(cu)))
    return out


@pytest.fixture
def random_model() -> GPT:
    """Weights away from their initial zeros, so that every path carries something."""
    torch.manual_seed(0)
    model = GPT(SPEC)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(4, SPEC.vocab_size, (20,), generator=torch.Generator().manual_seed(1))


def test_full_size_parameter_count() -> None:
    with torch.device("meta"):
        model = GPT(ModelSpec())
    # Embedding, four matrices of each kind, two scales a layer, the soft cap.
    expected = 8192 * 512 + 11 * (2 * 512**2 + 2 * 256 * 512 + 2 * 2048 * 512 + 2 * 512) + 1
    assert sum(p.numel() for p in model.parameters()) == expected


def test_at_init_the_blocks_are_the_identity(tokens: Tensor) -> None:
    torch.manual_seed(0)
    model = GPT(SPEC)
    embedding = model.embedding.weight
    x = F.rms_norm(embedding[tokens], (SPEC.dim,))
    # Norm twice: on entry and before the head.
    raw = F.rms_norm(x, (SPEC.dim,)) @ embedding.T
    expected = SPEC.softcap * torch.tanh(raw / SPEC.softcap)
    torch.testing.assert_close(logits_of(model, tokens), expected, rtol=1e-4, atol=1e-5)
    loss = F.cross_entropy(logits_of(model, tokens[:-1]), tokens[1:])
    assert abs(float(loss) - math.log(SPEC.vocab_size)) < 0.02


def test_no_output_depends_on_later_tokens(random_model: GPT, tokens: Tensor) -> None:
    before = logits_of(random_model, tokens)
    for cut in (1, 7, 19):
        other = tokens.clone()
        other[cut:] = (other[cut:] + 5) % SPEC.vocab_size
        after = logits_of(random_model, other)
        assert torch.equal(after[:cut], before[:cut])
        assert not torch.equal(after[cut:], before[cut:])


def test_packed_documents_equal_lone_ones(random_model: GPT, tokens: Tensor) -> None:
    packed = logits_of(random_model, tokens, [0, 8, 20])
    alone = torch.cat((logits_of(random_model, tokens[:8]), logits_of(random_model, tokens[8:])))
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


def test_padded_boundaries_change_nothing(random_model: GPT, tokens: Tensor) -> None:
    padded = logits_of(random_model, tokens, [0, 8] + [20] * 62)
    assert torch.equal(padded, logits_of(random_model, tokens, [0, 8, 20]))


def test_only_distance_matters(random_model: GPT, tokens: Tensor) -> None:
    past = PackedPast(torch.tensor([0, 20]))
    here = random_model(tokens, torch.arange(20), past)
    there = random_model(tokens, torch.arange(20) + 1000, past)
    torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-3)


def test_query_and_key_scales_do_not_matter(random_model: GPT, tokens: Tensor) -> None:
    before = logits_of(random_model, tokens)
    with torch.no_grad():
        for block in random_model.blocks:
            block.attn.q.weight.mul_(3.0)
            block.attn.k.weight.mul_(0.5)
    torch.testing.assert_close(logits_of(random_model, tokens), before, rtol=1e-3, atol=1e-3)


def test_logits_stay_below_the_cap(random_model: GPT, tokens: Tensor) -> None:
    with torch.no_grad():
        random_model.embedding.weight.mul_(100)
        random_model.softcap.fill_(7.0)
    assert float(logits_of(random_model, tokens).abs().max()) <= 7.0


def test_every_parameter_gets_a_gradient(random_model: GPT, tokens: Tensor) -> None:
    F.cross_entropy(logits_of(random_model, tokens[:-1]), tokens[1:]).backward()
    dead = [n for n, p in random_model.named_parameters() if p.grad is None or not p.grad.any()]
    assert dead == []


def test_rotation_keeps_norms_and_leaves_the_rest() -> None:
    rotary = Rotary(4, 10_000.0)
    x = torch.randn(5, 2, 8)
    y = rotary(x, rotary.angles(torch.tensor([0, 1, 2, 50, 1000])))
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-4, atol=1e-5)
    assert torch.equal(y[..., 4:], x[..., 4:])
    assert torch.equal(y[0], x[0])
    assert not torch.allclose(y[3, :, :4], x[3, :, :4])


@pytest.mark.parametrize("z", [-2.0, -0.1, 0.1, 3.0])
def test_the_activation_and_its_slope(z: float) -> None:
    mlp = MLP(dataclasses.replace(SPEC, dim=4, mlp_dim=4, num_heads=1, num_kv_heads=1, rope_dims=2))
    for linear in (mlp.up, mlp.down):
        torch.nn.init.eye_(linear.weight)
    point = torch.tensor(z, requires_grad=True)
    value = mlp(point.expand(1, 4))[0, 0]
    value.backward()
    assert point.grad is not None
    assert float(value) == pytest.approx(z * z if z > 0 else 0.25 * z * z)
    assert float(point.grad) == pytest.approx(2 * z if z > 0 else 0.5 * z)
