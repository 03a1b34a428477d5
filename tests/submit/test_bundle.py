"""The counted code: a closure without strangers, that runs by itself and gives the same score."""

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tiny import TinyRun
from underpar.recipe import load_recipe
from underpar.submit.bundle import as_literal, bundle, imported_modules, module_closure, strip

SOURCE = '''"""Doc."""
from typing import TYPE_CHECKING
import underpar.errors
if TYPE_CHECKING:
    from underpar.cli import main


def f(x):
    """Doc."""
    # why
    from underpar.recipe import Recipe
    assert x, "kept"
    return "text # kept"


class C:
    """Doc."""
'''


def test_stripping_keeps_the_code_and_drops_the_words() -> None:
    stripped = strip(SOURCE)
    assert "Doc" not in stripped
    assert "# why" not in stripped
    assert "text # kept" in stripped
    assert "assert x" in stripped
    assert ast.dump(ast.parse(strip(stripped))) == ast.dump(ast.parse(stripped))


def test_stripping_keeps_only_the_types_that_are_read() -> None:
    stripped = strip(
        "if TYPE_CHECKING:\n    import a\n"
        "class C:\n    x: int = 0\n"
        "def f(x: int, *, y: str = 'a', SIZE: tl.constexpr) -> bool:\n    z: int = x\n"
    )
    assert "TYPE_CHECKING" not in stripped and "-> bool" not in stripped
    assert "x: int = 0" in stripped and "def f(x, *, y='a', SIZE: tl.constexpr):" in stripped


def test_stripping_keeps_the_code_of_protocols_and_drops_their_declarations() -> None:
    stripped = strip(
        "class A(Protocol):\n    x: int\n    'about x'\n    y: int = 1\n"
        "    def f(self):\n        'Doc.'\n    def g(self):\n        return 2\n"
        "class B(Protocol):\n    def f(self):\n        'Doc.'\n"
        "@runtime_checkable\nclass C(Protocol):\n    def f(self):\n        'Doc.'\n"
    )
    assert "x: int" not in stripped and "y: int = 1" in stripped
    assert "def g(self)" in stripped and stripped.count("def f(self)") == 1
    assert "class B(Protocol):\n pass" in stripped


def test_imports_for_type_checking_are_not_followed() -> None:
    assert set(imported_modules(SOURCE)) == {"underpar.errors", "underpar.recipe"}


def test_the_closure_holds_the_scoring_path_and_no_more() -> None:
    closure = module_closure(["underpar.submit.entry"])
    assert {"underpar", "underpar.score.scorer", "underpar.model.gpt", "underpar.build"} <= closure
    parts = {name.split(".")[1] for name in closure if "." in name}
    assert not parts & {"cli", "lab", "report", "audit", "stages", "api", "codec", "train"}
    assert "underpar.core.console" not in closure
    assert not any(name.startswith("underpar.levers.") for name in closure)


def test_a_bundle_carries_the_levers_of_its_recipe() -> None:
    with_lever = load_recipe("baseline", ["levers.qk_gain=true"])
    assert len(bundle(with_lever)) > len(bundle(load_recipe("baseline")))
    assert bundle(with_lever) == bundle(with_lever)


@settings(max_examples=200, deadline=None)
@given(st.binary())
@example(bytes(range(256)) * 2)
@example(b"\x007\\0'\r\n\x1a\x0c\x00")
@example(b"\\07\\\x007")
def test_any_bytes_can_be_a_literal(data: bytes) -> None:
    script = f"#coding:latin-1\nvalue = '{as_literal(data)}'.encode('latin-1')".encode("latin-1")
    names: dict[str, bytes] = {}
    exec(compile(script, "literal.py", "exec"), names)
    assert names["value"] == data


@pytest.mark.parametrize("adapt", [[], ["adapt"]], ids=["plain", "adapt"])
def test_the_bundle_scores_from_an_empty_folder(
    tiny_run: TinyRun, tmp_path: Path, adapt: list[str]
) -> None:
    script = tmp_path / "score.py"
    script.write_bytes(bundle(tiny_run.recipe))
    compile(script.read_bytes(), "score.py", "exec")
    # -v names the files that were imported: the unpacked copy, not the installed package.
    words = [str(script), str(tiny_run.folder.artifact_file.resolve()), str(tiny_run.data), *adapt]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    result = subprocess.run(
        [sys.executable, "-v", *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    ours = json.loads(result.stdout)
    method = "adapt" if adapt else "plain"
    stored = json.loads(tiny_run.folder.score_file(method).read_text())
    assert ours["bits"] == pytest.approx(stored["bits"], rel=1e-6)
    loaded = [line for line in result.stderr.splitlines() if "underpar/score/scorer.py" in line]
    assert loaded
    assert not any("src/underpar" in line for line in loaded), "the installed copy ran"


def test_a_script_refuses_an_artifact_with_another_lever(tiny_run: TinyRun, tmp_path: Path) -> None:
    levers = {k: v for k, v in tiny_run.recipe.levers.items() if k != "adapt_scales"}
    script = tmp_path / "score.py"
    script.write_bytes(bundle(replace(tiny_run.recipe, levers=levers)))
    words = [str(script), str(tiny_run.folder.artifact_file.resolve()), str(tiny_run.data), "adapt"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    result = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (result.returncode, result.stdout) == (2, "")
    why = "lever 'adapt_scales' is not in this script; use the score.py beside the artifact"
    assert result.stderr == f"error: {why}\n"
