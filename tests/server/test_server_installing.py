"""What `llmgw server install-service` sees before anything is installed, and how it reads a service's last words."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.errors import UsageError
from llmgw.server.service import _last_words, refuse_homes


def test_what_lies_in_a_home_directory_is_refused_links_too(tmp_path: Path) -> None:
    refuse_homes([Path("/usr/bin/python3"), Path("/opt/llmgw/bin/python"), tmp_path])
    with pytest.raises(UsageError, match=r"could not reach `/home/me/server\.yaml`") as caught:
        refuse_homes([Path("/home/me/server.yaml")])
    assert caught.value.cause == "home directories are closed to it"
    link = tmp_path / "python"
    link.symlink_to("/root/.pyenv/bin/python")
    with pytest.raises(UsageError) as caught:
        refuse_homes([link])
    assert caught.value.cause.startswith("it is `/root/.pyenv/bin/python`, and home directories are closed")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            ["error: a", "cause: b", "Main process exited", "error: cannot read `x`", "cause: denied"],
            "cannot read `x`; denied",
        ),
        (["error: old", "hint: h", "Stopped."], "old; h"),
        (["Started.", "exited, status=203/EXEC", ""], "exited, status=203/EXEC"),
        ([], "it said nothing"),
    ],
)
def test_the_last_error_is_what_counts(lines: list[str], words: str) -> None:
    assert _last_words(lines) == words
