"""Every hook a lever may implement, by stage.

A lever is one file in `levers/`: a docstring, a frozen dataclass `Settings`, and `plug(settings,
spec)`, which returns an object with one or more of the methods below. `build` plugs it in. A seam
is a list resolved once when the model is built; an empty one costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from underpar.recipe import ModelSpec

# The token that begins every document, in every tokenizer here.
BOS_ID = 1

MODEL_SEAMS = ("embed", "qkv", "attn_out", "logits")


class LeverModule(Protocol):
    """The module that implements a lever; its name is its key in recipes, code and docs."""

    STAGE: str
    Settings: type

    def plug(self, settings: Any, spec: ModelSpec) -> Any:
        """The object whose methods are the hooks."""


class TextTransform(Protocol):
    """Data stage, seam `text`: a bijection of text that runs before the tokenizer.

    Words are transformed one by one: forward(x + y) == forward(x) + forward(y) wherever y begins
    with a space.
    """

    symbols: str
    """Code points that the tokenizer keeps as pieces of their own, in the order of their ids."""

    def forward(self, text: str) -> str:
        """The text to tokenize."""

    def inverse(self, text: str) -> str:
        """The source text; a DataError where `text` is none that `forward` gives."""

    def weights(self, text: str) -> npt.NDArray[np.int64]:
        """The byte law: source bytes behind each code point of a transformed text."""


class Past(Protocol):
    """Earlier tokens, wherever they live: in the same flat pack, or in a cache of lanes."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of q (N, H, D) over the keys and values (N, K, D) so far."""

    def previous(self, name: str, x: Tensor) -> Tensor:
        """x (N, ...) one token earlier, zeros where there is none; `name` is the caller's own.

        It may be another document's: mask it where a token is BOS_ID.
        """


class ModelHook(Protocol):
    """Model stage: an nn.Module with any of these, applied to each token on its own.

    Tensors are flat: tokens first. The same hooks run in training, scoring and stepping.
    """

    def embed(self, x: Tensor, tokens: Tensor, past: Past) -> Tensor:
        """Change the embedded tokens (N, dim)."""

    def qkv(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Change queries (N, H, D), keys and values (N, K, D) after norm and rotation."""

    def attn_out(self, layer: int, y: Tensor, x: Tensor, v: Tensor) -> Tensor:
        """Change the heads' output y (N, H, D), given the block's normed input x (N, dim)."""

    def logits(self, logits: Tensor) -> Tensor:
        """Change the capped logits (N, V)."""


class Averager(Protocol):
    """Train stage, seam `average`: keeps an average of the weights beside the live ones."""

    def start(self, weights: Mapping[str, Tensor]) -> None:
        """Take the initial weights."""

    def update(self, weights: Mapping[str, Tensor], step: int) -> None:
        """Fold in the weights after `step` steps."""

    def state(self) -> dict[str, Tensor]:
        """The average, by weight name; what is checkpointed and what packing gets."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Put a checkpointed average back."""


class Adapter(Protocol):
    """Infer stage, seam `adapt`: learns from tokens that were already priced."""

    def parameters(self, named: Mapping[str, Tensor]) -> list[Tensor]:
        """The model tensors that this adapter changes."""

    def update(self, parameters: list[Tensor]) -> None:
        """One step from the gradients on `parameters`."""
