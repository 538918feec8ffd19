"""A profile: one model as clients name it, and how it is to be served."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen


@frozen
class Profile:
    """One served model.

    Args:
        name: the model name clients send.
        model: a path in a node's model_dirs, an absolute path, `file:///…`, `hf:ORG/REPO@REV:FILE`,
            `https://…#sha256=…` or `pypi:PACKAGE==VERSION:PATH#sha256=…`.
        engine: provider name.
        replicas: how many.
        aliases: other names clients may send.
        node_selector: labels a node must have.
        context: tokens per slot.
        slots: parallel requests per replica.
        gpus: per replica, None means auto.
        nodes: per replica; more than one needs an island.
        memory_bytes: overrides the estimate, None means auto.
        args, env: handed to the engine as they are.
        start_deadline_s: seconds without progress until the start counts as failed, None means auto.
        max_tokens, default_max_tokens, default_temperature, min_temperature, max_temperature: defaults and bounds of
            requests, None for none; see `routing.Caps`.
    """

    name: str
    model: str
    engine: str = "llama.cpp"
    replicas: int = 1
    aliases: tuple[str, ...] = ()
    node_selector: Mapping[str, str] = field(factory=dict)
    context: int = 4096
    slots: int = 4
    gpus: int | None = None
    nodes: int = 1
    memory_bytes: int | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(factory=dict)
    start_deadline_s: float | None = None
    max_tokens: int | None = None
    default_max_tokens: int | None = None
    default_temperature: float | None = None
    min_temperature: float | None = None
    max_temperature: float | None = None
