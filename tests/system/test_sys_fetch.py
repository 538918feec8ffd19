"""Fetching a file over a network that lies, breaks and dawdles."""

from __future__ import annotations

import hashlib
import os
import random
import resource
import signal
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from github_server import FileServer, Served

from llmgw.errors import DigestMismatch, FetchError, FetchStopped
from llmgw.system.fetch import FetchLimits, cache_name, fetch
from llmgw.system.http import Http
from llmgw.system.redirects import LOOPBACK_HOSTS, host_allowed
from llmgw.system.retry import RetryPolicy, retry_after

DATA = random.Random(3).randbytes(300_000)
SHA = hashlib.sha256(DATA).hexdigest()
QUICK = FetchLimits(retry=RetryPolicy(base_s=0.01))
HTML = b"<!DOCTYPE html><html><body>Please log in</body></html>"


@pytest.fixture
def http() -> Iterator[Http]:
    with Http() as client:
        yield client


@pytest.fixture
def server() -> Iterator[FileServer]:
    with FileServer() as running:
        yield running


class Case:
    """One server, one destination, and what the callbacks told."""

    def __init__(self, http: Http, server: FileServer, folder: Path) -> None:
        self.http, self.server, self.folder = http, server, folder
        self.dest = folder / "file"
        self.told: list[tuple[int, int | None]] = []

    def serve(self, data: bytes = DATA, **faults: Any) -> Served:
        return self.server.put("/file", data, **faults)

    def fetch(self, **options: Any) -> Path:
        given = {"size_bytes": len(DATA), "sha256": SHA, "allow_http": True, "limits": QUICK, **options}
        url = given.pop("url", self.server.url_of("/file"))
        return fetch(self.http, url, self.dest, progress=lambda a, b: self.told.append((a, b)), **given)

    def refused(self, kind: type[FetchError] = FetchError, **options: Any) -> str:
        with pytest.raises(kind) as caught:
            self.fetch(**options)
        assert not self.dest.exists()
        return caught.value.words()

    @property
    def ranges(self) -> list[str | None]:
        return [asked.headers.get("range") for asked in self.server.requests]

    def left(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def case(http: Http, server: FileServer, tmp_path: Path) -> Case:
    return Case(http, server, tmp_path)


def test_the_file_arrives_whole_and_nothing_else_is_left(case: Case) -> None:
    case.serve()
    assert case.fetch() == case.dest
    assert case.dest.read_bytes() == DATA
    assert case.dest.stat().st_mode & 0o777 == 0o644
    assert case.left() == ["file"]
    assert case.told[-1] == (len(DATA), len(DATA))


def test_a_file_that_is_there_and_right_is_not_asked_for(case: Case) -> None:
    case.dest.write_bytes(DATA)
    case.fetch()
    assert case.server.requests == []
    assert case.told == [(len(DATA), len(DATA))]


def test_a_file_that_is_there_and_wrong_is_replaced(case: Case) -> None:
    case.serve()
    case.dest.write_bytes(b"wrong")
    case.fetch()
    assert case.dest.read_bytes() == DATA


def test_a_broken_transfer_goes_on_where_it_broke(case: Case) -> None:
    case.serve(cuts=[100_000, 50_000])
    case.fetch()
    assert case.dest.read_bytes() == DATA
    assert case.ranges == [None, "bytes=100000-", "bytes=150000-"]
    assert case.server.requests[1].headers["if-range"] == case.server.files["/file"].tag()


def test_a_transfer_that_keeps_breaking_gives_up_and_goes_on_next_time(case: Case) -> None:
    served = case.serve(cuts=[1000, 1000, 1000])
    assert "closed the connection before the answer was complete (3.0 kB are kept)" in case.refused()
    assert served.cuts == []
    case.fetch()
    assert case.ranges[-1] == "bytes=3000-"
    assert case.dest.read_bytes() == DATA


def test_a_file_changed_between_two_attempts_starts_again(case: Case) -> None:
    served = case.serve(b"old" * 100_000, cuts=[1000])
    served.on_cut = lambda: setattr(served, "data", DATA)
    case.fetch()
    assert case.ranges == [None, "bytes=1000-"]
    assert case.dest.read_bytes() == DATA


def test_a_server_that_ignores_ranges_starts_again(case: Case) -> None:
    case.serve(cuts=[1000], ignore_range=True)
    case.fetch()
    assert case.dest.read_bytes() == DATA


def test_a_206_with_another_range_than_asked_for_starts_again(case: Case) -> None:
    case.serve(cuts=[1000], shift_range=7)
    case.fetch()
    assert case.ranges == [None, "bytes=1000-", None]
    assert case.dest.read_bytes() == DATA


def test_without_a_validator_the_digest_guards_the_resumed_bytes(case: Case) -> None:
    served = case.serve(b"\0" * len(DATA), cuts=[1000], etag="")
    served.on_cut = lambda: setattr(served, "data", DATA)
    case.fetch()
    assert case.ranges == [None, "bytes=1000-", None]
    assert case.dest.read_bytes() == DATA


def test_resumed_bytes_spoiled_on_disk_are_found_and_fetched_anew_once(case: Case) -> None:
    case.serve(cuts=[1000, 0, 0])
    case.refused()
    partial = case.folder / "file.partial"
    partial.write_bytes(b"\0" * 1000)
    case.fetch()
    assert case.ranges[-2:] == ["bytes=1000-", None]
    assert case.dest.read_bytes() == DATA


def test_a_partial_file_of_another_announcement_is_not_used(case: Case) -> None:
    case.serve(cuts=[1000, 0, 0])
    case.refused(sha256="0" * 64)
    case.fetch()
    assert case.ranges[-1] is None
    assert case.dest.read_bytes() == DATA


def test_a_complete_partial_file_only_needs_its_check(case: Case) -> None:
    case.serve(cuts=[len(DATA) - 1, 0, 0])
    case.refused()
    with (case.folder / "file.partial").open("ab") as handle:
        handle.write(DATA[-1:])
    asked = len(case.server.requests)
    case.fetch()
    assert len(case.server.requests) == asked
    assert case.dest.read_bytes() == DATA


def test_one_flipped_bit_is_refused_and_both_digests_named(case: Case) -> None:
    wrong = bytes([DATA[0] ^ 1]) + DATA[1:]
    case.serve(wrong)
    words = case.refused(DigestMismatch)
    assert SHA in words
    assert hashlib.sha256(wrong).hexdigest() in words
    assert case.left() == []


def test_without_a_digest_the_bytes_are_the_callers_to_judge(case: Case) -> None:
    case.serve()
    assert case.fetch(sha256=None, size_bytes=None).read_bytes() == DATA
    assert case.told[-1] == (len(DATA), len(DATA))


def test_an_html_page_in_place_of_the_file_is_named_as_such(case: Case) -> None:
    case.serve(HTML, content_type="text/html")
    assert f"answered 200 with an HTML page of {len(HTML)} bytes" in case.refused()
    assert len(case.server.requests) == 1


@pytest.mark.parametrize("faults", [{"no_length": True}, {"no_length": True, "content_type": "text/html"}])
def test_an_html_page_of_unknown_length_is_named_as_such(case: Case, faults: dict[str, Any]) -> None:
    case.serve(HTML, **faults)
    assert f"HTML page of {len(HTML)} bytes" in case.refused()
    assert case.left() == []


def test_an_html_page_of_unannounced_size_is_named_with_the_digests(case: Case) -> None:
    case.serve(HTML)
    assert "look like an HTML page" in case.refused(DigestMismatch, size_bytes=None)


def test_another_size_than_announced_is_refused_before_its_bytes(case: Case) -> None:
    case.serve(DATA + b"more")
    assert f"a file of {len(DATA) + 4} bytes where a file of {len(DATA)} bytes was announced" in case.refused()
    assert case.left() == []


def test_an_endless_file_is_cut_at_its_announced_size(case: Case) -> None:
    case.serve(endless=True)
    assert f"more than the announced {len(DATA)} bytes" in case.refused()
    assert case.left() == []


def test_an_endless_file_of_unknown_size_is_cut_too(case: Case) -> None:
    case.serve(endless=True)
    limits = FetchLimits(unknown_bytes=500_000)
    assert "more than the announced 500000 bytes" in case.refused(size_bytes=None, sha256=None, limits=limits)


def test_a_dawdling_server_is_given_up_in_words(case: Case) -> None:
    case.serve(drip=(10, 0.02))
    limits = FetchLimits(min_rate=1_000_000, window_s=0.2, retry=RetryPolicy(attempts=2, base_s=0.01))
    begun = time.monotonic()
    assert "too slowly" in case.refused(limits=limits)
    assert time.monotonic() - begun < 5
    assert case.ranges[0] is None
    assert case.ranges[1] is not None


def test_a_silent_server_is_given_up_in_words(case: Case) -> None:
    case.serve(silent=True)
    limits = FetchLimits(silence_s=0.1, retry=RetryPolicy(attempts=2, base_s=0.01))
    assert "timed out" in case.refused(limits=limits)


def test_a_body_without_length_that_ends_early_is_gone_on_with(case: Case) -> None:
    case.serve(no_length=True, cuts=[1000])
    case.fetch()
    assert case.ranges == [None, "bytes=1000-"]


def test_a_busy_server_is_asked_again(case: Case) -> None:
    case.serve(statuses=[503, 500])
    case.fetch()
    assert len(case.server.requests) == 3


def test_retry_after_is_honoured(case: Case) -> None:
    case.serve(statuses=[503], retry_after="1")
    begun = time.monotonic()
    case.fetch()
    assert time.monotonic() - begun >= 1


def test_a_retry_after_beyond_the_bound_is_told_and_not_waited_for(case: Case) -> None:
    case.serve(statuses=[429], retry_after="3600")
    with pytest.raises(FetchError, match="answered 429 and asks to come back in 1h") as caught:
        case.fetch()
    assert caught.value.retry_after_s == 3600
    assert len(case.server.requests) == 1


@pytest.mark.parametrize(("status", "word"), [(404, "not there"), (403, "not allowed"), (410, "410")])
def test_a_plain_no_is_not_asked_again(case: Case, status: int, word: str) -> None:
    case.serve(statuses=[status])
    assert word in case.refused()
    assert len(case.server.requests) == 1


def test_an_unreachable_server_is_told_with_its_cause(case: Case) -> None:
    assert "refused the connection" in case.refused(url="http://127.0.0.1:1/file")


def test_stopping_wakes_a_waiting_fetch_and_keeps_its_bytes(case: Case) -> None:
    case.serve(hold=threading.Event())
    stop = threading.Event()
    timer = threading.Timer(0.3, stop.set)
    timer.start()
    begun = time.monotonic()
    case.refused(FetchStopped, stop=stop)
    timer.join()
    assert time.monotonic() - begun < 5
    assert (case.folder / "file.partial").stat().st_size == len(DATA) // 2
    case.server.files["/file"].hold = None
    case.fetch(stop=threading.Event())
    assert case.ranges[-1] == f"bytes={len(DATA) // 2}-"


def test_stopping_ends_the_pause_between_attempts(case: Case) -> None:
    case.serve(statuses=[503, 503, 503])
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    case.refused(FetchStopped, stop=stop, limits=FetchLimits(retry=RetryPolicy(base_s=20)))


def test_a_disk_that_is_full_is_told_and_cleared(case: Case) -> None:
    case.serve()
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old[1]))
    try:
        with pytest.raises(FetchError) as caught:
            case.fetch()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, ignored)
    assert "cannot write" in caught.value.words()
    assert "free some space" in caught.value.hint
    assert case.left() == []


