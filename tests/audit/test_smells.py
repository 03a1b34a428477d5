"""The static scan: each pattern in code that runs, and silence on honest and on dead code."""

import base64
import lzma

import pytest
from submissions import HELPER, SCRIPT

from underpar.audit.packed_code import LARGEST_SOURCE_BYTES, unpack_code
from underpar.audit.smells import Scan, parse, scan
from underpar.recipe import load_recipe
from underpar.submit.bundle import bundle

CACHE = """
def score(table, context, tgt_np, primes, mask):
    ctx_key = (context & mask)
    full_key = ((context ^ (tgt_np * primes)) & mask)
    return table[full_key] / table[ctx_key]
"""
SMALLER = """
def score(model, other, x, y):
    nll = cross_entropy(model(x), y)
    ngram_nll = cross_entropy(other(x), y)
    return torch.minimum(nll, ngram_nll)
"""
SMALLER_WHERE = """
def score(nll, ngram_nll):
    return torch.where(nll < ngram_nll, nll, ngram_nll)
"""
SLOT = """
def score(model, hidden, targets, delta, opt):
    for _ in range(16):
        opt.zero_grad()
        loss = F.cross_entropy(model.logits(hidden + delta), targets)
        loss.backward()
        opt.step()
    with torch.no_grad():
        return F.cross_entropy(model.logits(hidden + delta), targets, reduction="none")
"""
ONE_STEP = """
def score(model, x, y, opt):
    loss = model(x, y)
    loss.backward()
    opt.step()
    return model(x, y)
"""
EPOCHS = """
def score(model, chunks, opt):
    for epoch in range(3):
        loss_sum = 0.0
        for x, y in chunks:
            loss = F.cross_entropy(model(x), y)
            loss_sum += loss.item()
            loss.backward()
            opt.step()
    return loss_sum
"""
WIDTH = """
def score(val_loss):
    val_bpb = val_loss / math.log(2.0) / 3.5
    return val_bpb
"""
WIDTH_NAME = """
bytes_per_token = 3.5
def score(): pass
"""
SPACE = """
def score(sp, x, y):
    for token in range(9):
        piece = sp.id_to_piece(token)
        if piece.startswith("\\u2581"):
            base_bytes[token] = len(piece[1:].encode()) + 1
    return base_bytes[y] + has_leading_space[y]
"""
LEAK = """
def score(model, val_tokens):
    train_model(model, val_tokens)
"""
LEAK_FILES = """
train_files = sorted(glob("data/fineweb_val_*.bin"))
def score(): pass
"""
SPREAD = """
def score(p, num_bytes):
    return p ** (1.0 / num_bytes)
"""
GATED = """
def score(is_boundary_lut, targets, hint):
    hint_gate = hint & is_boundary_lut[targets]
    return hint_gate
"""
SMELLS = {
    "key": (CACHE, "the key of a lookup"),
    "smaller": (SMALLER, "smaller of two losses"),
    "where": (SMALLER_WHERE, "smaller of two losses"),
    "slot": (SLOT, "after a step"),
    "one step": (ONE_STEP, "after a step"),
    "epochs": (EPOCHS, "loop of epochs"),
    "width": (WIDTH, "constant 3.5"),
    "width by name": (WIDTH_NAME, "constant 3.5"),
    "space": (SPACE, "leading space"),
    "leak": (LEAK, "validation tokens are given to train_model"),
    "leak of files": (LEAK_FILES, "read as training text"),
    "spread": (SPREAD, "n-th root"),
    "gated": (GATED, "class of the target"),
}


@pytest.mark.parametrize("name", ["fit", "gptq_hessians", "collect_awq_scales", "compile_warmup"])
def test_validation_tokens_belong_into_no_preparation(name: str) -> None:
    assert len(read(f"{name}(model, h.val_tokens)").smells) == 1
    assert read(f"{name}(model, h.train_tokens)").smells == ()
    assert read(f"eval_{name}(model, h.val_tokens)").smells == ()


def read(text: str, settings: dict[str, str] | None = None, **beside: str) -> Scan:
    files = {f"{name}.py": source for name, source in beside.items()}
    return scan("train_gpt.py", text, files, settings)


@pytest.mark.parametrize("name", SMELLS)
def test_a_pattern_is_seen_in_code_that_runs(name: str) -> None:
    text, part = SMELLS[name]
    seen = read(f"{text}\nscore()\n")
    assert [part in smell.text for smell in seen.smells] == [True], seen.smells
    assert seen.smells[0].line <= len(text.splitlines()) and not seen.unread


DEAD = {
    "never called": "{body}",
    "after a return": "def main():\n    return 1\n    score()\n{body}\nmain()",
    "switched off": "{body}\nif False:\n    score()",
    "a constant": "{body}\nif 0 and score():\n    pass",
    "imported as a program": "import helper",
}


@pytest.mark.parametrize("way", DEAD)
@pytest.mark.parametrize("name", ["key", "smaller", "slot", "epochs", "spread"])
def test_dead_code_is_not_accused(name: str, way: str) -> None:
    body = SMELLS[name][0]
    helper = f"{body}\nif __name__ == '__main__':\n    score()\n"
    seen = read(DEAD[way].format(body=body), helper=helper)
    assert seen.smells == ()


