"""What many tests share: a small data folder and one tiny trained, packed and scored run."""

import gc
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

# Before torch loads OpenMP. By default idle threads spin; with more workers than cores the codec
# tests (two threads each) then take up to 30 times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from tiny import TinyRun
from underpar.build.levers import resolve_levers
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime
from underpar.data.build import build_data
from underpar.data.sources.corpus import demo_corpus, read_documents
from underpar.recipe import Recipe, load_recipe
from underpar.score.method import ADAPT, PLAIN
from underpar.stages.data import build_options
from underpar.stages.pack import pack_run
from underpar.stages.score import score_artifact
from underpar.stages.train import train

CPU = Runtime(torch.device("cpu"))

# Tiny models gain nothing from threads, and tests that run side by side lose by them.
torch.set_num_threads(1)

# Torch fills the heap with objects that stay, and each collection looks at all of them: by default
# 4 % of the time of the tests.
gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ninety short real documents as .jsonl."""
    documents = read_documents([demo_corpus()])
    texts = [next(documents).text[:2000] for _ in range(90)]
    path = tmp_path_factory.mktemp("corpus") / "docs.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="session")
def tiny_recipe() -> Recipe:
    """Tiny dimensions, two layers, and levers of every stage."""
    levers = ["levers.qk_gain=true", "levers.smear.init=0.3", "levers.bigram.buckets=500"]
    levers += [f"levers.{name}=true" for name in ("ema", "softcap", "adapt_scales")]
    return resolve_levers(load_recipe("baseline+cpu", ["model.num_layers=2", *levers]))


@pytest.fixture(scope="session")
def data_for(
    corpus_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Recipe], Path]:
    """Recipe -> a data folder that it can train on, a tenth or so of it held out."""
    folders = tmp_path_factory.mktemp("data")

    def make(recipe: Recipe) -> Path:
        options = build_options(recipe)
        out = folders / hashlib.sha256(repr(options).encode()).hexdigest()[:12]
        if not out.exists():
            build_data([corpus_file], out, options)
        return out

    return make


@pytest.fixture(scope="session")
def tiny_data(tiny_recipe: Recipe, data_for: Callable[[Recipe], Path]) -> Path:
    """The data folder of `tiny_recipe`."""
    return data_for(tiny_recipe)


@pytest.fixture(scope="session")
def tiny_run(
    tiny_recipe: Recipe, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> TinyRun:
    """Trained, packed and scored; shared, so tests must not change it (copy it first)."""
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "tiny")
    assert train(tiny_recipe, tiny_data, folder, CPU)["finished"]
    pack_run(folder)
    for method in (PLAIN, ADAPT):
        score_artifact(folder.artifact_file, tiny_data, CPU, method)
    return TinyRun(tiny_recipe, tiny_data, folder)


@pytest.fixture(scope="session")
def runtime() -> Runtime:
    """One CPU rank."""
    return CPU
