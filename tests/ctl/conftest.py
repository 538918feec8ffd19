"""The admin API of a small cluster, and `ctl` run against it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from ctl_server import NOW, TOKEN, AdminServer, serving

from llmgw.ctl import app
from llmgw.ctl.session import Session
from llmgw.system.clock import RealClock


class FixedClock(RealClock):
    """Real, but it is always the same time of day."""

    def now(self) -> float:
        return NOW


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, and none of the caller's settings."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("LLMGW_SERVER", "LLMGW_TOKEN_FILE", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "COLUMNS", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "admin.token"
    path.write_text(TOKEN + "\n")
    return path


@pytest.fixture
def admin() -> Iterator[AdminServer]:
    made = AdminServer()
    with serving(lambda *asked: made.answer(*asked)) as url:
        made.url = url
        yield made


@pytest.fixture
def ctl(admin: AdminServer, token_file: Path) -> Callable[..., Result]:
    """Run `llmgw ctl` in this process; `columns` is the terminal's width."""

    def run(*args: str, columns: int | None = None, stdin: str | None = None) -> Result:
        session = Session(FixedClock(), app._dial)
        env = {"LLMGW_SERVER": admin.url, "LLMGW_TOKEN_FILE": str(token_file)}
        if columns is not None:
            env["COLUMNS"] = str(columns)
        result = CliRunner(env=env).invoke(app.command, list(args), obj=session, input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run
