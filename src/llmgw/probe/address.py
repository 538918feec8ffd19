"""The address other machines reach this node at: where engines listen. Never a fabric address."""

from __future__ import annotations

import socket

import psutil
from attrs import frozen

from llmgw.errors import LinkError


@frozen
class Address:
    """`interface` is None when no interface of this machine has the address (it was configured by hand)."""

    address: str
    interface: str | None


def management_address(
    addr: str | None, interface: str | None, server_host: str | None, server_port: int
) -> Address | None:
    """Find the management address: the configured one, the interface's, or the one on the route to the server.

    Returns:
        None when nothing was configured and no server is known.

    Raises:
        LinkError: the interface has no address, or there is no route to the server; with words.
    """
    if addr:
        return Address(addr, _interface_of(addr))
    if interface:
        return Address(_address_of(interface), interface)
    if server_host:
        routed = _address_towards(server_host, server_port)
        return Address(routed, _interface_of(routed))
    return None


def _address_of(interface: str) -> str:
    addresses = psutil.net_if_addrs()
    if interface not in addresses:
        raise LinkError(
            f"`mgmt_interface` names `{interface}`, which is not on this node",
            hint=f"choose one of {', '.join(f'`{name}`' for name in sorted(addresses))}",
        )
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in addresses[interface]:
            if entry.family == family and not entry.address.lower().startswith("fe80:"):
                return str(entry.address)
    raise LinkError(f"`mgmt_interface` names `{interface}`, which has no IP address yet")


def _address_towards(host: str, port: int) -> str:
    """The source address the kernel would use: connecting a datagram socket picks the route and sends nothing."""
    try:
        choices = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise LinkError(f"the server's name `{host}` cannot be resolved", cause=error.strerror or str(error)) from error
    cause = "no address"
    for family, kind, proto, _, target in choices:
        try:
            with socket.socket(family, kind, proto) as sock:
                sock.connect(target)
                return str(sock.getsockname()[0])
        except OSError as error:
            cause = error.strerror or str(error)
    raise LinkError(f"there is no route to the server `{host}`", cause=cause)


def _interface_of(address: str) -> str | None:
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.split("%", 1)[0] == address for entry in entries):
            return name
    return None
