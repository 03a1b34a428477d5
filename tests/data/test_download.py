"""One file against a real server that cuts, stalls, lies and redirects."""

import hashlib
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request

import pytest

from fake_hub import FakeHub, Fault, Handler, cut_at, hang_up, list_entry, refuse, send, serve
from underpar.data.sources import download
from underpar.data.sources.download import (
    CHUNK_BYTES,
    Connection,
    RemoteFile,
    download_file,
    read_page,
)
from underpar.errors import DataError

CONTENT = bytes(range(256)) * 400
NAME = "tokens.bin"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("no_proxy", "*")
    with serve(FakeHub(files={NAME: CONTENT})) as running:
        yield running


class Fetched:
    """Downloads of one file into one folder, with what was waited and reported."""

    def __init__(self, hub: FakeHub, folder: Path) -> None:
        self.hub = hub
        self.target = folder / NAME
        self.part = folder / f"{NAME}.part"
        self.waits: list[float] = []
        self.reported: list[int] = []
        self.listed = remote(CONTENT)

    def run(self, attempts: int = 6, token: str | None = None) -> bool:
        connection = Connection(
            self.hub.url, token, attempts, timeout_seconds=10.0, sleep=self.waits.append
        )
        url = f"{self.hub.url}/datasets/owner/repo/resolve/main/{NAME}"
        return download_file(url, self.listed, self.target, connection, self.reported.append)

    @property
    def ranges(self) -> list[str | None]:
        return [headers.get("Range") for headers in self.hub.requests_for(NAME)]


@pytest.fixture
def fetched(hub: FakeHub, tmp_path: Path) -> Fetched:
    return Fetched(hub, tmp_path / "deep" / "folder")


def remote(content: bytes, small: bool = False) -> RemoteFile:
    entry = list_entry(NAME, content, small)
    if small:
        return RemoteFile(NAME, len(content), None, entry["oid"])
    return RemoteFile(NAME, len(content), entry["lfs"]["oid"], None)


def test_a_file_arrives_whole_and_leaves_no_part(fetched: Fetched) -> None:
    assert fetched.run() is True
    assert fetched.target.read_bytes() == CONTENT
    assert not fetched.part.exists()
    assert fetched.reported[-1] == len(CONTENT)
    assert fetched.ranges == [None]
    assert fetched.waits == []


def test_a_small_file_is_checked_by_its_git_name(fetched: Fetched) -> None:
    fetched.listed = remote(CONTENT, small=True)
    assert fetched.run() is True
    fetched.hub.files[NAME] = CONTENT[::-1]
    fetched.target.unlink()
    with pytest.raises(DataError, match="git SHA-1"):
        fetched.run()


def test_an_empty_file_needs_no_request(fetched: Fetched) -> None:
    fetched.listed = remote(b"")
    assert fetched.run() is True
    assert fetched.target.read_bytes() == b""
    assert fetched.ranges == []


def test_a_complete_file_is_not_fetched_again(fetched: Fetched) -> None:
    fetched.run()
    assert fetched.run() is False
    assert len(fetched.ranges) == 1


@pytest.mark.parametrize("damaged", [CONTENT[:-1], b"x" + CONTENT[1:], CONTENT + b"x"])
def test_a_damaged_file_is_replaced(fetched: Fetched, damaged: bytes) -> None:
    fetched.target.parent.mkdir(parents=True)
    fetched.target.write_bytes(damaged)
    assert fetched.run() is True
    assert fetched.target.read_bytes() == CONTENT


def test_a_cut_connection_goes_on_where_it_was(fetched: Fetched) -> None:
    fetched.hub.faults[NAME] = [cut_at(1000)]
    fetched.run()
    assert fetched.target.read_bytes() == CONTENT
    assert fetched.ranges == [None, "bytes=1000-"]
    assert fetched.waits == [1.0]


def test_a_reset_connection_goes_on_where_it_was(fetched: Fetched) -> None:
    def reset(handler: Handler, content: bytes) -> None:
        cut_at(1000)(handler, content)
        while not fetched.reported:
            time.sleep(0.001)
        # No time to linger: the close becomes a reset.
        linger = struct.pack("ii", 1, 0)
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        handler.connection.close()

    fetched.hub.faults[NAME] = [reset]
    fetched.run()
    assert fetched.target.read_bytes() == CONTENT
    assert fetched.ranges == [None, "bytes=1000-"]


