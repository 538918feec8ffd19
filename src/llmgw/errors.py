"""One base for every error llmgw raises on purpose.

An error says what was tried (`message`), why it failed (`cause`) and what to do next (`hint`). `code` is kebab-case and
stable: it is what scripts match on and what docs/errors.md lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class LlmgwError(Exception):
    """Base of all errors llmgw raises on purpose.

    Args:
        message: what was tried and failed; no final period, literals in backticks.
        cause: why, in the words of whoever said so (a library, the kernel, a peer).
        hint: what a person does next.
        code: overrides the class's own code.
    """

    code: ClassVar[str] = "internal"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, cause: str = "", hint: str = "", code: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.cause = cause
        self.hint = hint
        if code:
            self.code = code  # type: ignore[misc]

    def words(self) -> str:
        """One sentence: message and cause, as shown in a status."""
        return f"{self.message}: {self.cause}" if self.cause else self.message

    def __str__(self) -> str:
        return self.words()


class UsageError(LlmgwError):
    """The command line, or a value a person typed, is wrong."""

    code = "usage"
    exit_code = 2


class ConfigError(LlmgwError):
    """A configuration file has problems; `problems` lists all of them, one line each."""

    code = "config-invalid"
    exit_code = 2

    def __init__(self, message: str, problems: Sequence[str] = (), *, hint: str = "") -> None:
        super().__init__(message, cause="; ".join(problems), hint=hint)
        self.problems = tuple(problems)


class UnitError(LlmgwError):
    """A duration or a size could not be read."""

    code = "unit-invalid"
    exit_code = 2


class NameInvalid(LlmgwError):
    """A node id, model name or label has characters that are not allowed."""

    code = "name-invalid"
    exit_code = 2


class CommandError(LlmgwError):
    """A program could not be started, timed out or failed."""

    code = "command-failed"


class FileError(LlmgwError):
    """A file or directory could not be read, written or locked."""

    code = "file-failed"


class LockHeld(FileError):
    """Another process holds the lock."""

    code = "lock-held"


class HttpError(LlmgwError):
    """An HTTP request got no answer (`status` is None) or an answer that is an error."""

    code = "http-failed"

    def __init__(
        self, message: str, *, status: int | None = None, cause: str = "", hint: str = "", code: str = ""
    ) -> None:
        super().__init__(message, cause=cause, hint=hint, code=code)
        self.status = status


class FetchError(LlmgwError):
    """A download failed or its bytes are not the ones that were announced.

    `retry_after_s` is set when the server said when to come back.
    """

    code = "fetch-failed"

    def __init__(
        self, message: str, *, cause: str = "", hint: str = "", code: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, cause=cause, hint=hint, code=code)
        self.retry_after_s = retry_after_s


class FetchStopped(FetchError):
    """A download was told to stop. What came so far is kept."""

    code = "fetch-stopped"


class DigestMismatch(FetchError):
    """The bytes do not have the announced sha256."""

    code = "digest-mismatch"


class InstallError(LlmgwError):
    """An engine could not be installed. `retry_after_s` is set when the source said when to come back."""

    code = "install-failed"

    def __init__(
        self, message: str, *, cause: str = "", hint: str = "", code: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, cause=cause, hint=hint, code=code)
        self.retry_after_s = retry_after_s


class NotPublished(InstallError):
    """The version, or the asset this node needs, is not published (yet)."""

    code = "not-published"


class NoBuild(InstallError):
    """The release has no build this node can run."""

    code = "no-build"


class NoSpace(InstallError):
    """Not enough free space for the archive and the unpacked tree."""

    code = "no-space"


class ArchiveRefused(InstallError):
    """An archive has a member that could write outside its directory, or is malformed. The whole archive is refused."""

    code = "archive-refused"


class PackagesFailed(InstallError):
    """The node's package manager could not provide a library."""

    code = "packages-failed"


class ProofFailed(InstallError):
    """The engine was unpacked but was not seen to run."""

    code = "proof-failed"


class ProviderError(LlmgwError):
    """A provider plugin could not be loaded or broke its contract."""

    code = "provider-failed"


class WireError(LlmgwError):
    """A peer sent something that is not the protocol."""

    code = "wire-invalid"


class LinkError(LlmgwError):
    """The connection to a peer failed or was refused."""

    code = "link-failed"


class TlsError(LinkError):
    """A certificate or a TLS handshake was refused, by us or by the peer."""

    code = "tls-refused"


class PkiError(LlmgwError):
    """A certificate or key could not be made, read or trusted."""

    code = "pki-failed"


class ReplicaError(LlmgwError):
    """An engine process could not be started or watched."""

    code = "replica-failed"


class StateError(LlmgwError):
    """The server's state could not be read or written."""

    code = "state-failed"


class ApiError(LlmgwError):
    """The server answered with an error; code, message, cause and hint are the server's own."""

    code = "api-failed"


class Unreachable(ApiError):
    """No llmgw server answered at the given address."""

    code = "server-unreachable"


class AddressInUse(LlmgwError):
    """The address to listen on is taken."""

    code = "address-in-use"
