"""The Hugging Face hub as this machine knows it: its address, the user's token, fetched files.

Settings are those of the hub's own client: HF_ENDPOINT, HF_TOKEN, and, if huggingface_hub is
installed, the token of `hf auth login` and the files in its cache.
"""

from __future__ import annotations

from pathlib import Path

from underpar.core.runtime import variable

HUB = "https://huggingface.co"


def hub_endpoint() -> str:
    """The address of the hub, or of the mirror that HF_ENDPOINT names."""
    return variable("HF_ENDPOINT", "").strip() or HUB


def hub_token() -> str | None:
    """The token of HF_TOKEN or of `hf auth login`; it is meant for `hub_endpoint` alone."""
    token = variable("HF_TOKEN", "").strip()
    if token:
        return token
    try:
        from huggingface_hub import get_token
    except ImportError:
        return None
    return get_token()


def cached_file(repo: str, revision: str, path: str) -> Path | None:
    """The file of a dataset in the cache of huggingface_hub; nothing says that it is whole."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    found = try_to_load_from_cache(repo, path, revision=revision, repo_type="dataset")
    return Path(found) if isinstance(found, str) else None
