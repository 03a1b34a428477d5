"""Private parts of torch's compiler are used in compile/ and nowhere else."""

import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "underpar"
PRIVATE = re.compile(
    r"torch\._(inductor|dynamo|functorch|subclasses)\b|_dynamo\.mark_dynamic|cuda\.CUDAGraph"
    r"|cuda\.graph\("
)
OUTSIDE = [path for path in sorted(SOURCE.rglob("*.py")) if path.parent.name != "compile"]


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_other_file_uses_them(path: Path) -> None:
    assert not PRIVATE.search(path.read_text())


def test_compile_does_use_them() -> None:
    text = "".join(path.read_text() for path in (SOURCE / "compile").glob("*.py"))
    names = {match[0] for match in PRIVATE.finditer(text)}
    assert {"torch._inductor", "torch._dynamo", "cuda.CUDAGraph"} <= names
