"""Muon against torch's own, and the orthogonalization against its bounds."""

import pytest
import torch

from underpar.train import muon
from underpar.train.muon import Muon, orthogonalize

CLASSIC = ((3.4445, -4.7750, 2.0315),) * 5


@pytest.mark.parametrize("shape", [(2, 16, 48), (3, 48, 16), (1, 32, 32)])
def test_singular_values_land_near_one(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(shape)))
    assert float(values.min()) > 0.85
    assert float(values.max()) < 1.15


def test_the_scale_of_the_gradient_does_not_matter() -> None:
    update = torch.randn(1, 8, 12)
    torch.testing.assert_close(
        orthogonalize(update), orthogonalize(1000 * update), rtol=1e-4, atol=1e-5
    )


def test_a_zero_gradient_stays_zero() -> None:
    assert not orthogonalize(torch.zeros(2, 4, 6)).any()


def test_equals_torch_optim_muon(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch.optim.Muon runs its iteration in bf16 with one coefficient triple for all steps.
    monkeypatch.setattr(muon.orthogonalize, "__defaults__", (CLASSIC,))
    torch.manual_seed(0)
    shapes = [(24, 16), (16, 24), (24, 16)]
    ours = {str(i): torch.nn.Parameter(torch.randn(s)) for i, s in enumerate(shapes)}
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours.values()]
    own = Muon(ours, decay=0.1)
    oracle = torch.optim.Muon(
        theirs, lr=0.02, weight_decay=0.1, momentum=0.9, nesterov=True, ns_coefficients=CLASSIC[0]
    )
    for _ in range(4):
        for a, b in zip(ours.values(), theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        own.step(lr=0.02, momentum=0.9)
        oracle.step()
    for a, b in zip(ours.values(), theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=2e-3)
