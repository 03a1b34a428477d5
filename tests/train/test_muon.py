"""Muon: invariants 1 to 6 of the published optimizers, torch's own as oracle, ranks.

Started by torchrun this file is one rank of `test_06_ranks_of_gloo_give_the_same_update`.
"""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from thread_ranks import Ranks
from underpar.core.dist import process_group
from underpar.core.runtime import Runtime, open_runtime
from underpar.errors import RecipeError
from underpar.train.muon import (
    CLASSIC,
    COEFFICIENTS,
    Coefficients,
    Muon,
    normalize_rows,
    orthogonalize,
)

# Two banks that no number of ranks here divides, and one with fewer matrices than ranks.
BANKS = [(24, 16)] * 5 + [(16, 24)] * 4 + [(8, 8)]


def matrices(shapes: list[tuple[int, int]], seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {str(i): nn.Parameter(torch.randn(s, generator=generator)) for i, s in enumerate(shapes)}


def give_gradients(parameters: dict[str, nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def trained(runtime: Runtime, row_norm: bool = True) -> dict[str, nn.Parameter]:
    """Three steps on made-up gradients, the same on every rank."""
    parameters = matrices(BANKS)
    optimizer = Muon(parameters, 0.1, row_norm=row_norm, runtime=runtime, neuron_beta=0.9)
    for step in range(3):
        give_gradients(parameters, seed=step)
        optimizer.step(lr=0.05, momentum=0.9)
    return parameters


def one_step(gradient: Tensor, **settings: Any) -> Tensor:
    """What a first step at rate 1 takes from a matrix without decay."""
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    Muon({"w": parameter}, decay=0.0, **settings).step(lr=1.0, momentum=0.9)
    return -parameter.detach()


@pytest.mark.parametrize("shape", [(256, 512), (512, 2048), (2048, 512)])
def test_01_singular_values_land_near_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(1, *shape)))
    assert float(values.min()) > 0.85
    assert float(values.max()) < 1.15


def test_01_a_square_matrix_keeps_its_near_null_directions_small() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(1, 512, 512)))
    assert float((values > 0.85).float().mean()) >= 0.97
    assert float(values.max()) < 1.15


def test_01_zero_stays_zero_and_scale_does_not_matter() -> None:
    assert not orthogonalize(torch.zeros(2, 4, 6)).any()
    update = torch.randn(1, 8, 12)
    torch.testing.assert_close(orthogonalize(update), orthogonalize(10 * update), rtol=0, atol=1e-5)


@pytest.mark.parametrize("coefficients", COEFFICIENTS.values(), ids=COEFFICIENTS)
def test_02_transposes_commute_and_a_batch_is_its_matrices(
    coefficients: tuple[Coefficients, ...],
) -> None:
    torch.manual_seed(0)
    batch = torch.randn(3, 16, 40)
    whole = orthogonalize(batch, coefficients)
    turned = orthogonalize(batch.mT, coefficients)
    torch.testing.assert_close(turned.mT, whole, rtol=0, atol=1e-5)
    for one, expected in zip(batch, whole, strict=True):
        alone = orthogonalize(one[None], coefficients)[0]
        torch.testing.assert_close(alone, expected, rtol=0, atol=1e-5)


def test_03_rows_are_divided_by_their_length() -> None:
    torch.manual_seed(0)
    updates = torch.randn(2, 5, 7)
    updates[0, 1] = 0
    updates[0, 2] = torch.tensor([1e-9] * 7)
    rows = normalize_rows(updates)
    for b, i in torch.cartesian_prod(torch.arange(2), torch.arange(5)).tolist():
        row = updates[b, i].tolist()
        length = max(sum(x * x for x in row) ** 0.5, 1e-7)
        torch.testing.assert_close(rows[b, i], torch.tensor([x / length for x in row]))
    torch.testing.assert_close(rows[1].norm(dim=-1), torch.ones(5))


