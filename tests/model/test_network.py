"""A second network beside GPT: it trains, is compiled and is priced by the same functions."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from underpar.compile.regions import Sharing
from underpar.compile.traced_run import TracedRun
from underpar.core.runtime import Runtime
from underpar.data.batch import Batch, pack_documents
from underpar.errors import LeverError
from underpar.infer.predictor import Predictor
from underpar.model.gpt import GPT, make_plan
from underpar.model.hooks import Hooks
from underpar.model.network import EAGER, Eager, Network, as_scored
from underpar.recipe import ModelSpec, TrainPart
from underpar.seams import (
    BOS_ID,
    KVCache,
    ModelHook,
    ModelLever,
    ModelPlace,
    Stream,
    Visit,
    methods_of,
)
from underpar.train.optim import Optimizer
from underpar.train.step import accumulate, mean_loss

SPEC = ModelSpec(
    vocab_size=32, num_layers=2, dim=16, num_heads=2, num_kv_heads=1, mlp_dim=24, context=32
)
CPU = torch.device("cpu")


class Bigrams(Network):
    """Predicts a token from the one before it and the one before that: no attention at all."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(spec.vocab_size, spec.dim)
        self.blocks = nn.ModuleList([nn.Linear(2 * spec.dim, spec.dim, bias=False)])
        self.plan = make_plan((0,))

    def set_progress(self, p: float) -> None:
        """One plan for all of training."""

    def embed(self, tokens: Tensor, cache: KVCache) -> Stream:
        x = self.embedding(tokens)
        # The token before a document belongs to another one.
        before = torch.where((tokens == BOS_ID)[:, None], 0.0, cache.previous("bigrams", x))
        return Stream(x, before, tokens, cache, (x, x))

    def before_block(self, visit: Visit, stream: Stream) -> None:
        """Nothing."""

    def run_block(self, visit: Visit, stream: Stream, run: Eager = EAGER) -> None:
        both = torch.cat((stream.x, stream.start), dim=-1)
        stream.x = stream.x + F.relu(self.blocks[visit.layer](both))

    def run_blocks(self, tokens: Tensor, cache: KVCache, run: Eager = EAGER) -> Stream:
        stream = run.embed(self, tokens, cache)
        for visit in self.plan:
            run.block(self, visit, stream)
        return stream

    def finish(self, stream: Stream) -> Tensor:
        return stream.x

    def head(self, x: Tensor, fused: bool = False) -> Tensor:
        return 10.0 * torch.tanh(F.linear(x, self.embedding.weight) / 10.0)


@pytest.fixture
def bigrams() -> Bigrams:
    torch.manual_seed(0)
    return Bigrams(SPEC)


def batch_of(seed: int) -> Batch:
    """Documents in which every token is its neighbour's successor."""
    starts = np.random.default_rng(seed).integers(4, 31, 6)
    docs = [np.append(BOS_ID, 4 + (start + np.arange(12)) % 27) for start in starts]
    return pack_documents(docs, BOS_ID, SPEC.context)[0]


def test_it_trains_with_the_step_of_the_loop(bigrams: Bigrams) -> None:
    runtime = Runtime(CPU)
    optimizer = Optimizer(bigrams, TrainPart(matrix_lr=0.05, embed_lr=0.05), runtime)
    losses = []
    for step in range(30):
        batches = iter([batch_of(2 * step), batch_of(2 * step + 1)])
        losses.append(float(accumulate(bigrams, batches, [0.5, 0.5], runtime)))
        optimizer.step(1.0, 0.9)
    assert losses[-1] < 0.5 * losses[0]


def test_a_compiler_takes_it_in_regions(bigrams: Bigrams) -> None:
    def as_traced(graph: fx.GraphModule, inputs: object) -> fx.GraphModule:
        return graph

    run = TracedRun(Sharing(as_traced))
    for seed in range(2):
        loss = mean_loss(bigrams, batch_of(seed), run)
        torch.testing.assert_close(loss, mean_loss(bigrams, batch_of(seed)))
    # Embedding, block and loss.
    assert run.num_graphs == 3


def test_it_is_priced_and_stepped_alike(bigrams: Bigrams) -> None:
    predictor = Predictor(bigrams, CPU, [])
    batch = batch_of(0)
    priced = predictor.log_probs(batch)
    stepper = predictor.stepper(1)
    for token, expected in zip(batch.inputs[:13], priced[:13], strict=True):
        torch.testing.assert_close(stepper.step(token[None])[0], expected)
    assert torch.allclose(predictor.nll(batch), -priced.gather(1, batch.targets[:, None])[:, 0])


def test_scoring_modes_are_put_back(bigrams: Bigrams) -> None:
    bigrams.train()
    with as_scored(bigrams):
        assert not bigrams.training and not bigrams.blocks[0].training
    assert bigrams.training and bigrams.blocks[0].training


def test_a_network_without_its_parts_cannot_be_made() -> None:
    class Headless(Network):
        """A network of nothing."""

    with pytest.raises(TypeError, match="abstract"):
        Headless()  # type: ignore[abstract]


def test_hooks_have_an_attribute_per_seam() -> None:
    hooks = Hooks({})
    assert all(getattr(hooks, seam) == [] for seam in methods_of(ModelHook))
    assert all(getattr(hooks, seam) is None for seam in methods_of(ModelPlace))
    # What remains is asked by layer, or by tests.
    assert methods_of(ModelLever) == ["wires", "wire", "neutral_", "agree_", "dead"]


class Misspelled(nn.Module):
    def atn_out(self, layer: int, y: Tensor, x: Tensor, v: Tensor) -> Tensor:
        return y


class Short(nn.Module):
    def attn_out(self, layer: int, y: Tensor) -> Tensor:
        return y


class Roomy(nn.Module):
    def attn_out(self, *args: Tensor, scale: float = 1.0) -> Tensor:
        return args[1] * scale

    def _helper(self) -> None: ...


def test_a_lever_whose_methods_are_no_hooks_is_refused() -> None:
    with pytest.raises(LeverError, match=r"'mine': its method 'atn_out' .*mean 'attn_out'"):
        GPT(SPEC, {"mine": Misspelled()})
    with pytest.raises(LeverError, match=r"attn_out\(layer.*calls attn_out\(layer, y, x, v\)"):
        GPT(SPEC, {"mine": Short()})
    GPT(SPEC, {"mine": Roomy()})


def test_a_change_of_hooks_ends_with_its_block_or_stays() -> None:
    hooks = Hooks({})

    def shift(site: str, visit: Visit | None, y: Tensor, x: Tensor) -> Tensor:
        return y + 1

    def keep(logits: Tensor, fused: bool) -> Tensor:
        return logits

    with pytest.raises(ZeroDivisionError), hooks.change(adjust=shift, cap=keep):
        assert hooks.adjust == [shift] and hooks.cap is keep
        raise ZeroDivisionError
    assert hooks.adjust == [] and hooks.cap is None
    hooks.change(adjust=shift)
    assert hooks.adjust == [shift]
    with pytest.raises(LeverError, match=r"no seam 'adjusted'.*mean 'adjust'"):
        hooks.change(adjusted=shift)
    with pytest.raises(LeverError, match="does not fit its seam"):
        hooks.change(cap=shift)
