"""Download published token sets, or any Hugging Face dataset repository, to a folder.

Needs the standard library only. Every file is verified against the SHA-256 (small files: the git
SHA-1) in the listing of the hub. The hub's own client does not verify its downloads; a file in its
cache is copied if it is the listed one.
"""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PureWindowsPath
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from underpar.core.locks import lock_folder
from underpar.core.run_folder import write_json
from underpar.data.folder import hash_file
from underpar.data.sources.download import Connection, RemoteFile, download_file, read_page
from underpar.data.sources.hub import HUB, cached_file
from underpar.errors import DataError
from underpar.recipe import nearest

RECORD_NAME = "fetch.json"
MAX_PAGE_BYTES = 1 << 24
MAX_PAGES = 10_000
MAX_FILES = 1 << 20

# Called with the current path, the bytes done and the bytes in total, over all files of a fetch.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class FetchOptions(Connection):
    """A connection, and which files to fetch: paths that match a glob of `include` (empty: all).

    Of the training files of a published set, only the first `num_train_files` are fetched, by name.
    """

    endpoint: str = HUB
    include: tuple[str, ...] = ()
    num_train_files: int = 80

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_train_files < 0:
            raise DataError(f"num_train_files = {self.num_train_files}: expected 0 or more")


@dataclass(frozen=True)
class FetchSummary:
    """The files of a fetch, and how many of them were downloaded now."""

    repo: str
    revision: str
    num_files: int
    num_bytes: int
    num_fetched_files: int


@dataclass(frozen=True)
class PublishedSet:
    """Files of a repository that form a set, as globs in which * also matches "/".

    The first pattern must match a file. `training` matches the files that `num_train_files` limits.
    """

    repo: str
    patterns: tuple[str, ...] = ("*",)
    training: str | None = None
    revision: str = "main"


def _token_set(repo: str, folder: str, tokenizer: str) -> PublishedSet:
    shards = f"datasets/*{folder}/fineweb_"
    tokenizers = f"datasets/*tokenizers/{tokenizer}.*"
    manifests = ("datasets/manifest.json", f"datasets/*{folder}/manifest.json")
    return PublishedSet(repo, (f"{shards}*.bin", tokenizers, *manifests), f"{shards}train_*.bin")


_OFFICIAL = "willdepueoai/parameter-golf"
_CLARK = "kevclark/parameter-golf"
_CASEOPS = "romeerp/parameter-golf-caseops-v1"
_DOCS = ("datasets/docs_selected.jsonl", "datasets/docs_selected.source_manifest.json")

PUBLISHED: dict[str, PublishedSet] = {
    "sp1024": _token_set(_OFFICIAL, "_sp1024", "fineweb_1024_bpe"),
    "byte260": _token_set(_OFFICIAL, "_byte260", "fineweb_pure_byte_260"),
    "docs": PublishedSet(_OFFICIAL, _DOCS),
    "sp4096": _token_set(_CLARK, "_sp4096", "fineweb_4096_bpe"),
    "sp8192": _token_set(_CLARK, "_sp8192", "fineweb_8192_bpe"),
    "caseops": _token_set(_CASEOPS, "_caseops_v1_reserved", "*caseops_v1_reserved"),
}

_NAME = r"[A-Za-z0-9_-][A-Za-z0-9._-]*"
_REPO_AT_REVISION = re.compile(rf"({_NAME}/{_NAME})(?:@({_NAME}(?:/{_NAME})*))?")
_NEXT_LINK = re.compile(r'<([!-;=?-~]+)>\s*;\s*rel="?next"?')


def resolve(name: str) -> PublishedSet:
    """The set with this name: a published set, `owner/repo` or `owner/repo@revision`."""
    if name in PUBLISHED:
        return PUBLISHED[name]
    match = _REPO_AT_REVISION.fullmatch(name)
    if match is None:
        hint = nearest(name, list(PUBLISHED))
        raise DataError(f"{name!r}: neither a published set nor owner/repo[@revision]{hint}")
    return PublishedSet(match[1], revision=match[2] or "main")


def fetch(
    name: str, out: Path, options: FetchOptions, progress: Progress | None = None
) -> FetchSummary:
    """Download the missing files of `name` to `out`; list all files in fetch.json."""
    wanted = resolve(name)
    files = select(list_files(wanted.repo, wanted.revision, options), wanted, options)
    with lock_folder(out, create=True):
        return _fetch(name, wanted, files, out, options, progress)


def _fetch(
    name: str,
    wanted: PublishedSet,
    files: Sequence[RemoteFile],
    out: Path,
    options: FetchOptions,
    progress: Progress | None,
) -> FetchSummary:
    total = sum(file.size for file in files)
    base = f"{options.endpoint.rstrip('/')}/datasets/{wanted.repo}/resolve"
    done = num_fetched = 0
    records = []
    for file in files:
        url = f"{base}/{quote(wanted.revision, safe='')}/{quote(file.path)}"
        report = _reporter(progress, file.path, done, total)
        try:
            cached = cached_file(wanted.repo, wanted.revision, file.path)
            num_fetched += download_file(url, file, out / file.path, options, report, cached)
        except OSError as error:
            raise DataError(f"{out / file.path}: cannot be written: {error.strerror}") from error
        report(file.size)
        done += file.size
        sha256 = file.sha256 or hash_file(out / file.path)
        records.append({"path": file.path, "bytes": file.size, "sha256": sha256})
    source = {"repo": wanted.repo, "revision": wanted.revision, "endpoint": options.endpoint}
    write_json(out / RECORD_NAME, {"name": name, **source, "files": records})
    return FetchSummary(wanted.repo, wanted.revision, len(files), total, num_fetched)