def test_03_row_normalized_steps_follow_the_hand_formula() -> None:
    parameters = matrices([(6, 4)])
    weight, momentum = parameters["0"].detach().clone(), torch.zeros(6, 4)
    optimizer = Muon(parameters, decay=0.1, newton_schulz="classic", row_norm=True)
    for step in range(3):
        give_gradients(parameters, seed=step)
        gradient = parameters["0"].grad
        assert gradient is not None
        momentum = 0.9 * momentum + gradient
        update = gradient + 0.9 * momentum
        update = update / update.square().sum(1, keepdim=True).sqrt()
        direction = orthogonalize(update[None], CLASSIC)[0]
        weight = (1 - 0.02 * 0.1 * 0.5) * weight - 0.02 * (6 / 4) ** 0.5 * direction
        optimizer.step(lr=0.02, momentum=0.9, decay_scale=0.5)
    torch.testing.assert_close(parameters["0"].detach(), weight, rtol=0, atol=1e-6)


def test_03_the_length_of_a_gradient_row_does_not_matter() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(12, 20)
    scaled = gradient.clone()
    scaled[3] *= 50
    with_rows = one_step(gradient, row_norm=True)
    torch.testing.assert_close(one_step(scaled, row_norm=True), with_rows, rtol=0, atol=1e-5)
    assert not torch.allclose(one_step(scaled), one_step(gradient), atol=1e-2)


@pytest.mark.parametrize(
    ("shape", "rms"),
    [((512, 512), 0.0442), ((256, 512), 0.0442), ((2048, 512), 0.0442), ((512, 2048), 0.0221)],
)
def test_04_updates_have_the_published_size(shape: tuple[int, int], rms: float) -> None:
    torch.manual_seed(0)
    update = one_step(torch.randn(shape), row_norm=True)
    assert float(update.square().mean().sqrt()) == pytest.approx(rms, rel=0.1)


@pytest.mark.parametrize("row_norm", [False, True])
def test_05_without_gradient_a_matrix_only_decays(row_norm: bool) -> None:
    parameters = matrices([(4, 6)])
    before = parameters["0"].detach().clone()
    parameters["0"].grad = torch.zeros(4, 6)
    optimizer = Muon(parameters, decay=0.1, row_norm=row_norm)
    optimizer.step(lr=0.5, momentum=0.9, decay_scale=0.25)
    assert torch.equal(parameters["0"].detach(), before * (1 - 0.5 * 0.1 * 0.25))


@pytest.mark.parametrize("world", [2, 3, 8])
def test_06_ranks_give_the_same_update(world: int) -> None:
    expected = trained(Runtime(torch.device("cpu")))
    ranks = Ranks(world)
    for result in ranks.go([partial(trained, runtime) for runtime in ranks.runtimes]):
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-5)
    for transport in ranks.transports:
        # Three steps, one message for each bank; shares are filled up with zeros.
        assert len(transport.gathered) == 9
        for shares in transport.gathered:
            whole = torch.cat(shares)
            assert not whole[BANKS.count((whole.size(1), whole.size(2))) :].any()


