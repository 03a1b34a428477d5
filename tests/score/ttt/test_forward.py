"""The forward pass of a step: compiled it gives the eager outputs, with one set of graphs."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.backends.debugging import aot_eager_default_partitioner

from lever_stacks import CPU, randomized
from underpar.compile.regions import Sharing
from underpar.infer.lora import Lora
from underpar.infer.step import StepInputs, forward_step
from underpar.levers.lora_ttt import Settings
from underpar.model.gpt import GPT
from underpar.recipe import load_recipe
from underpar.score.ttt.forward import CompiledForward, Forward
from underpar.score.ttt.reading import (
    PADDING_SEGMENT,
    FreshLanes,
    HostInputs,
    KeptLanes,
    Reading,
)
from underpar.score.ttt.schedule import Chunk

NUM_LANES, CONTEXT, VOCAB = 3, 64, 64
SIZES = {"vocab_size": VOCAB, "dim": 32, "num_heads": 2, "num_kv_heads": 1, "mlp_dim": 32}
SIZES |= {"num_layers": 2, "context": CONTEXT}
# A layer visited twice, one whose branches run side by side, and a look at the token before.
LEVERS = ["loop={first=0, last=0, repeats=1, start=0.0}", "lanes={start=1}", "smear={init=0.5}"]
KEYS = pytest.mark.parametrize("keys", ["kept", "fresh"])
TEXT = np.random.default_rng(0).integers(4, VOCAB, 400)

# Log-probabilities, and gradients of all adapters.
Learnt = tuple[Tensor, Tensor]


class Counted(Sharing):
    """Counts what is traced."""

    num_traces = 0

    def __call__(self, graph: fx.GraphModule, inputs: list[Any]) -> Any:
        Counted.num_traces += 1
        return super().__call__(graph, inputs)


def counted() -> Counted:
    """Compiles as inductor traces and as torch computes."""
    return Counted(aot_eager_default_partitioner)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    Counted.num_traces = 0
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def model() -> GPT:
    sets = [f"model.{key}={value}" for key, value in SIZES.items()]
    recipe = load_recipe("cpu", [*sets, *(f"levers.{lever}" for lever in LEVERS)])
    return randomized(recipe).requires_grad_(False)


def make_lora(model: GPT, num_lanes: int) -> Lora:
    lora = Lora(model, Settings(sites=("k", "mlp", "head"), rank=3), range(num_lanes), CPU)
    with torch.no_grad():
        lora.work.normal_(std=0.05)
    return lora


def make_reading(model: GPT, keys: str, num_lanes: int) -> Reading:
    if keys == "kept":
        return KeptLanes(model.spec, lambda document: TEXT, lambda first: 24, num_lanes, CPU)

    def window_of(chunk: Chunk) -> tuple[int, int, int]:
        return 0, chunk.first + chunk.count, chunk.first

    return FreshLanes(model.spec, lambda document: TEXT, window_of, one_bound=True)


def inputs_of(host: HostInputs) -> StepInputs:
    """The host's inputs as tensors, with a further token for each target."""
    targets = host.targets.reshape(-1, 1)
    wanted = torch.from_numpy(np.concatenate((targets, targets[::-1]), axis=1))
    rows = None if host.rows is None else torch.from_numpy(host.rows.ravel())
    weights = torch.linspace(1, 2, len(targets))
    tokens, counts = (torch.from_numpy(values) for values in (host.tokens.ravel(), host.counts))
    return StepInputs(tokens, counts, rows, wanted, weights)


def run(forward: Forward, model: GPT, lora: Lora, lanes: Reading, host: HostInputs) -> Learnt:
    """Log-probabilities and gradients of one step."""
    inputs = inputs_of(host)
    with lora.attached():
        log_p, loss = forward(model, inputs, lanes.cache(inputs.counts, inputs.width))
    lanes.commit()
    grads = lora.differentiate(loss)
    assert grads.any()
    return log_p.detach(), grads


def run_both(
    compiled: Forward,
    model: GPT,
    lora: Lora,
    lanes: tuple[Reading, Reading],
    chunks: Sequence[Chunk],
) -> tuple[Learnt, Learnt]:
    """The same step eagerly and compiled."""
    results = []
    for reading, forward in zip(lanes, (forward_step, compiled), strict=True):
        host = reading.host_inputs(chunks, len(lora.lanes))
        results.append(run(forward, model, lora, reading, host))
    return results[0], results[1]


