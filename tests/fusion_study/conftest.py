"""Candidates in Triton's interpreter."""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable[..., None]]:
    """Calls a function in a process in which Triton interprets its kernels."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            # Triton decides when it is imported. The first task starts the process.
            patch.setenv("TRITON_INTERPRET", "1")
            patch.setenv("OMP_NUM_THREADS", "1")
            pool.submit(importlib.import_module, "triton.knobs").exception()
        yield lambda function, *args: pool.submit(function, *args).result()
