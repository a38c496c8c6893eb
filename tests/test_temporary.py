"""Temporary folders: those of owners that were killed are removed by the next owner."""

import os
import time

import pytest

from echelon.errors import LaunchError
from echelon.temporary import temporary_folder, temporary_place


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def make_older(path):
    before = time.time() - 3600
    os.utime(path, (before, before))


def test_folders_of_owners_that_were_killed_are_removed(place):
    for name in ("job-abandoned", "job-just-made", "other-abandoned"):
        (place / name / "inner").mkdir(parents=True)
    for name in ("job-abandoned", "other-abandoned"):
        make_older(place / name)
    (place / "job-link").symlink_to(place / "other-abandoned")
    (place / "job-file").touch()
    make_older(place / "job-file")
    with temporary_folder("job-") as own:
        assert {*os.listdir(place)} == {
            os.path.basename(own),
            "job-just-made",
            "other-abandoned",
            "job-link",
            "job-file",
        }
    assert not os.path.exists(own)
    assert (place / "other-abandoned" / "inner").exists()


def test_an_older_folder_of_a_living_owner_stays(place):
    with temporary_folder("job-") as first:
        make_older(first)
        with temporary_folder("job-"):
            assert os.path.exists(first)
    assert not os.listdir(place)


def test_a_host_without_room_is_told_in_one_line(place, monkeypatch):
    place.rmdir()
    with pytest.raises(LaunchError, match=r"^no temporary folder can be written to \(No such file.*set TMPDIR"):
        temporary_folder("job-").__enter__()
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: [str(place)])
    with pytest.raises(LaunchError, match=r"^no temporary folder can be written to \(No usable temporary directory"):
        temporary_place()