@KEYS
def test_all_widths_are_one_set_of_graphs(model: GPT, keys: str) -> None:
    forward, lora = CompiledForward(vary=True, sharing=counted()), make_lora(model, NUM_LANES)
    lanes = make_reading(model, keys, NUM_LANES), make_reading(model, keys, NUM_LANES)
    # An eager step comes first: it makes the buffers that a compiled step expects.
    for either in (forward_step, forward):
        run(either, model, lora, lanes[1], lanes[1].empty_inputs(NUM_LANES, 9))
    # Embedding, three visits, and the end.
    assert Counted.num_traces == 5
    first = 0
    for width in (8, 24, 13, 5, 3, 2, 1):
        counts = [max(1, width - lane) for lane in range(NUM_LANES)]
        chunks = [Chunk(lane, lane, first, count, False) for lane, count in enumerate(counts)]
        eager, compiled = run_both(forward, model, lora, lanes, chunks)
        torch.testing.assert_close(compiled[0], eager[0], rtol=0, atol=1e-5)
        atol = 1e-4 * float(eager[1].abs().max())
        torch.testing.assert_close(compiled[1], eager[1], rtol=0, atol=atol)
        assert Counted.num_traces == 5
        first += counts[-1]


@KEYS
def test_a_hollow_step_has_the_sizes_of_its_width(model: GPT, keys: str) -> None:
    forward, lora = CompiledForward(vary=True, sharing=counted()), make_lora(model, NUM_LANES)
    lanes = make_reading(model, keys, NUM_LANES)
    run(forward_step, model, lora, lanes, lanes.empty_inputs(NUM_LANES, 9))
    for width in (9, 24):
        inputs = inputs_of(lanes.empty_inputs(NUM_LANES, width))
        with forward.regions.trace_only(), lora.attached():
            log_p, loss = forward(model, inputs, lanes.cache(inputs.counts, inputs.width))
        assert log_p.shape == inputs.wanted.shape and loss.requires_grad
    assert Counted.num_traces == 5


@KEYS
@pytest.mark.parametrize(("num_lanes", "width"), [(1, 1), (3, 1), (3, 2)])
def test_a_token_or_two_are_not_compiled(model: GPT, keys: str, num_lanes: int, width: int) -> None:
    lora = make_lora(model, num_lanes)
    lanes = make_reading(model, keys, num_lanes), make_reading(model, keys, num_lanes)
    forward = CompiledForward(vary=True, sharing=counted())
    # Rows that are read again have more tokens in the second step, and no more targets.
    for first in (0, width):
        chunks = [Chunk(lane, lane, first, width, False) for lane in range(num_lanes)]
        eager, compiled = run_both(forward, model, lora, lanes, chunks)
        assert all(map(torch.equal, compiled, eager))
    assert Counted.num_traces == 0


@pytest.mark.parametrize("name", ["hnet-m1-fixed", "hnet-m2"])
def test_steps_of_bytes_are_one_set_of_graphs(name: str) -> None:
    sets = ["model.num_layers=2", "hnet.encoder_layers=1", f"model.context={CONTEXT}"]
    bytewise = randomized(load_recipe(f"{name}+cpu", sets)).requires_grad_(False)
    forward, lora = CompiledForward(vary=False, sharing=counted()), make_lora(bytewise, NUM_LANES)
    lanes = make_reading(bytewise, "kept", NUM_LANES), make_reading(bytewise, "kept", NUM_LANES)
    run(forward_step, bytewise, lora, lanes[1], lanes[1].empty_inputs(NUM_LANES, 8))
    traces = []
    for first in (0, 8, 16, 24):
        counts = (8, 5, 8) if first < 24 else (8, 0, 1)
        chunks = [Chunk(lane, lane, first, count, False) for lane, count in enumerate(counts)]
        eager, compiled = run_both(forward, bytewise, lora, lanes, chunks)
        torch.testing.assert_close(compiled[0], eager[0], rtol=0, atol=1e-5)
        atol = 1e-4 * float(eager[1].abs().max())
        torch.testing.assert_close(compiled[1], eager[1], rtol=0, atol=atol)
        traces.append(Counted.num_traces)
    assert traces[0] > 0 and set(traces[1:]) == {traces[0]}


@pytest.mark.parametrize(
    ("counts", "width"),
    [([0, 0], 64), ([64, 1], 64), ([300, 0, 256], 320), ([1024, 0, 257, 700], 1024), ([5], 896)],
)
def test_attention_is_cut_behind_windows_and_nowhere_else(counts: list[int], width: int) -> None:
    spec = replace(load_recipe("cpu").model, context=1024)
    lanes = FreshLanes(spec, lambda document: TEXT, lambda chunk: (0, 0, 0))
    cut = torch.tensor([min(count, width) for count in counts])
    cu = lanes.segments(cut, width).cu.tolist()
    # As many for every width; empty pieces are behind all others.
    assert len(cu) == 1 + len(counts) * -(-spec.context // PADDING_SEGMENT)
    num_cuts = len(set(cu)) - 1
    assert cu[: num_cuts + 1] == sorted(set(cu)) and set(cu[num_cuts:]) == {len(counts) * width}
    for lane, count in enumerate(counts):
        begin, end = lane * width, (lane + 1) * width
        assert {begin, end} <= set(cu)
        inside = [cut - begin for cut in cu if begin < cut < end]
        assert all(cut >= count for cut in inside)
        assert all(cut % PADDING_SEGMENT == 0 for cut in inside)
