"""Configuration: YAML to attrs values, all problems of a file at once, each with line, path and the valid choices."""

from __future__ import annotations

from llmgw.config.documents import Problem, read_file
from llmgw.config.fields import (
    Bad,
    at_least,
    bad,
    checked,
    choices,
    derived,
    describe,
    keys_of,
    lasting,
    unknown_key,
)
from llmgw.config.profiles import (
    check_engine_name,
    check_labels,
    load_profile,
    load_profiles,
    profile_from_json,
    profile_to_json,
    profiles_from_text,
)
from llmgw.config.structure import load, load_text
from llmgw.config.values import (
    AbsolutePath,
    Bytes,
    HostPort,
    Seconds,
    ServerUrl,
    SourceName,
    check_source,
    is_loopback,
    parse_host_port,
)

__all__ = [
    "AbsolutePath",
    "Bad",
    "Bytes",
    "HostPort",
    "Problem",
    "Seconds",
    "ServerUrl",
    "SourceName",
    "at_least",
    "bad",
    "check_engine_name",
    "check_labels",
    "check_source",
    "checked",
    "choices",
    "derived",
    "describe",
    "is_loopback",
    "keys_of",
    "lasting",
    "load",
    "load_profile",
    "load_profiles",
    "load_text",
    "parse_host_port",
    "profile_from_json",
    "profile_to_json",
    "profiles_from_text",
    "read_file",
    "unknown_key",
]
