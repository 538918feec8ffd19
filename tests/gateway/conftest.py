"""One gateway process for a whole file of tests, and a fresh one for those that end it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from gateway_fakes import Gateway, gateway


@pytest.fixture(scope="module")
def shared_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("gateway")) as made:
        yield made


@pytest.fixture
def plane(shared_gateway: Gateway) -> Iterator[Gateway]:
    """The file's gateway; the test's engines end with the test."""
    yield shared_gateway
    shared_gateway.forget()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Gateway]]:
    """`start("--queue", "2")`: a gateway of the test's own."""
    with ExitStack() as stack:
        count = 0

        def begin(*flags: str, control: bool = True, secure: bool = False) -> Gateway:
            nonlocal count
            count += 1
            return stack.enter_context(gateway(tmp_path / f"g{count}", *flags, control=control, secure=secure))

        yield begin
