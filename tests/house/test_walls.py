"""The walls stand where docs/architecture.md says: import contracts, thin files, apps that load only what they need."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_import_contracts_hold():
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


def test_no_file_is_two_rooms():
    sizes = {p: len(p.read_text().splitlines()) for p in (ROOT / "src").rglob("*.py")}
    assert {p.name: n for p, n in sizes.items() if n > 400} == {}


@pytest.mark.parametrize(
    "argv", [["ctl", "nodes", "--server", "http://127.0.0.1:9"], ["ctl", "--help"], ["--help"], ["--version"]]
)
def test_looking_loads_no_server_agent_or_gateway_module(argv):
    program = f"""
import sys
from llmgw.cli import main
sys.argv = ["llmgw", *{argv!r}]
try:
    main()
except SystemExit:
    pass
heavy = tuple("llmgw." + room for room in ("server", "agent", "gateway", "install", "probe"))
print(*[m for m in sys.modules if m.startswith(heavy)])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ""


def test_the_shipped_tiny_model_is_what_the_script_writes(tmp_path):
    out = tmp_path / "tiny.gguf"
    subprocess.run([sys.executable, ROOT / "scripts" / "make_tiny_gguf.py", out], check=True)
    assert out.read_bytes() == (ROOT / "src/llmgw/install/tiny.gguf").read_bytes()
