"""Which of a host's addresses is used, on hosts that are only told of."""

import logging
import socket

import pytest

from echelon.backends.connect.interfaces import Interface
from echelon.errors import LaunchError
from echelon.launch import interface as interface_module
from echelon.launch.environment import read
from echelon.launch.interface import with_local_address

NAMES = {"node1": ["10.0.0.1"], "here": ["127.0.1.1"], "six": ["fd00::1"], "localhost": ["127.0.0.1"]}


@pytest.fixture(autouse=True)
def host(monkeypatch):
    """A host with three interfaces, whose own name is `here`."""
    mine = (
        Interface("lo", ("127.0.0.1", "::1"), 65536, True, True),
        Interface("eth0", ("10.0.0.2", "fd00::2"), 1500, True, False),
        Interface("ib0", ("10.1.0.2",), 4092, True, False),
    )

    def getaddrinfo(name, port, **_):
        if name not in NAMES and not name[0].isdecimal():
            raise socket.gaierror(-2, "Name or service not known")
        return [(None, None, None, None, (address, 0)) for address in NAMES.get(name, [name])]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(interface_module, "interfaces", lambda: mine)
    monkeypatch.setattr(interface_module, "default_address", {socket.AF_INET: "10.0.0.2", socket.AF_INET6: None}.get)


def chosen(master, **environ):
    """Returns where this rank looks for rank 0, and the address it is given."""
    common = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1", "MASTER_ADDR": master}
    launched = with_local_address(read(common), environ)
    return launched.master_addr, launched.local_address


def test_the_way_to_rank_0_needs_no_choice():
    assert chosen("node1") == ("node1", None)
    assert chosen("10.0.0.1") == ("10.0.0.1", None)
    assert chosen("not-known-yet") == ("not-known-yet", None)


def test_an_interface_is_chosen_by_its_name_and_the_kind_of_rank_0_s_address():
    assert chosen("node1", ECHELON_INTERFACE="ib0") == ("node1", "10.1.0.2")
    assert chosen("six", ECHELON_INTERFACE="eth0") == ("six", "fd00::2")
    assert chosen("not-known-yet", ECHELON_INTERFACE="eth0") == ("not-known-yet", "10.0.0.2")


def test_a_name_that_means_loopback_on_its_own_host_is_replaced_there():
    assert chosen("here") == ("10.0.0.2", "10.0.0.2")
    assert chosen("here", ECHELON_INTERFACE="ib0") == ("10.1.0.2", "10.1.0.2")


def test_without_a_way_to_anywhere_an_interface_is_asked_for(monkeypatch):
    monkeypatch.setattr(interface_module, "default_address", {}.get)
    with pytest.raises(LaunchError, match=r"MASTER_ADDR=here is the loopback address 127\.0\.1\.1 .*ECHELON_INTERFACE"):
        chosen("here")


def test_on_one_host_nothing_is_chosen():
    launched = read({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"})
    assert with_local_address(launched, {"ECHELON_INTERFACE": "no such"}) is launched


def test_an_interface_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(
        LaunchError, match="ECHELON_INTERFACE=eth7: there is no such interface; use one of lo, eth0, ib0"
    ):
        chosen("node1", ECHELON_INTERFACE="eth7")


def test_an_interface_of_the_other_kind_is_refused():
    with pytest.raises(LaunchError, match="ECHELON_INTERFACE=ib0 has no IPv6 address, but MASTER_ADDR has"):
        chosen("six", ECHELON_INTERFACE="ib0")


def test_torch_s_spelling_is_mentioned_unless_ours_is_there(caplog):
    with caplog.at_level(logging.WARNING, "echelon"):
        chosen("node1", GLOO_SOCKET_IFNAME="eth0", ECHELON_INTERFACE="eth0")
        assert not caplog.messages
        chosen("node1", GLOO_SOCKET_IFNAME="eth0")
    (message,) = caplog.messages
    assert message.startswith("GLOO_SOCKET_IFNAME=eth0 is for torch's own connections: set ECHELON_INTERFACE")
