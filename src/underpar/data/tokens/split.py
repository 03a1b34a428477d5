"""Where a text may be cut into words without changing one id, and the words as table keys.

A cut is safe before a space (or a newline) when no piece of the tokenizer holds one after its
first character. Keys are cheap to make with str.split: a word that followed a space has lost it,
one that begins with a newline is itself, and a document's first word has a space put before it.
"""

import re
from dataclasses import dataclass

# A normalizer that cleans up whitespace can be given words alone only where the characters at
# their edges are neither removed nor taken for spaces; other words stay with their neighbors.
_SAFE = "!-~\u00c0-\u024f\u2013\u2014\u2018\u2019\u201c\u201d\u2022\u2026"
_CLEANED_CUT = re.compile(f"(?<=[{_SAFE}]) (?=[{_SAFE}])")
_CLEANED_LINE_CUT = re.compile(f"(?<=[{_SAFE}])(?: (?=[{_SAFE}])|(?=\n[{_SAFE}]))")
_LINE_CUT = re.compile("(?=\n)")


@dataclass(frozen=True)
class Splitter:
    """Cuts at spaces, at newlines, or with care because whitespace is cleaned up."""

    at_spaces: bool
    at_lines: bool
    cleaned: bool

    def keys(self, text: str) -> list[str]:
        """The words of a text as keys, in order."""
        if self.cleaned and self.at_spaces:
            keys = (_CLEANED_LINE_CUT if self.at_lines else _CLEANED_CUT).split(text)
        elif self.at_spaces and self.at_lines:
            # Every newline gets a cut of its own, so no word that followed a space begins with it.
            keys = text.replace("\n", " \n").split(" ")
        elif self.at_spaces:
            keys = text.split(" ")
        elif self.at_lines and not self.cleaned:
            keys = _LINE_CUT.split(text)
        else:
            keys = [text]
        keys[0] = " " + keys[0]
        return keys

    def is_first(self, key: str) -> bool:
        """Whether the word begins its document."""
        return key.startswith(" ")

    def word(self, key: str) -> str:
        """The text of a word; those of a document's keys join to the document."""
        if self.is_first(key):
            return key[1:]
        if self.at_lines and key.startswith("\n"):
            return key
        return " " + key


def splitter_for(pieces: list[bytes], lossless: bool) -> Splitter:
    """The finest safe cuts for a tokenizer with these pieces, a space being b" "."""
    return Splitter(
        at_spaces=not any(b" " in piece[1:] for piece in pieces),
        at_lines=not any(b"\n" in piece[1:] for piece in pieces),
        cleaned=not lossless,
    )
