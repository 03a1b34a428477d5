"""From a scoring method to a score: which levers act, and which engine runs the loop.

The path of a score is `cli/judge.score`, `stages/score.score`, `run_method` here, then one of two
engines: `score/scorer.py` for documents, windows and adapters that follow the stream, or
`score/ttt/scorer.py` for adapters of each document.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from underpar.artifact.unpack import Artifact
from underpar.build.artifact import build_tokenizer
from underpar.build.levers import find_lever, lever_names, plug_levers, resolve_levers
from underpar.build.model import build_predictor
from underpar.compile.startup import warm_compiler
from underpar.core.runtime import Clock, Runtime
from underpar.data.shards import Shard
from underpar.errors import RecipeError, RuleError
from underpar.infer.tilt import Mixture
from underpar.recipe import Recipe, Tree, from_tree, merge, nearest, parse_override, to_tree
from underpar.score.ledger import Score
from underpar.score.method import ADAPT, PUBLISHED, STREAM, Method, method_from_dict
from underpar.score.scorer import Scorer
from underpar.score.tally import OnCommit, OnShare

if TYPE_CHECKING:
    from underpar.infer.predictor import Predictor
    from underpar.score.partial import Partial


# Values of [score] that only the method "adapt" takes from the recipe.
WINDOWS = ("context", "stride", "flat", "order")


@dataclass(frozen=True)
class ScoringRequest:
    """A method, the machine to run it on, and who is told of progress and prices.

    With a `partial` the score may be stopped and continued. `now` is the clock of time limits. The
    audit scores many short texts and has an `open_predictor` of its own.
    """

    method: Method
    runtime: Runtime
    clock: Clock = field(default_factory=lambda: Clock("load"))
    on_share: OnShare | None = None
    on_commit: OnCommit | None = None
    partial: Partial | None = None
    now: Callable[[], float] = time.monotonic
    open_predictor: Callable[..., Predictor] | None = None


def open_method(
    recipe: Recipe, method: Method, changes: Sequence[str] = ()
) -> tuple[Method, Recipe]:
    """The method with its levers, and the recipe with their settings (its own, or the defaults).

    `changes` set values of these levers or of [score], as in "levers.lora_ttt.rank=40". The method
    "adapt" scores as the recipe says: its levers, and the windows and order of its [score]; with
    changes it is a method like any other and loses that name.
    """
    tree, follows = to_tree(recipe), method.name == ADAPT.name
    if follows:
        if not says_how(recipe):
            raise RuleError(
                "this artifact's recipe does not say how to adapt: it names no scoring lever under "
                "[levers] and no window in [score]; give --with LEVER or --stride N"
            )
        levers = tuple(plug_levers(recipe, "infer"))
        method = replace(method, levers=levers, name="" if changes else ADAPT.name)
    else:
        tree["score"] = {k: v for k, v in tree["score"].items() if k not in WINDOWS}
    known = lever_names()
    for name in method.levers:
        if name not in known:
            raise RecipeError(f"--with {name}: no such lever{nearest(name, known)}")
        if find_lever(name).STAGE != "infer":
            raise RecipeError(f"--with {name}: it is no lever of scoring (stage infer)")
    tree["levers"] = {**{name: {} for name in method.levers}, **tree["levers"]}
    for change in changes:
        override = parse_override(change)
        if not _is_about(method, override):
            raise RecipeError(f"--set {change}: expected a value of a lever of --with, or of score")
        tree = merge(tree, override)
    resolved = _resolve(tree)
    part = resolved.score
    if follows:
        method = replace(method, stride=part.stride, flat=part.flat, order=part.order)
    elif (part.stride, part.flat, part.order) != (0, False, STREAM):
        raise RuleError("score.stride, flat and order are set with --stride, --flat and --order")
    _check(method, levers_of(method, resolved), resolved.model.context)
    _require_packed(method, resolved, recipe)
    return method, resolved


def says_how(recipe: Recipe) -> bool:
    """True if a recipe says how to score it otherwise than by plain windows."""
    part = recipe.score
    asks = bool(part.context or part.stride or part.flat or part.order == PUBLISHED)
    return asks or bool(plug_levers(recipe, "infer"))


def _resolve(tree: Tree) -> Recipe:
    """The recipe of a tree, its levers resolved; its model reads as many tokens as [score] says."""
    recipe = from_tree(tree)
    if context := recipe.score.context:
        recipe = replace(recipe, model=replace(recipe.model, context=context))
    return resolve_levers(recipe)


def _is_about(method: Method, override: Tree) -> bool:
    """True if an override changes only [score] and the method's levers, and drops no lever."""
    levers = override.get("levers", {})
    if not isinstance(levers, Mapping) or set(override) - {"levers", "score"}:
        return False
    return all(name in method.levers and table is not False for name, table in levers.items())


def levers_of(method: Method, recipe: Recipe) -> dict[str, Any]:
    """The levers of a method by name, with the settings that the recipe has."""
    plugged = plug_levers(recipe, "infer")
    return {name: lever for name, lever in plugged.items() if name in method.levers}


