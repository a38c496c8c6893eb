import sys
import weakref
from pathlib import Path

import pytest
import torch

import echelon
from echelon.errors import ConnectError, PeerFailed, ScheduleError, Timeout
from echelon.interop.works import Outcome
from echelon.launch import report


class Group:
    rank = 2

    def __init__(self):
        self.reasons = []

    def abort(self, reason, origin=None):
        self.reasons.append(reason if origin is None else (reason, origin))


def raised_by(error):
    raise error


def raised(error):
    try:
        raise error
    except BaseException as caught:
        return caught


def test_a_report_comes_back_as_it_was_written(tmp_path):
    path = str(tmp_path / "rank2.json")
    failure = report.describe(2, raised(PeerFailed(1, "gone\nfor good")))
    assert report.write(path, failure)
    assert report.read(path) == failure
    assert failure.blames == 1
    assert failure.summary == "raised PeerFailed: rank 1 failed: gone"
    assert __file__ in failure.where
    assert "Traceback" in failure.traceback
    assert [each.name for each in tmp_path.iterdir()] == ["rank2.json"]


def test_an_error_of_ours_that_torch_wraps_is_reported_as_it_is():
    """torch's C++ waits for the future of a collective, whose error it has as text alone."""
    future = Outcome()
    future.settle(lambda: raised_by(PeerFailed(1, "gone\nfor good")))
    with pytest.raises(RuntimeError, match="PeerFailed: rank 1 failed: gone") as caught:
        torch._C._distributed_c10d._create_work_from_future(future).result()
    assert "At:" in str(caught.value)
    failure = report.describe(2, caught.value)
    assert failure.summary == "raised PeerFailed: rank 1 failed: gone"
    assert failure.blames == 1
    assert __file__ in failure.where
    assert "At:" not in failure.traceback


def test_a_rank_that_wrote_nothing_has_no_report(tmp_path):
    assert report.read(str(tmp_path / "none.json")) is None


ADVICE = {
    "Torch not compiled with CUDA enabled": "keep tensors on the CPU, as x.to(group.device) does, or",
    "Your assigned backend echelon is not available, please use gloo": "call "
    "torch.distributed.init_process_group('echelon') before, and leave out ddp_backend= or backend=",
    "Distributed package doesn't have NCCL built in": "this build of torch has no NCCL: give init_process_group 'gloo'",
}


@pytest.mark.parametrize("text", ADVICE)
def test_a_known_error_of_torch_is_reported_with_advice(text):
    error = raised(RuntimeError(text))
    for _ in range(2):  # a program may raise it again
        trace = report.describe(0, error).traceback
    assert trace.count(ADVICE[text]) == 1


def test_an_error_of_the_program_s_own_call_is_reported_as_it_is():
    def scale(x):
        return x

    for call in (lambda: scale(y=1), lambda: Group().reasons(), lambda: scale(1)(), scale):
        with pytest.raises(TypeError) as caught:
            call()
        report.describe(0, caught.value)
        assert not hasattr(caught.value, "__notes__")


class Event:
    """Object of the program whose attributes have names of a group's."""

    rank = 3

    def lock(self):
        pass


def test_errors_of_other_objects_get_no_advice_on_groups():
    event, none = Event(), None

    def as_a_context():
        with event.lock:
            pass

    def backward():
        torch.ones(()).backward()

    calls = (lambda: event.wait(), lambda: event.rank(), lambda: none.shape, backward, torch.distributed.get_rank)
    for call in calls:
        with pytest.raises((TypeError, AttributeError, RuntimeError, ValueError)) as caught:
            call()
        report.describe(0, caught.value)
        assert not hasattr(caught.value, "__notes__"), caught.value.__notes__
    with pytest.raises(TypeError) as caught:
        as_a_context()
    assert "call the method, as in with ddp.no_sync():" in report.describe(0, caught.value).traceback


def test_a_rank_that_holds_no_group_of_echelon_gets_no_advice_on_it():
    """The frames that start a simulated rank hold its group."""
    with pytest.raises(ValueError, match="Default process group has not been") as caught:
        echelon.simulate(lambda: torch.distributed.get_rank(), 2)
    assert not any("a group of Echelon" in note for note in caught.value.__notes__)


