import sys

import pytest

from echelon.errors import PeerFailed, Timeout
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


def test_a_rank_that_gave_up_blames_the_one_that_it_waited_for(hook):
    group, _, _ = hook
    error = raised(Timeout("waited 5.0 s for rank 0", (0,)))
    sys.excepthook(Timeout, error, error.__traceback__)
    assert group.reasons == [("it kept rank 2 waiting, which gave up: waited 5.0 s for rank 0", 0)]
