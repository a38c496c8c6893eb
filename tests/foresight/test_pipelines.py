"""Pipelines of torch.distributed.pipelining and messages, foreseen."""

import linecache
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

import echelon
from echelon import CollectiveMismatch, DeadlockError
from echelon.foresight.record.run import record
from echelon.foresight.trace import Message

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning", "ignore::UserWarning:torch")
WIDTH, ROWS, LAYERS = 2048, 2048, 4


def pipeline(pp, name="1F1B", microbatches=4):
    """Stages of equal work on every rank. Data parallel by FSDP2 with the other ranks."""
    dist.init_process_group("nccl")
    device = torch.device("cuda")
    mesh = init_device_mesh("cuda", (pp, dist.get_world_size() // pp), mesh_dim_names=("pp", "dp"))
    rank, kind = mesh["pp"].get_local_rank(), get_schedule_class(name)
    is_multi = issubclass(kind, PipelineScheduleMulti)
    count = pp * (2 if is_multi else 1)
    numbers = [rank] if not is_multi else [rank, count - 1 - rank if "V" in name else rank + pp]
    depth = LAYERS * pp // count
    parts = [nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth))).to(device) for _ in numbers]
    if mesh["dp"].size() > 1:
        for part in parts:
            fully_shard(part, mesh=mesh["dp"], reshard_after_forward=False)
    group = mesh["pp"].get_group()
    stages = [
        PipelineStage(part, number, count, device, group=group) for part, number in zip(parts, numbers, strict=True)
    ]
    schedule = kind(stages if is_multi else stages[0], microbatches, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD([weight for part in parts for weight in part.parameters()])
    while True:
        x, losses = torch.empty(microbatches * ROWS, WIDTH, device=device), []
        inputs = (x,) if 0 in numbers else ()
        schedule.step(*inputs, **({"target": x, "losses": losses} if count - 1 in numbers else {}))
        if losses and mesh["dp"].get_local_rank() == 0:  # so that one pipeline differs from the others
            assert losses[0].item() == 1
        optimizer.step()
        optimizer.zero_grad()


def test_the_bubble_of_equal_stages_is_that_of_1f1b():
    seen = echelon.foresee(lambda: pipeline(4), 4)
    assert seen.bubble == pytest.approx(3 / (4 + 3), abs=0.02)
    assert "bubble" in str(seen)


@pytest.mark.slow
def test_schedules_have_the_published_order():
    names = (
        "GPipe",
        "1F1B",
        "Interleaved1F1B",
        "LoopedBFS",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
    )
    bubbles = {name: echelon.foresee(partial(pipeline, 4, name, 8), 4).bubble for name in names}
    assert bubbles["GPipe"] == pytest.approx(bubbles["1F1B"], abs=0.01)
    assert bubbles["1F1B"] == pytest.approx(3 / 11, abs=0.02)
    assert bubbles["Interleaved1F1B"] == pytest.approx(3 / 19, abs=0.02)
    assert bubbles["Interleaved1F1B"] <= bubbles["LoopedBFS"] < bubbles["1F1B"]
    for name in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        assert bubbles[name] < bubbles["Interleaved1F1B"]


def test_pipelines_side_by_side_fold_to_one():
    seen = echelon.foresee(lambda: pipeline(2), 32)
    first, second, other = sorted(set(seen.classes))
    assert (first, second) == (0, 16)
    assert seen.classes[:16] == (0,) * 16
    assert other in seen.classes[17:]
    # A last stage of which only the pipeline of rank 0 has a first one, waits as that one does.
    assert seen.played.roles[other].waiting == pytest.approx(seen.played.roles[16].waiting, rel=0.1)


def batches():
    dist.init_process_group("nccl")
    other = 1 - dist.get_rank()
    x, y = torch.ones(8, device="cuda"), torch.empty(8, device="cuda")
    dist.recv(y, other) if other == 0 else dist.send(x, other)
    for _ in range(2):
        works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, y, other), dist.P2POp(dist.isend, x, other)])
        for work in works:
            work.wait()


def test_messages_of_a_batch_begin_together():
    for rank, trace in record(batches, 2, (0, 1)).items():
        messages = [entry for entry in trace.entries if isinstance(entry, Message)]
        assert [message.batch for message in messages] == [-1, 1, 1, 2, 2]
        assert [message.is_send for message in messages] == [rank == 0, False, True, False, True]


def flags():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    flag = torch.tensor([7 if rank == 0 else 0], device="cuda")
    if rank:
        dist.recv(flag, rank - 1)
    if rank < dist.get_world_size() - 1:
        dist.send(flag + 1, rank + 1)
    assert flag.item() == 7 + rank


def test_a_number_travels_with_its_message():
    assert record(flags, 4, (3,)).keys() == {0, 1, 2, 3}


def mistaken(mistake):
    dist.init_process_group("nccl")
    rank, device = dist.get_rank(), "cuda"
    x, y = torch.ones(8, device=device), torch.empty(8, device=device)
    if mistake == "shape":
        if rank == 0:
            dist.send(x[:4].clone(), 1)  # shape
        else:
            dist.recv(y, 0)  # shape
    elif mistake == "dtype":
        if rank == 0:
            dist.send(x.half(), 1)  # dtype
        else:
            dist.recv(y, 0)  # dtype
    elif mistake == "receive":
        if rank == 0:
            dist.isend(x, 1)  # receive
    elif mistake == "tag":
        if rank == 0:
            dist.isend(x, 1, tag=3)  # tag
        else:
            dist.irecv(y, 0, tag=4)
    elif rank == 0:
        dist.recv(y, 1)  # deadlock
        dist.send(x, 1)
    else:
        dist.recv(y, 0)  # deadlock
        dist.send(x, 0)


@pytest.mark.parametrize("mistake", ["shape", "dtype", "receive", "tag", "deadlock"])
def test_mistakes_of_messages_are_named_with_their_lines(mistake):
    error = DeadlockError if mistake == "deadlock" else CollectiveMismatch
    with pytest.raises(error) as caught:
        echelon.foresee(lambda: mistaken(mistake), 2)
    # Of a mistake with a line on each rank, both are named.
    lines = [number for number, text in enumerate(linecache.getlines(__file__), 1) if text.endswith(f"# {mistake}\n")]
    assert lines
    assert all(f"test_pipelines.py:{line}" in str(caught.value) for line in lines)