def test_06_ranks_of_gloo_give_the_same_update(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    subprocess.run(
        [*launcher, __file__, str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        capture_output=True,
    )
    expected = {name: p.detach() for name, p in trained(Runtime(torch.device("cpu"))).items()}
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(3)]
    torch.testing.assert_close(ranks[0], expected, rtol=0, atol=1e-5)
    assert all(torch.equal(ranks[0][n], rank[n]) for rank in ranks[1:] for n in expected)


def test_classic_equals_torch_optim_muon(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch.optim.Muon iterates in bf16; in fp32 both must agree to rounding.
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    ours = matrices([(24, 16), (16, 24), (24, 16)])
    theirs = [nn.Parameter(p.detach().clone()) for p in ours.values()]
    optimizer = Muon(ours, decay=0.1, newton_schulz="classic")
    oracle = torch.optim.Muon(
        theirs, lr=0.02, weight_decay=0.1, momentum=0.9, nesterov=True, ns_coefficients=CLASSIC[0]
    )
    for step in range(4):
        give_gradients(ours, seed=step)
        for a, b in zip(ours.values(), theirs, strict=True):
            assert a.grad is not None
            b.grad = a.grad.clone()
        optimizer.step(lr=0.02, momentum=0.9)
        oracle.step()
    for a, b in zip(ours.values(), theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("shape", [(12, 4), (4, 12), (6, 6)])
def test_normuon_follows_the_hand_formula(shape: tuple[int, int]) -> None:
    parameters = matrices([shape, shape])
    weights = [p.detach().clone() for p in parameters.values()]
    momenta = [torch.zeros(shape) for _ in weights]
    # A neuron is a row of a tall or square matrix, a column of a wide one.
    axis = 1 if shape[0] >= shape[1] else 0
    squares = [torch.zeros(shape[1 - axis]) for _ in weights]
    optimizer = Muon(parameters, decay=0.1, newton_schulz="classic", neuron_beta=0.8)
    for step in range(3):
        give_gradients(parameters, seed=step)
        for i, parameter in enumerate(parameters.values()):
            assert parameter.grad is not None
            momenta[i] = 0.9 * momenta[i] + parameter.grad
            nesterov = parameter.grad + 0.9 * momenta[i]
            x = orthogonalize(nesterov[None], CLASSIC)[0]
            squares[i] = 0.8 * squares[i] + 0.2 * (x * x).sum(axis) / shape[axis]
            evened = x / squares[i].sqrt().unsqueeze(axis)
            evened = evened * x.square().sum().sqrt() / evened.square().sum().sqrt()
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            weights[i] = (1 - 0.02 * 0.1) * weights[i] - 0.02 * scale * evened
        optimizer.step(lr=0.02, momentum=0.9)
    for parameter, weight in zip(parameters.values(), weights, strict=True):
        torch.testing.assert_close(parameter.detach(), weight, rtol=0, atol=1e-6)


def test_normuon_evens_out_the_neurons() -> None:
    torch.manual_seed(0)
    # One neuron in four has nearly no gradient.
    gradient = torch.randn(32, 8) * torch.tensor([0.01, 1, 1, 1]).repeat(8)[:, None]
    plain, even = one_step(gradient), one_step(gradient, neuron_beta=0.9)
    spread = [float((u.norm(dim=1).max() / u.norm(dim=1).min()).log()) for u in (plain, even)]
    assert spread[1] < 0.01 < 1 < spread[0]
    torch.testing.assert_close(even.norm(), plain.norm())


def test_queries_and_keys_are_orthogonalized_in_blocks_of_heads() -> None:
    names = ("blocks.0.attn.q.weight", "blocks.0.attn.k.weight", "blocks.0.attn.o.weight")
    whole, cut = (dict(zip(names, matrices([(8, 8)] * 3).values(), strict=True)) for _ in range(2))
    give_gradients(whole, seed=1)
    give_gradients(cut, seed=1)
    before = {name: p.detach().clone() for name, p in cut.items()}
    Muon(whole, decay=0.0).step(lr=1.0, momentum=0.0)
    Muon(cut, decay=0.0, query_rows=4).step(lr=1.0, momentum=0.0)
    assert torch.equal(cut[names[2]], whole[names[2]])
    for name in names[:2]:
        halves = before[name] - cut[name].detach()
        for half in halves.split(4):
            values = torch.linalg.svdvals(half)
            assert float(values.min()) > 0.8 and float(values.max()) < 1.2
        assert not torch.allclose(cut[name], whole[name])
    with pytest.raises(RecipeError, match=r"query_rows = 3: .* has 8 rows"):
        Muon(cut, decay=0.0, query_rows=3)


def run_rank(folder: Path) -> None:
    """Train as one rank of several and leave the weights."""
    runtime = open_runtime("cpu")
    with process_group(runtime):
        weights = {name: p.detach() for name, p in trained(runtime).items()}
    torch.save(weights, folder / f"{runtime.rank}.pt")


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))


def test_cautious_decay_acts_where_the_step_shrinks_the_weight() -> None:
    torch.manual_seed(0)
    start, grad = torch.randn(6, 4), torch.randn(6, 4)
    found = {}
    for name, decay, cautious in (("none", 0.0, False), ("all", 2.0, False), ("some", 2.0, True)):
        weight = nn.Parameter(start.clone())
        weight.grad = grad.clone()
        Muon({"w": weight}, decay, cautious=cautious).step(0.1, 0.9)
        found[name] = weight.detach()
    step = start - found["none"]
    shrinks = step * start >= 0
    assert 0 < shrinks.sum() < shrinks.numel()
    torch.testing.assert_close(found["some"], torch.where(shrinks, found["all"], found["none"]))
