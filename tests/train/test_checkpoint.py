"""Checkpoints: everything comes back, damage and strangers are refused."""

from pathlib import Path

import pytest
import torch

from underpar.core.tensor_files import read_tensors
from underpar.errors import RunError
from underpar.train.checkpoint import Position, read_checkpoint, save_checkpoint

POSITION = Position("recipe", "data", step=7, seconds=1.5)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint.safetensors"
    save_checkpoint(path, POSITION, {"model": {"w": torch.arange(6.0).view(2, 3)}, "other": {}})
    return path


def test_position_tensors_and_random_state_come_back(saved: Path) -> None:
    expected = torch.rand(4)
    position, parts = read_checkpoint(saved, POSITION)
    assert position == POSITION
    assert torch.equal(parts["model"]["w"], torch.arange(6.0).view(2, 3))
    assert torch.equal(torch.rand(4), expected)


def test_another_recipe_or_data_is_refused(saved: Path) -> None:
    for other in (Position("else", "data"), Position("recipe", "else")):
        with pytest.raises(RunError, match="another --out"):
            read_checkpoint(saved, other)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_cut_file_is_refused_by_name(saved: Path, keep: int) -> None:
    saved.write_bytes(saved.read_bytes()[:keep])
    with pytest.raises(RunError, match=r"checkpoint\.safetensors"):
        read_tensors(saved)
