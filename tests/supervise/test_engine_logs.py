"""Engine logs: the telling line out of what engines really print, a safe tail, rotation under a writer."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from llmgw.agent import logs, rotation

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


def numbers(data: bytes) -> list[int]:
    return [int(line.split()[1]) for line in data.splitlines()]


def write_lines(path: Path, begin: int, end: int) -> None:
    with path.open("ab", 0) as log:
        log.write(b"".join(b"line %07d\n" % i for i in range(begin, end)))


@pytest.mark.parametrize("collapse", [True, False])
def test_rotation_under_a_writer_loses_no_line(tmp_path: Path, collapse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not collapse:  # as on a file system that cannot cut the beginning off; no writer is at work then
        monkeypatch.setattr(rotation, "_collapse", lambda *_: False)
    path = tmp_path / logs.CURRENT
    write_lines(path, 0, 100_000)
    writer = threading.Thread(target=write_lines, args=(path, 100_000, 100_500))
    if collapse:
        writer.start()
    assert rotation.rotate(path, 1 << 20) is True
    if not collapse:
        writer.start()
    writer.join()
    kept = (tmp_path / f"{logs.CURRENT}.rotated").read_bytes()
    assert len(kept) <= (1 << 20) + 4096
    assert path.stat().st_size < 16 << 10
    joined = numbers((kept + path.read_bytes()).partition(b"\n")[2])
    assert joined == list(range(joined[0], 100_500))
    assert rotation.cut_bytes(path) + path.stat().st_size == 100_500 * len(b"line 0000000\n")
    assert logs.tail(path, 2000)[0] == "line 0098500"
    assert rotation.rotate(path, 1 << 20) is False


def test_a_rotated_log_leaves_the_previous_runs_alone(tmp_path: Path) -> None:
    current, previous = tmp_path / logs.CURRENT, tmp_path / logs.PREVIOUS
    current.write_text("first run\n")
    rotation.start_new(current, previous)
    write_lines(current, 0, 10_000)
    assert rotation.rotate(current, 4096)
    assert logs.tail(previous, 10) == ["first run"]
    rotation.start_new(current, previous)
    assert logs.tail(previous, 600)[-1] == "line 0009999"
    assert len(logs.tail(previous, 600)) > 300
    assert logs.tail(current, 10) == []


def test_a_log_is_followed_by_whole_lines_over_rotation_and_restart(tmp_path: Path) -> None:
    current, previous = tmp_path / logs.CURRENT, tmp_path / logs.PREVIOUS
    current.write_text("one\ntwo\nthr")
    piece = logs.tail_with_cursor(current, 10)
    assert piece.lines == ("one", "two")
    assert logs.follow(tmp_path, piece.cursor).lines == ()
    with current.open("a") as log:
        log.write("ee\nfour\n")
    piece = logs.follow(tmp_path, piece.cursor)
    assert piece.lines == ("three", "four")
    write_lines(current, 0, 1000)
    assert rotation.rotate(current, 4096)
    followed = list(piece.lines)
    piece = logs.follow(tmp_path, piece.cursor)
    assert piece.missed_bytes > 0
    assert piece.lines[-1] == "line 0000999"
    with current.open("a") as log:
        log.write("last words, cut off")
    rotation.start_new(current, previous)
    current.write_text("new run\n")
    last = logs.follow(tmp_path, piece.cursor)
    assert (last.lines, last.more, last.new_run) == (("last words, cut off",), True, False)
    new = logs.follow(tmp_path, last.cursor)
    assert (new.lines, new.new_run) == (("new run",), True)
    assert logs.follow(tmp_path, new.cursor).lines == ()
    assert followed == ["three", "four"]


def test_a_long_log_is_followed_in_pieces_without_a_gap(tmp_path: Path) -> None:
    current = tmp_path / logs.CURRENT
    write_lines(current, 0, 1)
    piece = logs.tail_with_cursor(current, 10)
    write_lines(current, 1, 50_000)
    seen: list[str] = list(piece.lines)
    rounds = 0
    while True:
        piece = logs.follow(tmp_path, piece.cursor)
        seen += piece.lines
        rounds += 1
        if not piece.more:
            break
    assert [int(line.split()[1]) for line in seen] == list(range(50_000))
    assert rounds > 3


@pytest.mark.parametrize("cursor", ["", "x", "1", "1.2.3", "-1.5", "9" * 80, "\u0661.1"])
def test_a_cursor_that_is_not_understood_begins_with_this_run(tmp_path: Path, cursor: str) -> None:
    (tmp_path / logs.CURRENT).write_text("one\n")
    piece = logs.follow(tmp_path, cursor)
    assert (piece.lines, piece.new_run) == (("one",), True)
