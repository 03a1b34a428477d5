"""Reads the code of a submission for patterns of invalid scoring: hints, never a verdict.

The patterns are those of check A22 of the field guide (parameter-golf issue 1017), each with a
pull request that was closed for it. Only code that can run is read: hits in dead code have accused
honest submissions (PR 1458). Names are compared as text, so the scan misses some cases and accuses
some honest code. A person has to read each hint.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from underpar.audit.packed_code import unpack_code
from underpar.audit.reach import Body, reachable

TARGET = re.compile(
    r"^(tgt|targets?|labels?|y|yb|ys|y_true)$|^(tgt|targets?|labels?)_(np|ids?|tok\w*|flat|batch)$"
    r"|_(tgt|targets?|labels?)$"
)
LOSS = re.compile(r"(^|_)(loss|losses|nll|nlls|ce|xent)(_|\d|$)")
BEST = re.compile(r"(^|_)(best|lowest|min|max|cap|limit|prev|last|floor)(_|$)")
SCORE = re.compile(r"(^|_)(val|bpb|score|scored|nll|bits|byte|loss)\w*_(sum|total|acc|count)s?$")
JUDGES = re.compile(r"(^|_)(eval|val|ttt|score|scoring)(_|$)")
LOSS_CALL = re.compile(r"cross_entropy|nll_loss|(^|_)(loss|nll|ce|model|net)$|(^|_)forward(_|$)")
TRAINS = re.compile(
    r"(^|_)(train|fit|finetune|calibrate|hessians?|gptq|awq|quantize|warm_?up)(_|$)"
)
VALIDATION = re.compile(r"(^|_)val_(tokens|data|files|loader|stream|bytes|ids)$")
GATE = re.compile(r"(^|_)(gate|gated|hint|hints|expert|boost|tilt)(_|$)")
CLASS_TABLE = re.compile(r"(^|_)(boundary|space|starts?|word|class)(_|$)")
SPACE = "\u2581"
# Bundles of this package have about a hundred sources.
MOST_TEXTS = 2_000

NETWORK_MODULES = {
    "requests", "urllib.request", "urllib3", "http.client", "httpx", "aiohttp", "ftplib", "socket",
    "paramiko", "boto3", "huggingface_hub", "datasets", "gdown", "wget", "wandb",
}  # fmt: skip
NETWORK_CALLS = {
    "hf_hub_download", "snapshot_download", "load_dataset", "urlopen", "urlretrieve",
    "from_pretrained", "load_state_dict_from_url",
}  # fmt: skip
SHELL_CALLS = {"run", "Popen", "call", "check_call", "check_output", "system", "popen"}
NETWORK_PROGRAMS = re.compile(
    r"(^|[\s;&|/])(pip3?|wget|curl|git|apt|apt-get|conda|huggingface-cli|hf|gsutil|aws|scp|rsync|"
    r"ssh)(\s|$)"
)


@dataclass(frozen=True)
class Smell:
    """A line for a person to read, and why."""

    file: str
    line: int
    text: str


@dataclass(frozen=True)
class Scan:
    """What was read, and what a person should look at."""

    smells: tuple[Smell, ...]
    downloads: tuple[Smell, ...]
    # The same two in code that only the logged settings keep from running.
    smells_off: tuple[Smell, ...]
    downloads_off: tuple[Smell, ...]
    # Texts of all code that was read, by file; packed code has the name of its file and a number.
    texts: Mapping[str, str]
    # Files beside the script that it imports, directly or not.
    helpers: tuple[str, ...]
    # Files with code that is executed from a text that could not be unpacked.
    unread: tuple[str, ...]
    # Lines that can run.
    num_lines: int


def scan(
    name: str, script: str, beside: Mapping[str, str], settings: Mapping[str, str] | None = None
) -> Scan:
    """Read `script` and those files `beside` it that it imports."""
    texts, helpers, unread = _collect(name, script, beside)
    trees = {file: tree for file, text in texts.items() if (tree := parse(text)) is not None}
    unread += [file for file in texts if file not in trees]
    try:
        everything = reachable(trees, name, {})
        bodies = reachable(trees, name, settings) if settings else everything
        smells, calls = _smells_of(bodies), _downloads_of(bodies)
        smells_off = [smell for smell in _smells_of(everything) if smell not in smells]
        calls_off = [smell for smell in _downloads_of(everything) if smell not in calls]
        lines = {(body.file, node.lineno) for body in bodies for node in _with_line(body.nodes)}
    except RecursionError:
        return Scan((), (), (), (), texts, tuple(helpers), (name,), 0)
    return Scan(
        tuple(smells),
        tuple(calls),
        tuple(smells_off),
        tuple(calls_off),
        texts,
        tuple(helpers),
        tuple(dict.fromkeys(unread)),
        len(lines),
    )


def parse(text: str) -> ast.Module | None:
    """The syntax tree of a source; None if it is not Python or nested too deeply."""
    try:
        # Odd escapes in a source of others are no news for the person who judges it.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _collect(
    name: str, script: str, beside: Mapping[str, str]
) -> tuple[dict[str, str], list[str], list[str]]:
    """Texts of the script, of what it imports and of what both hold in packed form."""
    texts: dict[str, str] = {}
    helpers: list[str] = []
    unread: list[str] = []
    waiting = [(name, script)]
    while waiting:
        file, text = waiting.pop()
        # Packed code may unpack to itself.
        if len(texts) >= MOST_TEXTS:
            unread.append(file)
            break
        texts[file] = text
        tree = parse(text)
        if tree is None:
            continue
        packed = {n: t for sources in unpack_code(tree) for n, t in sources.items()}
        waiting += [
            (f"{file}: {inner or len(texts)}", source)
            for inner, source in packed.items()
            if parse(source) is not None
        ]
        if not packed and any(_executes(node) for node in ast.walk(tree)):
            unread.append(file)
        for module in _imports(tree):
            path = module.replace(".", "/")
            for helper in (f"{path}.py", f"{path}/__init__.py"):
                if helper in beside and helper not in texts and helper not in helpers:
                    helpers.append(helper)
                    waiting.append((helper, beside[helper]))
    return texts, helpers, unread


def _executes(node: ast.AST) -> bool:
    """Whether a call runs a text as code that is not a literal in sight."""
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    if not (is_call and node.func.id in ("exec", "eval") and node.args):  # type: ignore[attr-defined]
        return False
    return not isinstance(node.args[0], ast.Constant)  # type: ignore[attr-defined]


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            yield base
            yield from (f"{base}.{alias.name}".lstrip(".") for alias in node.names)


def _smells_of(bodies: Iterable[Body]) -> list[Smell]:
    bodies = list(bodies)
    hints = [
        Smell(body.file, line, text)
        for body in bodies
        for pattern in PATTERNS
        for line, text in pattern(body)
    ]
    if any(_adds_leading_space(node) for body in bodies for node in body.nodes):
        hints += [
            Smell(body.file, line, text) for body in bodies for line, text in _space_counted(body)
        ]
    return sorted(set(hints), key=lambda smell: (smell.file, smell.line, smell.text))


Hints = Iterator[tuple[int, str]]


def target_in_key(body: Body) -> Hints:
    """A lookup whose key is made from the target: each token reads another count (PR 779)."""
    keys = {
        name
        for node in body.nodes
        if isinstance(node, ast.Assign) and _hashes_target(node.value)
        for target in node.targets
        for name in _names(target)
    }
    updates = {
        id(inner)
        for node in body.nodes
        if isinstance(node, ast.Assign | ast.AugAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Subscript)
        # `counts[key] = counts[key] + 1` counts a target that was scored.
        for inner in ast.walk(node.value)
        if isinstance(inner, ast.Subscript) and ast.dump(inner.slice) == ast.dump(target.slice)
    }
    for node in body.nodes:
        if not (isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)):
            continue
        if id(node) not in updates and (
            keys & set(_names(node.slice)) or _hashes_target(node.slice)
        ):
            yield node.lineno, "the key of a lookup is made from the target"


def smaller_of_losses(body: Body) -> Hints:
    """The smaller of two losses, chosen by the truth (PR 659)."""
    for node in body.nodes:
        if not isinstance(node, ast.Call):
            continue
        name = _called(node)
        if name in ("min", "minimum", "fmin") and len(node.args) == 2:
            sides = node.args
        elif name == "where" and len(node.args) == 3 and isinstance(node.args[0], ast.Compare):
            sides = node.args[1:]
        else:
            continue
        names = [set(_names(side)) for side in sides]
        are_losses = all(any(LOSS.search(n) for n in side) for side in names)
        if are_losses and not any(BEST.search(n) for side in names for n in side):
            yield node.lineno, "takes the smaller of two losses"


def trains_then_scores(body: Body) -> Hints:
    """The loss of targets after a step on the same targets: SLOT and its like (PR 1229)."""
    for block in _blocks(body.statements):
        for index, statement in enumerate(block):
            before, after = block[: index + 1], block[index + 1 :]
            if not _steps(statement):
                continue
            trained = {
                name
                for earlier in before
                for call in _loss_calls(earlier)
                for name in _target_names(call)
            }
            if not any(_goes_backward(earlier) for earlier in before):
                continue
            # A loop that binds its targets anew has left the ones of the last step.
            trained -= set(_bound(statement))
            for later in after:
                calls = [c for c in _loss_calls(later) if trained & set(_target_names(c))]
                if calls and not any(_goes_backward(s) for s in after):
                    yield calls[0].lineno, "scores targets after a step that was trained on them"
                    break
                trained -= set(_bound(later))


def scores_in_epochs(body: Body) -> Hints:
    """A loop of epochs that steps and adds to a score: the last epoch is scored (PR 568)."""
    if not JUDGES.search(body.name):
        return
    for node in body.nodes:
        if not isinstance(node, ast.For):
            continue
        named = {*_names(node.target), *_names(node.iter)}
        if not any("epoch" in name for name in named):
            continue
        adds = [
            inner
            for inner in ast.walk(node)
            if isinstance(inner, ast.AugAssign) and any(map(SCORE.search, _names(inner.target)))
        ]
        if adds and _steps(node):
            yield adds[0].lineno, "adds to a score inside a loop of epochs that trains"


def constant_bytes_per_token(body: Body) -> Hints:
    """Bytes per token as a number in the code (PR 875)."""
    for node in body.nodes:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [name for target in targets for name in _names(target)]
        numbers = [
            inner.value
            for inner in ast.walk(node.value)
            if isinstance(inner, ast.Constant) and isinstance(inner.value, float)
        ]
        is_width = any(re.search(r"bytes_per_tok|avg_bytes|token_bytes", n) for n in names)
        is_bpb = any(re.search(r"(^|_)bpb(_|$)|bits_per_byte", n) for n in names)
        divides = any(isinstance(inner, ast.Div) for inner in ast.walk(node.value))
        typical = [n for n in numbers if 1 < n < 10 and n != int(n)]
        if (is_width and typical and isinstance(node.value, ast.Constant)) or (
            is_bpb and typical and divides
        ):
            yield node.lineno, f"bytes per token are the constant {typical[0]:g}"


def trains_on_validation(body: Body) -> Hints:
    """Validation files or tokens that go into training or calibration (PR 44, 1376)."""
    for node in body.nodes:
        if isinstance(node, ast.Assign):
            names = [name for target in node.targets for name in _names(target)]
            texts = [
                inner.value
                for inner in ast.walk(node.value)
                if isinstance(inner, ast.Constant) and isinstance(inner.value, str)
            ]
            is_for_training = any(re.search(r"(^|_)(train|calib\w*)_", name) for name in names)
            if is_for_training and any("fineweb_val" in text for text in texts):
                yield node.lineno, "validation files are read as training text"
        elif isinstance(node, ast.Call):
            name = _called(node)
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            words = [
                w for a in arguments if isinstance(a, ast.Name | ast.Attribute) for w in _names(a)
            ]
            if (
                TRAINS.search(name)
                and not JUDGES.search(name)
                and any(map(VALIDATION.search, words))
            ):
                yield node.lineno, f"validation tokens are given to {name}"


def spread_over_bytes(body: Body) -> Hints:
    """A token's probability to the power 1/n for each of its bytes is no distribution (PR 1785)."""
    for node in body.nodes:
        if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)):
            continue
        power = node.right
        if not (isinstance(power, ast.BinOp) and isinstance(power.op, ast.Div)):
            continue
        is_one = isinstance(power.left, ast.Constant) and power.left.value == 1
        if is_one and any("byte" in name for name in _names(power.right)):
            yield node.lineno, "the n-th root of a probability is used for each of n bytes"


