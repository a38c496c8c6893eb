"""Output of simulated ranks that several threads write."""

import io
import sys
import threading

import pytest

from echelon.launch.run import Console
from echelon.simulation.script.calling_rank import CallingRank
from echelon.simulation.script.output import RankOutput

PIECES = 10_000


@pytest.fixture
def frequent_switches():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_threads_of_one_rank_lose_nothing(frequent_switches):
    """A worker thread of a rank's program belongs to no rank, and prints beside the rank."""
    target, rank = io.BytesIO(), CallingRank()
    rank.put(0)
    output = RankOutput(Console(target, target, False, False), rank)

    def write(letter):
        for _ in range(PIECES):
            sys.stdout.write(letter)
        sys.stdout.write("\n")

    with output.installed():
        threads = [threading.Thread(target=write, args=(letter,)) for letter in "abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {letter: target.getvalue().count(letter.encode()) for letter in "abc"} == dict.fromkeys("abc", PIECES)
