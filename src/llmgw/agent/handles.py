"""What an agent must know to take an engine over: one file per replica, and the same once more in the engine's environ.

The file is replaced atomically and carries a checksum. When it is lost or broken, the engine's own environment
(`LLMGW_HANDLE`) still says everything but the pid, which is the process it was found in.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from attrs import asdict, evolve, field, frozen

from llmgw.agent.child import Identity
from llmgw.agent.keeper import EXIT_FILE, KeeperId
from llmgw.domain.engines import Launch
from llmgw.domain.replicas import ReplicaSpec
from llmgw.errors import FileError, WireError
from llmgw.system import files
from llmgw.wire import shapes

VERSION = 2
_READABLE = (1, 2)
_FILE = "handle.json"
KEY_FILE = "api-key"
_LIMIT = 1 << 20


@frozen
class Handle:
    """One started engine.

    Args:
        dir: the replica's private directory: log, key file, this file. The engine runs in it.
        marker: value of LLMGW_REPLICA in its environment.
        started: seconds since the epoch.
        restarts: starts of this replica before this one.
        pid, start_ticks, boot_id, exe: the process, see `child.Identity`; `exe` counts once `ready` was seen.
        ready: it has answered as ready at least once.
        keeper_pid, keeper_ticks: its parent, see `keeper`; 0 when it has none. Since version 2.
        gpu_free: bytes free on each of its GPUs before it was started, where that was known.
    """

    version: int
    replica_id: str
    epoch: int
    digest: str
    profile: str
    model_name: str
    engine: str
    engine_version: str
    context: int
    slots: int
    host: str
    port: int
    dir: str
    marker: str
    started: float
    health_path: str
    loading_statuses: tuple[int, ...]
    health_timeout_s: float
    key_path: str
    term_twice: bool
    gpus: tuple[str, ...] = ()
    start_deadline_s: float | None = None
    restarts: int = 0
    boot_id: str = ""
    pid: int = 0
    start_ticks: int = 0
    exe: str = ""
    ready: bool = False
    keeper_pid: int = 0
    keeper_ticks: int = 0
    gpu_free: Mapping[str, int] = field(factory=dict)
    context_at: str = ""

    def identity(self) -> Identity:
        """The process to look for. A wrapper may replace itself by the engine until the engine was ready."""
        return Identity(self.boot_id, self.pid, self.start_ticks, self.exe if self.ready else "", self.marker)

    def keeper(self) -> KeeperId | None:
        """The engine's keeper, None when it was started without one."""
        if not self.keeper_pid:
            return None
        return KeeperId(self.keeper_pid, self.keeper_ticks, Path(self.dir) / EXIT_FILE)

    def with_identity(self, identity: Identity, keeper: KeeperId | None = None) -> Handle:
        """The same launch, in that process."""
        return evolve(
            self,
            boot_id=identity.boot_id,
            pid=identity.pid,
            start_ticks=identity.start_ticks,
            exe=identity.exe,
            marker=identity.marker,
            keeper_pid=keeper.pid if keeper else 0,
            keeper_ticks=keeper.start_ticks if keeper else 0,
        )

    def serves(self, spec: ReplicaSpec) -> bool:
        """Whether this engine is what `spec` asks for, the API key aside (it is in the key file)."""
        return (self.epoch, self.digest) == (spec.epoch, spec.digest)


