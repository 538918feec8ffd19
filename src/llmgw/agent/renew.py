"""The agent's own certificate: a new one from half of its life on, key made here, signed by the server.

Key and certificate are two files, and a power cut may come between two renames. So both are written into one file
first (`CERT.next`, mode 0600); whoever finds it finishes what was begun.
"""

from __future__ import annotations

import logging
import random
import threading
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from llmgw.domain.facts import NodeWarning
from llmgw.domain.identity import Certified
from llmgw.errors import FileError, LlmgwError, PkiError, TlsError
from llmgw.pki.keys import certificate_pem, check_answer, key_pem, load_key, make_request, new_key, read_certificates
from llmgw.system.clock import Clock
from llmgw.system.files import write_atomic
from llmgw.wire.identity import certified
from llmgw.wire.messages import Issued, Renew
from llmgw.wire.tls import TlsFiles

log = logging.getLogger(__name__)

_MOST_PAUSE_S = 3600.0
_ANSWER_S = 60.0


class Renewal:
    """Keeps one certificate fresh. `due` and `take` are the session thread's; `words` and `warnings` anybody's."""

    def __init__(self, files: TlsFiles, node_id: str, clock: Clock) -> None:
        self._files = files
        self._node_id = node_id
        self._clock = clock
        self._key: ec.EllipticCurvePrivateKey | None = None
        self._next_try = 0.0
        self._lock = threading.Lock()
        self._trouble: NodeWarning | None = None
        self._own: Certified | None = None
        self._stamp: tuple[int, int] | None = None

    def due(self, server_signs: bool) -> Renew | None:
        """The request to send now, if any."""
        now = self._clock.monotonic()
        if now < self._next_try:
            return None
        own = self._look()
        if own is None:
            self._next_try = now + _ANSWER_S
            return None
        wall = self._clock.now()
        if wall < own.renewal_at:
            # The file may be replaced by hand at any time, so look again before long.
            self._next_try = now + min(_ANSWER_S, own.renewal_at - wall)
            self._say("")
            return None
        self._next_try = now + self._pause_s(own)
        if not server_signs:
            self._say("the server signs no certificates (`agents.tls.ca_key`): issue one by hand")
            return None
        self._key = new_key()
        return Renew(make_request(self._key, self._node_id))

    def take(self, issued: Issued) -> None:
        """The server's answer: write the new certificate, or remember why there is none."""
        key, self._key = self._key, None
        try:
            if key is None:
                raise PkiError("the server sent a certificate nobody asked for")
            if issued.error:
                raise PkiError("the server did not sign a new certificate", cause=issued.error)
            certificate = check_answer(issued.cert, key, self._node_id)
            store(self._files, key_pem(key), certificate)
        except LlmgwError as error:
            log.error("certificate not renewed: %s", error)
            self._say(error.words())
            return
        self._say("")
        self._next_try = 0.0
        log.info("certificate renewed: it %s", certified(certificate).words(self._clock.now()))

    def words(self) -> str:
        """How the certificate stands: `expires in 60d`; "" when it cannot be read, which the session says."""
        own = self._look()
        return "" if own is None else own.words(self._clock.now())

    def warnings(self) -> tuple[NodeWarning, ...]:
        """What people should know: why it was not renewed."""
        with self._lock:
            return () if self._trouble is None else (self._trouble,)

    def _pause_s(self, own: Certified) -> float:
        """Several attempts fit into what is left, and many nodes do not ask at once."""
        left = max(0.0, own.not_after - self._clock.now())
        return min(_MOST_PAUSE_S, max(10.5, left / 20)) * random.uniform(1.0, 1.5)

    def _say(self, trouble: str) -> None:
        with self._lock:
            if not trouble:
                self._trouble = None
            elif self._trouble is None or not self._trouble.words.endswith(trouble):
                words = f"its certificate is due to be renewed and was not: {trouble}"
                self._trouble = NodeWarning("certificate-renewal", words, self._clock.now())

    def _look(self) -> Certified | None:
        with self._lock:
            try:
                status = Path(self._files.cert).stat()
                stamp = (status.st_mtime_ns, status.st_ino)
                if stamp != self._stamp:
                    self._own, self._stamp = certified(read_certificates(Path(self._files.cert))[0]), stamp
            except (OSError, LlmgwError):
                self._own = self._stamp = None
            return self._own


def store(files: TlsFiles, key: bytes, certificate: x509.Certificate) -> None:
    """Replace key and certificate, in one file or two, so that they always belong together after `finish`.

    Raises:
        FileError: the old ones are still there.
    """
    pem = certificate_pem(certificate)
    if files.cert == files.key:
        others = b"".join(certificate_pem(each) for each in read_certificates(Path(files.cert)) if _is_ca(each))
        write_atomic(Path(files.cert), key + pem + others, 0o600)
        return
    journal = _journal(files)
    write_atomic(journal, key + pem, 0o600)
    finish(files)


def finish(files: TlsFiles) -> None:
    """Carry through a replacement that was interrupted; nothing to do otherwise.

    Raises:
        FileError: the files cannot be written.
    """
    journal = _journal(files)
    try:
        data = journal.read_bytes()
    except FileNotFoundError:
        return
    except OSError as error:
        raise FileError(f"cannot read `{journal}`", cause=error.strerror or str(error)) from error
    at = data.find(b"-----BEGIN CERTIFICATE-----")
    key, cert = data[:at], data[at:]
    write_atomic(Path(files.key), key, 0o600)
    write_atomic(Path(files.cert), cert, 0o644)
    journal.unlink()


def own_trouble(files: TlsFiles, now: float) -> str:
    """What is wrong with our own certificate by this machine's clock, "" when nothing: a server's TLS alert is often
    only `bad certificate`.
    """
    try:
        own = certified(read_certificates(Path(files.cert))[0])
        load_key(Path(files.key))
    except (PkiError, TlsError):
        return ""
    if now < own.not_before or now >= own.not_after:
        standing = own.words(now)
        return f"this node's own certificate `{files.cert}` {'is ' if now < own.not_before else ''}{standing}"
    return ""


def _is_ca(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, ValueError):
        return False


def _journal(files: TlsFiles) -> Path:
    return Path(f"{files.cert}.next")
