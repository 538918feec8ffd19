"""Configuration: YAML to attrs values, all problems of a file at once, each with line, path and the valid choices."""

from __future__ import annotations

from llmgw.config.documents import Problem, read_file
from llmgw.config.profiles import (
    check_engine_name,
    check_labels,
    load_profile,
    load_profiles,
    profile_from_json,
    profile_to_json,
    profiles_from_text,
)
from llmgw.config.structure import (
    Bad,
    at_least,
    bad,
    checked,
    choices,
    derived,
    keys_of,
    lasting,
    load,
    load_text,
    unknown_key,
)
from llmgw.config.values import AbsolutePath, Bytes, HostPort, Seconds, ServerUrl, SourceName, check_source, is_loopback

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
    "is_loopback",
    "keys_of",
    "lasting",
    "load",
    "load_profile",
    "load_profiles",
    "load_text",
    "profile_from_json",
    "profile_to_json",
    "profiles_from_text",
    "read_file",
    "unknown_key",
]
