"""After a restart of the agent: which engines are still there, which are gone, and who is a stranger.

An engine is taken over only when boot, pid, start time, program and marker are those of its handle; the health watch
then proves the socket and the key before it counts as ready. A stranger on a recorded pid is never signalled.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from attrs import evolve, frozen

from llmgw.agent import handles, procs
from llmgw.agent.child import Child, Ended, Identity, hold
from llmgw.agent.handles import Handle
from llmgw.agent.keeper import EXIT_FILE, await_exit, keeper_of
from llmgw.agent.starting import save
from llmgw.errors import WireError

_KEEPER_WRITES_S = 1.0
_LOG = logging.getLogger("llmgw.agent.adopt")


@frozen
class Survivor:
    """An engine that is still that process."""

    handle: Handle
    child: Child


@frozen
class Gone:
    """An engine that is not there any more. `leftovers` are processes of it (they carry its marker)."""

    handle: Handle
    words: str
    leftovers: tuple[procs.Stat, ...] = ()


@frozen
class Found:
    """What an earlier agent left. `orphans` are markers of processes whose engine is gone without a record."""

    survivors: tuple[Survivor, ...]
    gone: tuple[Gone, ...]
    orphans: tuple[str, ...]


def find(work_dir: Path) -> Found:
    """Look for the engines an earlier agent started from `work_dir`: by their handles, then by their environment.

    A broken handle is put aside; the engine it was for is then found by its environment.
    """
    survivors: list[Survivor] = []
    gone: list[Gone] = []
    orphans: list[str] = []
    known: set[str] = set()
    for handle in _recorded(work_dir):
        known.add(handle.marker)
        child = hold(handle.identity(), handle.keeper())
        if child is not None:
            survivors.append(Survivor(handle, child))
        else:
            gone.append(Gone(handle, _why(handle), tuple(procs.find_marked(handle.marker))))
    for handle in _unrecorded(work_dir, known):
        child = hold(handle.identity(), handle.keeper()) if handle.pid else None
        if child is None:
            orphans.append(handle.marker)
        else:
            _LOG.info("found `%s` by its environment (pid %d)", handle.replica_id, handle.pid)
            save(handle)
            survivors.append(Survivor(handle, child))
    return Found(tuple(survivors), tuple(gone), tuple(orphans))


def _recorded(work_dir: Path) -> Iterator[Handle]:
    try:
        places = sorted(each for each in (work_dir / "replicas").iterdir() if each.is_dir())
    except OSError:
        return
    for where in places:
        try:
            handle = handles.load(where)
        except WireError as error:
            aside = handles.quarantine(where)
            _LOG.warning("%s; put aside as `%s`, looking for the engine itself", error.words(), aside)
            continue
        if handle is not None:
            yield handle


def _unrecorded(work_dir: Path, known: set[str]) -> Iterator[Handle]:
    """Handles read from the environment of processes whose marker no file mentions; without pid: no engine is left."""
    root = (work_dir / "replicas").resolve()
    oldest: dict[str, tuple[procs.Stat, Handle]] = {}
    for pid in procs.all_pids():
        environ = procs.read_environ(pid)
        marker = (environ or {}).get(procs.MARKER)
        if environ is None or marker is None or marker in known:
            continue
        handle = handles.from_environ(environ, procs.HANDLE)
        # another agent on this machine has a work directory of its own: its engines are none of ours
        if handle is None or handle.marker != marker or Path(handle.dir).parent.resolve() != root:
            continue
        stat = procs.read_stat(pid)
        if stat is None or stat.ended:
            continue
        # the engine is the oldest process of its marker
        if marker not in oldest or (stat.start_ticks, pid) < (oldest[marker][0].start_ticks, oldest[marker][0].pid):
            oldest[marker] = (stat, handle)
    for marker, (stat, handle) in oldest.items():
        if stat.session != stat.pid:
            yield handle
            continue
        exe = procs.read_exe(stat.pid) or ""
        here = work_dir / "replicas" / Path(handle.dir).name
        yield evolve(handle, dir=str(here)).with_identity(
            Identity(procs.boot_id(), stat.pid, stat.start_ticks, exe, marker),
            keeper_of(stat.pid, marker, here / EXIT_FILE),
        )


def _exit_words(handle: Handle) -> str:
    """How its keeper saw it end."""
    keeper = handle.keeper()
    code = await_exit(keeper, handle.marker, _KEEPER_WRITES_S) if keeper is not None else None
    return Ended(code, "no keeper saw it").words()


def _why(handle: Handle) -> str:
    """Why the recorded process is not there."""
    if handle.boot_id != procs.boot_id():
        return "it ended when this node restarted"
    words = f"it ended while the agent was away ({_exit_words(handle)})"
    stat = procs.read_stat(handle.pid)
    if stat is None or stat.ended:
        return words
    return f"{words}; its pid {handle.pid} now belongs to another process, which is left alone"
