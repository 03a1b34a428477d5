"""Where the bytes go, by tensor and by class, code and tokenizer included; the cap, enforced."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from underpar.artifact.pack import (
    MAX_WEIGHTS,
    Artifact,
    num_halves_of,
    num_indices_of,
    pack,
    read_table,
)
from underpar.errors import ArtifactError, RecipeError
from underpar.quant.rules import quantize_model
from underpar.recipe import Recipe

# Squeezed bytes of a SentencePiece model for each piece, for forecasts before a tokenizer exists
# (measured: 3.9 at 1,024 pieces and 4.8 at 2,048 on the embedded corpus, 5.4 at 8,192 on web text).
TOKENIZER_BYTES_PER_PIECE = 5


@dataclass(frozen=True)
class Budget:
    """Bytes by class and by tensor; the total is what the cap limits."""

    total_bytes: int
    cap_bytes: int
    model_file_bytes: int
    num_weights: int
    classes: dict[str, int]
    tensors: list[dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def enforce(self) -> None:
        """Refuse a total over the cap."""
        if self.total_bytes > self.cap_bytes:
            raise ArtifactError(
                f"{self.total_bytes} bytes with code, {self.total_bytes - self.cap_bytes} over the "
                f"cap of {self.cap_bytes}; use fewer bits in quant.rules or a smaller model"
            )


def class_of(name: str) -> str:
    """The row of the budget table that a tensor belongs to."""
    if name.startswith("embedding."):
        return "embedding"
    if name.startswith("levers."):
        return "levers"
    for part in ("attn", "mlp"):
        if f".{part}." in name:
            return part
    return "scales"


def read_budget(data: bytes, code_bytes: int, cap_bytes: int) -> Budget:
    """Account for every byte of the packed file `data` and of the code."""
    table, (header, tokenizer, halves, indices, _) = read_table(data)
    all_halves = sum(num_halves_of(row) for row in table)
    all_indices = sum(num_indices_of(row) for row in table)
    tensors = []
    for row in table:
        # Halves and indices are squeezed together; each tensor bears its share.
        share = halves * num_halves_of(row) / max(all_halves, 1)
        share += indices * num_indices_of(row) / max(all_indices, 1)
        num_weights = math.prod(row["shape"])
        size = row.get("bytes", 0) + share
        tensors.append(
            {
                "name": row["name"],
                "shape": row["shape"],
                "scheme": row["scheme"],
                "bytes": round(size, 1),
                "bits_per_weight": round(8 * size / num_weights, 4),
            }
        )
    classes: dict[str, float] = {"code": code_bytes, "tokenizer": tokenizer, "header": header}
    for tensor in tensors:
        kind = class_of(tensor["name"])
        classes[kind] = classes.get(kind, 0) + tensor["bytes"]
    rounded = {kind: round(size) for kind, size in classes.items()}
    total = len(data) + code_bytes
    rounded["framing"] = total - sum(rounded.values())
    num_weights = sum(math.prod(row["shape"]) for row in table)
    return Budget(total, cap_bytes, len(data), num_weights, rounded, tensors)


def forecast(
    recipe: Recipe, shapes: dict[str, tuple[int, ...]], code_bytes: int, tokenizer: bytes | None
) -> Budget:
    """The budget before training: Gaussian weights of the right shapes, really packed.

    Trained matrices are Gaussian to three digits of their entropy (PR 2046), and the step follows
    the row's deviation, so their scale does not matter.
    """
    num_weights = sum(math.prod(shape) for shape in shapes.values())
    if num_weights > MAX_WEIGHTS:
        raise RecipeError(f"the recipe has {num_weights} weights: expected at most {MAX_WEIGHTS}")
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    if tokenizer is None:
        tokenizer = rng.bytes(TOKENIZER_BYTES_PER_PIECE * recipe.model.vocab_size)
    artifact = Artifact(recipe, tokenizer, quantize_model(weights, recipe.quant.rules))
    return read_budget(pack(artifact), code_bytes, recipe.limits.cap_bytes)
