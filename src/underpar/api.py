"""The Python interface: the stages as functions, and a model that scores, writes and compresses.

The functions call the same stages as the commands of the same names. They print a line every few
seconds while they work, unless `progress` is `core.progress.SILENT`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from underpar.artifact.budget import Budget
from underpar.artifact.unpack import Artifact
from underpar.audit.case import Limits
from underpar.audit.finding import STRICT
from underpar.build.adaptation import open_adaptation
from underpar.build.artifact import build_tokenizer, read_artifact
from underpar.build.exact import build_exact_predictor
from underpar.build.model import build_predictor
from underpar.build.recipe import load_checked, quant_part
from underpar.build.scoring import ScoringRequest, open_method, run_method
from underpar.codec.stream import Codec
from underpar.compile.startup import warm_compiler
from underpar.core.progress import LINES, SILENT, Progress
from underpar.core.run_folder import RunFolder, artifact_at
from underpar.core.runtime import Runtime, open_runtime
from underpar.data.batch import pack_documents
from underpar.data.folder import DataFolder, load_data
from underpar.data.shards import Shard
from underpar.data.texts import shard_of, tokens_and_spans
from underpar.data.tokens.tokenizer import Tokenizer
from underpar.errors import DataError, RuleError
from underpar.infer.generate import LaneReader, Sampling, generate
from underpar.infer.predictor import Predictor
from underpar.model.kv_cache import PackedCache
from underpar.recipe import Recipe
from underpar.report.build import build_report
from underpar.score.ledger import Score
from underpar.score.method import ADAPT, PLAIN, Method
from underpar.score.tally import OnCommit
from underpar.seams import Adapter
from underpar.stages import audit as audit_stage
from underpar.stages import data as data_stage
from underpar.stages import pack as pack_stage
from underpar.stages import score as score_stage
from underpar.stages import train as train_stage

Text = str | bytes
# A file or folder; a `TrainedRun` is one too.
PathLike = str | os.PathLike[str]
# Values of a recipe by their path: {"train.budget_seconds": 60}.
Changes = Mapping[str, object]
NO_CHANGES: Changes = {}


@dataclass(frozen=True)
class TrainedRun:
    """A run folder and what training measured. Functions take it in place of the folder's path.

    Bits per byte are those of held-out text before quantization, of the weights as they were last
    and averaged, if the recipe averages. `finished` is false if training was stopped: by the user,
    or because of what `stopped` says.
    """

    path: Path
    finished: bool
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float | None = None
    live_bpb: float | None = None
    average_bpb: float | None = None
    forecast_bytes: float | None = None
    stopped: str | None = None

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        known = [bpb for bpb in (self.average_bpb, self.live_bpb) if bpb is not None]
        result = f"{known[0]:.4f} bits per byte of held-out text" if known else "not finished"
        return f"TrainedRun({self.path}: {self.step:,} steps, {self.seconds:.0f} s, {result})"

    def metrics(self, *keys: str) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl that have all of `keys`, such as "step" and "loss"."""
        return list(RunFolder(self.path).metrics(*keys))


def build_data(
    texts: PathLike | Iterable[PathLike],
    out: PathLike,
    recipe: PathLike = "demo",
    *,
    set: Changes = NO_CHANGES,
    workers: int = 1,
    overwrite: bool = False,
    progress: Progress = LINES,
) -> DataFolder:
    """Text files or folders -> a data folder, for recipes with the same tokenizer and transform.

    More than one worker needs the `if __name__ == "__main__"` of multiprocessing in scripts.
    """
    options = data_stage.build_options(load_checked(os.fspath(recipe), _overrides(set)))
    inputs = [Path(p) for p in ([texts] if isinstance(texts, str | os.PathLike) else texts)]
    options = replace(options, workers=workers)
    data_stage.build_data_folder(inputs, Path(out), options, progress, overwrite)
    return load_data(Path(out))


def train(
    recipe: PathLike,
    data: PathLike,
    out: PathLike,
    *,
    set: Changes = NO_CHANGES,
    device: str = "auto",
    compiled: bool | None = None,
    progress: Progress = LINES,
) -> TrainedRun:
    """Train a recipe on a data folder into the run folder `out`; continues a run that is there."""
    runtime = open_runtime(device, compiled)
    warm_compiler(runtime)
    resolved = load_checked(os.fspath(recipe), _overrides(set))
    shown = progress if runtime.is_main else SILENT
    summary = train_stage.train(resolved, Path(data), RunFolder(Path(out)), runtime, shown)
    known = {field.name for field in fields(TrainedRun)} & summary.keys()
    return TrainedRun(Path(out), **{name: summary[name] for name in known})


