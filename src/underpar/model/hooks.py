"""The hooks of a model's levers, by seam, resolved once when the model is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from torch import nn

from underpar.errors import LeverError
from underpar.recipe import nearest, require
from underpar.seams import ModelHook, check_call, methods_of

P = ParamSpec("P")
R = TypeVar("R")


class Every(Generic[P, R]):
    """Declares a seam at which every lever that has the method acts, in the order of the table.

    On an instance of Hooks it reads as a list of hooks with the signature of that method.
    """

    def __init__(self, method: Callable[Concatenate[ModelHook, P], R]) -> None:
        self.method = method

    def __get__(self, hooks: object, owner: type) -> list[Callable[P, R]]:
        """For type checkers: an instance has an attribute of its own, which comes first."""
        raise AttributeError(self.method.__name__)


class One(Generic[P, R]):
    """Declares a seam with a place for one lever, which replaces what the baseline does there.

    On an instance of Hooks it reads as one hook with the signature of that method, or None.
    """

    def __init__(self, method: Callable[Concatenate[ModelHook, P], R]) -> None:
        self.method = method

    def __get__(self, hooks: object, owner: type) -> Callable[P, R] | None:
        """For type checkers: an instance has an attribute of its own, which comes first."""
        raise AttributeError(self.method.__name__)


class Hooks:
    """The hooks of a model: one attribute per seam. An empty seam costs nothing."""

    progress = Every(ModelHook.progress)
    check = Every(ModelHook.check)
    order = Every(ModelHook.order)
    frequencies = One(ModelHook.frequencies)
    embed = Every(ModelHook.embed)
    stem = Every(ModelHook.stem)
    before = Every(ModelHook.before)
    mix = Every(ModelHook.mix)
    normed = Every(ModelHook.normed)
    qkv = Every(ModelHook.qkv)
    reach = Every(ModelHook.reach)
    attn_out = Every(ModelHook.attn_out)
    activate = One(ModelHook.activate)
    mlp_out = Every(ModelHook.mlp_out)
    branch = Every(ModelHook.branch)
    adjust = Every(ModelHook.adjust)
    after = Every(ModelHook.after)
    finish = Every(ModelHook.finish)
    cap = One(ModelHook.cap)

    def __init__(self, levers: Mapping[str, nn.Module]) -> None:
        for name, lever in levers.items():
            _check_lever(name, lever)
        self._levers = levers
        for seam, kind in SEAMS.items():
            hooks = self._hooks_at(seam)
            every = [hook for _, hook in hooks]
            setattr(self, seam, every if kind is Every else _only(hooks, f"the seam {seam!r}"))

    def wiring(self, layer: int) -> Callable[..., None] | None:
        """What visits this layer's block in place of the block's own order of branches."""
        wires = dict(self._hooks_at("wires"))
        hooks = [(name, hook) for name, hook in self._hooks_at("wire") if wires[name](layer)]
        return _only(hooks, f"the wiring of layer {layer}")

    def change(self, **hooks: Callable[..., Any]) -> HookChange:
        """Add hooks by seam while the model lives; at a seam for one lever, replace the hook.

        The change holds from here on, or in a `with` statement to the end of its block. Nothing
        else may change hooks.
        """
        for seam, hook in hooks.items():
            if seam not in SEAMS:
                raise LeverError(f"no seam {seam!r} in a model{nearest(seam, list(SEAMS))}")
            check_call("a change of hooks", hook, getattr(ModelHook, seam))
        return HookChange(self, hooks)

    def _hooks_at(self, seam: str) -> list[tuple[str, Callable[..., Any]]]:
        levers = self._levers.items()
        return [(name, getattr(lever, seam)) for name, lever in levers if hasattr(lever, seam)]


class HookChange:
    """A change of hooks that is made at once, and undone at the end of a `with` block."""

    def __init__(self, model_hooks: Hooks, hooks: Mapping[str, Callable[..., Any]]) -> None:
        self._model_hooks, self._hooks = model_hooks, hooks
        self._replaced: dict[str, Callable[..., Any] | None] = {}
        for seam, hook in hooks.items():
            if SEAMS[seam] is Every:
                getattr(model_hooks, seam).append(hook)
            else:
                self._replaced[seam] = getattr(model_hooks, seam)
                setattr(model_hooks, seam, hook)

    def __enter__(self) -> None:
        """The change was made when it was asked for."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Undo the change."""
        for seam, hook in self._hooks.items():
            if SEAMS[seam] is Every:
                getattr(self._model_hooks, seam).remove(hook)
            else:
                setattr(self._model_hooks, seam, self._replaced[seam])


# Seam -> Every or One, in the order of the forward pass.
SEAMS = {name: type(seam) for name, seam in vars(Hooks).items() if isinstance(seam, Every | One)}


def _check_lever(name: str, lever: nn.Module) -> None:
    """Refuse a lever with a public method that is no hook, or a hook that its seam cannot call."""
    classes = type(lever).__mro__
    own = classes[: classes.index(nn.Module)]
    known = methods_of(ModelHook)
    for method in (method for kind in own for method in methods_of(kind)):
        if method not in known:
            raise LeverError(
                f"lever {name!r}: its method {method!r} is no hook of a model"
                f"{nearest(method, known)}; rename it, or begin its name with an underscore"
            )
        check_call(f"lever {name!r}", getattr(lever, method), getattr(ModelHook, method))


def _only(hooks: list[tuple[str, Callable[..., Any]]], what: str) -> Callable[..., Any] | None:
    names = " and ".join(name for name, _ in hooks)
    require(len(hooks) < 2, f"levers {names}: both take {what}; name one of them")
    return hooks[0][1] if hooks else None
