import socket

import pytest

from echelon.backends.connect.interfaces import Interface, address_towards, default_address, interfaces, is_loopback


def test_the_loopback_interface_is_known():
    (loopback,) = (interface for interface in interfaces() if interface.is_loopback)
    assert loopback.is_up
    assert loopback.address(socket.AF_INET) == "127.0.0.1"
    assert loopback.mtu > 1000


def test_all_interfaces_are_found_in_their_order():
    assert [interface.name for interface in interfaces()] == [name for _, name in sorted(socket.if_nameindex())]


def test_an_interface_has_addresses_of_two_kinds():
    interface = Interface("x", ("10.0.0.1", "10.0.0.2", "fd00::1"), 1500, True, False)
    assert interface.address(socket.AF_INET) == "10.0.0.1"
    assert interface.address(socket.AF_INET6) == "fd00::1"
    assert Interface("x", ("10.0.0.1",), 1500, True, False).address(socket.AF_INET6) is None


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.1.1", True), ("::1", True), ("::1%lo", True), ("10.0.0.1", False), ("fe80::1%eth0", False), ("lo", False)],
)
def test_loopback_addresses(address, expected):
    assert is_loopback(address) is expected


def test_the_way_to_this_host_begins_on_this_host():
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("::1") == "::1"


def test_the_way_to_everywhere_begins_at_an_address_of_this_host_if_there_is_one():
    mine = {address for interface in interfaces() for address in interface.addresses}
    assert default_address(socket.AF_INET) in {None, *mine}
    assert default_address(socket.AF_INET6) in {None, *mine}
