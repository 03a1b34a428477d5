"""The pinned values: where they lie, and how observed values are compared with them."""

import json
import math
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("pinned.json")
# Sums of floats differ between CPUs: of losses and bits, this share.
TOLERANCE = 1e-4


def read_pinned() -> dict[str, Any]:
    """All pinned values, by the part that they belong to."""
    pinned: dict[str, Any] = json.loads(FILE.read_text())
    return pinned


def differences(pinned: Any, found: Any, tolerance: float = 0.0, where: str = "") -> list[str]:
    """One line for each place at which two JSON values differ."""
    if isinstance(pinned, dict) and isinstance(found, dict):
        lines = [f"{where}/{key}: gone" for key in pinned.keys() - found.keys()]
        lines += [f"{where}/{key}: new" for key in found.keys() - pinned.keys()]
        for key in pinned.keys() & found.keys():
            lines += differences(pinned[key], found[key], tolerance, f"{where}/{key}")
        return sorted(lines)
    if isinstance(pinned, list) and isinstance(found, list) and len(pinned) == len(found):
        lines = []
        for i, (old, new) in enumerate(zip(pinned, found, strict=True)):
            lines += differences(old, new, tolerance, f"{where}[{i}]")
        return lines
    if isinstance(pinned, float) and isinstance(found, float):
        same = math.isclose(pinned, found, rel_tol=tolerance, abs_tol=0.0)
    else:
        same = type(pinned) is type(found) and pinned == found
    return [] if same else [f"{where}: pinned {pinned!r}, found {found!r}"]
