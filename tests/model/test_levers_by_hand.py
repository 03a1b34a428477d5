"""Levers against a forward pass written out by hand: one document, no cache, no hooks."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lever_stacks import randomized
from underpar.build.model import build_model
from underpar.data.batch import segments_from_starts
from underpar.levers import mudd_tail
from underpar.model.gpt import GPT
from underpar.model.kv_cache import PackedCache
from underpar.recipe import ModelSpec, load_recipe
from underpar.seams import BOS_ID, Stream, Visit

SIZES = ["model.num_layers=4", "model.dim=64", "model.num_heads=4", "model.context=64"]
TOKENS = torch.randint(4, 500, (24,), generator=torch.Generator().manual_seed(2))


def model_with(*levers: str) -> GPT:
    return randomized(
        load_recipe("cpu", [*SIZES, *(f"levers.{lever}" for lever in levers)])
    ).double()


def rms(x: Tensor) -> Tensor:
    """x with a mean square of 1 over the last axis."""
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()


def rope(x: Tensor) -> Tensor:
    """x (T, heads, D): channel j turns with channel j + D / 2."""
    half = x.size(-1) // 2
    out = torch.empty_like(x)
    for t in range(len(x)):
        for j in range(half):
            angle = torch.tensor(t * 10_000.0 ** (-j / half), dtype=torch.float64)
            a, b = x[t, :, j], x[t, :, j + half]
            out[t, :, j] = a * angle.cos() + b * angle.sin()
            out[t, :, j + half] = b * angle.cos() - a * angle.sin()
    return out


def softmax_map(q: Tensor, k: Tensor) -> Tensor:
    """Causal attention weights (T, T) of one head's q and k (T, D)."""
    scores = q @ k.T / q.size(-1) ** 0.5
    hidden = torch.ones_like(scores).triu(1).bool()
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


