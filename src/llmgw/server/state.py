"""What must survive the server: profiles, replica assignments, nodes, client keys, the last events, the fencing epoch.

One SQLite file (WAL, synchronous=FULL, mode 0600) and a lock beside it. Heartbeats never come here.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from llmgw.domain.engines import Asset
from llmgw.domain.profiles import Profile
from llmgw.domain.replicas import ReplicaSpec
from llmgw.domain.rollout import Assignment, Rollback
from llmgw.domain.routing import RouteKey
from llmgw.errors import FileError, LlmgwError, LockHeld, StateError
from llmgw.server.events import Event
from llmgw.server.schema import migrate
from llmgw.system.files import lock, make_dir
from llmgw.wire.shapes import from_json, to_json

_LIMITS = ("rpm", "tpm", "expires")
_RESTORE = "restore the file from a backup, or move it away: the server then starts without profiles"


@frozen
class StoredProfile:
    """A profile and when it was first applied (seconds since the epoch)."""

    profile: Profile
    created: float


@frozen
class StoredKey:
    """A client's key: its hash, the models it may use (empty: all), when it was made."""

    key: RouteKey
    created: float


@frozen
class StoredRelease:
    """The files of one version of an engine, digests pinned; when its sources, or an import, last said so."""

    engine: str
    version: str
    assets: tuple[Asset, ...]
    resolved: float
    imported: bool = False


