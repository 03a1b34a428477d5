"""Compiled pricing: the plain answer, from one set of graphs for all widths of a step."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.backends.debugging import aot_eager

from lever_stacks import CPU, randomized
from underpar.compile import regions as compiled
from underpar.compile.regions import Sharing
from underpar.infer.lora import Lora
from underpar.levers.lora_ttt import Settings
from underpar.model.gpt import GPT
from underpar.recipe import load_recipe
from underpar.score.ttt.forward import CompiledPricing, Given, Pricing, price_rows
from underpar.score.ttt.reading import PIECE, FreshLanes, KeptLanes, Reading, Rows
from underpar.score.ttt.schedule import Turn

NUM_LANES, CONTEXT, VOCAB = 3, 64, 64
SIZES = {"vocab_size": VOCAB, "dim": 32, "num_heads": 2, "num_kv_heads": 1, "mlp_dim": 32}
SIZES |= {"num_layers": 2, "context": CONTEXT}
# A layer visited twice, one whose branches run side by side, and a look at the token before.
LEVERS = ["loop={first=0, last=0, repeats=1, start=0.0}", "lanes={start=1}", "smear={init=0.5}"]
KEYS = pytest.mark.parametrize("keys", ["kept", "fresh"])
TEXT = np.random.default_rng(0).integers(4, VOCAB, 400)

# Log-probabilities, and gradients of all adapters.
Answer = tuple[Tensor, Tensor]


class Counted(Sharing):
    """Counts what is traced."""

    num_traces = 0

    def __call__(self, graph: fx.GraphModule, inputs: list[Any]) -> Any:
        Counted.num_traces += 1
        return super().__call__(graph, inputs)


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One that traces as inductor does and computes as torch does."""
    monkeypatch.setattr(compiled, "_inductor", aot_eager)
    monkeypatch.setattr(compiled, "Sharing", Counted)
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
        lora._work.normal_(std=0.05)
    return lora


def make_reading(model: GPT, keys: str, num_lanes: int) -> Reading:
    if keys == "kept":
        return KeptLanes(model.spec, lambda document: TEXT, lambda first: 24, num_lanes, CPU)

    def window_of(turn: Turn) -> tuple[int, int, int]:
        return 0, turn.first + turn.count, turn.first

    return FreshLanes(model.spec, lambda document: TEXT, window_of, one_bound=True)


def given_of(rows: Rows) -> Given:
    """What the rows leave open, with a further token for each target."""
    targets = rows.targets.reshape(-1, 1)
    wanted = torch.from_numpy(np.concatenate((targets, targets[::-1]), axis=1))
    places = None if rows.places is None else torch.from_numpy(rows.places.ravel())
    weights = torch.linspace(1, 2, len(targets))
    inputs, counts = (torch.from_numpy(values) for values in (rows.inputs.ravel(), rows.counts))
    return Given(inputs, counts, places, wanted, weights)


def answer(price: Pricing, model: GPT, lora: Lora, lanes: Reading, rows: Rows) -> Answer:
    """Price and learn, but for the step itself."""
    given = given_of(rows)
    with lora.attached():
        log_p, loss = price(model, given, lanes.cache(given.counts, given.width))
    lanes.commit()
    grads = lora.differentiate(loss)
    assert grads.any()
    return log_p.detach(), grads


def answer_both(
    price: Pricing, model: GPT, lora: Lora, lanes: tuple[Reading, Reading], turns: Sequence[Turn]
) -> tuple[Answer, Answer]:
    """The plain answer to the same step, and the other."""
    found = []
    for own, pricing in zip(lanes, (price_rows, price), strict=True):
        rows = own.rows(turns, len(lora.lanes))
        found.append(answer(pricing, model, lora, own, rows))
    return found[0], found[1]


@KEYS
def test_all_widths_are_one_set_of_graphs(model: GPT, keys: str) -> None:
    price, lora = CompiledPricing(vary=True), make_lora(model, NUM_LANES)
    lanes = make_reading(model, keys, NUM_LANES), make_reading(model, keys, NUM_LANES)
    # Plain first: it makes what a compiled pass finds.
    for pricing in (price_rows, price):
        answer(pricing, model, lora, lanes[1], lanes[1].rehearsal(NUM_LANES, 9))
    # Embedding, three visits, and the end.
    assert Counted.num_traces == 5
    first = 0
    for width in (8, 24, 13, 5, 3, 2, 1):
        counts = [max(1, width - lane) for lane in range(NUM_LANES)]
        turns = [Turn(lane, lane, first, count, False) for lane, count in enumerate(counts)]
        plain, found = answer_both(price, model, lora, lanes, turns)
        torch.testing.assert_close(found[0], plain[0], rtol=0, atol=1e-5)
        atol = 1e-4 * float(plain[1].abs().max())
        torch.testing.assert_close(found[1], plain[1], rtol=0, atol=atol)
        assert Counted.num_traces == 5
        first += counts[-1]


@KEYS
def test_a_hollow_step_has_the_sizes_of_its_width(model: GPT, keys: str) -> None:
    price, lora = CompiledPricing(vary=True), make_lora(model, NUM_LANES)
    lanes = make_reading(model, keys, NUM_LANES)
    answer(price_rows, model, lora, lanes, lanes.rehearsal(NUM_LANES, 9))
    for width in (9, 24):
        given = given_of(lanes.rehearsal(NUM_LANES, width))
        with price.regions.trace_only(), lora.attached():
            log_p, loss = price(model, given, lanes.cache(given.counts, given.width))
        assert log_p.shape == given.wanted.shape and loss.requires_grad
    assert Counted.num_traces == 5


@KEYS
@pytest.mark.parametrize(("num_lanes", "width"), [(1, 1), (3, 1), (3, 2)])
def test_a_token_or_two_are_not_compiled(model: GPT, keys: str, num_lanes: int, width: int) -> None:
    lora = make_lora(model, num_lanes)
    lanes = make_reading(model, keys, num_lanes), make_reading(model, keys, num_lanes)
    price = CompiledPricing(vary=True)
    # Rows that are read again have more tokens in the second step, and no more targets.
    for first in (0, width):
        turns = [Turn(lane, lane, first, width, False) for lane in range(num_lanes)]
        plain, found = answer_both(price, model, lora, lanes, turns)
        assert all(map(torch.equal, found, plain))
    assert Counted.num_traces == 0


@pytest.mark.parametrize(
    ("counts", "width"),
    [([0, 0], 64), ([64, 1], 64), ([300, 0, 256], 320), ([1024, 0, 257, 700], 1024), ([5], 896)],
)
def test_attention_is_cut_behind_windows_and_nowhere_else(counts: list[int], width: int) -> None:
    spec = replace(load_recipe("cpu").model, context=1024)
    lanes = FreshLanes(spec, lambda document: TEXT, lambda turn: (0, 0, 0))
    cu = lanes._cuts(torch.tensor([min(count, width) for count in counts]), width).tolist()
    # As many for every width; empty pieces are behind all others.
    assert len(cu) == 1 + len(counts) * -(-spec.context // PIECE)
    num_cuts = len(set(cu)) - 1
    assert cu[: num_cuts + 1] == sorted(set(cu)) and set(cu[num_cuts:]) == {len(counts) * width}
    for lane, count in enumerate(counts):
        begin, end = lane * width, (lane + 1) * width
        assert {begin, end} <= set(cu)
        inside = [cut - begin for cut in cu if begin < cut < end]
        assert all(cut >= count for cut in inside)
        assert all(cut % PIECE == 0 for cut in inside)
