"""No command or option is lost or changed; each is explained."""

import pytest
from interface import commands, interfaces
from pinned import differences, read_pinned

# Words of a pinned command -> names of the options it has gained on purpose.
NEW_OPTIONS: dict[str, set[str]] = {
    "": {"debug", "version"},
    "recipe show": {"forward", "against_published"},
    "pack": {"for_submission"},
    "score": {"exact"},
    "compress": {"adapt", "decoder_memory", "exact", "index", "split", "verify"},
    "decompress": {"document"},
    "bench": {
        "at",
        "attention",
        "candidate",
        "compile_",
        "out",
        "revision",
        "rewrites",
        "set_",
        "sides",
    },
    "audit": {
        "cap",
        "documents",
        "expect_data",
        "profile",
        "score_seconds",
        "seed",
        "strict",
        "train_seconds",
    },
    "demo": {"full"},
    "report": {"no_text"},
    "data build": {"development", "drop_near", "holdout", "split_documents", "val_docs"},
    "generate": {"top_k", "stop"},
}

PINNED = read_pinned()["interface"]


@pytest.mark.parametrize("words", PINNED)
def test_a_command_has_the_pinned_parameters(words: str) -> None:
    current = interfaces()
    assert words in current, f"'underpar {words}' is gone"
    gained = current[words].keys() - PINNED[words].keys()
    assert gained == NEW_OPTIONS.get(words, set())
    kept = {name: param for name, param in current[words].items() if name not in gained}
    assert differences(PINNED[words], kept) == []
    # Arguments are taken in the order in which they are declared.
    assert _arguments(kept) == _arguments(PINNED[words])


def _arguments(params: dict[str, dict[str, object]]) -> list[str]:
    return [name for name, param in params.items() if param["kind"] == "argument"]


def test_every_command_and_option_has_help() -> None:
    without = [words for words, command in commands().items() if not command.help]
    without += [
        f"{words} {param.name}"
        for words, command in commands().items()
        for param in command.params
        if not getattr(param, "help", None)
    ]
    assert without == []
