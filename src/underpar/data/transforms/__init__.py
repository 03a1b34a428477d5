"""Text transforms: bijections of text that run before the tokenizer, by name.

Each transform is a lever of stage "data" in its own file. A transform is applied word by word (a
word begins at a space), and the results are joined: forward(x + y) == forward(x) + forward(y) if y
begins with a space. `source_bytes` states how many bytes of the source text each written code point
stands for. Over a whole text, they add up to the length of the source text in UTF-8.
"""

from importlib import import_module
from typing import cast

import numpy as np
import numpy.typing as npt

from underpar.errors import DataError
from underpar.recipe import nearest
from underpar.seams import TextTransform

# Modules by name, imported on use: the counted script carries only the transform of its recipe.
TRANSFORMS = {
    "caseops": "underpar.data.transforms.caseops",
    "caseops_before": "underpar.data.transforms.caseops_before",
    "caseops_pair": "underpar.data.transforms.caseops_pair",
}


class Identity:
    """Leaves the text unchanged."""

    symbols = ""

    def forward(self, text: str) -> str:
        """The same text."""
        return text

    def inverse(self, text: str) -> str:
        """The same text."""
        return text

    def source_bytes(self, text: str) -> npt.NDArray[np.int64]:
        """UTF-8 length of each code point."""
        return utf8_lengths(text)


IDENTITY = "identity"


def open_transform(name: str) -> TextTransform:
    """The transform of that name."""
    if name == IDENTITY:
        return Identity()
    if name not in TRANSFORMS:
        known = [IDENTITY, *TRANSFORMS]
        raise DataError(f"no text transform {name!r}{nearest(name, known)}")
    return cast(TextTransform, import_module(TRANSFORMS[name]).TRANSFORM)


def code_points(text: str) -> npt.NDArray[np.uint32]:
    """The code points of a text, lone surrogates included."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def utf8_lengths(text: str) -> npt.NDArray[np.int64]:
    """Bytes of each code point in UTF-8; 1 for a byte escaped as U+DC80..U+DCFF."""
    points = code_points(text)
    lengths = 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000)
    # "surrogateescape" represents one byte that is not UTF-8 by one such code point.
    return np.where((points >= 0xDC80) & (points <= 0xDCFF), 1, lengths).astype(np.int64)
