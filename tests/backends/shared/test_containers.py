"""What containers lack: room in /dev/shm."""

import subprocess
import sys

import pytest


def why_no_namespace():
    """Returns why this process cannot have mounts of its own, "" if it can."""
    try:
        tried = subprocess.run(
            ["unshare", "--mount", "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/dev/shm"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except FileNotFoundError:
        return "there is no unshare"
    return "" if tried.returncode == 0 else f"no mount namespace: {tried.stderr.strip()}"


@pytest.mark.slow
def test_a_full_dev_shm_of_64_kib_does_not_matter():
    if reason := why_no_namespace():
        pytest.skip(reason)
    program = ["unshare", "--mount", sys.executable, "-m", "tests.helpers.tiny_dev_shm"]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["free", "0", "('shm',", "3.0)", "('shm',", "3.0)"]
