"""Small tokenizers that many tests share, each trained once, and text to try them on."""

import io
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import strategies as st

from underpar.data.sources.corpus import demo_corpus, read_documents
from underpar.data.tokens.byte260 import CONTENT
from underpar.data.tokens.tokenizer import SentencePieceTokenizer, Tokenizer, open_tokenizer
from underpar.data.tokens.train_bpe import train_tokenizer
from underpar.data.transforms import IDENTITY, TRANSFORMS, open_transform

VOCAB_SIZE = 500
TRANSFORM_NAMES = [IDENTITY, *TRANSFORMS]
# Where users who have them put the published files; git ignores it.
PUBLISHED = Path(__file__).parents[1] / "published"

OPERATORS = [chr(point) for point in range(0xE000, 0xE007)]
WORDS = ["The", "NASA", "iPhone", "McDonald's", "USAs", "DON'T", "I", "H2O", "the one", "1234"]
SPACES = [" ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000", "\u2028", "\u200b"]
ODD = ["\u2581", "\u2585", "\x00", "\x01", "\x7f", "\ufeff", "\u0301", "\u00bd", "\ufb01", "\u2047"]
LETTERS = ["\u00c9", "\u00e9", "\u0130", "\u00df", "\uff21", "\u03a9", "\U0001f600", "a", "B", "z"]

# All planes, with the characters that could go wrong far more often than by chance.
any_text = st.lists(
    st.one_of(
        st.text(max_size=5), st.sampled_from(OPERATORS + WORDS + SPACES + ODD + LETTERS + [" A"])
    ),
    max_size=14,
).map("".join)
any_bytes = st.lists(st.one_of(st.binary(max_size=6), any_text.map(str.encode)), max_size=6).map(
    b"".join
)

# What a normalizer changes, among what it does not; operators and the space mark come seldom.
messy_text = st.lists(
    st.one_of(
        st.sampled_from([*"abzABZ019.,;-()'\"%", "the", "The", "NASA", " a", " I", " (b"]),
        st.sampled_from([" ", " ", " ", *SPACES, "\u00ad", "\u2060"]),
        st.sampled_from([*ODD, *LETTERS, "\u2026", "\u201c", "\u2019", "\u00b2", "\u0308"]),
        st.sampled_from(["a", " ", *OPERATORS]),
    ),
    max_size=24,
).map("".join)


@cache
def demo_texts() -> list[str]:
    """The first sixty documents of the demo corpus."""
    documents = read_documents([demo_corpus()])
    return [next(documents).text for _ in range(60)]


def demo_lines() -> list[str]:
    """Their lines: the trainer leaves out whole documents, which are too long for it."""
    return [line for text in demo_texts() for line in text.split("\n")]


@cache
def lossless(transform: str = IDENTITY, cross_words: bool = False) -> SentencePieceTokenizer:
    """A tokenizer of this project."""
    content = train_tokenizer(demo_texts(), VOCAB_SIZE, transform, cross_words)
    return SentencePieceTokenizer(content, transform)


@cache
def byte_tokenizer() -> Tokenizer:
    """Bytes as tokens."""
    return open_tokenizer(CONTENT)


@cache
def lossy(transform: str = IDENTITY, add_dummy_prefix: bool = False) -> SentencePieceTokenizer:
    """A tokenizer with the published options, among them a normalizer that changes text."""
    change = open_transform(transform)
    options: dict[str, Any] = {
        "normalization_rule_name": "nmt_nfkc",
        "remove_extra_whitespaces": True,
        "add_dummy_prefix": add_dummy_prefix,
    }
    if change.symbols:
        options["user_defined_symbols"] = list(change.symbols)
    content = train_with([change.forward(line) for line in demo_lines()], **options)
    return SentencePieceTokenizer(content, transform)


def train_with(sentences: list[str], **options: Any) -> bytes:
    """A SentencePiece model with options of one's own; without any it is lossless."""
    writer = io.BytesIO()
    ours: dict[str, Any] = {
        "model_type": "bpe",
        "vocab_size": VOCAB_SIZE,
        "normalization_rule_name": "identity",
        "byte_fallback": True,
        "split_digits": True,
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "character_coverage": 0.999,
        "pad_id": 0,
        "bos_id": 1,
        "eos_id": 2,
        "unk_id": 3,
        "hard_vocab_limit": False,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=writer, **(ours | options)
    )
    return writer.getvalue()


def model_of(tokenizer: SentencePieceTokenizer) -> sentencepiece.SentencePieceProcessor:
    """The model alone, without anything that this project puts around it."""
    return sentencepiece.SentencePieceProcessor(model_proto=tokenizer.content)


def own_ids(tokenizer: SentencePieceTokenizer, texts: list[str]) -> list[int]:
    """The model's ids of whole texts, BOS before each, with nothing of this project around it."""
    written = [tokenizer.transform.forward(text) for text in texts]
    return [id_ for ids in model_of(tokenizer).encode(written) for id_ in (1, *ids)]


def published(name: str) -> Path:
    """A published file; those who select the mark `fineweb` must have it."""
    path = PUBLISHED / name
    if not path.exists():
        pytest.fail(f"{path} is missing: put the published file there, or leave out -m fineweb")
    return path