def run_method(artifact: Artifact, shard: Shard, request: ScoringRequest) -> Score:
    """Score a shard; the artifact's recipe has the method's levers (`open_method`)."""
    method, runtime, clock = request.method, request.runtime, request.clock
    levers = levers_of(method, artifact.recipe)
    _check(method, levers, artifact.recipe.model.context)
    adapters = having(levers, "parameters")
    lora = having(levers, "lora")
    if lora:
        warm_compiler(runtime)
    build = request.open_predictor or build_predictor
    predictor = build(artifact, runtime.device, adapters, runtime.dtype)
    for lever in having(levers, "classes"):
        lever.attach(predictor.model)
    mixture = mix_levers(levers, artifact)
    reports = (request.on_share, request.on_commit, request.partial, request.now)
    if lora:
        # Imported by name, because the counted script contains every module that is imported
        # otherwise. `submit/bundle.py` adds this engine if a lever of the recipe has an ENGINE.
        engine = import_module(lora[0].engine).DocumentScorer
        phases = next(iter(having(levers, "boundaries")), None)
        settings = lora[0].lora
        if method.order == PUBLISHED:
            settings = settings.as_published
        scorer = engine(
            predictor, shard, runtime, clock, settings, method, mixture, phases, *reports
        )
    else:
        part, adapts = artifact.recipe.score, bool(adapters)
        scorer = Scorer(predictor, shard, runtime, clock, part, method, mixture, adapts, *reports)
    score: Score = scorer.run()
    return replace(score, how=how_of(method, artifact.recipe, runtime))


def how_of(method: Method, recipe: Recipe, runtime: Runtime) -> dict[str, Any]:
    """The method with all of its settings, as a score file records them."""
    return {
        **method.as_dict(),
        "settings": {name: recipe.levers[name] for name in levers_of(method, recipe)},
        "score": to_tree(recipe)["score"],
        "products": str(runtime.dtype),
    }


def having(levers: Mapping[str, Any], seam: str) -> list[Any]:
    """The levers that have a seam."""
    return [lever for lever in levers.values() if hasattr(lever, seam)]


def _check(method: Method, levers: Mapping[str, Any], context: int) -> None:
    """Refuse levers and options that exclude each other, and windows that the model cannot read."""
    if method.stride > context:
        raise RuleError(
            f"stride {method.stride}: a window has {context} tokens (model.context, or "
            "score.context); choose at most as many"
        )
    seams = ("lora", "parameters", "boundaries")
    lora, stream, phased = ([n for n in levers if hasattr(levers[n], seam)] for seam in seams)
    if lora and stream:
        raise RuleError(f"{lora[0]} and {stream[0]}: documents or the stream adapt, not both")
    if phased and not lora:
        raise RuleError(f"{phased[0]} goes with lora_ttt: add --with lora_ttt")
    if lora and (method.stride or method.flat):
        raise RuleError(f"{lora[0]} has windows of its own: leave out --stride and --flat")
    if method.order == PUBLISHED and not lora:
        raise RuleError("the published order is that of documents that adapt: add --with lora_ttt")


def _require_packed(method: Method, asked: Recipe, packed_recipe: Recipe) -> None:
    """Refuse fitted numbers that are not in the artifact, because its bytes must hold them."""
    packed = plug_levers(packed_recipe, "infer")
    for name, lever in levers_of(method, asked).items():
        if not hasattr(lever, "classes"):
            continue
        if name not in packed or packed[name].settings != lever.settings:
            raise RuleError(
                f"{name} has the numbers that 'underpar pack' fitted and no others: name it in the "
                "recipe that is trained, and set none while scoring"
            )


def mixture_of(score: Score, artifact: Artifact) -> Mixture:
    """The experts of a score's method, with the settings of that score."""
    return mix_levers(levers_of(*method_of(score, artifact.recipe)), artifact)


def mix_levers(levers: Mapping[str, Any], artifact: Artifact) -> Mixture:
    """The experts among levers; those of words are told the tokenizer's pieces."""
    for lever in having(levers, "read_pieces"):
        if lever.needs_pieces:
            lever.read_pieces(build_tokenizer(artifact).pieces)
    return Mixture(having(levers, "propose"))


def method_of(score: Score, recipe: Recipe) -> tuple[Method, Recipe]:
    """The method of a score, and the recipe with the settings it was made with."""
    how = dict(score.how)
    settings, part = how.pop("settings", {}), how.pop("score", {})
    how.pop("products", None)
    method = method_from_dict(how)
    if not isinstance(settings, Mapping) or set(method.levers) - set(settings):
        raise RuleError(f"the score {score.method!r} does not say how its levers were set")
    levers = {"levers": {name: settings[name] for name in method.levers}}
    resolved = _resolve({**merge(to_tree(recipe), levers), "score": part})
    _require_packed(method, resolved, recipe)
    return method, resolved
