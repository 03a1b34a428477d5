"""Scripts in the frame of our bundles around any payload."""

import json
import lzma

from underpar.submit.bundle import BOOTSTRAP, FILTERS, as_literal


def pack(raw: bytes, entry: str = "underpar.submit.entry") -> bytes:
    """A script with this payload."""
    packed = lzma.compress(raw, lzma.FORMAT_RAW, filters=FILTERS)
    filters = repr(FILTERS).replace(" ", "")
    script = BOOTSTRAP.format(payload=as_literal(packed), entry=entry, filters=filters)
    return script.encode("latin-1")


def dump(sources: object) -> bytes:
    """A payload as `bundle` spells it."""
    return json.dumps(sources, separators=(",", ":")).encode()