def list_files(repo: str, revision: str, connection: Connection) -> list[RemoteFile]:
    """Every file of a dataset repository, from the checked listing of the server."""
    endpoint = connection.endpoint.rstrip("/")
    tree = f"{endpoint}/api/datasets/{repo}/tree/{quote(revision, safe='')}"
    url: str | None = f"{tree}?recursive=true&expand=false"
    files: list[RemoteFile] = []
    for page in range(MAX_PAGES):
        assert url is not None
        body, link = read_page(url, connection, MAX_PAGE_BYTES, first=page == 0)
        files += _parse_page(body, url)
        if len(files) > MAX_FILES:
            break
        url = _next_page(link, url, endpoint)
        if url is None:
            return files
    raise DataError(f"{tree}: over {MAX_FILES} files or {MAX_PAGES} pages, too many to list")


def select(
    files: Sequence[RemoteFile], wanted: PublishedSet, options: FetchOptions
) -> list[RemoteFile]:
    """The files to fetch, in path order."""
    where = f"{wanted.repo}@{wanted.revision}"
    if not any(_matches(file, wanted.patterns[:1]) for file in files):
        raise DataError(f"{where}: none of its {len(files)} files matches {wanted.patterns[0]!r}")
    chosen: list[RemoteFile] = []
    # Counted per folder: two folders of a set are two copies, not one longer set.
    num_train: Counter[str] = Counter()
    for file in sorted(files, key=lambda file: file.path):
        if not _matches(file, wanted.patterns) or not _matches(file, options.include or ("*",)):
            continue
        if wanted.training is not None and _matches(file, (wanted.training,)):
            folder = file.path.rpartition("/")[0]
            num_train[folder] += 1
            if num_train[folder] > options.num_train_files:
                continue
        chosen.append(file)
    if not chosen:
        raise DataError(f"{where}: no file matches --include {' '.join(options.include)}")
    if any(file.path == RECORD_NAME for file in chosen):
        raise DataError(f"{where}: {RECORD_NAME!r} is a name underpar writes; leave it out")
    return chosen


def _reporter(
    progress: Progress | None, path: str, done_before: int, total: int
) -> Callable[[int], None]:
    def report(done_bytes: int) -> None:
        if progress is not None:
            progress(path, done_before + done_bytes, total)

    return report


def _matches(file: RemoteFile, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(file.path, pattern) for pattern in patterns)


def _next_page(link: str, url: str, endpoint: str) -> str | None:
    match = _NEXT_LINK.search(link)
    if match is None:
        return None
    try:
        following = urljoin(url, match[1])
        # Another server could list any file, and would receive the token.
        same_origin = urlsplit(following)[:2] == urlsplit(endpoint)[:2]
    except ValueError:
        same_origin = False
    if not same_origin:
        raise DataError(f"{url}: the next page of the listing is at {match[1]!r}, another server")
    return following


def _parse_page(body: bytes, url: str) -> Iterator[RemoteFile]:
    try:
        entries = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{url}: the listing is not JSON: {error}") from error
    if not isinstance(entries, list):
        raise DataError(f"{url}: the listing is {type(entries).__name__}, expected an array")
    for entry in entries:
        if not isinstance(entry, dict):
            raise DataError(f"{url}: the listing holds {_quoted(entry)}, expected an object")
        if entry.get("type") == "file":
            yield _parse_entry(entry, url)


def _parse_entry(entry: dict[str, Any], url: str) -> RemoteFile:
    path, lfs = entry.get("path"), entry.get("lfs")
    if not isinstance(path, str) or not is_safe_path(path):
        raise DataError(f"{url}: the listing holds the path {_quoted(path)}, which is not safe")
    size = lfs.get("size") if isinstance(lfs, dict) else entry.get("size")
    if type(size) is not int or size < 0:
        raise DataError(f"{url}: size of {path!r} is {_quoted(size)}, expected a number of bytes")
    digest = lfs.get("oid") if isinstance(lfs, dict) else entry.get("oid")
    num_digits = 64 if isinstance(lfs, dict) else 40
    if not isinstance(digest, str) or not re.fullmatch(rf"[0-9a-f]{{{num_digits}}}", digest):
        raise DataError(
            f"{url}: checksum of {path!r} is {_quoted(digest)}, not {num_digits} digits"
        )
    if isinstance(lfs, dict):
        return RemoteFile(path, size, digest, None)
    return RemoteFile(path, size, None, digest)


def _quoted(value: object) -> str:
    return repr(value)[:80] if isinstance(value, str | int) else type(value).__name__


def is_safe_path(path: str) -> bool:
    """Whether a relative path stays inside its folder on every system, without odd characters."""
    # A file in .git could change the settings or hooks of a surrounding repository.
    if any(part in ("", ".", "..") or part.lower() == ".git" for part in path.split("/")):
        return False
    odd = "\\" in path or any(unicodedata.category(char) in ("Cc", "Cs") for char in path)
    return not odd and not PureWindowsPath(path).anchor
