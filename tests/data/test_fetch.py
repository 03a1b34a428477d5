"""What is fetched: names, listings that lie, published sets, and the record that is left."""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import run
from fake_hub import REPO, FakeHub, cut_at, list_entry, refuse, serve
from underpar.core.locks import lock_folder
from underpar.data.sources import fetch as module
from underpar.data.sources.download import RemoteFile
from underpar.data.sources.fetch import (
    HUB,
    PUBLISHED,
    RECORD_NAME,
    FetchOptions,
    PublishedSet,
    fetch,
    list_files,
    resolve,
    select,
)
from underpar.data.sources.hub import hub_endpoint, hub_token
from underpar.errors import DataError, RunError

FILES = {
    "README.md": b"# Read me\n",
    "data/a b#c.bin": bytes(range(256)) * 300,
    "data/part-1.bin": b"one" * 1000,
    "data/part-2.bin": b"two" * 1000,
    "data/\u00e9t\u00e9?.txt": b"summer",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("no_proxy", "*")
    with serve(FakeHub(files=dict(FILES), small={"README.md"})) as running:
        yield running


def options(hub: FakeHub, **settings: Any) -> FetchOptions:
    return FetchOptions(endpoint=hub.url, **{"sleep": lambda seconds: None, **settings})


def found_in(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_a_repository_arrives_with_its_record(hub: FakeHub, tmp_path: Path) -> None:
    hub.page_size = 2
    out = tmp_path / "new" / "out"
    summary = fetch(REPO, out, options(hub))
    files = found_in(out)
    record = json.loads(files.pop(RECORD_NAME))
    assert files == FILES
    assert record["repo"] == REPO
    assert record["revision"] == "main"
    assert record["files"] == [
        {"path": p, "bytes": len(FILES[p]), "sha256": hashlib.sha256(FILES[p]).hexdigest()}
        for p in sorted(FILES)
    ]
    assert (summary.repo, summary.revision) == (REPO, "main")
    assert (summary.num_files, summary.num_fetched_files) == (len(FILES), len(FILES))
    assert summary.num_bytes == sum(map(len, FILES.values()))
    # Six entries (one of them a folder), two a page.
    assert len(hub.requests_for("tree")) == 3


def test_what_is_complete_is_not_fetched_again(hub: FakeHub, tmp_path: Path) -> None:
    fetch(REPO, tmp_path, options(hub))
    (tmp_path / "data/part-1.bin").write_bytes(b"damaged")
    (tmp_path / "data/part-2.bin").unlink()
    hub.seen.clear()
    summary = fetch(REPO, tmp_path, options(hub))
    assert sorted(name for name, _ in hub.seen) == ["data/part-1.bin", "data/part-2.bin", "tree"]
    assert (summary.num_files, summary.num_fetched_files) == (len(FILES), 2)
    files = found_in(tmp_path)
    assert json.loads(files.pop(RECORD_NAME))["files"][0]["path"] == "README.md"
    assert files == FILES


def test_an_unfinished_fetch_leaves_no_record(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults["data/part-2.bin"] = [cut_at(100), refuse(404)]
    with pytest.raises(DataError, match=r"part-2\.bin: not found"):
        fetch(REPO, tmp_path, options(hub))
    files = found_in(tmp_path)
    assert RECORD_NAME not in files
    assert files["data/part-2.bin.part"] == FILES["data/part-2.bin"][:100]
    assert files["data/part-1.bin"] == FILES["data/part-1.bin"]


def test_one_process_at_a_time_fetches_into_a_folder(hub: FakeHub, tmp_path: Path) -> None:
    out = tmp_path / "got"
    with (
        lock_folder(out, create=True),
        pytest.raises(RunError, match="got is in use by process"),
    ):
        fetch(REPO, out, options(hub))
    assert list(out.iterdir()) == []


def test_the_token_goes_to_the_hub_and_not_to_where_it_points(hub: FakeHub, tmp_path: Path) -> None:
    with serve(FakeHub(files=FILES)) as cdn:
        hub.cdn = cdn
        fetch(REPO, tmp_path, options(hub, token="secret"))
        away = [headers for _, headers in cdn.seen]
    assert {headers["Authorization"] for _, headers in hub.seen} == {"Bearer secret"}
    assert len(away) == len(FILES)
    assert not any("Authorization" in headers for headers in away)
    assert "secret" not in (tmp_path / RECORD_NAME).read_text()


def test_progress_counts_all_files(hub: FakeHub, tmp_path: Path) -> None:
    total = sum(map(len, FILES.values()))
    seen: list[tuple[str, int, int]] = []
    for _ in range(2):
        seen.clear()
        fetch(REPO, tmp_path, options(hub), lambda *state: seen.append(state))
        assert {path for path, _, _ in seen} == set(FILES)
        assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
        assert seen[-1] == (max(FILES), total, total)


def test_include_narrows(hub: FakeHub, tmp_path: Path) -> None:
    fetch(REPO, tmp_path, options(hub, include=("*part-?.bin", "*.md")))
    assert set(found_in(tmp_path)) == {
        "README.md",
        "data/part-1.bin",
        "data/part-2.bin",
        RECORD_NAME,
    }
    with pytest.raises(DataError, match=r"owner/repo@main: no file matches --include \*\.zip"):
        fetch(REPO, tmp_path, options(hub, include=("*.zip",)))


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_repository_that_is_not_to_be_had_is_named(
    hub: FakeHub, tmp_path: Path, status: int
) -> None:
    hub.faults["tree"] = [refuse(status)]
    with pytest.raises(DataError, match=f"owner/repo/tree/main.*{status}"):
        fetch(REPO, tmp_path, options(hub))
    assert found_in(tmp_path) == {}


def test_a_busy_listing_is_waited_for(hub: FakeHub) -> None:
    waits: list[float] = []
    hub.faults["tree"] = [refuse(429, Retry_After="3"), refuse(502)]
    assert len(list_files(REPO, "main", options(hub, sleep=waits.append))) == len(FILES)
    assert waits == [3.0, 2.0]


def test_a_place_that_cannot_be_written_is_named(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file where a folder must be")
    with pytest.raises(DataError, match=r"data/.*: cannot be written: "):
        fetch(REPO, tmp_path, options(hub))


def test_a_listing_gives_the_checksum_it_has(hub: FakeHub) -> None:
    files = {file.path: file for file in list_files(REPO, "main", options(hub))}
    small, large = files["README.md"], files["data/part-1.bin"]
    # git hash-object of the file.
    assert small == RemoteFile("README.md", 10, None, "3333f9daa49e5fe99051dc84003eb681afb529e1")
    assert large.sha256 == hashlib.sha256(FILES["data/part-1.bin"]).hexdigest()
    assert large.git_sha1 is None


@pytest.mark.parametrize(
    "path",
    [
        "../evil",
        "a/../../evil",
        "/etc/evil",
        "a//b",
        "./a",
        "a/",
        "",
        "a\\..\\b",
        "C:evil",
        "a\nb",
        "a\x1b[2J",
        "a\x85b",
        "\ud800",
        ".git/config",
        "sub/.GIT/hooks/pre-commit",
        7,
        None,
        ["a"],
    ],
)
def test_a_path_that_leaves_the_folder_is_refused(
    hub: FakeHub, tmp_path: Path, path: object
) -> None:
    hub.listing = [list_entry("good", b"good"), {**list_entry("x", b"evil"), "path": path}]
    with pytest.raises(DataError, match="not safe") as caught:
        fetch(REPO, tmp_path / "out", options(hub))
    assert str(caught.value).isprintable()
    assert found_in(tmp_path) == {}


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=st.sampled_from("./\\a:C~\n\u00e9"), max_size=8))
def test_a_safe_path_stays_inside(path: str) -> None:
    out = Path("/out")
    if module.is_safe_path(path):
        assert (out / path).resolve().is_relative_to(out)
        assert (out / path).resolve() != out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"size": -1}, "size"),
        ({"size": 1.5}, "size"),
        ({"size": True}, "size"),
        ({"size": None}, "size"),
        ({"oid": "abc"}, "checksum"),
        ({"oid": None}, "checksum"),
        ({"oid": "Z" * 40}, "checksum"),
        ({"lfs": {"size": -5, "oid": "0" * 64}}, "size"),
        ({"lfs": {"size": 5, "oid": "0" * 40}}, "checksum"),
        ({"lfs": {}}, "size"),
    ],
)
def test_a_listing_that_makes_no_sense_is_refused(
    hub: FakeHub, change: dict[str, Any], said: str
) -> None:
    hub.listing = [{**list_entry("x", b"content", small=True), **change}]
    with pytest.raises(DataError, match=f"{said} of 'x' is "):
        list_files(REPO, "main", options(hub))