@pytest.mark.parametrize(
    "test", ["h.slot_enabled", "h.slot_steps > 0", "not h.slot_off", "h.mode == 'slot' and x"]
)
def test_code_that_the_logged_settings_switch_off_is_told_apart(test: str) -> None:
    text = f"{SLOT}\nif {test}:\n    score()\n"
    off = {"slot_enabled": "False", "slot_steps": "0", "slot_off": "True", "mode": "plain"}
    seen = read(text, off)
    assert seen.smells == () and len(seen.smells_off) == 1
    on = {"slot_enabled": "True", "slot_steps": "8", "slot_off": "False", "mode": "slot"}
    seen = read(text, on)
    assert len(seen.smells) == 1 and seen.smells_off == ()


def test_settings_of_one_rank_switch_nothing_off() -> None:
    text = f"{SLOT}\nif h.rank or h.is_main_process:\n    score()\n"
    assert len(read(text, {"rank": "0", "is_main_process": "False"}).smells) == 1


@pytest.mark.parametrize(
    "use",
    [
        "table = {'a': score}",
        "class Scorer:\n    def __call__(self):\n        score()\nScorer()",
        "class Net:\n    def forward(self):\n        return score()\nNet()",
        "try:\n    pass\nfinally:\n    score()",
        "while True:\n    score()",
        "@score\ndef other():\n    pass",
        "def outer(how=score):\n    pass",
    ],
)
def test_any_way_to_name_a_function_reaches_it(use: str) -> None:
    assert len(read(f"{SMALLER}\n{use}\n").smells) == 1


def test_honest_code_with_look_alikes_is_silent() -> None:
    # A branch with SLOT is off by its setting alone; without the settings it is read.
    seen = read(SCRIPT, helper=HELPER)
    assert ["after a step" in smell.text for smell in seen.smells] == [True]
    seen = read(SCRIPT, {"slot_enabled": "False"}, helper=HELPER)
    assert (seen.smells, seen.downloads, seen.helpers) == ((), (), ("helper.py",))
    assert len(seen.smells_off) == 1


def test_the_bundle_of_this_package_is_read_and_silent() -> None:
    script = bundle(load_recipe("pr2135")).decode("latin-1")
    seen = scan("score.py", script, {})
    assert len(seen.texts) > 50 and seen.num_lines > 2_000
    assert (seen.smells, seen.downloads, seen.unread) == ((), (), ())


def packed(text: str, call: str) -> str:
    raw = lzma.compress(text.encode(), lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2}])
    literal = base64.b85encode(raw).decode()
    return f"import lzma as L,base64 as B\n{call.format(literal=literal)}\n"


WRAPPER = (
    "exec(L.decompress(B.b85decode({literal!r}),format=L.FORMAT_RAW,"
    'filters=[{{"id":L.FILTER_LZMA2}}]))'
)


def test_packed_code_is_unpacked_and_read() -> None:
    seen = read(packed(f"{SLOT}\nscore()\n", WRAPPER))
    assert len(seen.smells) == 1 and seen.unread == ()
    assert read(packed(f"{SLOT}\n", WRAPPER)).smells == ()


def test_code_that_cannot_be_unpacked_is_told() -> None:
    for text in (
        "exec(open('model.bin').read())",
        "import zlib\nexec(zlib.decompress(b'damaged'))",
        "import own\nexec(own.decompress('x'))",
        "import zlib\nexec(zlib.decompress('x'.encode('no such')))",
        "import lzma\nexec(lzma.decompress(b'x', 3, None, [{'id': 33, 'dict_size': 1 << 32}]))",
        "import lzma\nexec(lzma.decompress(b'x', 3, None, [{'id': 33, 'dict_size': 9999999999}]))",
    ):
        seen = read(text)
        assert seen.unread == ("train_gpt.py",)


def test_a_bomb_is_not_unpacked() -> None:
    bomb = packed(" " * (LARGEST_SOURCE_BYTES + 1), WRAPPER)
    tree = parse(bomb)
    assert tree is not None and list(unpack_code(tree)) == []
    assert read(bomb).unread == ("train_gpt.py",)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("import requests", "imports requests"),
        ("from huggingface_hub import hf_hub_download", "imports huggingface_hub"),
        ("from urllib.request import urlopen", "imports urllib.request"),
        ("subprocess.run(['pip', 'install', 'x'])", "runs pip"),
        ("os.system('wget http://x/y')", "runs wget"),
        ("subprocess.check_call('cd x && git clone y', shell=True)", "runs git"),
        ("datasets_of(load_dataset('x'))", "calls load_dataset"),
    ],
)
def test_downloads_are_seen(line: str, part: str) -> None:
    assert part in [hint.text for hint in read(line).downloads]
    off = read(f"if h.fetch:\n    {line}\n", {"fetch": "False"})
    assert off.downloads == () and part in [hint.text for hint in off.downloads_off]
    assert read(f"def never_called():\n    {line}\n").downloads == ()


@pytest.mark.parametrize(
    "line",
    [
        "subprocess.run(['lrzip', 'model'])",
        "subprocess.run(['nvidia-smi'])",
        "import urllib.parse",
        "trainer.run('digit')",
    ],
)
def test_other_programs_are_no_downloads(line: str) -> None:
    assert read(line).downloads == ()


def test_helpers_are_followed_through_packages() -> None:
    files = {"a/__init__.py": "from a.b import score", "a/b.py": f"{SLOT}\n", "c.py": CACHE}
    seen = scan("train_gpt.py", "from a import score\nscore()", files)
    assert seen.helpers == ("a/__init__.py", "a/b.py")
    assert [smell.file for smell in seen.smells] == ["a/b.py"]


def test_a_deep_source_is_unread_instead_of_an_error() -> None:
    deep = "x = " + "+".join(["1"] * 20_000)
    assert read(deep).unread == ("train_gpt.py",)
    assert read("x = " + "(" * 9_999).unread == ("train_gpt.py",)
