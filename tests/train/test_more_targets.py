"""More targets of the same logits: which they are, their weights, the gradient, the loss shown."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lever_stacks import CPU, batch_of
from underpar.build.model import build_model
from underpar.compile.regions import Sharing
from underpar.compile.traced_run import TracedRun
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime
from underpar.data.folder import load_data
from underpar.errors import RecipeError
from underpar.levers import entropy_weight, multi_token, prefix_token
from underpar.levers.prefix_token import longest_prefixes
from underpar.model.gpt import GPT
from underpar.model.kv_cache import PackedCache
from underpar.model.network import EAGER, Eager
from underpar.recipe import ModelSpec, load_recipe
from underpar.seams import BOS_ID
from underpar.stages.train import make_trainer, train
from underpar.train.step import LossLever, mean_loss

BATCH = batch_of([9, 30], 128)
PIECES = [b"<x>", b"", b"", *(bytes([97 + i % 26]) * (1 + i // 26) for i in range(509))]
SPEC = ModelSpec(vocab_size=512)


def multi(p: float) -> multi_token.Lever:
    lever = multi_token.Lever(multi_token.Settings(), SPEC)
    lever.begin(PIECES, CPU)
    lever.progress(p)
    return lever


def prefix(p: float) -> prefix_token.Lever:
    lever = prefix_token.Lever(prefix_token.Settings(), SPEC)
    lever.begin(PIECES, CPU)
    lever.progress(p)
    return lever


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    model = build_model(load_recipe("cpu", ["model.num_layers=1"]))
    with torch.no_grad():
        model.embedding.weight.normal_(std=0.3)
        model.blocks[0].mlp.down.weight.normal_(std=0.1)
    return model


def gradient_of(model: GPT, run: Eager, *levers: LossLever) -> tuple[Tensor, Tensor]:
    """The loss that is shown, and the gradient of the embedding."""
    model.zero_grad()
    loss = mean_loss(model, BATCH, run, levers)
    loss.backward()
    assert model.embedding.weight.grad is not None
    return loss.detach(), model.embedding.weight.grad.clone()


@pytest.mark.parametrize(
    ("p", "second", "third"),
    [(0.0, 0.5, 0.25), (0.1665, 0.5, 0.125), (0.333, 0.5, 0.0), (0.5, 0.25, 0.0), (0.7, 0.0, 0.0)],
)
def test_the_weights_are_those_of_the_published_thirds(
    p: float, second: float, third: float
) -> None:
    assert [float(w) for w in multi(p).weights] == pytest.approx([second, third], abs=1e-3)
    assert float(prefix(p).weight) == pytest.approx(second / 2, abs=1e-3)


def test_later_targets_end_with_the_piece_and_with_the_document() -> None:
    # Two pieces of a document, then one whose fourth target begins another document.
    positions = torch.tensor([0, 1, 2, 0, 1, 0, 1, 2, 3, 4, 5])
    targets = torch.tensor([10, 11, 12, 13, 14, 20, 21, 22, BOS_ID, 24, 25])
    (second, w2), (third, w3) = multi(0.0).more_targets(targets, positions)
    assert (w2 / 0.5).tolist() == [1, 1, 0, 1, 0, 1, 1, 1, 0, 1, 0]
    assert (w3 / 0.25).tolist() == [1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0]
    assert second[w2 > 0].tolist() == [11, 12, 14, 21, 22, BOS_ID, 25]
    assert third[w3 > 0].tolist() == [12, 22, BOS_ID]


@given(st.lists(st.text("ab", max_size=5).map(str.encode), max_size=30, unique=True))
def test_the_prefix_is_the_longest_piece_that_begins_a_piece(pieces: list[bytes]) -> None:
    for token, found in enumerate(longest_prefixes(pieces)):
        whole = pieces[token]
        proper = [p for p in pieces if p and p != whole and whole.startswith(p)]
        expected = pieces.index(max(proper, key=len)) if proper else -1
        assert found == expected


def test_a_piece_that_a_byte_token_repeats_is_the_prefix() -> None:
    # Byte tokens come first; text is written with the pieces.
    assert longest_prefixes([b"a", b"", b"ab", b"a", b"abc"]) == [-1, -1, 3, -1, 2]


def test_tokens_without_a_prefix_weigh_nothing() -> None:
    targets = torch.tensor([3, 29, 1, 55])
    ((others, weights),) = prefix(0.0).more_targets(targets, torch.arange(4))
    assert weights.tolist() == [0.0, 0.25, 0.0, 0.25]
    assert others[weights > 0].tolist() == [3, 29]


@pytest.mark.parametrize("make", [multi, prefix])
def test_the_gradient_is_that_of_the_weighted_mean_and_the_loss_is_plain(
    model: GPT, make: Callable[[float], LossLever]
) -> None:
    lever = make(0.1)
    log_probs = model(BATCH.inputs, PackedCache(BATCH.segments)).double().log_softmax(-1)
    rows = torch.arange(len(BATCH.targets))
    total, weight_sum = -log_probs[rows, BATCH.targets].sum(), float(len(rows))
    for others, weights in lever.more_targets(BATCH.targets, BATCH.segments.positions):
        assert 0 < (weights > 0).sum() < len(rows)
        for t in range(len(rows)):
            total = total - weights[t] * log_probs[t, others[t]]
            weight_sum += float(weights[t])
    model.zero_grad()
    (total / weight_sum).backward()
    assert model.embedding.weight.grad is not None
    expected = model.embedding.weight.grad.clone()
    plain_loss, plain = gradient_of(model, EAGER)
    loss, grad = gradient_of(model, EAGER, lever)
    torch.testing.assert_close(loss, plain_loss)
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-6)
    assert (grad - plain).abs().max() > 1e-3 * plain.abs().max()


@pytest.mark.parametrize("make", [multi, prefix])
def test_in_the_last_third_it_is_the_plain_loss(
    model: GPT, make: Callable[[float], LossLever]
) -> None:
    with_lever, plain = gradient_of(model, EAGER, make(0.7)), gradient_of(model, EAGER)
    torch.testing.assert_close(with_lever, plain, rtol=1e-4, atol=1e-7)


def test_levers_of_the_loss_go_together(model: GPT) -> None:
    weigher = entropy_weight.Lever(entropy_weight.NEUTRAL, SPEC)
    both = gradient_of(model, EAGER, weigher, multi(0.1), prefix(0.1))
    torch.testing.assert_close(both, gradient_of(model, EAGER, multi(0.1), prefix(0.1)))


def test_one_graph_serves_all_weights(model: GPT) -> None:
    run = TracedRun(Sharing(lambda graph, examples: graph))
    levers = multi(0.0), prefix(0.0)
    graphs = []
    for p in (0.0, 0.2, 0.5, 1.0):
        for lever in levers:
            lever.progress(p)
        traced, eager = gradient_of(model, run, *levers), gradient_of(model, EAGER, *levers)
        torch.testing.assert_close(traced, eager, rtol=1e-4, atol=1e-6)
        graphs.append(run.num_graphs)
    assert len(set(graphs)) == 1


@pytest.mark.parametrize("name", ["multi_token", "prefix_token"])
def test_training_uses_it(name: str, tiny_data: Path, tmp_path: Path, runtime: Runtime) -> None:
    short = ["model.num_layers=1", "train.budget_steps=3"]

    def losses_with(folder_name: str, *changes: str) -> list[float]:
        folder = RunFolder(tmp_path / folder_name)
        train(load_recipe("cpu", [*short, *changes]), tiny_data, folder, runtime)
        lines = map(json.loads, folder.metrics_file.read_text().splitlines())
        return [line["loss"] for line in lines if "loss" in line]

    plain, changed = losses_with("plain"), losses_with("with", f"levers.{name}=true")
    # The first loss is that of the same weights, and shows the next token alone.
    assert changed[0] == pytest.approx(plain[0], abs=1e-5)
    assert abs(changed[-1] - plain[-1]) > 1e-4


def test_a_trainer_hands_over_the_vocabulary(
    tiny_data: Path, tmp_path: Path, runtime: Runtime
) -> None:
    data = load_data(tiny_data)
    recipe = load_recipe("cpu", ["levers.prefix_token=true", "model.num_layers=1"])
    trainer = make_trainer(recipe, data, RunFolder(tmp_path), runtime)
    (lever,) = trainer.more_targets
    assert isinstance(lever, prefix_token.Lever)
    pieces = data.tokenizer.pieces
    found = [(pieces[t], pieces[p]) for t, p in enumerate(lever.prefixes.tolist()) if p >= 0]
    assert found and all(long.startswith(short) and long != short for long, short in found)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("levers.multi_token.second=-1.0", "multi_token.second = -1: expected 0 to 100"),
        ("levers.multi_token.end=0.0", "multi_token.end = 0: expected"),
        ("levers.prefix_token.weight=1e9", r"prefix_token.weight = 1e\+09: expected 0 to 100"),
        ("levers.prefix_token.end=2.0", "prefix_token.end = 2: expected 0 to 1"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(override: str, words: str) -> None:
    from underpar.build.levers import resolve_levers

    with pytest.raises(RecipeError, match=words):
        resolve_levers(load_recipe("cpu", [override]))
