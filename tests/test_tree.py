"""The tree explains itself: import arrows, one reader of the environment, the printed map."""

import ast
import re
from pathlib import Path

import pytest

from underpar.submit.bundle import imported_modules

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "underpar"
FILES = sorted(SOURCE.rglob("*.py"))
IDS = [str(f.relative_to(SOURCE)) for f in FILES]

# Imports point one way: a file may import its own level and those before it.
LEVELS = [
    ["underpar", "errors", "schema", "recipe", "recipes", "seams", "core"],
    ["data", "kernels"],
    ["model"],
    ["compile"],
    ["train"],
    ["quant"],
    ["artifact"],
    ["infer"],
    ["score", "codec"],
    ["levers"],
    ["build"],
    ["submit"],
    ["audit"],
    ["report"],
    ["stages"],
    ["lab", "api"],
    ["cli", "__main__"],
]
# Levers know seams, kernels, infer and recipes; stages never know levers. Fake quantization rounds
# as the packer rounds: it shares the packer's rule for steps.
LEVER_MAY = {
    "underpar",
    "errors",
    "schema",
    "recipe",
    "seams",
    "kernels",
    "infer",
    "levers",
    "quant",
}
KNOWS_LEVERS = {"build", "submit", "levers"}


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "underpar"


def own_part(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    return "underpar" if first == "__init__" else first


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_imports_point_one_way(path: Path) -> None:
    level = {part: i for i, parts in enumerate(LEVELS) for part in parts}
    own = own_part(path)
    for module in imported_modules(path.read_text()):
        part = part_of(module)
        assert level[part] <= level[own], f"{path.name} imports {module}"
        # The table also names the text transforms, which live with the data.
        if own == "levers" and path.name != "__init__.py":
            assert part in LEVER_MAY, f"lever {path.name} imports {module}"
        if part == "levers":
            assert own in KNOWS_LEVERS, f"{path.name} knows levers"


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_modules_and_public_functions_say_what_they_are_for(path: Path) -> None:
    text = path.read_text()
    assert text.isascii()
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "a module says what it is for"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node) or _is_inner(tree, node), f"{node.name}: no docstring"


def _is_inner(tree: ast.Module, node: ast.FunctionDef) -> bool:
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n is not node)
    return any(node in ast.walk(outer) for outer in functions)


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_only_runtime_reads_the_environment(path: Path) -> None:
    reads = re.search(r"\benviron\b|\bgetenv\b", path.read_text())
    assert (reads is not None) == (path == SOURCE / "core" / "runtime.py")


def test_the_readme_prints_the_tree() -> None:
    readme = (ROOT / "README.md").read_text()
    block = re.search(r"```\nsrc/underpar/\n(.*?)```", readme, re.DOTALL)
    assert block, "README has no tree"
    named = re.findall(r"[\w/.-]+\.(?:py|toml|j2)", block[1])
    here = [str(f.relative_to(SOURCE)) for f in FILES if f.name != "__init__.py"]
    here += [str(f.relative_to(SOURCE)) for f in SOURCE.rglob("*.toml")]
    folders = re.findall(r"^  (\w+)/", block[1], re.MULTILINE)
    assert set(folders) == {
        p.name for p in SOURCE.iterdir() if p.is_dir() and p.name != "__pycache__"
    }
    missing = [f for f in here if Path(f).name not in {Path(n).name for n in named}]
    gone = [n for n in named if not any(f.name == Path(n).name for f in SOURCE.rglob("*"))]
    assert (missing, gone) == ([], [])


def test_test_files_have_names_of_their_own() -> None:
    names = [f.name for f in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))