class WithoutNotes(Exception):
    """Error of a program whose notes are no list."""

    __notes__ = "none"


def test_an_error_that_refuses_notes_is_reported():
    """The hook failed, so the launcher had no report."""
    assert report.describe(0, raised(WithoutNotes("'Tensor' object has no attribute 'wait'"))).rank == 0


def test_an_error_without_a_message_is_named():
    assert report.summarize(KeyboardInterrupt()) == "KeyboardInterrupt"


@pytest.fixture
def hook(monkeypatch):
    printed = []
    monkeypatch.setattr(sys, "__excepthook__", lambda *details: printed.append(details[1]))
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    group = Group()
    report.report_uncaught(group)
    error = raised(ValueError("bad"))
    return group, printed, lambda: sys.excepthook(ValueError, error, error.__traceback__)


def test_a_message_of_several_lines_is_one_line_of_its_first_paragraph():
    assert report.summarize(ValueError("sizes differ:\n\tweight\n  bias\n \nSee the manual.")) == (
        "ValueError: sizes differ: weight bias"
    )
    assert report.summarize(ValueError("\n\nlate")) == "ValueError: late"
    assert report.summarize(ValueError("x\n" * 300)) == f"ValueError: {('x ' * 300)[:300]}..."
    assert report.summarize(ScheduleError("2 problems:\n  - one\n  - two")) == "ScheduleError: 2 problems:"


def test_an_uncaught_exception_goes_to_the_peers_and_to_the_launcher(hook, tmp_path, monkeypatch):
    group, printed, raise_it = hook
    monkeypatch.setenv(report.ERROR_FILE, str(tmp_path / "rank2.json"))
    raise_it()
    assert group.reasons == ["ValueError: bad"]
    assert report.read(str(tmp_path / "rank2.json")).summary == "raised ValueError: bad"
    assert printed == []


@pytest.mark.parametrize("path", [None, "/nonexistent/rank2.json"])
def test_without_a_launcher_it_is_printed_as_ever(hook, monkeypatch, path):
    group, printed, raise_it = hook
    monkeypatch.delenv(report.ERROR_FILE, raising=False)
    if path:
        monkeypatch.setenv(report.ERROR_FILE, path)
    raise_it()
    assert group.reasons == ["ValueError: bad"]
    assert [str(error) for error in printed] == ["bad"]


def test_the_peers_are_told_the_rank_that_failed_first(hook):
    group, _, _ = hook
    error = raised(PeerFailed(1, "it was killed", "all_reduce"))
    sys.excepthook(PeerFailed, error, error.__traceback__)
    assert group.reasons == [("it was killed", 1)]


def test_a_rank_that_gave_up_blames_the_one_that_it_waited_for(hook):
    group, _, _ = hook
    error = raised(Timeout("waited 5.0 s for rank 0", (0,)))
    sys.excepthook(Timeout, error, error.__traceback__)
    assert group.reasons == [("it kept rank 2 waiting, which gave up: waited 5.0 s for rank 0", 0)]


def test_one_hook_serves_however_many_groups_come_and_go(hook):
    first, printed, raise_it = hook
    installed = sys.excepthook
    for _ in range(100):
        report.report_uncaught(Group())()
    second, third = Group(), Group()
    report.report_uncaught(second)
    report.report_uncaught(third)()
    assert sys.excepthook is installed
    raise_it()
    assert first.reasons == second.reasons == ["ValueError: bad"]
    assert third.reasons == []
    assert len(printed) == 1


def test_a_closed_group_is_let_go(hook):
    group = Group()
    reference = weakref.ref(group)
    forget = report.report_uncaught(group)
    forget()
    forget()
    del group, forget
    assert reference() is None


def test_an_exception_after_the_last_group_has_closed_reaches_the_launcher(hook, tmp_path, monkeypatch):
    group, _, raise_it = hook
    sys.excepthook.groups.remove(group)
    monkeypatch.setenv(report.ERROR_FILE, str(tmp_path / "rank2.json"))
    raise_it()
    assert group.reasons == []
    assert report.read(str(tmp_path / "rank2.json")).rank == 2


