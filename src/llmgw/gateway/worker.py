"""`llmgw gateway`: one data plane process. Started by `llmgw server`, and outlives it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from llmgw.errors import UnitError, UsageError
from llmgw.units import parse_duration

if TYPE_CHECKING:
    from llmgw.gateway.settings import Options
    from llmgw.gateway.tls import FrontFiles


class _Duration(click.ParamType[float]):
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            return parse_duration(str(value))
        except UnitError as error:
            self.fail(f"{error.message}; {error.hint}", param, ctx)


def _listen(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"`{text}` is not an address to listen on", hint="write HOST:PORT, such as `127.0.0.1:8080`")
    return host.removeprefix("[").removesuffix("]"), int(port)


@click.command("gateway", hidden=True)
@click.option("--control", required=True, help="Unix socket of the control process.")
@click.option("--admin", required=True, help="Unix socket of the admin API and the page.")
@click.option("--listen", required=True, help="HOST:PORT for clients; port 0 takes any free one.")
@click.option("--tls-cert", default="", help="Certificate chain for clients, PEM.")
@click.option("--tls-key", default="", help="Its private key, PEM.")
@click.option("--tls-client-ca", default="", help="CAs of operators' certificates, PEM.")
@click.option("--tls-client-crl", default="", help="Revoked operator certificates, PEM.")
@click.option("--index", default=0, help="Number of this gateway process.")
@click.option("--queue", default=64, help="Requests that may wait per model.")
@click.option("--queue-timeout", type=_Duration(), default="30s")
@click.option("--first-token-timeout", type=_Duration(), default="10m")
@click.option("--token-gap-timeout", type=_Duration(), default="60s")
@click.option("--total-timeout", type=_Duration(), default="1h")
@click.option("--drain-timeout", type=_Duration(), default="60s")
@click.option("--connect-timeout", type=_Duration(), default="3s")
@click.option("--head-timeout", type=_Duration(), default="15s")
@click.option("--keepalive", type=_Duration(), default="75s")
@click.option("--max-body", default=64 << 20, help="Bytes of a request body.")
@click.option("--workers", default=1, help="How many gateway processes share the address.")
@click.option("--access-log", default="", help="File for one JSON line per request.")
@click.option("--access-log-sample", default=1.0, help="Part of the requests that is logged, 0 to 1.")
@click.option("--cors-origins", default="", help="Origin whose pages may use the API, or `*`.")
@click.option("--settings", default="", help="Told back to the control process.")
def command(
    control: str,
    admin: str,
    listen: str,
    tls_cert: str,
    tls_key: str,
    tls_client_ca: str,
    tls_client_crl: str,
    index: int,
    queue: int,
    queue_timeout: float,
    first_token_timeout: float,
    token_gap_timeout: float,
    total_timeout: float,
    drain_timeout: float,
    connect_timeout: float,
    head_timeout: float,
    keepalive: float,
    max_body: int,
    workers: int,
    access_log: str,
    access_log_sample: float,
    cors_origins: str,
    settings: str,
) -> None:
    """Serve /v1 on HOST:PORT by the routes of the control process (internal)."""
    from llmgw.gateway.settings import Options
    from llmgw.gateway.tls import FrontFiles

    if bool(tls_cert) != bool(tls_key):
        raise UsageError("`--tls-cert` and `--tls-key` go together", hint="give both or none")
    options = Options(
        queue=queue,
        queue_timeout_s=queue_timeout,
        first_token_timeout_s=first_token_timeout,
        token_gap_timeout_s=token_gap_timeout,
        total_timeout_s=total_timeout,
        drain_timeout_s=drain_timeout,
        connect_timeout_s=connect_timeout,
        head_timeout_s=head_timeout,
        keepalive_s=keepalive,
        max_body_bytes=max_body,
        workers=workers,
        access_log=access_log,
        access_log_sample=access_log_sample,
        cors_origins=cors_origins,
        settings=settings,
    )
    tls = FrontFiles(tls_cert, tls_key, tls_client_ca, tls_client_crl) if tls_cert else None
    run(control, admin, _listen(listen), tls, index, options)


def run(
    control: str,
    admin: str,
    listen: tuple[str, int],
    tls: FrontFiles | None,
    index: int,
    options: Options,
) -> None:
    """Serve until SIGTERM, SIGINT or `drain`; returns when the open answers are finished or the deadline has passed.

    Raises:
        AddressInUse: the address is taken.
        LlmgwError: the address cannot be listened on, or the certificate cannot be loaded.
    """
    import asyncio
    import gc
    import logging

    from llmgw.gateway.loop import new_loop
    from llmgw.gateway.service import Service
    from llmgw.system import unpacked

    unpacked.hold()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s gateway {index} %(levelname)s %(message)s")
    logging.raiseExceptions = False
    service = Service(control, admin, listen, tls, index, options)
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(service.run())
