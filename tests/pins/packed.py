"""Packed files of made-up weights: their bytes depend on no CPU, no seed of torch and no code."""

import hashlib

import numpy as np
from inside import (
    Artifact,
    QuantizedTensor,
    load_recipe,
    next_state,
    pack,
    parse_scheme,
    quantize_model,
    resolve_levers,
    weight_shapes,
)

TOKENIZER = bytes(range(256)) * 4
# Name -> recipe, with the rules of its [quant] section.
RECIPES = {"baseline+cpu": "baseline+cpu", "demo+cpu": "demo+cpu", "pr2014+cpu": "pr2014+cpu"}
# Schemes that the packed files of single tensors hold.
SCHEMES = ("int2", "int6:13", "clip5", "ternary:4", "grid1", "grid4", "grid8+columns", "fp16")
SHAPE = (24, 32)


def packed_sha256() -> dict[str, str]:
    """Name -> SHA-256 of each packed file."""
    hashes = {name: _pack_recipe(recipe) for name, recipe in RECIPES.items()}
    hashes |= {f"scheme {scheme}": _pack_tensor(scheme) for scheme in SCHEMES}
    return {name: hashlib.sha256(data).hexdigest() for name, data in hashes.items()}


def _pack_recipe(name: str) -> bytes:
    """All tensors of a recipe, with the schemes of its rules."""
    recipe = resolve_levers(load_recipe(name))
    rng = np.random.default_rng(7)
    shapes = weight_shapes(recipe)
    weights = {tensor: _draw_weight(shapes[tensor], rng) for tensor in sorted(shapes)}

    def solve(weights, schemes):
        return {n: _draw_coded(weights[n].shape, str(s), rng) for n, s in schemes.items()}

    tensors = quantize_model(weights, recipe.quant.rules, solve)
    return pack(Artifact(recipe, TOKENIZER, tensors))


def _pack_tensor(scheme: str) -> bytes:
    """One matrix in one scheme, with an activation scale."""
    rng = np.random.default_rng(11)
    recipe = resolve_levers(load_recipe("baseline+cpu"))
    if parse_scheme(scheme).calibrated:
        tensor = _draw_coded(SHAPE, scheme, rng)
    else:
        tensor = quantize_model({"m": _draw_weight(SHAPE, rng)}, [f"* {scheme}"])["m"]
    return pack(Artifact(recipe, TOKENIZER, {"m": tensor}, {"m": -17}))


def _draw_weight(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Multiples of 1/64 whose sums and squares are exact in fp32, in any order of addition.

    The second half of each row is the first half with the other sign: the mean of a row is 0.
    """
    size = shape[-1] if shape else 1
    drawn = rng.integers(-60, 61, size=(3, *shape[:-1], size)).sum(axis=0)
    half = size // 2
    drawn[..., half : 2 * half] = -drawn[..., :half]
    return (drawn / 64).astype(np.float32).reshape(shape)


def _draw_coded(shape: tuple[int, ...], text: str, rng: np.random.Generator) -> QuantizedTensor:
    """A matrix of a scheme that needs a calibration: integers and steps drawn directly."""
    scheme = parse_scheme(text)
    columns = rng.integers(-20, 20, size=shape[1]).astype(np.int16) if scheme.columns else None
    codes = rng.integers(-4, 5, size=(3, *shape)).sum(axis=0)
    if not scheme.states:
        steps = (rng.integers(1, 1024, size=shape[0]) / 4096).astype(np.float16)
        codes = np.clip(codes, -scheme.limit, scheme.limit).astype(np.int8)
        return QuantizedTensor(shape, scheme, steps, codes, columns)
    steps = rng.integers(-90, -50, size=shape[0]).astype(np.int16)
    codes = _walk_trellis(codes, scheme.states).astype(np.int16)
    return QuantizedTensor(shape, scheme, steps, codes, columns)


def _walk_trellis(codes: np.ndarray, num_states: int) -> np.ndarray:
    """The codes moved, by 1 at most, onto paths of the trellis."""
    if num_states == 1:
        return codes
    transitions = next_state(num_states)
    path, state = np.empty_like(codes), np.zeros(len(codes), dtype=np.int64)
    for column, code in enumerate(codes.T):
        path[:, column] = code - ((code + state) & 1) * np.where(code > 0, 1, -1)
        state = transitions[state, (path[:, column] >> 1) & 1]
    return path
