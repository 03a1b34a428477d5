"""The train log of a submission: what a finished run recorded, as lines of text.

The names of values are those of the contest's own script, parameter-golf train_gpt.py: train_loss
and val_loss in nats per token, val_bpb in bits per byte.
"""

from __future__ import annotations

import math
from typing import Any

from underpar.core.run_folder import RunFolder
from underpar.recipe import to_toml
from underpar.score.ledger import Score, score_from_dict


def log_name(seed: int) -> str:
    """The name of the log of a seed, as in the contest's record folders."""
    return f"train_seed{seed}.log"


def val_loss(score: Score) -> float:
    """The score in nats per token."""
    return score.bits * math.log(2) / score.num_targets


def train_log(folder: RunFolder, label: str, code_bytes: int) -> str:
    """The log of a run that was trained, packed and scored; `label` names the score.

    `code_bytes` are the bytes of the script that the submission counts.
    """
    about, recipe = folder.read_json(folder.about_file), folder.read_recipe()
    validation = folder.read_json(folder.validation_file)
    tree = folder.read_json(folder.score_file(label))
    score, last_step = score_from_dict(tree), validation["step"]
    model_bytes = folder.artifact_file.stat().st_size
    versions = " ".join(f"{name}:{number}" for name, number in about["versions"].items())
    lines = [
        f"recipe:{recipe.hash} seed:{recipe.train.seed} data:{about['data_identity']} {versions}",
        f"ranks:{about['ranks']} device:{about['device']} weights:{about['num_weights']}",
        *to_toml(recipe).splitlines(),
        *(_step(line, last_step) for line in folder.metrics()),
        f"end of training step:{last_step} tokens:{validation['tokens']} "
        f"train_time:{validation['seconds'] * 1000:.0f}ms",
        *_before_rounding(validation),
        f"model_bytes:{model_bytes} code_bytes:{code_bytes} "
        f"total_bytes:{model_bytes + code_bytes} artifact_sha256:{tree['artifact_sha256']}",
        f"val_docs:{len(score.entries)} target_tokens:{score.num_targets} "
        f"val_bytes:{score.num_bytes}",
        _final(score),
    ]
    return "\n".join(lines) + "\n"


def _step(line: dict[str, Any], last_step: int) -> str:
    text = f"step:{line['step']}/{last_step} train_loss:{line['loss']:.4f} tokens:{line['tokens']} "
    text += f"train_time:{line['seconds'] * 1000:.0f}ms"
    return text + (f" val_bpb:{line['val_bpb']:.4f}" if "val_bpb" in line else "")


def _before_rounding(validation: dict[str, Any]) -> list[str]:
    return [
        f"before rounding, {kind} weights val_bpb:{validation[f'{kind}_bpb']:.8f}"
        for kind in ("live", "average")
        if validation.get(f"{kind}_bpb") is not None
    ]


def _final(score: Score) -> str:
    return (
        f"final method:{score.method} val_loss:{val_loss(score):.8f} val_bpb:{score.bpb:.8f} "
        f"eval_time:{sum(score.seconds.values()) * 1000:.0f}ms"
    )