def pack(
    run: PathLike,
    *,
    cap: int | None = None,
    set: Changes = NO_CHANGES,
    device: str = "auto",
    progress: Progress = LINES,
) -> Budget:
    """Quantize and code a run's weights into its model.upar, within the cap in bytes.

    `set` changes values of [quant], the only part of the recipe that training has not fixed.
    """
    folder = RunFolder(Path(run))
    part = quant_part(folder, _overrides(set))
    return pack_stage.pack(folder, open_runtime(device).for_float64, cap, part, progress)


def score(
    artifact: PathLike,
    data: PathLike,
    *,
    adapt: bool = False,
    levers: Sequence[str] = (),
    stride: int | None = None,
    flat: bool | None = None,
    order: str | None = None,
    seconds: float = 0.0,
    set: Changes = NO_CHANGES,
    device: str = "auto",
    progress: Progress = LINES,
) -> score_stage.Scored:
    """Bits per byte of held-out text, with a ledger beside the artifact; as `underpar score`."""
    method, changes = score_stage.choose_method(adapt, levers, stride, flat, order, seconds)
    changes += _overrides(set)
    runtime = open_runtime(device)
    path, shown = artifact_at(Path(artifact)), progress if runtime.is_main else SILENT
    return score_stage.score_artifact(path, Path(data), runtime, method, changes, shown)


def audit(
    run: PathLike,
    *,
    data: PathLike | None = None,
    limits: Limits = audit_stage.WHOLE.limits,
    profile: str = STRICT,
    documents: int = 0,
    code_tokens: int = 0,
    retrain: int | None = None,
    seed: int | None = None,
    device: str = "auto",
    progress: Progress = LINES,
) -> audit_stage.Audited:
    """Judge a run that was packed and scored, rule by rule; as `underpar audit`.

    By default all documents are scored and coded again, and all training steps are repeated.
    `documents`, `code_tokens` and `retrain` make it a random sample.
    """
    path = None if data is None else Path(data)
    request = audit_stage.AuditRequest(path, limits, profile, documents, code_tokens, retrain, seed)
    return audit_stage.audit_run(RunFolder(Path(run)), open_runtime(device), request, progress)


def report(*runs: PathLike, out: PathLike | None = None) -> Path:
    """One HTML page about one run or several; by default report.html in the first run's folder."""
    folders = [RunFolder(Path(run)) for run in runs]
    beside = folders[0].report_file if folders else Path("report.html")
    return build_report(folders, beside if out is None else Path(out))


def load(artifact: PathLike, device: str = "cpu") -> Model:
    """Open an artifact, or the one in a run folder: `m = underpar.load("model.upar")`."""
    return Model.open(artifact_at(Path(artifact)), device)


def _overrides(changes: Changes) -> list[str]:
    """Changes as the command line writes them: TOML and JSON agree on such values."""
    return [f"{key}={json.dumps(value, default=str)}" for key, value in changes.items()]


@dataclass(frozen=True)
class TokenLogProb:
    """A token, the bytes of the text it stands for, and the natural logarithm of its probability.

    The token that ends a document stands for no text. Nor does one that says how the next word is
    written, such as with a capital: the bytes are those of the text before any transform.
    """

    token: int
    text: bytes
    log_prob: float

    @property
    def bits(self) -> float:
        """What the token costs in a compressed file."""
        return -self.log_prob / float(np.log(2))


