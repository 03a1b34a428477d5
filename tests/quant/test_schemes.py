"""Schemes: what their names say, how much they store, and what stored numbers stand for."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from underpar.errors import RecipeError
from underpar.quant.lowrank import Factor, LowRank
from underpar.quant.schemes import QuantizedTensor, Scheme, dequantize, parse_scheme, steps_of

NAMES = [
    *("fp16", "int6", "int7:14", "int6:12.85", "int6:12.8512345", "clip6", "gptq6:12.85", "gptq7"),
    *("int8/0", "int6:12.85/3", "int6+log", "int8/1+log", "clip5+log", "gptq6:12.85+log"),
    *("gptq5+clip", "gptq5+clip+log", "gptq6:12.85+hq", "gptq6:12.85+hq+log"),
    *("gptq7:14+awq", "gptq7:14+awq+log", "ternary:128", "grid1", "grid8", "grid64+columns"),
]
ODD = [
    *("int9", "int1", "int", "float", "int6:x", "int6:-1", "int6:inf", "int6:1000", "clip6:3"),
    *("int6+awq", "clip6+awq", "gptq9:3", "gptq", "ternary", "ternary:0", "ternary:1000000"),
    *("int8/4", "int8/", "clip6/1", "gptq6:12/1", "int8/1+awq"),
    *("ternary:4+log", "grid8+log", "fp16+log", "gptq7:14+log+awq"),
    *(
        "gptq5:3+clip",
        "gptq6+hq",
        "int6:12+hq",
        "gptq6:12+hq+awq",
        "int5+clip",
        "clip5+clip",
        "gptq7:14+awq+clip",
        "gptq7:14+clip+awq",
    ),
    *("grid", "grid2", "grid8+rows", "grid8+awq", "", "fp16:2", "gptq7:14+awq+awq"),
]


@pytest.mark.parametrize("text", NAMES)
def test_schemes_print_as_they_are_read(text: str) -> None:
    assert str(parse_scheme(text)) == text


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(["int", "gptq"]), st.integers(2, 8), st.floats(0.001, 999))
def test_every_width_survives_its_name(form: str, bits: int, sigmas: float) -> None:
    scheme = Scheme(bits, sigmas, form)
    assert parse_scheme(str(scheme)) == scheme


@pytest.mark.parametrize("text", ODD)
def test_unknown_schemes_are_named(text: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_scheme(text)
    assert repr(text) in str(caught.value) and "expected fp16" in str(caught.value)


@pytest.mark.parametrize("text", NAMES)
def test_only_some_need_inputs(text: str) -> None:
    assert parse_scheme(text).calibrated == text.startswith(("gptq", "grid"))


@pytest.mark.parametrize(
    ("text", "shape", "halves", "indices"),
    [
        ("fp16", (4, 6), 24, 0),
        ("fp16", (), 1, 0),
        ("int6:12", (4, 6), 4, 0),
        ("int8", (6,), 1, 0),
        ("int8", (11, 8, 12), 88, 0),
        ("int8/1", (11, 8, 12), 11, 0),
        ("int8/1+log", (11, 8, 12), 0, 11),
        ("gptq6:12+log", (4, 6), 0, 4),
        ("gptq5+clip", (4, 6), 4, 0),
        ("gptq6:12+awq+log", (4, 6), 0, 10),
        ("int8/0", (11, 8, 12), 1, 0),
        ("clip6", (4, 6), 4, 0),
        ("gptq6:12", (4, 6), 4, 0),
        ("gptq6:12+awq", (4, 6), 4, 6),
        ("ternary:3", (4, 6), 8, 0),
        ("grid8", (4, 6), 0, 4),
        ("grid8+columns", (4, 6), 0, 10),
    ],
)
def test_what_is_stored_beside_the_integers(
    text: str, shape: tuple[int, ...], halves: int, indices: int
) -> None:
    scheme = parse_scheme(text)
    assert scheme.num_halves(shape) == halves
    assert scheme.num_indices(shape) == indices


def indices(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int16)


def test_integers_stand_for_multiples_of_their_steps() -> None:
    codes = np.array([[1, -2, 3], [0, 127, -7]], dtype=np.int8)
    halves = np.array([0.5, 0.25], dtype=np.float16)
    plain = QuantizedTensor((2, 3), parse_scheme("gptq7:14"), halves, codes)
    assert dequantize(plain).tolist() == [[0.5, -1.0, 1.5], [0, 31.75, -1.75]]
    finer = QuantizedTensor((2, 3), parse_scheme("gptq7:14+awq"), halves, codes, indices(0, -16, 0))
    assert dequantize(finer).tolist() == [[0.5, -0.5, 1.5], [0, 15.875, -1.75]]
    grid = QuantizedTensor((2, 3), parse_scheme("grid1"), indices(16, -16), codes)
    assert dequantize(grid).tolist() == [[2, -4, 6], [0, 63.5, -3.5]]
    assert steps_of(grid).shape == (2, 1)
    logs = QuantizedTensor((2, 3), parse_scheme("gptq7:14+log"), indices(16, -16), codes)
    assert dequantize(logs).tolist() == dequantize(grid).tolist()
    finer = replace(logs, scheme=parse_scheme("gptq7:14+awq+log"), columns=indices(0, -16, 0))
    assert dequantize(finer).tolist() == [[2, -2, 6], [0, 31.75, -3.5]]
    both = QuantizedTensor(
        (2, 3), parse_scheme("grid1+columns"), indices(16, -16), codes, indices(0, 16, -32)
    )
    assert dequantize(both).tolist() == [[2, -8, 1.5], [0, 127, -0.875]]


def test_a_correction_is_added() -> None:
    codes = np.zeros((2, 3), dtype=np.int8)
    left = Factor(np.array([[1], [-2]], dtype=np.int8), indices(0), 64)
    right = Factor(np.array([[3, 0, 1]], dtype=np.int8), indices(-16), 64)
    steps = np.ones(2, dtype=np.float16)
    tensor = QuantizedTensor(
        (2, 3), parse_scheme("int6"), steps, codes, correction=LowRank(left, right)
    )
    assert dequantize(tensor).tolist() == [[1.5, 0, 0.5], [-3, 0, -1]]
