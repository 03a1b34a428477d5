"""Parquet files as a stream of texts, through pyarrow."""

from collections.abc import Iterator
from pathlib import Path

from underpar.errors import DataError

# Rows held at a time; a row group of the file may hold a million.
_ROWS = 256


def read_column(path: Path, field: str) -> Iterator[bytes]:
    """The values of a text column in UTF-8, undecoded; a null is an empty text."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"{path}: reading .parquet needs the package pyarrow (pip install pyarrow)"
        ) from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            kinds = {column.name: column.type for column in file.schema_arrow}
            if field not in kinds:
                names = ", ".join(list(kinds)[:8])
                raise DataError(f'{path}: no column "{field}", it has {names}; choose with --field')
            texts = (pyarrow.string(), pyarrow.large_string())
            if kinds[field] not in texts:
                raise DataError(f'{path}: column "{field}" holds {kinds[field]}, not text')
            for batch in file.iter_batches(batch_size=_ROWS, columns=[field]):
                # As bytes, so that the same code checks the UTF-8 of all file types.
                for value in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
                    number += 1
                    yield value or b""
    except (OSError, pyarrow.ArrowException) as error:
        # Messages of the library may have several lines.
        detail = " ".join(str(error).split())
        raise DataError(f"{path}: row {number + 1}: cannot be read: {detail}") from error
