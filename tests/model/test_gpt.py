"""The baseline network at tiny size, without levers, and what the seams refuse."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from underpar.data.batch import segments_from_starts
from underpar.errors import RecipeError
from underpar.model.gpt import GPT, angles_of, frequencies_of, make_plan, rotate
from underpar.model.kv_cache import PackedCache
from underpar.recipe import ModelSpec
from underpar.seams import Visit

SPEC = ModelSpec(
    vocab_size=64, num_layers=3, dim=32, num_heads=4, num_kv_heads=2, mlp_dim=48, context=64
)


def logits_of(
    model: GPT, tokens: Tensor, starts: tuple[int, ...] = (0,), bucket: int = 0
) -> Tensor:
    segments = segments_from_starts(np.array(starts), len(tokens), SPEC.context, bucket)
    out: Tensor = model(tokens, PackedCache(segments))
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
    # Embedding, four matrices of each kind, two scales a layer.
    expected = 8192 * 512 + 11 * (2 * 512**2 + 2 * 256 * 512 + 2 * 2048 * 512 + 2 * 512)
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
    assert abs(loss.item() - math.log(SPEC.vocab_size)) < 0.02


def test_no_output_depends_on_later_tokens(random_model: GPT, tokens: Tensor) -> None:
    before = logits_of(random_model, tokens)
    for cut in (1, 7, 19):
        other = tokens.clone()
        other[cut:] = (other[cut:] + 5) % SPEC.vocab_size
        after = logits_of(random_model, other)
        assert torch.equal(after[:cut], before[:cut])
        assert not torch.equal(after[cut:], before[cut:])


def test_packed_documents_equal_lone_ones(random_model: GPT, tokens: Tensor) -> None:
    packed = logits_of(random_model, tokens, (0, 8))
    alone = torch.cat((logits_of(random_model, tokens[:8]), logits_of(random_model, tokens[8:])))
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


def test_padded_boundaries_change_nothing(random_model: GPT, tokens: Tensor) -> None:
    padded = logits_of(random_model, tokens, (0, 8), bucket=64)
    assert torch.equal(padded, logits_of(random_model, tokens, (0, 8)))


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
    assert logits_of(random_model, tokens).abs().max().item() <= SPEC.softcap


def test_every_parameter_gets_a_gradient(random_model: GPT, tokens: Tensor) -> None:
    F.cross_entropy(logits_of(random_model, tokens[:-1]), tokens[1:]).backward()
    dead = [n for n, p in random_model.named_parameters() if p.grad is None or not p.grad.any()]
    assert dead == []


def test_rotation_keeps_norms_and_leaves_the_rest() -> None:
    x = torch.randn(5, 2, 8)
    y = rotate(x, angles_of(torch.tensor([0, 1, 2, 50, 1000]), frequencies_of(4, 10_000.0)))
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-4, atol=1e-5)
    assert torch.equal(y[..., 4:], x[..., 4:])
    assert torch.equal(y[0], x[0])
    assert not torch.allclose(y[3, :, :4], x[3, :, :4])


def test_a_plan_names_layers_repeats_sites_and_halves() -> None:
    assert make_plan((0, 1, 0, 1, 2)) == (
        Visit(slot=0, layer=0, repeat=0, site=-1, decoder=-1),
        Visit(slot=1, layer=1, repeat=0, site=-1, decoder=-1),
        Visit(slot=2, layer=0, repeat=1, site=0, decoder=0),
        Visit(slot=3, layer=1, repeat=1, site=1, decoder=1),
        Visit(slot=4, layer=2, repeat=0, site=-1, decoder=2),
    )


class Capper(nn.Module):
    """A lever that takes a place for one."""

    def cap(self, logits: Tensor, fused: bool) -> Tensor:
        """Leave them."""
        return logits


class Wirer(nn.Module):
    """A lever that visits layer 1 its own way."""

    def wires(self, layer: int) -> bool:
        """One layer."""
        return layer == 1

    def wire(self, block: Any, visit: Visit, stream: Any) -> None:
        """Leave the stream."""


@pytest.mark.parametrize(("kind", "place"), [(Capper, "cap"), (Wirer, "wiring of layer 1")])
def test_one_place_takes_one_lever(kind: type[nn.Module], place: str) -> None:
    GPT(SPEC, {"one": kind()})
    with pytest.raises(RecipeError, match=f"one and two: both take .*{place}"):
        GPT(SPEC, {"one": kind(), "two": kind()})