def test_a_file_may_come_in_chunks_and_break_off(fetched: Fetched) -> None:
    broken = b"%x\r\n" % len(CONTENT) + CONTENT[:1000]
    whole = b"%x\r\n" % len(CONTENT) + CONTENT + b"\r\n0\r\n\r\n"
    fetched.hub.faults[NAME] = [send(body, Transfer_Encoding="chunked") for body in (broken, whole)]
    fetched.run()
    assert fetched.target.read_bytes() == CONTENT
    assert fetched.ranges == [None, "bytes=1000-"]


def test_an_interrupt_leaves_the_part_for_the_next_time(fetched: Fetched) -> None:
    content = bytes(3 * CHUNK_BYTES)
    fetched.hub.files[NAME], fetched.listed = content, remote(content)

    class Stop(list[int]):
        def append(self, done_bytes: int) -> None:
            raise KeyboardInterrupt

    fetched.reported = Stop()
    with pytest.raises(KeyboardInterrupt):
        fetched.run()
    have = fetched.part.stat().st_size
    assert 0 < have < len(content)
    assert not fetched.target.exists()
    fetched.reported = []
    fetched.run()
    assert fetched.ranges == [None, f"bytes={have}-"]
    assert fetched.target.read_bytes() == content


def test_a_server_that_ignores_ranges_restarts_the_file(fetched: Fetched) -> None:
    fetched.hub.faults[NAME] = [cut_at(1000), send(CONTENT)]
    fetched.run()
    assert fetched.target.read_bytes() == CONTENT
    assert fetched.ranges == [None, "bytes=1000-"]


@pytest.mark.parametrize(
    "second",
    [
        send(CONTENT[5:], 206, Content_Range=f"bytes 5-{len(CONTENT) - 1}/{len(CONTENT)}"),
        send(CONTENT[10000:], 206, Content_Range="bytes 10000-20000/*"),
        send(CONTENT[1000:], 206),
        refuse(416),
    ],
    ids=["earlier", "later", "unnamed", "416"],
)
def test_a_range_that_was_not_asked_for_discards_the_part(fetched: Fetched, second: Fault) -> None:
    fetched.hub.faults[NAME] = [cut_at(1000), second]
    fetched.run()
    assert fetched.target.read_bytes() == CONTENT
    assert fetched.ranges == [None, "bytes=1000-", None]


def test_a_part_longer_than_the_file_is_discarded(fetched: Fetched) -> None:
    fetched.part.parent.mkdir(parents=True)
    fetched.part.write_bytes(CONTENT + b"x")
    fetched.run()
    assert fetched.ranges == [None]
    assert fetched.target.read_bytes() == CONTENT


def test_a_finished_part_is_checked_not_fetched(fetched: Fetched) -> None:
    fetched.part.parent.mkdir(parents=True)
    fetched.part.write_bytes(CONTENT)
    assert fetched.run() is True
    assert fetched.ranges == []
    assert not fetched.part.exists()


def test_a_link_in_the_place_of_the_part_is_not_followed(fetched: Fetched) -> None:
    precious = fetched.part.parent / "precious"
    precious.parent.mkdir(parents=True)
    precious.write_bytes(b"text")
    for place in (fetched.part, fetched.target):
        place.symlink_to(precious)
    assert fetched.run() is True
    assert precious.read_bytes() == b"text"
    assert fetched.target.read_bytes() == CONTENT and not fetched.target.is_symlink()
    assert not fetched.part.exists()


def test_no_more_than_the_listed_size_is_written(fetched: Fetched) -> None:
    fetched.listed = remote(CONTENT[:777])
    fetched.run()
    assert fetched.target.read_bytes() == CONTENT[:777]
    assert max(fetched.reported) == 777


