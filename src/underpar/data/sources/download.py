"""Download one file: resume after an interruption, limit its length, verify its checksum.

A download is written to `<name>.part` next to its target, and renamed after its checksum is
verified. So the target is complete or absent, and the next attempt continues a partial file. The
caller holds a lock, so that no other process writes the same partial file.
"""

import hashlib
import http.client
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from underpar.core.run_folder import rename_to_stay, wait_for_disk
from underpar.errors import DataError

CHUNK_BYTES = 1 << 20
LONGEST_WAIT_SECONDS = 60.0
# Upper bound of a server's Retry-After header.
LONGEST_RETRY_AFTER_SECONDS = 600.0


@dataclass(frozen=True)
class RemoteFile:
    """A file as its server lists it: path in the repository, size in bytes, one checksum."""

    path: str
    size: int
    sha256: str | None
    git_sha1: str | None


@dataclass(frozen=True)
class Connection:
    """The server, the access token, and the limits on retries."""

    endpoint: str
    token: str | None = field(default=None, repr=False)
    attempts: int = 6
    timeout_seconds: float = 60.0
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        if not re.fullmatch(r"https?://[\w.-]+(:\d+)?(/[\w./-]*)?", self.endpoint, re.ASCII):
            raise DataError(f"endpoint {self.endpoint!r}: expected an address as https://host")
        if self.attempts < 1:
            raise DataError(f"attempts = {self.attempts}: expected 1 or more")
        if self.token is not None and not re.fullmatch(r"[!-~]+", self.token):
            raise DataError("token: expected printable ASCII without spaces; copy it again")


def read_page(url: str, connection: Connection, max_bytes: int, first: bool) -> tuple[bytes, str]:
    """A short response and its Link header; if `first`, an unreachable server is not retried."""
    patience = _Patience(url, connection)
    while True:
        try:
            with _open(url, connection, {}) as response:
                return _read_whole(response, url, max_bytes), response.headers.get("Link", "")
        except _Trouble as trouble:
            if first and trouble.unreachable:
                raise DataError(
                    f"{trouble}; underpar works offline, only 'data fetch' needs the network"
                ) from trouble
            patience.wait(trouble)


def download_file(
    url: str,
    file: RemoteFile,
    target: Path,
    connection: Connection,
    progress: Callable[[int], None],
    cached: Path | None = None,
) -> bool:
    """Download `file` to `target`; `progress` gets the bytes so far. False if it existed.

    If the file `cached` has the listed checksum, it is copied. Any other is left alone.
    """
    expected = file.sha256 or file.git_sha1
    if _is_listed(target, file):
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    if cached is not None and _is_listed(cached, file):
        shutil.copyfile(cached, part)
    # An old partial file may be damaged. After a wrong checksum, download once more from byte 0.
    for _ in range(2):
        _fill(part, url, file, connection, progress)
        checksum = _checksum(part, file)
        if checksum == expected:
            wait_for_disk(part)
            rename_to_stay(part, target)
            return True
        part.unlink()
    kind = "SHA-256" if file.sha256 else "git SHA-1"
    raise DataError(f"{url}: {kind} is {checksum}, the listing says {expected}; fetched twice")


class _Trouble(Exception):
    """A failure that may pass: of the network, or of a busy server."""

    def __init__(
        self,
        message: str,
        retry_after_seconds: float | None = None,
        unreachable: bool = False,
        restart: bool = False,
    ) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
        self.unreachable = unreachable
        self.restart = restart


