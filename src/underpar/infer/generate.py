"""Write text: sample one token after another until the document ends or the limit is reached."""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from underpar.data.tokens.tokenizer import Tokenizer
from underpar.errors import DataError, UnderparError
from underpar.infer.predictor import Predictor


@dataclass(frozen=True)
class Sampling:
    """How each token is drawn, and where the text ends besides the end of a document.

    Temperature 0 takes the likeliest token. Of the other tokens only the `top_k` likeliest stay (0:
    all), and of these the likeliest that hold the probability `top_p`. The text ends before the
    first of the texts `stop`.
    """

    max_tokens: int = 200
    temperature: float = 0.8
    top_p: float = 0.95
    seed: int = 0
    top_k: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 0:
            raise UnderparError(f"max_tokens = {self.max_tokens}: expected 0 or more")
        if not 0 <= self.temperature < math.inf:
            raise UnderparError(f"temperature = {self.temperature}: expected 0 or more")
        if not 0 <= self.seed < 1 << 63:
            raise UnderparError(f"seed = {self.seed}: expected 0 to 2^63 - 1")
        if not 0 < self.top_p <= 1:
            raise UnderparError(f"top_p = {self.top_p}: expected above 0 and at most 1")
        if self.top_k < 0:
            raise UnderparError(f"top_k = {self.top_k}: expected 0 or more; 0 keeps all tokens")
        if "" in self.stop:
            raise UnderparError("stop = '': expected a text of at least one character")


def choose(log_probs: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token from log-probabilities (V,), by nucleus sampling (arXiv:1904.09751)."""
    if sampling.temperature == 0:
        return int(log_probs.argmax())
    # float64: a tiny temperature must not overflow.
    ordered, tokens = (log_probs.cpu().double() / sampling.temperature).sort(descending=True)
    ordered = ordered[: sampling.top_k or None].softmax(-1)
    # A token stays if the tokens before it hold less than top_p; the first token always stays.
    kept = ordered * (ordered.cumsum(-1) - ordered < sampling.top_p)
    return int(tokens[torch.multinomial(kept, 1, generator=generator)])


def generate(
    predictor: Predictor, tokenizer: Tokenizer, prompt: str, sampling: Sampling
) -> Iterator[str]:
    """Yield the text after `prompt` in parts, up to the end of the document or of `sampling`."""
    return _until(sampling.stop, _pieces(predictor, tokenizer, prompt, sampling))


def _until(stops: Sequence[str], pieces: Iterable[str]) -> Iterator[str]:
    """The text before the first of `stops`. What may be the beginning of one has to wait."""
    waiting = ""
    for piece in pieces:
        waiting += piece
        ready = len(waiting) - max((_overlap(waiting, stop) for stop in stops), default=0)
        end = _first(waiting, stops)
        # One that began before the one that is found may still come to its end.
        if end is not None and end <= ready:
            yield waiting[:end]
            return
        yield waiting[:ready]
        waiting = waiting[ready:]
    yield waiting[: _first(waiting, stops)]


def _first(text: str, stops: Sequence[str]) -> int | None:
    """Where the first of `stops` begins in `text`, if one is in it."""
    return min((text.index(stop) for stop in stops if stop in text), default=None)


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that `stop` begins with."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)


def _pieces(
    predictor: Predictor, tokenizer: Tokenizer, prompt: str, sampling: Sampling
) -> Iterator[str]:
    try:
        raw = prompt.encode()
    except UnicodeEncodeError as error:
        raise UnderparError(f"prompt has a lone surrogate at character {error.start}") from error
    generator = torch.Generator().manual_seed(sampling.seed)
    reader = LaneReader(predictor, [tokenizer.bos_id, *tokenizer.encode(raw).tolist()])
    writer = TextWriter(tokenizer)
    for _ in range(sampling.max_tokens):
        token = choose(reader.log_probs, sampling, generator)
        if token == tokenizer.bos_id:
            break
        yield writer.write(token)
        reader.read(token)
    yield writer.finish()


class TextWriter:
    """Turns tokens into text as they come; with a text transform, word by word."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._transform = tokenizer.transform
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._waiting = ""
        symbols = self._transform.symbols
        self._symbol = re.compile(f"[{symbols}]") if symbols else None
        # Text before an operator, or before a space that follows no operator, is final.
        self._cut = re.compile(f"(?<![{symbols}])(?=[ \n{symbols}])") if symbols else None

    def write(self, token: int) -> str:
        """The text that is final after one more token."""
        self._waiting += self._utf8.decode(self._tokenizer.written([token]))
        if self._cut is None:
            end = len(self._waiting)
        else:
            end = max((match.start() for match in self._cut.finditer(self._waiting)), default=0)
        text, self._waiting = self._waiting[:end], self._waiting[end:]
        return self._read(text)

    def finish(self) -> str:
        """The rest of the text."""
        text, self._waiting = self._waiting + self._utf8.decode(b"", final=True), ""
        return self._read(text)

    def _read(self, written: str) -> str:
        try:
            return self._transform.inverse(written)
        except DataError:
            # The model may write operators that no text has; show the words without them.
            assert self._symbol is not None
            return self._symbol.sub("", written)


class LaneReader:
    """One lane that has read `tokens`; when its context is full, it reads the last half again."""

    def __init__(self, predictor: Predictor, tokens: list[int]) -> None:
        self._stepper = predictor.stepper(1)
        self._device, self._context = predictor.device, predictor.context
        self._tokens = tokens
        self._fed = 0
        self._restart()

    def read(self, token: int) -> None:
        """Append `token`."""
        self._tokens.append(token)
        if self._fed == self._context:
            self._restart()
        else:
            self._feed(token)

    def _restart(self) -> None:
        keep = self._context // 2
        # The token before that half comes first, so that levers that look one token back see it.
        for token in self._tokens[-keep - 1 : -keep]:
            self._feed(token)
        self._stepper.reset(torch.ones(1, dtype=torch.bool, device=self._device))
        self._fed = 0
        for token in self._tokens[-keep:]:
            self._feed(token)

    def _feed(self, token: int) -> None:
        self.log_probs = self._stepper.step(torch.tensor([token], device=self._device))[0]
        self._fed += 1