def gated_by_target(body: Body) -> Hints:
    """A hint that is switched by the class of the target it is for (PR 1420)."""
    for node in body.nodes:
        if not isinstance(node, ast.Assign):
            continue
        if not any(GATE.search(name) for target in node.targets for name in _names(target)):
            continue
        for inner in ast.walk(node.value):
            if not isinstance(inner, ast.Subscript):
                continue
            is_class = any(map(CLASS_TABLE.search, _names(inner.value)))
            if is_class and any(map(TARGET.search, _names(inner.slice))):
                yield node.lineno, "a hint depends on the class of the target"


PATTERNS: tuple[Callable[[Body], Hints], ...] = (
    target_in_key,
    smaller_of_losses,
    trains_then_scores,
    scores_in_epochs,
    constant_bytes_per_token,
    trains_on_validation,
    spread_over_bytes,
    gated_by_target,
)


def _space_counted(body: Body) -> Hints:
    """A byte for the leading space in the table, and one more when it is read (PR 1545)."""
    for node in body.nodes:
        if not isinstance(node, ast.If) or not _asks_for_space(node.test):
            continue
        for inner in (n for statement in node.body for n in ast.walk(statement)):
            if not isinstance(inner, ast.BinOp | ast.AugAssign) or not isinstance(
                inner.op, ast.Add
            ):
                continue
            term = inner.right if isinstance(inner, ast.BinOp) else inner.value
            if _is_one(term) and any("byte" in n or n == "len" for n in _names(inner)):
                yield inner.lineno, "counts the leading space in the table and again when read"


