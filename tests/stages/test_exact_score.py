"""The score in exact mode is close to the float score, and is the bits of a compressed file."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from commands import invoke, run_json
from tiny import TinyRun
from underpar.build.artifact import read_artifact
from underpar.build.exact import build_exact_predictor
from underpar.codec.exact_streams import encode_streams
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime
from underpar.data.folder import load_data
from underpar.errors import RuleError


def test_an_exact_score(tiny_run: TinyRun, runtime: Runtime, tmp_path: Path) -> None:
    folder = RunFolder(shutil.copytree(tiny_run.folder.path, tmp_path / "run"))
    words = ("score", folder.path, "--data", tiny_run.data, "--device", "cpu", "--exact")
    told = run_json(*words)
    floats = folder.read_json(folder.score_file("plain"))
    assert told["float_bits"] == floats["bits"]
    assert told["bits"] == pytest.approx(floats["bits"], rel=1e-4)
    assert told["cost_percent"] == 100 * (told["bits"] / floats["bits"] - 1)
    kept = folder.read_json(folder.exact_score_file)
    assert [row["num_targets"] for row in kept["ledger"]] == [
        row["num_targets"] for row in floats["ledger"]
    ]
    # No claim of the run.
    assert folder.exact_score_file not in folder.score_files()
    # The price is what coding takes.
    artifact, _ = read_artifact(folder.artifact_file)
    predictor = build_exact_predictor(artifact, runtime.device)
    targets = np.array(load_data(tiny_run.data).val.tokens[1:], dtype=np.int64)
    payload, bits = encode_streams(predictor, [targets])
    assert bits == pytest.approx(told["bits"], rel=1e-12)
    assert 0 <= 8 * len(payload) - bits <= 72
    # Without the float score, it is made first.
    folder.score_file("plain").unlink()
    assert run_json(*words)["float_bits"] == pytest.approx(floats["bits"], rel=1e-9)


def test_other_methods_are_refused(tiny_run: TinyRun) -> None:
    with pytest.raises(RuleError, match="exact mode covers plain scores"):
        invoke("score", tiny_run.folder.path, "--exact", "--adapt")
