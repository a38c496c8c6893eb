import sys
import weakref

import pytest

from echelon.errors import PeerFailed
from echelon.launch import report


class Group:
    rank = 2

    def __init__(self):
        self.reasons = []

    def abort(self, reason, origin=None):
        self.reasons.append(reason if origin is None else (reason, origin))


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


def test_a_rank_that_wrote_nothing_has_no_report(tmp_path):
    assert report.read(str(tmp_path / "none.json")) is None


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
