"""Files between the stages: what is read is what was written, and nothing else is taken."""

from pathlib import Path

import numpy as np
import pytest
import torch

from underpar.core.run_folder import RunFolder
from underpar.core.tensor_files import save_tensors
from underpar.errors import RunError
from underpar.quant.calibration import HEAD, Calibration
from underpar.quant.files import (
    Measured,
    read_measured,
    read_quantized,
    save_measured,
    save_quantized,
)
from underpar.quant.fisher import Fisher
from underpar.quant.lowrank import Factor, LowRank
from underpar.quant.rounding import round_tensor
from underpar.quant.schemes import QuantizedTensor, dequantize, parse_scheme


def test_calibrations(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shared, single = torch.randn(4, 4), torch.randn(3, 3)
    hessians = {"q": shared, "k": shared, HEAD: single}
    calibration = Calibration(hessians, {"q": 5, "k": 5, HEAD: 7}, 7, {"q": 1.5})
    fisher = Fisher({name: torch.rand(2) for name in hessians}, torch.rand(6), 9)
    path = tmp_path / "calibration.safetensors"
    save_measured(path, Measured(calibration, fisher, {"weights_sha256": "abc"}))
    restored = read_measured(path, torch.device("cpu"))
    assert restored.about == {"weights_sha256": "abc"}
    # Stored once, shared again: factors are made by Hessian, not by name.
    assert restored.calibration.hessians["q"] is restored.calibration.hessians["k"]
    for name in hessians:
        assert torch.equal(restored.calibration.hessians[name], hessians[name])
        assert torch.equal(restored.fisher.outputs[name], fisher.outputs[name])
    assert torch.equal(restored.fisher.lookup, fisher.lookup)
    assert restored.calibration.num_inputs == calibration.num_inputs
    assert (restored.calibration.num_tokens, restored.fisher.num_tokens) == (7, 9)
    assert restored.calibration.largest == {"q": 1.5}


def test_rounded_models(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((6, 8)).astype(np.float32)
    schemes = ["fp16", "int6:12.85", "clip4", "ternary:4"]
    model = {text: round_tensor(weight, parse_scheme(text)) for text in schemes}
    model["vector"] = round_tensor(weight[0], parse_scheme("fp16"))
    factors = (
        Factor(rng.integers(-2, 2, (6, 2)).astype(np.int8), np.array([-9], np.int16), 12),
        Factor(rng.integers(-8, 8, (2, 8)).astype(np.int8), np.arange(4, dtype=np.int16), 4),
    )
    model["grid"] = QuantizedTensor(
        weight.shape,
        parse_scheme("grid1+columns"),
        np.arange(6, dtype=np.int16),
        rng.integers(-9, 9, weight.shape).astype(np.int16),
        np.arange(8, dtype=np.int16),
        LowRank(*factors),
    )
    path = tmp_path / "quantized.safetensors"
    save_quantized(path, model, {"constant": 0.5})
    restored, about = read_quantized(path)
    assert about == {"constant": 0.5}
    assert list(restored) == list(model)
    for name, tensor in model.items():
        assert restored[name].scheme == tensor.scheme and restored[name].shape == tensor.shape
        assert dequantize(restored[name]).tobytes() == dequantize(tensor).tobytes()


@pytest.mark.parametrize("about", [{}, {"numbers": {}}, {"numbers": 3}, {"table": "["}])
def test_other_files_are_refused(tmp_path: Path, about: dict[str, object]) -> None:
    folder = RunFolder(tmp_path)
    for path in (folder.calibration_file, folder.quantized_file):
        save_tensors(path, {"a": torch.zeros(2)}, about)
    with pytest.raises(RunError, match=f"run 'underpar calibrate {tmp_path}' again"):
        read_measured(folder.calibration_file, torch.device("cpu"))
    with pytest.raises(RunError, match=f"run 'underpar quantize {tmp_path}' again"):
        read_quantized(folder.quantized_file)
