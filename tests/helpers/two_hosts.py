"""Two hosts on this one: namespaces of their own for the network, process numbers, the name of the host and /etc/hosts.

A pair of virtual Ethernet devices joins them. As on a real Debian host, each one's own name means 127.0.1.1 there.
"""

import contextlib
import os
import shutil
import subprocess
import uuid

import pytest

NAMES = ("node1", "node2")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
ADDRESSES_6 = ("fd77::1", "fd77::2")
_ENTER = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'


def _ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)


class Hosts:
    """Starts commands on either host; use as `with two_hosts(folder) as hosts`."""

    def __init__(self, namespaces, files):
        self._namespaces = namespaces
        self._files = files

    def command(self, number, *command):
        """Returns what runs `command` on host 0 or 1."""
        enter = ["ip", "netns", "exec", self._namespaces[number]]
        unshare = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return [*enter, *unshare, "sh", "-c", _ENTER, "sh", NAMES[number], self._files[number], *command]

    def start(self, number, *command, **environ):
        """Starts `command` on host 0 or 1."""
        return subprocess.Popen(
            self.command(number, *command),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        )

    def run(self, *commands, **environ):
        """Runs one command on each host; returns (status, stdout, stderr) of each."""
        with contextlib.ExitStack() as stack:
            running = [self.start(number, *command, **environ) for number, command in enumerate(commands)]
            for process in running:
                stack.callback(process.kill)
            outputs = [process.communicate(timeout=90) for process in running]
        return [(process.returncode, *output) for process, output in zip(running, outputs, strict=True)]


@contextlib.contextmanager
def two_hosts(folder):
    """Gives two hosts, and takes them away; skips the test where that cannot be done."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("making hosts of namespaces needs root, iproute2 and util-linux")
    namespaces = [f"echelon-{uuid.uuid4().hex[:8]}" for _ in NAMES]
    files = []
    with contextlib.ExitStack() as stack:
        for number, namespace in enumerate(namespaces):
            try:
                _ip("netns", "add", namespace)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"this system gives no network namespaces: {error.stderr.strip()}")
            stack.callback(_ip, "netns", "delete", namespace)
            names = dict(zip(NAMES, ADDRESSES, strict=True)) | {NAMES[number]: "127.0.1.1"}
            lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in names.items())]
            lines += [f"{address} {name}-by-four" for name, address in zip(NAMES, ADDRESSES, strict=True)]
            lines += [f"{address} {name}-by-six" for name, address in zip(NAMES, ADDRESSES_6, strict=True)]
            files.append(str(folder / f"hosts{number}"))
            (folder / f"hosts{number}").write_text("\n".join(lines) + "\n")
        _ip("-n", namespaces[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", namespaces[1])
        for number, namespace in enumerate(namespaces):
            _ip("-n", namespace, "link", "set", "lo", "up")
            _ip("-n", namespace, "address", "add", f"{ADDRESSES[number]}/24", "dev", "eth0")
            _ip("-n", namespace, "address", "add", f"{ADDRESSES_6[number]}/64", "dev", "eth0", "nodad")
            _ip("-n", namespace, "link", "set", "eth0", "up")
            _ip("-n", namespace, "route", "add", "default", "dev", "eth0")
        yield Hosts(namespaces, files)
