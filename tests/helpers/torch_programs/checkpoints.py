"""Programs with torch.distributed.checkpoint: saved at once or beside the program, and loaded in another layout."""

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.torch_programs.common import Result, digest, mlp, program, shared_folder, train
from tests.helpers.torch_programs.sharded import sharded


def _state(model, optimizer):
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def _resumed(rank, mesh, folder):
    """Returns losses of a new model with other weights, after it was loaded, and its digest before them."""
    torch.manual_seed(1)
    model = sharded(mesh)
    _, optimizer = train(model, rank, steps=1)
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    loaded = digest(parameter.full_tensor() for parameter in model.parameters())
    return loaded, train(model, rank, optimizer=optimizer)[0]


@program
def saved_and_loaded(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    model = sharded(mesh)
    losses, optimizer = train(model, rank)
    with shared_folder() as folder:
        dcp.save(_state(model, optimizer), checkpoint_id=folder)
        saved = digest(parameter.full_tensor() for parameter in model.parameters())
        on = train(model, rank, optimizer=optimizer)[0]
        loaded, resumed = _resumed(rank, mesh, folder)
    return Result([losses, on, resumed == on], [saved, loaded == saved])


@program
def saved_beside(rank, world_size):
    """The program trains on while a checkpoint is written."""
    mesh = init_device_mesh("cpu", (world_size,))
    model = sharded(mesh)
    losses, optimizer = train(model, rank)
    with shared_folder() as folder:
        saved = digest(parameter.full_tensor() for parameter in model.parameters())
        saving = dcp.async_save(_state(model, optimizer), checkpoint_id=folder)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        saving.result()
        loaded, resumed = _resumed(rank, mesh, folder)
    return Result([losses, resumed], [saved, loaded == saved])


@program
def loaded_in_another_layout(rank, world_size):
    """Rows become columns, one dimension of a mesh two, and shards whole tensors."""
    generator = torch.Generator().manual_seed(2)
    whole = torch.randn(11, 6, generator=generator)
    line = init_device_mesh("cpu", (world_size,))
    square = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("rows", "columns"))
    layouts = [
        (line, [Shard(1)]),
        (line, [Replicate()]),
        (square, [Shard(0), Shard(1)]),
        (square, [Replicate(), Shard(0)]),
    ]
    own, equal = [], []
    with shared_folder() as folder:
        dcp.save({"values": distribute_tensor(whole, line, [Shard(0)]), "step": 3}, checkpoint_id=folder)
        for mesh, placements in layouts:
            values = distribute_tensor(torch.zeros(11, 6), mesh, placements)
            state = {"values": values, "step": 0}
            dcp.load(state, checkpoint_id=folder)
            own.append(digest([values]))
            equal.append([torch.equal(values.full_tensor(), whole), state["step"]])
        plain = {"values": torch.zeros(11, 6)}
        dcp.load(plain, checkpoint_id=folder)
        equal.append(torch.equal(plain["values"], whole))
    return Result(own, equal)


@program
def from_sharded_to_replicated(rank, world_size):
    """A checkpoint of FSDP2 is loaded by DDP, and back."""
    model = sharded(init_device_mesh("cpu", (world_size,)))
    train(model, rank)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    everywhere = [len(whole), digest(parameter.full_tensor() for parameter in model.parameters())]
    with shared_folder() as folder:
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
        torch.manual_seed(1)
        replica = DistributedDataParallel(mlp())
        state = {"model": get_model_state_dict(replica)}
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(replica, state["model"])
        everywhere.append(digest(replica.parameters()))
    other = sharded(init_device_mesh("cpu", (world_size,)))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, get_model_state_dict(replica) if rank == 0 else {}, options=options)
    everywhere.append(digest(parameter.full_tensor() for parameter in other.parameters()))
    return Result(digest(other.parameters()), everywhere)


class Counter:
    """State of a program that is no tensor."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count, "weights": torch.full((3,), float(self.count))}

    def load_state_dict(self, state):
        self.count = state["count"]


@program
def states_of_objects(rank, world_size):
    counter = Counter()
    counter.count = 41
    with shared_folder() as folder:
        dcp.save({"counter": counter, f"of rank {rank}": torch.full((2,), float(rank))}, checkpoint_id=folder)
        counter.count = 0
        own = {"counter": counter, f"of rank {rank}": torch.zeros(2)}
        dcp.load(own, checkpoint_id=folder)
    assert not isinstance(own[f"of rank {rank}"], DTensor)
    return Result(own[f"of rank {rank}"].tolist(), counter.count)
