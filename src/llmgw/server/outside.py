"""What server.yaml names and does not hold: certificates, directories, engines; looked at before anything starts."""

from __future__ import annotations

import logging
import os
import ssl
import stat
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from llmgw.errors import LlmgwError, TlsError
from llmgw.server.state import refuse_postgresql
from llmgw.system.http_words import tls_file_words

if TYPE_CHECKING:
    from llmgw.providers.base import Provider
    from llmgw.server.settings import HttpTls, ServerSettings

log = logging.getLogger("llmgw.server")

_FILES_WANTED = 4096


def refuse_unusable(settings: ServerSettings) -> None:
    """Stop a start that could not serve anybody.

    Raises:
        TlsError: certificates of `http.tls` cannot be used, or one of `agents.tls` is not a server's.
        StateError: the state is where this version cannot keep it.
    """
    refuse_postgresql(settings.state)
    if settings.http.tls is not None:
        _try_http_tls(settings.http.tls)
        _refuse_other_purpose("http.tls.cert", settings.http.tls.cert, "clients and browsers")
    if settings.agents.tls is not None:
        _refuse_other_purpose("agents.tls.cert", settings.agents.tls.cert, "agents")


def check(settings: ServerSettings) -> Iterator[str]:
    """What `--check` says about what the file names: warnings only, since the files may be on another machine."""
    from llmgw.providers import registry
    from llmgw.system import plugins

    plugins.add(settings.plugins_dir)
    try:
        refuse_unusable(settings)
    except LlmgwError as error:
        yield f"warning: the server would not start: {error.words()}"
    for words in doubts(settings, registry.load().providers):
        yield f"warning: {words}"


def doubts(settings: ServerSettings, providers: Mapping[str, Provider]) -> Iterator[str]:
    """Sentences about what will not do what was probably meant.

    Args:
        providers: those this server has.
    """
    tls = settings.http.tls
    if tls is not None and _open_to_others(tls.key):
        yield f"http.tls.key `{tls.key}` can be read by every user of this machine: `chmod 600` it"
    if settings.gateway.access_log:
        yield from _log_doubts(Path(settings.gateway.access_log))
    if settings.profiles_dir is not None and not Path(settings.profiles_dir).is_dir():
        yield f"profiles_dir `{settings.profiles_dir}` is no directory: no profile is applied from it"
    yield from _engine_doubts(settings.engines, providers)


def _engine_doubts(names: Iterable[str], providers: Mapping[str, Provider]) -> Iterator[str]:
    for name in names:
        provider = providers.get(name)
        if provider is None:
            near = get_close_matches(name, providers, 1)
            meant = f", did you mean `{near[0]}`?" if near else ";"
            known = ", ".join(f"`{each}`" for each in sorted(providers))
            yield f"engines.{name}: this server has no provider of that name{meant} it has {known}"
        elif not provider.capabilities.installable:
            yield (
                f"engines.{name}: llmgw does not install this engine: name it under `engines.{name}` in the agent.yaml "
                "of each node that has it"
            )


def _try_http_tls(tls: HttpTls) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    what = f"http.tls.cert `{tls.cert}` with http.tls.key `{tls.key}`"
    hint = "name a PEM file of the certificate and its chain, and one of its private key without a passphrase"
    try:
        for path in (tls.cert, tls.key):
            # looked at first: the loader below does not say which of the two it could not read
            what = f"`{path}` of http.tls"
            Path(path).open("rb").close()
        what = f"http.tls.cert `{tls.cert}` with http.tls.key `{tls.key}`"
        # a passphrase is never asked for: a service has nobody to ask
        context.load_cert_chain(tls.cert, tls.key, password=lambda: b"")
        for key, file in (("client_ca", tls.client_ca), ("client_crl", tls.client_crl)):
            if file is not None:
                what, hint = f"http.tls.{key} `{file}`", "name a PEM file"
                context.load_verify_locations(file)
    except OSError as error:
        raise TlsError(f"cannot use {what}", cause=tls_file_words(error), hint=hint) from error


def _refuse_other_purpose(key: str, path: str, who: str) -> None:
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    try:
        own = x509.load_pem_x509_certificate(Path(path).read_bytes())
        usage = own.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except (OSError, ValueError, x509.ExtensionNotFound, x509.DuplicateExtension):
        return  # whoever uses the file has the better words; without the extension every use is allowed
    if ExtendedKeyUsageOID.SERVER_AUTH not in usage and ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE not in usage:
        raise TlsError(
            f"cannot use {key} `{path}`",
            cause=f"it is not the certificate of a server (no `serverAuth` in it), so {who} would refuse it",
            hint="`llmgw ctl cert issue-server NAME` makes one",
        )


def _open_to_others(path: str) -> bool:
    try:
        return bool(Path(path).stat().st_mode & stat.S_IROTH)
    except OSError:
        return False


def _log_doubts(path: Path) -> Iterator[str]:
    if path.is_dir():
        yield f"gateway.access_log `{path}` is a directory: name a file, else its lines are lost"
    elif not path.parent.is_dir():
        yield f"gateway.access_log `{path}`: there is no directory `{path.parent}`: make it, else its lines are lost"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        yield f"gateway.access_log `{path}` cannot be written by this user: its lines are lost"


def raise_open_files() -> None:
    """Allow this process as many open files as the machine lets it have: each agent takes one."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        log.warning("only %d files may be open at once, and that cannot be raised to %d: %s", soft, hard, error)
    if hard < _FILES_WANTED:
        log.warning("at most %d files may be open at once, which bounds the agents: set `LimitNOFILE`", hard)
