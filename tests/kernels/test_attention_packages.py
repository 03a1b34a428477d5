"""How the kernels of other packages are called, on stand-ins with their signatures."""

import sys
from collections.abc import Iterator
from itertools import accumulate
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from underpar.kernels.attention import BACKENDS, attend
from underpar.kernels.attention.backend import Pieces, Saved
from underpar.kernels.attention.fa4 import compiler_errors
from underpar.kernels.attention.reference import REFERENCE

LENGTHS = (5, 0, 9, 1)
# The arguments of flash_attn_3::fwd and ::bwd that are given, among those that have defaults.
CUTS = "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, int? max_seqlen_q=None, "
REACH = (
    "int? max_seqlen_k=None, float? softmax_scale=None, bool is_causal=False, "
    "int window_size_left=-1, int window_size_right=-1, float softcap=0.0"
)


def pieces_of(options: dict[str, Any], causal: str, unset: int | None) -> Pieces:
    """What the options of a package mean, checked as the package would."""
    assert options["cu_seqlens_q"] is options["cu_seqlens_k"]
    assert options["max_seqlen_q"] == options["max_seqlen_k"]
    left = options.get("window_size_left", unset)
    assert options.get(causal, False) == (left == unset)
    assert left == unset or options["window_size_right"] == 0
    window = 0 if left == unset else left
    return Pieces(options["cu_seqlens_q"], options["max_seqlen_q"], window)


def lse_like(q: Tensor) -> Tensor:
    return torch.arange(q.size(1) * q.size(0), dtype=torch.float32).view(q.size(1), q.size(0))


@pytest.fixture
def fa3(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    library = torch.library.Library("flash_attn_3", "FRAGMENT")
    library.define(f"fwd(Tensor q, Tensor k, Tensor v, {CUTS}{REACH}) -> (Tensor, Tensor, Tensor)")
    library.define(
        "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
        f"Tensor(a!)? dq=None, Tensor(b!)? dk=None, Tensor(c!)? dv=None, {CUTS}{REACH}) -> Tensor"
    )

    def fwd(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        out, _ = REFERENCE.forward(q, k, v, pieces_of(options, "is_causal", -1))
        return out, lse_like(q), torch.empty(0)

    def bwd(grad: Tensor, *tensors: Tensor, **options: Any) -> Tensor:
        saved, written = Saved(*tensors[:5]), tensors[5:]
        assert torch.equal(saved.lse, lse_like(saved.q))
        gradients = REFERENCE.backward(grad, saved, pieces_of(options, "is_causal", -1))
        for place, value in zip(written, gradients, strict=True):
            place.copy_(value)
        return torch.empty(0)

    # As the package would: the dispatcher gives options by place.
    names = [a.split("=")[0].split()[-1] for a in (CUTS + REACH).split(", ")]
    library.impl("fwd", lambda *a: fwd(*a[:3], **dict(zip(names, a[3:], strict=False))), "CPU")
    library.impl("bwd", lambda *a: bwd(*a[:9], **dict(zip(names, a[9:], strict=False))), "CPU")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    yield
    library._destroy()


@pytest.fixture
def fa4(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(q: Tensor, k: Tensor, v: Tensor, return_lse: bool = False, **options: Any) -> Any:
        assert return_lse
        out, _ = REFERENCE.forward(q, k, v, pieces_of(options, "causal", None))
        return out, lse_like(q), None, None, None

    def backward(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, **options: Any
    ) -> Any:
        assert torch.equal(lse, lse_like(q))
        saved = Saved(q, k, v, out, lse)
        return REFERENCE.backward(dout, saved, pieces_of(options, "causal", None))

    module = ModuleType("flash_attn.cute.interface")
    module._flash_attn_fwd = forward  # type: ignore[attr-defined]
    module._flash_attn_bwd = backward  # type: ignore[attr-defined]
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("name", ["fa3", "fa4"])
def test_a_package_gets_what_it_asks_for(
    name: str, window: int, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(name)
    torch.manual_seed(0)
    tensors = [torch.randn(15, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    cu = torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32)
    got, want = (
        attend(*tensors, cu, max(LENGTHS), window, backend) for backend in (name, "reference")
    )
    assert torch.equal(got, want)
    weights = torch.randn_like(want)
    for a, b in zip(
        torch.autograd.grad(got, tensors, weights),
        torch.autograd.grad(want, tensors, weights),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("window", [0, 3])
def test_the_flash_kernels_of_torch_take_the_call(window: int) -> None:
    q, k, v = (
        torch.empty(15, heads, 64, device="meta", dtype=torch.bfloat16) for heads in (4, 2, 2)
    )
    pieces = Pieces(torch.empty(5, device="meta", dtype=torch.int32), 9, window)
    flash = BACKENDS["flash"]
    out, lse = flash.forward(q, k, v, pieces)
    gradients = flash.backward(torch.empty_like(out), Saved(q, k, v, out, lse), pieces)
    arguments = (q, k, v, pieces.cu, 9, window, "flash")
    for real, fake in zip((out, lse), torch.ops.underpar.attend(*arguments), strict=True):
        assert (real.shape, real.dtype) == (fake.shape, fake.dtype)
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]


def test_a_compiler_that_is_not_installed_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cutlass.base_dsl.common", None)
    assert compiler_errors() == ()