def new_handle(
    spec: ReplicaSpec,
    launch: Launch,
    where: Path,
    *,
    version: str,
    address: tuple[str, int],
    marker: str,
    started: float,
    restarts: int,
    gpu_free: Mapping[str, int],
) -> Handle:
    """The handle of an engine about to be started: all but the process. `version` is the engine's own."""
    host, port = address
    return Handle(
        version=VERSION,
        replica_id=spec.replica_id,
        epoch=spec.epoch,
        digest=spec.digest,
        profile=spec.profile,
        model_name=spec.model_name,
        engine=spec.engine,
        engine_version=version,
        context=spec.context,
        slots=spec.slots,
        host=host,
        port=port,
        dir=str(where),
        marker=marker,
        started=started,
        health_path=launch.health_path,
        loading_statuses=launch.loading_statuses,
        health_timeout_s=launch.health_timeout_s,
        key_path=launch.key_path,
        term_twice=launch.term_twice,
        gpus=spec.gpus,
        start_deadline_s=spec.start_deadline_s,
        restarts=restarts,
        gpu_free=gpu_free,
        context_at=launch.context_at,
    )


def replica_dir(work_dir: Path, replica_id: str) -> Path:
    """The replica's directory: readable, never `..`, never too long, never the same for two ids."""
    tail = hashlib.sha256(replica_id.encode()).hexdigest()[:12]
    return work_dir / "replicas" / f"{quote(replica_id, safe='')[:80]}-{tail}"


def encode(handle: Handle) -> str:
    """The handle as JSON with a checksum."""
    body = json.dumps(asdict(handle), sort_keys=True, ensure_ascii=True)
    return json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), "handle": body})


def decode(text: str) -> Handle:
    """Read `encode`'s text.

    Raises:
        WireError: it is broken, or of a version this agent does not know.
    """
    try:
        outer = json.loads(text)
        body = outer["handle"]
        if hashlib.sha256(body.encode()).hexdigest() != outer["sha256"]:
            raise WireError("the handle is broken", cause="its checksum does not match")
        data = json.loads(body)
        version = data.get("version")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WireError("the handle is broken", cause=f"{type(error).__name__}: {error}") from error
    if version not in _READABLE:
        known = " and ".join(map(str, _READABLE))
        raise WireError("the handle is of another version", cause=f"version {version!r}, this agent knows {known}")
    return shapes.from_json(data, Handle)


def save(handle: Handle) -> None:
    """Write the handle's file.

    Raises:
        FileError: it could not be written; the old one still stands.
    """
    files.write_atomic(Path(handle.dir) / _FILE, encode(handle).encode(), 0o600)


def load(where: Path) -> Handle | None:
    """The handle in a replica's directory, None when there is none.

    Raises:
        WireError: it is broken, or of another version.
    """
    text = files.read_text(where / _FILE, _LIMIT)
    if text is None:
        return None
    # the work directory may be reached by another name than last time
    return evolve(decode(text), dir=str(where))


def forget(where: Path) -> None:
    """Remove the handle: the engine has ended and was swept."""
    (where / _FILE).unlink(missing_ok=True)


def quarantine(where: Path) -> Path | None:
    """Put a broken handle aside for a person to look at; None when even that failed."""
    aside = where / f"{_FILE}.broken"
    try:
        (where / _FILE).replace(aside)
    except OSError:
        return None
    return aside


def from_environ(environ: Mapping[str, str], name: str) -> Handle | None:
    """The handle an engine carries in its environment, None when it has none or it is broken."""
    text = environ.get(name)
    if text is None:
        return None
    try:
        return decode(text)
    except WireError:
        return None


def write_key(where: Path, key: str) -> Path:
    """The API key as a file only we can read.

    Raises:
        FileError: it could not be written.
    """
    path = where / KEY_FILE
    files.write_atomic(path, f"{key}\n".encode(), 0o600)
    return path


def read_key(where: Path) -> str:
    """The API key the engine was started with; "" when it has none."""
    return (files.read_text(where / KEY_FILE, 4096) or "").strip()


def make_replica_dir(where: Path) -> None:
    """Create a replica's directory, private: engines search their working directory for libraries.

    Raises:
        FileError: it could not be created.
    """
    files.make_dir(where.parent, 0o700)
    files.make_dir(where, 0o700)
    try:
        where.chmod(0o700)
    except OSError as error:
        raise FileError(f"cannot make `{where}` private", cause=error.strerror or str(error)) from error
