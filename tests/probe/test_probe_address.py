from __future__ import annotations

import pytest

from llmgw.errors import LinkError
from llmgw.probe.address import Address, management_address


def test_a_configured_address_wins_over_everything():
    assert management_address("192.0.2.9", "lo", "127.0.0.1", 7443) == Address("192.0.2.9", None)


def test_an_interface_gives_its_address():
    assert management_address(None, "lo", None, 7443) == Address("127.0.0.1", "lo")


def test_the_route_to_the_server_gives_the_address_without_a_connection():
    assert management_address(None, None, "127.0.0.1", 1) == Address("127.0.0.1", "lo")


def test_without_anything_to_go_by_it_is_unknown():
    assert management_address(None, None, None, 7443) is None


def test_an_interface_that_is_not_there_is_refused_with_the_choices():
    with pytest.raises(LinkError, match="`nope7`") as caught:
        management_address(None, "nope7", "127.0.0.1", 7443)
    assert "`lo`" in caught.value.hint


def test_a_server_name_that_means_nothing_is_said():
    with pytest.raises(LinkError, match="cannot be resolved"):
        management_address(None, None, "no-such-host.invalid", 7443)
