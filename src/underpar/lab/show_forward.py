"""The network of a recipe, printed as its forward pass really runs.

Nothing here restates the network. One forward pass runs on torch's "meta" device, where tensors
have shapes and no numbers. Every method of a lever, every layer of torch and every call of
attention is observed, and the calls are listed in the order in which they happened. What a visit
of a block does is printed once; later visits that do the same refer to it.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from underpar.build.levers import find_lever, lever_settings, plug_levers
from underpar.data.loader import segments_from_starts
from underpar.model.gpt import GPT
from underpar.model.kv_cache import PackedCache
from underpar.recipe import Recipe, require
from underpar.seams import Visit
from underpar.stages.pack import forecast_size

# Tokens of the observed pass. A prime above all other sizes, so that a dimension of this size is
# the number of tokens, which is printed as N.
NUM_TOKENS = 1_048_583
# Methods of GPT that begin a part of the forward pass.
PARTS = ("embed", "finish", "head")
# Layers of torch whose calls are listed.
LAYERS = (nn.Embedding, nn.Linear)


@dataclass(frozen=True)
class Line:
    """One observed call."""

    what: str
    """A lever's hook, a layer of torch, or attention."""
    lever: str
    """Name of the lever; empty if the baseline makes the call."""
    reads: str
    gives: str
    settings: str = ""

    def to_text(self) -> str:
        """The call in one line."""
        name = f"lever {self.lever}" if self.lever else ""
        settings = f"   [{self.settings}]" if self.settings else ""
        reads = f"{self.reads} " if self.reads else ""
        return f"  {self.what:<16} {name:<23} {reads}-> {self.gives}{settings}"


@dataclass
class Part:
    """A stretch of the forward pass: embedding, one visit of a block, or the head."""

    title: str
    lines: list[Line] = field(default_factory=list)
    same_as: str | None = None
    """The earlier part with the same lines, if there is one."""


@dataclass(frozen=True)
class Weights:
    """Parameters of a block, a lever or the embedding, and their forecast bytes when packed."""

    name: str
    num_parameters: int
    num_bytes: int


@dataclass(frozen=True)
class Forward:
    """All that was observed."""

    recipe_hash: str
    plan: tuple[int, ...]
    """The block of each visit."""
    built: tuple[Line, ...]
    """Hooks that are called once, when the model is built."""
    parts: tuple[Part, ...]
    weights: tuple[Weights, ...]
    elsewhere: dict[str, str]
    """Levers of other stages -> their stage."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def to_text(self, title: str) -> str:
        """The listing."""
        num_parameters = sum(w.num_parameters for w in self.weights)
        num_blocks = len(set(self.plan))
        lines = [
            f"{title}: {num_parameters:,} parameters, {num_blocks} blocks, {len(self.plan)} visits",
            f"visits of blocks in order: {' '.join(map(str, self.plan))}",
            "shapes: N is the number of tokens; each line is what it reads -> what it gives",
        ]
        if self.built:
            lines += ["", "when the model is built", *(line.to_text() for line in self.built)]
        for same_as, group in itertools.groupby(self.parts, key=lambda part: part.same_as):
            parts = list(group)
            if same_as is None:
                for part in parts:
                    lines += ["", part.title, *(line.to_text() for line in part.lines)]
            else:
                # Visits that do the same one after the other stand together.
                lines += ["", *(f"{part.title}, as {same_as}" for part in parts)]
        lines += ["", f"  {'weights':<24} {'parameters':>12} {'packed bytes, forecast':>24}"]
        total = sum(w.num_bytes for w in self.weights)
        for weights in (*self.weights, Weights("total", num_parameters, total)):
            name, number, size = weights.name, weights.num_parameters, weights.num_bytes
            lines.append(f"  {name:<24} {number:>12,} {size:>24,}")
        if self.elsewhere:
            others = ", ".join(f"{name} ({stage})" for name, stage in self.elsewhere.items())
            lines += ["", f"levers that act outside the forward pass: {others}"]
        return "\n".join(lines)


def observe_forward(recipe: Recipe) -> Forward:
    """Build the recipe's network without numbers, run it once as it is scored, and observe it."""
    require(recipe.hnet is None, "model.network = 'hnet': only the forward pass of a GPT is shown")
    observer = _Observer(_describe_settings(recipe))
    with torch.device("meta"):
        levers: dict[str, nn.Module] = plug_levers(recipe, "model")
        for name, lever in levers.items():
            observer.watch_lever(name, lever)
        model = GPT(recipe.model, levers).eval()
        tokens = torch.zeros(NUM_TOKENS, dtype=torch.int64)
    observer.begin_forward()
    observer.watch_model(model)
    segments = segments_from_starts(np.array([0]), NUM_TOKENS, recipe.model.context)
    with torch.no_grad():
        model(tokens, _ObservedCache(PackedCache(segments.to("meta")), observer))
    stages = {name: find_lever(name).STAGE for name in recipe.levers}
    return Forward(
        recipe_hash=recipe.hash,
        plan=tuple(visit.layer for visit in model.plan),
        built=tuple(observer.built_lines()),
        parts=tuple(_mark_same(observer.parts)),
        weights=_weigh(recipe, model),
        elsewhere={name: stage for name, stage in stages.items() if stage != "model"},
    )


