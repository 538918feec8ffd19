"""Which server `llmgw ctl` talks to, and with which token.

Server: `--server`, `LLMGW_SERVER`, the current context of `~/.config/llmgw/ctl.yaml`, that of the `ctl.yaml` which
`llmgw up` writes, `http://127.0.0.1:8080`. Token file: `--token-file`, `LLMGW_TOKEN_FILE`, the context's,
`/var/lib/llmgw/admin.token`. A token itself is never taken from the command line: everybody on the machine
can read it there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from attrs import field, frozen

from llmgw.errors import ConfigError, UsageError

DEFAULT_SERVER = "http://127.0.0.1:8080"
DEFAULT_TOKEN_FILE = "/var/lib/llmgw/admin.token"  # noqa: S105  (a path)


@frozen
class Where:
    """One server to talk to.

    Args:
        server: base URL without a trailing slash.
        origin: where the URL was taken from, for messages.
        token: the bearer token, None when there is none.
        token_words: which file it came from, or why there is none.
        ca: PEM file of the authorities to trust; None means the machine's own.
        certificate: PEM files of an operator's certificate and its key, shown to this server.
    """

    server: str
    origin: str
    token: str | None = field(repr=False)
    token_words: str
    ca: str | None = None
    certificate: tuple[str, str] | None = None

    @property
    def exposed(self) -> bool:
        """A token sent there crosses a network in the clear."""
        import ipaddress

        host = urlsplit(self.server).hostname or ""
        if self.server.startswith("https://") or host == "localhost":
            return False
        try:
            return not ipaddress.ip_address(host).is_loopback
        except ValueError:
            return True


@frozen
class Context:
    """One entry of a ctl.yaml; `origin` names it and its file."""

    server: str
    token_file: str | None
    ca: str | None
    origin: str
    certificate: tuple[str, str] | None = None


def find(
    env: Mapping[str, str],
    *,
    server: str | None = None,
    token_file: str | None = None,
    context: str | None = None,
    default_token_file: str = DEFAULT_TOKEN_FILE,
) -> Where:
    """Decide where to go.

    Args:
        env: the environment.
        server, token_file, context: from the command line.

    Raises:
        UsageError: the server's address is no URL, the context does not exist, or a token file that was asked for
            cannot be read.
        ConfigError: a ctl.yaml has problems.
    """
    chosen, known = _contexts(env, context)
    said = server or (None if context else env.get("LLMGW_SERVER"))
    if said:
        url, origin = check_server(said), "`--server`" if server else "`LLMGW_SERVER`"
        # a context's token goes to that context's server and to no other
        chosen = next((each for each in known if each.server == url), None)
    elif chosen is not None:
        url, origin = chosen.server, chosen.origin
    else:
        url, origin = DEFAULT_SERVER, "the default"
    asked = token_file or env.get("LLMGW_TOKEN_FILE") or (chosen.token_file if chosen else None)
    token, words = _token(asked or default_token_file, asked=asked is not None)
    ca, certificate = (chosen.ca, chosen.certificate) if chosen else (None, None)
    return Where(url, origin, token, words, ca, certificate)


def check_server(text: str) -> str:
    """The base URL of a server, without a trailing slash.

    Raises:
        UsageError: it is not `http://HOST[:PORT]` or `https://HOST[:PORT]`.
    """
    hint = "write `http://HOST:8080` or `https://HOST`"
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"`{text}` is not the address of a server", hint=hint) from error
    if parts.username is not None or parts.password is not None:
        raise UsageError("the address of a server must not hold a user name or password", hint=hint)
    if parts.scheme not in ("http", "https") or not host or parts.path.strip("/") or parts.query or parts.fragment:
        raise UsageError(f"`{text}` is not the address of a server", hint=hint)
    return f"{parts.scheme}://{parts.netloc}"


def files(env: Mapping[str, str]) -> tuple[Path, ...]:
    """The ctl.yaml files looked into, in order."""
    home = Path(env.get("HOME") or "/nonexistent")
    config = Path(env.get("XDG_CONFIG_HOME") or home / ".config")
    state = Path(env.get("XDG_STATE_HOME") or home / ".local" / "state")
    return config / "llmgw" / "ctl.yaml", state / "llmgw" / "up" / "ctl.yaml"


def _contexts(env: Mapping[str, str], wanted: str | None) -> tuple[Context | None, list[Context]]:
    known: list[Context] = []
    chosen: Context | None = None
    names: list[str] = []
    for path in files(env):
        current, contexts = _read(path)
        known += contexts.values()
        names += contexts
        name = wanted or current
        if chosen is None and name is not None and name in contexts:
            chosen = contexts[name]
    if wanted is not None and chosen is None:
        have = ", ".join(f"`{name}`" for name in names) or "there are none"
        raise UsageError(f"there is no context `{wanted}`", hint=f"choose one of: {have}" if names else have)
    return chosen, known


def _read(path: Path) -> tuple[str | None, dict[str, Context]]:
    if not path.exists():
        return None, {}
    from llmgw.ctl.contextfile import load  # YAML is read only when there is a file

    try:
        read = load(path)
        made = {
            name: Context(
                check_server(entry.server),
                entry.token_file,
                entry.ca,
                f"context `{name}` of `{path}`",
                (entry.cert, entry.key) if entry.cert and entry.key else None,
            )
            for name, entry in read.contexts.items()
        }
    except UsageError as error:
        raise ConfigError(f"`{path}` has a problem", [f"{path}: {error.message}"], hint=error.hint) from error
    return read.current_context, made


def _token(path: str, *, asked: bool) -> tuple[str | None, str]:
    try:
        with Path(path).expanduser().open("rb") as handle:
            token = handle.read(4096).decode("ascii").strip()
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        reason = (getattr(error, "strerror", None) or "it is not a token").lower()
        if asked:
            hint = "name the server's admin token with `--token-file FILE`"
            raise UsageError(f"cannot read the token file `{path}`", cause=reason, hint=hint) from error
        return None, f"no token was sent: `{path}`: {reason}"
    if not token or not token.isprintable() or " " in token:
        raise UsageError(f"`{path}` holds no token", hint="it must hold the server's admin token on one line")
    return token, f"the token of `{path}` was sent"