def plain_heads(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
    """Each head's output; H / K query heads read one key head."""
    group = q.size(1) // k.size(1)
    heads = range(q.size(1))
    return torch.stack(
        [softmax_map(q[:, h], k[:, h // group]) @ v[:, h // group] for h in heads], dim=1
    )


def by_hand(
    model: GPT,
    order: list[int],
    change_v: Callable[[int, Tensor, Tensor], Tensor] = lambda visit, v, first: v,
    heads: Callable[[Tensor, Tensor, Tensor, int], Tensor] = plain_heads,
    product: Callable[[str, int, Tensor, Tensor], Tensor] = lambda site, visit, y, x: y,
    read: Callable[[int, Tensor], Tensor] = lambda visit, x: x,
    finish: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensor:
    """Logits (T, V); the arguments say what a lever changes."""
    x = rms(model.embedding.weight[TOKENS])
    first_v: Any = None
    for visit, layer in enumerate(order):
        block = model.blocks[layer]
        n = rms(read(visit, x))
        q, k, v = (
            product(site, visit, n @ getattr(block.attn, site).weight.T, n).unflatten(
                -1, (-1, block.attn.head_dim)
            )
            for site in "qkv"
        )
        first_v = v if first_v is None else first_v
        y = heads(rope(rms(q)), rope(rms(k)), change_v(visit, v, first_v), layer)
        x = x + block.attn_scale * product("o", visit, y.flatten(1) @ block.attn.o.weight.T, n)
        n = rms(x)
        h = F.relu(n @ block.mlp.up.weight.T).square()
        x = x + block.mlp_scale * product("mlp", visit, h @ block.mlp.down.weight.T, n)
    return 30.0 * torch.tanh(rms(finish(x)) @ model.embedding.weight.T / 30.0)


def assert_equal(model: GPT, expected: Tensor) -> None:
    segments = segments_from_starts(torch.zeros(1).long().numpy(), len(TOKENS), 64)
    with torch.no_grad():
        torch.testing.assert_close(
            model(TOKENS, PackedCache(segments)).double(), expected, rtol=1e-4, atol=1e-4
        )
        # The lever does something.
        assert not torch.allclose(expected, by_hand(model, list(range(4))), atol=1e-2)


def test_the_plain_network() -> None:
    model = model_with()
    segments = segments_from_starts(torch.zeros(1).long().numpy(), len(TOKENS), 64)
    with torch.no_grad():
        logits = model(TOKENS, PackedCache(segments)).double()
        torch.testing.assert_close(logits, by_hand(model, [0, 1, 2, 3]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("blend", [0.5, 1.0])
def test_value_residual_blends_half_and_half(blend: float) -> None:
    model = model_with(f"value_residual.blend={blend}")
    assert list(model.levers.value_residual.parameters()) == []

    def change_v(visit: int, v: Tensor, first: Tensor) -> Tensor:
        return (1 - blend) * v + blend * first

    with torch.no_grad():
        assert_equal(model, by_hand(model, [0, 1, 2, 3], change_v))


def test_value_residual_adds_a_learned_share() -> None:
    model = model_with("value_residual=true")
    alpha = model.levers.value_residual.alpha

    def change_v(visit: int, v: Tensor, first: Tensor) -> Tensor:
        return v + torch.sigmoid(alpha[visit]) * first if visit else v

    with torch.no_grad():
        assert_equal(model, by_hand(model, [0, 1, 2, 3], change_v))


def test_recur_lora_adds_adapters_and_gains_to_repeated_visits_only() -> None:
    products = ["q", "v", "o", "mlp"]
    model = model_with(
        "loop={first=1, last=2, repeats=2}", f"recur_lora={{sites=4, rank=3, products={products}}}"
    )
    lever = model.levers.recur_lora

    def product(name: str, visit: int, y: Tensor, x: Tensor) -> Tensor:
        # The visits are of layers 0 1 2 1 2 1 2 3.
        site = visit - 3
        if not 0 <= site < 4:
            return y
        if name in ("o", "mlp"):
            y = lever.gains[site, int(name == "mlp")] * y
        if name in products:
            y = y + x @ (lever.b[name][site] @ lever.a[name][site]).T
        return y

    with torch.no_grad():
        assert_equal(model, by_hand(model, [0, 1, 2, 1, 2, 1, 2, 3], product=product))


def test_recur_lora_starts_as_the_plain_loop() -> None:
    lever = build_model(load_recipe("cpu", ["levers.loop=true", "levers.recur_lora=true"])).levers
    assert not any(b.any() for b in lever.recur_lora.b.values())
    assert torch.equal(lever.recur_lora.gains, torch.ones(6, 2))


def test_differential_attention_subtracts_two_maps() -> None:
    model = model_with("diff_attn.layers=[1, 3]")
    lever = model.levers.diff_attn

    def heads(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        if layer not in (1, 3):
            return plain_heads(q, k, v, layer)
        row, start = layer // 2, 0.8 - 0.6 * torch.tensor(-0.3 * layer).exp()
        a, b, c, d = lever.vectors[row]
        share = (a @ b).exp() - (c @ d).exp() + start
        # Heads 0 and 1 read key head 0, heads 2 and 3 read key head 1.
        out: dict[int, Tensor] = {}
        for first, second in ((0, 2), (1, 3)):
            maps = softmax_map(q[:, first], k[:, 0]) - share * softmax_map(q[:, second], k[:, 1])
            y = rms(maps @ torch.cat((v[:, 0], v[:, 1]), dim=1))
            out[first], out[second] = (lever.gain[row] * (1 - start) * y).chunk(2, dim=1)
        return torch.stack([out[head] for head in range(4)], dim=1)

    with torch.no_grad():
        assert_equal(model, by_hand(model, [0, 1, 2, 3], heads=heads))


@pytest.mark.parametrize(("share", "num_shifted"), [(0.25, 4), (0.5, 8), (1.0, 16)])
def test_key_offset_takes_keys_of_the_token_before(share: float, num_shifted: int) -> None:
    model = model_with(f"key_offset.share={share}")

    def heads(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        k = k.clone()
        for t in reversed(range(1, len(k))):
            k[t, :, 16 - num_shifted :] = k[t - 1, :, 16 - num_shifted :]
        return plain_heads(q, k, v, layer)

    with torch.no_grad():
        assert_equal(model, by_hand(model, [0, 1, 2, 3], heads=heads))


def test_key_offset_keeps_the_first_key_of_a_document_and_of_a_piece() -> None:
    lever: Any = model_with("key_offset.share=1.0").levers.key_offset
    # A document of 6 tokens cut at 4, then one of 5.
    tokens = torch.tensor([1, 9, 9, 9, 9, 9, 1, 9, 9, 9, 9])
    segments = segments_from_starts(torch.tensor([0, 4, 6]).numpy(), len(tokens), 4)
    x = torch.zeros(len(tokens), 1)
    angles = (x, x)
    stream = Stream(x, x, tokens, PackedCache(segments), angles)
    k = torch.arange(len(tokens)).double()[:, None, None].expand(-1, 2, 16)
    _, shifted, _ = lever.qkv(Visit(0, 0, 0, -1, -1), k, k, k, stream)
    firsts = segments.positions == 0
    assert {0, 4, 6} <= set(firsts.nonzero()[:, 0].tolist())
    expected = torch.where(firsts, k[:, 0, 0], k[:, 0, 0] - 1)
    assert torch.equal(shifted, expected[:, None, None].expand_as(k))


def test_logit_rescale_is_the_published_curve_of_the_raw_logits() -> None:
    model = model_with("logit_rescale=true")
    raw = torch.tensor([[-40.0, -5.0, 0.0, 7.0, 60.0]], dtype=torch.float64)
    expected = 11.5 * torch.tanh((raw + 5) / 15) + 11.5
    torch.testing.assert_close(model.cap(raw), expected)
    torch.testing.assert_close(model.cap(raw, fused=True), expected)
    assert model.cap(raw.bfloat16()).dtype == torch.float32


def test_late_attention_reads_the_saved_stream_and_the_end_takes_it_out() -> None:
    model = model_with("late_context={start=2, backout=0.3}")
    share = model.levers.late_context.backout
    saved: list[Tensor] = []

    def read(visit: int, x: Tensor) -> Tensor:
        if visit == 2:
            saved.append(x)
        return saved[0] if visit >= 2 else x

    with torch.no_grad():
        expected = by_hand(model, [0, 1, 2, 3], read=read, finish=lambda x: x - share * saved[0])
        assert_equal(model, expected)


def test_the_tail_adds_weighted_sources_before_the_head() -> None:
    model = model_with("mudd_tail={layers=[0, 2], backout=2, width=5}")
    lever = model.levers.mudd_tail
    inputs: list[Tensor] = []

    def read(visit: int, x: Tensor) -> Tensor:
        # What a visit reads is what the one before it wrote.
        inputs.append(x)
        return x

    def finish(x: Tensor) -> Tensor:
        weights = 0.1 * (F.gelu(x @ lever.tail.read) @ lever.tail.weigh + lever.tail.bias)
        # The embedding, and the outputs of layers 0 and 2.
        for j, source in enumerate((inputs[0], inputs[1], inputs[3])):
            x = x + weights[:, j, None] * source
        return x

    with torch.no_grad():
        assert_equal(model, by_hand(model, [0, 1, 2, 3], read=read, finish=finish))


def test_the_tail_adds_weighted_sources_to_the_values_of_a_layer() -> None:
    model = model_with("mudd_tail={layers=[0, 2], backout=-1, width=5, values=2}")
    lever = model.levers.mudd_tail
    inputs: list[Tensor] = []

    def weights(net: Any, x: Tensor) -> Tensor:
        out: Tensor = 0.1 * (F.gelu(x @ net.read) @ net.weigh + net.bias)
        return out

    def read(visit: int, x: Tensor) -> Tensor:
        inputs.append(x)
        return x

    def change_v(visit: int, v: Tensor, first: Tensor) -> Tensor:
        if visit != 2:
            return v
        x = inputs[2]
        c = weights(lever.values, x)
        # The embedding, the output of layer 0, and what enters layer 2: as many channels as v has.
        for j, source in enumerate((inputs[0], inputs[1], x)):
            v = v + (c[:, j, None] * source[:, : v[0].numel()]).view_as(v)
        return v

    def finish(x: Tensor) -> Tensor:
        c = weights(lever.tail, x)
        for j, source in enumerate((inputs[0], inputs[1], inputs[3])):
            x = x + c[:, j, None] * source
        return x

    with torch.no_grad():
        expected = by_hand(model, [0, 1, 2, 3], change_v, read=read, finish=finish)
        assert_equal(model, expected)


def test_pairs_are_added_to_the_values_of_one_head() -> None:
    model = model_with("pair_values={buckets=50, layers=[1, 3], head=1}")
    lever = model.levers.pair_values
    tokens = [0, *TOKENS.tolist()]
    rows = [
        49 if now == BOS_ID else ((36_313 * now) ^ (27_191 * before)) % 49
        for before, now in pairwise(tokens)
    ]
    assert len(set(rows)) > 10

    def change_v(visit: int, v: Tensor, first: Tensor) -> Tensor:
        if visit in (1, 3):
            v = v.clone()
            v[:, 1] += lever.gain[(visit - 1) // 2] * lever.table.weight[rows]
        return v

    with torch.no_grad():
        assert_equal(model, by_hand(model, [0, 1, 2, 3], change_v))


def test_the_tail_starts_by_subtracting_half_of_one_layer() -> None:
    spec = ModelSpec(dim=64)
    lever = mudd_tail.Lever(mudd_tail.Settings(), spec)
    x = torch.randn(3, 64)
    kept = {f"mudd_tail.{layer}": torch.randn(3, 64) for layer in (3, 7, 9)}
    cache: Any = None
    stream = Stream(x, x, torch.ones(3).long(), cache, (x, x), kept)
    lever.finish(stream)
    torch.testing.assert_close(stream.x, x - 0.5 * kept["mudd_tail.7"])
