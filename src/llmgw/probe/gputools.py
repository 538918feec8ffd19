"""The one door to programs that talk to the NVIDIA driver: one at a time, and none while an earlier one is stuck.

Such a program can sit in uninterruptible sleep for ever when a GPU hangs. Every further one would hang as well, so it
is left alone, and said, until it has gone.
"""

from __future__ import annotations

import threading

from llmgw.errors import CommandError
from llmgw.probe.tree import Tree
from llmgw.system.commands import Completed, Runner

STUCK = "gpu-tool-stuck"


class GpuTools:
    """Runs `nvidia-smi` and the NVML child. Safe to call from several threads; callers wait for one another."""

    def __init__(self, tree: Tree, runner: Runner) -> None:
        self._tree = tree
        self._runner = runner
        self._turn = threading.Lock()
        self._stuck: tuple[str, int | None, str | None] | None = None

    def run(self, argv: list[str], timeout_s: float) -> Completed:
        """Run `argv` to its end.

        Raises:
            CommandError: it could not be started; code `gpu-tool-stuck` when it, or an earlier one, cannot be ended.
        """
        with self._turn:
            self._refuse_while_stuck()
            done = self._runner.run(argv, timeout_s=timeout_s)
            if done.code is None:
                self._stuck = (argv[0].rsplit("/", 1)[-1], done.pid, self._start_time(done.pid))
                self._refuse_while_stuck()
            return done

    def _refuse_while_stuck(self) -> None:
        if self._stuck is None:
            return
        program, pid, started = self._stuck
        if pid is not None and (started is None or self._start_time(pid) != started):
            self._stuck = None
            return
        which = f"`{program}` (pid {pid})" if pid is not None else f"`{program}`"
        raise CommandError(
            f"{which} hangs in the NVIDIA driver and cannot be killed, no other is started meanwhile",
            hint="a GPU or its driver hangs: look for `Xid` in `dmesg`, then reboot this node",
            code=STUCK,
        )

    def _start_time(self, pid: int | None) -> str | None:
        """Field 22 of /proc/PID/stat (proc(5)), None when the process has ended, a zombie included."""
        if pid is None:
            return None
        stat = self._tree.text(f"/proc/{pid}/stat") or ""
        fields = stat.rpartition(")")[2].split()
        if len(fields) < 20 or fields[0] in ("Z", "X"):
            return None
        return fields[19]
