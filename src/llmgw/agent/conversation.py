"""One connection to one server, from hello to its end."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Protocol, TypeAlias

from attrs import define, evolve, frozen

from llmgw.agent.answerer import Answerer
from llmgw.agent.renew import Renewal
from llmgw.domain.facts import NodeFacts, NodeWarning
from llmgw.domain.report import Desired, NodeReport
from llmgw.errors import LinkError, LlmgwError, WireError
from llmgw.system.clock import Clock
from llmgw.units import format_duration
from llmgw.wire.conn import Conn
from llmgw.wire.link import Link
from llmgw.wire.messages import (
    OPENING_LIMIT,
    PROTOCOL,
    Ack,
    Ask,
    DesiredSet,
    Hello,
    Issued,
    Message,
    Refused,
    Report,
    Welcome,
    encode,
)
from llmgw.wire.tls import TlsSource

log = logging.getLogger(__name__)

_MISSED = 3
_LEAST_PATIENCE_S = 2.0
_APART_S = 0.05
_AT_LEAST_EVERY_S = 0.05


class Signal(Enum):
    """What is put into the session's mailbox besides messages and errors."""

    OPENED = "opened"
    POKE = "poke"
    STOP = "stop"


Mailbox: TypeAlias = "queue.SimpleQueue[tuple[Conn | None, Message | LlmgwError | Signal]]"


class ReportSource(Protocol):
    """Who knows what this node is. Called by the session's thread: must return what is known, at once."""

    def facts(self) -> NodeFacts | None:
        """The facts as known now, None before the first look."""
        ...

    def report(self, seq: int, generation: int | None, epoch: int | None, facts: NodeFacts | None) -> NodeReport:
        """A report with these values and everything else as it is now."""
        ...


@define
class Memory:
    """What outlives a connection: the highest fencing epoch seen, and the desired set last obeyed."""

    highest_epoch: int
    generation: int | None = None
    epoch: int | None = None


@frozen
class Setup:
    """What every connection of a session needs.

    Args:
        hello: this node's hello, with its clock and facts not yet filled in.
        on_desired: told each desired set that is to be obeyed; must return at once.
        tls, renewal: None when no certificate was given.
    """

    hello: Hello
    link: Link
    mail: Mailbox
    clock: Clock
    source: ReportSource
    answerer: Answerer
    memory: Memory
    stopping: threading.Event
    on_desired: Callable[[Desired], None]
    tls: TlsSource | None = None
    renewal: Renewal | None = None


@frozen
class Ended:
    """How a connection ended: was there a welcome, and why is it over."""

    welcomed: bool
    error: LlmgwError


