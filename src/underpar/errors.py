"""Errors that a user can cause or meet. A message is one line: the value, what to do instead."""

# What Python raises if a value of a file has another type, size, name or nesting than its writer's.
DAMAGE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


def one_line(text: object, most_characters: int = 600) -> str:
    """Text from outside, for a terminal: control characters escaped, its middle left out if long.

    File names, JSON values and names of tensors may hold line breaks and terminal sequences.
    """
    line = str(text)
    if len(line) > most_characters:
        half = most_characters // 2
        line = f"{line[:half]} [...] {line[-half:]}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


class UnderparError(Exception):
    """Base of all errors that the command line prints as one line, with exit code 2."""


class RecipeError(UnderparError):
    """A recipe, an override or a lever setting that cannot be used."""


class LeverError(UnderparError):
    """A lever whose file does not follow the convention, or whose hooks do not fit their seams."""


class DataError(UnderparError):
    """Text, a tokenizer or a shard that is missing, damaged or does not belong together."""


class RunError(UnderparError):
    """A run folder that lacks a file, or has a file of another run."""


class ArtifactError(UnderparError):
    """A model file that is damaged, foreign or over its cap."""


class DivergedError(ArtifactError):
    """A run whose weights, logits or gradients are not finite: there is no model to pack."""


class CodecError(UnderparError):
    """A compressed stream that is damaged or was made by another artifact or machine."""


class RuleError(UnderparError):
    """A request that would break a rule of honest scoring."""


class BenchError(UnderparError):
    """A measurement that cannot be trusted or a comparison that cannot be made."""


class ExactError(UnderparError):
    """A part of a model whose results exact mode cannot make the same on every machine."""
