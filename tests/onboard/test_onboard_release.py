"""Where a release comes from: a mirror, a directory, GitHub; nothing is taken whose digest is not the published one."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from functools import partial
from pathlib import Path

import pytest

from llmgw.ctl.onboarding.release import Releases
from llmgw.errors import LlmgwError, NotPublished
from llmgw.system.http import Http

NAME = "llmgw-1.2.3-linux-aarch64.pyz"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def site(tmp_path):
    """A web server on loopback: a mirror, and what GitHub's API answers for one release."""
    root = tmp_path / "site"
    (root / "mirror").mkdir(parents=True)
    (root / "mirror" / NAME).write_bytes(b"the program")
    sums = f"{hashlib.sha256(b'the program').hexdigest()}  {NAME}\n".encode()
    (root / "mirror" / "SHA256SUMS").write_bytes(sums)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(root)))
    url = f"http://127.0.0.1:{server.server_address[1]}"
    release = root / "repos" / "me" / "llmgw" / "releases" / "tags"
    release.mkdir(parents=True)
    assets = [
        {
            "name": name,
            "state": "uploaded",
            "size": len(data),
            "digest": f"sha256:{hashlib.sha256(data).hexdigest()}",
            "browser_download_url": f"{url}/mirror/{name}",
        }
        for name, data in ((NAME, b"the program"), ("SHA256SUMS", sums))
    ]
    (release / "v1.2.3").write_text(json.dumps({"assets": assets}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield root, url
    server.shutdown()
    server.server_close()
    thread.join(5)


@pytest.fixture
def http_client():
    with Http() as made:
        yield made


def find(source: str, http_client: Http, tmp_path: Path, version: str = "1.2.3"):
    return Releases(source, version, tmp_path / "cache", http_client).get("aarch64")


def test_from_a_mirror_and_from_a_directory(site, http_client, tmp_path):
    root, url = site
    for source in (f"{url}/mirror/", str(root / "mirror"), (root / "mirror").as_uri()):
        found = find(source, http_client, tmp_path)
        assert found.name == NAME
        assert found.path.read_bytes() == b"the program"


def test_from_github_and_its_sums_must_agree(site, http_client, tmp_path, monkeypatch):
    root, url = site
    monkeypatch.setenv("LLMGW_GITHUB_API", url)
    assert find("github:me/llmgw", http_client, tmp_path).sha256 == hashlib.sha256(b"the program").hexdigest()

    # whoever replaces the file and its entry in the listing has not replaced the sums that were published
    (root / "mirror" / NAME).write_bytes(b"another one")
    listing = root / "repos/me/llmgw/releases/tags/v1.2.3"
    said = json.loads(listing.read_text())
    said["assets"][0]["digest"] = f"sha256:{hashlib.sha256(b'another one').hexdigest()}"
    listing.write_text(json.dumps(said))
    with pytest.raises(LlmgwError, match="SHA256SUMS"):
        find("github:me/llmgw", http_client, tmp_path)


def test_other_bytes_than_published_are_refused(site, http_client, tmp_path):
    root, url = site
    (root / "mirror" / NAME).write_bytes(b"the programm")
    with pytest.raises(LlmgwError, match="sha256"):
        find(f"{url}/mirror/", http_client, tmp_path)


def test_a_version_that_is_not_published(site, http_client, tmp_path):
    with pytest.raises(NotPublished):
        find(f"{site[1]}/mirror/", http_client, tmp_path, "9.9.9")
