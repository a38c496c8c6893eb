"""Files that users name: errors of one line that name the folder that is missing."""

import errno
import os

import pytest

from echelon.arguments import check_writable, reading, writing
from echelon.call_site import shortened
from echelon.errors import EchelonError, FileError, InvalidArgument
from echelon.pipeline import Schedule, schedules


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


SCHEDULE = schedules.build("1f1b", 2, 2)
WRITERS = {
    "plan.svg": lambda path: SCHEDULE.simulate().draw(path),
    "plan.png": lambda path: SCHEDULE.simulate().draw(path),
    "trace.json": lambda path: SCHEDULE.simulate().to_chrome(path),
    "plan.csv": SCHEDULE.to_csv,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_missing_folder_is_named(name):
    with pytest.raises(FileError) as caught:
        WRITERS[name](f"no/such/{name}")
    assert str(caught.value) == (
        f"cannot write no/such/{name}: the folder no/such does not exist; make it first: mkdir -p no/such"
    )
    assert isinstance(caught.value, OSError)


@pytest.mark.parametrize("name", WRITERS)
def test_a_path_of_windows_is_not_a_name(name, tmp_path):
    with pytest.raises(FileError, match="it is a path of Windows; separate folders with /"):
        WRITERS[name](f"C:\\plans\\{name}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", WRITERS)
def test_no_path(name):
    with pytest.raises(InvalidArgument, match=r"path is 3 \(int\): give the name of a file"):
        WRITERS[name](3)


def test_a_folder_in_place_of_a_file(tmp_path):
    (tmp_path / "plan.csv").mkdir()
    with pytest.raises(FileError, match=r"cannot write plan\.csv: Is a directory; give a place"):
        SCHEDULE.to_csv("plan.csv")
    with pytest.raises(FileError, match=r"cannot read plan\.csv: Is a directory; give a file"):
        Schedule.from_csv("plan.csv")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no/a.html", "the folder no does not exist; make it first: mkdir -p no"),
        ("file/a.html", "Not a directory; give a place that can be written to"),
        (".", "Is a directory; give a place that can be written to"),
        ("C:\\a.html", "it is a path of Windows; separate folders with /, as in plans/plan.svg"),
    ],
)
def test_a_path_is_checked_before_the_work(tmp_path, name, reason):
    (tmp_path / "file").touch()
    with pytest.raises(FileError) as caught:
        check_writable(name)
    assert str(caught.value) == f"cannot write {name}: {reason}"


def test_a_place_without_rights_is_refused_before_the_work(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write all
    with pytest.raises(FileError, match=r"^cannot write a: Permission denied; give a place"):
        check_writable("a")


def test_a_good_path_is_not_written_by_its_check(tmp_path):
    for name in ("a.html", str(tmp_path / "a.html"), os.devnull):
        check_writable(name)
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileError, match=rf"cannot read plan\.csv: there is no such file in {tmp_path}; give the path"):
        Schedule.from_csv("plan.csv")


def test_files_below_the_working_folder_are_named_as_from_there(monkeypatch, tmp_path):
    text = f"at {tmp_path}/a.py:1, called from ({tmp_path}/b/c.py:2), '{tmp_path}/d.py', not {tmp_path}x/a.py"
    assert shortened(text) == f"at a.py:1, called from (b/c.py:2), 'd.py', not {tmp_path}x/a.py"
    inner = f"/mnt{tmp_path}/a.py"
    assert shortened(inner) == inner
    monkeypatch.chdir("/")
    assert shortened("at /a/b.py") == "at /a/b.py"


def test_a_working_folder_that_was_removed_shortens_nothing(monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert shortened(f"at {gone}/a.py") == f"at {gone}/a.py"
    monkeypatch.chdir(tmp_path)


def test_a_full_disk():
    with pytest.raises(FileError, match=r"cannot write a: No space left on device; give a place"), writing("a"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_other_errors_stay_what_they_are():
    for context in (writing("a"), reading("a")):
        with pytest.raises(EchelonError, match="not of the file"), context:
            raise EchelonError("not of the file")
