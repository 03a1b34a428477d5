"""The hooks of a model's levers, by seam, resolved once when the model is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from torch import nn

from underpar.errors import LeverError
from underpar.recipe import nearest, require
from underpar.seams import ModelHook, ModelLever, ModelPlace, check_call, methods_of

Hook = Callable[..., Any]

if TYPE_CHECKING:
    P = ParamSpec("P")
    R = TypeVar("R")

    def _every(method: Callable[Concatenate[Any, P], R]) -> list[Callable[P, R]]: ...
    def _one(method: Callable[Concatenate[Any, P], R]) -> Callable[P, R] | None: ...


class Hooks:
    """The hooks of a model, one attribute per seam. An empty seam costs nothing.

    The seams are the methods of ModelHook, each a list here, and of ModelPlace, each one hook or
    None.
    """

    def __init__(self, levers: Mapping[str, nn.Module]) -> None:
        for name, lever in levers.items():
            _check_lever(name, lever)
        self._levers = levers
        if TYPE_CHECKING:
            # The types of the attributes, taken from the methods.
            self.progress = _every(ModelHook.progress)
            self.check = _every(ModelHook.check)
            self.order = _every(ModelHook.order)
            self.embed = _every(ModelHook.embed)
            self.stem = _every(ModelHook.stem)
            self.before = _every(ModelHook.before)
            self.mix = _every(ModelHook.mix)
            self.normed = _every(ModelHook.normed)
            self.qkv = _every(ModelHook.qkv)
            self.reach = _every(ModelHook.reach)
            self.attn_out = _every(ModelHook.attn_out)
            self.mlp_out = _every(ModelHook.mlp_out)
            self.branch = _every(ModelHook.branch)
            self.adjust = _every(ModelHook.adjust)
            self.after = _every(ModelHook.after)
            self.finish = _every(ModelHook.finish)
            self.frequencies = _one(ModelPlace.frequencies)
            self.attend = _one(ModelPlace.attend)
            self.activate = _one(ModelPlace.activate)
            self.cap = _one(ModelPlace.cap)
        for seam in methods_of(ModelHook):
            setattr(self, seam, [hook for _, hook in self._hooks_at(seam)])
        for seam in methods_of(ModelPlace):
            setattr(self, seam, _only(self._hooks_at(seam), f"the seam {seam!r}"))

    def wiring(self, layer: int) -> Hook | None:
        """What visits this layer's block in place of the block's own order of branches."""
        wires = dict(self._hooks_at("wires"))
        hooks = [(name, hook) for name, hook in self._hooks_at("wire") if wires[name](layer)]
        return _only(hooks, f"the wiring of layer {layer}")

    def change(self, **hooks: Hook) -> ExitStack:
        """Add hooks by seam while the model lives; in a place for one hook, replace it.

        The change holds from now on, or in a `with` statement to the end of its block. Nothing
        else may change hooks.
        """
        undo = ExitStack()
        places, seams = methods_of(ModelPlace), methods_of(ModelHook)
        for seam, hook in hooks.items():
            if seam not in places + seams:
                raise LeverError(f"no seam {seam!r} in a model{nearest(seam, places + seams)}")
            check_call("a change of hooks", hook, getattr(ModelLever, seam))
            if seam in places:
                undo.callback(setattr, self, seam, getattr(self, seam))
                setattr(self, seam, hook)
            else:
                undo.callback(getattr(self, seam).remove, hook)
                getattr(self, seam).append(hook)
        return undo

    def _hooks_at(self, seam: str) -> list[tuple[str, Hook]]:
        levers = self._levers.items()
        return [(name, getattr(lever, seam)) for name, lever in levers if hasattr(lever, seam)]


def _check_lever(name: str, lever: nn.Module) -> None:
    """Refuse a lever with a public method that is no hook, or a hook that its seam cannot call."""
    classes = type(lever).__mro__
    known = [method for kind in ModelLever.__mro__ for method in methods_of(kind)]
    for method in (m for kind in classes[: classes.index(nn.Module)] for m in methods_of(kind)):
        if method not in known:
            raise LeverError(
                f"lever {name!r}: its method {method!r} is no hook of a model"
                f"{nearest(method, known)}; rename it, or begin its name with an underscore"
            )
        check_call(f"lever {name!r}", getattr(lever, method), getattr(ModelLever, method))


def _only(hooks: list[tuple[str, Hook]], what: str) -> Hook | None:
    names = " and ".join(name for name, _ in hooks)
    require(len(hooks) < 2, f"levers {names}: both take {what}; name one of them")
    return hooks[0][1] if hooks else None
