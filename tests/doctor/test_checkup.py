"""The facts are looked for on the host that runs the tests."""

import errno
import os
import socket
import tempfile

import pytest

from echelon.doctor import checkup


def test_a_port_in_use_is_found():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert checkup.listening_problem("127.0.0.1", server.getsockname()[1]) == os.strerror(errno.EADDRINUSE)
    assert checkup.listening_problem("127.0.0.1", 0) == ""


def test_a_port_of_another_host_is_not_this_one_s_to_judge():
    assert checkup.listening_problem("192.0.2.7", 29500) == ""


def test_this_host_reaches_itself():
    assert checkup.loopback_problem("127.0.0.1") == ""
    assert checkup.loopback_problem("192.0.2.7") == os.strerror(errno.EADDRNOTAVAIL)


def test_names_are_looked_up_once_each():
    assert "127.0.0.1" in checkup.addresses_of("localhost")
    assert checkup.addresses_of("no-such-host.invalid") == []
    assert checkup.addresses_of("::1") == ["::1"]


def test_the_range_of_ports_is_read():
    ports = checkup.port_range()
    assert 0 < ports.start < ports.stop <= 1 << 16


def test_a_process_that_cannot_be_watched_is_found(monkeypatch):
    assert checkup.pidfd_problem() == ""

    def refuse(pid):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert checkup.pidfd_problem() == os.strerror(errno.ENOSYS)


def test_the_clock_is_asked_and_not_set():
    assert checkup.clock_is_synchronised() in (True, False, None)


def test_a_gpu_that_fails_is_named(monkeypatch):
    assert checkup.gpus()[1] == ""
    monkeypatch.setattr(checkup.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(checkup.torch.cuda, "get_device_name", lambda number: f"stand-in {number}")

    def fail(*_, **__):
        raise RuntimeError("CUDA error: out of order\nand more lines")

    monkeypatch.setattr(checkup.torch, "ones", fail)
    assert checkup.gpus() == (["stand-in 0"], "CUDA error: out of order")


def test_a_folder_that_others_can_enter_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert checkup.secret_file_problem({}) == ""
    assert not list(tmp_path.iterdir()), "the folder was left behind"
    (tmp_path / f"echelon-{os.geteuid()}").mkdir(0o755)
    assert "is not a folder that only this user can enter: remove it" in checkup.secret_file_problem({})


def test_a_master_port_in_use_stops_a_run(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
        environ |= {"RANK": "0", "WORLD_SIZE": "2"}
        (finding,) = (finding for finding in checkup.examine(environ) if finding.check == "MASTER_PORT")
        assert finding.status == "error"
        (finding,) = (
            finding for finding in checkup.examine({**environ, "RANK": "1"}) if finding.check == "MASTER_PORT"
        )
        assert finding.status == "ok"


@pytest.mark.parametrize("port", ["http", "0", "65536"])
def test_a_port_that_is_none_is_left_to_the_variables_check(port):
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "2"}
    assert [finding.check for finding in checkup.examine(environ) if finding.status == "error"] == ["variables"]
