"""The interface of every command, read from the app itself: no prose is pinned."""

import typing
from types import NoneType, UnionType
from typing import Any

import typer
from inside import app


def commands() -> dict[str, Any]:
    """Words of a command, "data build" -> its click command; "" is the app itself."""
    return dict(_walk(typer.main.get_command(app), ()))


def _walk(command: Any, words: tuple[str, ...]) -> Any:
    yield " ".join(words), command
    for name, inner in getattr(command, "commands", {}).items():
        yield from _walk(inner, (*words, name))


def interfaces() -> dict[str, Any]:
    """Words of a command -> its parameters by name."""
    return {words: _parameters(command) for words, command in commands().items()}


def _parameters(command: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(command.callback) if command.callback else {}
    return {
        param.name: {
            "opts": param.opts,
            "secondary_opts": param.secondary_opts,
            "kind": param.param_type_name,
            "metavar": param.metavar,
            # From the signature: versions of typer differ in where they keep a type.
            "type": _spell(hints[param.name]),
            "default": _plain(param.default),
            "required": param.required,
            "is_flag": bool(getattr(param, "is_flag", False)),
            "nargs": param.nargs,
            "hidden": bool(getattr(param, "hidden", False)),
        }
        for param in command.params
        if param.name in hints
    }


def _spell(hint: Any) -> str:
    """A type without None and without its module: "int", "list[Path]"."""
    if typing.get_origin(hint) in (UnionType, typing.Union):
        return " | ".join(_spell(a) for a in typing.get_args(hint) if a is not NoneType)
    if typing.get_origin(hint) is list:
        return f"list[{', '.join(map(_spell, typing.get_args(hint)))}]"
    return str(hint.__name__)


def _plain(default: Any) -> Any:
    return default if isinstance(default, str | int | float | NoneType) else str(default)