@dataclass(frozen=True, repr=False, eq=False)
class Model:
    """An open artifact: score, generate, compress. A text is `str`, or `bytes` of any content."""

    artifact: Artifact
    codec: Codec
    runtime: Runtime

    @staticmethod
    def open(path: Path, device: str = "cpu") -> Model:
        """Read and check an artifact file."""
        artifact, identity = read_artifact(path)
        runtime = open_runtime(device)
        predictor, tokenizer = build_predictor(artifact, runtime.device), build_tokenizer(artifact)
        codec = Codec(
            predictor,
            tokenizer,
            identity,
            lambda: open_adaptation(artifact, runtime),
            lambda: build_exact_predictor(artifact, runtime.device),
        )
        return Model(artifact, codec, runtime)

    def __repr__(self) -> str:
        spec = self.recipe.model
        return (
            f"Model({self.num_weights:,} weights, {spec.num_layers} layers, "
            f"{spec.vocab_size:,} tokens, context {spec.context}, {self.runtime.device})"
        )

    @property
    def recipe(self) -> Recipe:
        """The recipe that the model was trained with."""
        return self.artifact.recipe

    @property
    def num_weights(self) -> int:
        """Weights in the artifact."""
        return sum(int(np.prod(tensor.shape)) for tensor in self.artifact.tensors.values())

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to tokens and back: `encode(bytes)`, `decode(ids)`, `pieces`, `vocab_size`."""
        return self.codec.tokenizer

    @property
    def predictor(self) -> Predictor:
        """Log-probabilities as tensors, for any pack of tokens."""
        return self.codec.predictor

    def adapted_to(
        self, texts: Text | Iterable[Text], levers: Sequence[str] = (), set: Changes = NO_CHANGES
    ) -> Model:
        """A model that has read `texts`: adapters learned from each part after it was priced.

        `levers` name adapters that follow the stream, such as "stream_sgd"; by default those of the
        recipe. `set` changes their settings. What the new model compresses, only a model that has
        read the same texts decompresses.
        """
        readers: list[Predictor] = []

        def open_reader(*args: Any) -> Predictor:
            readers.append(self._copied_predictor(*args))
            return readers[-1]

        method = Method(tuple(levers)) if levers else ADAPT
        documents = _documents_of(_as_list(texts), self.tokenizer)
        self._run(shard_of(*documents), method, _overrides(set), None, open_reader)
        reader = readers[-1]
        if not reader.can_adapt:
            raise RuleError(
                "these levers begin anew with each text; name one that follows the stream: "
                'levers=["stream_sgd"]'
            )
        # Files of the two models must not be taken for each other's.
        identity = hashlib.sha256((self.codec.identity + reader.state_hash()).encode()).hexdigest()
        return replace(
            self,
            codec=replace(self.codec, predictor=reader, identity=identity, open_adaptation=None),
        )

    def score(self, texts: Text | Iterable[Text], adapt: bool = False) -> Score:
        """Bits of one text or of many; `.bpb` is bits per byte, `.entries` has one entry per text.

        Each text is a document, and its end is priced too. With `adapt` the scoring levers of the
        recipe learn from what was priced, as in `underpar score --adapt`; the model itself stays.
        """
        return self._score(_as_list(texts), adapt)

    def log_probs(self, text: Text, adapt: bool = False) -> list[TokenLogProb]:
        """Every token of `text` with its log-probability; the last token ends the document."""
        nats: list[np.ndarray] = []
        self._score([text], adapt, lambda document, first, part: nats.append(part))
        log_probs = (-np.concatenate(nats)).tolist()
        rows = zip(*tokens_and_spans(_raw(text), self.tokenizer), log_probs, strict=True)
        return [TokenLogProb(*row) for row in rows]

    def chunks(self, text: Text) -> list[bytes]:
        """The chunks that a network of bytes cuts `text` into; none from other networks."""
        raw, model = _raw(text), self.predictor.model
        document = np.append(self.tokenizer.bos_id, self.tokenizer.encode(raw))
        batch, _ = pack_documents([document], self.tokenizer.bos_id, self.predictor.context)
        batch = batch.to(self.predictor.device)
        starts = model.chunk_starts(batch.inputs, PackedCache(batch.segments))
        if starts is None:
            return []
        # Byte i is input i + 1. The first chunk begins with the document, before its first byte.
        cuts = [0, *(starts[2:].nonzero()[:, 0] + 1).tolist(), len(raw)]
        return [raw[begin:end] for begin, end in pairwise(cuts) if end > begin]

    def next_tokens(self, prompt: Text = "", count: int = 10) -> list[TokenLogProb]:
        """The `count` likeliest tokens after `prompt`, the likeliest first.

        Their texts are as the tokenizer writes them, after its text transform.
        """
        ids = self.tokenizer.encode(_raw(prompt)).tolist()
        log_probs = LaneReader(self.predictor, [self.tokenizer.bos_id, *ids]).log_probs
        values, tokens = log_probs.sort(descending=True)
        rows = zip(tokens[:count].tolist(), values[:count].tolist(), strict=True)
        return [TokenLogProb(token, self.tokenizer.written([token]), p) for token, p in rows]

    def stream(
        self,
        prompt: str = "",
        *,
        max_tokens: int = 200,
        temperature: float = 0.8,
        top_p: float = 0.95,
        top_k: int = 0,
        stop: str | Sequence[str] = (),
        seed: int = 0,
    ) -> Iterator[str]:
        """Text after `prompt`, piece by piece. `Sampling` explains the options."""
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        sampling = Sampling(max_tokens, temperature, top_p, seed, top_k, stops)
        return generate(self.predictor, self.tokenizer, prompt, sampling)

    def generate(
        self,
        prompt: str = "",
        *,
        max_tokens: int = 200,
        temperature: float = 0.8,
        top_p: float = 0.95,
        top_k: int = 0,
        stop: str | Sequence[str] = (),
        seed: int = 0,
    ) -> str:
        """Text after `prompt`. `Sampling` explains the options."""
        return "".join(
            self.stream(
                prompt,
                max_tokens=max_tokens,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                stop=stop,
                seed=seed,
            )
        )

    def compress(self, data: Text, adapt: bool = False, exact: bool = False) -> bytes:
        """Compress any bytes, or a `str` as UTF-8; text gets smaller.

        With `adapt` the adapters of the recipe learn what was coded, as in `score`. `exact` data
        decode on every machine.
        """
        return self.codec.compress(_raw(data), adapt=adapt, exact=exact)

    def decompress(self, data: bytes, any_machine: bool = False) -> bytes:
        """The bytes that `compress` was given.

        Data of another machine or version of torch is refused, because its floats may differ;
        `any_machine` tries all the same.
        """
        return self.codec.decompress(data, any_machine)

    def _score(
        self, texts: Sequence[Text], adapt: bool, on_commit: OnCommit | None = None
    ) -> Score:
        raws, documents = _documents_of(texts, self.tokenizer)
        # What follows a document says that it ends. A document of a BOS alone follows the last one.
        shard = shard_of([*raws, b""], [*documents, np.array([self.tokenizer.bos_id])])
        if adapt:
            score = self._run(shard, ADAPT, (), on_commit, self._copied_predictor)
        else:
            score = self._run(shard, PLAIN, (), on_commit, lambda *_: self.predictor)
        return replace(score, entries=score.entries[: len(texts)])

    def _run(
        self,
        shard: Shard,
        method: Method,
        changes: Sequence[str],
        on_commit: OnCommit | None,
        open_predictor: Callable[..., Predictor],
    ) -> Score:
        method, recipe = open_method(self.recipe, method, changes)
        request = ScoringRequest(
            method, self.runtime, on_commit=on_commit, open_predictor=open_predictor
        )
        return run_method(replace(self.artifact, recipe=recipe), shard, request)

    def _copied_predictor(
        self,
        artifact: Artifact,
        device: torch.device,
        adapters: Sequence[Adapter],
        dtype: torch.dtype,
    ) -> Predictor:
        """A predictor for adapters, which change it; it begins with what this model has learned."""
        copied = build_predictor(artifact, device, adapters, dtype)
        fresh, learned = copied.model.state_dict(), self.predictor.model.state_dict()
        if more := learned.keys() - fresh.keys():
            raise RuleError(
                f"the model was adapted by a lever that adds {', '.join(sorted(more))}; go on with "
                "the same levers"
            )
        copied.model.load_state_dict(fresh | learned)
        return copied


def _as_list(texts: Text | Iterable[Text]) -> list[Text]:
    if isinstance(texts, Text) or not isinstance(texts, Iterable):
        return [texts]
    return list(texts)


def _raw(text: Text) -> bytes:
    """The bytes of a text."""
    try:
        return text.encode() if isinstance(text, str) else bytes(memoryview(text))
    except UnicodeEncodeError as error:
        raise DataError(f"text has a lone surrogate at character {error.start}") from error
    except TypeError as error:
        raise DataError(f"expected a text as str or bytes, not {type(text).__name__}") from error


def _documents_of(
    texts: Sequence[Text], tokenizer: Tokenizer
) -> tuple[list[bytes], list[np.ndarray]]:
    """The bytes and the tokens of each text, BOS first."""
    raws = [_raw(text) for text in texts]
    if not raws or not all(raws):
        raise DataError("cannot score an empty text: there are no bytes to divide by")
    return raws, [np.append(tokenizer.bos_id, tokenizer.encode(raw)) for raw in raws]
