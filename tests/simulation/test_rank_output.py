"""Output of simulated ranks: lines of a child process that has marked them are not marked again."""

import io
import sys

from echelon.launch.run import Console
from echelon.simulation.script.calling_rank import CallingRank
from echelon.simulation.script.output import RankOutput, pass_on


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
