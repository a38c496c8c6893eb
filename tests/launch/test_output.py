from io import BytesIO

from echelon.launch.run import MarkedStream


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
