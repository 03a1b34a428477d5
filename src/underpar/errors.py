"""Errors that a user can cause or meet. A message is one line: the value, what to do instead."""


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


class CodecError(UnderparError):
    """A compressed stream that is damaged or was made by another artifact or machine."""


class RuleError(UnderparError):
    """A request that would break a rule of honest scoring."""


class BenchError(UnderparError):
    """A measurement that cannot be trusted or a comparison that cannot be made."""