def test_a_file_shorter_than_listed_ends(fetched: Fetched) -> None:
    fetched.listed = remote(CONTENT + b"more")
    with pytest.raises(DataError, match="gave up after 3 attempts"):
        fetched.run(attempts=3)
    # All there is, no more than that (416), all of it again, no more than that again.
    assert len(fetched.ranges) == 4


def test_a_wrong_checksum_is_fetched_once_more(fetched: Fetched) -> None:
    fetched.hub.faults[NAME] = [send(CONTENT[::-1])]
    assert fetched.run() is True
    assert fetched.target.read_bytes() == CONTENT
    assert fetched.ranges == [None, None]


def test_a_checksum_wrong_twice_names_file_expected_and_found(fetched: Fetched) -> None:
    wrong = CONTENT[::-1]
    fetched.hub.files[NAME] = wrong
    with pytest.raises(DataError) as caught:
        fetched.run()
    for said in (NAME, hashlib.sha256(CONTENT).hexdigest(), hashlib.sha256(wrong).hexdigest()):
        assert said in str(caught.value)
    assert len(fetched.ranges) == 2
    assert not fetched.part.exists()
    assert not fetched.target.exists()


def test_a_busy_server_is_given_the_time_it_asks_for(fetched: Fetched) -> None:
    busy = [refuse(503, Retry_After="7"), refuse(429), refuse(500), refuse(429, Retry_After="0")]
    fetched.hub.faults[NAME] = [*busy, refuse(503, Retry_After="99999999")]
    fetched.run()
    assert fetched.waits == [7.0, 2.0, 4.0, 0.0, 600.0]
    assert fetched.target.read_bytes() == CONTENT


@pytest.mark.parametrize("asked", ["Wed, 21 Oct 2099 07:28:00 GMT", "-5", "9" * 5000, "inf"])
def test_a_retry_after_that_is_no_number_of_seconds_is_ignored(
    fetched: Fetched, asked: str
) -> None:
    fetched.hub.faults[NAME] = [refuse(503, Retry_After=asked)]
    fetched.run()
    assert fetched.waits == [1.0]


def test_waits_double_up_to_a_minute(fetched: Fetched) -> None:
    fetched.hub.faults[NAME] = [hang_up] * 9
    with pytest.raises(DataError, match="gave up after 9 attempts"):
        fetched.run(attempts=9)
    assert fetched.waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]


def test_progress_resets_the_count_of_attempts(fetched: Fetched) -> None:
    def one_more(handler: Handler, content: bytes) -> None:
        start = fetched.part.stat().st_size
        span = f"bytes {start}-{len(content) - 1}/{len(content)}"
        send(content[start : start + 10], 206, Content_Range=span)(handler, content)

    fetched.hub.faults[NAME] = [cut_at(10), *[one_more] * 7]
    fetched.run(attempts=1)
    assert fetched.target.read_bytes() == CONTENT
    assert fetched.ranges == [None, *(f"bytes={10 * n}-" for n in range(1, 9))]
    assert fetched.waits == [1.0] * 8


def test_a_file_that_always_restarts_and_breaks_off_ends(fetched: Fetched) -> None:
    fetched.hub.faults[NAME] = [cut_at(1000)] * 20
    with pytest.raises(DataError, match="gave up after 3 attempts"):
        fetched.run(attempts=3)
    assert len(fetched.ranges) == 4


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_speaks_of_the_token(fetched: Fetched, status: int) -> None:
    fetched.hub.faults[NAME] = [refuse(status)]
    with pytest.raises(DataError, match=r"gated, private.*--token"):
        fetched.run()
    assert len(fetched.ranges) == 1


def test_a_missing_file_is_named_with_its_repository(fetched: Fetched) -> None:
    fetched.hub.files.clear()
    with pytest.raises(DataError, match=rf"owner/repo/resolve/main/{NAME}: not found \(404\)"):
        fetched.run()
    assert len(fetched.ranges) == 1


def test_other_refusals_are_final(fetched: Fetched) -> None:
    fetched.hub.faults[NAME] = [refuse(400)]
    with pytest.raises(DataError, match="answered 400"):
        fetched.run()