def _describe_settings(recipe: Recipe) -> dict[str, str]:
    return {
        name: ", ".join(f"{key} = {value}" for key, value in asdict(settings).items())
        for name, settings in lever_settings(recipe).items()
    }


def _mark_same(parts: list[Part]) -> Iterator[Part]:
    """Parts, each with the first earlier part that has the same lines."""
    first: dict[tuple[Line, ...], str] = {}
    for part in parts:
        if part.lines:
            title = first.setdefault(tuple(part.lines), part.title)
            yield Part(part.title, part.lines, None if title == part.title else title.split(":")[0])


def _weigh(recipe: Recipe, model: GPT) -> tuple[Weights, ...]:
    """Weights by block and by lever, in the order of the model."""
    num_bytes = {row["name"]: row["bytes"] for row in forecast_size(recipe).tensors}
    owners: dict[str, list[str]] = {}
    for name in num_bytes:
        kind, rest = name.split(".", 1)
        numbered = {"blocks": "block", "levers": "lever"}
        owner = f"{numbered[kind]} {rest.split('.')[0]}" if kind in numbered else kind
        owners.setdefault(owner, []).append(name)
    weights = model.state_dict()
    return tuple(
        Weights(
            owner,
            sum(weights[name].numel() for name in names),
            round(sum(num_bytes[name] for name in names)),
        )
        for owner, names in owners.items()
    )


class _Observer:
    """Lists calls in their order, by part of the forward pass."""

    def __init__(self, settings: dict[str, str]) -> None:
        self.parts: list[Part] = []
        self._built: dict[tuple[str, str, str], list[str]] = {}
        self._settings = settings
        self._slot: int | None = None
        self._inside: list[str] = []
        self._is_running = False

    def begin_forward(self) -> None:
        """From here on, calls belong to the forward pass."""
        self._is_running = True

    def watch_lever(self, name: str, lever: nn.Module) -> None:
        """Observe every public method that the lever adds to a module of torch."""
        for method in dir(type(lever)):
            hook = getattr(lever, method)
            if not method.startswith("_") and not hasattr(nn.Module, method) and callable(hook):
                setattr(lever, method, self._watched(name, method, hook))

    def watch_model(self, model: GPT) -> None:
        """Observe the parts of the forward pass and the layers of torch outside levers."""
        for part in PARTS:
            setattr(model, part, self._watched_part(part, getattr(model, part)))
        for name, module in model.named_modules():
            if isinstance(module, LAYERS) and not name.startswith("levers."):
                module.register_forward_hook(functools.partial(self._on_layer, name))
            if name.startswith("blocks.") and name.count(".") == 1:
                module.register_forward_pre_hook(lambda _, inputs: self._enter_visit(inputs))

    def built_lines(self) -> Iterator[Line]:
        """Hooks that were called before the forward pass; calls with one result share a line."""
        for (method, lever, gives), reads in self._built.items():
            asked = " ".join(dict.fromkeys(reads))
            yield Line(method, lever, asked, gives, self._settings[lever])

    def add(self, line: Line) -> None:
        """Add a call to the part that is running."""
        self.parts[-1].lines.append(line)

    def _watched_part(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*inputs: Any, **options: Any) -> Any:
            self.parts.append(Part(name))
            result = method(*inputs, **options)
            if isinstance(result, Tensor):
                self.add(Line("result", "", "", show_shape(result)))
            return result

        return run

    def _watched(self, lever: str, method: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(hook).parameters)

        @functools.wraps(hook)
        def run(*inputs: Any, **options: Any) -> Any:
            values = dict(zip(names, inputs, strict=False)) | options
            self._enter_visit(values.values())
            # A hook that calls another method of its lever is one line.
            if lever in self._inside:
                return hook(*inputs, **options)
            stream = values.get("stream")
            before = _stream_state(stream)
            lines = self.parts[-1].lines if self._is_running else []
            index = len(lines)
            self._inside.append(lever)
            try:
                result = hook(*inputs, **options)
            finally:
                self._inside.pop()
            if not self._is_running:
                # Hooks that only check or take note give nothing.
                if result:
                    key = (method, lever, str(result))
                    self._built.setdefault(key, []).append(_show_question(values))
                return result
            what = f"{method} {values['site']}" if "site" in values else method
            gives = _show_result(values, result, stream, before)
            line = Line(what, lever, _show_inputs(values), gives, self._settings[lever])
            # Calls that the hook made stand below it.
            lines.insert(index, line)
            return result

        return run

    def _enter_visit(self, inputs: Any) -> None:
        """Begin a part if the call belongs to a visit other than the last one."""
        for visit in inputs:
            if isinstance(visit, Visit) and visit.slot != self._slot:
                self._slot = visit.slot
                again = f" (visit {visit.repeat + 1} of this block)" if visit.repeat else ""
                self.parts.append(Part(f"visit {visit.slot}: block {visit.layer}{again}"))

    def _on_layer(self, name: str, module: nn.Module, inputs: Any, result: Tensor) -> None:
        # Blocks have the same layers: without their number they compare as equal.
        words = name.split(".")
        short = ".".join(words[2:]) if words[0] == "blocks" else name
        self.add(Line(short, "", ", ".join(show_shape(t) for t in inputs), show_shape(result)))


