"""Bundles: what is exported, and what a bundle made by anybody may not do."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from llmgw.ctl import bundle
from llmgw.errors import UsageError

DATA = b"archive" * 1000
SHA = hashlib.sha256(DATA).hexdigest()


def make(path: Path, sums: str, members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as out:
        out.writestr(bundle.SUMS, sums)
        for name, data in members.items():
            out.writestr(name, data)
    return path


class Server:
    """Takes uploads as the admin API does, and remembers them."""

    def __init__(self, have: int = 0, lies: int | None = None) -> None:
        self.got, self.have, self.lies = bytearray(DATA[:have]), have, lies
        self.posted: list[Any] = []

    def put_bytes(self, *path: str, query: str, body: bytes) -> dict[str, Any]:
        assert path == ("uploads", SHA, "a.tar.gz")
        offset = int(query.rpartition("=")[2])
        if offset == len(self.got):
            self.got += body
        return {"have": self.lies if self.lies is not None and body else len(self.got)}

    def post(self, *path: str, body: Any) -> dict[str, Any]:
        self.posted.append(body)
        return {"changed": True}


def test_a_bundle_is_uploaded_from_where_the_server_is(tmp_path: Path) -> None:
    path = make(tmp_path / "b.zip", f"{SHA}  llama.cpp/b1/a.tar.gz\n", {"llama.cpp/b1/a.tar.gz": DATA}, 8)
    [release] = bundle.read([path], None, None)
    assert (release.engine, release.version) == ("llama.cpp", "b1")
    server, said = Server(have=3000), []
    assert bundle.upload(release, server, said.append)  # type: ignore[arg-type]
    assert bytes(server.got) == DATA
    listed = [{"name": "a.tar.gz", "size_bytes": len(DATA), "sha256": SHA}]
    assert server.posted == [{"engine": "llama.cpp", "version": "b1", "assets": listed}]
    assert said == ["a.tar.gz (7.0 kB) is there"]


def test_a_plain_archive_needs_its_engine_and_version(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    path.write_bytes(DATA)
    with pytest.raises(UsageError) as caught:
        bundle.read([path], None, None)
    assert "--engine NAME --version VERSION" in caught.value.hint
    [release] = bundle.read([path], "llama.cpp", "b7")
    assert release.files[0].sha256 == SHA
    server = Server()
    bundle.upload(release, server, lambda _: None)  # type: ignore[arg-type]
    assert bytes(server.got) == DATA


@pytest.mark.parametrize(
    ("sums", "words"),
    [
        (f"{SHA}  ../../etc/x\n", "no good name"),
        (f"{SHA}  llama.cpp/b1/../x\n", "no good name"),
        (f"{SHA}  /llama.cpp/b1/a.tar.gz\n", "no good name"),
        ("abc  llama.cpp/b1/a.tar.gz\n", "cannot be read"),
        (f"{SHA}  llama.cpp/b1/missing.tar.gz\n", "is not whole"),
        (f"{SHA}  llama.cpp/b1/a.tar.gz\n{'0' * 64}  llama.cpp/b1/a.tar.gz\n", "given twice"),
    ],
)
def test_hostile_bundles_are_refused_in_words(tmp_path: Path, sums: str, words: str) -> None:
    names = [line.partition("  ")[2] for line in sums.splitlines() if "missing" not in line]
    path = make(tmp_path / "b.zip", sums, dict.fromkeys(names, DATA))
    with pytest.raises(UsageError) as caught:
        bundle.read([path], None, None)
    assert words in caught.value.words()


def test_two_who_upload_one_file_are_told(tmp_path: Path) -> None:
    path = make(tmp_path / "b.zip", f"{SHA}  llama.cpp/b1/a.tar.gz\n", {"llama.cpp/b1/a.tar.gz": DATA})
    with pytest.raises(UsageError, match="by somebody else too"):
        bundle.upload(bundle.read([path], None, None)[0], Server(lies=5), lambda _: None)  # type: ignore[arg-type]


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not there"):
        bundle.read([tmp_path / "none"], None, None)


LISTED = [
    {
        "engine": "llama.cpp",
        "version": "b1",
        "assets": [
            {"name": "x64.tar.gz", "sha256": SHA, "kept": True},
            {"name": "arm64.tar.gz", "sha256": "a" * 64, "kept": False},
            {"name": "nodigest.tar.gz", "sha256": None, "kept": False},
        ],
    }
]


def test_what_the_server_keeps_is_exported_and_globs_name_more() -> None:
    assert [each.name for each in bundle.choose(LISTED, None, None, ())] == ["x64.tar.gz"]
    assert [each.name for each in bundle.choose(LISTED, "llama.cpp", "b1", ("*.tar.gz",))] == [
        "x64.tar.gz",
        "arm64.tar.gz",
    ]


def test_nothing_to_export_is_told_with_what_there_is() -> None:
    with pytest.raises(UsageError) as caught:
        bundle.choose(LISTED, None, None, ("*.zip",))
    assert "it knows llama.cpp b1" in caught.value.words()
    with pytest.raises(UsageError) as caught:
        bundle.choose([], None, None, ())
    assert "`server` must be among its `sources`" in caught.value.words()
