"""Programs that use the package are checked against its types."""

from pathlib import Path

import pytest

api = pytest.importorskip("mypy.api")

PROGRAM = """
import underpar
from underpar.train.loop import Trainer

run = underpar.train("demo", "data", "out", set={"train.seed": 1})
reveal_type(run)
reveal_type(underpar.load(run).score(["a", b"b"]).bpb)
reveal_type(underpar.score(run, "data"))
underpar.pack(run, cap="many")
"""


@pytest.mark.slow
def test_functions_have_types_beside_packages_of_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MYPYPATH", str(Path(__file__).parents[1] / "src"))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    options = ["--ignore-missing-imports", "--follow-imports=silent", f"--cache-dir={tmp_path}"]
    printed, _, _ = api.run([*options, "--config-file=", str(program)])
    lines = [line.partition(": ")[2] for line in printed.splitlines()[:-1]]
    assert lines == [
        'note: Revealed type is "underpar.api.TrainedRun"',
        'note: Revealed type is "float"',
        'note: Revealed type is "underpar.stages.score.Scored"',
        'error: Argument "cap" to "pack" has incompatible type "str"; expected "int | None"  '
        "[arg-type]",
    ]
