"""Growing context: batches are cut anew, rates rise again, nothing is skipped; and the warm-up."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from underpar.build.levers import resolve_levers
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime
from underpar.data.folder import load_data
from underpar.data.loader import Loader, MicroBatch, join, make_step, weights_of
from underpar.model.gpt import GPT
from underpar.model.network import Eager, Network
from underpar.recipe import Recipe, TrainPart, load_recipe
from underpar.seams import KVCache, Stream
from underpar.stages.train import make_trainer, train
from underpar.train.feed import Feed
from underpar.train.loop import Trainer
from underpar.train.step import accumulate, step_of
from underpar.train.warmup import shapes_of, warm_up

STAGES = 'train.stages=["16@0.3", "32@0.6", "64@1"]'
SMALL = ["model.num_layers=3", "levers.loop={first=1, last=1, start=0.5}", "levers.ema=true"]


@pytest.fixture
def recipe() -> Recipe:
    sets = [*SMALL, STAGES, "train.budget_steps=10", "train.rewarm_steps=2"]
    return resolve_levers(load_recipe("cpu", sets))


def trainer_of(recipe: Recipe, data: Path, path: Path, runtime: Runtime) -> Trainer:
    return make_trainer(recipe, load_data(data), RunFolder(path), runtime)


def test_a_run_goes_through_its_stages(
    recipe: Recipe, tiny_data: Path, tmp_path: Path, runtime: Runtime
) -> None:
    folder = RunFolder(tmp_path)
    assert train(recipe, tiny_data, folder, runtime)["finished"]
    lines = list(folder.metrics())
    assert [m["context"] for m in lines] == [16] * 4 + [32] * 3 + [64] * 3
    plain = [max(min(1, (1 - m["progress"]) / 0.85), 0.1) for m in lines]
    # No warm-up at the start; after a change two steps at a half and a whole.
    factors = [m["lr_scale"] / p for m, p in zip(lines, plain, strict=True)]
    assert factors == pytest.approx([1, 1, 1, 1, 0.5, 1, 1, 0.5, 1, 1])


def test_a_stopped_run_goes_on_in_the_same_stage(
    recipe: Recipe, tiny_data: Path, tmp_path: Path, runtime: Runtime
) -> None:
    whole = trainer_of(recipe, tiny_data, tmp_path / "whole", runtime)
    stopped = trainer_of(recipe, tiny_data, tmp_path / "stopped", runtime)
    for trainer in (whole, stopped):
        trainer.folder.path.mkdir()
    assert whole.run()
    # The fifth step has just changed to the second stage.
    assert not stopped.run(lambda line: line["step"] == 5)
    assert stopped.position.changed_at == 4
    again = trainer_of(recipe, tiny_data, tmp_path / "stopped", runtime)
    assert again.run()
    assert again.position.changed_at == whole.position.changed_at == 7
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, again.model.state_dict()[name]), name


def test_a_change_of_context_skips_no_token(tiny_data: Path, runtime: Runtime) -> None:
    loader = Loader(load_data(tiny_data).train, make_step(2, [128], [64]), seed=1)
    feed = Feed(loader, runtime)
    seen = []
    for step, context in enumerate((16, 16, 64, 64, 32)):
        seen += itertools.islice(feed.at(step, context), 2)
        assert seen[-1].segments.context == context
        assert seen[-1].segments.max_len == 64
    feed.close()
    steady = [loader.batch(step, micro) for step in range(5) for micro in range(2)]
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(seen, steady, strict=True))


def test_16_the_warm_up_leaves_everything_as_it_was(
    recipe: Recipe, tiny_data: Path, tmp_path: Path, runtime: Runtime
) -> None:
    trainer = trainer_of(recipe, tiny_data, tmp_path, runtime)
    weights = {n: t.clone() for n, t in trainer.model.state_dict().items()}
    state = {n: t.clone() for n, t in trainer.optimizer.state().items()}
    random = torch.get_rng_state()
    seen: list[tuple[int, int]] = []

    class Watched(Eager):
        def embed(self, network: Network, tokens: torch.Tensor, cache: KVCache) -> Stream:
            seen.append((len(network.plan), cache.context))
            return super().embed(network, tokens, cache)

    num = warm_up(trainer.model, trainer.loader, trainer.part, runtime, Watched())
    assert sorted(seen) == [(v, c) for v in (3, 5) for c in (16, 32, 64)]
    assert num == len(seen)
    assert all(torch.equal(t, weights[n]) for n, t in trainer.model.state_dict().items())
    after = trainer.optimizer.state()
    assert after.keys() == state.keys()
    assert all(torch.equal(t, state[n]) for n, t in after.items())
    assert all(p.grad is None for p in trainer.model.parameters())
    assert torch.equal(torch.get_rng_state(), random)


def test_steps_of_mixed_sizes_and_contexts() -> None:
    part = TrainPart(num_micro_batches=4, micro_sizes=(96, 64), contexts=(32, 64))
    assert step_of(part) == 2 * [MicroBatch(96, 32), MicroBatch(64, 64)]
    assert shapes_of(step_of(part), part) == [MicroBatch(64, 64), MicroBatch(96, 32)]
    staged = TrainPart(num_micro_batches=2, stages=("8@0.5", "16@1"))
    assert step_of(staged) == 2 * [MicroBatch(98_304, 16)]


LIKE_RANKS = TrainPart(
    order="sequences",
    num_micro_batches=8,
    contexts=5 * (16,) + 3 * (64,),
    micro_sizes=(128,),
    micro_batch_tokens=512,
)


def test_a_rank_alone_joins_small_micro_batches_of_whole_sequences() -> None:
    step = [MicroBatch(512, 16, 4), MicroBatch(128, 16), MicroBatch(384, 64, 3)]
    assert step_of(LIKE_RANKS) == step
    assert weights_of(step) == [4 / 8, 1 / 8, 3 / 8]
    for part in (replace(LIKE_RANKS, micro_sizes=(96,)), replace(LIKE_RANKS, order="documents")):
        assert {micro.share for micro in step_of(part)} == {1}
    assert step_of(LIKE_RANKS, world_size=2) == make_step(8, [128], LIKE_RANKS.contexts)
    assert join([MicroBatch(64, 64), MicroBatch(128, 64)], 512) == [
        MicroBatch(64, 64),
        MicroBatch(128, 64),
    ]


def test_joined_micro_batches_have_the_gradients_of_separate_ones(
    tiny_data: Path, recipe: Recipe, runtime: Runtime
) -> None:
    shard, spec = load_data(tiny_data).train, recipe.model
    model = GPT(spec).to(runtime.device)
    torch.manual_seed(0)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)

    def gradients(plan: list[MicroBatch]) -> dict[str, torch.Tensor]:
        loader = Loader(shard, plan, 1, LIKE_RANKS.order)
        model.zero_grad()
        batches = (loader.batch(3, m) for m in range(len(plan)))
        loss = accumulate(model, batches, weights_of(plan), runtime)
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return {"loss": loss} | grads

    joined = gradients(step_of(LIKE_RANKS))
    separate = gradients(step_of(LIKE_RANKS, world_size=8))
    short = gradients([replace(micro, context=8) for micro in step_of(LIKE_RANKS)])
    with pytest.raises(AssertionError):
        torch.testing.assert_close(joined, short, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(joined, separate, rtol=1e-4, atol=1e-6)
