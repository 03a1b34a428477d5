"""Exact mode: every lever, in a pack and in lanes, gives the same integers; others are refused."""

import hashlib
import os
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from torch import Tensor

from exact_networks import CONTEXT, made_up
from lever_stacks import CPU, MODEL, batch_of, groups_of, randomized, stack_with
from underpar.core.runtime import threads
from underpar.errors import ExactError
from underpar.infer.exact_mode import ExactMode
from underpar.infer.exact_predictor import TOTAL, ExactPredictor
from underpar.infer.predictor import Predictor
from underpar.seams import BOS_ID

GROUPS = groups_of(MODEL)
# Documents shorter and longer than the context.
LENGTHS = [9, 1, 40, 17]


def targets_of(predictor: ExactPredictor, lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Targets of one stream per document, and where each stream begins."""
    batch = batch_of(lengths, predictor.context)
    targets = batch.targets.numpy()
    return targets, np.flatnonzero(batch.inputs.numpy() == BOS_ID)


def stepped(predictor: ExactPredictor, targets: np.ndarray, begins: np.ndarray) -> Tensor:
    """Starts and frequencies (2, n) of targets, one lane per stream."""
    streams = np.split(targets, begins[1:])
    lanes, ends = predictor.lanes(len(streams)), np.cumsum([len(s) for s in streams])
    tokens = torch.full((len(streams),), BOS_ID)
    out = torch.zeros(2, len(targets), dtype=torch.long)
    for t in range(max(map(len, streams))):
        lanes.place(min(t, predictor.context - 1))
        found = predictor.step(tokens, lanes)
        tokens = torch.tensor([int(s[min(t, len(s) - 1)]) for s in streams])
        before = found.gather(1, (tokens - 1).clamp(min=0)[:, None])[:, 0].long()
        after = found.gather(1, tokens[:, None])[:, 0].long()
        for lane, (stream, end) in enumerate(zip(streams, ends, strict=True)):
            if t < len(stream):
                row = int(end) - len(stream) + t
                out[0, row], out[1, row] = before[lane], after[lane] - before[lane]
        lanes.advance(tokens == BOS_ID)
    return out


@pytest.mark.parametrize("cases", GROUPS, ids=lambda cases: f"{len(cases)}-{cases[0]}")
def test_a_pack_and_steps_of_lanes_give_the_same_integers(cases: tuple[str, ...]) -> None:
    predictor = ExactPredictor(made_up(*cases), CPU)
    targets, begins = targets_of(predictor, LENGTHS)
    whole = torch.from_numpy(np.stack(predictor.stream_intervals(targets, begins)))
    assert torch.equal(whole, stepped(predictor, targets, begins))
    # Another batch: the last streams alone.
    alone = predictor.stream_intervals(targets[begins[2] :], begins[2:] - begins[2])
    assert torch.equal(whole[:, begins[2] :], torch.from_numpy(np.stack(alone)))


@pytest.mark.parametrize("case", MODEL)
def test_every_lever_prices_as_in_floats(case: str) -> None:
    model = randomized(stack_with(case))
    batch = batch_of([40, 150], 128)
    floats = Predictor(model, CPU, []).nll(batch)
    exact = ExactPredictor(model, CPU).nll(batch)
    # A grid of 2^-10 nats in attention: errors of single prices, without a direction.
    assert float((exact - floats).abs().mean()) < 1e-3
    assert abs(float((exact - floats).mean())) < 2e-4


def test_frequencies_are_whole_and_fill_the_range() -> None:
    predictor = ExactPredictor(made_up("softcap"), CPU)
    batch = batch_of([20], CONTEXT)
    sums = predictor.log_probs(batch).exp().sum(1)
    assert float((sums - 1).abs().max()) < 1e-12
    wanted = torch.arange(predictor.model.spec.vocab_size).expand(len(batch.targets), -1)
    starts, freqs = predictor.intervals(batch, wanted)
    assert int(freqs.min()) >= 1 and int(starts[:, 0].max()) == 0
    assert torch.equal(starts[:, 1:], (starts + freqs)[:, :-1])
    assert (starts + freqs)[:, -1].eq(TOTAL).all()


def digest(threads_used: int = 1) -> str:
    """A hash of everything that a network with many levers says."""
    with threads(threads_used):
        hashed = hashlib.sha256()
        for cases in GROUPS:
            predictor = ExactPredictor(made_up(*cases), CPU)
            for column in predictor.stream_intervals(*targets_of(predictor, [40, 9])):
                hashed.update(column.tobytes())
    return hashed.hexdigest()


def test_threads_change_no_bit() -> None:
    assert digest(1) == digest(2)


def test_instruction_sets_change_no_bit() -> None:
    setting = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    program = "import test_exact_mode as t; print(t.digest())"
    paths = [os.path.dirname(__file__), *sys.path]
    environment = {**os.environ, **setting, "PYTHONPATH": os.pathsep.join(paths)}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == digest()


def test_an_operation_without_an_exact_form_is_refused_with_the_name_of_its_lever() -> None:
    lever = types.ModuleType("underpar.levers.running_mean")
    exec("def stem(x): return x.logcumsumexp(0)", lever.__dict__)
    x = torch.ones(3)
    with pytest.raises(ExactError, match=r"'logcumsumexp'.*lever 'running_mean'"), ExactMode():
        lever.stem(x)
    with pytest.raises(ExactError, match="'add'"), ExactMode():
        torch.add(x, x, alpha=0.1)
    with pytest.raises(ExactError, match="'rms_norm'"), ExactMode():
        torch.nn.functional.rms_norm(x, (3,), x)
