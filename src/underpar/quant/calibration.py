"""What the weights meet: second moments of the inputs of every large matrix, over training text.

H = sum of x x^T, as GPTQ needs it (arXiv:2210.17323). Unlike the published recipes documents stay
apart, as in training and scoring, and ranks add up what they saw (PR 2020: 0.5 mBPB). A layer that
a loop visits three times adds three inputs for each token.

Only text of the types below can be read: training text, or what the model itself writes. There is
no way to name the held-out text.
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
from underpar.data.folder import DataFolder
from underpar.data.loader import Batch, Loader, MicroBatch, prefetch, segments_from_starts
from underpar.errors import ArtifactError, RuleError
from underpar.model.gpt import GPT
from underpar.model.kv_cache import PackedCache
from underpar.model.network import as_scored, products
from underpar.recipe import require
from underpar.seams import BOS_ID

# The tied embedding; its inputs are those of its role as the head.
HEAD = "embedding.weight"

# No seed of a recipe: calibration reads documents in another order than training did.
SEED = 0x43414C4942
# Ids below it are control tokens, in every tokenizer here.
FIRST_PIECE = 4


def require_training_split(data: DataFolder) -> None:
    """Refuse a folder whose training split is not the one of its manifest."""
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
    """Batches of a data folder's training split, in an order of their own."""

    data: DataFolder
    num_batches: int = 16
    batch_tokens: int = 65_536
    seed: int = SEED

    def __post_init__(self) -> None:
        require_training_split(self.data)
        _require_some(num_batches=self.num_batches, batch_tokens=self.batch_tokens)

    def batches(self, context: int, runtime: Runtime) -> Iterator[Batch]:
        """This rank's share, cut at document starts and at `context`."""
        loader = Loader(self.data.train, [MicroBatch(self.batch_tokens, context)], self.seed)
        share = range(runtime.rank, self.num_batches, runtime.world)
        return prefetch(loader, ((i, 0) for i in share), runtime.device.type == "cuda")


class Lanes(Protocol):
    """What `Predictor.stepper` gives: token in, distribution out, for all lanes at once."""

    def step(self, tokens: Tensor) -> Tensor:
        """Feed tokens (L,); returns log-probabilities (L, V) of what follows."""

    def reset(self, lanes: Tensor) -> None:
        """Begin a new document in the lanes where `lanes` (L,) is true."""


@dataclass(frozen=True, eq=False)
class SelfGenerated:
    """Text that a model writes by itself: a random token, then samples (PR 1019).

    `open_lanes` makes that many fresh lanes of the model, as `Predictor.stepper` does. A document
    that ends is followed by another in the same lane.
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
            # Every lane begins with a BOS, and so does what follows the last.
            targets = torch.cat((tokens[1:], tokens[:1]))
            is_start = (tokens == BOS_ID).numpy()
            yield Batch(tokens, targets, segments_from_starts(is_start, len(tokens), context))

    def _write(self, seed: int, device: torch.device) -> Tensor:
        """Tokens (L, T), a BOS first in each lane."""
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
    """(C, C) fp32, symmetric: the sum of x x^T over all inputs."""
    num_inputs: Mapping[str, int]
    """Inputs of each matrix: visits times tokens."""
    num_tokens: int
    largest: Mapping[str, float] = field(default_factory=dict)
    """The largest magnitude among the inputs of each matrix."""

    def rms(self, name: str) -> Tensor:
        """Root mean square (C,) of the inputs of a matrix, by column."""
        return (self.hessians[name].diagonal() / self.num_inputs[name]).sqrt()


def collect(model: GPT, text: Text, runtime: Runtime) -> Calibration:
    """Read `text` as scoring would, all ranks together; the model comes back as it was."""
    shared = sites_of(model)
    sums = {site: _Sum(model.get_parameter(names[0])) for site, names in shared.items()}
    num_tokens = torch.zeros((), dtype=torch.int64, device=runtime.device)
    with torch.no_grad(), as_scored(model), _fast_products(runtime):
        for batch in read(text, model, runtime):
            with watching(model, {site: sums[site].watch for site in shared if site != HEAD}):
                hidden = hidden_of(model, batch, runtime)
            sums[HEAD].add(hidden)
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
            raise ArtifactError(f"inputs of {names[0]} are NaN or infinite; the run diverged")
        hessians |= dict.fromkeys(names, hessian)
        num_inputs |= dict.fromkeys(names, int(sums[site].num_inputs))
        largest |= dict.fromkeys(names, float(sums[site].largest))
    return Calibration(hessians, num_inputs, int(num_tokens), largest)


def sites_of(model: GPT) -> dict[str, tuple[str, ...]]:
    """Module whose input is summed (or the head) -> names of all weights that read that input."""
    sites = {}
    for layer in range(len(model.blocks)):
        block = f"blocks.{layer}"
        sites[f"{block}.attn.q"] = tuple(f"{block}.attn.{own}.weight" for own in "qkv")
        for own in ("attn.o", "mlp.up", "mlp.down"):
            sites[f"{block}.{own}"] = (f"{block}.{own}.weight",)
    return {**sites, HEAD: (HEAD,)}


class _Sum:
    """A running sum of x x^T for a weight (R, C)."""

    def __init__(self, weight: Tensor) -> None:
        self.hessian = weight.new_zeros(weight.size(1), weight.size(1), dtype=torch.float32)
        self.num_inputs = torch.zeros((), dtype=torch.int64, device=weight.device)
        self.largest = torch.zeros((), device=weight.device)

    def add(self, x: Tensor) -> None:
        """Add inputs x (N, C)."""
        # Autocast would multiply halves again after they were made fp32.
        with torch.autocast(x.device.type, enabled=False):
            x = x.float()
            self.hessian.addmm_(x.T, x)
        self.num_inputs += len(x)
        torch.maximum(self.largest, x.abs().amax(), out=self.largest)

    def watch(self, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        """A forward hook."""
        self.add(inputs[0])

    def symmetric(self) -> Tensor:
        """The sum; a product's two halves may differ in their last bits."""
        return (self.hessian + self.hessian.T) / 2


def read(text: Text, model: GPT, runtime: Runtime) -> Iterator[Batch]:
    """This rank's batches on its device; whatever is no calibration text is refused."""
    if not isinstance(text, Text):
        raise RuleError(
            f"calibration was given a {type(text).__name__}: expected TrainingText or SelfGenerated"
        )
    for batch in text.batches(model.spec.context, runtime):
        yield batch.to(runtime.device, non_blocking=True)


def hidden_of(model: GPT, batch: Batch, runtime: Runtime) -> Tensor:
    """What the head reads (N, dim) of a batch, in the precision of training."""
    with products(runtime.device, runtime.dtype):
        return model.hidden(batch.inputs, PackedCache(batch.segments))


# Module, its inputs, its output -> nothing, or what replaces the output.
Watch = Callable[[nn.Module, tuple[Tensor], Tensor], Tensor | None]


@contextmanager
def watching(model: GPT, watches: Mapping[str, Watch]) -> Iterator[None]:
    """Inside, each named module calls its watch after every forward pass."""
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
    """Inside, a GPU multiplies fp32 as TF32: exact for inputs that were bf16, sums stay fp32."""
    if runtime.device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
