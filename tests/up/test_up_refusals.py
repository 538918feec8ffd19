"""`llmgw up` says at once what could only fail later, before anything is started or kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from llmgw.errors import UsageError
from llmgw.up.choice import check_model
from llmgw.up.parts import Parts


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--model", "hf:foo"), "`hf:foo` is not `hf:ORG/REPO@REVISION:FILE`"),
        (("--model", "no-such.gguf"), "there is no file `{cwd}/no-such.gguf`"),
        (("--listen", "8080"), "`8080` is not `HOST:PORT`"),
        (("--listen", "127.0.0.1:0"), "does not listen on `127.0.0.1:0`"),
        (("--listen", "0.0.0.0:8080"), "it serves this machine alone, without keys and TLS"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    state = tmp_path / "state"
    argv = [sys.executable, "-m", "llmgw", "up", "--once", "--state-dir", str(state), *options]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 2
    assert words.format(cwd=tmp_path.resolve()) in done.stderr
    assert "\nhint: " in done.stderr
    assert not state.exists()


def test_models_that_can_be_there_pass(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    check_model(str(tmp_path / "m.gguf"))
    check_model("hf:org/repo@main:file.gguf")
    check_model(f"https://host/m.gguf#sha256={'a' * 64}")
    with pytest.raises(UsageError):
        check_model(str(tmp_path / "n.gguf"))


def test_a_problem_of_a_file_is_told_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text(
        f"error: `{tmp_path}/server.yaml` has a problem\n{tmp_path}/server.yaml:3: http.listen: is wrong\n"
    )
    assert (
        Parts(tmp_path, "127.0.0.1:1").its_error("server").cause == f"{tmp_path}/server.yaml:3: http.listen: is wrong"
    )
