"""Tensor files: a checksum finds every change; older files are read where a run would be lost."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from underpar.core.tensor_files import read_about, read_tensors, require_shapes, save_tensors
from underpar.errors import RunError

ABOUT = {"step": 3, "seconds": 0.1, "inner": {"list": [1, None, "text"]}}


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(7, 5, generator=generator),
        "half": torch.randn(3, generator=generator).bfloat16(),
        "integers": torch.arange(1000, dtype=torch.int16),
        "scalar": torch.tensor(2.5),
        "one": torch.arange(8)[::4][:1],
        "empty": torch.empty(0, 4),
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "some.safetensors"
    save_tensors(path, tensors(), ABOUT)
    return path


def write_old(path: Path) -> None:
    """As versions before the checksum wrote it."""
    save_file(tensors(), path, metadata={"about": json.dumps(ABOUT)})


def test_tensors_and_description_come_back(path: Path) -> None:
    loaded, about = read_tensors(path)
    assert about == ABOUT == read_about(path)
    assert loaded.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].equal(tensor)


def test_equal_tensors_give_equal_files(path: Path) -> None:
    first = path.read_bytes()
    for _ in range(5):
        save_tensors(path, dict(reversed(tensors().items())), ABOUT)
        assert path.read_bytes() == first


def test_flipped_integers_are_refused(path: Path) -> None:
    data = np.frombuffer(path.read_bytes(), np.uint8).copy()
    data[-600:-200] ^= 1
    path.write_bytes(data.tobytes())
    for read in (read_tensors, read_about):
        with pytest.raises(RunError, match="checksum is wrong"):
            read(path)


@pytest.mark.parametrize("change", ["bytes", "name", "shape", "type", "about", "missing"])
def test_any_change_of_content_is_refused(path: Path, change: str) -> None:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    text = json.loads(data[8 : 8 + size])["__metadata__"]["checked"]
    changed = load_file(path)
    if change == "bytes":
        changed["matrix"][6, 4] += 1
    elif change == "name":
        changed["matrix."] = changed.pop("matrix")
    elif change == "shape":
        changed["matrix"] = changed["matrix"].reshape(5, 7)
    elif change == "type":
        changed["integers"] = changed["integers"].view(torch.uint16)
    elif change == "missing":
        del changed["empty"]
    else:
        text = text.replace('"step": 3', '"step": 4')
    save_file(changed, path, metadata={"checked": text})
    with pytest.raises(RunError, match="checksum is wrong"):
        read_tensors(path, may_lack_checksum=True)


def test_a_file_of_an_older_version_is_read_only_where_allowed(path: Path) -> None:
    write_old(path)
    assert read_tensors(path, may_lack_checksum=True)[1] == ABOUT
    with pytest.raises(RunError, match="an older version wrote it"):
        read_tensors(path)


@pytest.mark.parametrize("content", [b"", b"no tensors", b"\xff" * 40])
def test_other_files_are_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(RunError, match="cannot be read"):
        read_tensors(path)
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(RunError, match="not written by underpar"):
        read_tensors(path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64], ids=str)
def test_types_that_no_stage_writes_are_refused(path: Path, dtype: torch.dtype) -> None:
    save_tensors(path, {"odd": torch.ones(3).to(dtype)}, {})
    with pytest.raises(RunError, match=r"'odd' is torch.*which no stage writes"):
        read_tensors(path)


def test_shapes_are_required() -> None:
    weights = {"a": torch.zeros(2, 3)}
    require_shapes(Path("file"), weights, {"a": (2, 3)}, "train again")
    for shapes, words in (
        ({"a": (3, 2)}, r"of shape \(2, 3\), expected floats \(3, 2\); train again"),
        ({"a": (2, 3), "b": (1,)}, "lacks tensor 'b'"),
        ({}, "unknown tensor 'a'"),
    ):
        with pytest.raises(RunError, match=words):
            require_shapes(Path("file"), weights, shapes, "train again")
    for bad in (torch.full((2, 3), torch.nan), torch.zeros(2, 3, dtype=torch.int32)):
        with pytest.raises(RunError, match=r"not finite|int32"):
            require_shapes(Path("file"), {"a": bad}, {"a": (2, 3)}, "train again")
