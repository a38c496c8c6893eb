"""A million actions are built, checked and simulated in 2 GB. benchmarks/schedules has the time that it takes."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, resource
from echelon.pipeline.schedules import build
schedule = build("1f1b", 256, 1954)
schedule.check()
timeline = schedule.simulate()
megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
print(json.dumps([sum(map(len, schedule.orders)), timeline.makespan, megabytes]))
"""


@pytest.mark.slow
def test_a_million_actions():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    actions, makespan, megabytes = json.loads(done.stdout)
    assert actions == 1_000_448
    assert makespan == (1954 + 255) * 3
    assert megabytes <= 2000
