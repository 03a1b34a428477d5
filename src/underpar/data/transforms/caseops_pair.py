"""CaseOps with the operator and the space before it fused into one code point.

` The` becomes `Sthe`, S being "space, then T" as one token, where CaseOps spends a token of its own
on the stranded space: more than half of the 18 % that it makes a stream longer.

Source: PR 2109 (marker-pair fusion): 8.5 % fewer tokens, -2.5 mBPB against PR 1855 (not matched).
Legal: a bijection of the text like CaseOps; a fused operator counts as 1 byte, that of its space.
Measured: 1.5288 to 1.5067 BPB on 118 MB of web text (a stack without model levers, 120 s on one
H200, one seed).
"""

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from underpar.data.transforms import code_points
from underpar.data.transforms.caseops import ALL_CAPS, ESCAPE, SYMBOLS, TITLE, CaseOps
from underpar.recipe import ModelSpec

STAGE = "data"

SPACE_TITLE, SPACE_ALL_CAPS = "\ue005", "\ue006"
_FUSED = {SPACE_TITLE: " " + TITLE, SPACE_ALL_CAPS: " " + ALL_CAPS}
_WRITTEN = re.compile(f"{ESCAPE}.|[{SPACE_TITLE}{SPACE_ALL_CAPS}]", re.DOTALL)


@dataclass(frozen=True)
class Settings:
    """Nothing to set."""


class CaseOpsPair(CaseOps):
    """CaseOps over six symbols, spaces fused."""

    def __init__(self) -> None:
        super().__init__(SYMBOLS + SPACE_TITLE + SPACE_ALL_CAPS)

    def forward(self, text: str) -> str:
        """Lower-case text with operators, fused where a space comes before one."""
        written = super().forward(text)
        if written is text:
            return text
        for fused, pair in _FUSED.items():
            written = written.replace(pair, fused)
        return written

    def inverse(self, text: str) -> str:
        """The text that `forward` was given."""
        return super().inverse(_WRITTEN.sub(lambda m: _FUSED.get(m.group(), m.group()), text))

    def source_bytes(self, text: str) -> npt.NDArray[np.int64]:
        """As in CaseOps, with 1 byte for the space in a fused operator."""
        source_bytes = super().source_bytes(text)
        # An escaped literal already has its own three bytes.
        is_fused = (code_points(text) >= ord(SPACE_TITLE)) & (source_bytes == 0)
        return np.where(is_fused & (code_points(text) <= ord(SPACE_ALL_CAPS)), 1, source_bytes)


TRANSFORM = CaseOpsPair()


def plug(settings: Settings, spec: ModelSpec) -> CaseOpsPair:
    """The transform for the tokenizer."""
    return TRANSFORM