def test_an_excepthook_that_a_program_installs_between_two_groups_is_kept(hook):
    group, printed, raise_it = hook
    seen = []
    sys.excepthook = lambda *details: seen.append(details[1])
    second = Group()
    forget = report.report_uncaught(second)
    raise_it()
    assert [str(error) for error in seen] == ["bad"]
    assert second.reasons == ["ValueError: bad"]
    assert group.reasons == printed == [], "the program's own hook took the place of the first"
    forget()
    raise_it()
    assert len(seen) == 2, "closing a group takes no hook away"


def test_an_excepthook_that_calls_the_one_before_passes_the_exception_to_all_groups(hook):
    group, printed, raise_it = hook
    before = sys.excepthook
    sys.excepthook = lambda *details: before(*details)
    second = Group()
    report.report_uncaught(second)
    raise_it()
    assert group.reasons == second.reasons == ["ValueError: bad"]
    assert len(printed) == 1


# What is not the user's is folded


def raised_in_the_package(tmp_path, source):
    """Runs source as if it were a module of the package, and returns what it raised."""
    path = str(Path(echelon.__file__).parent / "invented.py")
    scope = {}
    exec(compile(source, path, "exec"), scope)
    try:
        scope["outer"](user_function)
    except BaseException as caught:
        return caught


def user_function(inner):
    inner()


SOURCE = """
from echelon.errors import PeerFailed, Timeout
def outer(function):
    try:
        function(lambda: middle({error}))
    except PeerFailed as error:
        raise Timeout("too late") from error
def middle(error):
    raise error
"""


def test_frames_of_the_package_are_counted_and_those_of_the_user_are_shown(tmp_path):
    """A collective that one rank called printed 50 lines of the package's insides."""
    text = report.folded(raised_in_the_package(tmp_path, SOURCE.format(error="PeerFailed(1, 'gone')")))
    assert text.count("user_function") >= 1
    assert "inner()" in text
    assert "(2 calls inside of Echelon)" in text
    assert "in middle" in text, "where it was raised"
    assert "PeerFailed: rank 1 failed: gone" in text
    assert "Timeout: too late" in text
    assert text.index("rank 1 failed") < text.index("direct cause") < text.index("too late")
    assert len(text.splitlines()) < 20


def test_a_defect_of_the_package_is_shown_whole(tmp_path):
    text = report.folded(raised_in_the_package(tmp_path, SOURCE.format(error="KeyError('ours')")))
    assert "in <lambda>" in text
    assert "in middle" in text
    assert "in outer" in text
    assert "KeyError: 'ours'" in text


def test_an_error_of_the_user_behind_frames_of_the_package_is_shown_whole():
    def broken():
        raise ValueError("mine")

    text = report.folded(raised_in_user_code(broken))
    assert "in broken" in text
    assert "ValueError: mine" in text
    assert "(1 call inside of Echelon)" in text


def raised_in_user_code(function):
    path = str(Path(echelon.__file__).parent / "invented.py")
    scope = {}
    exec(compile("def call(function): function()", path, "exec"), scope)
    try:
        scope["call"](function)
    except ValueError as caught:
        return caught


