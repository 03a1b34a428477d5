"""CaseOps with the operator before the space, so that words keep their space-prefixed pieces.

` The` becomes `T the`: the operator, then the same piece " the" that lower-case text uses. CaseOps
writes ` Tthe`, which strands the space and needs a second piece for every word.

Source: proposed after PR 2109, whose fusion saves as many tokens but keeps two pieces a word; not
published before. Legal: a bijection of the text like CaseOps; operators count as 0 bytes. Measured:
1.5288 to 1.5078 BPB on 118 MB of web text (a stack without model levers, 120 s on one H200, one
seed).
"""

import re
from dataclasses import dataclass

from underpar.data.transforms.caseops import ALL_CAPS, ESCAPE, TITLE, CaseOps
from underpar.recipe import ModelSpec

STAGE = "data"

_BEFORE_SPACE = re.compile(f"(?P<literal>{ESCAPE}.)|(?P<operator>[{TITLE}{ALL_CAPS}]) ", re.DOTALL)


@dataclass(frozen=True)
class Settings:
    """Nothing to set."""


class CaseOpsBefore(CaseOps):
    """CaseOps, operators moved before the space."""

    def forward(self, text: str) -> str:
        """Lower-case text, each operator before the space of its word."""
        written = super().forward(text)
        if written is text:
            return text
        for operator in (TITLE, ALL_CAPS):
            written = written.replace(" " + operator, operator + " ")
        return written

    def inverse(self, text: str) -> str:
        """The text that `forward` was given."""
        return super().inverse(_BEFORE_SPACE.sub(_move_back, text))


def _move_back(match: re.Match[str]) -> str:
    return match["literal"] or " " + match["operator"]


TRANSFORM = CaseOpsBefore()


def plug(settings: Settings, spec: ModelSpec) -> CaseOpsBefore:
    """The transform for the tokenizer."""
    return TRANSFORM
