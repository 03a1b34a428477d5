"""Cut a text into words without changing a token id, and represent words as table keys.

A cut before a space (or a newline) is safe if no piece of the tokenizer has a space (a newline)
after its first character. Keys come from str.split, which is fast:

    word of the document         key
    " word", after a space       "word": the space is dropped
    "\\nword", after a newline    "\\nword"
    first word of the document   a space is added before the word
"""

import re
from dataclasses import dataclass

# A normalizer that cleans up whitespace may change characters at the edges of a word. A cut is safe
# only between characters that no normalizer removes or turns into spaces.
_SAFE = "!-~\u00c0-\u024f\u2013\u2014\u2018\u2019\u201c\u201d\u2022\u2026"
_CLEANED_CUT = re.compile(f"(?<=[{_SAFE}]) (?=[{_SAFE}])")
_CLEANED_LINE_CUT = re.compile(f"(?<=[{_SAFE}])(?: (?=[{_SAFE}])|(?=\n[{_SAFE}]))")
_LINE_CUT = re.compile("(?=\n)")


@dataclass(frozen=True)
class Splitter:
    """Where to cut: at spaces, at newlines; `cleaned` if the tokenizer cleans up whitespace."""

    at_spaces: bool
    at_lines: bool
    cleaned: bool

    def keys(self, text: str) -> list[str]:
        """The words of a text as keys, in order."""
        if self.cleaned and self.at_spaces:
            keys = (_CLEANED_LINE_CUT if self.at_lines else _CLEANED_CUT).split(text)
        elif self.at_spaces and self.at_lines:
            # A space before each newline: the newline then begins a key of its own.
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
        """Whether the word is the first of its document."""
        return key.startswith(" ")

    def word(self, key: str) -> str:
        """The text of a word; the words of all keys of a document join to the document."""
        if self.is_first(key):
            return key[1:]
        if self.at_lines and key.startswith("\n"):
            return key
        return " " + key


def splitter_for(pieces: list[bytes], lossless: bool) -> Splitter:
    """The finest safe cuts for a tokenizer with these pieces (a space is b" ")."""
    return Splitter(
        at_spaces=not any(b" " in piece[1:] for piece in pieces),
        at_lines=not any(b"\n" in piece[1:] for piece in pieces),
        cleaned=not lossless,
    )
