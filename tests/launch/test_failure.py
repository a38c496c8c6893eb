import pytest

from echelon.errors import PeerFailed
from echelon.launch.report import RankFailure, blamed_rank, describe_exit, exit_status, first_cause


def failure(rank, at, blames=None):
    return RankFailure(rank=rank, at=at, summary="failed", blames=blames)


def test_a_death_that_is_noticed_late_is_still_the_cause():
    survivors = [failure(0, at=1.0, blames=2), failure(1, at=1.1, blames=2)]
    assert first_cause([*survivors, failure(2, at=5.0)]).rank == 2


def test_the_first_of_several_own_failures_is_the_cause():
    assert first_cause([failure(0, at=2.0), failure(1, at=1.0)]).rank == 1


def test_if_all_blame_another_the_first_is_the_cause():
    assert first_cause([failure(0, at=2.0, blames=1), failure(1, at=1.0, blames=0)]).rank == 1


@pytest.mark.parametrize(
    ("code", "text", "status"),
    [
        (0, "exited with status 0", 0),
        (3, "exited with status 3", 3),
        (-9, "was killed by SIGKILL", 137),
        (-11, "was killed by SIGSEGV", 139),
        (-99, "was killed by signal 99", 227),
    ],
)
def test_an_exit_is_described(code, text, status):
    assert describe_exit(code) == text
    assert exit_status(code) == status


def caused(error, cause):
    """Returns `error` as it looks when a program raised it while it handled `cause`."""
    error.__context__ = cause
    return error


def test_blame_is_found_behind_the_error_that_a_program_made_of_it():
    assert blamed_rank(PeerFailed(3, "gone")) == 3
    assert blamed_rank(caused(RuntimeError("training stopped"), PeerFailed(3, "gone"))) == 3


def test_an_error_of_its_own_blames_nobody():
    assert blamed_rank(ValueError("bad")) is None
    unrelated = caused(ValueError("bad"), PeerFailed(3, "gone"))
    unrelated.__suppress_context__ = True
    assert blamed_rank(unrelated) is None


def test_a_kill_that_is_noticed_after_the_report_of_a_survivor_is_the_first_cause():
    """torch's C++ hides which rank the survivor blames, and its report came first on a busy host."""
    survivor = RankFailure(0, 2.0, "raised RuntimeError: rank 1 failed", traceback="Traceback ...")
    assert first_cause([survivor, RankFailure(1, 2.5, "was killed by SIGKILL", status=137)]).rank == 1
    assert first_cause([survivor, RankFailure(1, 4.0, "was killed by SIGKILL", status=137)]).rank == 0