def test_a_directory_that_is_not_there_is_told(case: Case) -> None:
    case.serve()
    case.dest = case.folder / "none" / "file"
    assert "no such file or directory" in case.refused()


def test_a_link_in_place_of_the_partial_file_is_not_followed(case: Case) -> None:
    case.serve()
    victim = case.folder / "victim"
    victim.write_bytes(b"mine")
    (case.folder / "file.partial").symlink_to(victim)
    case.refused()
    assert victim.read_bytes() == b"mine"


class TestRedirects:
    @pytest.fixture
    def other(self) -> Iterator[FileServer]:
        with FileServer("localhost") as running:
            yield running

    def test_an_allowed_host_is_followed_without_the_credentials(self, case: Case, other: FileServer) -> None:
        other.put("/signed", DATA)
        case.serve(redirect=other.url_of("/signed?sig=hush"))
        case.fetch(allowed_hosts=LOOPBACK_HOSTS, credentials={"Authorization": "Bearer hush"})
        assert case.server.requests[0].headers["authorization"] == "Bearer hush"
        assert "authorization" not in other.requests[0].headers

    def test_a_redirect_on_the_same_origin_keeps_the_credentials(self, case: Case) -> None:
        case.serve(redirect="/moved")
        case.server.put("/moved", DATA)
        case.fetch(credentials={"Authorization": "Bearer hush"})
        assert case.server.requests[1].headers["authorization"] == "Bearer hush"

    def test_a_resume_asks_the_first_address_again(self, case: Case, other: FileServer) -> None:
        other.put("/signed", DATA, cuts=[1000])
        case.serve(redirect=other.url_of("/signed?sig=1"))
        case.fetch(allowed_hosts=LOOPBACK_HOSTS)
        assert [asked.headers.get("range") for asked in other.requests] == [None, "bytes=1000-"]
        assert len(case.server.requests) == 2

    def test_another_host_is_refused_and_named(self, case: Case, other: FileServer) -> None:
        case.serve(redirect=other.url_of("/signed?sig=hush"))
        words = case.refused()
        assert "redirects to `localhost`, which is not one of the hosts" in words
        assert "hush" not in words
        assert other.requests == []

    def test_more_than_three_are_refused(self, case: Case) -> None:
        case.serve(redirect="/file")
        assert "more than 3 times" in case.refused()
        assert len(case.server.requests) == 4

    @pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/x", "gopher://x"])
    def test_another_scheme_is_refused(self, case: Case, target: str) -> None:
        case.serve(redirect=target)
        assert "is not a scheme to fetch from" in case.refused()

    def test_nonsense_is_refused(self, case: Case) -> None:
        case.serve(redirect="http://[::1")
        assert "not an address" in case.refused()

    def test_plain_http_is_refused_where_it_is_not_allowed(self, case: Case) -> None:
        case.serve()
        assert "plain http is not allowed" in case.refused(allow_http=False)
        assert case.server.requests == []

    def test_https_never_leads_to_plain_http(self, case: Case, tmp_path: Path) -> None:
        ca = trustme.CA()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        ca.issue_cert("localhost").configure_cert(context)
        ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        case.serve()
        with FileServer("localhost", context) as safe, Http(ca_file=str(tmp_path / "ca.pem")) as http:
            case.http = http
            safe.put("/good", DATA)
            safe.put("/bad", redirect=case.server.url_of("/file"))
            words = case.refused(url=safe.url_of("/bad"), allowed_hosts=LOOPBACK_HOSTS, allow_http=True)
            assert "redirects to plain http" in words
            assert case.fetch(url=safe.url_of("/good"), allow_http=False).read_bytes() == DATA
        assert case.server.requests == []


