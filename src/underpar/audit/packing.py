"""The artifact follows from the weights: calibrated, rounded, tuned and fitted once more.

So nothing in the artifact can come from held-out text: not its steps (R20), not its fp16 vectors,
not the numbers of a lever. The search for the constant is not repeated: any constant is legal that
fits the cap.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from underpar.artifact.unpack import Artifact
from underpar.audit.case import Case
from underpar.audit.finding import Finding, judge, not_shown
from underpar.core.tensor_files import read_tensors
from underpar.data.folder import hash_file
from underpar.quant.files import read_quantized
from underpar.quant.schemes import QuantizedTensor, dequantize
from underpar.recipe import to_tree
from underpar.train.evidence import environment

# On another machine a few integers fall on the other side of a rounding edge. A tensor may differ
# by this share of its rounding error, and a fitted number of a lever by this value. On a CPU so
# near an artifact is "not shown": who tunes on held-out text can name another machine.
ERROR_SHARE, NUMBER = 0.3, 0.01

_QUANTIZED = "quantized.safetensors"


def packing(case: Case) -> Finding:
    """R06, R20: packing the weights again, on training text alone, gives the artifact's tensors."""
    folder = case.folder
    for file in (folder.weights_file, folder.quantized_file, folder.tokenizer_file):
        if not file.is_file():
            return not_shown("packing", f"no {file.name}: the artifact cannot be made again")
    tensors, about = read_quantized(folder.quantized_file)
    if not replace(case.artifact, tensors=tensors).equals(case.artifact):
        return judge("packing", False, f"the artifact has other tensors than {_QUANTIZED}")
    if about.get("weights_sha256") != hash_file(folder.weights_file):
        return judge("packing", False, f"{_QUANTIZED} was made from other weights")
    made_in, here = _environments(about), environment(case.runtime)
    is_cpu = case.runtime.device.type == "cpu"
    for device in (str(made["device"]) for made in made_in):
        if device.startswith("cpu") != is_cpu:
            return not_shown("packing", f"made on {device}; audit on such a device to repeat it")
    again = case.pack_again()
    is_equal = again.equals(case.artifact)
    is_of_here = bool(made_in) and all(made == here for made in made_in)
    shares = {} if is_equal else _differences(case, again)
    is_near = all(share <= ERROR_SHARE for share in shares.values())
    worst = max(shares, key=lambda name: shares[name], default="")
    how = (
        f"{worst} differs by {shares[worst]:.1%} of its rounding error" if worst else "bit for bit"
    )
    if shares.get("recipe"):
        how = "other numbers in the recipe, or other steps of activations"
    number = f"{len(tensors)} tensors and {len(case.recipe.levers)} levers"
    told = f"{number} made again from the weights: {how}"
    evidence: dict[str, Any] = {
        "equal": is_equal,
        "same_machine": is_cpu and is_of_here,
        "differences": {name: share for name, share in shares.items() if share},
    }
    if not is_equal and is_near and not is_of_here:
        why = "the file names another machine; audit on such a machine, where nothing may differ"
        return not_shown("packing", f"{told}; {why}", **evidence)
    # Sums on a GPU are added in an order that varies.
    holds = is_equal or (is_near and not is_cpu)
    return judge("packing", holds, told, **evidence)


def _environments(about: dict[str, Any]) -> list[dict[str, Any]]:
    """Where calibration and rounding were made, as far as the file says so."""
    made = [(about.get("calibration") or {}).get("environment"), about.get("environment")]
    return [environment for environment in made if environment]


def _differences(case: Case, again: Artifact) -> dict[str, float]:
    """The difference of each tensor as a share of its rounding error; "recipe" for the rest."""
    weights, _ = read_tensors(case.folder.weights_file, may_lack_checksum=True)
    packed = case.artifact
    shares = {
        name: _share(tensor, packed.tensors[name], weights[name].float().numpy())
        for name, tensor in again.tensors.items()
    }
    same = _is_close(to_tree(again.recipe), to_tree(packed.recipe))
    same &= again.activations.keys() == packed.activations.keys()
    # Steps of a logarithmic scale.
    same &= all(abs(s - packed.activations[name]) <= 1 for name, s in again.activations.items())
    return shares | {"recipe": 0.0 if same else math.inf}


def _share(ours: QuantizedTensor, theirs: QuantizedTensor, weight: np.ndarray) -> float:
    if (ours.shape, ours.scheme) != (theirs.shape, theirs.scheme):
        return math.inf
    rounded = dequantize(ours)
    error = np.linalg.norm(rounded - weight)
    difference = np.linalg.norm(rounded - dequantize(theirs))
    return float(difference / error) if error else (math.inf if difference else 0.0)


def _is_close(ours: Any, theirs: Any) -> bool:
    """Whether two trees are equal but for small differences of numbers."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(_is_close(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(_is_close, ours, theirs))
    if isinstance(ours, float) and isinstance(theirs, float):
        return abs(ours - theirs) <= NUMBER
    return bool(ours == theirs)
