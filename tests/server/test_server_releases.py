"""Releases for the fleet: asked for once, pinned at first sight, refused in words when replaced; archives kept."""

from __future__ import annotations

import hashlib
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from server_fakes import FakeClock, eventually, request
from starlette.applications import Starlette

from llmgw.domain.engines import Asset, EngineSpec, Origin
from llmgw.errors import DigestMismatch, FetchError, InstallError, LlmgwError, NoSpace, NotPublished, UsageError
from llmgw.server.admin import on_error
from llmgw.server.asset_routes import AssetDoors
from llmgw.server.assets import Assets
from llmgw.server.releases import ReleaseBook, pin
from llmgw.server.state import State, open_state
from llmgw.server.web import Web
from llmgw.sources import fetch_asset
from llmgw.sources.server import Releases, ServerSource, compose
from llmgw.system.http import Http

SPEC = EngineSpec("llama.cpp", "b1", sources=("server", "github"))
DATA = random.Random(5).randbytes(150_000).hex().encode()
SHA = hashlib.sha256(DATA).hexdigest()
ASSET = Asset("llama-b1.tar.gz", "https://github.com/x", len(DATA), SHA, "github")


class Upstream:
    """A source that counts, and says what a test wants."""

    def __init__(self) -> None:
        self.says: tuple[Asset, ...] | LlmgwError = (ASSET,)
        self.asked: list[str] = []

    def source(self, text: str) -> Upstream:
        self.text = text
        return self

    def assets(self, origin: Origin, spec: EngineSpec, arch: str) -> tuple[Asset, ...]:
        self.asked.append(self.text)
        if isinstance(self.says, LlmgwError):
            raise self.says
        return self.says


