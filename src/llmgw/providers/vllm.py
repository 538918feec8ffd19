"""vLLM: named by the agent's configuration, never installed; one node per replica."""

from __future__ import annotations

from llmgw.domain.engines import Capabilities, Check, InstalledEngine, Launch, LaunchPlan, NamedEngine, NamedProbe
from llmgw.errors import ProviderError
from llmgw.providers.args import refuse_reserved
from llmgw.providers.namedonly import ENDPOINTS, NamedOnly, device_env

_KEYS = ("bin", "launch_mode", "ray_bin")
_RESERVED = (
    "--model", "--host", "--port", "--served-model-name", "--api-key", "--max-model-len", "--max-num-seqs",
    "--tensor-parallel-size", "-tp", "--uds", "--config",
)  # fmt: skip


class Vllm(NamedOnly):
    """The vLLM provider."""

    name = "vllm"
    named_by = "engines.vllm.bin"
    capabilities = Capabilities(
        installable=False,
        formats=("safetensors",),
        multi_node=True,
        endpoints=ENDPOINTS,
        metrics="/metrics",
    )

    def named(self, engine: NamedEngine) -> NamedProbe:
        unknown = sorted(set(engine.settings) - set(_KEYS))
        binary = engine.settings.get("bin", "")
        mode = engine.settings.get("launch_mode", "mp")
        cause = ""
        if unknown:
            cause = f"unknown key `{unknown[0]}`, known are {', '.join(f'`{key}`' for key in _KEYS)}"
        elif not binary.startswith("/"):
            cause = "`bin` must be an absolute path"
        elif mode not in ("mp", "ray"):
            cause = f"`launch_mode` is {mode!a}, it must be `mp` or `ray`"
        if cause:
            raise ProviderError(
                "`engines.vllm` of the agent's configuration is not usable",
                cause=cause,
                hint="write `bin: /path/to/vllm`",
            )
        # it imports its whole stack to say its version: seconds of work, so not at every re-check
        check = Check("vllm --version", (binary, "--version"), stdout=r"^[0-9]+\.[0-9]+\S*", timeout_s=180.0)
        return NamedProbe(binary, (check,), r"^([0-9]+\.[0-9]+\S*)")

    def launch(self, engine: InstalledEngine, plan: LaunchPlan) -> Launch:
        refuse_reserved(plan.args, _RESERVED)
        argv = [
            engine.binary, "serve", plan.model_path,
            "--host", plan.host,
            "--port", str(plan.port),
            "--served-model-name", plan.model_name,
            "--max-model-len", str(plan.context),
            "--max-num-seqs", str(plan.slots),
        ]  # fmt: skip
        if len(plan.gpus) > 1:
            argv += ["--tensor-parallel-size", str(len(plan.gpus))]
        env = {
            **device_env(plan.gpus),
            "VLLM_HOST_IP": plan.host,
            "VLLM_NO_USAGE_STATS": "1",
        }
        return Launch(
            argv=(*argv, *plan.args),
            env={**env, **plan.env},
            health_path="/health",
            key_path="/v1/models",
            context_at="/data/0/max_model_len",
            key_env="VLLM_API_KEY",
        )
