"""Files of quantization, in safetensors: calibrations and rounded models."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from underpar.core.fields import Fields, reading
from underpar.core.makers import again
from underpar.core.tensor_files import read_tensors, save_tensors
from underpar.errors import RecipeError
from underpar.quant.calibration import Calibration
from underpar.quant.fisher import Fisher
from underpar.quant.logsteps import LARGEST_INDEX
from underpar.quant.lowrank import Factor, LowRank
from underpar.quant.schemes import QuantizedModel, QuantizedTensor, parse_scheme

LARGEST_HALF = float(np.finfo(np.float16).max)


@dataclass(frozen=True, eq=False)
class Measured:
    """A calibration: statistics of the inputs and gradients of one model over one text."""

    calibration: Calibration
    fisher: Fisher
    about: dict[str, Any]
    """The weights that were calibrated, the text, and the seconds it took."""


def save_measured(path: Path, measured: Measured) -> None:
    """Write a calibration, atomically; a Hessian that matrices share is stored once."""
    calibration, fisher = measured.calibration, measured.fisher
    tensors: dict[str, Tensor] = {"lookup": fisher.lookup}
    sites: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, hessian in calibration.hessians.items():
        sites[name] = first.setdefault(id(hessian), name)
    tensors |= {f"hessian/{n}": calibration.hessians[n] for n in first.values()}
    tensors |= {f"outputs/{name}": squares for name, squares in fisher.outputs.items()}
    numbers = {
        "sites": sites,
        "num_inputs": dict(calibration.num_inputs),
        "largest": dict(calibration.largest),
        "num_tokens": calibration.num_tokens,
        "fisher_tokens": fisher.num_tokens,
    }
    save_tensors(path, tensors, {**measured.about, "numbers": numbers})


def read_measured(path: Path, device: torch.device) -> Measured:
    """What `save_measured` wrote, with its tensors on `device`."""
    tensors, about = read_tensors(path)
    tensors = {name: t.to(device) for name, t in tensors.items()}
    remedy = again(path)
    with reading(path, remedy):
        numbers = Fields(path, about, remedy).table("numbers")
        del about["numbers"]
        sites = numbers.table("sites")
        hessians = {name: tensors[f"hessian/{sites.text(name)}"] for name in sites.values}
        calibration = Calibration(
            hessians,
            _counts(numbers.table("num_inputs")),
            numbers.count("num_tokens"),
            numbers.numbers("largest"),
        )
        outputs = {name: tensors[f"outputs/{name}"] for name in hessians}
        fisher = Fisher(outputs, tensors["lookup"], numbers.count("fisher_tokens"))
    return Measured(calibration, fisher, about)


def _counts(table: Fields) -> dict[str, int]:
    return {name: table.count(name) for name in table.values}


def save_quantized(path: Path, model: QuantizedModel, about: dict[str, Any]) -> None:
    """Write integers, steps and corrections of a model, atomically."""
    arrays: dict[str, np.ndarray] = {}
    table: dict[str, dict[str, Any]] = {}
    for name, tensor in model.items():
        table[name] = {"shape": tensor.shape, "scheme": str(tensor.scheme)}
        parts = {"steps": tensor.steps, "codes": tensor.codes, "columns": tensor.columns}
        arrays |= {f"{name}/{part}": a for part, a in parts.items() if a is not None}
        if tensor.correction is not None:
            sides = {"left": tensor.correction.left, "right": tensor.correction.right}
            table[name]["groups"] = {side: factor.group for side, factor in sides.items()}
            for side, factor in sides.items():
                arrays[f"{name}/{side}.codes"] = factor.codes
                arrays[f"{name}/{side}.steps"] = factor.steps
    tensors = {key: torch.from_numpy(np.ascontiguousarray(a)) for key, a in arrays.items()}
    save_tensors(path, tensors, {**about, "table": json.dumps(table)})


def read_quantized(path: Path) -> tuple[QuantizedModel, dict[str, Any]]:
    """What `save_quantized` wrote."""
    tensors, about = read_tensors(path)
    model: QuantizedModel = {}
    with reading(path, again(path), RecipeError):
        arrays = {key: t.numpy() for key, t in tensors.items()}
        for name, row in json.loads(str(about.pop("table"))).items():
            correction = None
            if "groups" in row:
                left, right = (
                    Factor(
                        arrays[f"{name}/{side}.codes"],
                        arrays[f"{name}/{side}.steps"],
                        row["groups"][side],
                    )
                    for side in ("left", "right")
                )
                correction = LowRank(left, right)
            model[name] = QuantizedTensor(
                tuple(row["shape"]),
                parse_scheme(row["scheme"]),
                arrays[f"{name}/steps"],
                arrays.get(f"{name}/codes"),
                arrays.get(f"{name}/columns"),
                correction,
            )
            _require_fit(name, model[name])
    return model, about


def _require_fit(name: str, tensor: QuantizedTensor) -> None:
    """Raise a ValueError for arrays that a tensor of this shape and scheme does not have."""
    scheme, shape, corrected = tensor.scheme, tensor.shape, tensor.correction
    num_weights = math.prod(shape)
    num_rows = num_weights if scheme.is_half else scheme.num_steps(shape)
    rows = (num_rows, num_weights // num_rows)
    expected: list[tuple[np.ndarray | None, tuple[int, ...] | None, type]] = [
        (tensor.steps, (num_rows,), np.int16 if scheme.has_log_rows else np.float16),
        (tensor.codes, None if scheme.is_half else rows, np.int16 if scheme.states else np.int8),
        (tensor.columns, (shape[-1],) if scheme.columns else None, np.int16),
    ]
    if corrected is not None:
        rank = len(corrected.right.codes)
        sides = ((corrected.left, (shape[0], rank)), (corrected.right, (rank, shape[1])))
        for factor, sizes in sides:
            num_steps = -(-math.prod(sizes) // factor.group)
            expected += [(factor.codes, sizes, np.int8), (factor.steps, (num_steps,), np.int16)]
    for array, size, kind in expected:
        actual = None if array is None else (array.shape, array.dtype)
        if actual != (None if size is None else (size, np.dtype(kind))):
            raise ValueError(f"{name:.80} of scheme {scheme} has an array {actual}, not {size}")
        # Integers have two dimensions, steps one.
        if array is None or array.ndim > 1:
            continue
        largest = LARGEST_HALF if kind is np.float16 else LARGEST_INDEX
        if not (np.abs(array.astype(np.float64)) <= largest).all():
            raise ValueError(f"{name:.80} has a step that is too large or not finite")
