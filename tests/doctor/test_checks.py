"""Every check, with facts under which it passes and facts under which it does not."""

import pytest

from echelon.backends.connect.interfaces import Interface
from echelon.doctor import checks
from echelon.doctor.checks import Finding, Status

LO = Interface("lo", ("127.0.0.1", "::1"), 65536, True, True)
ETH = Interface("eth0", ("10.0.0.2", "fd00::2"), 1500, True, False)
DOWN = Interface("eth1", (), 1500, False, False)
THIN = Interface("tun0", ("10.9.0.2",), 576, True, False)
GOOD_LOOPBACK = {"127.0.0.1": "", "::1": ""}

CASES = [
    (checks.check_loopback, [GOOD_LOOPBACK], {}, "ok", "127.0.0.1 and ::1"),
    (checks.check_loopback, [GOOD_LOOPBACK | {"::1": "Cannot assign"}], {}, "ok", "no IPv6 (Cannot assign)"),
    (checks.check_loopback, [GOOD_LOOPBACK | {"127.0.0.1": "no"}], {}, "ok", "::1; no IPv4 (no)"),
    (checks.check_loopback, [{"127.0.0.1": "down", "::1": "down"}], {}, "error", "ip link set lo up"),
    (
        checks.check_interfaces,
        [[LO, ETH], {}, ["10.0.0.2"]],
        {},
        "ok",
        "eth0 10.0.0.2, fd00::2. Between hosts: the one",
    ),
    (checks.check_interfaces, [[LO, ETH], {"ECHELON_INTERFACE": "eth0"}, []], {}, "ok", "eth0, as ECHELON_INTERFACE"),
    (checks.check_interfaces, [[LO, DOWN], {"ECHELON_INTERFACE": "eth1"}, []], {}, "error", "(none)"),
    (checks.check_interfaces, [[LO, ETH], {"ECHELON_INTERFACE": "ib0"}, []], {}, "error", "has an address (eth0)"),
    (checks.check_interfaces, [[LO, DOWN], {}, []], {}, "warning", "only loopback"),
    (checks.check_interfaces, [[LO, ETH], {}, []], {}, "warning", "no default route"),
    (
        checks.check_interfaces,
        [[LO, ETH], {"GLOO_SOCKET_IFNAME": "eth0"}, ["10.0.0.2"]],
        {},
        "warning",
        "torch's connections only",
    ),
    (checks.check_host_name, ["vm", ["10.0.0.2"]], {}, "ok", "vm is 10.0.0.2"),
    (checks.check_host_name, ["vm", ["127.0.1.1"]], {}, "ok", "here: loopback"),
    (checks.check_host_name, ["vm", []], {}, "warning", "/etc/hosts"),
    (checks.check_mtu, [[LO, ETH]], {}, "ok", "eth0 1500"),
    (checks.check_mtu, [[LO, ETH, THIN]], {}, "warning", "ip link set tun0 mtu 1500"),
    (checks.check_listening, [""], {}, "ok", "can be listened on"),
    (checks.check_listening, ["Permission denied"], {}, "error", "Permission denied"),
    (checks.check_port_range, [32768, 60999], {}, "ok", "32768 to 60999"),
    (checks.check_port_range, [1024, 65535], {}, "warning", "net.ipv4.ip_local_port_range"),
    (checks.check_port_range, [10000, 20000], {}, "warning", "20000 to 29999"),
    (checks.check_master_address, ["", []], {}, "ok", "not set"),
    (checks.check_master_address, ["10.0.0.1", ["10.0.0.1"]], {}, "ok", "10.0.0.1"),
    (checks.check_master_address, ["node1", ["10.0.0.1"]], {}, "ok", "node1 is 10.0.0.1"),
    (checks.check_master_address, ["nod1", []], {}, "error", "nod1 is unknown here"),
    (checks.check_master_port, ["10.0.0.1", "29500", ""], {}, "ok", "29500 is free here"),
    (checks.check_master_port, ["10.0.0.1", "", ""], {}, "ok", "not set"),
    (checks.check_master_port, ["10.0.0.1", "29500", "in use"], {}, "error", "10.0.0.1 port 29500: in use"),
    (checks.check_shared_memory, [""], {"is_wanted": True}, "ok", "share memory"),
    (checks.check_shared_memory, ["no memfd"], {"is_wanted": False}, "warning", "TCP"),
    (checks.check_shared_memory, ["no memfd"], {"is_wanted": True}, "error", "unset ECHELON_BACKEND=shm"),
    (checks.check_secret_file, [""], {}, "ok", "in a file"),
    (checks.check_secret_file, ["/tmp/x is no folder: remove it"], {}, "error", "remove it"),
    (checks.check_pidfd, [""], {}, "ok", "noticed at once"),
    (checks.check_pidfd, ["Function not implemented"], {}, "error", "Linux 5.3"),
    (checks.check_open_files, [1024, 4096], {}, "ok", "1024, can be raised to 4096"),
    (checks.check_open_files, [-1, -1], {}, "ok", "unlimited"),
    (checks.check_open_files, [256, -1], {}, "warning", "ulimit -n 1024"),
    (checks.check_open_files, [256, 512], {}, "warning", "ulimit -n 512"),
    (checks.check_open_files, [32, 4096], {}, "error", "ulimit -n 4096"),
    (checks.check_locked_memory, [8 << 20], {"has_gpu": False}, "ok", "matters only for GPUs"),
    (checks.check_locked_memory, [-1], {"has_gpu": True}, "ok", "unlimited"),
    (checks.check_locked_memory, [8 << 20], {"has_gpu": True}, "warning", "ulimit -l unlimited"),
    (checks.check_clock, [], {"is_synchronised": True, "year": 2026}, "ok", "synchronised"),
    (checks.check_clock, [], {"is_synchronised": None, "year": 2026}, "ok", "does not say"),
    (checks.check_clock, [], {"is_synchronised": False, "year": 2026}, "warning", "chrony"),
    (checks.check_clock, [], {"is_synchronised": True, "year": 1970}, "error", "it is 1970 here"),
    (checks.check_torch, ["2.13.0+cpu"], {"has_distributed": True, "lacking": ()}, "ok", "2.13.0"),
    (checks.check_torch, ["3.0.0"], {"has_distributed": True, "lacking": ()}, "ok", "3.0.0; 2.15.0 is the newest"),
    (
        checks.check_torch,
        ["2.9.1"],
        {"has_distributed": True, "lacking": ()},
        "error",
        "pip install 'torch>=2.11,<2.",
    ),
    (
        checks.check_torch,
        ["2.16.0"],
        {"has_distributed": True, "lacking": ("torch._C._x", "torch._y")},
        "error",
        "torch 2.16.0 lacks torch._C._x and torch._y",
    ),
    (
        checks.check_torch,
        ["2.13.0"],
        {"has_distributed": False, "lacking": ()},
        "error",
        "without torch.distributed",
    ),
    (checks.check_threads, [2, 2, 1], {}, "ok", "2 a rank, 2 cores"),
    (checks.check_threads, [1, 2, 4], {}, "ok", "1 a rank"),
    (checks.check_threads, [8, 8, 4], {}, "warning", "OMP_NUM_THREADS=2"),
    (checks.check_threads, [4, 2, 1], {}, "warning", "OMP_NUM_THREADS=2"),
    (checks.check_gpu, [None, [], ""], {"has_driver": False}, "ok", "none"),
    (checks.check_gpu, ["13.0", ["H100"], ""], {"has_driver": True}, "ok", "H100 (CUDA 13.0)"),
    (checks.check_gpu, [None, [], ""], {"has_driver": True}, "warning", "without CUDA"),
    (checks.check_gpu, ["13.0", [], ""], {"has_driver": True}, "warning", "CUDA_VISIBLE_DEVICES"),
    (
        checks.check_gpu,
        ["13.0", ["H100"], "an illegal access"],
        {"has_driver": True},
        "error",
        "H100: an illegal access",
    ),
    (checks.check_nccl, [None, 0], {"is_wanted": False}, "ok", "no GPU"),
    (checks.check_nccl, ["2.27.5", 1], {"is_wanted": True}, "ok", "2.27.5"),
    (checks.check_nccl, [None, 1], {"is_wanted": False}, "warning", "ECHELON_ENABLE_GPU_FALLBACK"),
    (checks.check_nccl, [None, 0], {"is_wanted": True}, "error", "without it"),
    (checks.check_nccl, ["2.27.5", 0], {"is_wanted": True}, "error", "no GPU for it"),
]


@pytest.mark.parametrize(("check", "facts", "options", "status", "said"), CASES)
def test_a_check(check, facts, options, status, said):
    finding = check(*facts, **options)
    assert finding.status == status
    assert said in f"{finding.found}\n{finding.fix}"
    assert "\n" not in finding.found + finding.fix


def test_every_check_is_seen_to_pass_and_to_fail():
    for check in (function for name, function in vars(checks).items() if name.startswith("check_")):
        seen = {status for function, _, _, status, _ in CASES if function is check}
        assert "ok" in seen, check
        assert seen & {"warning", "error"}, check


def test_what_is_wrong_always_comes_with_what_to_do():
    with pytest.raises(AssertionError):
        Finding("x", Status.ERROR, "broken")
