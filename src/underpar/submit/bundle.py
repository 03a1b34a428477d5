"""The package, or the part of it that a job needs, as one Python file whose bytes are counted.

Follow the imports of the entry and of the recipe's levers, drop docstrings and comments, compress
all sources as one block, and put them behind a bootstrap that unpacks to a temporary folder: real
files, so tracebacks, `spawn` and kernel compilers that read their source keep working.
"""

from __future__ import annotations

import ast
import json
import lzma
import re
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from underpar.levers import LEVERS, lever_module
from underpar.recipe import Recipe

ENTRY = "underpar.submit.entry"

# Sources are text with contexts of a byte or two, at no fixed alignment.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "pb": 0}]

# Latin-1 has a character for every byte, so the payload is a plain literal: base85 is a quarter
# longer.
BOOTSTRAP = """#coding:latin-1
import importlib,json,lzma,pathlib,sys,tempfile
with tempfile.TemporaryDirectory() as folder:
 for name,text in json.loads(lzma.decompress('{payload}'.encode('l1'),3,None,{filters})).items():
  path=pathlib.Path(folder,name);path.parent.mkdir(parents=True,exist_ok=True);path.write_text(text)
 sys.path.insert(0,folder);importlib.import_module({entry!r}).main()
"""
# What has a docstring.
HOLDERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# Modules of which a source may import names for its types alone.
TYPE_MODULES = ("collections.abc", "typing", "torch")
# What a literal between single quotes cannot hold as it is.
ESCAPES = str.maketrans({"\\": "\\\\", "'": "\\'", "\0": "\\0", "\n": "\\n", "\r": "\\r"})


def bundle(recipe: Recipe, entry: str = ENTRY) -> bytes:
    """One script that runs `entry` with the levers of `recipe`; its length is the counted code."""
    names = [name for name in recipe.levers if name in LEVERS]
    roots = [entry, *(LEVERS[name] for name in names)]
    # Asked for by name when it is needed: no import tells of it.
    roots += [m.ENGINE for m in map(lever_module, names) if hasattr(m, "ENGINE")]
    sources = {}
    for module in sorted(module_closure(roots)):
        path = _path(module)
        inside = module.replace(".", "/") + ("/__init__.py" if path.stem == "__init__" else ".py")
        sources[inside] = strip(path.read_text())
    raw = json.dumps(sources, separators=(",", ":")).encode()
    packed = lzma.compress(raw, lzma.FORMAT_RAW, filters=FILTERS)
    payload = as_literal(packed)
    filters = repr(FILTERS).replace(" ", "")
    return BOOTSTRAP.format(payload=payload, entry=entry, filters=filters).encode("latin-1")


def as_literal(data: bytes) -> str:
    """Bytes as Latin-1 characters of a Python literal between single quotes."""
    text = data.decode("latin-1").translate(ESCAPES)
    # A digit after an escaped zero would be read as part of its number.
    return re.sub(r"\\0(?=[0-7])", r"\\x00", text)


def module_closure(roots: Iterable[str]) -> set[str]:
    """Every module of this package that `roots` import, directly or not, with their packages."""
    found: set[str] = set()
    waiting = list(roots)
    while waiting:
        module = waiting.pop()
        if module in found:
            continue
        found.add(module)
        waiting += [p for p in (module.rpartition(".")[0],) if p]
        waiting += imported_modules(_path(module).read_text())
    return found


@cache
def imported_modules(source: str) -> tuple[str, ...]:
    """Modules of this package that a source imports, but for those of type checking alone."""
    tree = ast.parse(source)
    names: list[str] = []
    for node in _running_nodes(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(n for n in names if n.split(".")[0] == "underpar" and _is_module(n))


def _running_nodes(node: ast.AST) -> Iterable[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if _is_for_checkers(child):
            continue
        yield child
        yield from _running_nodes(child)


def _is_for_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


class _WithoutLocalTypes(ast.NodeTransformer):
    """Drops the types of local variables and attributes, inside functions alone."""

    inside = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Enter a function."""
        before, self.inside = self.inside, True
        node = self.generic_visit(node)  # type: ignore[assignment]
        self.inside = before
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """Enter a class: the types of its fields stay."""
        before, self.inside = self.inside, False
        node = self.generic_visit(node)  # type: ignore[assignment]
        self.inside = before
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """Drop the type."""
        if not self.inside or node.value is None:
            return node
        return ast.copy_location(ast.Assign([node.target], node.value), node)


def _drop_unused_types(tree: ast.AST) -> None:
    """Drop imports of types that no line uses any more."""
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    bodies = (getattr(node, "body", None) for node in ast.walk(tree))
    for body in (body for body in bodies if isinstance(body, list)):
        for line in list(body):
            if isinstance(line, ast.ImportFrom) and line.module in TYPE_MODULES:
                line.names = [name for name in line.names if (name.asname or name.name) in used]
                if not line.names:
                    body.remove(line)


def _is_protocol(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and "Protocol" in map(ast.unparse, node.bases)


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _path(module: str) -> Path:
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None, f"{module} is not a module"
    return Path(spec.origin)


@cache
def strip(source: str) -> str:
    """The source without docstrings, comments and what only type checkers read.

    Names, asserts and lines of code stay, and so do the types of fields, which dataclasses read,
    and of a kernel's constants.
    """
    tree = _WithoutLocalTypes().visit(ast.parse(source))
    for node in ast.walk(tree):
        if isinstance(node, HOLDERS):
            words = ast.get_docstring(node, clean=False) is not None
            body = [n for n in node.body[words:] if not _is_for_checkers(n)]
            node.body = [ast.Pass()] if not body or _is_protocol(node) else body
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.arg) and node.annotation is not None:
            is_constant = ast.unparse(node.annotation).endswith("constexpr")
            node.annotation = node.annotation if is_constant else None
    _drop_unused_types(tree)
    # Spaces at the start of a line are nesting alone: strings are written with escapes.
    return re.sub(r"(?m)^ +", lambda found: found[0][::4], ast.unparse(tree))
