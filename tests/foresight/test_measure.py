"""Steps timed on this machine: the rank runs alone with real tensors, and makes the calls that were recorded."""

import ctypes
import errno
import os
import re
import signal
import socket
from dataclasses import replace
from threading import Thread

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import echelon
from echelon._torch_private.tensors import FakeTensor
from echelon.foresight import measure
from echelon.foresight.calibrate import this_machine
from echelon.foresight.play.collectives import measured_seconds
from echelon.foresight.play.program import Post, Run, lower
from echelon.foresight.record.run import record
from echelon.foresight.record.steps import Timing
from echelon.foresight.trace import Collective, Kernel
from echelon.pipeline import Pipeline
from tests.foresight.test_calibrate import MEASURED

HERE = replace(MEASURED, machine=this_machine())


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(measure, "_TIMING", Timing(steps=2, seconds=0.0))


def layers(num=4, width=16):
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(num)))


def train(model, loss=lambda y: y.sum()):
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        optimizer.zero_grad()
        loss(model(torch.ones(4, 16))).backward()
        optimizer.step()


def ddp():
    dist.init_process_group("gloo")
    train(nn.parallel.DistributedDataParallel(layers(), bucket_cap_mb=0.001))


def fsdp():
    dist.init_process_group()
    model, mesh = layers(), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    train(fully_shard(model, mesh=mesh))


def tensor_parallel():
    dist.init_process_group()
    plan = {f"{index}.0": (ColwiseParallel(), RowwiseParallel())[index % 2] for index in range(4)}
    train(parallelize_module(layers(), init_device_mesh("cpu", (2,)), plan))


def torch_pipeline():
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    part = layers(2)
    stage = PipelineStage(part, rank, size, torch.device("cpu"))
    run = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    while True:
        optimizer.zero_grad()
        run.step(*[torch.ones(8, 16)] * (rank == 0), **{"target": torch.ones(8, 16)} if rank == size - 1 else {})
        optimizer.step()


def pipeline(group):
    pipe = Pipeline(layers(), group=group, schedule="1f1b", num_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    while True:
        optimizer.zero_grad()
        pipe.step(torch.ones(8, 16), target=torch.ones(8, 16))
        optimizer.step()


def own_ddp(group):
    train(echelon.DDP(layers(), group=group))


@pytest.mark.parametrize(
    "program",
    [
        ddp,
        pipeline,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (fsdp, tensor_parallel, torch_pipeline, own_ddp)),
    ],
)
def test_a_rank_that_runs_alone_makes_the_recorded_calls(program):
    seen = echelon.foresee(program, 2, gpu=HERE, network="shared-memory")
    for trace in seen.traces.values():
        assert not [each for each in trace.assumptions if "could not be timed" in each]
        ends, seconds = zip(*trace.measured, strict=True)
        assert list(ends) == sorted(ends)
        assert ends[-1] <= len(trace.entries)
        assert min(seconds) >= 0 < sum(seconds)
        role = seen.played.roles[trace.rank]
        assert sum(run.end - run.start for run in role.runs) >= 0.99 * sum(seconds)


def test_kernels_share_the_measured_time_between_two_calls():
    entries = record(ddp, 2, gpu=None)[0]
    first = next(index for index, each in enumerate(entries.entries) if isinstance(each, Collective))
    measured = replace(entries, measured=((first, 2.0), (first + 1, 0.5), (len(entries.entries), 3.0)))
    program = lower(measured, HERE)
    before = [index for index in range(first) if isinstance(entries.entries[index], Kernel)]
    after = [index for index in range(first, len(entries.entries)) if isinstance(entries.entries[index], Kernel)]
    assert sum(program.kernel_seconds[index] for index in before) == pytest.approx(2.0)
    assert sum(program.kernel_seconds[index] for index in after) == pytest.approx(3.0)
    runs = [each for each in program.operations if isinstance(each, Run | Post)]
    without_kernels = [each for each in runs if isinstance(each, Run) and not each.entries]
    assert [each.host for each in without_kernels] == [0.5]


def goes_by_values(group):
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        loss = model(torch.ones(4, 16)).sum()
        loss.backward()
        if loss.item() > 1e9:  # a loss of 1 is assumed
            group.barrier()
        else:
            group.all_reduce(torch.ones(1) * 2.0)
        if (loss * 0 + 3).item() > 2:
            group.all_reduce(torch.ones(1) * 2.0)
        optimizer.step()


def test_a_program_that_goes_by_values_keeps_its_usual_times_and_says_so():
    seen = echelon.foresee(goes_by_values, 2, gpu=HERE, network="shared-memory")
    assert any("could not be timed with real tensors" in each for each in seen.assumptions)
    assert all(not trace.measured for trace in seen.traces.values())