class State:
    """The open state. Any thread may call; each write is on disk when its method returns.

    Attributes:
        server_id: stays with the file.
        epoch: higher at each start; fences an older server out.
    """

    def __init__(self, db: sqlite3.Connection, path: Path, held: contextlib.ExitStack) -> None:
        self._db = db
        self._path = path
        self._held = held
        self._lock = threading.Lock()
        self._profiles: tuple[StoredProfile, ...] | None = None
        self._keys: tuple[StoredKey, ...] | None = None
        with self._write("begin a new epoch") as db:
            self.server_id = _meta(db, "server_id") or secrets.token_hex(8)
            self.epoch = int(_meta(db, "epoch") or 0) + 1
            _set_meta(db, "server_id", self.server_id)
            _set_meta(db, "epoch", str(self.epoch))

    def close(self) -> None:
        """Close the file and let go of its lock."""
        with self._lock:
            self._db.close()
            self._held.close()

    def profiles(self) -> tuple[StoredProfile, ...]:
        """All profiles by name; from memory once read."""
        with self._lock:
            if self._profiles is None:
                rows = self._read("SELECT body, created FROM profiles ORDER BY name")
                self._profiles = tuple(StoredProfile(self._value(body, Profile), created) for body, created in rows)
            return self._profiles

    def put_profile(self, profile: Profile, now: float) -> bool:
        """Keep a profile; False when the very same was there already."""
        body = json.dumps(to_json(profile), sort_keys=True)
        with self._write(f"keep profile `{profile.name}`") as db:
            self._profiles = None
            row = db.execute("SELECT body FROM profiles WHERE name = ?", (profile.name,)).fetchone()
            if row is not None and row[0] == body:
                return False
            db.execute(
                "INSERT INTO profiles VALUES (?, ?, ?) ON CONFLICT (name) DO UPDATE SET body = excluded.body",
                (profile.name, body, now),
            )
        return True

    def delete_profile(self, name: str) -> bool:
        """Forget a profile; False when there was none."""
        with self._write(f"delete profile `{name}`") as db:
            self._profiles = None
            db.execute("DELETE FROM rollbacks WHERE profile = ?", (name,))
            return db.execute("DELETE FROM profiles WHERE name = ?", (name,)).rowcount > 0

    def assignments(self) -> tuple[Assignment, ...]:
        """Which replica was given to which node."""
        with self._lock:
            rows = self._read(
                "SELECT idx, node_id, memory_bytes, host, port, before, api_key, spec FROM assignments "
                "ORDER BY replica_id"
            )
        return tuple(
            Assignment(index, node_id, evolve(self._value(spec, ReplicaSpec), api_key=key), *more)
            for index, node_id, *more, key, spec in rows
        )

    def reassign(self, starts: Sequence[Assignment], stops: Sequence[str]) -> None:
        """Keep new assignments and forget those of the replica ids in `stops`, all or nothing."""
        with self._write("keep where replicas run") as db:
            db.executemany("DELETE FROM assignments WHERE replica_id = ?", [(name,) for name in stops])
            for item in starts:
                spec = json.dumps(to_json(evolve(item.spec, api_key="")), sort_keys=True)
                who = (item.spec.replica_id, item.index, item.node_id, item.spec.epoch)
                row = (*who, item.memory_bytes, item.host, item.port, item.spec.api_key, spec, item.before)
                db.execute("INSERT OR REPLACE INTO assignments VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)

    def rollbacks(self) -> tuple[Rollback, ...]:
        """Engine versions that did not become ready, by profile."""
        with self._lock:
            rows = self._read("SELECT body FROM rollbacks ORDER BY profile")
        return tuple(self._value(body, Rollback) for (body,) in rows)

    def put_rollbacks(self, made: Sequence[Rollback]) -> None:
        """Keep rollbacks, each in place of an older one of its profile."""
        with self._write("keep which engine version failed") as db:
            rows = [(item.profile, json.dumps(to_json(item), sort_keys=True)) for item in made]
            db.executemany("INSERT OR REPLACE INTO rollbacks VALUES (?, ?)", rows)

    def next_epoch(self, count: int) -> int:
        """Reserve `count` replica epochs never used before; the first of them."""
        with self._write("reserve replica epochs") as db:
            first = int(_meta(db, "replica_epoch") or 0) + 1
            _set_meta(db, "replica_epoch", str(first + count - 1))
        return first

    def nodes(self) -> tuple[str, ...]:
        """Ids of all nodes that ever connected."""
        with self._lock:
            return tuple(row[0] for row in self._read("SELECT node_id FROM nodes ORDER BY node_id"))

    def add_node(self, node_id: str, now: float) -> None:
        """Remember a node; once for each node, not for each connection."""
        with self._write(f"remember node {node_id}") as db:
            db.execute("INSERT OR IGNORE INTO nodes (node_id, first_seen) VALUES (?, ?)", (node_id, now))

    def remove_node(self, node_id: str) -> None:
        """Forget a node, until it connects again."""
        with self._write(f"forget node {node_id}") as db:
            db.execute("DELETE FROM nodes WHERE node_id = ?", (node_id,))

    def draining(self) -> dict[str, float]:
        """Nodes that are being emptied, and since when (seconds since the epoch)."""
        with self._lock:
            return dict(self._read("SELECT node_id, draining FROM nodes WHERE draining IS NOT NULL"))

    def set_draining(self, node_id: str, since: float | None) -> None:
        """Keep that a node is being emptied, or (None) that it takes replicas again."""
        with self._write(f"keep whether node {node_id} is draining") as db:
            db.execute("UPDATE nodes SET draining = ? WHERE node_id = ?", (since, node_id))

    def events(self) -> tuple[Event, ...]:
        """The last events, oldest first."""
        with self._lock:
            rows = self._read("SELECT seq, at, kind, subject, words FROM events ORDER BY seq")
        return tuple(Event(*row) for row in rows)

    def add_events(self, made: Sequence[Event], keep: int) -> None:
        """Keep events, and of all the last `keep`."""
        with self._write("keep events") as db:
            rows = [(item.seq, item.at, item.kind, item.subject, item.words) for item in made]
            db.executemany("INSERT OR REPLACE INTO events VALUES (?, ?, ?, ?, ?)", rows)
            db.execute("DELETE FROM events WHERE seq <= (SELECT max(seq) FROM events) - ?", (keep,))

    def add_join_token(self, sha256: str, node_id: str | None, expires: float, now: float) -> None:
        """Keep a join token's hash; those that have expired are forgotten."""
        with self._write("keep a join token") as db:
            db.execute("DELETE FROM join_tokens WHERE expires <= ?", (now,))
            db.execute("INSERT INTO join_tokens VALUES (?, ?, ?, ?)", (sha256, node_id, expires, now))

    def join_token(self, sha256: str, now: float) -> tuple[str | None] | None:
        """The node a token is good for (None: any new one), in a tuple; None when there is no such token any more."""
        with self._lock, _mapped(self._path, "read"):
            query = "SELECT node_id FROM join_tokens WHERE sha256 = ? AND expires > ?"
            row = self._db.execute(query, (sha256, now)).fetchone()
        return None if row is None else (row[0],)

    def spend_join_token(self, sha256: str, now: float) -> bool:
        """Take a join token away; true for exactly one of all who try."""
        with self._write("spend a join token") as db:
            gone = db.execute("DELETE FROM join_tokens WHERE sha256 = ? AND expires > ?", (sha256, now))
            return gone.rowcount > 0

    def client_keys(self) -> tuple[StoredKey, ...]:
        """The clients' keys by name; from memory once read."""
        with self._lock:
            if self._keys is None:
                rows = self._read("SELECT name, sha256, models, created, limits FROM keys ORDER BY name")
                self._keys = tuple(
                    StoredKey(RouteKey(name, sha, tuple(json.loads(models)), **json.loads(limits)), at)
                    for name, sha, models, at, limits in rows
                )
            return self._keys

    def add_key(self, key: RouteKey, now: float) -> bool:
        """Keep a key; False when the name is taken."""
        with self._write(f"keep key `{key.name}`") as db:
            self._keys = None
            limits = {name: value for name in _LIMITS if (value := getattr(key, name)) is not None}
            row = (key.name, key.sha256, json.dumps(list(key.models)), now, json.dumps(limits))
            query = "INSERT OR IGNORE INTO keys (name, sha256, models, created, limits) VALUES (?, ?, ?, ?, ?)"
            return db.execute(query, row).rowcount > 0

    def delete_key(self, name: str) -> bool:
        """Forget a key; False when there was none."""
        with self._write(f"delete key `{name}`") as db:
            self._keys = None
            return db.execute("DELETE FROM keys WHERE name = ?", (name,)).rowcount > 0

    def releases(self) -> tuple[StoredRelease, ...]:
        """Every version whose files were seen."""
        with self._lock:
            rows = self._read("SELECT engine, version, body, resolved, imported FROM releases ORDER BY engine, version")
        return tuple(
            StoredRelease(engine, version, self._value(body, tuple[Asset, ...]), at, bool(imported))
            for engine, version, body, at, imported in rows
        )

    def put_release(self, item: StoredRelease) -> None:
        """Keep the files of one version."""
        body = json.dumps(to_json(item.assets), sort_keys=True)
        with self._write(f"keep the files of {item.engine} {item.version}") as db:
            row = (item.engine, item.version, body, item.resolved, int(item.imported))
            db.execute("INSERT OR REPLACE INTO releases VALUES (?, ?, ?, ?, ?)", row)

    def writing(self, what: str) -> contextlib.AbstractContextManager[sqlite3.Connection]:
        """A transaction, for tables that have a file of their own here; on disk when it ends."""
        return self._write(what)

    def reading(self, query: str, values: Sequence[object] = ()) -> list[Any]:
        """Rows, for the same."""
        with self._lock, _mapped(self._path, "read"):
            return self._db.execute(query, values).fetchall()

    def _read(self, query: str) -> list[Any]:
        with _mapped(self._path, "read"):
            return self._db.execute(query).fetchall()

    @contextlib.contextmanager
    def _write(self, what: str) -> Iterator[sqlite3.Connection]:
        with self._lock, _mapped(self._path, what):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def _value(self, text: str, kind: type[Any]) -> Any:
        try:
            return from_json(json.loads(text), kind)
        except (ValueError, LlmgwError) as error:
            raise StateError(
                f"`{self._path}` holds a broken {getattr(kind, '__name__', kind)}", cause=str(error), hint=_RESTORE
            ) from error


def refuse_postgresql(where: str) -> None:
    """Say that this version keeps its state in a file.

    Raises:
        StateError: `where` is a PostgreSQL address.
    """
    if where.startswith(("postgresql:", "postgres:")):
        raise StateError(
            "cannot keep the state in PostgreSQL",
            cause="this version of llmgw keeps it in SQLite only",
            hint="write the path of a file, such as `/var/lib/llmgw/state.db`, under `state`",
        )


def open_state(where: str) -> State:
    """Open the state, create it when it is not there, and bring an older schema up to date.

    Args:
        where: path of an SQLite file.

    Raises:
        LockHeld: another server has it.
        StateError: it cannot be opened, is broken, or belongs to a newer llmgw.
    """
    refuse_postgresql(where)
    path = Path(where)
    held = contextlib.ExitStack()
    try:
        make_dir(path.parent, 0o700)
        held.enter_context(lock(path.with_name(f"{path.name}.lock"), "llmgw server"))
        with _mapped(path, "open"):
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            path.chmod(0o600)
            db = sqlite3.connect(path, timeout=5.0, isolation_level=None, check_same_thread=False)
        held.callback(db.close)
        with _mapped(path, "open"):
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            checked = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if checked != "ok":
                raise StateError(f"`{path}` is damaged", cause=str(checked), hint=_RESTORE)
            migrate(db, path)
        return State(db, path, held.pop_all())
    except LockHeld:
        raise
    except FileError as error:
        raise StateError(error.message, cause=error.cause, hint=error.hint) from error
    finally:
        held.close()


@contextlib.contextmanager
def _mapped(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        words = str(error)
        hint = _RESTORE
        if "locked" in words:
            hint = "another program has the file open: close it"
        elif "full" in words:
            hint = "free some space on this file system"
        elif "readonly" in words or "unable to open" in words:
            hint = "run as a user who may write there, or name another path under `state`"
        inside = "" if what in ("open", "read") else " in"
        raise StateError(f"cannot {what}{inside} the state `{path}`", cause=words, hint=hint) from error
    except OSError as error:
        raise StateError(f"cannot {what} the state `{path}`", cause=error.strerror or str(error)) from error


def _meta(db: sqlite3.Connection, key: str) -> str | None:
    row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return None if row is None else str(row[0])


def _set_meta(db: sqlite3.Connection, key: str, value: str) -> None:
    db.execute("INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value", (key, value))
