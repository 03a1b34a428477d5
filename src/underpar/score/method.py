"""How a score is made: windows, order, the levers that adapt or mix, and the limit of time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from underpar.core.dist import from_main
from underpar.errors import RecipeError, RuleError
from underpar.recipe import fields_from

if TYPE_CHECKING:
    from collections.abc import Callable

    from underpar.core.runtime import Runtime

# Decodable: everything a price depends on follows from targets priced before it.
STREAM = "stream"
# The order of the records: documents by length, which a decoder could not know.
PUBLISHED = "published"
# The size of the number that tells a decoder at which step learning ended.
STOP_BITS = 32.0
# The size of the number of chunks, for rates that fall until the last one.
COUNT_BITS = 32.0


@dataclass(frozen=True)
class Method:
    """How `underpar score` shall score.

    `stride` is the number of targets that a window owns; windows overlap if it is less than the
    context, and 0 stands for the context. With `flat` windows cross the ends of documents. `levers`
    are levers of the stage "infer". Adapters stop learning after `seconds`; 0: no limit.
    """

    levers: tuple[str, ...] = ()
    stride: int = 0
    flat: bool = False
    order: str = STREAM
    seconds: float = 0.0
    # A label; without it the label is made of the other fields.
    name: str = ""

    def __post_init__(self) -> None:
        if self.order not in (STREAM, PUBLISHED):
            raise RuleError(f"order {self.order!r}: expected {STREAM} or {PUBLISHED}")
        # Written so that NaN is refused too.
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
# The scoring levers that the recipe names.
ADAPT = Method(name="adapt")


def method_from_dict(tree: dict[str, Any]) -> Method:
    """The method that `as_dict` wrote."""
    try:
        return Method(**fields_from(Method, tree, "how"))
    except RecipeError as error:
        raise RuleError(f"not a way to score ({error})") from error


class Deadline:
    """When learning ends, by the main rank's clock; without `seconds` never."""

    def __init__(self, seconds: float, runtime: Runtime, now: Callable[[], float]) -> None:
        self._runtime = runtime
        self._now = now
        self._end = now() + seconds if seconds else float("inf")

    def spend(self, seconds: float) -> None:
        """Count seconds that were used before a stopped score was continued."""
        self._end -= seconds

    def is_over(self) -> bool:
        """True on every rank once the time is over on the main rank."""
        return bool(from_main(float(self._now() > self._end), self._runtime))
