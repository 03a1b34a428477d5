"""Account for every byte, by tensor and by class, with code and tokenizer; and enforce the cap."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from underpar.artifact.table import TensorEntry
from underpar.artifact.unpack import LazyArtifact
from underpar.errors import ArtifactError


@dataclass(frozen=True)
class Budget:
    """Bytes by class and by tensor; the total is what the cap limits."""

    total_bytes: int
    cap_bytes: int
    model_file_bytes: int
    num_weights: int
    classes: dict[str, int]
    tensors: list[dict[str, Any]]

    def __repr__(self) -> str:
        used = f"{self.total_bytes:,} of {self.cap_bytes:,} bytes"
        return f"Budget({used}, {self.num_weights:,} weights)"

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
    """Account for the bytes of a packed file, of the code and of a tokenizer outside the file."""
    file = LazyArtifact(data)
    rows = file.rows.values()
    header, tokenizer, halves, indices, _, corrections = file.section_bytes
    num_factor_steps = sum(factor.num_steps for row in rows for factor in row.factors)
    num_activations = sum(row.activation for row in rows)
    num_steps = sum(row.scheme.num_indices(row.shape) for row in rows)
    # Halves are coded together and indices too: each tensor is charged in proportion.
    half_bytes = halves / max(sum(row.scheme.num_halves(row.shape) for row in rows), 1)
    index_bytes = indices / max(num_steps + num_factor_steps + num_activations, 1)
    tensors = [_weigh(row, half_bytes, index_bytes) for row in rows]
    classes: dict[str, float] = {
        "code": code_bytes,
        "tokenizer": tokenizer + file.header.tokenizer_bytes,
        "header": header,
    }
    if num_factor_steps:
        classes["corrections"] = corrections + index_bytes * num_factor_steps
    if num_activations:
        classes["activations"] = index_bytes * num_activations
    for tensor in tensors:
        kind = class_of(tensor["name"])
        classes[kind] = classes.get(kind, 0) + tensor["bytes"]
    rounded = {kind: round(size) for kind, size in classes.items()}
    total = len(data) + code_bytes + file.header.tokenizer_bytes
    rounded["framing"] = total - sum(rounded.values())
    num_weights = sum(row.num_weights for row in rows)
    return Budget(total, cap_bytes, len(data), num_weights, rounded, tensors)


def _weigh(row: TensorEntry, half_bytes: float, index_bytes: float) -> dict[str, Any]:
    size = row.coding.num_bytes + half_bytes * row.scheme.num_halves(row.shape)
    size += index_bytes * row.scheme.num_indices(row.shape)
    return {
        "name": row.name,
        "shape": list(row.shape),
        "scheme": str(row.scheme),
        "bytes": round(size, 1),
        "bits_per_weight": round(8 * size / row.num_weights, 4),
    }
