"""The sections of a recipe: frozen dataclasses. The defaults are the baseline's values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from underpar.errors import RecipeError


def require(condition: bool, message: str) -> None:
    """Raise a RecipeError with `message` unless `condition` holds."""
    if not condition:
        raise RecipeError(message)


def added(default: Any) -> Any:
    """A setting that recipes of older versions lack.

    At its default it is neither written nor hashed, so that old recipes keep their hashes and old
    run folders their meaning.
    """
    return field(default=default, metadata={"added": True})


# Ids of the byte tokenizer: four control ids and 256 bytes (data/tokens/byte260.py).
BYTE_IDS = 260


@dataclass(frozen=True)
class DataPart:
    """How text becomes tokens. Text transforms are levers, so they are not here.

    `holdout` is the share of documents that are held out, `tokenizer` is "bpe" or "bytes",
    which has 260 ids whatever model.vocab_size says.
    `cross_words` lets pieces of the vocabulary contain spaces between words.
    """

    holdout: float = 0.1
    tokenizer: str = "bpe"
    cross_words: bool = False

    def __post_init__(self) -> None:
        require(0 < self.holdout < 1, f"data.holdout = {self.holdout}: expected between 0 and 1")
        known = self.tokenizer in ("bpe", "bytes")
        require(known, f"data.tokenizer = {self.tokenizer!r}: expected 'bpe' or 'bytes'")


# Far above any model of 16 MB. Shapes of an unknown artifact are checked before memory is taken.
LARGEST = {
    "vocab_size": 1 << 20,
    "num_layers": 256,
    "dim": 1 << 14,
    "num_heads": 256,
    "num_kv_heads": 256,
    "mlp_dim": 1 << 16,
    "context": 1 << 20,
}


@dataclass(frozen=True)
class ModelSpec:
    """Shapes and constants of the transformer.

    `mlp_dim` is the width of every MLP, or a list with one width per layer (PR 2137 moves width to
    looped layers, for at most 0.2 mBPB). A layer has the same width in every visit.

    `softcap` bounds the size of logits; 0: no bound.

    `network` is "gpt", or "hnet": then these are the shapes of the main network, which reads chunks
    of `context` tokens in all, and [hnet] has those of the byte level around it.
    """

    vocab_size: int = 8192
    num_layers: int = 11
    dim: int = 512
    num_heads: int = 8
    num_kv_heads: int = 4
    mlp_dim: int | tuple[int, ...] = 2048
    rope_base: float = 10_000.0
    softcap: float = 30.0
    context: int = 2048
    embed_std: float = 0.005
    network: str = added("gpt")

    def __post_init__(self) -> None:
        for name, largest in LARGEST.items():
            value = getattr(self, name)
            for size in value if isinstance(value, tuple) else (value,):
                require(0 < size <= largest, f"model.{name} = {size}: expected 1 to {largest}")
        require(
            len(self.mlp_dims) == self.num_layers,
            f"model.mlp_dim names {len(self.mlp_dims)} widths, model.num_layers = "
            f"{self.num_layers}: name one width for all layers or one for each",
        )
        require(
            self.dim % self.num_heads == 0 and self.num_heads % self.num_kv_heads == 0,
            f"model.dim = {self.dim}, num_heads = {self.num_heads}, num_kv_heads = "
            f"{self.num_kv_heads}: each must divide the one before",
        )
        require(
            self.head_dim % 2 == 0,
            f"model.dim = {self.dim}, num_heads = {self.num_heads}: a head of {self.head_dim} "
            "channels cannot be rotated in pairs; make it even",
        )
        known = self.network in ("gpt", "hnet")
        require(known, f"model.network = {self.network!r}: expected 'gpt' or 'hnet'")
        require(self.rope_base > 0, f"model.rope_base = {self.rope_base}: expected more than 0")
        require(self.embed_std >= 0, f"model.embed_std = {self.embed_std}: expected 0 or more")
        require(self.softcap >= 0, f"model.softcap = {self.softcap}: expected 0 or more")

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.dim // self.num_heads

    @property
    def mlp_dims(self) -> tuple[int, ...]:
        """The width of each layer's MLP."""
        if isinstance(self.mlp_dim, tuple):
            return self.mlp_dim
        return (self.mlp_dim,) * self.num_layers


