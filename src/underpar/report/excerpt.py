"""What the page shows of texts: names of documents, a priced excerpt, a text by the model.

The artifact of the run is opened and computes on the CPU for some seconds. If the artifact or the
data cannot be used, the page says why, and shows the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from underpar.artifact.unpack import Artifact
from underpar.build.artifact import build_tokenizer, read_artifact, require_same_tokenizer
from underpar.build.model import build_predictor
from underpar.build.scoring import ScoringRequest, open_method, run_method
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime
from underpar.data.folder import DataFolder, data_identity, load_data
from underpar.data.texts import shard_of, tokens_and_spans
from underpar.data.tokens.tokenizer import Tokenizer
from underpar.errors import DataError, UnderparError
from underpar.infer.generate import Sampling, generate
from underpar.infer.predictor import Predictor
from underpar.report.facts import RunReport, ScoreResult
from underpar.report.surprise import Piece, characters, levels_of
from underpar.score.method import PLAIN

# Sizes that a page and a slow CPU can take.
EXCERPT_BYTES, SAMPLE_TOKENS, PROMPT_WORDS = 1200, 80, 5
NAME_TOKENS, NAME_CHARACTERS = 32, 44
# Tokens that are taken away until a text transform can be undone.
MOST_OPERATORS = 8
# A document with fewer bytes is not chosen for the excerpt.
FEWEST_BYTES = 300


@dataclass(frozen=True)
class Excerpt:
    """The beginning of a held-out document: texts with their bits; then what the model makes of it.

    The sample continues the prompt, which are the first words of the document.
    """

    document: int
    pieces: tuple[Piece, ...]
    prompt: str
    sample: str

    @property
    def levels(self) -> list[tuple[int, str]]:
        """The text in runs of one level of surprise."""
        return levels_of(self.pieces)

    @property
    def bits(self) -> float:
        """Bits of the excerpt."""
        return sum(bits for _, bits in self.pieces)


@dataclass(frozen=True)
class Texts:
    """Names of held-out documents by number, and an excerpt; or why there is none."""

    names: dict[int, str] = field(default_factory=dict)
    excerpt: Excerpt | None = None
    why_not: str = ""


def read_texts(folder: RunFolder, run: RunReport) -> Texts:
    """The texts of a run that was scored."""
    if not run.scores:
        return Texts()
    result = next(iter(run.scores.values()))
    try:
        data = _open_data(run, result)
    except UnderparError as error:
        return Texts(why_not=str(error))
    numbers = sorted({e.document for r in run.scores.values() for e in r.score.entries})
    names = {n: first_words(data, n) for n in numbers if n < data.val.num_documents}
    try:
        return Texts(names, _open_excerpt(folder, data, result))
    except UnderparError as error:
        return Texts(names, why_not=str(error))


def _open_data(run: RunReport, result: ScoreResult) -> DataFolder:
    path = dict(run.about).get("data", "")
    if not path or not Path(path).is_dir():
        raise DataError(f"the data folder {path or 'of the run'} is not here")
    data = load_data(Path(path))
    if data_identity(data) != result.data_identity:
        raise DataError(f"the data folder {path} holds other data than were scored")
    return data


def first_words(data: DataFolder, document: int) -> str:
    """The beginning of a held-out document, on one line; empty if it cannot be read."""
    line = " ".join(_opening(data, document).decode(errors="ignore").split())
    if len(line) <= NAME_CHARACTERS:
        return line
    return f"{line[:NAME_CHARACTERS].rpartition(' ')[0] or line[:NAME_CHARACTERS]}\u2026"


def _opening(data: DataFolder, document: int) -> bytes:
    """The bytes of the first tokens. A text transform may not be undone in the middle of a word."""
    for num_tokens in range(NAME_TOKENS, NAME_TOKENS - MOST_OPERATORS, -1):
        try:
            return data.tokenizer.decode(data.val.doc(document)[:num_tokens])
        except UnderparError:
            continue
    return b""


def _open_excerpt(folder: RunFolder, data: DataFolder, result: ScoreResult) -> Excerpt:
    artifact, identity = read_artifact(folder.need(folder.artifact_file))
    if identity != result.artifact_sha256:
        raise DataError("the score is of another artifact")
    require_same_tokenizer(artifact, data.tokenizer)
    document = typical_document(result, data.val.num_documents)
    raw = beginning(data.tokenizer.decode(data.val.doc(document)), EXCERPT_BYTES)
    tokenizer, runtime = build_tokenizer(artifact), Runtime(torch.device("cpu"))
    predictor = build_predictor(artifact, runtime.device)
    pieces = tuple(price(artifact, predictor, tokenizer, raw, runtime))
    prompt = " ".join(raw.decode(errors="ignore").split()[:PROMPT_WORDS])
    sample = generate(predictor, tokenizer, prompt, Sampling(max_tokens=SAMPLE_TOKENS))
    return Excerpt(document, pieces, prompt, "".join(sample))


def typical_document(result: ScoreResult, num_documents: int) -> int:
    """The document with the median of bits per byte, among those of some length."""
    priced = [e for e in result.score.entries if e.num_bytes and e.document < num_documents]
    entries = [e for e in priced if e.num_bytes >= FEWEST_BYTES] or priced
    if not entries:
        raise DataError("no held-out document has any text")
    entries.sort(key=lambda e: e.bits / e.num_bytes)
    return entries[len(entries) // 2].document


def beginning(raw: bytes, num_bytes: int) -> bytes:
    """At most `num_bytes` from the start of a text, up to the end of a word."""
    if len(raw) <= num_bytes:
        return raw
    cut = raw[:num_bytes].decode(errors="ignore")
    words = re.match(r".*\S(?=\s)", cut, re.DOTALL)
    return (words[0] if words else cut).encode()


def price(
    artifact: Artifact, predictor: Predictor, tokenizer: Tokenizer, raw: bytes, runtime: Runtime
) -> Iterator[Piece]:
    """The characters of a text with their bits."""
    nats: list[np.ndarray] = []
    method, recipe = open_method(artifact.recipe, PLAIN)
    artifact = replace(artifact, recipe=recipe)
    request = ScoringRequest(
        method,
        runtime,
        on_commit=lambda document, first, part: nats.append(part),
        open_predictor=lambda *_: predictor,
    )
    ids, spans = tokens_and_spans(raw, tokenizer)
    run_method(artifact, shard_of([raw], [np.array([tokenizer.bos_id, *ids[:-1]])]), request)
    yield from characters(spans, np.concatenate(nats) / np.log(2))