@pytest.mark.parametrize(
    ("url", "entry", "yes"),
    [
        ("https://a.test/x", "a.test", True),
        ("https://A.test/x", "a.test", True),
        ("https://a.test:444/x", "a.test", False),
        ("https://a.test:444/x", "a.test:444", True),
        ("https://a.test:444/x", "a.test:*", True),
        ("https://cdn.a.test/x", ".a.test", True),
        ("https://a.test/x", ".a.test", False),
        ("https://evila.test/x", ".a.test", False),
        ("https://a.test.evil/x", ".a.test", False),
        ("http://[::1]:80/x", "[::1]:*", True),
        ("https://a.test@evil/x", "a.test", False),
    ],
)
def test_hosts_are_matched_whole(url: str, entry: str, yes: bool) -> None:
    assert host_allowed(url, {entry}) is yes


class TestLocalFiles:
    def test_a_file_is_copied_with_the_same_checks(self, case: Case) -> None:
        source = case.folder / "a source"
        source.write_bytes(DATA)
        case.fetch(url=source.as_uri())
        assert case.dest.read_bytes() == DATA
        assert case.told[-1] == (len(DATA), len(DATA))

    def test_wrong_bytes_are_refused(self, case: Case) -> None:
        (case.folder / "source").write_bytes(bytes(len(DATA)))
        case.refused(DigestMismatch, url=(case.folder / "source").as_uri())

    @pytest.mark.parametrize(("size", "word"), [(10, "ended after 10 of"), (300_001, "more than the announced")])
    def test_a_wrong_size_is_refused(self, case: Case, size: int, word: str) -> None:
        (case.folder / "source").write_bytes(bytes(size))
        assert word in case.refused(url=(case.folder / "source").as_uri())

    def test_what_is_not_there_or_not_a_file_is_refused(self, case: Case) -> None:
        assert "no such file" in case.refused(url=(case.folder / "none").as_uri())
        assert "not a regular file" in case.refused(url=case.folder.as_uri())
        os.mkfifo(case.folder / "pipe")
        assert "not a regular file" in case.refused(url=(case.folder / "pipe").as_uri())
        assert "not a local file" in case.refused(url="file://elsewhere/x")


