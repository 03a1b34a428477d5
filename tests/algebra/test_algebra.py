"""Networks that were rewritten by algebra train as before."""

from importlib import import_module

import pytest

from agreement import assert_trains_the_same, network_of
from underpar.build.levers import resolve_levers
from underpar.errors import BenchError
from underpar.recipe import load_recipe

candidate = import_module("benchmarks.algebra.one_projection")


def test_a_network_trains_the_same() -> None:
    assert_trains_the_same(candidate)


def test_the_baseline_trains_the_same() -> None:
    assert_trains_the_same(candidate, "baseline+cpu")


def test_the_other_gate_and_no_gate_train_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_trains_the_same(candidate, "baseline+cpu", ["levers.attn_out_gate=true"])
    monkeypatch.setattr(candidate, "GATES", False)
    assert_trains_the_same(candidate)


def test_a_second_gate_is_refused() -> None:
    recipe = resolve_levers(load_recipe("pr2014+cpu", ["levers.attn_out_gate=true"]))
    with pytest.raises(BenchError, match="one gate"):
        candidate.apply(network_of(recipe), recipe)