@pytest.mark.parametrize(
    "body", [b"<html>", b"\xff\xfe\x00", b"{}", b"[1]", b"[" * 100_000, b"9" * 5000, b'["a"]']
)
def test_an_answer_that_is_no_listing_is_refused(hub: FakeHub, body: bytes) -> None:
    hub.listing = body
    with pytest.raises(DataError, match=f"{hub.url}.*listing"):
        list_files(REPO, "main", options(hub))


def test_a_listing_is_bounded(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.page_size = 1
    for limit in ("MAX_FILES", "MAX_PAGES"):
        with monkeypatch.context() as patch:
            patch.setattr(module, limit, 3)
            with pytest.raises(DataError, match="too many to list"):
                list_files(REPO, "main", options(hub))
    monkeypatch.setattr(module, "MAX_PAGE_BYTES", 100)
    with pytest.raises(DataError, match="over 100 bytes"):
        list_files(REPO, "main", options(hub))


@pytest.mark.parametrize(
    "link",
    ["http://127.0.0.1:1/api?cursor=1", "https://evil.example/", "//evil.example/", "http://["],
)
def test_the_next_page_stays_on_the_server(hub: FakeHub, link: str) -> None:
    hub.page_size, hub.next_link = 1, link
    with pytest.raises(DataError, match="another server"):
        list_files(REPO, "main", options(hub))
    assert len(hub.requests_for("tree")) == 1


def test_the_next_page_may_be_relative(hub: FakeHub) -> None:
    hub.page_size, hub.next_link = 4, "?cursor=4"
    assert len(list_files(REPO, "main", options(hub))) == len(FILES)


def test_the_name_of_the_record_is_kept_free(hub: FakeHub, tmp_path: Path) -> None:
    hub.files[RECORD_NAME] = b"{}"
    with pytest.raises(DataError, match="name underpar writes"):
        fetch(REPO, tmp_path, options(hub))
    assert fetch(REPO, tmp_path, options(hub, include=("data/*",))).num_files == 4


def test_names_resolve() -> None:
    assert resolve("sp8192") is PUBLISHED["sp8192"]
    assert resolve("a/b") == PublishedSet("a/b", ("*",), None, "main")
    assert resolve("a-1/b.c_d@v1.0").revision == "v1.0"
    assert resolve("a/b@refs/pr/3").revision == "refs/pr/3"


@pytest.mark.parametrize(
    "name", ["", "sp999", "a/b/c", "../b", "a/..", "a/b@", "a/b@../x", "a/b\n", "a b/c", "a/b?x"]
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(DataError, match="neither a published set nor owner/repo"):
        resolve(name)


def test_a_slip_of_the_pen_gets_a_hint() -> None:
    with pytest.raises(DataError, match="did you mean 'sp1024'"):
        resolve("sp1042")
    with pytest.raises(DataError, match="choose from sp1024, byte260, docs, sp4096, sp8192, case"):
        resolve("zzz")


def test_a_revision_is_one_part_of_the_address(hub: FakeHub) -> None:
    with pytest.raises(DataError, match="owner/repo/tree/refs%2Fpr%2F3"):
        hub.faults["tree"] = [refuse(404)]
        list_files(REPO, "refs/pr/3", options(hub))


def test_options_are_checked() -> None:
    assert FetchOptions().endpoint == HUB
    with pytest.raises(DataError, match="num_train_files = -1"):
        FetchOptions(num_train_files=-1)
    with pytest.raises(DataError, match="1 or more"):
        FetchOptions(attempts=0)


def published_listing() -> list[RemoteFile]:
    """Every published layout in one listing, in no order."""
    root = "datasets/datasets/fineweb10B_"
    caseops = "sp8192_lossless_caps_caseops_v1_reserved"
    paths = ["README.md", ".gitattributes", "datasets/manifest.json", "fineweb_val_000000.bin"]
    for variant in ("sp1024", "sp4096", "sp8192", caseops, "byte260", "mysp1024"):
        paths += [f"{root}{variant}/fineweb_train_{n:06d}.bin" for n in reversed(range(100))]
        paths += [f"{root}{variant}/fineweb_val_{n:06d}.bin" for n in range(2)]
    paths.append(f"{root}{caseops}/fineweb_val_bytes_000000.bin")
    for vocab in ("1024_bpe", "4096_bpe", "8192_bpe", f"8192_bpe_{caseops[7:]}"):
        paths += [f"datasets/tokenizers/fineweb_{vocab}.{end}" for end in ("model", "vocab")]
    paths.append("datasets/tokenizers/fineweb_pure_byte_260.json")
    paths += ["datasets/docs_selected.jsonl", "datasets/docs_selected.source_manifest.json"]
    return [RemoteFile(path, 1, "0" * 64, None) for path in paths]


def selected(name: str, **settings: Any) -> list[str]:
    chosen = select(published_listing(), PUBLISHED[name], FetchOptions(**settings))
    return [file.path for file in chosen]


@pytest.mark.parametrize(
    ("name", "folder", "tokenizer", "num_val"),
    [
        ("sp1024", "sp1024", ["fineweb_1024_bpe.model", "fineweb_1024_bpe.vocab"], 2),
        ("sp4096", "sp4096", ["fineweb_4096_bpe.model", "fineweb_4096_bpe.vocab"], 2),
        ("sp8192", "sp8192", ["fineweb_8192_bpe.model", "fineweb_8192_bpe.vocab"], 2),
        ("byte260", "byte260", ["fineweb_pure_byte_260.json"], 2),
        (
            "caseops",
            "sp8192_lossless_caps_caseops_v1_reserved",
            [f"fineweb_8192_bpe_lossless_caps_caseops_v1_reserved.{e}" for e in ("model", "vocab")],
            3,
        ),
    ],
)
def test_a_token_set_is_its_folder_its_tokenizer_and_the_manifest(
    name: str, folder: str, tokenizer: list[str], num_val: int
) -> None:
    chosen = selected(name)
    prefix = f"datasets/datasets/fineweb10B_{folder}/fineweb_"
    train = [path for path in chosen if "_train_" in path]
    assert train == [f"{prefix}train_{n:06d}.bin" for n in range(80)]
    validation = [path for path in chosen if "_val_" in path]
    assert len(validation) == num_val
    assert all(path.startswith(f"{prefix}val_") for path in validation)
    rest = sorted(set(chosen) - set(train) - set(validation))
    assert rest == ["datasets/manifest.json", *(f"datasets/tokenizers/{t}" for t in tokenizer)]


def test_validation_is_whole_whatever_the_number_of_training_files() -> None:
    few, none, all_of_them = (selected("caseops", num_train_files=n) for n in (3, 0, 1000))
    assert sum("_train_" in path for path in few) == 3
    assert sum("_train_" in path for path in none) == 0
    assert sum("_train_" in path for path in all_of_them) == 100
    for chosen in (few, none, all_of_them):
        assert sum("_val_0" in path for path in chosen) == 2
        assert sum("_val_bytes_" in path for path in chosen) == 1


def test_include_comes_before_the_limit() -> None:
    chosen = selected("sp1024", num_train_files=2, include=("*_train_00009?.bin",))
    assert [path[-10:-4] for path in chosen] == ["000090", "000091"]


def test_docs_are_the_documents_and_their_manifest() -> None:
    assert selected("docs") == [
        "datasets/docs_selected.jsonl",
        "datasets/docs_selected.source_manifest.json",
    ]


def test_a_plain_repository_is_not_limited() -> None:
    files = published_listing()
    assert len(select(files, resolve("a/b"), FetchOptions(num_train_files=1))) == len(files)


def test_a_set_that_is_not_there_is_refused() -> None:
    files = [file for file in published_listing() if "sp1024" not in file.path]
    with pytest.raises(DataError, match=r"willdepueoai/parameter-golf@main: none of its \d+ files"):
        select(files, PUBLISHED["sp1024"], FetchOptions())


def test_a_published_set_arrives(hub: FakeHub, tmp_path: Path) -> None:
    wanted = {path: path.encode() for path in selected("caseops", num_train_files=2)}
    hub.files = {file.path: file.path.encode() for file in published_listing()}
    hub.small = {path for path in hub.files if path.endswith((".json", ".vocab"))}
    summary = fetch("caseops", tmp_path, options(hub, num_train_files=2))
    kept = found_in(tmp_path)
    record = json.loads(kept.pop(RECORD_NAME))
    assert kept == wanted
    assert (record["name"], record["repo"]) == ("caseops", "romeerp/parameter-golf-caseops-v1")
    assert summary.num_fetched_files == len(wanted)


def put_in_cache(monkeypatch: pytest.MonkeyPatch, cache: Path, files: dict[str, bytes]) -> None:
    """Write files to a cache of huggingface_hub, as its client leaves them."""
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    repo = cache / f"datasets--{REPO.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("c0ffee")
    for path, content in files.items():
        file = repo / "snapshots" / "c0ffee" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def test_files_in_the_cache_of_the_hub_are_copied_if_they_are_the_listed_ones(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached, damaged = "data/part-1.bin", "data/part-2.bin"
    damage = b"owt" * 1000
    put_in_cache(monkeypatch, tmp_path / "hf", {cached: FILES[cached], damaged: damage})
    fetch(REPO, tmp_path / "out", options(hub))
    files = found_in(tmp_path / "out")
    assert {path: files[path] for path in FILES} == FILES
    assert hub.requests_for(cached) == []
    assert len(hub.requests_for(damaged)) == 1
    # The cache belongs to another program.
    assert damage in found_in(tmp_path / "hf").values()


@pytest.mark.parametrize(
    ("variables", "words", "token"),
    [
        ({}, [], None),
        ({"HF_TOKEN": "hf_mine"}, [], "Bearer hf_mine"),
        ({"HF_TOKEN": "hf_mine"}, ["--token", "hf_other"], "Bearer hf_other"),
        # Another server never gets the token of the environment.
        ({"HF_TOKEN": "hf_mine", "HF_ENDPOINT": ""}, ["--endpoint"], None),
    ],
)
def test_the_command_reads_token_and_address_of_the_environment(
    hub: FakeHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    words: list[str],
    token: str | None,
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    # A user's own login must not decide the test.
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    for name, value in ({"HF_ENDPOINT": hub.url} | variables).items():
        monkeypatch.setenv(name, value)
    words = [*words, hub.url] if words[-1:] == ["--endpoint"] else words
    run("data", "fetch", REPO, "--out", tmp_path / "out", *words)
    assert {headers.get("Authorization") for _, headers in hub.seen} == {token}


def test_without_the_client_of_the_hub_all_still_works(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert hub_token() is None
    assert fetch(REPO, tmp_path / "out", options(hub)).num_fetched_files == len(FILES)


def test_a_login_of_the_client_of_the_hub_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(client, "get_token", lambda: "hf_login")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert hub_token() == "hf_login"
    monkeypatch.setenv("HF_TOKEN", " hf_mine\n")
    assert hub_token() == "hf_mine"
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    assert hub_endpoint() == HUB
