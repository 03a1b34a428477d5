"""The candidate qkv: one product for queries, keys and values, and one pass after it."""

from collections.abc import Callable

import pytest
import torch

from agreement import assert_trains_the_same
from lever_stacks import randomized
from underpar.build.levers import resolve_levers
from underpar.errors import BenchError
from underpar.recipe import load_recipe

qkv = pytest.importorskip("benchmarks.fusion_study.qkv")
NO_LEVERS = ("levers.qk_gain=false", "levers.partial_rope=false")


def test_tiles_compute_as_the_plain_version_does(interpreted: Callable[..., None]) -> None:
    interpreted(qkv.check, torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), NO_LEVERS], ids=["gain", "no gain"])
def test_a_network_trains_the_same(overrides: tuple[str, ...]) -> None:
    assert_trains_the_same(qkv, overrides=overrides)


def test_the_operator_is_well_registered(interpreted: Callable[..., None]) -> None:
    interpreted(_check_registration)


def _check_registration() -> None:
    packed, gain = torch.randn(5, 8 * 16, requires_grad=True), torch.randn(4, requires_grad=True)
    args = (packed, torch.randn(5, 4), torch.randn(5, 4), gain, 16)
    torch.library.opcheck(torch.ops.fusion_study.split_norm_rotate.default, args)


def test_a_lever_that_it_does_not_know_is_refused() -> None:
    recipe = resolve_levers(load_recipe("baseline+cpu", ["levers.key_offset=true"]))
    with pytest.raises(BenchError, match="key_offset"):
        qkv.apply(randomized(recipe), recipe)