@dataclass(frozen=True)
class HNetPart:
    """The byte level of an H-Net (model/hnet.py), around the main network of [model].

    Shapes: blocks of width `dim` before (`encoder_layers`) and after (`decoder_layers`) the main
    network; `levers` are those of these blocks, as tables [hnet.levers.NAME].

    Chunks: every `stride` bytes of a document begin one; 0: where a router says so (M2), which the
    ratio loss, `ratio_weight` times, pushes towards `target_bytes` per chunk. A training batch has
    room for a share `spare_room` more chunks than these numbers need, and up to the progress
    `settled`, while a router learns, for a chunk in every other byte.

    `skip`: the decoder also reads what the encoder made of each byte.

    `zero_init`: output projections of blocks start at 0, other matrices orthogonal; without it all
    start as torch's nn.Linear does.
    """

    dim: int = 256
    num_heads: int = 8
    num_kv_heads: int = 4
    mlp_dim: int = 768
    encoder_layers: int = 2
    decoder_layers: int = 1
    stride: int = 4
    spare_room: float = 0.5
    target_bytes: float = 4.0
    ratio_weight: float = 0.03
    settled: float = 0.1
    zero_init: bool = True
    skip: bool = added(True)
    levers: dict[str, dict[str, Any]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name, largest in (
            ("dim", LARGEST["dim"]),
            ("num_heads", LARGEST["num_heads"]),
            ("num_kv_heads", LARGEST["num_kv_heads"]),
            ("mlp_dim", LARGEST["mlp_dim"]),
            ("encoder_layers", LARGEST["num_layers"]),
            ("decoder_layers", LARGEST["num_layers"]),
            ("stride", LARGEST["context"]),
        ):
            value, least = getattr(self, name), int(name != "stride")
            wanted = f"expected {least} to {largest}"
            require(least <= value <= largest, f"hnet.{name} = {value}: {wanted}")
        require(
            self.dim % self.num_heads == 0
            and self.num_heads % self.num_kv_heads == 0
            and self.dim // self.num_heads % 2 == 0,
            f"hnet.dim = {self.dim}, num_heads = {self.num_heads}, num_kv_heads = "
            f"{self.num_kv_heads}: each must divide the one before, into heads of even width",
        )
        spare = self.spare_room
        require(0 <= spare <= 100, f"hnet.spare_room = {spare}: expected 0 to 100")
        target = self.target_bytes
        require(1 < target <= 1e4, f"hnet.target_bytes = {target}: expected above 1, at most 10000")
        weight = self.ratio_weight
        require(0 <= weight < 1, f"hnet.ratio_weight = {weight}: expected 0 up to 1")
        share = self.settled
        require(0 <= share <= 1, f"hnet.settled = {share}: expected 0 to 1")

    @property
    def bytes_per_chunk(self) -> float:
        """How many bytes a chunk is meant to have."""
        return float(self.stride) or self.target_bytes

    def spec_of(self, spec: ModelSpec, num_layers: int) -> ModelSpec:
        """The shapes of blocks at byte level around the main network of `spec`."""
        return replace(
            spec,
            num_layers=num_layers,
            dim=self.dim,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            mlp_dim=self.mlp_dim,
        )


# Groups of parameters, each with a learning rate and a weight decay; see train/groups.py.
GROUPS = ("matrix", "embed", "scalar")


def parse_points(points: tuple[str, ...], where: str) -> tuple[tuple[float, float], ...]:
    """("1024@0.1", "2048@1") -> ((1024, 0.1), (2048, 1)): each value holds up to its progress."""
    parsed = []
    for point in points:
        value, _, share = point.partition("@")
        try:
            parsed.append((float(value), float(share)))
        except ValueError:
            require(False, f"{where}: {point!r} is not 'value@progress', as in '1024@0.1'")
    shares = [share for _, share in parsed]
    rising = shares == sorted(set(shares)) and all(0 <= share <= 1 for share in shares)
    require(rising, f"{where}: progress must rise from 0 to 1, not {shares}")
    return tuple(parsed)


@dataclass(frozen=True)
class TrainPart:
    """Budget, batch, schedules and learning rates.

    Budgets: a limit of 0 is no limit; training ends at the first limit it reaches.
    `reserve_seconds` of `budget_seconds` are kept for calibration and tuning after training.

    Batch: a step has `num_micro_batches` micro-batches of `micro_batch_tokens` tokens, or of the
    sizes `micro_sizes` in turn. One rank joins small ones of whole sequences, up to
    `micro_batch_tokens`; the loss stays the same. Documents are cut at `context` tokens, or at
    `contexts` in turn, or at the length of the current stage: `stages` ("1024@0.1", "2048@1") cut
    at 1024 tokens up to a tenth of the run, then at 2048. After a change of stage the learning
    rates rise again over `rewarm_steps` steps. Documents of more than `piece_tokens` (0: none) are
    read in pieces, which are shuffled like documents; see data/order.py.

    Schedules: Muon's momentum rises from `momentum_start` to `momentum` over the first share
    `momentum_warmup` of the run, or over `momentum_warmup_steps` steps (0: the share decides).
    `decay_curve` scales weight decay over the run: ("1@0.7", "0.5@1") is constant up to 0.7 and
    falls to a half at the end. `matrix_decay_curve`, `embed_decay_curve` and `scalar_decay_curve`
    replace it for one group of parameters. Over the last share `momentum_cooldown` of the run the
    momentum falls back to `momentum_start`. Rates fall with the power `warmdown_power` of what is
    left of the run (modded-nanogpt: record 38 to 89, and entry 20 of its optimization track).

    Optimizer: `matrix_optimizer` is "muon", or "adam" to treat matrices as all other weights.
    `embed_betas` and `scalar_betas` replace `adam_betas` for one group of parameters. Adam steps
    once in `adam_every` steps, on the sum of their clipped gradients (modded-nanogpt, record 39).
    With `cautious_decay`, Muon's weight decay acts only where the step shrinks the weight anyway
    (Chen et al. 2025, arXiv:2510.12402). With `neuron_beta`, Muon evens out the updates of the
    neurons of an MLP (NorMuon, see train/muon.py). With `query_rows`, queries and keys are
    orthogonalized in blocks of so many rows (modded-nanogpt, record 80: two heads).

    Validation: every `validate_every_seconds` of training (0: only at the end) the held-out text is
    priced for the log. Training does not depend on it.
    """

    seed: int = 1337
    budget_seconds: float = 600.0
    reserve_seconds: float = 0.0
    budget_steps: int = 0
    budget_tokens: int = 0
    budget_flops: float = 0.0
    order: str = "documents"
    context: int = 2048
    contexts: tuple[int, ...] = ()
    stages: tuple[str, ...] = ()
    rewarm_steps: int = 32
    micro_batch_tokens: int = 98_304
    micro_sizes: tuple[int, ...] = ()
    num_micro_batches: int = 8
    matrix_lr: float = 0.026
    embed_lr: float = 0.03
    scalar_lr: float = 0.02
    matrix_decay: float = 0.095
    embed_decay: float = 0.085
    scalar_decay: float = 0.02
    decay_curve: tuple[str, ...] = ()
    newton_schulz: str = "polar"
    row_norm: bool = True
    momentum: float = 0.97
    momentum_start: float = 0.92
    momentum_warmup: float = 0.3
    adam_betas: tuple[float, float] = (0.9, 0.99)
    clip: float = 0.3
    warmdown: float = 0.85
    lr_floor: float = 0.1
    checkpoint_seconds: float = 60.0
    log_every: int = 1
    validate_every_seconds: float = 0.0
    piece_tokens: int = added(0)
    momentum_warmup_steps: int = added(0)
    matrix_decay_curve: tuple[str, ...] = added(())
    embed_decay_curve: tuple[str, ...] = added(())
    scalar_decay_curve: tuple[str, ...] = added(())
    matrix_optimizer: str = added("muon")
    embed_betas: tuple[float, ...] = added(())
    scalar_betas: tuple[float, ...] = added(())
    cautious_decay: bool = added(False)
    adam_every: int = added(1)
    neuron_beta: float = added(0.0)
    query_rows: int = added(0)
    momentum_cooldown: float = added(0.0)
    warmdown_power: float = added(1.0)

    def __post_init__(self) -> None:
        budgets = (self.budget_seconds, self.budget_steps, self.budget_tokens, self.budget_flops)
        has_budget = min(budgets) >= 0 and max(budgets) > 0
        require(has_budget, "train.budget_seconds, budget_steps, budget_tokens: give one above 0")
        reserve = self.reserve_seconds
        # Without a limit in seconds, there is no budget to keep seconds from.
        require(
            0 <= reserve < self.budget_seconds or self.budget_seconds == 0 <= reserve,
            f"train.reserve_seconds = {reserve}: expected less than budget_seconds",
        )
        for context, _ in self.context_stages:
            whole = context > 0 and context == int(context)
            require(whole, f"train.stages: {context} is not a positive number of tokens")
        require(
            not self.stages or (self.context_stages[-1][1] == 1 and not self.contexts),
            "train.stages: the last must reach 1, and train.contexts must be empty",
        )
        for name in ("decay_curve", *(f"{group}_decay_curve" for group in GROUPS)):
            parse_points(getattr(self, name), f"train.{name}")
        for name in ("embed_betas", "scalar_betas"):
            betas = getattr(self, name)
            fits = not betas or (len(betas) == 2 and all(0 <= beta < 1 for beta in betas))
            require(fits, f"train.{name} = {list(betas)}: expected two numbers from 0 up to 1")
        known = self.newton_schulz in ("polar", "classic")
        require(known, f"train.newton_schulz = {self.newton_schulz!r}: expected polar or classic")
        known = self.matrix_optimizer in ("muon", "adam")
        require(
            known, f"train.matrix_optimizer = {self.matrix_optimizer!r}: expected 'muon' or 'adam'"
        )
        for name in ("warmdown", "momentum_cooldown"):
            share = getattr(self, name)
            require(0 <= share <= 1, f"train.{name} = {share}: expected 0 to 1")
        beta = self.neuron_beta
        require(0 <= beta < 1, f"train.neuron_beta = {beta}: expected 0 up to 1")
        power = self.warmdown_power
        require(0 < power <= 10, f"train.warmdown_power = {power}: expected above 0, at most 10")
        sizes = ("micro_batch_tokens", "num_micro_batches", "context", "log_every", "adam_every")
        for name in sizes:
            value = getattr(self, name)
            require(value > 0, f"train.{name} = {value}: expected a positive number")
        every = self.validate_every_seconds
        require(every >= 0, f"train.validate_every_seconds = {every}: expected 0 or more")
        for name in ("piece_tokens", "momentum_warmup_steps", "rewarm_steps", "query_rows"):
            value = getattr(self, name)
            require(value >= 0, f"train.{name} = {value}: expected 0 or more")
        shortest = min(self.contexts, default=1)
        require(shortest > 0, f"train.contexts: {shortest} is not a positive number")
        known = self.order in ("documents", "sequences")
        require(known, f"train.order = {self.order!r}: expected 'documents' or 'sequences'")

    @property
    def context_stages(self) -> tuple[tuple[float, float], ...]:
        """`stages` as numbers: length in tokens, and the progress up to which it holds."""
        return parse_points(self.stages, "train.stages")

    @property
    def longest_context(self) -> int:
        """The largest length at which training cuts documents."""
        stages = [int(context) for context, _ in self.context_stages]
        return max(self.contexts or stages or [self.context])


@dataclass(frozen=True)
class QuantPart:
    """How weights are quantized: `rules`, in order, are "pattern scheme".

    A tensor takes the scheme of the first rule whose pattern matches its name. The other values
    are for schemes that need the inputs of a matrix: gptqB:k and gridS.
    """

    rules: tuple[str, ...] = ("* fp16",)
    # Sets the steps of all grids; 0: choose the constant with which the file fills the cap.
    constant: float = 0.0
    # Without grids: the steps of all gptqB:k are multiplied by the least constant, 1 or more, with
    # which the file does not exceed the cap.
    fit: bool = added(False)
    # Matrices of gptqB with the largest inputs that get one more bit.
    finer_matrices: int = added(0)
    # Text for the calibration: "train", or "self", which the model writes.
    calibration: str = "train"
    calibration_batches: int = 16
    calibration_batch_tokens: int = 65_536
    # Batches with a backward pass, for what errors in the weights cost.
    fisher_batches: int = 4
    awq_groups: int = 1
    awq_group_columns: int = 64
    lqer_tensors: int = 0
    lqer_rank: int = 4
    lqer_left_bits: int = 2
    lqer_right_bits: int = 4
    lqer_group: int = 64
    lqer_symmetric: bool = False
    lqer_weighted: bool = True
    # Chooses, factors and rounds corrections as PR 1797 does.
    lqer_published: bool = added(False)
    tune_steps: int = 0
    tune_lr: float = 0.01

    def __post_init__(self) -> None:
        require(
            self.calibration in ("train", "self"),
            f"quant.calibration = {self.calibration!r}: expected 'train' or 'self'",
        )
        for name in ("calibration_batches", "calibration_batch_tokens", "fisher_batches"):
            value = getattr(self, name)
            require(value > 0, f"quant.{name} = {value}: expected a positive number")
        for name in (
            "constant",
            "finer_matrices",
            "awq_groups",
            "lqer_tensors",
            "tune_steps",
            "tune_lr",
        ):
            value = getattr(self, name)
            require(value >= 0, f"quant.{name} = {value}: expected 0 or more")
        for name in ("awq_group_columns", "lqer_group"):
            value = getattr(self, name)
            require(value > 0, f"quant.{name} = {value}: expected 1 or more")
        rank = self.lqer_rank
        require(0 < rank <= 64, f"quant.lqer_rank = {rank}: expected 1 to 64")
        for name in ("lqer_left_bits", "lqer_right_bits"):
            value = getattr(self, name)
            require(2 <= value <= 8, f"quant.{name} = {value}: expected 2 to 8")
        for rule in self.rules:
            require(
                len(rule.split()) == 2,
                f"quant.rules: {rule!r} is not 'pattern scheme', as in '*.up.weight int6:12.85'",
            )
            require(
                not (self.finer_matrices and rule.split()[1].startswith("gptq8")),
                f"quant.finer_matrices = {self.finer_matrices} with {rule!r}, which has 8 bits "
                "already; use gptq7 or less",
            )


@dataclass(frozen=True)
class ScorePart:
    """How the system is scored: `score --adapt` does as this says, with the levers of scoring.

    Sizes: tokens per forward pass, and targets per chunk of adaptation.

    Windows of `context` tokens (0: model.context), one per `stride` targets (0: documents are cut
    and nothing overlaps), across the ends of documents if `flat`; in an `order`, see
    score/method.py.
    """

    batch_tokens: int = 65_536
    adapt_tokens: int = 8_192
    context: int = added(0)
    stride: int = added(0)
    flat: bool = added(False)
    order: str = added("stream")

    def __post_init__(self) -> None:
        for name in ("batch_tokens", "adapt_tokens"):
            value = getattr(self, name)
            require(value > 0, f"score.{name} = {value}: expected a positive number")
        for name in ("context", "stride"):
            value = getattr(self, name)
            require(value >= 0, f"score.{name} = {value}: expected 0 or more")
        known = self.order in ("stream", "published")
        require(known, f"score.order = {self.order!r}: expected 'stream' or 'published'")


@dataclass(frozen=True)
class LimitsPart:
    """The byte budget of model file, tokenizer and code together, and the time of a score.

    The audit refuses a score that took more than `score_seconds`, with loading and warm-up (0: only
    the auditor's own limit holds).
    """

    cap_bytes: int = 16_000_000
    score_seconds: float = added(0.0)

    def __post_init__(self) -> None:
        seconds = self.score_seconds
        require(seconds >= 0, f"limits.score_seconds = {seconds:g}: expected 0 or more")
        require(self.cap_bytes > 0, f"limits.cap_bytes = {self.cap_bytes}: expected more than 0")
