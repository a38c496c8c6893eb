"""Environment of simulated ranks, as child processes see it."""

import multiprocessing
import os
import runpy
import subprocess
import sys

import pytest
import torch

import echelon

SHOW = [sys.executable, "-c", "import os; print(os.environ.get('OF_RANK'), os.environ.get('RANK'))"]


def shown(environ=None):
    return subprocess.run(SHOW, env=environ, capture_output=True, text=True, check=True).stdout.split()


def test_each_rank_starts_processes_with_its_own_environment():
    def program(group):
        os.environ["OF_RANK"] = str(group.rank)
        group.barrier()
        return shown(), shown({**os.environ, "OF_RANK": "given"})

    assert echelon.simulate(program, 2).results == [(["0", "0"], ["given", "0"]), (["1", "1"], ["given", "1"])]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_each_rank_starts_a_pool_with_its_own_environment(method):
    """By "spawn" its processes had no RANK, and of a variable of one name the value that any rank had set last."""

    def program(group):
        os.environ["OF_RANK"] = str(group.rank)
        group.barrier()
        with multiprocessing.get_context(method).Pool(1) as pool:
            return pool.map(os.getenv, ["OF_RANK", "RANK"])

    assert echelon.simulate(program, 2).results == [["0", "0"], ["1", "1"]]


def test_the_environment_as_bytes_is_that_of_the_rank():
    def program(group):
        os.environb[b"OF_RANK"] = b"%d" % group.rank
        group.barrier()
        return os.environ["OF_RANK"], os.environb[b"RANK"]

    assert echelon.simulate(program, 2).results == [("0", b"0"), ("1", b"1")]
    assert b"RANK" not in os.environb


def test_each_rank_runs_commands_with_its_own_environment(tmp_path):
    def program(group):
        os.environ["OF_RANK"] = str(group.rank)
        group.barrier()
        status = os.system(f"echo $OF_RANK $RANK > {tmp_path}/{group.rank}; exit 3")  # the call under test
        return os.waitstatus_to_exitcode(status), (tmp_path / str(group.rank)).read_text()

    assert echelon.simulate(program, 2).results == [(3, "0 0\n"), (3, "1 1\n")]


def test_a_rank_may_change_its_arguments_in_place(monkeypatch):
    """Launchers of trainers do. The change reached the other ranks, and the process after the simulation."""
    monkeypatch.setattr(sys, "argv", ["program.py"])

    def program(group):
        sys.argv.append(f"--rank={group.rank}")
        group.barrier()
        return sys.argv

    assert echelon.simulate(program, 2).results == [["program.py", "--rank=0"], ["program.py", "--rank=1"]]
    assert sys.argv == ["program.py"]


def test_a_rank_keeps_its_state_over_a_call_that_fails():
    """A call on a closed backend lets time pass, and so other ranks. It used to return with the state of one."""

    def program(group):
        part = group.subgroup(range(2))
        group.barrier()
        if group.rank == 0:
            group.close()
            for _ in range(20):
                with pytest.raises(echelon.Closed):
                    part.isend(torch.ones(1), 1)
                assert os.environ["RANK"] == "0"
        else:
            for _ in range(2000):
                group.backend.now()

    echelon.simulate(program, 2, costs="measured")


def test_processes_after_a_simulation_have_the_environment_from_before(monkeypatch):
    def program(group):
        os.environ["OF_RANK"] = str(group.rank)
        os.environ["RANK"] = "changed"

    monkeypatch.setenv("RANK", "outside")
    echelon.simulate(program, 2)
    assert shown() == ["None", "outside"]


def test_each_rank_has_its_own_main_module(tmp_path):
    """Ranks that run a script by runpy put back each other's module otherwise, and leave one of them behind."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "import torch\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "main = sys.modules['__main__']\n"
        "for src in range(dist.get_world_size()):\n"
        "    dist.broadcast_object_list([None], src=src)\n"
        "assert main.__dict__ is globals() and sys.modules['__main__'] is main\n"
        "if dist.get_rank() == 0:\n"  # ends last, and began first
        "    dist.recv(torch.empty(1), src=1)\n"
        "else:\n"
        "    dist.send(torch.ones(1), dst=0)\n"
    )
    before = sys.modules["__main__"]
    echelon.simulate(lambda: runpy.run_path(str(script), run_name="__main__"), 2)
    assert sys.modules["__main__"] is before
