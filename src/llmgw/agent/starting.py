"""From a replica's spec to a started engine process."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Mapping
from pathlib import Path

from attrs import field, frozen

from llmgw.agent import child, handles, logs, procs, rotation
from llmgw.agent.child import Child
from llmgw.agent.devices import Devices
from llmgw.agent.handles import Handle
from llmgw.agent.ports import Ports
from llmgw.agent.weights import Weights
from llmgw.domain.engines import InstalledEngine, Launch, LaunchPlan
from llmgw.domain.replicas import ReplicaSpec
from llmgw.domain.restarts import RestartPolicy
from llmgw.errors import FileError, LlmgwError, ProviderError
from llmgw.providers.base import Provider
from llmgw.system.clock import Clock
from llmgw.system.http import Http

_LOG = logging.getLogger("llmgw.agent.starting")


@frozen
class SupervisorSettings:
    """How engines are run on this node.

    Args:
        work_dir: the agent's own directory; replicas live in `replicas/` below it.
        mgmt_host: address engines listen on; gateways reach them there.
        log_lines: lines kept of a log for `logs`.
        stop_timeout_s: from SIGTERM to SIGKILL.
        health_interval_s: between two health questions to a ready engine.
        start_deadline_s: without a sign of progress, for specs that say nothing.
        hang_timeout_s: an engine that does not answer and shows no sign of work for so long is started anew.
        log_limit_bytes: an engine's log is rotated when it grows past this.
        gpu_wait_s: how long after an engine's end the memory of its GPUs is waited for.
        environ: the agent's own environment; only PATH, HOME and the like are taken from it.
    """

    work_dir: Path
    mgmt_host: str
    log_lines: int = 512
    stop_timeout_s: float = 60.0
    health_interval_s: float = 2.0
    start_deadline_s: float = 600.0
    hang_timeout_s: float = 600.0
    log_limit_bytes: int = 64 << 20
    gpu_wait_s: float = 60.0
    restarts: RestartPolicy = field(factory=RestartPolicy)
    environ: Mapping[str, str] = field(factory=dict, repr=False)


@frozen
class Tools:
    """What replicas work with; handed to the supervisor, never made here.

    Args:
        engine: the engine of that name and version when it is ready on this node.
        engine_words: the engine's own sentence, for when it is not.
    """

    settings: SupervisorSettings
    providers: Mapping[str, Provider]
    engine: Callable[[str, str], InstalledEngine | None]
    engine_words: Callable[[str], str]
    weights: Weights
    http: Http
    clock: Clock
    ports: Ports
    random: random.Random
    devices: Devices


def start_engine(
    tools: Tools, spec: ReplicaSpec, engine: InstalledEngine, model_path: str, restarts: int
) -> tuple[Handle, Child]:
    """Start the engine for `spec` as a process of its own that outlives the agent.

    Args:
        restarts: how often it was started before, for the record.

    Raises:
        LlmgwError: it could not be started; nothing is left running.
    """
    settings = tools.settings
    where = handles.replica_dir(settings.work_dir, spec.replica_id)
    handles.make_replica_dir(where)
    key_file = str(handles.write_key(where, spec.api_key)) if spec.api_key else ""
    if not spec.api_key:
        (where / handles.KEY_FILE).unlink(missing_ok=True)
    host = settings.mgmt_host
    port = tools.ports.take(host)
    try:
        plan = LaunchPlan(
            replica_id=spec.replica_id,
            model_name=spec.model_name,
            model_path=model_path,
            host=host,
            port=port,
            context=spec.context,
            slots=spec.slots,
            gpus=spec.gpus,
            api_key_file=key_file,
            work_dir=str(where),
            args=spec.args,
            env=spec.env,
        )
        launch = _launch(tools.providers[spec.engine], engine, plan)
        if spec.api_key and any(spec.api_key in each for each in launch.argv):
            raise ProviderError(f"the provider `{spec.engine}` puts the API key on the command line", cause="refused")
        marker = child.new_marker(spec.replica_id, spec.epoch)
        handle = handles.new_handle(
            spec,
            launch,
            where,
            version=engine.version,
            address=(host, port),
            marker=marker,
            started=tools.clock.now(),
            restarts=restarts,
            gpu_free=tools.devices.before(spec.gpus),
        )
        environ = child.engine_environ(settings.environ, launch.env, where)
        if launch.key_env and spec.api_key:
            environ[launch.key_env] = spec.api_key
        environ[procs.MARKER] = marker
        environ[procs.HANDLE] = handles.encode(handle)
        started = child.start(
            launch.argv, environ, where, rotation.start_new(where / logs.CURRENT, where / logs.PREVIOUS)
        )
    except BaseException:
        tools.ports.give_back(port)
        raise
    handle = handle.with_identity(started.identity, started.keeper)
    save(handle)
    return handle, started


def save(handle: Handle) -> None:
    """Write the handle; when that fails (a full disk) the engine still carries it in its environment."""
    try:
        handles.save(handle)
    except FileError as error:
        _LOG.warning("%s; an agent started later finds the engine by its environment", error.words())


def forget(handle: Handle) -> None:
    """The engine has ended: a later agent need not look for it."""
    with contextlib.suppress(OSError):
        handles.forget(Path(handle.dir))


def _launch(provider: Provider, engine: InstalledEngine, plan: LaunchPlan) -> Launch:
    try:
        return provider.launch(engine, plan)
    except LlmgwError:
        raise
    except Exception as error:  # a plugin's bug must become this replica's words, not the agent's end
        _LOG.exception("the provider of %s failed", engine.name)
        raise ProviderError(
            f"the provider of `{engine.name}` cannot launch it", cause=f"{type(error).__name__}: {error}"
        ) from error
