"""Fills the templates of this folder, which may include each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

from underpar.errors import RunError

NO_FUNCTIONS: Mapping[str, Callable[..., Any]] = {}


def fill(
    name: str,
    filters: Mapping[str, Callable[..., Any]] = NO_FUNCTIONS,
    tests: Mapping[str, Callable[..., Any]] = NO_FUNCTIONS,
    **values: Any,
) -> str:
    """The template `name` as text; a value that is missing is an error."""
    try:
        import jinja2
    except ImportError as error:
        raise RunError("the report needs the package jinja2; run 'pip install jinja2'") from error
    folder = resources.files("underpar.report")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda file: folder.joinpath(file).read_text()),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= filters
    environment.tests |= tests
    return environment.get_template(name).render(**values)
