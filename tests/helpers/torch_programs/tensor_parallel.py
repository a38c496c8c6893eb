"""Programs with DTensor and tensor parallelism, with and without FSDP2 beside it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from tests.helpers.torch_programs.common import WIDTH, Result, digest, program, state_digest


class Block(nn.Module):
    """Feed-forward block with a norm before it."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, inputs):
        return inputs + self.down(torch.nn.functional.gelu(self.up(self.norm(inputs))))


class Language(nn.Module):
    """Embedding, blocks and a head over a small vocabulary."""

    def __init__(self, vocabulary=32, width=WIDTH, depth=2):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


PLAIN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def _trained(model, seed, loss_of, steps=2):
    """Trains on data that ranks of one tensor-parallel group share."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        loss = loss_of(model, generator)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.full_tensor() if isinstance(loss, DTensor) else loss))
    whole = digest(
        parameter.full_tensor() if isinstance(parameter, DTensor) else parameter for parameter in model.parameters()
    )
    return Result([losses, digest(model.parameters()), state_digest(optimizer)], whole)


def _squares(model, generator):
    return model(torch.randn(2, 16, WIDTH, generator=generator)).square().mean()


def _entropy(model, generator):
    tokens = torch.randint(32, (2, 17), generator=generator)
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@program
def tensor_parallel(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    return _trained(parallelize_module(Block(), mesh, PLAIN), 0, _squares)


def _sequence_parallel(model, mesh):
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for block in model.blocks:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
    return model


@program
def sequence_parallel(rank, world_size):
    model = _sequence_parallel(Language(), init_device_mesh("cpu", (world_size,)))
    return _trained(model, 0, _entropy)


@program
def loss_in_parts(rank, world_size):
    """The logits stay sharded over the vocabulary, in the loss and in the backward."""
    mesh = init_device_mesh("cpu", (world_size,))
    layouts = {"head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    model = parallelize_module(Language(), mesh, layouts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(0))
    with loss_parallel():
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
    optimizer.step()
    return Result(digest(model.parameters()), loss.full_tensor().item())


@program
def prepared_input(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    prepare = PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),), use_local_output=True)
    model = parallelize_module(Block(), mesh, {"": prepare, **PLAIN})

    def loss_of(model, generator):
        inputs = torch.randn(world_size, 4, WIDTH, generator=generator)
        return model(inputs[rank : rank + 1]).square().mean()

    return _trained(model, 0, loss_of)


@program
def fsdp2_and_tensor_parallel(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("data", "tensor"))
    model = _sequence_parallel(Language(), mesh["tensor"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return _trained(model, mesh["data"].get_local_rank(), _entropy)


@program
def meshes(rank, world_size):
    """Slices of a mesh, a flattened one, and the groups behind them."""
    mesh = init_device_mesh("cpu", (2, world_size // 2, 1), mesh_dim_names=("first", "second", "third"))
    flat = mesh["first", "second"]._flatten("both")
    names = [mesh["first"].mesh.tolist(), mesh["second"].mesh.tolist(), mesh.get_coordinate(), flat.mesh.tolist()]
    sums = []
    for group in (mesh.get_group("first"), mesh.get_group("second"), flat.get_group()):
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=group)
        sums.append(total.item())
    return Result([names, sums], sums[2])


@program
def redistribution(rank, world_size):
    """Every way from one placement to another, with sizes that do not divide."""
    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(7.0 * 9).reshape(7, 9)
    kinds = [Replicate(), Shard(0), Shard(1)]
    parts, wholes = [], []
    for source in kinds:
        for target in kinds:
            moved = distribute_tensor(whole, mesh, [source]).redistribute(mesh, [target])
            parts.append(moved)
            wholes.append(moved.full_tensor())
    partial = DTensor.from_local(whole * (rank + 1), mesh, [Partial()])
    for target in kinds:
        wholes.append(partial.redistribute(mesh, [target]).full_tensor())
    product = distribute_tensor(whole, mesh, [Shard(1)]) @ distribute_tensor(whole.t().contiguous(), mesh, [Shard(0)])
    return Result(digest(parts), [digest(wholes), product.full_tensor().sum().item()])


@program
def gradients_of_dtensors(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randn(8, 8, generator=generator) for _ in range(2))
    first = distribute_tensor(left, mesh, [Shard(0)]).requires_grad_()
    second = distribute_tensor(right, mesh, [Shard(1)]).requires_grad_()
    outputs = (first @ second.redistribute(mesh, [Replicate()])).relu().sum(dim=0).softmax(dim=0)
    outputs.square().sum().backward()
    gradients = [first.grad.full_tensor(), second.grad.full_tensor()]
    return Result(digest([first.grad, second.grad]), [digest(gradients), outputs.full_tensor().tolist()])


@program
def random_dtensors(rank, world_size):
    """Random operations of DTensors, which draw from the rank's own state on the CPU."""
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(rank)
    ones = torch.distributed.tensor.ones(6, 4, device_mesh=mesh, placements=[Shard(0)])
    dropped = nn.functional.dropout(ones, 0.5)
    drawn = nn.init.normal_(torch.distributed.tensor.zeros(5, device_mesh=mesh, placements=[Shard(0)]))
    draws = torch.rand(2).tolist()
    return Result([digest([dropped, drawn]), draws], digest([dropped.full_tensor(), drawn.full_tensor()]))


@program
def distributed_module(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))

    def partition(name, module, mesh):
        for key, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))

    def replicate(module, inputs, mesh):
        return tuple(DTensor.from_local(each, mesh, [Replicate()]) for each in inputs)

    def local(module, output, mesh):
        return output.redistribute(mesh, [Replicate()]).to_local()

    return _trained(distribute_module(Block(), mesh, partition, replicate, local), 0, _squares)


@program
def functions_of_local_parts(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))

    def shifted(part):
        return part + dist.get_rank()

    mapped = local_map(shifted, out_placements=[Shard(0)], in_placements=([Shard(0)],), device_mesh=mesh)
    result = mapped(distribute_tensor(torch.zeros(world_size, 2), mesh, [Shard(0)]))
    return Result(result.to_local().tolist(), result.full_tensor().tolist())
