"""`llmgw agent join`: a node without a certificate proves the server by its CA's fingerprint and gets one.

Nothing secret is said before the proof: the server shows its CA and its certificate first, and the token follows only
when the CA has the fingerprint of the line and issued a certificate for the address of the line.
"""

from __future__ import annotations

import base64
import binascii
import json
import queue
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from attrs import field, frozen

from llmgw.errors import FileError, LinkError, LlmgwError, PkiError, UsageError, WireError

if TYPE_CHECKING:
    from cryptography import x509

    from llmgw.agent.dialling import Server
    from llmgw.system.clock import Clock
    from llmgw.wire.conn import Conn
    from llmgw.wire.messages import Message
    from llmgw.wire.tls import TlsFiles

_PREFIX = "llmgw-join-1."
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_ANSWER_S = 20.0


@frozen
class JoinLine:
    """What `llmgw ctl join-token create` printed. `node` None: any new node."""

    server: str
    ca: str
    token: str = field(repr=False)
    node: str | None = None


def read_line(text: str) -> JoinLine:
    """Take a join line apart.

    Raises:
        UsageError: it is none, or was cut short while copying; the line itself is never quoted.
    """
    text = "".join(text.split())
    refused = UsageError("that is not a join line", hint="copy the whole line `llmgw ctl join-token create` printed")
    if not text.startswith(_PREFIX):
        raise refused
    body = text.removeprefix(_PREFIX)
    try:
        data = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    except (ValueError, binascii.Error, RecursionError):
        raise refused from None
    if not isinstance(data, dict) or not all(isinstance(data.get(key), str) for key in ("server", "ca", "token")):
        raise refused
    node = data.get("node")
    if not _FINGERPRINT.fullmatch(data["ca"]) or not (node is None or isinstance(node, str)):
        raise refused
    return JoinLine(data["server"], data["ca"], data["token"], node)


@click.command("join")
@click.argument("line", required=False)
@click.option("--node", metavar="ID", help="Name of this node; its host name when neither line nor file name one.")
@click.option(
    "--dir", "directory", type=click.Path(path_type=Path, file_okay=False), default=Path("/etc/llmgw"),
    show_default=True, help="Where certificate and key go when agent.yaml does not say.",
)  # fmt: skip
@click.pass_obj
def join_command(config: Path, line: str | None, node: str | None, directory: Path) -> None:
    """Get this node its certificate with the LINE of `llmgw ctl join-token create`; asked for when left out.

    Standard input is better than an argument, which every user of this machine could read for a moment.
    """
    from llmgw.agent.dialling import parse_server
    from llmgw.system.clock import RealClock

    if line is None or line == "-":
        line = click.prompt("join line", hide_input=True, err=True) if sys.stdin.isatty() else sys.stdin.readline()
    read = read_line(str(line))
    server = parse_server(read.server)
    written = _configured(config)
    node_id = _node_id(read, node, written)
    files = _files(written, directory.absolute())
    _check_writable(files)
    ca, key, certificate = enroll(server, read, node_id, RealClock())
    _keep(files, ca, key, certificate)
    click.echo(f"node `{node_id}` joined: `{files.cert}`, key `{files.key}`")
    _configure(config, written, read.server, node_id, files)


def enroll(server: Server, line: JoinLine, node_id: str, clock: Clock) -> tuple[str, bytes, x509.Certificate]:
    """Talk to the server.

    Returns:
        The CA to trust from now on (PEM), the new key (PEM), and the certificate.

    Raises:
        LinkError: no server could be talked to, or it refused; says why.
        TlsError: the server is not the one the line was made for.
        PkiError: what it issued is not what was asked for.
    """
    from llmgw.wire.link import Link

    last: LlmgwError | None = None
    for family, address in server.resolve():
        talk = _Talk()
        link = Link(talk, clock, name="join-link")
        link.start()
        try:
            return talk.run(link, server, (family, address), line, node_id, clock)
        except LlmgwError as error:
            last = error
            # Somebody answered: another address of the same name would hear the same token.
            if talk.answered:
                break
        finally:
            link.stop("joining is over")
    raise last or LinkError(f"`{server.host}` has no address")


