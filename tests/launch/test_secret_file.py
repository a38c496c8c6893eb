"""The file that keeps a job's secret is this user's alone, or it is not used."""

import os
import stat
import tempfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from echelon.errors import LaunchError
from echelon.launch.environment import MIN_SECRET_LENGTH
from echelon.launch.secret_file import SecretFile


@pytest.fixture
def runtime(tmp_path):
    """A runtime directory as it should be, and the environment that names it."""
    path = tmp_path / "runtime"
    path.mkdir(0o700)
    return path


def secret_of(job, folder):
    with SecretFile(job, {"XDG_RUNTIME_DIR": str(folder)}) as file:
        return file.secret()


def made(job, folder):
    """Makes the file and returns its path."""
    secret_of(job, folder)
    (path,) = folder.iterdir()
    return path


def test_all_processes_of_a_job_get_the_same_secret_and_others_another(runtime):
    first = secret_of("slurm-1.0", runtime)
    assert len(first) >= MIN_SECRET_LENGTH
    assert secret_of("slurm-1.0", runtime) == first
    assert secret_of("slurm-1.1", runtime) != first


def test_only_this_user_can_read_it_whatever_the_umask(runtime):
    before = os.umask(0)
    try:
        path = made("slurm-1.0", runtime)
    finally:
        os.umask(before)
    status = path.lstat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_uid == os.geteuid()


def test_the_name_of_a_job_never_leads_out_of_the_folder(runtime):
    path = made("../../etc/passwd [::1]:29500-\n", runtime)
    assert path.name.startswith("echelon-..-..-etc-passwd-1-29500-")


def test_of_many_that_come_at_once_one_makes_it(runtime):
    with ThreadPoolExecutor(16) as threads:
        secrets = set(threads.map(lambda _: secret_of("job", runtime), range(64)))
    assert len(secrets) == 1
    assert len(list(runtime.iterdir())) == 1, "a draft was left behind"


def test_it_can_be_removed_more_than_once(runtime):
    with SecretFile("job", {"XDG_RUNTIME_DIR": str(runtime)}) as file:
        before = file.secret()
        file.remove()
        file.remove()
        assert not list(runtime.iterdir())
        assert file.secret() != before


def refused(job, runtime):
    with pytest.raises(LaunchError) as caught:
        secret_of(job, runtime)
    assert "\n" not in str(caught.value)
    assert "ECHELON_SECRET" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_file_that_others_can_open_is_refused(runtime, mode):
    made("job", runtime).chmod(mode)
    assert "is not a file that only this user can read" in refused("job", runtime)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(runtime):
    os.chown(made("job", runtime), 12345, -1)
    assert "is not a file that only this user can read" in refused("job", runtime)


def test_a_link_is_not_followed(runtime, tmp_path):
    path = made("job", runtime)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert "cannot be read" in refused("job", runtime)


def test_a_pipe_is_not_waited_for(runtime):
    path = made("job", runtime)
    path.unlink()
    os.mkfifo(path, 0o600)
    assert "is not a file that only this user can read" in refused("job", runtime)


@pytest.mark.parametrize("text", ["", "short", "x" * 64, "0" * 65])
def test_a_file_without_a_secret_is_refused_and_not_shown(runtime, text):
    made("job", runtime).write_text(text)
    message = refused("job", runtime)
    assert "has no secret in it" in message
    assert not text or text not in message


# Where there is no runtime directory that is this user's alone


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The temporary folder, into which others may write."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("given", ["", "relative", "/no/such/folder"])
def test_a_folder_in_the_temporary_one_takes_its_place(temporary, given):
    secret_of("job", given)
    folder = temporary / f"echelon-{os.geteuid()}"
    assert stat.S_IMODE(folder.lstat().st_mode) == 0o700
    assert len(list(folder.iterdir())) == 1


def test_a_runtime_directory_that_others_can_enter_is_not_used(temporary, runtime):
    runtime.chmod(0o750)
    secret_of("job", runtime)
    assert not list(runtime.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_runtime_directory_of_another_user_is_not_used(temporary, runtime):
    os.chown(runtime, 12345, -1)
    secret_of("job", runtime)
    assert not list(runtime.iterdir())


def test_a_folder_that_others_can_enter_is_refused(temporary):
    (temporary / f"echelon-{os.geteuid()}").mkdir(0o777)
    assert "is not a folder that only this user can enter" in refused("job", "")


def test_a_link_in_place_of_the_folder_is_refused(temporary, runtime):
    (temporary / f"echelon-{os.geteuid()}").symlink_to(runtime)
    assert "cannot be opened as a folder" in refused("job", "")


def test_the_folder_goes_with_its_last_file(temporary):
    with SecretFile("one", {}) as one, SecretFile("two", {}) as two:
        one.secret()
        two.secret()
        one.remove()
        assert len(list(temporary.glob("echelon-*/*"))) == 1
        two.remove()
        two.remove()
    assert not list(temporary.iterdir())


def test_a_folder_that_was_removed_meanwhile_is_made_again(temporary):
    with SecretFile("job", {}) as first, SecretFile("job", {}) as second, SecretFile("other", {}) as other:
        other.secret()
        other.remove()
        secret = first.secret()
        assert second.secret() == secret, "each rank found a folder of its own"
        first.remove()
    assert not list(temporary.iterdir())


def test_a_runtime_directory_stays(runtime, temporary):
    with SecretFile("job", {"XDG_RUNTIME_DIR": str(runtime)}) as file:
        file.secret()
        file.remove()
    assert runtime.exists()


def run_job(name):
    """Is a job of two ranks that come at about the same time; returns their secrets, and removes the file."""
    with SecretFile(name, {}) as first, SecretFile(name, {}) as second:
        secrets = first.secret(), second.secret()
        first.remove()
    return secrets


def test_jobs_that_remove_the_folder_do_not_disturb_others(temporary):
    with ThreadPoolExecutor(8) as threads:
        for number, (first, second) in enumerate(threads.map(run_job, [f"job {number}" for number in range(200)])):
            assert first == second, number
    assert not list(temporary.iterdir())


def test_its_folder_is_closed_with_it(runtime):
    before = os.listdir("/proc/self/fd")
    secret_of("slurm-1.0", runtime)
    assert len(os.listdir("/proc/self/fd")) == len(before)
