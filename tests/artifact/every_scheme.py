"""Small artifacts that hold every scheme, corrections and activation scales, for tests."""

import numpy as np

from underpar.artifact.pack import lines_of
from underpar.artifact.unpack import LINE_WIDTH, Artifact
from underpar.quant.lowrank import Factor, LowRank
from underpar.quant.schemes import QuantizedTensor, parse_scheme
from underpar.quant.trellis import next_state
from underpar.recipe import Recipe

MATRIX = (6, 8)
SCHEMES = [
    "fp16",
    "int2",
    "int6",
    "int6:12.85",
    "int8",
    "int8/0",
    "int8/0+log",
    "clip5+log",
    "gptq6:12.85+log",
    "gptq5+clip",
    "gptq6:12.85+hq",
    "gptq6+clip+log",
    "gptq7:14+awq+log",
    "clip5",
    "gptq6:12.85",
    "gptq7:14+awq",
    "ternary:4",
    "grid1",
    "grid1+columns",
    "grid4",
    "grid8+columns",
    "grid16",
    "grid64+columns",
]
CORRECTED = ["int6:12.85", "gptq7:14+awq", "gptq7:14+awq+log", "grid1", "grid8+columns"]


def walk_trellis(codes: np.ndarray, num_states: int) -> np.ndarray:
    """The codes moved, by 1 at most, onto paths of the trellis."""
    if num_states == 1:
        return codes
    transitions = next_state(num_states)
    path, state = np.empty_like(codes), np.zeros(len(codes), dtype=np.int64)
    for column, code in enumerate(codes.T):
        path[:, column] = code - (code + state & 1) * np.where(code > 0, 1, -1)
        state = transitions[state, path[:, column] >> 1 & 1]
    return path


def draw_tensor(
    text: str, shape: tuple[int, ...], rng: np.random.Generator, width: float = 2.5
) -> QuantizedTensor:
    """A tensor with random steps and integers of about this width; 0 and inf are the extremes."""
    scheme = parse_scheme(text)
    halves = rng.lognormal(size=scheme.num_halves(shape)).astype(np.float16)
    if scheme.is_half:
        return QuantizedTensor(shape, scheme, halves * np.float16(min(width, 100.0)))
    columns = rng.integers(-20, 20, size=shape[-1]).astype(np.int16) if scheme.columns else None
    if scheme.has_log_rows:
        halves = rng.integers(-90, -50, size=scheme.num_steps(shape)).astype(np.int16)
    steps, limit = halves, 32762 if scheme.states else scheme.limit
    limits = limit if columns is None or scheme.states else np.where(columns, 127, limit)
    drawn = rng.standard_normal((len(steps), np.prod(shape, dtype=int) // len(steps)))
    with np.errstate(invalid="ignore"):
        codes = np.clip(np.nan_to_num(np.rint(drawn * width)), -limits, limits)
    if scheme.states:
        codes = walk_trellis(codes.astype(np.int16), scheme.states)
    return QuantizedTensor(
        shape, scheme, steps, codes.astype(np.int16 if scheme.states else np.int8), columns
    )


def draw_factor(shape: tuple[int, int], group: int, rng: np.random.Generator) -> Factor:
    """A factor of random 4-bit integers."""
    steps = rng.integers(-120, -80, size=-(-shape[0] * shape[1] // group)).astype(np.int16)
    return Factor(rng.integers(-8, 8, size=shape).astype(np.int8), steps, group)


def correct(tensor: QuantizedTensor, rank: int, rng: np.random.Generator) -> QuantizedTensor:
    """The matrix with a random correction."""
    num_rows, num_columns = tensor.shape
    low_rank = LowRank(
        draw_factor((num_rows, rank), num_rows * rank, rng),
        draw_factor((rank, num_columns), 5, rng),
    )
    return QuantizedTensor(
        tensor.shape, tensor.scheme, tensor.steps, tensor.codes, tensor.columns, low_rank
    )


def draw_artifact(seed: int = 0, shape: tuple[int, int] = MATRIX) -> Artifact:
    """A matrix of every scheme, corrections, vectors, a scalar, and activation scales."""
    rng = np.random.default_rng(seed)
    tensors = {f"plain.{text}": draw_tensor(text, shape, rng) for text in SCHEMES}
    tensors |= {
        f"corrected.{text}": correct(draw_tensor(text, shape, rng), 2, rng) for text in CORRECTED
    }
    tensors["scalar"] = draw_tensor("fp16", (), rng)
    tensors["vector"] = draw_tensor("int8", (9,), rng)
    tensors["gate"] = draw_tensor("int8", (3, 2, 4), rng)
    tensors["log slabs"] = draw_tensor("int8/1+log", (3, 2, 4), rng)
    tensors["slabs"] = draw_tensor("int8/1", (3, 2, 4), rng)
    tensors["cube"] = draw_tensor("ternary:2", (3, 2, 4), rng)
    names = [name for name in tensors if "gri" in name]
    activations = {name: int(rng.integers(-100, 100)) for name in names}
    # Log steps that fill their section to the last line: a lie about one of them moves its end.
    num_logs = len(activations) + sum(line.size for t in tensors.values() for line in lines_of(t))
    tensors["filler"] = draw_tensor("int8+log", (-num_logs % LINE_WIDTH, 2), rng)
    return Artifact(Recipe(), b"tokenizer" * 20, tensors, activations)
