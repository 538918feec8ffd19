"""Engine logs: the telling line out of what engines really print, a safe tail, rotation under a writer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmgw.agent import logs

MISSING = """\
0.00.001.518 I srv  llama_server: initializing ...
0.00.008.848 W srv  llama_server: security: no API key is set and CORS allows all origins
0.00.010.626 I srv    load_model: loading model '/nope/x.gguf'
0.00.010.930 E gguf_init_from_file: failed to open GGUF file '/nope/x.gguf' (No such file or directory)
0.00.011.041 E llama_model_load: error loading model: llama_model_loader: failed to load model from /nope/x.gguf
0.00.011.059 E llama_model_load_from_file_impl: failed to load model
0.00.011.095 E common_fit_params: encountered an error while trying to fit params to free device memory: failed to load model
0.00.011.117 E gguf_init_from_file: failed to open GGUF file '/nope/x.gguf' (No such file or directory)
0.00.011.134 E cmn  common_init_: failed to load model '/nope/x.gguf'
0.00.011.138 E srv    load_model: failed to load model, '/nope/x.gguf'
0.00.011.141 I srv    operator(): operator(): cleaning up before exit...
0.00.011.625 E srv  llama_server: exiting due to model loading error
"""  # noqa: E501
CUT = """\
0.00.009.748 I srv    load_model: loading model '/tmp/cut.gguf'
0.00.010.284 E llama_model_load: error loading model: tensor 'blk.0.ffn_gate.weight' data is not within the file bounds, model is corrupted or incomplete
0.00.010.322 E llama_model_load_from_file_impl: failed to load model
0.00.010.618 E cmn  common_init_: failed to load model '/tmp/cut.gguf'
0.00.011.221 E srv  llama_server: exiting due to model loading error
"""  # noqa: E501
PORT = """\
0.00.007.971 E srv         start: couldn't bind HTTP server socket, hostname: 10.99.99.1, port: 21888
0.00.007.987 I srv    operator(): operator(): cleaning up before exit...
0.00.008.094 E srv  llama_server: exiting due to HTTP server error
"""
TRACEBACK = """\
INFO 09-30 12:00:00 [api_server.py:1] starting
Traceback (most recent call last):
  File "x.py", line 1, in <module>
    raise ValueError("Free memory on device is less than desired GPU memory utilization")
ValueError: Free memory on device is less than desired GPU memory utilization
"""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (MISSING, "gguf_init_from_file: failed to open GGUF file '/nope/x.gguf' (No such file or directory)"),
        (
            CUT,
            "llama_model_load: error loading model: tensor 'blk.0.ffn_gate.weight' data is not within the file bounds, "
            "model is corrupted or incomplete",
        ),
        (PORT, "srv         start: couldn't bind HTTP server socket, hostname: 10.99.99.1, port: 21888"),
        (TRACEBACK, "ValueError: Free memory on device is less than desired GPU memory utilization"),
        ("error: invalid argument: --nonsense\n", "error: invalid argument: --nonsense"),
        (
            "llama-server: error while loading shared libraries: libgomp.so.1: cannot open shared object file\n",
            "llama-server: error while loading shared libraries: libgomp.so.1: cannot open shared object file",
        ),
        ("0.01 I one\nterminate called after x\n  what():  std::bad_alloc\n", "what():  std::bad_alloc"),
        ("exiting due to model loading error\n", "exiting due to model loading error"),
        ("hello\nlast words\n", "last words"),
        ("", ""),
    ],
)  # fmt: skip
def test_the_telling_line_is_the_cause_not_its_consequence(text: str, told: str) -> None:
    assert logs.telling(text.splitlines()) == told


def test_an_engine_that_was_at_work_said_its_cause_last() -> None:
    lines = [
        "0.01 E srv send_error: request (3015 tokens) exceeds the available context size",
        "1.00 I srv slot released",
        "2.00 E ggml_cuda: device lost, cannot go on",
    ]
    assert logs.telling(lines, was_ready=True) == "ggml_cuda: device lost, cannot go on"
    assert logs.telling(["0.01 I all is well"], was_ready=True) == ""


def test_a_tail_is_safe_to_print(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(
        b"first\n\x1b[31mred\x1b[0m \x1b]52;c;ZXZpbA==\x07 \xe2\x80\xae bidi\n"
        b"10%\r50%\r100%\nbad \xff byte\nno\x85split\nunfinished"
    )
    assert logs.tail(path, 5) == [
        "red \ufffd]52;c;ZXZpbA==\ufffd \ufffd bidi",
        "100%",
        "bad \ufffd byte",
        "no\ufffdsplit",
        "unfinished",
    ]
    assert logs.tail(path, 0) == []
    assert logs.tail(tmp_path / "missing", 5) == []


def test_a_tail_of_a_huge_log_reads_its_end_only(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w") as handle:
        for i in range(200_000):
            handle.write(f"line {i}\n")
    assert logs.tail(path, 3) == ["line 199997", "line 199998", "line 199999"]
    whole = logs.tail(path, 10**9)
    assert whole[0].startswith("line ")
    assert len(whole) < 200_000


def test_rotation_keeps_the_end_and_the_writer_goes_on(tmp_path: Path) -> None:
    path = logs.start_new(tmp_path)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        for i in range(100):
            os.write(fd, b"old %03d\n" % i)
        assert logs.rotate(tmp_path, 1 << 20) is False
        assert logs.rotate(tmp_path, 80) is True
        os.write(fd, b"new\n")
    finally:
        os.close(fd)
    assert path.read_text() == "new\n"
    assert (tmp_path / logs.PREVIOUS).read_text().splitlines()[-1] == "old 099"
    assert (tmp_path / logs.PREVIOUS).stat().st_size == 80
    logs.start_new(tmp_path)
    assert (tmp_path / logs.PREVIOUS).read_text() == "new\n"
