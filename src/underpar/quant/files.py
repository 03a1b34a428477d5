"""Files of quantization, in safetensors: calibrations and rounded models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from underpar.core.tensor_files import read_tensors, save_tensors
from underpar.errors import RecipeError, RunError
from underpar.quant.calibration import Calibration
from underpar.quant.fisher import Fisher
from underpar.quant.lowrank import Factor, LowRank
from underpar.quant.schemes import QuantizedModel, QuantizedTensor, parse_scheme


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
    try:
        numbers: Any = about.pop("numbers")
        hessians = {name: tensors[f"hessian/{site}"] for name, site in numbers["sites"].items()}
        calibration = Calibration(
            hessians, numbers["num_inputs"], numbers["num_tokens"], numbers["largest"]
        )
        outputs = {name: tensors[f"outputs/{name}"] for name in hessians}
        fisher = Fisher(outputs, tensors["lookup"], numbers["fisher_tokens"])
    except (KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path} is no calibration ({error!r}); run 'underpar calibrate'") from error
    return Measured(calibration, fisher, about)


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
    arrays = {key: t.numpy() for key, t in tensors.items()}
    model: QuantizedModel = {}
    try:
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
    except (KeyError, TypeError, ValueError, AttributeError, RecipeError) as error:
        raise RunError(
            f"{path} is no rounded model ({error!r}); run 'underpar quantize'"
        ) from error
    return model, about
