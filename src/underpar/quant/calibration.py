"""Calibration: second moments of the inputs of every large matrix, over training text.

H = sum of x x^T, as GPTQ needs it (arXiv:2210.17323). Unlike in the published recipes, documents
are kept apart, as in training and scoring, and ranks add up their sums (PR 2020: 0.5 mBPB). A layer
that a loop visits three times adds three inputs per token.

Only the types of text below can be read: training text, or text that the model writes. There is no
way to name the held-out text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from underpar.core.dist import largest_over_ranks, sum_over_ranks
from underpar.core.runtime import Runtime
from underpar.data.batch import Batch, segments_from_starts
from underpar.data.folder import DataFolder
from underpar.data.loader import Loader, MicroBatch, prefetch
from underpar.errors import DivergedError, RuleError
from underpar.model.gpt import Block
from underpar.model.kv_cache import PackedCache
from underpar.model.network import Network, as_scored, products
from underpar.recipe import require
from underpar.seams import BOS_ID

# A tied embedding; its inputs here are those of the head.
HEAD = "embedding.weight"

# Differs from the seeds of recipes, so that calibration reads documents in another order.
SEED = 0x43414C4942
# Ids below this are control tokens, in every tokenizer of this package.
FIRST_PIECE = 4


def require_training_split(data: DataFolder) -> None:
    """Refuse a data folder whose training split is not that of its manifest."""
    if not isinstance(data, DataFolder):
        raise RuleError(
            f"calibration was given a {type(data).__name__}: expected a DataFolder, whose "
            "training split alone is read"
        )
    shard, stated = data.train, data.manifest["train"]
    if (shard.num_documents, shard.num_tokens) != (stated["documents"], stated["tokens"]):
        raise RuleError(
            f"calibration was given {shard.num_tokens} tokens as training text, the manifest "
            f"says {stated['tokens']}; open the folder with load_data"
        )


@dataclass(frozen=True, eq=False)
class TrainingText:
    """Batches of the training split of a data folder, in an order of `seed`.

    Documents of more than `piece_tokens` (0: none) are read in pieces, as in training.
    """

    data: DataFolder
    num_batches: int = 16
    batch_tokens: int = 65_536
    seed: int = SEED
    piece_tokens: int = 0

    def __post_init__(self) -> None:
        require_training_split(self.data)
        _require_some(num_batches=self.num_batches, batch_tokens=self.batch_tokens)

    def batches(self, context: int, runtime: Runtime) -> Iterator[Batch]:
        """This rank's share, cut at document starts and at `context`."""
        plan = [MicroBatch(self.batch_tokens, context)]
        loader = Loader(self.data.train, plan, self.seed, piece_tokens=self.piece_tokens)
        share = range(runtime.rank, self.num_batches, runtime.world)
        return prefetch(loader, ((i, 0) for i in share), runtime.device.type == "cuda")


class Lanes(Protocol):
    """The interface of `Predictor.stepper`: tokens in, distributions out, for all lanes at once."""

    def step(self, tokens: Tensor) -> Tensor:
        """Feed tokens (L,); returns log-probabilities (L, V) of the next tokens."""

    def reset(self, lanes: Tensor) -> None:
        """Begin a new document in the lanes for which `lanes` (L,) is true."""


@dataclass(frozen=True, eq=False)
class SelfGenerated:
    """Text that the model writes: a random first token, then samples (PR 1019).

    `open_lanes` opens a number of lanes of the model, as `Predictor.stepper` does. When a document
    ends, another begins in the same lane.
    """

    open_lanes: Callable[[int], Lanes]
    num_batches: int = 8
    num_lanes: int = 8
    lane_tokens: int = 2048
    temperature: float = 0.8
    seed: int = SEED

    def __post_init__(self) -> None:
        _require_some(num_batches=self.num_batches, num_lanes=self.num_lanes)
        _require_some(lane_tokens=self.lane_tokens, temperature=self.temperature)

    def batches(self, context: int, runtime: Runtime) -> Iterator[Batch]:
        """This rank's share, cut at document starts and at `context`."""
        for index in range(runtime.rank, self.num_batches, runtime.world):
            tokens = self._write(self.seed + index, runtime.device).flatten()  # (L * T,)
            # Every lane begins with BOS; the target of the last token is the first BOS.
            targets = torch.cat((tokens[1:], tokens[:1]))
            is_start = (tokens == BOS_ID).numpy()
            yield Batch(tokens, targets, segments_from_starts(is_start, len(tokens), context))

    def _write(self, seed: int, device: torch.device) -> Tensor:
        """Tokens (L, T); each lane begins with BOS."""
        source = torch.Generator().manual_seed(seed)
        lanes = self.open_lanes(self.num_lanes)
        tokens = torch.full((self.num_lanes, self.lane_tokens), BOS_ID)
        for place in range(1, self.lane_tokens):
            before = tokens[:, place - 1].to(device)
            lanes.reset(before == BOS_ID)
            log_probs = lanes.step(before)
            if place == 1:
                log_probs = torch.zeros_like(log_probs)
                log_probs[:, :FIRST_PIECE] = -torch.inf
            probs = (log_probs.double() / self.temperature).softmax(-1).cpu()
            tokens[:, place] = torch.multinomial(probs, 1, generator=source)[:, 0]
        return tokens


Text = TrainingText | SelfGenerated