def _is_one(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 1 and not isinstance(node.value, bool)


def _asks_for_space(test: ast.expr) -> bool:
    return any(
        isinstance(node, ast.Constant) and node.value == SPACE for node in ast.walk(test)
    ) and any(
        isinstance(node, ast.Call) and _called(node) == "startswith" for node in ast.walk(test)
    )


def _adds_leading_space(node: ast.AST) -> bool:
    """Whether a sum of bytes adds the flag of a leading space."""
    is_sum = isinstance(node, ast.AugAssign | ast.BinOp) and isinstance(node.op, ast.Add)
    return is_sum and any(
        re.search(r"leading_space|has_space|(^|_)lead(_|$)", name) for name in _names(node)
    )


def _downloads_of(bodies: Iterable[Body]) -> list[Smell]:
    hints = set()
    for body in bodies:
        for node in _with_line(body.nodes):
            if why := _network_use(node):
                hints.add(Smell(body.file, node.lineno, why))
    return sorted(hints, key=lambda smell: (smell.file, smell.line, smell.text))


def _network_use(node: ast.AST) -> str:
    """What a line does with the network; "" if nothing is seen."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        base = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        names = [base, *(f"{base}.{a.name}".lstrip(".") for a in node.names)]
        for name in names:
            if name in NETWORK_MODULES or name.partition(".")[0] in NETWORK_MODULES - {"urllib"}:
                return f"imports {name}"
    if not isinstance(node, ast.Call):
        return ""
    name = _called(node)
    if name in NETWORK_CALLS:
        return f"calls {name}"
    if name in SHELL_CALLS and node.args:
        words = " ".join(
            inner.value
            for inner in ast.walk(node.args[0])
            if isinstance(inner, ast.Constant) and isinstance(inner.value, str)
        )
        if match := NETWORK_PROGRAMS.search(words):
            return f"runs {match[2]}"
    return ""


def _hashes_target(node: ast.expr) -> bool:
    """Whether an expression mixes a target into a hash: xor, or a product with a remainder."""
    operators = {type(n.op) for n in ast.walk(node) if isinstance(n, ast.BinOp)}
    calls = {_called(n) for n in ast.walk(node) if isinstance(n, ast.Call)}
    is_hash = (
        ast.BitXor in operators
        or (ast.Mult in operators and bool(operators & {ast.Mod, ast.BitAnd}))
        or "hash" in calls
    )
    return is_hash and any(map(TARGET.search, _names(node)))


def _blocks(statements: Sequence[ast.stmt]) -> Iterator[Sequence[ast.stmt]]:
    """Every list of statements, from the outside in, without functions inside."""
    yield statements
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for name in ("body", "orelse", "finalbody"):
            inner = getattr(statement, name, None)
            if isinstance(inner, list) and inner and isinstance(inner[0], ast.stmt):
                yield from _blocks(inner)


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    return (n for n in ast.walk(node) if isinstance(n, ast.Call))


def _loss_calls(node: ast.AST) -> list[ast.Call]:
    """Calls that compute the loss of targets."""
    return [call for call in _calls(node) if LOSS_CALL.search(_called(call))]


def _target_names(call: ast.Call) -> list[str]:
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    return [name for a in arguments for name in _names(a) if TARGET.search(name)]


def _goes_backward(node: ast.AST) -> bool:
    return any(_called(call) in ("backward", "grad") for call in _calls(node))


def _steps(node: ast.AST) -> bool:
    return any(_called(call) == "step" for call in _calls(node))


def _bound(node: ast.AST) -> Iterator[str]:
    """Names that a statement binds."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            yield inner.id


def _names(node: ast.AST) -> list[str]:
    """Names and attributes in an expression."""
    names = []
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            names.append(inner.id)
        elif isinstance(inner, ast.Attribute):
            names.append(inner.attr)
    return names


def _called(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _with_line(nodes: Iterable[ast.AST]) -> Iterator[ast.expr | ast.stmt]:
    return (node for node in nodes if isinstance(node, ast.expr | ast.stmt))