class Fleet:
    """A state, a book and its upstream."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "state.db")
        self.clock, self.upstream, self.told = FakeClock(), Upstream(), threading.Event()
        self.open()

    def open(self) -> None:
        self.state: State = open_state(self.path)
        self.book = ReleaseBook(
            self.state, lambda _, version: Origin("o/r", version), self.upstream.source, self.clock, self.told.set,
            jitter=lambda: 0.5,
        )  # fmt: skip
        self.book.start()

    def close(self) -> None:
        self.book.stop()
        self.state.close()

    def settled(self, spec: EngineSpec = SPEC, where: Callable[[Any], bool] = lambda _: True) -> Any:
        def look() -> Any:
            [release] = self.book.releases([spec])
            return not release.asking and where(release) and release

        return eventually(look, "the release")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    yield made
    made.close()


class TestBook:
    def test_a_version_is_asked_for_once_however_often_it_is_wanted(self, fleet: Fleet) -> None:
        for _ in range(20):
            assert fleet.settled().assets == (Asset(ASSET.name, f"/assets/{SHA}/{ASSET.name}", len(DATA), SHA),)
        assert fleet.upstream.asked == ["github"]

    def test_the_next_server_knows_it_without_asking(self, fleet: Fleet) -> None:
        before = fleet.settled()
        fleet.close()
        fleet.open()
        assert fleet.book.releases([SPEC]) == (before,)
        assert fleet.upstream.asked == ["github"]

    def test_engines_from_other_sources_are_left_alone(self, fleet: Fleet) -> None:
        assert fleet.book.releases([evolve(SPEC, sources=("github",))]) == ()
        assert fleet.upstream.asked == []

    def test_server_alone_means_that_the_server_asks_github(self, fleet: Fleet) -> None:
        fleet.settled(evolve(SPEC, sources=("server",)))
        assert fleet.upstream.asked == ["github"]

    def test_a_replaced_file_is_refused_in_words_and_the_pinned_one_stays(self, fleet: Fleet) -> None:
        fleet.settled()
        fleet.upstream.says = (evolve(ASSET, sha256="f" * 64), Asset("new.tar.gz", "u", 5, "a" * 64, "github"))
        fleet.clock.pass_time(7 * 3600)
        release = fleet.settled(where=lambda release: len(release.assets) == 2)
        assert release.assets[0].sha256 == SHA
        assert release.words == (
            f"`{ASSET.name}` was replaced at github after it was pinned: pinned is sha256 {SHA[:16]}…, now it is "
            f"{'f' * 16}…; the pinned one stays, the new one is refused"
        )
        assert fleet.book.find("f" * 64, ASSET.name) is None

    def test_a_failure_is_told_and_tried_again_when_the_source_says(self, fleet: Fleet) -> None:
        fleet.upstream.says = InstallError("cannot ask GitHub", cause="the rate limit is used up", retry_after_s=900.0)
        release = fleet.settled()
        assert (release.words, release.retry_after_s) == ("cannot ask GitHub: the rate limit is used up", 900.0)
        fleet.upstream.says = (ASSET,)
        fleet.clock.pass_time(899)
        assert fleet.settled().words
        fleet.clock.pass_time(2)
        assert fleet.settled(where=lambda release: bool(release.assets)).words == ""
        assert len(fleet.upstream.asked) == 2

    def test_each_sources_refusal_is_told(self, fleet: Fleet) -> None:
        fleet.upstream.says = NotPublished("`b1` is not published", hint="wait")
        release = fleet.settled(evolve(SPEC, sources=("server", "github", "https://m/")))
        assert release.words == "github: `b1` is not published; https://m/: `b1` is not published (wait)"

    def test_the_operators_pin_stands_in_for_a_missing_digest(self, fleet: Fleet) -> None:
        fleet.upstream.says = (evolve(ASSET, sha256=None),)
        [asset] = fleet.settled().assets
        assert (asset.url, asset.sha256) == ("", None)
        [asset] = fleet.settled(evolve(SPEC, sha256={ASSET.name: SHA})).assets
        assert asset.url == f"/assets/{SHA}/{ASSET.name}"
        found = fleet.book.find(SHA, ASSET.name)
        assert found is not None
        assert found.sha256 == SHA

    def test_an_import_is_kept_and_not_asked_for(self, fleet: Fleet) -> None:
        fleet.upstream.says = InstallError("no network")
        fleet.settled()
        assert fleet.book.take_in("llama.cpp", "b1", [ASSET])
        assert not fleet.book.take_in("llama.cpp", "b1", [ASSET])
        assert fleet.settled().assets[0].sha256 == SHA
        asked = len(fleet.upstream.asked)
        fleet.clock.pass_time(7 * 3600)
        fleet.settled()
        assert len(fleet.upstream.asked) == asked
        with pytest.raises(UsageError, match="is not imported"):
            fleet.book.take_in("llama.cpp", "b1", [evolve(ASSET, sha256="e" * 64)])

    def test_the_first_digest_seen_stays(self) -> None:
        old, new = Asset("a", "u", 1, "1" * 64, "github"), Asset("a", "u", 1, "2" * 64, "github")
        assert pin([old], [new])[0] == (old,)
        assert pin([evolve(old, sha256=None)], [new]) == ((new,), [])
        assert pin([old], [evolve(new, sha256=None)])[0][0].sha256 == "1" * 64
        assert pin([old], []) == ((old,), [])


class Shelf:
    """A fetch that counts; `go` lets it end."""

    def __init__(self) -> None:
        self.calls, self.go, self.error = 0, threading.Event(), None
        self.go.set()
        self.data = {ASSET.name: DATA}

    def __call__(self, asset: Asset, dest_dir: Path, *, progress: Any, stop: threading.Event) -> Path:
        from llmgw.system.fetch import cache_name

        self.calls += 1
        progress(1000, asset.size_bytes)
        assert self.go.wait(10)
        if self.error is not None:
            raise self.error
        path = dest_dir / cache_name(asset.sha256 or "", asset.name)
        path.write_bytes(self.data[asset.name])
        return path


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def other(name: str, size: int) -> tuple[Asset, bytes]:
    data = os.urandom(size)
    return Asset(name, "u", size, hashlib.sha256(data).hexdigest(), "github"), data


class TestCache:
    @pytest.fixture
    def assets(self, tmp_path: Path, shelf: Shelf) -> Assets:
        return Assets(tmp_path / "assets", shelf, FakeClock(), limit_bytes=1_000_000)

    def path(self, assets: Assets, asset: Asset = ASSET) -> Path:
        return eventually(lambda: assets.want(asset).path, asset.name)

    def test_many_who_want_a_file_share_one_download(self, assets: Assets, shelf: Shelf) -> None:
        shelf.go.clear()
        for _ in range(20):
            assert assets.want(ASSET).path is None
        words = eventually(lambda: "0 %" in assets.want(ASSET).words and assets.want(ASSET).words, "words")
        assert words == f"the server is fetching `{ASSET.name}` from github (300 kB, 0 %)"
        shelf.go.set()
        assert self.path(assets).read_bytes() == DATA
        assert shelf.calls == 1

    def test_a_file_that_changed_on_disk_is_not_served(self, assets: Assets, shelf: Shelf) -> None:
        self.path(assets).write_bytes(b"spoiled")
        assert self.path(assets).read_bytes() == DATA
        assert shelf.calls == 2

    def test_a_failure_is_told_to_all_and_not_tried_at_once_again(self, assets: Assets, shelf: Shelf) -> None:
        shelf.error = FetchError("cannot fetch it", cause="it answered 404")
        error = eventually(lambda: assets.want(ASSET).error, "the failure")
        assert error.words() == "cannot fetch it: it answered 404"
        for _ in range(5):
            assert assets.want(ASSET).error is error
        assert shelf.calls == 1

    def test_what_was_served_longest_ago_makes_room(self, assets: Assets, shelf: Shelf) -> None:
        clock = assets._clock
        made = [other(f"{name}.tar.gz", 400_000) for name in "abc"]
        for asset, data in made[:2]:
            shelf.data[asset.name] = data
            self.path(assets, asset)
            clock.pass_time(10)
        self.path(assets, made[0][0])
        shelf.data[made[2][0].name] = made[2][1]
        self.path(assets, made[2][0])
        assert [assets.keeps(asset) for asset, _ in made] == [True, False, True]

    def test_one_that_can_never_fit_is_refused_in_words(self, assets: Assets, shelf: Shelf) -> None:
        asset, _ = other("huge.tar.gz", 2_000_000)
        error = eventually(lambda: assets.want(asset).error, "the refusal")
        assert isinstance(error, NoSpace)
        assert error.message == "`huge.tar.gz` (2.0 MB) does not fit into the cache of 1.0 MB"
        assert shelf.calls == 0

    def test_an_upload_goes_on_where_it_broke_off(self, assets: Assets, shelf: Shelf) -> None:
        assert assets.put_piece(ASSET, 0, DATA[:100_000]) == 100_000
        assert assets.put_piece(ASSET, 0, b"") == 100_000
        assert assets.put_piece(ASSET, 5, b"wrong place") == 100_000
        assert not assets.keeps(ASSET)
        assert assets.put_piece(ASSET, 100_000, DATA[100_000:]) == len(DATA)
        assert self.path(assets).read_bytes() == DATA
        assert assets.put_piece(ASSET, 0, b"") == len(DATA)
        assert shelf.calls == 0

    def test_an_upload_of_other_bytes_leaves_nothing(self, assets: Assets, tmp_path: Path) -> None:
        with pytest.raises(DigestMismatch):
            assets.put_piece(ASSET, 0, bytes(len(DATA)))
        with pytest.raises(UsageError, match="longer than"):
            assets.put_piece(ASSET, 0, bytes(len(DATA) + 1))
        with pytest.raises(NoSpace):
            assets.put_piece(evolve(ASSET, size_bytes=5_000_000), 0, b"x")
        assert [path.stat().st_size for path in (tmp_path / "assets").iterdir()] in ([], [0])

    def test_imported_files_stay_and_are_verified_again_by_the_next_server(self, tmp_path: Path, shelf: Shelf) -> None:
        mine = evolve(ASSET, source="import", url="")
        here = tmp_path / "assets"
        Assets(here, shelf, FakeClock(), limit_bytes=1_000_000).put_piece(mine, 0, DATA)
        again = Assets(here, shelf, FakeClock(), limit_bytes=500_000, imported=lambda: frozenset([SHA]))
        assert self.path(again, mine).read_bytes() == DATA
        asset, data = other("b.tar.gz", 300_000)
        shelf.data[asset.name] = data
        assert "were imported" in eventually(lambda: again.want(asset).error, "the refusal").words()
        self.path(again, mine).write_bytes(b"spoiled")
        error = eventually(lambda: again.want(mine).error, "the words")
        assert error.words() == f"`{ASSET.name}` was imported and was damaged in the cache and is removed"
        assert shelf.calls == 0


class TestDoors:
    @pytest.fixture
    def socket(self, fleet: Fleet, shelf: Shelf, tmp_path: Path) -> Iterator[Path]:
        assets = Assets(tmp_path / "assets", shelf, FakeClock(), limit_bytes=1_000_000)
        routes = AssetDoors(fleet.book, assets).routes()
        app = Starlette(routes=list(routes), exception_handlers={LlmgwError: on_error, Exception: on_error})
        web = Web(tmp_path / "a.sock", lambda _: app)
        web.start()
        yield tmp_path / "a.sock"
        web.stop()

    def test_exactly_the_known_files_are_served(self, fleet: Fleet, socket: Path) -> None:
        fleet.settled()
        part = request(socket, "GET", f"/assets/{SHA}/{ASSET.name}", headers={"Range": "bytes=10-19"})
        assert part.status == 206
        assert part.headers["content-range"] == f"bytes 10-19/{len(DATA)}"
        assert part.headers["etag"] == f'"{SHA}"'
        for path in (f"{SHA}/other", f"{'0' * 64}/{ASSET.name}", f"{SHA}/..%2F..%2Fstate.db", f"{SHA}/"):
            assert request(socket, "GET", f"/assets/{path}").status == 404, path

    def test_a_download_that_failed_is_told_in_words(self, fleet: Fleet, shelf: Shelf, socket: Path) -> None:
        fleet.settled()
        shelf.error = FetchError("cannot fetch it", cause="it answered 404", hint="look")
        answer = request(socket, "GET", f"/assets/{SHA}/{ASSET.name}")
        assert answer.status == 502
        assert answer.json()["error"]["cause"] == "it answered 404"

    def test_one_on_its_way_is_told_with_its_progress(
        self, fleet: Fleet, shelf: Shelf, socket: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fleet.settled()
        monkeypatch.setattr("llmgw.server.asset_routes._WAIT_S", 0.3)
        shelf.go.clear()
        answer = request(socket, "GET", f"/assets/{SHA}/{ASSET.name}")
        shelf.go.set()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "asset-fetching"
        assert answer.json()["progress"] == {"done_bytes": 1000, "total_bytes": len(DATA)}

    def test_an_import_needs_its_files_first(self, fleet: Fleet, socket: Path) -> None:
        listed = [{"name": ASSET.name, "size_bytes": len(DATA), "sha256": SHA}]
        body = {"engine": "llama.cpp", "version": "b7", "assets": listed}
        assert "was not uploaded" in request(socket, "POST", "/api/v1/releases", body=body).text
        put = request(socket, "PUT", f"/api/v1/uploads/{SHA}/{ASSET.name}?size={len(DATA)}&offset=0", body=DATA)
        assert put.json() == {"have": len(DATA), "complete": True}
        assert request(socket, "POST", "/api/v1/releases", body=body).json()["changed"] is True
        [known] = request(socket, "GET", "/api/v1/releases").json()["releases"]
        assert (known["version"], known["assets"][0]["kept"], known["asked"]) == ("b7", True, None)

    @pytest.mark.parametrize(
        "body",
        [
            {}, [], {"engine": "a", "version": "b", "assets": []},
            {"engine": "../a", "version": "b", "assets": [{"name": "n", "size_bytes": 1, "sha256": SHA}]},
            {"engine": "a", "version": "b", "assets": [{"name": "../n", "size_bytes": 1, "sha256": SHA}]},
            {"engine": "a", "version": "b", "assets": [{"name": "n", "size_bytes": "1", "sha256": SHA}]},
            {"engine": "a", "version": 7, "assets": [{"name": "n", "size_bytes": 1, "sha256": SHA}]},
        ],
    )  # fmt: skip
    def test_what_is_no_import_is_refused(self, socket: Path, body: Any) -> None:
        assert request(socket, "POST", "/api/v1/releases", body=body).status == 400

    @pytest.mark.parametrize(
        "path", [f"{SHA}/a?size=1", f"{SHA}/a?size=x&offset=0", "abc/a?size=1&offset=0", f"{SHA}/..?size=1&offset=0"]
    )
    def test_what_is_no_upload_is_refused(self, socket: Path, path: str) -> None:
        assert request(socket, "PUT", f"/api/v1/uploads/{path}", body=b"x").status == 400


class TestNode:
    """The agent's side: what the server said, and waiting for it."""

    def test_the_address_is_the_host_the_agent_dials(self) -> None:
        assert compose("http://*:8080", "https://srv:7443") == "http://srv:8080"
        assert compose("https://*:8080", "https://[fd00::1]:7443") == "https://[fd00::1]:8080"
        assert compose("http://10.0.0.9:8080", "https://srv:7443") == "http://10.0.0.9:8080"
        assert compose("http://127.0.0.1:8080", "http://127.0.0.1:7443") == "http://127.0.0.1:8080"

    def test_an_address_that_no_other_machine_reaches_is_told(self) -> None:
        with pytest.raises(InstallError) as caught:
            compose("http://127.0.0.1:8080", "https://srv:7443")
        assert "it serves them at `http://127.0.0.1:8080`, its own loopback" in caught.value.words()
        assert "`http.listen`" in caught.value.hint

    def test_an_installation_waits_until_the_server_has_asked(self, fleet: Fleet) -> None:
        board = Releases(10.0)
        source = ServerSource(board)
        asking = fleet.book.releases([SPEC])
        board.take(tuple(evolve(each, asking=True, assets=()) for each in asking), "http://*:1", "http://h:2")
        known = (fleet.settled(),)
        threading.Timer(0.1, board.take, (known, "http://*:1", "http://h:2")).start()
        [asset] = source.assets(Origin("o/r", "b1"), SPEC, "x86_64")
        assert asset == Asset(ASSET.name, f"http://h:1/assets/{SHA}/{ASSET.name}", len(DATA), SHA, "server")

    def test_the_servers_own_words_are_passed_on(self, fleet: Fleet) -> None:
        fleet.upstream.says = InstallError("cannot ask GitHub", cause="no route", retry_after_s=60.0)
        board = Releases(0.1)
        board.take((fleet.settled(),), "http://*:1", "http://h:2")
        with pytest.raises(NotPublished) as caught:
            ServerSource(board).assets(Origin("o/r", "b1"), SPEC, "x86_64")
        assert caught.value.words() == "the server cannot get llama.cpp `b1`: cannot ask GitHub: no route"
        assert caught.value.retry_after_s == 60.0

    def test_silence_and_strangers_are_told(self) -> None:
        board = Releases(0.05)
        with pytest.raises(InstallError, match="does not hand on"):
            board.find("llama.cpp", "b1")

    def test_the_servers_refusal_of_a_file_is_the_nodes(self, tmp_path: Path) -> None:
        import json
        import sys

        sys.path.append(str(Path(__file__).resolve().parent.parent / "install"))
        from github_server import FileServer, Served

        body = json.dumps({"error": {"code": "fetch-failed", "message": "cannot fetch it", "cause": "404", "hint": ""}})
        busy = json.dumps({"error": {"code": "asset-fetching", "message": "on its way"}, "progress": {"done_bytes": 7}})
        with FileServer() as server, Http() as http:
            told: list[int] = []
            path = f"/assets/{SHA}/{ASSET.name}"
            asset = Asset(ASSET.name, server.url_of(path), len(DATA), SHA, "server")
            answers = [Served(busy.encode(), statuses=[]), Served(body.encode())]
            server.answer = lambda asked: answers.pop(0) if answers else None
            real = server._file

            def answered(handler: Any, served: Served, asked: Any) -> None:
                if served.data.startswith(b"{"):
                    server._whole(handler, 503 if b"on its way" in served.data else 502, served.data, {})
                else:
                    real(handler, served, asked)

            server._file = answered  # type: ignore[method-assign]
            with pytest.raises(InstallError) as caught:
                fetch_asset(asset, tmp_path, http, progress=lambda done, _: told.append(done))
            assert caught.value.words() == f"the server cannot hand on `{ASSET.name}`: cannot fetch it: 404"
            assert told == [7]
            server.put(path, DATA)
            assert fetch_asset(asset, tmp_path, http).read_bytes() == DATA
            asked = len(server.requests)
            assert fetch_asset(asset, tmp_path, http).read_bytes() == DATA
            assert len(server.requests) == asked
