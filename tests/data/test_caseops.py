"""CaseOps against a plain reading of its grammar: every case shape, every character, refusals."""

import re
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trained import any_text, lossless
from underpar.data.transforms import open_transform, utf8_lengths
from underpar.data.transforms.caseops import ALL_CAPS, ESCAPE, NEXT, SYMBOLS, TITLE
from underpar.data.transforms.caseops_pair import SPACE_ALL_CAPS, SPACE_TITLE
from underpar.errors import DataError
from underpar.seams import TextTransform

CASEOPS = open_transform("caseops")
PAIR = open_transform("caseops_pair")
BEFORE = open_transform("caseops_before")

T, K, N, E = TITLE, ALL_CAPS, NEXT, ESCAPE
EXAMPLES = [
    ("The NASA Launch", f"{T}the {K}nasa {T}launch"),
    ("I am", f"{T}i am"),
    ("iPhone", f"i{N}phone"),
    ("McDonald's eBay", f"{T}mc{N}donald's e{N}bay"),
    ("OpenAI", f"{T}open{N}a{N}i"),
    ("USAs", f"{T}u{N}s{N}as"),
    ("DON'T", f"{K}don'{T}t"),
    ("H2O", f"{T}h2{T}o"),
    ("X-Ray", f"{T}x-{T}ray"),
    ("N\u00c9E", f"{T}n\u00c9{T}e"),
    ("\u00dcnited STATES", f"\u00dcnited {K}states"),
    ("\ue001x", f"{E}\ue001x"),
    ("A\ue004B", f"{T}a{E}\ue004{T}b"),
    ("a\n\nb", "a\n\nb"),
    ("\u00bd cup", "\u00bd cup"),
]


def is_letter(char: str) -> bool:
    return char.isascii() and char.isalpha()


def forward_plainly(text: str) -> str:
    """The forward map, item by item, as its grammar says."""
    out, at = [], 0
    while at < len(text):
        end = at
        while end < len(text) and is_letter(text[end]):
            end += 1
        word = text[at:end]
        if not word:
            out.append(E * (text[at] in SYMBOLS) + text[at])
            end = at + 1
        elif len(word) >= 2 and all("A" <= c <= "Z" for c in word):
            out.append(K + word.lower())
        else:
            for index, char in enumerate(word):
                operator = N if index else T
                out.append(operator * ("A" <= char <= "Z") + char.lower())
        at = end
    return "".join(out)


def inverse_plainly(text: str) -> str:
    """The inverse map as a machine of five states, one code point at a time."""
    out = []
    mode = ""
    escaped = run = upper_next = in_word = False
    for char in text:
        if escaped:
            out.append(char)
            escaped, in_word, run = False, is_letter(char), run and is_letter(char)
        elif char == E:
            # The published decoder lets N wait over an escape, which no encoder writes.
            refuse_if(mode != "" or upper_next)
            escaped = True
        elif char in T + K:
            refuse_if(mode != "" or in_word or upper_next)
            mode = char
        elif char == N:
            refuse_if(upper_next)
            upper_next = True
        elif is_letter(char):
            refuse_if(in_word and mode != "")
            run = run or mode == K
            out.append(char.upper() if mode or upper_next or run else char)
            mode, upper_next, in_word = "", False, True
        else:
            refuse_if(mode != "" or upper_next)
            out.append(char)
            in_word = run = False
    refuse_if(escaped or mode != "" or upper_next)
    return "".join(out)


def refuse_if(wrong: bool) -> None:
    if wrong:
        raise DataError("refused")


def accepted(inverse: Callable[[str], str], written: str) -> str | None:
    try:
        return inverse(written)
    except DataError:
        return None


def count_operators(text: str) -> int:
    """How many operators the grammar says a text needs, escapes among them."""
    count = sum(char in SYMBOLS for char in text)
    for word in re.findall("[A-Za-z]+", text):
        num_capitals = sum("A" <= char <= "Z" for char in word)
        is_run = num_capitals == len(word) > 1
        count += 1 if is_run else num_capitals
    return count


