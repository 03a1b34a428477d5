"""Write text: sample one token after another, as long as it pleases."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from underpar.data.tokenizer import Tokenizer
from underpar.errors import UnderparError
from underpar.infer.predictor import Predictor


@dataclass(frozen=True)
class Sampling:
    """How to choose: temperature 0 takes the likeliest token; top_p keeps the likeliest share."""

    max_tokens: int = 200
    temperature: float = 0.8
    top_p: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 0:
            raise UnderparError(f"max_tokens = {self.max_tokens}: expected 0 or more")
        if self.temperature < 0:
            raise UnderparError(f"temperature = {self.temperature}: expected 0 or more")
        if not 0 < self.top_p <= 1:
            raise UnderparError(f"top_p = {self.top_p}: expected above 0 and at most 1")


def choose(log_probs: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token from log-probabilities (V,); top_p is nucleus sampling (arXiv:1904.09751)."""
    if sampling.temperature == 0:
        return int(log_probs.argmax())
    probs = (log_probs / sampling.temperature).softmax(-1).cpu()
    ordered, tokens = probs.sort(descending=True)
    # A token stays when those before it hold less than top_p: the first always does.
    kept = ordered * (ordered.cumsum(-1) - ordered < sampling.top_p)
    return int(tokens[torch.multinomial(kept, 1, generator=generator)])


def generate(
    predictor: Predictor, tokenizer: Tokenizer, prompt: str, sampling: Sampling
) -> Iterator[str]:
    """Yield the text after `prompt` as it is written; ends with the document or at max_tokens."""
    generator = torch.Generator().manual_seed(sampling.seed)
    stepper = predictor.stepper(1)
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    tokens = [tokenizer.bos_id, *tokenizer.encode(prompt.encode()).tolist()]
    # A piece that fills up begins again: the last half of the context comes along.
    keep = predictor.context // 2
    fed = 0
    for token in tokens[-keep:]:
        log_probs = stepper.step(torch.tensor([token], device=predictor.device))
        fed += 1
    for _ in range(sampling.max_tokens):
        token = choose(log_probs[0], sampling, generator)
        if token == tokenizer.bos_id:
            break
        tokens.append(token)
        yield utf8.decode(tokenizer.decode([token]))
        if fed == predictor.context:
            stepper.reset(torch.ones(1, dtype=torch.bool, device=predictor.device))
            for old in tokens[-keep:-1]:
                stepper.step(torch.tensor([old], device=predictor.device))
            fed = keep - 1
        log_probs = stepper.step(torch.tensor([token], device=predictor.device))
        fed += 1
    yield utf8.decode(b"", final=True)
