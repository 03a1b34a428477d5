"""Unpacks code that a script holds as a compressed literal, without running anything.

Accepted submissions are often a line such as `exec(lzma.decompress(base64.b85decode("...")))`.
Understood are calls of lzma, zlib, bz2 and base64 on literals, and the bundles of this package, in
which the literal is a JSON object of file names and sources.
"""

from __future__ import annotations

import ast
import base64
import binascii
import bz2
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import Any

# The code of no submission is longer; what unpacks to more is not unpacked.
LARGEST_SOURCE_BYTES = 4_000_000
# Bytes of memory that lzma may ask for: the most that its presets need.
MOST_MEMORY = 1 << 27

_DECODERS: dict[str, Callable[[Any], bytes]] = {
    "b85decode": base64.b85decode,
    "a85decode": base64.a85decode,
    "b64decode": base64.b64decode,
    "b32decode": base64.b32decode,
    "b16decode": base64.b16decode,
    "unhexlify": binascii.unhexlify,
}


class Unreadable(Exception):
    """The expression is no packed literal, or unpacks to too much."""


REFUSALS = (
    Unreadable,
    ValueError,
    TypeError,
    LookupError,
    OSError,
    EOFError,
    RecursionError,
    MemoryError,
    lzma.LZMAError,
    zlib.error,
)


def unpack_code(tree: ast.AST) -> Iterator[dict[str, str]]:
    """The sources in each packed literal by file name; code without a name has the name ""."""
    modules = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node.func) == "decompress":
            try:
                raw = _value(node, modules)
            except REFUSALS:
                continue
            if isinstance(raw, bytes):
                yield _sources(raw.decode("utf-8", "replace"))


def _sources(text: str) -> dict[str, str]:
    try:
        files = json.loads(text)
    except (ValueError, RecursionError):
        return {"": text}
    if not isinstance(files, dict):
        return {"": text}
    return {str(name): source for name, source in files.items() if isinstance(source, str)}


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _value(node: ast.expr, modules: dict[str, str]) -> Any:
    """The value of an expression of literals and of the few calls that unpack."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        # Constants of lzma, such as FORMAT_RAW.
        if modules.get(node.value.id) == "lzma" and node.attr.isupper():
            return getattr(lzma, node.attr, None)
        raise Unreadable
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item, modules) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_value(key, modules) for key in node.keys if key is not None]
        return dict(zip(keys, (_value(v, modules) for v in node.values), strict=True))
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    name, arguments = _name(node.func), [_value(a, modules) for a in node.args]
    named = {k.arg: _value(k.value, modules) for k in node.keywords if k.arg}
    if name in _DECODERS and arguments:
        return _DECODERS[name](arguments[0])
    if isinstance(node.func, ast.Attribute) and name in ("encode", "decode"):
        text = _value(node.func.value, modules)
        method = getattr(text, name, None)
        if method is None:
            raise Unreadable
        return method(*[str(a) for a in arguments])
    if name == "decompress" and isinstance(node.func, ast.Attribute) and arguments:
        module = modules.get(getattr(node.func.value, "id", ""), "")
        return _decompress(module, arguments, named)
    raise Unreadable


def _decompress(module: str, arguments: list[Any], named: dict[str, Any]) -> bytes:
    """Decompress, but not beyond the limit."""
    data = arguments[0]
    decoder: Any
    if module == "lzma":
        options = dict(zip(("format", "memlimit", "filters"), arguments[1:], strict=False)) | named
        options.pop("memlimit", None)
        if "filters" not in options:
            options["memlimit"] = MOST_MEMORY
        elif any(f.get("dict_size", 0) > MOST_MEMORY for f in options["filters"]):
            raise Unreadable
        decoder = lzma.LZMADecompressor(**options)
        raw = decoder.decompress(data, LARGEST_SOURCE_BYTES + 1)
    elif module == "bz2":
        raw = bz2.BZ2Decompressor().decompress(data, LARGEST_SOURCE_BYTES + 1)
    elif module == "zlib":
        raw = zlib.decompressobj(*arguments[1:2]).decompress(data, LARGEST_SOURCE_BYTES + 1)
    else:
        raise Unreadable
    if len(raw) > LARGEST_SOURCE_BYTES:
        raise Unreadable
    return bytes(raw)
