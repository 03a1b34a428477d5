"""Exported models: the same probabilities, without this package."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import underpar
from commands import invoke, run_json
from tiny import TinyRun
from underpar.build.model import build_model
from underpar.build.recipe import load_checked
from underpar.core.runtime import Runtime
from underpar.errors import ArtifactError, UnderparError
from underpar.infer.predictor import Predictor
from underpar.stages import export as stage

ALONE = """
import json, sys, torch
program = torch.export.load(sys.argv[1]).module()
log_probs = program(torch.tensor(json.loads(sys.argv[2])))
assert not [name for name in sys.modules if name.startswith("underpar")]
print(json.dumps(log_probs.tolist()))
"""


def test_a_program_needs_torch_alone(tiny_run: TinyRun, tmp_path: Path) -> None:
    out = tmp_path / "model.pt2"
    summary = run_json("export", tiny_run.folder.path, "--out", out)
    assert summary["largest_difference_nats"] <= 1e-4 and summary["bytes"] == out.stat().st_size
    assert summary["most_tokens"] == tiny_run.recipe.model.context
    model = underpar.load(tiny_run.folder.path)
    text = b"It is a truth universally acknowledged, that a"
    tokens = [model.tokenizer.bos_id, *model.tokenizer.encode(text).tolist()]
    words = [sys.executable, "-c", ALONE, str(out), json.dumps(tokens)]
    # In another folder and without PYTHONPATH.
    done = subprocess.run(words, cwd=tmp_path, env={}, capture_output=True, text=True, check=True)
    found = torch.tensor(json.loads(done.stdout))
    priced = [token.log_prob for token in model.log_probs(text)]
    targets = torch.tensor([*tokens[1:], model.tokenizer.bos_id])
    assert found.gather(1, targets[:, None])[:, 0].tolist() == pytest.approx(priced, abs=1e-4)


def test_an_onnx_file_gives_the_same(tiny_run: TinyRun, tmp_path: Path) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    out = tmp_path / "model.onnx"
    summary = stage.export(tiny_run.folder.artifact_file, out, Runtime(torch.device("cpu")))
    assert summary["largest_difference_nats"] <= 1e-4


@pytest.mark.parametrize(
    "name",
    [
        "pr2014+cpu",
        *(pytest.param(f"{r}+cpu", marks=pytest.mark.slow) for r in ("pr2135", "pr1894", "pr1219")),
    ],
)
def test_published_networks_can_be_exported(name: str) -> None:
    recipe = load_checked(name)
    torch.manual_seed(0)
    network = build_model(recipe)
    network.set_progress(1.0)
    for parameter in network.parameters():
        # New branches add nothing: their last matrix is zero.
        torch.nn.init.normal_(parameter, std=0.05)
    predictor = Predictor(network, torch.device("cpu"), [])
    traced = stage.trace(network)
    assert stage.largest_difference(traced.module(), predictor) <= 1e-4


def test_what_differs_is_not_written(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(traced: torch.export.ExportedProgram) -> tuple[bytes, stage.Program]:
        return b"wrong", lambda tokens: traced.module()(tokens) + 0.01

    monkeypatch.setattr(stage, "as_torch", wrong)
    with pytest.raises(ArtifactError, match=r"differs from the artifact by 0\.01 nats"):
        stage.export(
            tiny_run.folder.artifact_file, tmp_path / "a.pt2", Runtime(torch.device("cpu"))
        )
    assert not list(tmp_path.iterdir())


def test_mistakes_are_one_line(tiny_run: TinyRun, tmp_path: Path) -> None:
    with pytest.raises(UnderparError, match=r"ends with \.pt2 or \.onnx"):
        invoke("export", tiny_run.folder.path, "--out", tmp_path / "model.gguf")


def test_without_its_packages_onnx_says_what_to_do(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(UnderparError, match="pip install onnx onnxscript"):
        invoke("export", tiny_run.folder.path, "--out", tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
