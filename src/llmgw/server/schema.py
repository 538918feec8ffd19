"""The schema of the state, as the scripts that lead to it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from llmgw.errors import StateError

MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
    CREATE TABLE profiles (name TEXT PRIMARY KEY, body TEXT NOT NULL, created REAL NOT NULL) STRICT;
    CREATE TABLE assignments (
        replica_id TEXT PRIMARY KEY, idx INTEGER NOT NULL, node_id TEXT NOT NULL, epoch INTEGER NOT NULL,
        memory_bytes INTEGER, host TEXT, port INTEGER, api_key TEXT NOT NULL, spec TEXT NOT NULL
    ) STRICT;
    CREATE TABLE nodes (node_id TEXT PRIMARY KEY, first_seen REAL NOT NULL) STRICT;
    CREATE TABLE keys (name TEXT PRIMARY KEY, sha256 TEXT NOT NULL UNIQUE, models TEXT NOT NULL, created REAL NOT NULL)
        STRICT;
    """,
    """
    CREATE TABLE releases (
        engine TEXT NOT NULL, version TEXT NOT NULL, body TEXT NOT NULL, resolved REAL NOT NULL,
        imported INTEGER NOT NULL, PRIMARY KEY (engine, version)
    ) STRICT;
    """,
    """
    ALTER TABLE nodes ADD COLUMN draining REAL;
    ALTER TABLE assignments ADD COLUMN before TEXT NOT NULL DEFAULT '';
    CREATE TABLE rollbacks (profile TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT;
    CREATE TABLE events (
        seq INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, subject TEXT NOT NULL, words TEXT NOT NULL
    ) STRICT;
    """,
    """
    CREATE TABLE join_tokens (sha256 TEXT PRIMARY KEY, node_id TEXT, expires REAL NOT NULL, created REAL NOT NULL)
        STRICT;
    """,
    """
    ALTER TABLE keys ADD COLUMN limits TEXT NOT NULL DEFAULT '{}';
    CREATE TABLE usage (
        key TEXT NOT NULL, model TEXT NOT NULL, day TEXT NOT NULL, requests INTEGER NOT NULL, prompt INTEGER NOT NULL,
        completion INTEGER NOT NULL, partial_requests INTEGER NOT NULL, partial_completion INTEGER NOT NULL,
        unknown_requests INTEGER NOT NULL, PRIMARY KEY (key, model, day)
    ) STRICT;
    CREATE TABLE usage_batches (run TEXT PRIMARY KEY, batch INTEGER NOT NULL, at REAL NOT NULL) STRICT;
    """,
)
"""Each script brings the schema from version N (its index) to N + 1. Scripts are only ever added."""


def migrate(db: sqlite3.Connection, path: Path) -> None:
    """Bring an older schema up to date.

    Raises:
        StateError: a newer llmgw wrote it.
    """
    db.execute("CREATE TABLE IF NOT EXISTS migrations (version INTEGER PRIMARY KEY, applied TEXT NOT NULL) STRICT")
    version = db.execute("SELECT coalesce(max(version), 0) FROM migrations").fetchone()[0]
    if version > len(MIGRATIONS):
        raise StateError(
            f"`{path}` was written by a newer llmgw",
            cause=f"its schema is version {version}, this llmgw knows {len(MIGRATIONS)}",
            hint="start the newer llmgw, or restore a backup from before the upgrade",
        )
    for number, script in enumerate(MIGRATIONS[version:], version + 1):
        db.execute("BEGIN IMMEDIATE")
        for statement in script.split(";"):
            if statement.strip():
                db.execute(statement)
        db.execute("INSERT INTO migrations VALUES (?, datetime('now'))", (number,))
        db.execute("COMMIT")
