"""`llmgw ctl cert …`: certificates for TLS between server, nodes and operators, in a directory; needs no server."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from llmgw.pki.authority import Issued

NODE_DIR = Path("/etc/llmgw")

_directory = click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("pki"),
    show_default=True,
    help="Directory of the CA.",
)
_days = click.option("--days", type=click.IntRange(1, 36500), default=365, show_default=True, help="Valid for so long.")
_replace = click.option("--replace", is_flag=True, help="Write over the certificate of that name, with a new key.")


@click.group("cert", help="Make and list certificates (offline, in a directory).")
def cert() -> None:
    pass


@cert.command("init")
@_directory
@click.option("--name", help="Common name of the CA; a new one by default, so that two in use are told apart.")
@click.option("--days", type=click.IntRange(1, 36500), default=3650, show_default=True, help="Valid for so long.")
def init(directory: Path, name: str | None, days: int) -> None:
    """Make a CA in a directory."""
    from llmgw.pki.authority import init_ca

    made = init_ca(directory, name, days=days, now=time.time())
    click.echo(f"made the CA `{made.cert}`")
    click.echo(f"its key is `{made.key}`: whoever has it can make nodes, operators and servers", err=True)


@cert.command("issue-server")
@click.argument("name")
@_directory
@click.option("--san", "sans", multiple=True, help="Another host name or IP address agents dial; may be repeated.")
@_days
@_replace
def issue_server(name: str, directory: Path, sans: tuple[str, ...], days: int, replace: bool) -> None:
    """Issue the certificate of the server that agents dial as NAME."""
    from llmgw.pki.authority import issue_server as issue

    _say(issue(directory, name, sans, days=days, replace=replace, now=time.time()), "agents.tls in server.yaml")


@cert.command("issue-client")
@click.argument("node")
@_directory
@_days
@_replace
def issue_client(node: str, directory: Path, days: int, replace: bool) -> None:
    """Issue the certificate of the node NODE (its `node_id`)."""
    from llmgw.pki.authority import issue_node as issue

    _say(
        issue(directory, node, days=days, replace=replace, now=time.time()),
        "copy them to the node; tls in agent.yaml",
        NODE_DIR,
    )


@cert.command("issue-operator")
@click.argument("name")
@_directory
@_days
@_replace
def issue_operator(name: str, directory: Path, days: int, replace: bool) -> None:
    """Issue the certificate of the operator NAME."""
    from llmgw.pki.authority import issue_operator as issue

    _say(issue(directory, name, days=days, replace=replace, now=time.time()), "")


@cert.command("renew")
@click.argument("name")
@_directory
@click.option("--days", type=click.IntRange(1, 36500), help="Valid for so long; as long as before when left out.")
def renew(name: str, directory: Path, days: int | None) -> None:
    """Issue the certificate NAME anew: same role and hosts, a new key."""
    from llmgw.pki.authority import renew as issue

    _say(issue(directory, name, days=days, now=time.time()), "")


@cert.command("revoke")
@click.argument("certificate", metavar="NAME|SERIAL")
@_directory
def revoke(certificate: str, directory: Path) -> None:
    """Put a certificate on the revocation list of its CA."""
    from llmgw.pki.authority import revoke as put

    done = put(directory, certificate, now=time.time())
    click.echo(f"serial {done.serial} {'was revoked already' if done.before else 'is revoked'}: `{done.crl}`")
    click.echo("a server with `agents.tls.crl` set to that file cuts it off within seconds", err=True)


@cert.command("show")
@click.argument("names", nargs=-1, required=True, metavar="NAME|FILE...")
@_directory
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="How to print.")
def show(names: tuple[str, ...], directory: Path, output: str) -> None:
    """Show certificates in full."""
    import attrs

    from llmgw.ctl.tables import pairs
    from llmgw.errors import UsageError
    from llmgw.pki.listing import show_certificate

    found = []
    for name in names:
        path = Path(name) if "/" in name or name.endswith(".pem") else directory / f"{name}.pem"
        if not path.is_file():
            raise UsageError(f"`{path}` is not there", hint=f"`llmgw ctl cert list --dir {directory}`")
        found.append(show_certificate(path, time.time()))
    if output == "json":
        click.echo(json.dumps({"certificates": [attrs.asdict(each) for each in found]}, indent=2))
        return
    for each in found:
        items = [
            ("File", each.path), ("Name", each.name), ("Role", each.role), ("Serial", each.serial),
            ("Issuer", each.issuer), ("From", _day(each.not_before)), ("Until", _day(each.not_after)),
            ("Hosts", ", ".join(each.sans)), ("Fingerprint", each.fingerprint), ("Standing", each.words),
        ]  # fmt: skip
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        for line in pairs(items, columns=columns, colour=False):
            click.echo(line)


def _day(at: float | None) -> str | None:
    return None if at is None else time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))


@cert.command("list")
@_directory
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", help="How to print.")
def list_(directory: Path, output: str) -> None:
    """List the certificates in a directory and when they end."""
    import attrs

    from llmgw.ctl.tables import render
    from llmgw.pki.listing import list_certificates

    found = list_certificates(directory, time.time())
    if output == "json":
        click.echo(json.dumps({"certificates": [attrs.asdict(each) for each in found]}, indent=2))
        return
    if not found:
        click.echo(f"no certificates in `{directory}`", err=True)
        return
    rows = [
        [Path(each.path).name, each.role, each.name, each.serial, ", ".join(each.sans), each.words] for each in found
    ]
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in render(["FILE", "ROLE", "NAME", "SERIAL", "HOSTS", "STANDING"], rows, columns=columns):
        click.echo(line)


def _say(made: Issued, where: str, there: Path | None = None) -> None:
    """`there`: the directory the files are copied to, None for where they are."""
    click.echo(f"issued `{made.cert}`, key `{made.key}`")
    if where:
        ca, own, key = (there / path.name if there else path.absolute() for path in (made.ca, made.cert, made.key))
        click.echo(f"{where}: {{ca: {ca}, cert: {own}, key: {key}}}", err=True)
    if made.bundle is not None:
        click.echo(f"all three in one file: `{made.bundle}`", err=True)
