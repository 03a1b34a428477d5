"""Mistakes a user can make or meet. Each message is one line: value, expectation, place."""


class UnderparError(Exception):
    """Base of every error the command line turns into one line and exit code 2."""


class RecipeError(UnderparError):
    """A recipe, an override or a lever setting that cannot be used."""


class LeverError(UnderparError):
    """A lever whose file does not follow the convention, or whose hooks do not fit their seams."""


class DataError(UnderparError):
    """Text, a tokenizer or a shard that is missing, damaged or does not fit."""


class RunError(UnderparError):
    """A run folder that lacks a file or holds one that does not belong to it."""


class ArtifactError(UnderparError):
    """A model file that is damaged, foreign or over its cap."""


class CodecError(UnderparError):
    """A compressed stream that is damaged or was made by another artifact or machine."""


class RuleError(UnderparError):
    """A step that would break a rule of honest scoring."""


class BenchError(UnderparError):
    """A measurement that cannot be trusted or a comparison that cannot be made."""
