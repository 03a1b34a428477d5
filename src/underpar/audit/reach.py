"""Finds the code of a script that can run: what its lines, and the functions they name, reach.

A function counts as reached if reached code names it, as a name or as an attribute, whatever
object it is called on. A branch is left out if a constant or a logged setting switches it off, and
so are lines after a return. Nothing is executed.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
ENDED = (ast.Return, ast.Raise, ast.Continue, ast.Break)
# Objects that hold settings in scripts of the contest; a log lists their attributes.
SETTINGS_NAMES = {"h", "args", "hp", "hparams", "cfg", "config", "Hyperparameters"}
# Settings that differ between ranks; the log has those of the first.
PER_RANK = {"rank", "local_rank", "is_main_process", "distributed", "world_size"}

_COMPARE: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
}


@dataclass(frozen=True)
class Body:
    """Code that runs as one unit: a function, or the lines of a file outside of functions."""

    file: str
    name: str
    statements: tuple[ast.stmt, ...]

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes, without the bodies of functions and classes inside."""
        nodes: list[ast.AST] = []
        waiting: list[ast.AST] = list(reversed(self.statements))
        while waiting:
            node = waiting.pop()
            nodes.append(node)
            if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                waiting += reversed(list(ast.iter_child_nodes(node)))
        return tuple(nodes)


def reachable(
    sources: Mapping[str, ast.Module], entry: str, settings: Mapping[str, str]
) -> list[Body]:
    """What can run if `entry` is started and the other files are imported."""
    return _Reach(entry, settings).bodies_of(sources)


class _Reach:
    def __init__(self, entry: str, settings: Mapping[str, str]) -> None:
        self._entry = entry
        self._settings = settings
        # Functions and classes that wait until something names them, by name.
        self._waiting: dict[str, list[tuple[str, ast.AST]]] = {}
        self._named: set[str] = set()
        self._bodies: list[Body] = []
        self._new: list[tuple[str, ast.AST]] = []

    def bodies_of(self, sources: Mapping[str, ast.Module]) -> list[Body]:
        """Enter the lines of all files, then whatever they name."""
        for file, tree in sources.items():
            self._enter(file, "", self._pruned(tree.body, file))
        while self._new:
            file, node = self._new.pop()
            if isinstance(node, ast.ClassDef):
                self._enter_class(file, node)
            elif isinstance(node, FUNCTIONS):
                self._enter(file, node.name, self._pruned(node.body, file))
        return self._bodies

    def _enter(self, file: str, name: str, statements: list[ast.stmt]) -> None:
        body = Body(file, name, tuple(statements))
        self._bodies.append(body)
        for node in body.nodes:
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                self._define(file, node)
                for decorator in node.decorator_list:
                    self._name_all(decorator)
                bases = node.bases if isinstance(node, ast.ClassDef) else node.args.defaults
                for expression in bases:
                    self._name_all(expression)
            else:
                self._name(node)

    def _enter_class(self, file: str, node: ast.ClassDef) -> None:
        methods = [n for n in node.body if isinstance(n, FUNCTIONS)]
        self._enter(file, node.name, [n for n in node.body if not isinstance(n, FUNCTIONS)])
        for method in methods:
            for decorator in method.decorator_list:
                self._name_all(decorator)
            # Methods that Python or torch call by themselves.
            if method.name.startswith("__") or method.name in ("forward", "backward", "step"):
                self._new.append((file, method))
            else:
                self._define(file, method)

    def _define(
        self, file: str, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    ) -> None:
        if node.name in self._named:
            self._new.append((file, node))
        else:
            self._waiting.setdefault(node.name, []).append((file, node))

    def _name_all(self, expression: ast.AST) -> None:
        for node in ast.walk(expression):
            self._name(node)

    def _name(self, node: ast.AST) -> None:
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
        if isinstance(node, ast.alias):
            name = node.name.rpartition(".")[2]
        if name and name not in self._named:
            self._named.add(name)
            self._new += self._waiting.pop(name, [])

    def _pruned(self, statements: list[ast.stmt], file: str) -> list[ast.stmt]:
        """Statements without those that never run."""
        kept: list[ast.stmt] = []
        for statement in statements:
            kept += self._prune(statement, file)
            if kept and isinstance(kept[-1], ENDED):
                break
        return kept

    def _prune(self, statement: ast.stmt, file: str) -> list[ast.stmt]:
        if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
            return [statement]
        if isinstance(statement, ast.If):
            is_true = self._truth(statement.test, file)
            if is_true is not None:
                return self._pruned(statement.body if is_true else statement.orelse, file)
        if isinstance(statement, ast.While) and self._truth(statement.test, file) is False:
            return self._pruned(statement.orelse, file)
        changed = {}
        for name, value in ast.iter_fields(statement):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                changed[name] = self._pruned(value, file)
            elif name in ("handlers", "cases"):
                changed[name] = [self._prune_part(part, file) for part in value]
        return [_copy(statement, changed)] if changed else [statement]

    def _prune_part(self, part: Any, file: str) -> Any:
        return _copy(part, {"body": self._pruned(part.body, file)})

    def _truth(self, test: ast.expr, file: str) -> bool | None:
        """Whether a condition holds; None if that depends on the run."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self._truth(test.operand, file)
            return None if inner is None else not inner
        if isinstance(test, ast.BoolOp):
            truths = [self._truth(value, file) for value in test.values]
            decides = isinstance(test.op, ast.Or)
            if decides in truths:
                return decides
            return None if None in truths else not decides
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            return self._compare(test, file)
        is_known, value = self._constant(test)
        return bool(value) if is_known else None

    def _compare(self, test: ast.Compare, file: str) -> bool | None:
        # The lines of a program do not run in a file that is imported.
        if isinstance(test.left, ast.Name) and test.left.id == "__name__":
            return None if file == self._entry else False
        sides = [self._constant(test.left), self._constant(test.comparators[0])]
        compare = _COMPARE.get(type(test.ops[0]))
        if compare is None or not all(is_known for is_known, _ in sides):
            return None
        try:
            return compare(sides[0][1], sides[1][1])
        except TypeError:
            return None

    def _constant(self, node: ast.expr) -> tuple[bool, Any]:
        """Whether the value of an expression is known, and the value."""
        if isinstance(node, ast.Constant):
            return True, node.value
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
            return False, None
        if node.value.id not in SETTINGS_NAMES or node.attr in PER_RANK:
            return False, None
        text = self._settings.get(node.attr)
        if text is None:
            return False, None
        try:
            return True, ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return True, text


def _copy(node: Any, changed: Mapping[str, Any]) -> Any:
    copy = type(node)(**{**dict(ast.iter_fields(node)), **changed})
    return ast.copy_location(copy, node)
