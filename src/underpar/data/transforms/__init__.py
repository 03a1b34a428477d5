"""Text transforms: bijections of text that run before the tokenizer, by name.

Each is a lever of stage "data" in a file of its own. A transform sees a text word by word, a word
being what begins at a space, and joins the results: forward(x + y) == forward(x) + forward(y)
wherever y begins with a space. Its byte law says how many bytes of the source text stand behind
each code point it writes; over a whole text they add up to the text's length in UTF-8.
"""

from importlib import import_module
from typing import cast

import numpy as np
import numpy.typing as npt

from underpar.errors import DataError
from underpar.recipe import nearest
from underpar.seams import TextTransform

# Modules by name, imported when used: a bundle carries the transform of its recipe and no other.
TRANSFORMS = {
    "caseops": "underpar.data.transforms.caseops",
    "caseops_before": "underpar.data.transforms.caseops_before",
    "caseops_pair": "underpar.data.transforms.caseops_pair",
}


class Identity:
    """The text as it is."""

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
    """Bytes of each code point in UTF-8; one for a byte escaped as U+DC80..U+DCFF."""
    points = code_points(text)
    lengths = 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000)
    # "surrogateescape" stands for bytes that are not UTF-8.
    return np.where((points >= 0xDC80) & (points <= 0xDCFF), 1, lengths).astype(np.int64)
