import os
import pty
import re
import subprocess
import sys
from io import BytesIO

import pytest

from echelon.launch.output import MarkedStream
from echelon.launch.status_line import StatusLine, bar, unfinished, visible


def test_only_whole_lines_are_written():
    target = BytesIO()
    stream = MarkedStream(2, target)
    stream.feed(b"loss")
    assert target.getvalue() == b""
    stream.feed(b" 3.1\nloss 2.9\nlo")
    assert target.getvalue() == b"[2] loss 3.1\n[2] loss 2.9\n"


def test_the_last_line_needs_no_end():
    target = BytesIO()
    stream = MarkedStream(0, target)
    stream.feed(b"bye")
    stream.finish()
    stream.finish()
    assert target.getvalue() == b"[0] bye\n"


def test_bytes_that_are_no_text_pass_unchanged():
    target = BytesIO()
    MarkedStream(0, target).feed(b"\xff\x00\n")
    assert target.getvalue() == b"[0] \xff\x00\n"


def test_ranks_differ_in_color():
    targets = [BytesIO(), BytesIO()]
    for rank, target in enumerate(targets):
        MarkedStream(rank, target, color=True).feed(b"x\n")
    first, second = (target.getvalue() for target in targets)
    assert first.startswith(b"\x1b[36m[0] \x1b[0m")
    assert first.split(b"[0]")[0] != second.split(b"[1]")[0]


def test_a_line_without_end_does_not_fill_the_memory():
    target = BytesIO()
    MarkedStream(0, target).feed(b"x" * (1 << 21))
    assert len(target.getvalue()) > 1 << 21


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"plain", b"plain"),
        (b"\r10%\r20%", b"20%"),  # as tqdm
        (b"10%\r20%\r", b"20%"),  # as print(..., end="\\r")
        (b"windows\r", b"windows"),
        (bar("10%").encode(), b"10%"),
        (bar("10%").encode() + b"a warning", b"a warning"),
        ((bar("10%") + bar("20%") + bar("")).encode(), b""),
    ],
)
def test_the_visible_text_is_that_after_the_last_carriage_return(line, text):
    assert visible(line) == text
    if b"\r" in line:
        assert visible(unfinished(line)) == text


def on_terminal():
    """Returns a terminal, and two ranks' stderr on it."""
    terminal = BytesIO()
    status = StatusLine(terminal)
    return terminal, [MarkedStream(rank, status.above(terminal), status=status) for rank in range(2)]


def screen(terminal):
    """Returns the lines on the terminal: the text after the last erasure of each line."""
    text = re.sub(r"\x1b\[(\?7[hl]|0m)", "", terminal.getvalue().decode())
    return [line.rpartition("\r\x1b[2K")[2] for line in text.split("\n")]


def test_a_bar_stays_below_the_lines_of_all_ranks():
    terminal, (first, second) = on_terminal()
    first.feed(b"\r10%")
    assert screen(terminal) == ["[0] 10%"]
    second.feed(b"a line\n")
    first.feed(b"\r20%")
    assert screen(terminal) == ["[1] a line", "[0] 20%"]
    first.feed(b"\r30%\rdone\nlast")
    assert screen(terminal) == ["[1] a line", "[0] done", ""]
    first.finish()
    assert screen(terminal) == ["[1] a line", "[0] done", "[0] last", ""]


def test_of_several_bars_that_of_the_lowest_rank_is_shown():
    terminal, (first, second) = on_terminal()
    second.feed(b"\r10%")
    first.feed(b"\r50%")
    second.feed(b"\r20%")
    assert screen(terminal) == ["[0] 50%"]
    first.feed(bar("").encode())
    assert screen(terminal) == ["[1] 20%"]
    second.finish()
    assert screen(terminal) == ["[1] 20%", ""]


def test_updates_of_a_bar_do_not_fill_the_memory():
    _, (stream, _) = on_terminal()
    for number in range(1000):
        stream.feed(f"\r{number:100}".encode())
    assert len(stream._pending) < 1000


def test_a_file_gets_the_bytes_unchanged():
    target = BytesIO()
    MarkedStream(0, target).feed(b"\r10%\r20%\n")
    assert target.getvalue() == b"[0] \r10%\r20%\n"


PROGRAM = """\
import os, sys
assert os.environ["ECHELON_TERMINAL"] == "76", "80 columns without the mark"
sys.stderr.write("\\r50%")
sys.stderr.flush()
print("a line")
"""


def test_run_on_a_terminal_shows_bars(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "echelon", "run", "-q", "-n", "1", str(script)]
    environ = {**os.environ, "NO_COLOR": "1", "TERM": "xterm"}
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, env=environ, timeout=30, check=False)
    os.close(theirs)
    shown = os.read(ours, 1 << 16)
    os.close(ours)
    assert (ended.returncode, ended.stdout) == (0, b"[0] a line\n")
    assert b"\x1b[2K\x1b[?7l[0] 50%\x1b[?7h" in shown
