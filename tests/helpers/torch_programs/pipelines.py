"""Programs with torch.distributed.pipelining: every schedule, and stages that are data-parallel or sharded."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    SplitPoint,
    pipeline,
)
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.torch_programs.common import WIDTH, Result, digest, mlp, program

CPU = torch.device("cpu")
MULTI = {ScheduleInterleaved1F1B: 2, ScheduleLoopedBFS: 2, ScheduleInterleavedZeroBubble: 2}
V_SHAPED = {ScheduleZBVZeroBubble: 2, ScheduleDualPipeV: 2}


def _error(outputs, targets):
    return (outputs - targets).square().mean()


def _stages(schedule, rank, num_ranks, group=None, wrap=lambda layer: layer):
    """Returns this rank's stages, and the schedule over them."""
    num_local = {**MULTI, **V_SHAPED}.get(schedule, 1)
    total = num_ranks * num_local
    numbers = [rank, total - 1 - rank] if schedule in V_SHAPED else range(rank, total, num_ranks)
    layers = mlp(depth=total)
    stages = [PipelineStage(wrap(layers[number]), number, total, CPU, group=group) for number in numbers]
    return stages, schedule(stages if num_local > 1 else stages[0], 2 * num_ranks, loss_fn=_error)


def _run(stages, schedule, microbatches, seed=7, steps=2):
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    is_first, is_last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    generator = torch.Generator().manual_seed(seed)
    losses, outputs = [], None
    for _ in range(steps):
        inputs, targets = (torch.randn(2 * microbatches, WIDTH, generator=generator) for _ in range(2))
        of_step = []
        told = {"target": targets, "losses": of_step} if is_last else {}
        outputs = schedule.step(*((inputs,) if is_first else ()), **told)
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in of_step])
    return Result([losses, digest(parameters), None if outputs is None else digest([outputs])])


def _of(schedule_class):
    def run(rank, world_size):
        return _run(*_stages(schedule_class, rank, world_size), 2 * world_size)

    return run


# One program for each schedule, written out: other processes find a program by its name.


@program
def gpipe(rank, world_size):
    return _of(ScheduleGPipe)(rank, world_size)


@program
def one_f_one_b(rank, world_size):
    return _of(Schedule1F1B)(rank, world_size)


@program
def interleaved(rank, world_size):
    return _of(ScheduleInterleaved1F1B)(rank, world_size)


@program
def looped_bfs(rank, world_size):
    return _of(ScheduleLoopedBFS)(rank, world_size)


@program
def interleaved_zero_bubble(rank, world_size):
    return _of(ScheduleInterleavedZeroBubble)(rank, world_size)


@program
def zbv(rank, world_size):
    return _of(ScheduleZBVZeroBubble)(rank, world_size)


@program
def dual_pipe_v(rank, world_size):
    return _of(ScheduleDualPipeV)(rank, world_size)


@program
def forward_only(rank, world_size):
    stages, schedule = _stages(ScheduleGPipe, rank, world_size)
    inputs = torch.randn(2 * world_size, WIDTH, generator=torch.Generator().manual_seed(7))
    told = {"target": inputs, "losses": []} if stages[0].is_last else {}
    outputs = schedule.eval(*((inputs,) if stages[0].is_first else ()), **told)
    losses = [loss.item() for loss in told.get("losses", ())]
    return Result([None if outputs is None else digest([outputs]), losses])


@program
def traced(rank, world_size):
    """A model that torch.export divides."""
    model = mlp(depth=world_size)
    inputs = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(3))
    splits = {str(number): SplitPoint.BEGINNING for number in range(1, world_size)}
    pipe = pipeline(model, mb_args=(inputs,), split_spec=splits)
    stage = pipe.build_stage(rank, CPU)
    return _run([stage], ScheduleGPipe(stage, 2 * world_size, loss_fn=_error), 2 * world_size)


def _beside_data_parallel(rank, world_size, wrap):
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("data", "stages"))
    number, group = mesh["stages"].get_local_rank(), mesh.get_group("stages")
    num_stages = world_size // 2
    stages, schedule = _stages(Schedule1F1B, number, num_stages, group, wrap=lambda layer: wrap(layer, mesh["data"]))
    return _run(stages, schedule, 2 * num_stages, seed=mesh["data"].get_local_rank())


@program
def stages_in_ddp(rank, world_size):
    def wrap(layer, mesh):
        return DistributedDataParallel(layer, process_group=mesh.get_group())

    return _beside_data_parallel(rank, world_size, wrap)


@program
def stages_in_fsdp2(rank, world_size):
    return _beside_data_parallel(rank, world_size, lambda layer, mesh: fully_shard(layer, mesh=mesh))


class Pair(nn.Module):
    """Stage with two values in and out."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, first, second):
        return self.one(first).tanh(), self.other(second) + first


@program
def many_values(rank, world_size):
    torch.manual_seed(rank)
    stage = PipelineStage(Pair(), rank, world_size, CPU)
    schedule = Schedule1F1B(stage, 2 * world_size, loss_fn=lambda pair, target: _error(pair[0] + pair[1], target))
    generator = torch.Generator().manual_seed(5)
    first, second, target = (torch.randn(2 * world_size, WIDTH, generator=generator) for _ in range(3))
    losses = []
    told = {"target": target, "losses": losses} if stage.is_last else {}
    schedule.step(*((first, second) if stage.is_first else ()), **told)
    dist.barrier()
    gradients = digest(parameter.grad for parameter in stage.submod.parameters() if parameter.grad is not None)
    return Result([[loss.item() for loss in losses], gradients])
