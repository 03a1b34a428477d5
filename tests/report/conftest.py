"""A run folder written by hand: what the stages would leave, without running them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from underpar.audit.case import hash_files
from underpar.audit.rules import RULES
from underpar.core.run_folder import RunFolder

ARTIFACT = b"packed model"
SHA256 = hashlib.sha256(ARTIFACT).hexdigest()
RECIPE = """[model]
dim = 128

[levers.adapt_scales]

[quant]
rules = ["*.attn.* int6:13", "* fp16"]
"""


def step_line(step: int, loss: float = 5.0) -> dict[str, Any]:
    return {
        "step": step,
        "progress": step / 10,
        "lr_scale": 1 - step / 20,
        "loss": loss,
        "norm": 0.5,
        "tokens": 2048 * step,
        "seconds": 0.5 * step,
    }


def score_tree(method: str, bits: float = 2000.0) -> dict[str, Any]:
    ledger = [
        {"document": 0, "bits": bits, "num_bytes": 1000, "num_targets": 300},
        {"document": 1, "bits": 2 * bits, "num_bytes": 1000, "num_targets": 310},
    ]
    return {
        "artifact_sha256": SHA256,
        "artifact_bytes": 5000,
        "data": "texts",
        "data_identity": "feedbeef",
        "device": "cpu, 2 threads",
        "xz_bytes": 1000,
        "method": method,
        "order": "stream",
        "stopped_at": -1,
        "side_bits": 0.0,
        "how": {},
        "seconds": {"load": 1.0, "score": 3.0},
        "events": [],
        "ledger": ledger,
    }


def budget_tree() -> dict[str, Any]:
    return {
        "total_bytes": 6789,
        "cap_bytes": 16_000_000,
        "model_file_bytes": 5000,
        "num_weights": 12_345,
        "classes": {"code": 1789, "mlp": 5001, "framing": -1},
        "tensors": [
            {
                "name": "blocks.0.mlp.up.weight",
                "shape": [384, 128],
                "scheme": "int6:12",
                "bytes": 4321.5,
                "bits_per_weight": 3.4567,
            }
        ],
    }


def audit_tree(verdict: str = "pass") -> dict[str, Any]:
    """An audit with all rules, by default of the default files."""
    finding = {
        "verdict": verdict,
        "summary": "610 targets, each priced once",
        "evidence": {"targets": 61_000, "sums": [1.0, 0.5], "ledgers": {"plain": True}},
        "seconds": 1.25,
    }
    return {
        "artifact_sha256": SHA256,
        "data_sha256": "feed" * 16,
        "profile": "strict",
        "limits": {"cap_bytes": 16_000_000, "train_seconds": 600.0, "score_seconds": 600.0},
        "num_documents": 0,
        "code_tokens": 0,
        "num_retrained": None,
        "verdict": verdict,
        "findings": [{"rule": rule, **finding} for rule in RULES],
    }


def about_tree() -> dict[str, Any]:
    return {
        "recipe_hash": "0123456789",
        "data": "texts",
        "train_tokens": 970_467,
        "device": "cpu, 2 threads",
        "versions": {"torch": "2.13.0"},
    }


MakeRun = Callable[..., RunFolder]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """A folder with every stage's files; keywords replace one (a tree or text), None leaves it out.

    Names: recipe, about, metrics, budget, plain, adapt, audit, artifact.
    """

    def make(name: str = "run", **changes: Any) -> RunFolder:
        folder = RunFolder(tmp_path / name)
        folder.path.mkdir()
        files = {
            "recipe": (folder.recipe_file, RECIPE),
            "about": (folder.about_file, about_tree()),
            "metrics": (folder.metrics_file, [step_line(s, 7 - s / 5) for s in range(1, 11)]),
            "budget": (folder.budget_file, budget_tree()),
            "plain": (folder.score_file("plain"), score_tree("plain")),
            "adapt": (folder.score_file("adapt"), score_tree("adapt", 1900.0)),
            "audit": (folder.audit_file, audit_tree()),
            "artifact": (folder.artifact_file, ARTIFACT.decode()),
        }
        for key, (path, default) in files.items():
            value = changes.get(key, default)
            if key == "metrics" and isinstance(value, list):
                value = "".join(json.dumps(line) + "\n" for line in value)
            if key == "audit" and isinstance(value, dict):
                continue
            if value is not None:
                path.write_text(value if isinstance(value, str) else json.dumps(value))
        # The audit is of the files that lie there, unless it says otherwise.
        audit = changes.get("audit", audit_tree())
        if isinstance(audit, dict):
            folder.audit_file.write_text(json.dumps({"files": hash_files(folder)} | audit))
        return folder

    return make


@pytest.fixture
def trees() -> dict[str, Callable[..., dict[str, Any]]]:
    """Makers of the default files, for tests that change one value."""
    return {
        "step": step_line,
        "score": score_tree,
        "budget": budget_tree,
        "audit": audit_tree,
        "about": about_tree,
    }
