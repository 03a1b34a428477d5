"""Parameter -> optimizer group, each in exactly one."""

from __future__ import annotations

import re

from torch import nn

from underpar.schema import GROUPS

# Of blocks: those of a GPT, or of a trunk of an H-Net. Also what stands between its trunks.
MATRIX = re.compile(r"((encoder|main|decoder)\.)?blocks\.|(up|down|router|residual)\.")
# A row per token.
TABLES = ("embedding.weight", "byte_embedding.weight", "lm_head.weight")


def group_of(name: str, parameter: nn.Parameter) -> str:
    """Embedding tables (the levers' too), the blocks' matrices, and everything else."""
    if name in TABLES or name.endswith(".table.weight"):
        return "embed"
    if MATRIX.match(name) and parameter.ndim == 2:
        return "matrix"
    return "scalar"


def group_parameters(model: nn.Module) -> dict[str, dict[str, nn.Parameter]]:
    """Group -> name -> parameter; covers every trainable parameter once."""
    groups: dict[str, dict[str, nn.Parameter]] = {group: {} for group in GROUPS}
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for name, parameter in trainable.items():
        groups[group_of(name, parameter)][name] = parameter
    grouped = [name for members in groups.values() for name in members]
    assert sorted(grouped) == sorted(trainable), "a parameter is in no group or in two"
    return groups