@pytest.mark.parametrize(("text", "written"), EXAMPLES)
def test_worked_examples(text: str, written: str) -> None:
    assert CASEOPS.forward(text) == written
    assert CASEOPS.inverse(written) == text
    assert CASEOPS.source_bytes(written).sum() == len(text.encode())


@pytest.mark.parametrize("text", [text for text, _ in EXAMPLES])
def test_worked_examples_through_a_tokenizer(text: str) -> None:
    pieces = lossless("caseops").encode_texts([text])
    assert pieces.source_bytes.sum() == len(text.encode())
    assert lossless("caseops").decode(pieces.tokens) == text.encode()


def test_every_case_shape_of_a_word() -> None:
    around = [("", ""), (" ", " "), ("1", "2"), ("\u00c9", "\u0301"), ("'", "\n"), (T, E)]
    for length in range(1, 7):
        for capitals in product((False, True), repeat=length):
            pairs = zip("qwxjzk", capitals, strict=False)
            word = "".join(c.upper() if is_capital else c for c, is_capital in pairs)
            for before, after in around:
                text = before + word + after
                written = CASEOPS.forward(text)
                assert written == forward_plainly(text)
                assert CASEOPS.inverse(written) == inverse_plainly(written) == text


@pytest.mark.parametrize("transform", [CASEOPS, PAIR, BEFORE], ids=["caseops", "pair", "before"])
def test_every_character_comes_back(transform: TextTransform) -> None:
    points = [*range(0xD800), *range(0xDC80, 0xDD00), *range(0xE000, 0x110000)]
    text = " A".join("".join(map(chr, points[i : i + 100])) for i in range(0, len(points), 100))
    written = transform.forward(text)
    assert transform.inverse(written) == text
    assert transform.source_bytes(written).sum() == len(text.encode("utf-8", "surrogateescape"))


@settings(deadline=None, max_examples=200)
@given(any_text)
def test_random_text_follows_the_grammar(text: str) -> None:
    written = CASEOPS.forward(text)
    assert written == forward_plainly(text)
    assert not re.search("[A-Z]", written)
    assert CASEOPS.inverse(written) == inverse_plainly(written) == text
    # What the encoder gives is the one spelling that it gives.
    assert CASEOPS.forward(CASEOPS.inverse(written)) == written
    is_operator = (CASEOPS.source_bytes(written) == 0).sum()
    assert is_operator == count_operators(text)


@settings(deadline=None, max_examples=200)
@given(any_text, any_text)
def test_texts_join_unless_two_letters_meet(left: str, right: str) -> None:
    joined = CASEOPS.forward(left) + CASEOPS.forward(right)
    letters_meet = is_letter(left[-1:]) and is_letter(right[:1])
    assert CASEOPS.forward(left + right) == joined or letters_meet


@settings(deadline=None, max_examples=1000)
@given(st.lists(st.sampled_from([T, K, N, E + T, E + E, "a", "b", " ", "A", "1"])).map("".join))
def test_the_decoder_refuses_and_reads_by_the_rules(written: str) -> None:
    assert accepted(CASEOPS.inverse, written) == accepted(inverse_plainly, written)


@pytest.mark.parametrize("written", [T, K, N, E, f"a{T}", f"a {K}", f"b{N}", f"c {E}"])
def test_a_dangling_operator_is_refused(written: str) -> None:
    for transform in (CASEOPS, PAIR, BEFORE):
        with pytest.raises(DataError, match=r"case operator U\+E00\d at character \d"):
            transform.inverse(written)


@pytest.mark.parametrize(
    ("written", "place"),
    [
        (f"{K}1", "U+E002 at character 1 "),
        (f"{T} a", "U+E001 at character 1 "),
        (f"a{T}b", "U+E001 at character 2 "),
        (f"ab{K}cd", "U+E002 at character 3 "),
        (f"a{N}{N}b", "U+E003 at character 2 "),
        (f"{T}{T}a", "U+E001 at character 1 "),
        (f"{T}{K}a", "U+E001 at character 1 "),
        (f"{N}{T}a", "U+E003 at character 1 "),
        (f"{N}1", "U+E003 at character 1 "),
        (f"x {T}{E}{T}", "U+E001 at character 3 "),
        (f"{E}a{T}b", "U+E001 at character 3 "),
        (f"{T}\u00c9", "U+E001 at character 1 "),
    ],
)
def test_a_misplaced_operator_is_refused(written: str, place: str) -> None:
    with pytest.raises(DataError, match=re.escape(place)):
        CASEOPS.inverse(written)


