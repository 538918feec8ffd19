"""SGLang: named by the agent's configuration (its Python), never installed; one node per replica."""

from __future__ import annotations

from llmgw.domain.engines import Capabilities, Check, InstalledEngine, Launch, LaunchPlan, NamedEngine, NamedProbe
from llmgw.errors import ProviderError
from llmgw.providers.args import refuse_reserved
from llmgw.providers.namedonly import ENDPOINTS, NamedOnly, device_env

_VERSION_PROGRAM = "import importlib.metadata as m; print('sglang', m.version('sglang'))"
_RESERVED = (
    "--model-path", "--model", "--host", "--port", "--served-model-name", "--api-key", "--context-length",
    "--max-running-requests", "--tp-size", "--tp", "--tensor-parallel-size", "--config",
)  # fmt: skip


class Sglang(NamedOnly):
    """The SGLang provider."""

    name = "sglang"
    named_by = "engines.sglang.python"
    capabilities = Capabilities(
        installable=False,
        formats=("safetensors",),
        multi_node=True,
        endpoints=ENDPOINTS,
        metrics="/metrics",
    )

    def named(self, engine: NamedEngine) -> NamedProbe:
        unknown = sorted(set(engine.settings) - {"python"})
        python = engine.settings.get("python", "")
        if unknown or not python.startswith("/"):
            raise ProviderError(
                "`engines.sglang` of the agent's configuration is not usable",
                cause=f"unknown key `{unknown[0]}`" if unknown else "`python` must be an absolute path",
                hint="write `python: /path/to/venv/bin/python`",
            )
        version = Check(
            "the version of sglang", (python, "-c", _VERSION_PROGRAM), stdout=r"^sglang [0-9]\S*", quick=True
        )
        # metadata alone does not show that it can be imported on this node
        runs = Check(
            "sglang.launch_server --help", (python, "-m", "sglang.launch_server", "--help"), stdout="--model-path",
            timeout_s=180.0,
        )  # fmt: skip
        return NamedProbe(python, (version, runs), r"^sglang ([0-9]\S*)")

    def launch(self, engine: InstalledEngine, plan: LaunchPlan) -> Launch:
        refuse_reserved(plan.args, _RESERVED)
        argv = [
            engine.binary, "-m", "sglang.launch_server",
            "--model-path", plan.model_path,
            "--host", plan.host,
            "--port", str(plan.port),
            "--served-model-name", plan.model_name,
            "--context-length", str(plan.context),
            "--max-running-requests", str(plan.slots),
            "--enable-metrics",
        ]  # fmt: skip
        if len(plan.gpus) > 1:
            argv += ["--tp-size", str(len(plan.gpus))]
        env = {
            **device_env(plan.gpus),
            "SGLANG_HOST_IP": plan.host,
        }
        return Launch(
            argv=(*argv, *plan.args),
            env={**env, **plan.env},
            # it generates a token, which takes a second at least
            health_path="/health",
            health_timeout_s=25.0,
        )