def _require_some(**values: float) -> None:
    for name, value in values.items():
        require(value > 0, f"calibration with {name} = {value}: expected more than 0")


@dataclass(frozen=True, eq=False)
class Calibration:
    """Statistics by weight name; q, k and v of a layer share their tensors."""

    hessians: Mapping[str, Tensor]
    """(C, C) fp32, symmetric: the sum of x x^T over all inputs of the matrix."""
    num_inputs: Mapping[str, int]
    """Number of inputs of each matrix: visits times tokens."""
    num_tokens: int
    largest: Mapping[str, float] = field(default_factory=dict)
    """The largest magnitude among the inputs of each matrix."""

    def rms(self, name: str) -> Tensor:
        """Root mean square (C,) of the inputs of a matrix, by column."""
        return (self.hessians[name].diagonal() / self.num_inputs[name]).sqrt()


def collect(model: Network, text: Text, runtime: Runtime) -> Calibration:
    """Run the model over `text`, as scoring would, all ranks together; the model is unchanged."""
    shared = sites_of(model)
    sums = {site: _Sum(model.get_parameter(names[0])) for site, names in shared.items()}
    num_tokens = torch.zeros((), dtype=torch.int64, device=runtime.device)
    with torch.no_grad(), as_scored(model), _fast_products(runtime):
        for batch in read(text, model, runtime):
            blocks = {site: total.watch for site, total in sums.items() if site != model.head_name}
            with watching(model, blocks):
                hidden = hidden_of(model, batch, runtime)
            sums[model.head_name].add(hidden)
            num_tokens += len(batch.inputs)
    sum_over_ranks([total.hessian for total in sums.values()], runtime)
    sum_over_ranks([*(total.num_inputs for total in sums.values()), num_tokens], runtime)
    largest_over_ranks([total.largest for total in sums.values()], runtime)
    hessians: dict[str, Tensor] = {}
    num_inputs: dict[str, int] = {}
    largest: dict[str, float] = {}
    for site, names in shared.items():
        hessian = sums[site].symmetric()
        if not hessian.isfinite().all():
            raise DivergedError(f"inputs of {names[0]} are NaN or infinite")
        hessians |= dict.fromkeys(names, hessian)
        num_inputs |= dict.fromkeys(names, int(sums[site].num_inputs))
        largest |= dict.fromkeys(names, float(sums[site].largest))
    return Calibration(hessians, num_inputs, int(num_tokens), largest)


def sites_of(model: Network) -> dict[str, tuple[str, ...]]:
    """Module whose inputs are summed (or the head) -> names of all weights with these inputs."""
    sites = {}
    for block in (name for name, module in model.named_modules() if isinstance(module, Block)):
        sites[f"{block}.attn.q"] = tuple(f"{block}.attn.{name}.weight" for name in "qkv")
        for name in ("attn.o", "mlp.up", "mlp.down"):
            sites[f"{block}.{name}"] = (f"{block}.{name}.weight",)
    return {**sites, model.head_name: (model.head_name,)}


class _Sum:
    """A running sum of x x^T for a weight (R, C)."""

    def __init__(self, weight: Tensor) -> None:
        self.hessian = weight.new_zeros(weight.size(1), weight.size(1), dtype=torch.float32)
        self.num_inputs = torch.zeros((), dtype=torch.int64, device=weight.device)
        self.largest = torch.zeros((), device=weight.device)

    def add(self, x: Tensor) -> None:
        """Add inputs x (N, C)."""
        # Autocast would round the fp32 inputs to half precision again.
        with torch.autocast(x.device.type, enabled=False):
            x = x.float()
            self.hessian.addmm_(x.T, x)
        self.num_inputs += len(x)
        torch.maximum(self.largest, x.abs().amax(), out=self.largest)

    def watch(self, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        """The forward hook of the module."""
        self.add(inputs[0])

    def symmetric(self) -> Tensor:
        """The sum, made symmetric: the two triangles of a product may differ in the last bits."""
        return (self.hessian + self.hessian.T) / 2


def read(text: Text, model: Network, runtime: Runtime) -> Iterator[Batch]:
    """This rank's batches, on its device; anything but calibration text is refused."""
    if not isinstance(text, Text):
        raise RuleError(
            f"calibration was given a {type(text).__name__}: expected TrainingText or SelfGenerated"
        )
    for batch in text.batches(model.spec.context, runtime):
        yield batch.to(runtime.device, non_blocking=True)


def hidden_of(model: Network, batch: Batch, runtime: Runtime) -> Tensor:
    """Hidden states (N, dim) of a batch, in the precision of training."""
    with products(runtime.device, runtime.dtype):
        return model.hidden(batch.inputs, PackedCache(batch.segments))


# A forward hook: module, its inputs, its output -> None, or a replacement of the output.
ForwardHook = Callable[[nn.Module, tuple[Tensor], Tensor], Tensor | None]


@contextmanager
def watching(model: Network, watches: Mapping[str, ForwardHook]) -> Iterator[None]:
    """Inside, each named module calls its hook after every forward pass."""
    handles = [
        model.get_submodule(name).register_forward_hook(watch) for name, watch in watches.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _fast_products(runtime: Runtime) -> Iterator[None]:
    """Inside, a GPU multiplies fp32 as TF32: exact for inputs from bf16, and sums stay fp32."""
    if runtime.device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
