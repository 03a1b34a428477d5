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
    package = own_part(path)
    for module in imported_modules(path.read_text()):
        part = part_of(module)
        assert level[part] <= level[package], f"{path.name} imports {module}"
        # The table also names the text transforms, which live with the data.
        if package == "levers" and path.name != "__init__.py":
            assert part in LEVER_MAY, f"lever {path.name} imports {module}"
        if part == "levers":
            assert package in KNOWS_LEVERS, f"{path.name} knows levers"


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


def printed_tree(text: str, top: str) -> set[str]:
    """Paths of files and folders in the indented tree of a page; two spaces per level."""
    block = re.search(rf"```\n{re.escape(top)}\n(.*?)```", text, re.DOTALL)
    assert block, f"no tree of {top}"
    paths, parents = set(), [""]
    for line in block[1].splitlines():
        indent, name = re.match(r"( *)(\S+)", line).groups()  # type: ignore[union-attr]
        depth = len(indent) // 2
        assert len(line.split()) > 1, f"{name} has no purpose beside it"
        paths.add(parents[depth - 1] + name)
        parents[depth:] = [parents[depth - 1] + name]
    return paths


def test_the_map_prints_the_tree() -> None:
    here = {str(f.relative_to(SOURCE)) for f in FILES if f.name != "__init__.py"}
    here |= {str(f.relative_to(SOURCE)) for f in SOURCE.rglob("*.toml")}
    here |= {f"{f.parent.relative_to(SOURCE)}/" for f in FILES if f.name == "__init__.py"} - {"./"}
    here.add("recipes/")
    named = printed_tree((ROOT / "docs" / "map.md").read_text(), "src/underpar/")
    others = {name for name in named if not name.endswith((".py", ".toml", "/"))}
    assert all((SOURCE / name).exists() for name in others)
    folders = {name for name in named if (SOURCE / name).is_dir()}
    assert (here - named, named - here - others - folders) == (set(), set())


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 160


def test_few_modules_stand_at_the_top() -> None:
    assert len(list(SOURCE.glob("*.py"))) <= 7


def test_the_architecture_page_states_these_levels() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    block = re.search(r"```imports\n(.*?)```", page, re.DOTALL)
    assert block, "no list of imports"
    stated = [re.findall(r"\w+", line.split("#")[0]) for line in block[1].splitlines()]
    assert stated == LEVELS


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.name)
def test_files_that_the_docs_name_exist(page: Path) -> None:
    named = set(re.findall(r"`((?:[\w.]+/)+[\w.]+\.(?:py|toml))`", page.read_text()))
    # Names in capitals stand for a name to choose; the bias levers are made up by the pages.
    named = {n for n in named if not re.search(r"\b(?:NAME|OP)\b|/(?:channel|branch)_bias\.py", n)}
    assert [n for n in named if not (SOURCE / n).exists() and not (ROOT / n).exists()] == []


def test_test_files_have_names_of_their_own() -> None:
    names = [f.name for f in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))
