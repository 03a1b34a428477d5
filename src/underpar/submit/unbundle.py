"""The sources in a bundle, read without running it.

A bundle from a stranger is hostile input. Nothing in it is executed: the script must be the
bootstrap of `bundle.py` character by character around its payload, the payload is unpacked up to a
limit, and names of files are checked before anything is written.
"""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from underpar.errors import ArtifactError
from underpar.submit.bundle import BOOTSTRAP, FILTERS, as_literal, module_path, strip

# Far above any bundle: some 100 kB, and a megabyte unpacked.
MAX_SCRIPT_BYTES, MAX_TEXT_BYTES = 16_000_000, 16_000_000

REMOVED = "docstrings, comments, types except those of fields, declarations of protocols, layout"

_NAME = re.compile(r"underpar/(?:[A-Za-z_]\w*/)*\w+\.(?:py|toml)", re.ASCII)
# The escapes that `as_literal` writes.
_ESCAPES = {"\\": "\\", "'": "'", "0": "\0", "x00": "\0", "n": "\n", "r": "\r"}
_PARTS = {
    "{payload}": r"(?P<payload>[^'\\]*(?:\\.[^'\\]*)*)",
    "{entry!r}": r"'(?P<entry>underpar(?:\.[a-z_]\w*)+)'",
    "{filters}": re.escape(repr(FILTERS).replace(" ", "")),
}


@dataclass(frozen=True)
class Bundle:
    """The module whose `main` a bundle runs, and its texts by path."""

    entry: str
    sources: Mapping[str, str]

    def compared(self) -> dict[str, Any]:
        """Each module against the stripped module of that name in this package."""
        equal: list[str] = []
        different: list[str] = []
        unknown: list[str] = []
        for name, text in self.sources.items():
            if name.endswith(".py"):
                source = _installed_source(name)
                is_equal = source is not None and strip(source) == text
                (equal if is_equal else unknown if source is None else different).append(name)
        return {"equal": len(equal), "different": different, "not_in_this_package": unknown}


def read_bundle(script: bytes) -> Bundle:
    """The sources in a bundle; anything that `bundle` would not have written is refused."""
    if len(script) > MAX_SCRIPT_BYTES:
        raise ArtifactError(f"{len(script)} bytes, expected at most {MAX_SCRIPT_BYTES}")
    match = _frame().fullmatch(script.decode("latin-1"))
    if match is None:
        raise ArtifactError("it has not the frame of a bundle; expected a script of this package")
    packed = _unescape(match["payload"])
    raw = _decompress(packed)
    try:
        sources = json.loads(raw)
        is_plain = isinstance(sources, dict) and all(isinstance(t, str) for t in sources.values())
        # Repeated names, other spellings and hidden space do not survive this.
        is_plain = is_plain and json.dumps(sources, separators=(",", ":")).encode() == raw
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"its payload is not JSON ({error!s:.80})") from error
    if not is_plain:
        raise ArtifactError("its payload is not a table of texts by path")
    for name, text in sources.items():
        if not _NAME.fullmatch(name):
            raise ArtifactError(
                f"file {name!r:.80}: expected underpar/... with ending .py or .toml"
            )
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ArtifactError(f"file {name!r:.80} has half a character")
    return Bundle(match["entry"], sources)


def _frame() -> re.Pattern[str]:
    pieces = re.split(f"({'|'.join(map(re.escape, _PARTS))})", BOOTSTRAP)
    return re.compile("".join(_PARTS.get(piece) or re.escape(piece) for piece in pieces), re.DOTALL)


def _unescape(payload: str) -> bytes:
    text = re.sub(
        r"\\(x00|.)",
        lambda escape: _ESCAPES.get(escape[1], escape[0]),
        payload,
        flags=re.DOTALL,
    )
    packed = text.encode("latin-1")
    if as_literal(packed) != payload:
        raise ArtifactError("its payload is not spelled as a bundle spells it")
    return packed


def _decompress(packed: bytes) -> bytes:
    decoder = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=FILTERS)
    try:
        raw = decoder.decompress(packed, MAX_TEXT_BYTES)
    except lzma.LZMAError as error:
        raise ArtifactError(f"its payload cannot be unpacked ({error})") from error
    if not decoder.eof or decoder.unused_data:
        raise ArtifactError(f"its payload is cut, too long or over {MAX_TEXT_BYTES} bytes of text")
    return raw


def _installed_source(name: str) -> str | None:
    path = module_path("underpar").parents[1] / name
    return path.read_text() if path.is_file() else None


def write_sources(bundle: Bundle, out: Path) -> None:
    """Write all files under `out`, which must not exist or be empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ArtifactError(f"{out} exists; choose another --out")
    for name, text in bundle.sources.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")


def unbundle(script: Path, out: Path) -> dict[str, Any]:
    """Write the sources in a script under `out`; returns what they are and what they lack."""
    try:
        with script.open("rb") as file:
            content = file.read(MAX_SCRIPT_BYTES + 1)
    except OSError as error:
        raise ArtifactError(f"cannot read {script}: {error.strerror}") from error
    try:
        bundle = read_bundle(content)
    except ArtifactError as error:
        raise ArtifactError(f"{script}: {error}") from error
    write_sources(bundle, out)
    return {
        "entry": bundle.entry,
        "files": len(bundle.sources),
        "script_bytes": len(content),
        "source_bytes": sum(len(text.encode()) for text in bundle.sources.values()),
        **bundle.compared(),
        "removed_by_bundling": REMOVED,
    }
