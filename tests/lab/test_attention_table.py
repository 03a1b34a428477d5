"""The table of attention backends, at a size that a CPU can do."""

import json

import pytest
from typer.testing import CliRunner

from underpar.cli import app
from underpar.core.runtime import Runtime
from underpar.kernels.attention import available
from underpar.lab import attention_table
from underpar.lab.attention_table import WINDOWS, measure_rows


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_table, "REPEATS", 1)
    monkeypatch.setattr(attention_table, "WARMUPS", 0)
    monkeypatch.setattr(attention_table, "MOST_CPU_TOKENS", 64)


def test_each_backend_has_a_row_per_shape(runtime: Runtime) -> None:
    rows = list(measure_rows(runtime, 64, [32]))
    backends = [n for n, a in available(runtime.device, runtime.dtype).items() if a == "yes"]
    shapes = [(row.backend, row.pieces, row.window) for row in rows]
    assert sorted(shapes) == sorted(
        (name, pieces, window)
        for name in backends
        for pieces in ("equal", "documents")
        for window in WINDOWS
    )
    assert all(row.forward_ms > 0 and row.both_ms > 0 for row in rows)


def test_the_command_names_backends_and_rows() -> None:
    words = ["lab", "attention-table", "--device", "cpu", "--json"]
    table = json.loads(CliRunner().invoke(app, words).stdout)
    assert table["backends"]["reference"] == "yes"
    assert {row["backend"] for row in table["rows"]} >= {"reference", "sdpa"}
