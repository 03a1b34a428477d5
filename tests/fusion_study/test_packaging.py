"""The comparison of a registered operator with an autograd.Function."""

from collections.abc import Callable

import pytest
import torch

packaging = pytest.importorskip("benchmarks.fusion_study.packaging")


def test_without_a_gpu_only_plain_torch_runs(capsys: pytest.CaptureFixture[str]) -> None:
    packaging.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["package", "plain torch, eager"]


def test_every_package_gives_the_same_gradients(interpreted: Callable[..., None]) -> None:
    interpreted(_compare)


def _compare() -> None:
    inputs = [torch.randn(5, heads, 8).requires_grad_() for heads in (4, 2)]
    inputs.append(torch.rand(5, 4).requires_grad_())
    ways = packaging.packages(inputs[0])
    assert len(ways) == 3
    plain, *others = (torch.autograd.grad(run(*inputs).sum(), inputs) for run in ways.values())
    for gradients in others:
        torch.testing.assert_close(gradients, plain)


def test_graphs_and_breaks_are_counted() -> None:
    inputs = [torch.randn(3), torch.randn(3)]
    assert packaging.count_graphs(torch.add, inputs) == (1, 0)

    def broken(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + y

    # A function that breaks the graph also breaks that of its caller.
    assert packaging.count_graphs(broken, inputs)[1] > 0
