"""A method of scoring, from its name to a score: which levers act, and which engine runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from underpar.artifact.unpack import Artifact
from underpar.build.levers import find_lever, lever_names, plug_levers, resolve_levers
from underpar.build.model import build_predictor
from underpar.compile.startup import warm_compiler
from underpar.core.runtime import Clock, Runtime
from underpar.data.shards import Shard
from underpar.errors import RecipeError, RuleError
from underpar.infer.tilt import Mixture
from underpar.recipe import Recipe, Tree, from_tree, merge, nearest, parse_override, to_tree
from underpar.score.ledger import Score
from underpar.score.method import ADAPT, PUBLISHED, Method, method_from_dict
from underpar.score.scorer import Scorer
from underpar.score.tally import OnCommit

if TYPE_CHECKING:
    from underpar.score.partial import Partial

# (share of the targets done, bits per byte so far)
OnShare = Callable[[float, float], None]


@dataclass(frozen=True)
class Way:
    """A method and what it runs on; `on_share` hears how far it is, `on_commit` of every price.

    With a `partial` it may be stopped, and continues where it was.
    """

    method: Method
    runtime: Runtime
    clock: Clock = field(default_factory=lambda: Clock("load"))
    on_share: OnShare | None = None
    on_commit: OnCommit | None = None
    partial: Partial | None = None


def open_method(
    recipe: Recipe, method: Method, changes: Sequence[str] = ()
) -> tuple[Method, Recipe]:
    """The method with its levers, and the recipe with their settings: its own, or defaults.

    `changes` are values of these levers or of [score], "levers.lora_ttt.rank=40".
    """
    if method.name == ADAPT.name and not method.levers:
        method = replace(method, levers=tuple(plug_levers(recipe, "infer")))
        if not method.levers:
            raise RuleError("this artifact's recipe names no adapter; add one under [levers]")
    known = lever_names()
    for name in method.levers:
        if name not in known:
            raise RecipeError(f"--with {name}: no such lever{nearest(name, known)}")
        if find_lever(name).STAGE != "infer":
            raise RecipeError(f"--with {name}: it is no lever of scoring (stage infer)")
    tree = to_tree(recipe)
    tree["levers"] = {**{name: {} for name in method.levers}, **tree["levers"]}
    for change in changes:
        asked = parse_override(change)
        if not _is_about(method, asked):
            raise RecipeError(f"--set {change}: expected a value of a lever of --with, or of score")
        tree = merge(tree, asked)
    found = resolve_levers(from_tree(tree))
    _check(method, _levers_of(method, found))
    _require_packed(method, found, recipe)
    return method, found


def _is_about(method: Method, asked: Tree) -> bool:
    """True where all that is asked concerns [score] or the method's levers, and drops none."""
    levers = asked.get("levers", {})
    if not isinstance(levers, Mapping) or set(asked) - {"levers", "score"}:
        return False
    return all(name in method.levers and table is not False for name, table in levers.items())


def _levers_of(method: Method, recipe: Recipe) -> dict[str, Any]:
    plugged = plug_levers(recipe, "infer")
    return {name: lever for name, lever in plugged.items() if name in method.levers}


def run_method(artifact: Artifact, shard: Shard, way: Way) -> Score:
    """Score a shard; the artifact's recipe has the levers of the method (`open_method`)."""
    method, runtime = way.method, way.runtime
    levers = _levers_of(method, artifact.recipe)
    _check(method, levers)
    adapters = having(levers, "parameters")
    mixture = Mixture(having(levers, "propose"))
    if having(levers, "lora"):
        warm_compiler(runtime)
    predictor = build_predictor(artifact, runtime.device, adapters, runtime.dtype)
    for lever in having(levers, "classes"):
        lever.attach(predictor.model)
    if lora := having(levers, "lora"):
        phases = next(iter(having(levers, "boundaries")), None)
        make = import_module(lora[0].engine).DocumentScorer
        engine = make(predictor, shard, runtime, way.clock, mixture, phases)
        engine.on_commit, engine.partial = way.on_commit, way.partial
        score: Score = engine.run(method, lora[0].lora, way.on_share)
    else:
        scorer = Scorer(predictor, shard, runtime, way.clock, mixture, way.on_commit, way.partial)
        score = scorer.run(artifact.recipe.score, bool(adapters), way.on_share, method)
    return replace(score, how=how_of(method, artifact.recipe, runtime))


def how_of(method: Method, recipe: Recipe, runtime: Runtime) -> dict[str, Any]:
    """The method with all of its settings, as a score tells them."""
    return {
        **method.as_dict(),
        "settings": {name: recipe.levers[name] for name in _levers_of(method, recipe)},
        "score": asdict(recipe.score),
        "products": str(runtime.dtype),
    }


def having(levers: Mapping[str, Any], seam: str) -> list[Any]:
    """The levers that have a seam."""
    return [lever for lever in levers.values() if hasattr(lever, seam)]


def _check(method: Method, levers: Mapping[str, Any]) -> None:
    """Refuse what cannot be had together."""
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


def _require_packed(method: Method, asked: Recipe, own: Recipe) -> None:
    """Refuse fitted numbers that are not the artifact's: its bytes have to hold them."""
    packed = plug_levers(own, "infer")
    for name, lever in _levers_of(method, asked).items():
        if not hasattr(lever, "classes"):
            continue
        if name not in packed or packed[name].settings != lever.settings:
            raise RuleError(
                f"{name} has the numbers that 'underpar pack' fitted and no others: name it in the "
                "recipe that is trained, and set none while scoring"
            )


def mixture_of(score: Score, recipe: Recipe) -> Mixture:
    """The experts of a score's method, set as they were."""
    return Mixture(having(_levers_of(*method_of(score, recipe)), "propose"))


def method_of(score: Score, recipe: Recipe) -> tuple[Method, Recipe]:
    """The method of a score, and the recipe with the settings it was made with."""
    how = dict(score.how)
    settings, part = how.pop("settings", {}), how.pop("score", {})
    how.pop("products", None)
    method = method_from_dict(how)
    if not isinstance(settings, Mapping) or set(method.levers) - set(settings):
        raise RuleError(f"the score {score.method!r} does not say how its levers were set")
    own = {"levers": {name: settings[name] for name in method.levers}, "score": part}
    found = resolve_levers(from_tree(merge(to_tree(recipe), own)))
    _require_packed(method, found, recipe)
    return method, found
