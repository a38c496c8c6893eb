"""Calls that concern the whole process, made by a function that runs on simulated ranks."""

import atexit
import multiprocessing
import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, distribute_tensor

import echelon
from echelon.errors import InvalidArgument, UnsupportedOp
from tests.helpers.torch_groups import mesh_of_one


def start_process():
    multiprocessing.Process(target=lambda: 0).start()


def talk_in_thread():
    dist.init_process_group("gloo")
    thread = threading.Thread(target=lambda: dist.barrier(), name="mine")
    thread.start()
    thread.join()


def choose_gpu():
    rank = int(os.environ["RANK"])
    num_gpus = torch.cuda.device_count()
    return rank % num_gpus


def divide_without_gpus():
    return 1 // 0


def num_cores():
    return len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("main", "told"),
    [
        (lambda: torch.ones(1).cuda(), 'CUDA at .*: simulated ranks compute on the CPU: .*foresee.main, n, gpu="h100"'),
        (lambda: torch.cuda.Stream(), "CUDA at .*: simulated ranks compute on the CPU: .*echelon.foresee"),
        (
            lambda: dist.init_process_group(device_id=torch.device("cuda")),
            "CUDA at .*: .*device_id.*: .*echelon.foresee",
        ),
        (
            choose_gpu,
            r"by zero at .*: return rank % num_gpus, and .*device_count.* was 0 at .*: num_gpus = .*foresee",
        ),
        (lambda: os.fork(), "os.fork at .*: simulated ranks are threads of one process"),
        (start_process, "a process of <lambda> is started at .*: simulated ranks are threads"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "os.kill of the process at"),
        (lambda: signal.alarm(5), "signal.alarm at .*: no signal reaches a rank"),
        (lambda: dist.rpc.init_rpc("a"), "torch.distributed.rpc.init_rpc at .*: the rpc package"),
        (
            lambda: torch.multiprocessing.spawn(print, nprocs=3),
            r"spawn.nprocs=3. on 2 simulated ranks.*simulate 3 ranks",
        ),
    ],
)
def test_a_call_is_refused_with_its_line_and_advice(main, told):
    with pytest.raises((UnsupportedOp, echelon.LaunchError), match=told) as raised:
        echelon.simulate(main, 2)
    assert "\n" not in str(raised.value)
    assert os.path.basename(__file__) in str(raised.value) or "spawn" in told


def test_a_line_that_cannot_be_read_is_told_by_its_number():
    program = compile("torch.ones(1).cuda()", "gone.py", "exec")
    with pytest.raises(UnsupportedOp, match=r"^CUDA at gone.py:1: simulated ranks"):
        echelon.simulate(lambda: exec(program, {"torch": torch}), 2)


def test_a_division_by_another_zero_is_an_error_of_its_own():
    with pytest.raises(ZeroDivisionError):
        echelon.simulate(divide_without_gpus, 2)


def test_a_thread_that_communicates_is_refused_though_python_would_go_on():
    with pytest.raises(UnsupportedOp, match=r"thread 'mine' communicates at .*, and is not one of the simulation's"):
        echelon.simulate(talk_in_thread, 2)


def test_calls_that_a_rank_may_make_are_made_for_it_alone():
    def main():
        dist.init_process_group("nccl")
        rank = dist.get_rank()
        atexit.register(lambda: (dist.barrier(), ended.append(rank)))
        before = signal.signal(signal.SIGTERM, lambda *_: None)
        torch.multiprocessing.spawn(lambda local_rank: spawned.append(local_rank), nprocs=2)
        return torch.cuda.is_available(), before is handler, num_cores()

    ended, spawned, handler = [], [], signal.getsignal(signal.SIGTERM)
    run = echelon.simulate(main, 2)
    assert run.results == [(False, True, num_cores())] * 2
    assert sorted(ended) == sorted(spawned) == [0, 1]
    assert signal.getsignal(signal.SIGTERM) is handler


def cores_of_child():
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(num_cores)


def test_a_child_process_computes_on_all_cores_and_calls_the_originals():
    assert echelon.simulate(cores_of_child, 1).results == [num_cores()]


def test_a_child_process_is_not_stopped_by_a_group_that_was_destroyed_before():
    """DTensor's cache of this thread keeps it. Its destructor would join threads that the child does not have."""
    with mesh_of_one() as mesh:
        assert (distribute_tensor(torch.ones(2), mesh, [Replicate()]) + 1).to_local().tolist() == [2.0, 2.0]
    del mesh
    assert echelon.simulate(cores_of_child, 1).results == [num_cores()]


@pytest.mark.parametrize("backend", ["glooo", "cpu:glooo,cuda:nccl"])
def test_a_backend_that_torch_does_not_know_is_refused(backend):
    with pytest.raises(InvalidArgument, match=r"backend 'glooo' of torch\.distributed: did you mean gloo"):
        echelon.simulate(lambda: dist.init_process_group(backend), 2)


def test_a_group_of_no_ranks_is_refused():
    """The error told of init_process_group, "for rank None of 0"."""

    def program():
        dist.init_process_group()
        dist.new_group([])

    with pytest.raises(InvalidArgument, match=r"new_group\(\[\]\): name the ranks of the group"):
        echelon.simulate(program, 2)


@pytest.mark.parametrize("backend", [None, "GLOO", "cpu:gloo,cuda:nccl", "mpi", "ucc", "echelon", "cpu:echelon"])
def test_every_backend_of_torch_is_simulated(backend):
    echelon.simulate(lambda: dist.init_process_group(backend), 2)
