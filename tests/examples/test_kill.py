"""A rank of the running demo is killed: the others end soon, with an error that names it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.examples import EXAMPLES, SIZES


def children(pid):
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def rank_of(pid):
    environ = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return int(dict(item.split("=", 1) for item in environ if "=" in item)["RANK"])


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("rank", [2])
def test_the_others_end_within_seconds(rank, tmp_path):
    script = [str(EXAMPLES / "train_gpt.py"), "--dp", "2", "--pp", "2", "--out", str(tmp_path), *SIZES.split()]
    command = [sys.executable, "-m", "echelon", "run", "-n", "4", *script, "--steps", "1000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        try:
            while "/1000000" not in launcher.stdout.readline():
                assert launcher.poll() is None
            pids = {rank_of(pid): pid for pid in children(launcher.pid)}
            begin = time.monotonic()
            os.kill(pids[rank], signal.SIGKILL)
            _, errors = launcher.communicate(timeout=60)
            seconds = time.monotonic() - begin
        finally:
            launcher.kill()
    assert launcher.returncode == 128 + signal.SIGKILL
    assert errors.splitlines()[1] == f"echelon: rank {rank} was killed by SIGKILL"
    after = [line for line in errors.splitlines() if line.startswith("echelon: then rank")]
    assert after
    assert all(" failed" in line and "SIGKILL" not in line for line in after), "no line repeats the cause"
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())
    assert seconds < 15  # within five on a machine that has nothing else to do