def test_cache_names_are_safe_and_begin_with_the_digest() -> None:
    assert cache_name("AB" * 32, "llama-b1.tar.gz") == "abababababababab-llama-b1.tar.gz"
    assert cache_name("ab" * 32, "../../etc/passwd") == "abababababababab-_.._etc_passwd"
    assert "/" not in cache_name("ab" * 32, "a/b\0c\n")
    assert len(cache_name("ab" * 32, "x" * 1000)) < 150
    assert cache_name("ab" * 32, "...") == "abababababababab-file"


def test_retry_after_is_read_as_number_or_date() -> None:
    assert retry_after({"retry-after": "120"}) == 120
    assert retry_after({"retry-after": "Thu, 01 Jan 1970 00:02:00 GMT"}, now=100) == 20
    assert retry_after({"retry-after": "Thu, 01 Jan 1970 00:00:00 GMT"}, now=100) == 0
    assert retry_after({"retry-after": "soon"}) is None
    assert retry_after({}) is None


def test_pauses_grow_with_jitter_and_end() -> None:
    policy = RetryPolicy(attempts=4, base_s=1, most_s=3)
    assert 0.5 <= (policy.pause(1, None) or 0) <= 1
    assert 1 <= (policy.pause(2, None) or 0) <= 2
    assert 1.5 <= (policy.pause(3, None) or 0) <= 3
    assert policy.pause(4, None) is None
    assert policy.pause(1, 100) is None
    assert 2 <= (policy.pause(1, 2) or 0) <= 3