# Before there is a group


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Calls a function as `init` does, and then the excepthook with what it raised, as Python would; returns that."""
    printed = []
    monkeypatch.setattr(sys, "__excepthook__", lambda *details: printed.append(details[1]))
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setenv(report.ERROR_FILE, str(tmp_path / "rank3.json"))
    monkeypatch.setenv("RANK", "3")

    def start(error):
        try:
            with report.reported_start():
                if error is not None:
                    raise error
        except ConnectError as caught:
            return caught

    return start, printed, str(tmp_path / "rank3.json")


def test_a_failed_start_is_reported_when_it_ends_the_process(started):
    """The launcher said only that the rank exited with status 1."""
    start, printed, path = started
    error = start(ConnectError("nobody came"))
    assert report.read(path) is None, "it may still be caught"
    sys.excepthook(type(error), error, error.__traceback__)
    assert str(report.read(path)) == "rank 3 raised ConnectError: nobody came"
    assert printed == []


def test_an_exception_after_a_failed_start_that_was_caught_is_reported_in_its_place(started):
    start, printed, path = started
    start(ConnectError("nobody came"))
    error = raised(ValueError("other"))
    sys.excepthook(ValueError, error, error.__traceback__)
    assert str(report.read(path)) == "rank 3 raised ValueError: other"
    assert printed == []


def test_one_hook_serves_however_many_starts_fail(started):
    start, _, _ = started
    start(ConnectError("nobody came"))
    installed = sys.excepthook
    start(ConnectError("nobody came again"))
    start(None)
    assert sys.excepthook is installed


def test_without_a_launcher_a_failed_start_is_printed_as_ever(started, monkeypatch):
    start, _, _ = started
    monkeypatch.delenv(report.ERROR_FILE)
    before = sys.excepthook
    start(ConnectError("nobody came"))
    assert sys.excepthook is before


def test_the_first_cause_is_the_first_failure_that_blames_no_other_rank():
    consequence = report.RankFailure(0, 1.0, "raised PeerFailed: rank 1 failed", "text", blames=1)
    cause = report.RankFailure(1, 2.0, "raised ValueError", "text")
    later = report.RankFailure(2, 3.0, "raised ValueError", "text")
    assert report.first_cause([consequence, later, cause]) is cause
    assert report.first_cause([consequence]) is consequence


# A rank whose error was raised twice, once inside of the handling of the other, was described for ever.
def test_a_circle_of_errors_is_described():
    first, second = RuntimeError("first"), RuntimeError("second")
    first.__context__, second.__context__ = second, first
    failure = report.describe(1, first)
    assert (failure.summary, failure.blames) == ("raised RuntimeError: first", None)


def test_the_lines_of_a_message_are_told_once():
    error = ValueError("its first line " * 8 + "\nand its second" * 8)
    failure = report.describe(1, raised(error))
    trace = failure.told_once(failure.traceback)
    assert trace.endswith("ValueError: see above\n")
    source = 'raise ValueError("' + failure.long_text + '")'
    assert failure.told_once(source) == source, "a line of the source is no message"


def test_a_failure_of_all_ranks_by_the_message_of_one_is_told_once():
    cause = report.describe(0, raised(echelon.InvalidArgument("step 20 is older")))
    other = echelon.InvalidArgument("rank 0: step 20 is older")
    other.raised_on = 0
    repeated = report.describe(1, raised(other))
    assert repeated.blames == 0
    assert report.first_cause([repeated, cause]) is cause
    (line,) = report.consequences(cause, [repeated])
    assert line.startswith("rank 1 raised InvalidArgument: rank 0: see above (")
    (line,) = report.consequences(cause, [report.describe(1, raised(ValueError("step 20 is older")))])
    assert line.startswith("rank 1 raised ValueError: step 20 is older (")


@pytest.mark.parametrize("kind", [echelon.DeadlockError, echelon.CollectiveMismatch])
def test_an_error_of_several_ranks_is_told_once(kind):
    def failure(rank, *others):
        ranks = {"ranks": others} if kind is echelon.DeadlockError else {"rank": others[0]}
        return report.describe(rank, raised(kind(f"as rank {rank} sees it", **ranks)))

    cause, others = failure(0, 1), [failure(1, 0)]
    (line,) = report.consequences(cause, others)
    assert line.startswith(f"rank 1 raised {kind.__name__}, too (")
    wrapped = report.describe(0, raised(KeyError("of the program, which caught the first error")))
    (line,) = report.consequences(wrapped, others)
    assert line.startswith(f"rank 1 raised {kind.__name__}: as rank 1 sees it")


def test_ranks_that_fail_at_other_lines_are_not_alike():
    first, second = (report.RankFailure(rank, 1.0, "raised ValueError: bad", where=f"a.py:{rank}") for rank in (0, 1))
    assert not report.are_alike([first, second], 2)
