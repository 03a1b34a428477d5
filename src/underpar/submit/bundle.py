"""One Python file with the modules of this package that an entry needs, such as the counted script.

The rules count the bytes of the code that turns an artifact into a score. A bundle is that code:
a short bootstrap and a compressed payload. It is built in three steps.

1. Collect modules: follow the imports of the entry and of the recipe's levers. An import inside a
   function counts like any other; an import under TYPE_CHECKING does not. What is not imported is
   not carried: the script that scores has no training, and no bundle has unused levers.
2. Strip each module: no docstrings, comments, annotations or declarations of protocols, and one
   space per level of nesting. Names, asserts and lines of code stay as they are.
3. Compress all modules as one block, and put the block into the bootstrap as a string literal.

The bootstrap unpacks the modules into a temporary folder, puts the folder first on `sys.path` and
calls `main` of the entry. Modules are real files, so that tracebacks, `spawn` and Triton, which
reads the source of its kernels, work as usual.
"""

from __future__ import annotations

import ast
import json
import lzma
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path

from underpar.build.model import HNET
from underpar.levers import LEVERS, lever_module
from underpar.recipe import Recipe

ENTRY = "underpar.submit.entry"

# Literal context of 4 bits and no alignment: settings for text.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "pb": 0}]

# The payload is a literal of Latin-1 characters, one per byte. Base85 would be a quarter longer.
BOOTSTRAP = """#coding:latin-1
import importlib,json,lzma,pathlib,sys,tempfile
with tempfile.TemporaryDirectory() as folder:
 for name,text in json.loads(lzma.decompress('{payload}'.encode('l1'),3,None,{filters})).items():
  path=pathlib.Path(folder,name);path.parent.mkdir(parents=True,exist_ok=True);path.write_text(text)
 sys.path.insert(0,folder);importlib.import_module({entry!r}).main()
"""
# Nodes that may have a docstring.
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# Modules of which a source may import names for its types alone.
TYPE_MODULES = ("collections.abc", "typing", "torch")
# Characters that need an escape in a literal between single quotes.
ESCAPES = {"\\": "\\\\", "'": "\\'", "\0": "\\0", "\n": "\\n", "\r": "\\r"}


def bundle(
    recipe: Recipe,
    entry: str = ENTRY,
    also: Sequence[str] = (),
    files: Mapping[str, str] | None = None,
) -> bytes:
    """The script that runs `main` of `entry` with the levers of `recipe`; its length is counted.

    `also` names modules to carry that `entry` does not import, `files` other texts by their path.
    """
    sources = {}
    for module in sorted(modules_of(recipe, entry, also)):
        path = module_path(module)
        name = module.replace(".", "/") + ("/__init__.py" if path.stem == "__init__" else ".py")
        sources[name] = strip(path.read_text())
    sources |= files or {}
    payload = as_literal(_compress(json.dumps(sources, separators=(",", ":")).encode()))
    filters = repr(FILTERS).replace(" ", "")
    return BOOTSTRAP.format(payload=payload, entry=entry, filters=filters).encode("latin-1")


@lru_cache(maxsize=8)
def _compress(raw: bytes) -> bytes:
    """The payload. A run asks for it when it forecasts its size, packs and writes its script."""
    return lzma.compress(raw, lzma.FORMAT_RAW, filters=FILTERS)


def modules_of(recipe: Recipe, entry: str = ENTRY, also: Sequence[str] = ()) -> set[str]:
    """The modules of a bundle."""
    outer = recipe.hnet.levers if recipe.hnet else ()
    names = [name for name in LEVERS if name in recipe.levers or name in outer]
    roots = [entry, *also, *(LEVERS[name] for name in names)]
    if recipe.hnet:
        # Imported by its name, too.
        roots.append(HNET)
    # An engine is imported by its name, which following imports does not find.
    roots += [m.ENGINE for m in map(lever_module, names) if hasattr(m, "ENGINE")]
    return module_closure(roots)


def as_literal(data: bytes) -> str:
    """Bytes as the characters of a Latin-1 Python literal between single quotes."""
    # A digit after \0 would be read as part of an octal escape.
    return re.sub(
        r"(\0)(?=[0-7])|[\\'\0\n\r]",
        lambda match: "\\x00" if match[1] else ESCAPES[match[0]],
        data.decode("latin-1"),
    )


def module_closure(roots: Iterable[str]) -> set[str]:
    """`roots`, every module of this package that they import, directly or not, and all parents."""
    closure: set[str] = set()
    waiting = list(roots)
    while waiting:
        module = waiting.pop()
        if module in closure:
            continue
        closure.add(module)
        if parent := module.rpartition(".")[0]:
            waiting.append(parent)
        waiting += imported_modules(module_path(module).read_text())
    return closure


@cache
def imported_modules(source: str) -> tuple[str, ...]:
    """Modules of this package that a source imports; those under TYPE_CHECKING are left out."""
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


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def module_path(module: str) -> Path:
    """The file of a module."""
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None, f"{module} is not a module"
    return Path(spec.origin)


@cache
def strip(source: str) -> str:
    """The source without docstrings, comments, annotations and declarations of protocols.

    Two kinds of annotations stay, because programs read them: those of fields (dataclasses) and
    `constexpr` of kernel arguments (Triton).
    """
    tree = _WithoutLocalTypes().visit(ast.parse(source))
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED):
            has_docstring = ast.get_docstring(node, clean=False) is not None
            body = [n for n in node.body[has_docstring:] if not _is_for_checkers(n)]
            if isinstance(node, ast.ClassDef) and _is_interface(node):
                body = [n for n in body if not _is_declaration(n)]
            node.body = body or [ast.Pass()]
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.arg) and node.annotation is not None:
            is_constant = ast.unparse(node.annotation).endswith("constexpr")
            node.annotation = node.annotation if is_constant else None
    _drop_unused_types(tree)
    # Leading spaces are always nesting: `unparse` writes line breaks in strings as escapes.
    return re.sub(r"(?m)^ +", lambda spaces: spaces[0][::4], ast.unparse(tree))


def _is_interface(node: ast.ClassDef) -> bool:
    """Whether a class is a protocol for type checkers; `isinstance` reads decorated protocols."""
    return not node.decorator_list and any(ast.unparse(base) == "Protocol" for base in node.bases)


def _is_declaration(node: ast.stmt) -> bool:
    """A field without a value, its description, or a method with a docstring as its whole body."""
    if isinstance(node, ast.FunctionDef):
        return len(node.body) == 1 and _is_text(node.body[0])
    return _is_text(node) or (isinstance(node, ast.AnnAssign) and node.value is None)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