def test_a_redirect_is_followed_without_the_token(fetched: Fetched) -> None:
    with serve(FakeHub(files={NAME: CONTENT})) as cdn:
        fetched.hub.cdn = cdn
        cdn.faults[NAME] = [cut_at(1000)]
        fetched.run(token="secret")
        home, away = fetched.hub.requests_for(NAME), cdn.requests_for(NAME)
    assert fetched.target.read_bytes() == CONTENT
    assert [headers["Authorization"] for headers in home] == ["Bearer secret"] * 2
    assert ["Authorization" in headers for headers in away] == [False, False]
    assert [headers.get("Range") for headers in away] == [None, "bytes=1000-"]


def test_a_redirect_on_the_same_server_keeps_the_token(fetched: Fetched) -> None:
    moved = f"/datasets/owner/new/resolve/main/{NAME}"
    fetched.hub.faults[NAME] = [refuse(307, Location=moved)]
    fetched.run(token="secret")
    sent = [headers["Authorization"] for headers in fetched.hub.requests_for(NAME)]
    assert sent == ["Bearer secret"] * 2


@pytest.mark.parametrize(
    "location",
    [
        "ftp://127.0.0.1/x",
        "file:///etc/hostname",
        "http://[/x",
        "http://127.0.0.1:99999999/x",
        f"/resolve/main/{NAME}",
    ],
)
def test_a_redirect_to_nowhere_is_one_line(fetched: Fetched, location: str) -> None:
    fetched.hub.faults[NAME] = [refuse(302, Location=location)] * 30
    with pytest.raises(DataError) as caught:
        fetched.run(attempts=2)
    assert "\n" not in str(caught.value)
    assert not fetched.target.exists()


def test_encryption_is_not_given_up() -> None:
    home = Request("https://hub.example/file", headers={"Authorization": "Bearer secret"})
    follow = download._Redirects().redirect_request
    away = follow(home, None, 302, "", {}, "https://cdn.example/file")  # type: ignore[arg-type]
    assert away is not None and not away.has_header("Authorization")
    with pytest.raises(OSError, match="unsafe redirect"):
        follow(home, None, 302, "", {}, "http://hub.example/file")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"endpoint": "huggingface.co"}, "https://host"),
        ({"endpoint": "file:///etc"}, "https://host"),
        ({"endpoint": "https://"}, "https://host"),
        ({"endpoint": "https://h", "attempts": 0}, "1 or more"),
        ({"endpoint": "https://h", "token": "hf_secret\nX-Other: 1"}, "printable ASCII"),
        ({"endpoint": "https://h", "token": ""}, "printable ASCII"),
    ],
)
def test_settings_are_checked_and_the_token_is_not_shown(
    settings: dict[str, object], said: str
) -> None:
    with pytest.raises(DataError, match=said) as caught:
        Connection(**settings)  # type: ignore[arg-type]
    assert "secret" not in str(caught.value)
    assert "secret" not in repr(Connection("https://h", token="hf_secret"))


def test_a_page_is_bounded_and_read_again_after_a_cut(hub: FakeHub) -> None:
    waits: list[float] = []
    connection = Connection(hub.url, sleep=waits.append)
    url = f"{hub.url}/datasets/owner/repo/resolve/main/{NAME}"
    broken = send(b"ff\r\nabc", Transfer_Encoding="chunked")
    hub.faults[NAME] = [cut_at(50), hang_up, broken]
    assert read_page(url, connection, len(CONTENT), first=True) == (CONTENT, "")
    assert waits == [1.0, 2.0, 4.0]
    with pytest.raises(DataError, match=f"over {len(CONTENT) - 1} bytes"):
        read_page(url, connection, len(CONTENT) - 1, first=True)


def test_no_network_is_said_at_once_and_later_waited_for(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{free.getsockname()[1]}"
    waits: list[float] = []
    connection = Connection(f"http://{host}", attempts=3, sleep=waits.append)
    with pytest.raises(DataError, match=f"^cannot reach {host}: Connection refused; .*offline"):
        read_page(f"http://{host}/api", connection, 100, first=True)
    assert waits == []
    with pytest.raises(DataError, match="gave up after 3"):
        read_page(f"http://{host}/api", connection, 100, first=False)
    assert waits == [1.0, 2.0]
