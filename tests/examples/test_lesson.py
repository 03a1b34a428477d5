"""The notebook for a class: a valid file without outputs, whose cells run from top to bottom."""

import json
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from underpar.core.run_folder import RunFolder

LESSON = Path(__file__).parents[2] / "examples" / "lesson.ipynb"
# Instead of a minute of training on all text.
SETTINGS = {
    "train.budget_steps": 12,
    "model.vocab_size": 400,
    "model.num_layers": 2,
    "model.dim": 32,
    "model.mlp_dim": 64,
    "levers.bigram.buckets": 256,
    "levers.lora_ttt.chunk": 256,
    "quant.calibration_batches": 2,
    "quant.calibration_batch_tokens": 512,
    "limits.cap_bytes": 200_000,
}


def read() -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(LESSON.read_text())
    return notebook


def code_cells() -> list[dict[str, Any]]:
    return [cell for cell in read()["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_is_valid() -> None:
    notebook = read()
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in notebook["cells"]:
        wanted = {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            wanted |= {"execution_count", "outputs"}
        assert cell.keys() == wanted and isinstance(cell["source"], list)
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(nbformat.read(LESSON, 4))


def test_outputs_are_not_stored() -> None:
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code_cells())


def test_the_cells_run_in_order(
    corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    matplotlib.use("Agg")
    names: dict[str, Any] = {"__name__": "lesson"}
    tagged = [cell["metadata"].get("tags", []) for cell in code_cells()]
    assert tagged[0] == ["parameters"] and not any(tagged[1:])
    for number, cell in enumerate(code_cells()):
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
        if number == 0:
            names |= {"FOLDER": tmp_path, "TEXTS": corpus_file, "SETTINGS": SETTINGS}
    printed = capsys.readouterr().out
    assert "bits per byte" in printed and "adapting" in printed
    # The last cells judged the run that the first cells trained.
    folder = RunFolder(tmp_path / "run")
    assert folder.read_recipe().train.budget_steps == SETTINGS["train.budget_steps"]
    verdicts = {finding.rule: finding.verdict for finding in names["audited"].findings}
    assert "fail" not in verdicts.values(), verdicts
    assert folder.report_file.is_file()
    html = names["Surprise"](names["model"].log_probs("A <b> & c"))._repr_html_()
    assert "&lt;" in html and "&amp;" in html and "<b>" not in html
