"""Read an artifact's file, and build its tokenizer, which must fit its model and the data."""

from __future__ import annotations

import hashlib
from pathlib import Path

from underpar.artifact.unpack import Artifact, LazyArtifact
from underpar.build.levers import transform_of
from underpar.data.tokens.tokenizer import Tokenizer, open_tokenizer, read_model
from underpar.errors import ArtifactError, DataError


def build_tokenizer(artifact: Artifact) -> Tokenizer:
    """The artifact's tokenizer; one that does not fit its model is refused."""
    try:
        tokenizer = open_tokenizer(artifact.tokenizer, transform_of(artifact.recipe))
    except DataError as error:
        raise ArtifactError(f"artifact's tokenizer cannot be used: {error}") from error
    if tokenizer.vocab_size != artifact.recipe.model.vocab_size:
        raise ArtifactError(
            f"artifact's tokenizer has {tokenizer.vocab_size} pieces, its model expects "
            f"{artifact.recipe.model.vocab_size}"
        )
    return tokenizer


def read_artifact(path: Path) -> tuple[Artifact, str]:
    """The artifact in a file and the SHA-256 of that file, in hex.

    If the artifact only names its tokenizer, the file tokenizer.model beside it holds it.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"cannot read artifact {path}: {error.strerror}") from error
    try:
        file = LazyArtifact(data)
        beside = path.with_name("tokenizer.model")
        tokenizer = read_model(beside) if file.names_tokenizer else None
        return file.unpack(tokenizer), hashlib.sha256(data).hexdigest()
    except (ArtifactError, DataError) as error:
        why = f"{path}: {error}; run 'underpar pack RUN' again"
        raise ArtifactError(why) from error


def require_same_tokenizer(artifact: Artifact, tokenizer: Tokenizer) -> None:
    """Refuse data that were built with another tokenizer."""
    identity = build_tokenizer(artifact).identity
    if identity != tokenizer.identity:
        raise ArtifactError(
            f"artifact has tokenizer {identity[:12]}, the data were built with "
            f"{tokenizer.identity[:12]} (transform {tokenizer.transform_name}); run "
            "'underpar data build TEXT --out NEW --recipe RUN/recipe.toml --tokenizer "
            "RUN/tokenizer.model'"
        )
