"""A recipe's levers: find them by name, check their settings, and plug them in by stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from underpar.data.transforms import IDENTITY
from underpar.errors import LeverError
from underpar.levers import LEVERS, lever_module
from underpar.recipe import ModelSpec, Recipe, Tree, fields_from, require, require_known
from underpar.schema import HNetPart
from underpar.seams import LeverModule, check_stage


def lever_names() -> list[str]:
    """All levers, in the order in which levers at one seam act."""
    return list(LEVERS)


def find_lever(name: str) -> LeverModule:
    """The module of a lever; the error for an unknown name suggests the nearest one."""
    require_known(name, list(LEVERS), f"unknown lever {name!r}")
    return lever_module(name)


# The largest number in a lever's settings. A recipe from a stranger is checked before anything of
# that size is allocated.
LARGEST_SIZE = 1 << 24


def lever_settings(recipe: Recipe) -> dict[str, Any]:
    """Checked settings of every lever that the recipe names."""
    return _settings_of(recipe.levers, "levers")


def _settings_of(levers: Mapping[str, Tree], where: str) -> dict[str, Any]:
    settings = {}
    for name, table in levers.items():
        module = find_lever(name)
        kind = module.Settings
        settings[name] = kind(**fields_from(kind, table, f"{where}.{name}"))
        _check_sizes(f"{where}.{name}", settings[name])
        for other in getattr(module, "NEEDS", ()):
            require(other in levers, f"lever {name!r} does nothing without {other!r}")
    return settings


def _check_sizes(where: str, settings: Any) -> None:
    for key, value in asdict(settings).items():
        largest = max(value, default=0) if isinstance(value, tuple) else value
        require(
            not isinstance(largest, int) or largest <= LARGEST_SIZE,
            f"{where}.{key} = {value}: expected at most {LARGEST_SIZE}",
        )


def resolve_levers(recipe: Recipe) -> Recipe:
    """The recipe with all defaults of its levers written out, so that its hash covers them.

    Settings that older versions lack are left out at their defaults, as in `to_tree`.
    """
    resolved = replace(recipe, levers=_resolved(lever_settings(recipe)))
    if recipe.hnet is None:
        return resolved
    levers = _resolved(_settings_of(recipe.hnet.levers, "hnet.levers"))
    return replace(resolved, hnet=replace(recipe.hnet, levers=levers))


def _resolved(levers: Mapping[str, Any]) -> dict[str, Tree]:
    tables = {}
    for name, settings in levers.items():
        late = {f.name for f in fields(settings) if f.metadata.get("added")}
        unset = {key for key in late if getattr(settings, key) == getattr(type(settings), key)}
        tables[name] = {k: v for k, v in asdict(settings).items() if k not in unset}
    return tables


def plug_levers(recipe: Recipe, stage: str) -> dict[str, Any]:
    """The recipe's levers of one stage, built from their settings, by name."""
    return _plug(lever_settings(recipe), stage, recipe.model)


def plug_outer_levers(part: HNetPart, spec: ModelSpec) -> dict[str, Any]:
    """The levers of an H-Net's byte level, for blocks of these shapes, by name."""
    settings = _settings_of(part.levers, "hnet.levers")
    for name in settings:
        stage = find_lever(name).STAGE
        require(stage == "model", f"hnet.levers.{name}: a lever of stage {stage}; see [levers]")
    return _plug(settings, "model", spec)


def _plug(settings: Mapping[str, Any], stage: str, spec: ModelSpec) -> dict[str, Any]:
    # Not in the recipe's order: LEVERS has the order in which levers at one seam act.
    return {
        name: plug_lever(name, settings[name], spec)
        for name in LEVERS
        if name in settings and stage == lever_module(name).STAGE
    }


def plug_lever(name: str, settings: Any, spec: ModelSpec) -> Any:
    """The object whose methods are the lever's hooks: from its class `Lever`, or from `plug`."""
    module = lever_module(name)
    make = getattr(module, "plug", None) or getattr(module, "Lever", None)
    if make is None:
        raise LeverError(
            f"lever {name!r}: {LEVERS[name]} has neither a class Lever(settings, spec) nor a "
            "function plug(settings, spec); define one of them"
        )
    lever = make(settings, spec)
    check_stage(name, module.STAGE, lever)
    return lever


def transform_of(recipe: Recipe) -> str:
    """The name of the recipe's text transform, a lever of stage "data"; else "identity"."""
    names = list(plug_levers(recipe, "data"))
    require(len(names) < 2, f"levers {' and '.join(names)}: one text transform at a time")
    return names[0] if names else IDENTITY
