"""How surprising a text was to a model: its characters with their bits, in levels of color."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from underpar import __version__
from underpar.report.templates import fill

# Surprise in bits, from which the next color begins.
LEVELS = (1.0, 3.0, 6.0, 10.0)

# Characters and their bits.
Piece = tuple[str, float]


def characters(spans: Sequence[bytes], bits: Sequence[float]) -> Iterator[Piece]:
    """The characters of a text with their bits; tokens that share a character come together.

    `spans` are the bytes of each token.
    """
    waiting, cost = b"", 0.0
    for span, price_of_token in zip(spans, bits, strict=False):
        waiting, cost = waiting + span, cost + float(price_of_token)
        try:
            text = waiting.decode()
        except UnicodeDecodeError:
            continue
        # An operator of a text transform stands for no character: the next one pays for it.
        if text:
            yield text, cost
            waiting, cost = b"", 0.0
    if waiting:
        yield waiting.decode(errors="replace"), cost


def levels_of(pieces: Sequence[Piece]) -> list[tuple[int, str]]:
    """The text in runs of one level of surprise, 0 to len(LEVELS)."""
    runs: list[tuple[int, str]] = []
    for text, bits in pieces:
        level = sum(bits >= bound for bound in LEVELS)
        if runs and runs[-1][0] == level:
            runs[-1] = (level, runs[-1][1] + text)
        else:
            runs.append((level, text))
    return runs


def legend() -> list[tuple[int, str]]:
    """Each level and its name."""
    names = [f"below {LEVELS[0]:g} bit"]
    names += [f"{level:g} bit{'s' if level > 1 else ''} or more" for level in LEVELS]
    return list(enumerate(names))


def page_of(sentence: str, rows: Sequence[tuple[str, str]], pieces: Sequence[Piece]) -> str:
    """A text as an HTML page that needs no other file."""
    return fill(
        "inspect.html.j2",
        sentence=sentence,
        rows=rows,
        runs=levels_of(pieces),
        legend=legend(),
        version=__version__,
    )
