"""Output of simulated ranks that several threads or child processes write."""

import io
import sys
import threading

import pytest

from echelon.launch.output import Console
from echelon.simulation.script.output import CallingRank, RankOutput, pass_on

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


def test_lines_of_a_child_keep_their_own_marks():
    out, rank = io.BytesIO(), CallingRank()
    rank.put(2)  # rank 2 ran last, and the calling thread is of no rank
    with RankOutput(Console(out, io.BytesIO()), rank).installed():
        print("its own line")
        pass_on(sys.stdout, b"[9] of a child\n")
    assert out.getvalue() == b"[2] its own line\n[9] of a child\n"


def test_a_stream_without_marks_gets_them_as_text(capsys):
    pass_on(sys.stdout, "[9] naïve\n".encode())
    assert capsys.readouterr().out == "[9] naïve\n"