def test_source_bytes_of_single_characters() -> None:
    written = f"{T}a{E}{T}{E}{E}{E}\ue003\u00e9{N}b"
    assert CASEOPS.source_bytes(written).tolist() == [0, 1, 0, 3, 0, 3, 0, 3, 2, 0, 1]
    # Not operators here, so text like any other.
    assert CASEOPS.source_bytes("\ue000\ue005\ue006").tolist() == [3, 3, 3]
    assert CASEOPS.source_bytes("").tolist() == []
    assert PAIR.source_bytes(f"{SPACE_TITLE}a{E}{SPACE_TITLE}{SPACE_ALL_CAPS}").tolist() == [
        1,
        1,
        0,
        3,
        1,
    ]


def test_utf8_lengths() -> None:
    text = "a\x7f\x80\u07ff\u0800\uffff\U00010000\U0010ffff\udc80\udcff"
    assert utf8_lengths(text).tolist() == [1, 1, 2, 2, 3, 3, 4, 4, 1, 1]


@pytest.mark.parametrize(
    ("text", "written"),
    [
        (" The", f"{SPACE_TITLE}the"),
        ("The NASA Launch", f"{T}the{SPACE_ALL_CAPS}nasa{SPACE_TITLE}launch"),
        ("a  The", f"a {SPACE_TITLE}the"),
        ("\nThe X-Ray", f"\n{T}the{SPACE_TITLE}x-{T}ray"),
        (f"a {SPACE_TITLE}", f"a {E}{SPACE_TITLE}"),
        (f" {T}A", f" {E}{T}{T}a"),
        ("iPhone", f"i{N}phone"),
    ],
)
def test_pairs_are_fused(text: str, written: str) -> None:
    assert PAIR.forward(text) == written
    assert PAIR.inverse(written) == text
    assert PAIR.source_bytes(written).sum() == len(text.encode())


@pytest.mark.parametrize(
    ("text", "written"),
    [
        (" The", f"{T} the"),
        ("The NASA Launch", f"{T}the{K} nasa{T} launch"),
        ("a  The", f"a {T} the"),
        ("\nThe X-Ray", f"\n{T}the{T} x-{T}ray"),
        (f"{T} The", f"{E}{T}{T} the"),
        (f" {T}A", f" {E}{T}{T}a"),
        ("iPhone", f"i{N}phone"),
    ],
)
def test_operators_move_before_the_space(text: str, written: str) -> None:
    assert BEFORE.forward(text) == written
    assert BEFORE.inverse(written) == text
    assert BEFORE.source_bytes(written).sum() == len(text.encode())


@pytest.mark.parametrize("name", ["caseops", "caseops_before", "caseops_pair"])
def test_the_table_of_bytes(name: str) -> None:
    tokenizer = lossless(name)
    of_symbol = [
        1 if symbol in SPACE_TITLE + SPACE_ALL_CAPS else 0 for symbol in tokenizer.transform.symbols
    ]
    assert tokenizer.token_bytes[:4].tolist() == [0] * 4
    assert tokenizer.token_bytes[4 : 4 + len(of_symbol)].tolist() == of_symbol
    assert (tokenizer.token_bytes[4 + len(of_symbol) :] > 0).all()
    # Where nothing is escaped, the table and the ledger agree on every text.
    text = "The NASA iPhone of McDonald's,\n\nN\u00c9E \U0001f600"
    tokens = tokenizer.encode_texts([text]).tokens
    assert tokenizer.token_bytes[tokens].sum() == len(text.encode())
    assert tokenizer.token_bytes.dtype == np.int32
