"""The same road on an accelerator: equal scores, a codec that decodes. Runs where there is one."""

from pathlib import Path

import numpy as np
import pytest

from tiny import TinyRun
from underpar.codec.stream import code_documents
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime, open_runtime
from underpar.data.folder import load_data
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
    return open_runtime("cuda")


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
    assert audit_run(folder, gpu).verdict == "pass"


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
