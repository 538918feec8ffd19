"""A relay in front of sshd that counts bytes and cuts a chosen connection at a chosen byte."""

from __future__ import annotations

import contextlib
import socket
import threading


class Cutter:
    """Listens on loopback. `cut(n, there, back)` ends the n-th connection from now on after so many bytes."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.totals: list[list[int]] = []
        self._cut: tuple[int, int | None, int | None] | None = None
        self.cuts = 0
        self._work = [threading.Thread(target=self._serve)]
        self._work[0].start()

    def cut(self, index: int, *, there: int | None = None, back: int | None = None) -> None:
        """Cut connection `index` (from 0) after `there` bytes to the node or `back` bytes from it."""
        self.totals, self._cut = [], (index, there, back)

    def whole(self) -> None:
        """Cut nothing any more."""
        self.totals, self._cut = [], None

    def close(self) -> None:
        """End it; waits for its threads."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._work:
            each.join(10)

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            counted = [0, 0]
            limits: list[int | None] = [None, None]
            if self._cut is not None and self._cut[0] == len(self.totals):
                limits = [self._cut[1], self._cut[2]]
            self.totals.append(counted)
            node = socket.create_connection(("127.0.0.1", self._to))
            for way, (source, target) in enumerate(((client, node), (node, client))):
                self._work.append(threading.Thread(target=self._pump, args=(source, target, way, counted, limits)))
                self._work[-1].start()

    def _pump(self, source: socket.socket, target: socket.socket, way: int, counted: list, limits: list) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                limit = limits[way]
                if limit is not None and counted[way] + len(data) > limit:
                    self.cuts += 1
                    break
                counted[way] += len(data)
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        # the other direction may still hold them: each closes what it reads from
        source.close()