class _Patience:
    """Waits 1, 2, 4, ... seconds between attempts; gives up after too many without progress."""

    def __init__(self, url: str, connection: Connection) -> None:
        self._url = url
        self._connection = connection
        self._num_failures = 0

    def wait(self, trouble: _Trouble, progressed: bool = False) -> None:
        """Sleep before the next attempt, or raise that there is none."""
        self._num_failures = 0 if progressed else self._num_failures + 1
        if self._num_failures >= self._connection.attempts:
            raise DataError(
                f"{self._url}: {trouble}; gave up after {self._num_failures} attempts without "
                "progress, run the command again to go on from here"
            ) from trouble
        seconds = trouble.retry_after_seconds
        if seconds is None:
            # The exponent is bounded: 2.0**doublings would overflow after many attempts.
            doublings = min(max(self._num_failures - 1, 0), 30)
            seconds = min(2.0**doublings, LONGEST_WAIT_SECONDS)
        self._connection.sleep(seconds)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but not from https to http, and sends the token to its own host only."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        """The next request, without Authorization if the origin differs."""
        if urlsplit(newurl).scheme not in ("https", req.type):
            raise urllib.error.HTTPError(req.full_url, code, "unsafe redirect", headers, fp)
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and urlsplit(newurl)[:2] != urlsplit(req.full_url)[:2]:
            request.remove_header("Authorization")
        return request


def _open(url: str, connection: Connection, headers: dict[str, str]) -> http.client.HTTPResponse:
    request = urllib.request.Request(url, headers={"User-Agent": "underpar", **headers})
    if connection.token is not None:
        request.add_header("Authorization", f"Bearer {connection.token}")
    host = urlsplit(url).netloc
    try:
        opener = urllib.request.build_opener(_Redirects)
        response = opener.open(request, timeout=connection.timeout_seconds)
    except urllib.error.HTTPError as error:
        error.close()
        raise _refusal(url, error) from error
    except urllib.error.URLError as error:
        cause = error.reason if isinstance(error.reason, Exception) else error
        raise _Trouble(f"cannot reach {host}: {_reason(cause)}", unreachable=True) from error
    # ValueError and OverflowError: a redirect to an invalid address.
    except (OSError, http.client.HTTPException, ValueError, OverflowError) as error:
        raise _Trouble(f"{host} broke off: {_reason(error)}") from error
    assert isinstance(response, http.client.HTTPResponse)
    return response


def _reason(error: Exception) -> str:
    # Messages of the system are quoted. Other messages could contain bytes of the server.
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return type(error).__name__


def _refusal(url: str, error: urllib.error.HTTPError) -> Exception:
    code = error.code
    if code in (401, 403):
        return DataError(
            f"{url}: refused with {code}: the repository is gated, private or not there; "
            "check its name; set HF_TOKEN or pass --token with a token that may read it"
        )
    if code == 404:
        return DataError(f"{url}: not found (404); check repository, revision and file")
    if code == 416:
        return _Trouble("the server has no such range (416)", restart=True)
    if code in (408, 429) or code >= 500:
        asked = error.headers.get("Retry-After", "")
        seconds = float(asked) if re.fullmatch(r"[0-9]{1,9}", asked) else None
        if seconds is not None:
            seconds = min(seconds, LONGEST_RETRY_AFTER_SECONDS)
        return _Trouble(f"the server answered {code}", retry_after_seconds=seconds)
    return DataError(f"{url}: the server answered {code}, expected 200 or 206")


def _read(response: http.client.HTTPResponse, num_bytes: int) -> bytes:
    try:
        # read1 reads the socket once, so bytes that arrived before an interruption are kept.
        return response.read1(num_bytes)
    except (OSError, http.client.HTTPException) as error:
        raise _Trouble(f"connection lost: {_reason(error)}") from error


def _read_whole(response: http.client.HTTPResponse, url: str, max_bytes: int) -> bytes:
    stated = response.length
    try:
        body = response.read(max_bytes + 1)
    except (OSError, http.client.HTTPException) as error:
        raise _Trouble(f"connection lost: {_reason(error)}") from error
    if len(body) > max_bytes:
        raise DataError(f"{url}: answer of over {max_bytes} bytes, not a listing")
    if stated is not None and len(body) < stated:
        raise _Trouble(f"connection closed at byte {len(body)} of {stated}")
    return body


def _fill(
    part: Path,
    url: str,
    file: RemoteFile,
    connection: Connection,
    progress: Callable[[int], None],
) -> None:
    if part.is_symlink():
        # Its bytes would go to wherever the link points.
        part.unlink()
    part.touch()
    if part.stat().st_size > file.size:
        part.write_bytes(b"")
    patience = _Patience(url, connection)
    # Only bytes beyond the furthest position count as progress. Otherwise a download that always
    # restarts and always breaks off would never end.
    furthest = part.stat().st_size
    while part.stat().st_size < file.size:
        try:
            _append(part, url, file, connection, progress)
        except _Trouble as trouble:
            have = part.stat().st_size
            if trouble.restart:
                part.write_bytes(b"")
            patience.wait(trouble, progressed=have > furthest)
            furthest = max(furthest, have)


def _append(
    part: Path,
    url: str,
    file: RemoteFile,
    connection: Connection,
    progress: Callable[[int], None],
) -> None:
    have = part.stat().st_size
    headers = {"Range": f"bytes={have}-"} if have else {}
    with _open(url, connection, headers) as response:
        resumed = response.status == 206
        answered = response.headers.get("Content-Range", "")
        if resumed and not answered.startswith(f"bytes {have}-"):
            raise _Trouble(f"the server sent another range than from byte {have}", restart=True)
        if not resumed:
            have = 0
        with part.open("ab" if resumed else "wb") as out:
            while have < file.size:
                chunk = _read(response, min(CHUNK_BYTES, file.size - have))
                if not chunk:
                    raise _Trouble(f"connection closed at byte {have} of {file.size}")
                out.write(chunk)
                have += len(chunk)
                progress(have)


def _is_listed(path: Path, file: RemoteFile) -> bool:
    same_size = path.is_file() and path.stat().st_size == file.size
    return same_size and _checksum(path, file) == (file.sha256 or file.git_sha1)


def _checksum(path: Path, file: RemoteFile) -> str:
    with path.open("rb") as stream:
        if file.sha256:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        # Small files are listed with the SHA-1 of their git blob.
        blob = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
        return hashlib.file_digest(stream, lambda: blob).hexdigest()
