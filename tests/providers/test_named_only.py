"""vLLM and SGLang: never installed, probed and launched when the agent's configuration names them."""

from __future__ import annotations

import attrs
import pytest
from test_choose import node
from test_llamacpp import PLAN

from llmgw.domain.engines import EngineSpec, InstalledEngine, NamedEngine
from llmgw.errors import ProviderError
from llmgw.providers.sglang import Sglang
from llmgw.providers.vllm import Vllm

TWO = attrs.evolve(PLAN, gpus=("GPU-a", "GPU-b"), args=("--dtype", "auto"), env={"X": "1"})


@pytest.mark.parametrize("provider", [Vllm(), Sglang()])
def test_asking_for_an_installation_says_what_to_write(provider: Vllm | Sglang) -> None:
    assert not provider.capabilities.installable
    with pytest.raises(ProviderError) as caught:
        provider.recipe(EngineSpec(provider.name, "1"), node(), ())
    assert f"engines.{provider.name}." in caught.value.hint


def test_vllm_is_launched_with_its_plan() -> None:
    launch = Vllm().launch(InstalledEngine("vllm", "0.33.0", "named", "", "/opt/vllm/bin/vllm"), TWO)
    argv = list(launch.argv)
    assert argv[:3] == ["/opt/vllm/bin/vllm", "serve", "/w/m.gguf"]
    for flag, value in (("--served-model-name", "m"), ("--max-model-len", "1024"), ("--tensor-parallel-size", "2")):
        assert argv[argv.index(flag) + 1] == value
    assert argv[-2:] == ["--dtype", "auto"]
    assert launch.env["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"
    assert launch.env["SPT_NOENV"] == "1"
    assert launch.key_env == "VLLM_API_KEY"
    assert "--api-key" not in argv


def test_sglang_is_launched_with_its_plan() -> None:
    launch = Sglang().launch(InstalledEngine("sglang", "0.5.23", "named", "", "/opt/sg/bin/python"), TWO)
    argv = list(launch.argv)
    assert argv[:3] == ["/opt/sg/bin/python", "-m", "sglang.launch_server"]
    for flag, value in (("--model-path", "/w/m.gguf"), ("--tp-size", "2"), ("--context-length", "1024")):
        assert argv[argv.index(flag) + 1] == value
    assert launch.health_timeout_s > 20


@pytest.mark.parametrize(
    ("provider", "settings", "cause"),
    [
        (Vllm(), {"bin": "vllm"}, "absolute path"),
        (Vllm(), {"bin": "/v", "launch_mode": "slurm"}, "must be `mp` or `ray`"),
        (Vllm(), {"bin": "/v", "python": "/p"}, "unknown key `python`"),
        (Sglang(), {}, "absolute path"),
        (Sglang(), {"python": "/p", "bin": "/b"}, "unknown key `bin`"),
    ],
)
def test_wrong_settings_are_told(provider: Vllm | Sglang, settings: dict[str, str], cause: str) -> None:
    with pytest.raises(ProviderError) as caught:
        provider.named(NamedEngine(provider.name, settings))
    assert cause in caught.value.cause
