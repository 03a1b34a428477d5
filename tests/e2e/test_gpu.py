"""The same road on an accelerator, CUDA or MPS: every lever, equal scores, a codec that decodes.

pytest -m gpu
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lever_stacks import CPU, MODEL, batch_of, randomized, stack_with
from tiny import TinyRun
from tiny_codec import POEM, write_artifact
from underpar.audit.traces import TOLERANCE
from underpar.codec.stream import code_documents
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime, open_runtime
from underpar.data.folder import load_data
from underpar.infer.predictor import Predictor
from underpar.recipe import Recipe
from underpar.score.method import ADAPT, PLAIN
from underpar.stages.audit import audit_run
from underpar.stages.pack import pack_run
from underpar.stages.score import score_artifact
from underpar.stages.train import train
from underpar.stages.use import open_codec

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu() -> Runtime:
    """The accelerator that commands take by default; without one the tests fail."""
    runtime = open_runtime("auto")
    assert runtime.device.type != "cpu", "no accelerator here"
    return runtime


@pytest.mark.parametrize("name", MODEL)
def test_every_lever_computes_the_same_on_both_devices(name: str, gpu: Runtime) -> None:
    model, batch = randomized(stack_with(name)), batch_of([30, 40], 128)
    expected = Predictor(model, CPU, []).log_probs(batch)
    device = gpu.device
    ours = Predictor(model.to(device), device, [], torch.float32).log_probs(batch.to(device))
    assert torch.allclose(ours.cpu(), expected, atol=TOLERANCE, rtol=0)


def test_training_packs_and_scores(
    tiny_recipe: Recipe, tiny_data: Path, tmp_path: Path, gpu: Runtime
) -> None:
    folder = RunFolder(tmp_path)
    assert train(tiny_recipe, tiny_data, folder, gpu)["finished"]
    losses = [m["loss"] for m in folder.metrics()]
    assert losses[-1] < losses[0] - 1
    pack_run(folder)
    for method in (PLAIN, ADAPT):
        assert score_artifact(folder.artifact_file, tiny_data, gpu, method).score.bpb < 6
    # No codec follows adapt_scales.
    unshown = {f.rule: f.verdict for f in audit_run(folder, gpu).findings if f.verdict != "pass"}
    assert unshown == {"coded bits": "not shown"}


def test_an_artifact_scores_alike_on_both_devices(
    tiny_run: TinyRun, tmp_path: Path, gpu: Runtime, runtime: Runtime
) -> None:
    artifact = tmp_path / "model.upar"
    artifact.write_bytes(tiny_run.folder.artifact_file.read_bytes())
    ours, theirs = (
        score_artifact(artifact, tiny_run.data, device).score.bits for device in (gpu, runtime)
    )
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_the_codec_decodes(tiny_run: TinyRun, gpu: Runtime) -> None:
    codec = open_codec(tiny_run.folder.artifact_file, gpu)
    shard = load_data(tiny_run.data).val
    documents = [np.array(shard.doc(i), dtype=np.int64) for i in range(4)]
    assert code_documents(codec, documents) > 0
    text = b"An accelerator must give the same floats twice."
    assert codec.decompress(codec.compress(text)) == text


def test_an_adapted_file_decodes_in_another_process(tmp_path: Path, gpu: Runtime) -> None:
    artifact, source = write_artifact(tmp_path), tmp_path / "in"
    source.write_bytes(POEM * 8)
    # With a global phase, whose backward pass must add in a fixed order.
    options = ["--adapt", "--split", "|", "--no-verify", "--device", gpu.device.type]
    run_apart("compress", artifact, source, tmp_path / "out", *options)
    back = tmp_path / "back"
    run_apart("decompress", artifact, tmp_path / "out", back, "--device", gpu.device.type)
    assert back.read_bytes() == POEM * 8


def run_apart(*words: object) -> None:
    """A command in a process of its own."""
    command = [sys.executable, "-m", "underpar", *map(str, words)]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