def untimed(program, num_ranks=1, **options):
    """Returns the notes on ranks that could not be timed, all of which have no times then."""
    seen = echelon.foresee(program, num_ranks, gpu=HERE, network="shared-memory", **options)
    assert all(not trace.measured for trace in seen.traces.values())
    return [each for each in seen.assumptions if "could not be timed with real tensors" in each]


def compiled():
    train(torch.compile(layers()))


def test_a_compiled_program_is_not_timed():
    (note,) = untimed(compiled)
    assert note.endswith("its compiled kernels are approximated")


def trained():
    def step():
        model(torch.ones(4, 16)).sum().backward()

    model = layers()
    for _ in range(3):
        step()


def test_a_program_watched_for_the_end_of_a_function_is_not_timed():
    (note,) = untimed(trained, until="step")
    assert note.endswith("slows the program down")


def test_ranks_that_would_not_fit_into_memory_are_not_timed(monkeypatch):
    # As many bytes as the parameters, without gradients and the optimizer's state.
    monkeypatch.setattr(measure, "_free_memory", lambda: 4.0 * sum(each.numel() for each in layers().parameters()))
    (note,) = untimed(own_training)
    assert re.search(r"tensors of all ranks of a host take .* GiB, and .* GiB are free$", note)


def own_training():
    train(layers())


def test_a_step_that_does_not_end_is_not_timed(monkeypatch):
    fork, children = os.fork, []

    def counted():
        children.append(fork())
        return children[-1]

    monkeypatch.setattr(os, "fork", counted)
    monkeypatch.setattr(measure, "_DEADLINE", 0.2)
    monkeypatch.setattr(measure, "_TIMING", Timing(steps=2, seconds=60.0))
    (note,) = untimed(own_training)
    assert note.endswith("it had not ended after 0.2 s")
    (child,) = children
    with pytest.raises(ChildProcessError):  # it was waited for
        os.waitpid(child, os.WNOHANG)


def dies(group):
    if not isinstance(torch.ones(1), FakeTensor):
        ctypes.CDLL(None).kill(os.getpid(), signal.SIGKILL)
    train(layers())


def test_a_rank_that_is_killed_is_not_timed():
    (note,) = untimed(dies)
    assert note.endswith("it died")


def test_a_process_that_cannot_be_copied_is_not_timed(monkeypatch):
    def fork():
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", fork)
    (note,) = untimed(own_training)
    assert note.endswith("this process cannot be copied: Resource temporarily unavailable")


def writes(path):
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        with open(path, "a") as file:
            file.write("step\n")
        model(torch.ones(4, 16)).sum().backward()
        optimizer.step()


def test_a_timed_rank_writes_nothing(tmp_path):
    path = tmp_path / "log.txt"
    seen = echelon.foresee(writes, 1, (str(path),), gpu=HERE, network="shared-memory", allow_writes=True)
    assert seen.traces[0].measured
    assert path.read_text() == "step\n" * 3  # of the recorded steps alone


def test_the_times_of_this_machine_do_not_move_to_another():
    seen = echelon.foresee(ddp, 2, gpu=HERE, network="shared-memory")
    elsewhere = seen.on(gpu=replace(MEASURED, machine="another"))
    assert all(not trace.measured for trace in elsewhere.traces.values())
    assert seen.on(network="loopback").traces == seen.traces


@pytest.mark.parametrize(
    ("kind", "num_ranks", "seconds"),
    [("all_reduce", 2, 1.0), ("all_reduce", 4, 3.0), ("all_reduce", 8, 5.0), ("reduce", 2, 7.0), ("message", 2, 0.0)],
)
def test_times_of_links_are_linear_in_the_logarithm_of_the_ranks(kind, num_ranks, seconds):
    links = {
        "all_reduce 2": ((8.0, 1.0), (16.0, 1.0)),
        "all_reduce 4": ((8.0, 3.0), (16.0, 3.0)),
        "reduce_scatter 2": ((8.0, 7.0), (16.0, 7.0)),
    }
    assert measured_seconds(links, kind, num_ranks, 10) == pytest.approx(seconds)


def test_timed_ranks_meet_until_each_has_reported():
    ends = [socket.socketpair() for _ in range(3)]
    met = []

    def rank(line, times):
        for _ in range(times):
            line.send(b".")
            met.append(line.recv(1))
        line.sendall(b"[0.5]")
        line.close()

    threads = [Thread(target=rank, args=(far, times)) for (_, far), times in zip(ends, (1, 3, 3), strict=True)]
    for each in threads:
        each.start()
    children = [measure._Child(number, 0, near) for number, (near, _) in enumerate(ends)]
    assert measure._reports(children) == {0: [0.5], 1: [0.5], 2: [0.5]}
    for each in threads:
        each.join()
    for near, _ in ends:
        near.close()
    assert met == [b"."] * 7