class _Talk:
    """The handler of the link, and the conversation on the caller's thread."""

    def __init__(self) -> None:
        self._mail: queue.SimpleQueue[Message | LlmgwError | None] = queue.SimpleQueue()
        self.answered = False

    def opened(self, _: Conn) -> None:
        self._mail.put(None)

    def received(self, _: Conn, message: Message) -> None:
        self._mail.put(message)

    def closed(self, _: Conn, error: LlmgwError) -> None:
        self._mail.put(error)

    def run(
        self, link: Any, server: Server, where: tuple[int, Any], line: JoinLine, node_id: str, clock: Clock
    ) -> tuple[str, bytes, x509.Certificate]:
        import llmgw
        from llmgw.pki.keys import check_answer, key_pem, make_request, new_key
        from llmgw.wire.identity import check_authority
        from llmgw.wire.messages import PROTOCOL, Authority, Enroll, Issued, Join
        from llmgw.wire.tls import join_context

        conn = link.dial(where[0], where[1], server.host, join_context())
        self._next(type(None))
        link.send(conn, Join(PROTOCOL, llmgw.__version__))
        offered: Authority = self._next(Authority)
        assert conn.certificate is not None
        ca = check_authority(conn.certificate, offered.ca, line.ca, clock.now())
        key = new_key()
        link.send(conn, Enroll(line.token, node_id, make_request(key, node_id)))
        issued: Issued = self._next(Issued)
        if issued.error:
            raise PkiError("the server issued no certificate", cause=issued.error)
        return ca, key_pem(key), check_answer(issued.cert, key, node_id)

    def _next(self, kind: type[Any]) -> Any:
        from llmgw.wire.messages import Refused

        try:
            what = self._mail.get(timeout=_ANSWER_S)
        except queue.Empty:
            raise LinkError("cannot join", cause=f"the server did not answer within {_ANSWER_S:g} s") from None
        if isinstance(what, LlmgwError):
            raise what
        self.answered = True
        if isinstance(what, Refused):
            raise LinkError("the server does not let this node join", cause=what.words, code=what.code)
        if not isinstance(what, kind):
            raise WireError(f"the server sent `{type(what).__name__.lower()}`, which is no answer to a joining node")
        return what


def _configured(config: Path) -> Any:
    """The settings of agent.yaml, None when there is no such file."""
    from llmgw.agent import settings

    return settings.load(config) if config.exists() else None


def _node_id(line: JoinLine, said: str | None, written: Any) -> str:
    import socket

    from llmgw.domain.ids import check_node_id

    for other, whose in ((line.node, "the join line"), (written.node_id if written else None, "agent.yaml")):
        if said is not None and other is not None and said != other:
            raise UsageError(f"this node is `{said}` by `--node` and `{other}` by {whose}", hint="they must agree")
    if line.node is not None and written is not None and written.node_id != line.node:
        raise UsageError(
            f"the join line is for node `{line.node}`, agent.yaml says this is node `{written.node_id}`",
            hint="make a line for this node, or correct `node_id`",
        )
    return check_node_id(said or line.node or (written.node_id if written else socket.gethostname()))


def _files(written: Any, directory: Path) -> TlsFiles:
    from llmgw.wire.tls import TlsFiles

    if written is not None and written.tls is not None:
        return TlsFiles(written.tls.ca, written.tls.cert, written.tls.key)
    return TlsFiles(*(str(directory / name) for name in ("ca.pem", "node.pem", "node-key.pem")))


def _check_writable(files: TlsFiles) -> None:
    """A token is spent once: find out before that what it buys can be kept.

    Raises:
        FileError: it cannot.
        UsageError: one file for all is not supported here.
    """
    from llmgw.system.files import make_dir, write_atomic

    if files.cert in (files.ca, files.key):
        raise UsageError("agent.yaml names one file for certificate and key", hint="name three files under `tls`")
    for path in (files.ca, files.cert, files.key):
        probe = make_dir(Path(path).parent, 0o755) / ".llmgw-join"
        write_atomic(probe, b"", 0o600)
        probe.unlink()


def _keep(files: TlsFiles, ca: str, key: bytes, certificate: x509.Certificate) -> None:
    from llmgw.agent.renew import store
    from llmgw.system.files import write_atomic

    path = Path(files.ca)
    try:
        before = path.read_text() if path.exists() else ""
    except OSError as error:
        raise FileError(f"cannot read `{path}`", cause=error.strerror or str(error)) from error
    if ca not in before:
        write_atomic(path, (before + ca).encode(), 0o644)
    store(files, key, certificate)


def _configure(config: Path, written: Any, server: str, node_id: str, files: TlsFiles) -> None:
    from llmgw.system.files import make_dir, write_atomic

    lines = f"server: {server}\nnode_id: {node_id}\ntls:\n  ca: {files.ca}\n  cert: {files.cert}\n  key: {files.key}\n"
    if written is None:
        make_dir(config.parent, 0o755)
        write_atomic(config, lines.encode(), 0o644)
        click.echo(f"wrote `{config}`; start the agent: `llmgw agent -c {config}`")
    elif written.tls is None or server not in map(str, written.servers):
        click.echo(f"`{config}` is left as it is; it needs:\n{lines}", err=True)