class _ObservedCache:
    """A KV cache that lists the calls of attention and is the given one otherwise."""

    def __init__(self, cache: PackedCache, observer: _Observer) -> None:
        self._cache, self._observer = cache, observer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def attend(self, slot: int, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        """Attention over the keys and values of this slot."""
        y = self._cache.attend(slot, q, k, v, window)
        reach = f", window {window}" if window else ""
        reads = f"q {show_shape(q)}, k {show_shape(k)}, v {show_shape(v)}{reach}"
        self._observer.add(Line("attention", "", reads, show_shape(y)))
        return y


def show_shape(tensor: Tensor) -> str:
    """The shape of a tensor, with N for the number of tokens."""
    sizes = ["N" if size == NUM_TOKENS else str(size) for size in tensor.shape]
    return f"({', '.join(sizes)})"


def _show_question(values: dict[str, Any]) -> str:
    """The arguments of a hook that is asked when the model is built."""
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _show_inputs(values: dict[str, Any]) -> str:
    """The tensors among a hook's arguments, and the stream."""
    shapes = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    shapes |= {name: value.x for name, value in values.items() if name == "stream"}
    return ", ".join(f"{name} {show_shape(value)}" for name, value in shapes.items())


def _stream_state(stream: Any) -> dict[str, Any]:
    """What tells whether a hook changed the stream: its tensor and what levers keep in it."""
    if stream is None:
        return {}
    kept = {name: dict(v) if isinstance(v, dict) else v for name, v in stream.kept.items()}
    # A place that a lever only made, and left empty, is no change.
    return {"": stream.x} | {name: v for name, v in kept.items() if isinstance(v, Tensor) or v}


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(a[key] is b[key] for key in a)
    return a is b


def _show_result(values: dict[str, Any], result: Any, stream: Any, before: dict[str, Any]) -> str:
    """What a hook gave back or changed; arguments that came back as they were are left out."""
    results = result if isinstance(result, tuple) else (result,)
    tensors = [t for t in results if isinstance(t, Tensor)]
    new = [t for t in tensors if not any(t is value for value in values.values())]
    texts = [show_shape(tensor) for tensor in new]
    after = _stream_state(stream)
    names = {**before, **after}
    changed = [name for name in names if not _is_same(before.get(name), after.get(name))]
    texts += [f"kept {name}" if name else f"stream {show_shape(stream.x)}" for name in changed]
    return ", ".join(texts) or "unchanged"
