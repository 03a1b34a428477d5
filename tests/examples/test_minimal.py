"""The page that shows everything once: it runs as it stands, and its file decodes."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import underpar

EXAMPLE = Path(__file__).parents[2] / "examples" / "minimal.py"


def test_the_minimal_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = spec_from_file_location("minimal", EXAMPLE)
    assert spec is not None and spec.loader is not None
    minimal = module_from_spec(spec)
    spec.loader.exec_module(minimal)
    bpb = minimal.main(3, tmp_path)
    printed = capsys.readouterr().out
    # A model that knows nothing needs 10 bits per token of about 3 bytes.
    assert 2 < bpb < 5
    assert "decompressed: equal" in printed
    assert printed.count("bits per token") == 2
    assert underpar.load(tmp_path / "model.upar").recipe == minimal.RECIPE