class Conversation:
    """Runs on the session's thread.

    Args:
        setup: see there.
        conn: being dialled.
        on_state: called on welcome and whenever the words change: "" is well, otherwise what is wrong.
    """

    def __init__(self, setup: Setup, conn: Conn, on_state: Callable[[str], None]) -> None:
        self._setup = setup
        self._conn = conn
        self._on_state = on_state
        self._welcomed = False
        self._server_signs = False
        self._interval_s = setup.hello.heartbeat_interval_s
        self._sent_facts: NodeFacts | None = None
        self._seq = 0
        self._unacked: deque[tuple[int, float]] = deque()
        self._poked = False
        self._last_report = 0.0
        self._ended: LlmgwError | None = None
        self._troubles: dict[str, str] = {}

    def run(self) -> Ended:
        """Talk until the connection ends."""
        mail, stopping = self._setup.mail, self._setup.stopping
        while self._ended is None:
            try:
                conn, what = mail.get(timeout=self._until_next())
            except queue.Empty:
                self._beat()
                continue
            if stopping.is_set() or what is Signal.STOP:
                self._end(LinkError("the agent is stopping"))
            elif what is Signal.POKE:
                self._poked = True
            elif conn is self._conn:
                self._take(what)
            if self._ended is None:
                self._beat()
        return Ended(self._welcomed, self._ended)

    def _end(self, error: LlmgwError) -> None:
        self._ended = error
        self._setup.link.close(self._conn, error)

    def _take(self, what: Message | LlmgwError | Signal) -> None:
        if isinstance(what, LlmgwError):
            self._ended = what
        elif isinstance(what, Signal):
            self._say_hello()
        elif isinstance(what, Refused):
            self._end(LinkError("refused by the server", cause=what.words, code=what.code))
        elif isinstance(what, Welcome) and not self._welcomed:
            self._enter(what)
        elif not self._welcomed:
            self._end(WireError("the server's first message is not `welcome`"))
        elif isinstance(what, Ack):
            while self._unacked and self._unacked[0][0] <= what.seq:
                self._unacked.popleft()
        elif isinstance(what, DesiredSet):
            self._obey(what.desired)
        elif isinstance(what, Issued) and self._setup.renewal is not None:
            self._setup.renewal.take(what)
            self._poked = True
        elif isinstance(what, Ask):
            self._setup.answerer.ask(self._conn, what)
        else:
            self._end(WireError(f"the server sent `{type(what).__name__.lower()}`, which is the agent's to say"))

    def _say_hello(self) -> None:
        hello = evolve(self._setup.hello, clock=self._setup.clock.now(), facts=self._setup.source.facts())
        try:
            encode(hello, OPENING_LIMIT)
        except WireError:
            # They do not fit before the welcome: the first report carries them.
            hello = evolve(hello, facts=None)
        self._sent_facts = hello.facts
        self._setup.link.send(self._conn, hello)

    def _enter(self, welcome: Welcome) -> None:
        memory = self._setup.memory
        if abs(welcome.protocol - PROTOCOL) > 1:
            self._end(WireError(f"the server speaks protocol {welcome.protocol}, this agent {PROTOCOL}"))
        elif welcome.epoch < memory.highest_epoch:
            words = f"its epoch is {welcome.epoch}, a newer server has epoch {memory.highest_epoch}"
            self._end(LinkError(f"server `{welcome.server_id[:80]}` is not the leader any more", cause=words))
        else:
            memory.highest_epoch = welcome.epoch
            self._welcomed = True
            self._server_signs = welcome.renews
            self._interval_s = max(_AT_LEAST_EVERY_S, welcome.heartbeat_interval_s)
            self._on_state("")
            self._report()

    def _obey(self, desired: Desired) -> None:
        memory = self._setup.memory
        if desired.epoch < memory.highest_epoch:
            words = f"epoch {desired.epoch} is lower than {memory.highest_epoch}, the highest seen"
            log.warning("a desired set is not obeyed: %s", words)
            self._say("desired", f"a desired set of the server is not obeyed: {words}")
            return
        memory.highest_epoch, memory.epoch, memory.generation = desired.epoch, desired.epoch, desired.generation
        try:
            self._setup.on_desired(desired)
        except Exception:
            log.exception("fault while taking in generation %s", desired.generation)
            self._say(
                "desired", f"generation {desired.generation} of the desired set could not be taken in, see the log"
            )
        else:
            self._say("desired", "")

    def _until_next(self) -> float | None:
        if not self._welcomed:
            return None
        due = self._due()
        if self._unacked:
            due = min(due, self._unacked[0][1] + self._patience_s())
        return max(0.0, due - self._setup.clock.monotonic())

    def _due(self) -> float:
        # A poke waits for the last report's ack: reports never pile up before a slow server.
        soon = self._poked and not self._unacked
        return self._last_report + (min(_APART_S, self._interval_s) if soon else self._interval_s)

    def _patience_s(self) -> float:
        return max(_MISSED * self._interval_s, _LEAST_PATIENCE_S)

    def _beat(self) -> None:
        if not self._welcomed or self._ended is not None:
            return
        now = self._setup.clock.monotonic()
        if self._unacked and now >= self._unacked[0][1] + self._patience_s():
            spent = format_duration(now - self._unacked[0][1])
            self._end(
                LinkError("the server is silent", cause=f"{len(self._unacked)} reports not acknowledged in {spent}")
            )
        elif now >= self._due():
            self._report()

    def _report(self) -> None:
        setup = self._setup
        self._poked = False
        self._last_report = setup.clock.monotonic()
        try:
            facts = setup.source.facts()
            news = facts if facts is not None and _changed(facts, self._sent_facts) else None
            self._tend_certificate()
            report = setup.source.report(self._seq + 1, setup.memory.generation, setup.memory.epoch, news)
            if setup.renewal is not None:
                report = evolve(report, warnings=(*report.warnings, *setup.renewal.warnings()))
            self._send(report)
        except Exception as error:
            log.exception("fault while making a report")
            self._say("report", f"the last report could not be made: {type(error).__name__}: {error}"[:500])
            return
        self._seq += 1
        self._unacked.append((self._seq, self._last_report))
        if news is not None:
            self._sent_facts = news
        self._say("report", "")

    def _tend_certificate(self) -> None:
        setup = self._setup
        if setup.tls is None or setup.renewal is None or not self._conn.secure:
            return
        setup.tls.refresh()
        self._say("tls", setup.tls.trouble)
        request = setup.renewal.due(self._server_signs)
        if request is not None:
            setup.link.send(self._conn, request)

    def _send(self, report: NodeReport) -> None:
        try:
            self._setup.link.send(self._conn, Report(report))
        except WireError as error:
            warning = NodeWarning(
                "report-too-large",
                f"{error.words()}: weights and engine log lines are left out of it",
                self._setup.clock.now(),
            )
            replicas = tuple(evolve(replica, last_log=()) for replica in report.replicas)
            less = evolve(report, weights=(), replicas=replicas, warnings=(*report.warnings, warning))
            self._setup.link.send(self._conn, Report(less))

    def _say(self, about: str, trouble: str) -> None:
        if trouble == self._troubles.get(about, ""):
            return
        self._troubles[about] = trouble
        self._on_state("; ".join(words for words in self._troubles.values() if words))


def _changed(facts: NodeFacts, sent: NodeFacts | None) -> bool:
    return sent is None or facts.revision != sent.revision or (not facts.revision and facts != sent)
