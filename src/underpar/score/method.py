"""How a score is made: windows, order, and the levers that adapt or mix. Its label names it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from underpar.errors import RuleError

# Decodable: whatever decides a price follows from targets priced before it.
STREAM = "stream"
# As the records have it: documents by length, which a decoder could not know.
PUBLISHED = "published"
# What it takes to tell a decoder the step at which learning ended.
STOP_BITS = 32.0


@dataclass(frozen=True)
class Method:
    """What `underpar score` is asked for.

    `stride` is the number of targets that a window owns: windows overlap where it is less than the
    context; 0 is the context itself. With `flat` they reach over the ends of documents. `levers`
    are levers of the stage "infer". After `seconds` nothing is learnt any more; 0: no limit.
    """

    levers: tuple[str, ...] = ()
    stride: int = 0
    flat: bool = False
    order: str = STREAM
    seconds: float = 0.0
    name: str = ""
    """A label to use instead of one made of these parts."""

    def __post_init__(self) -> None:
        if self.order not in (STREAM, PUBLISHED):
            raise RuleError(f"order {self.order!r}: expected {STREAM} or {PUBLISHED}")
        # As it is written, no number is refused too.
        if not (self.stride >= 0 and self.seconds >= 0):
            raise RuleError(f"stride {self.stride}, seconds {self.seconds:g}: expected 0 or more")

    @property
    def label(self) -> str:
        """The name of the score and of its file."""
        if self.name:
            return self.name
        parts = [f"sliding{self.stride}"] if self.stride else []
        parts += ["flat"] if self.flat else []
        parts += [*self.levers]
        parts += [PUBLISHED] if self.order == PUBLISHED else []
        return "+".join(parts) or "plain"

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "levers": list(self.levers)}


PLAIN = Method()
# The recipe's own levers of scoring.
ADAPT = Method(name="adapt")


def method_from_dict(tree: dict[str, Any]) -> Method:
    """The method that `as_dict` wrote."""
    try:
        return Method(**{**tree, "levers": tuple(tree.get("levers", ()))})
    except TypeError as error:
        raise RuleError(f"not a way to score ({error})") from error
