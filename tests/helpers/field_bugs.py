"""Bugs that people met with torch.distributed, Lightning, Accelerate, DeepSpeed and transformers, rewritten small.

Each program is an ordinary one, started once per rank. `at:` marks where ranks are when they can go no further.
"""

import os
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Bug(NamedTuple):
    """Program with a bug."""

    program: Callable[[], object]
    ranks: int
    thread: str
    """Repository and number of an issue or pull request that reports it."""
    what: str
    """What is wrong with the program, in one sentence."""


BUGS: dict[str, Bug] = {}


def bug(ranks: int, thread: str, what: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    def add(program):
        BUGS[program.__name__] = Bug(program, ranks, thread, what)
        return program

    return add


def begin() -> int:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    return dist.get_rank()


# A rank that skips a call


@bug(4, "pytorch/pytorch#138322", "One rank skips the first of two barriers, and pairs its second with their first.")
def skipped_barrier():
    rank = begin()
    if rank != 3:
        dist.barrier()
    dist.barrier()  # at: 0 1 2


@bug(2, "deepspeedai/DeepSpeed#2993", "Rank 0 alone saves a checkpoint, and saving ends with a barrier.")
def checkpoint_on_rank_0():
    def save_checkpoint(state):
        saved.append(state)
        dist.barrier()  # at: 0

    saved = []
    if begin() == 0:
        save_checkpoint({"step": 100})
    total = torch.ones(2)
    dist.all_reduce(total)  # at: 1


@bug(2, "Lightning-AI/pytorch-lightning#16541", "Predictions are gathered in a branch that only rank 0 takes.")
def gathered_on_rank_0():
    rank = begin()
    predictions = torch.full((3,), float(rank))
    if rank == 0:
        gathered = [torch.empty(3) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, predictions)  # at: 0


@bug(2, "pytorch/pytorch#44957", "One rank skips a module that adds up batch statistics of all ranks.")
def skipped_batch_statistics():
    class SyncNorm(nn.Module):
        def forward(self, x):
            mean = x.mean(0)
            dist.all_reduce(mean)  # at: 0
            return x - mean / dist.get_world_size()

    rank = begin()
    encoder, decoder = SyncNorm(), SyncNorm()
    x = encoder(torch.randn(4, 3))
    is_first_frame = rank == 1
    if not is_first_frame:
        decoder(x)


@bug(2, "huggingface/accelerate#1940", "Each rank decides by its own loss when to stop training.")
def early_stopping():
    rank = begin()
    weight = torch.ones(2)
    for step in range(5):
        loss = 1.0 / (1 + step * (rank + 1))
        if loss < 0.3:
            break
        dist.all_reduce(weight)  # at: 0


@bug(2, "Lightning-AI/pytorch-lightning#19045", "Ranks compare metrics of their own, so only one has a new best model.")
def best_model_by_rank():
    rank = begin()
    best = 0.5
    accuracy = 0.4 + 0.2 * rank
    if accuracy > best:
        path = ["best.pt" if rank == 0 else None]
        dist.broadcast_object_list(path, src=0)  # at: 1
    dist.barrier()  # at: 0


@bug(2, "Lightning-AI/pytorch-lightning#20187", "The rank with an exception saves, and saving broadcasts a path.")
def checkpoint_in_except():
    rank = begin()
    try:
        if rank == 1:
            raise ValueError("cannot decode image 17")
        gradient = torch.ones(2)
        dist.all_reduce(gradient)  # at: 0
    except ValueError:
        path = ["last.pt"]
        dist.broadcast_object_list(path, src=0)  # at: 1
        raise


@bug(3, "pytorch/pytorch#83289", "One rank never comes to the monitored barrier.")
def monitored_barrier():
    rank = begin()
    if rank != 2:
        dist.monitored_barrier()  # at: 0 1


@bug(2, "pytorch/pytorch#85775", "Rank 1 waits for a seed that rank 0, whose data is used up, does not publish.")
def seed_never_set():
    rank = begin()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), wait_for_workers=False)
    batches = 0 if rank == 0 else 1
    if rank == 0 and batches:
        store.set("seed", "1234")
    if rank == 1:
        store.wait(["seed"])  # at: 1


@bug(2, "pytorch/pytorch#75097", "One rank destroys its process group while the other still trains.")
def destroyed_early():
    rank = begin()
    for _ in range(2 + rank):
        gradient = torch.ones(2)
        dist.all_reduce(gradient)  # at: 1
    dist.destroy_process_group()


@bug(2, "pytorch/pytorch#195500", "Garbage collection frees a shared buffer, which is a collective, on one rank only.")
def collective_in_del():
    class SharedBuffer:
        def __del__(self):
            if dist.is_initialized():
                dist.barrier()  # at: 0

    rank = begin()
    buffers = [SharedBuffer()]
    if rank == 0:
        buffers.clear()
    total = torch.ones(2)
    dist.all_reduce(total)  # at: 1
    buffers.clear()


# Other groups


@bug(4, "meta-pytorch/torchrec#4149", "Two process groups are used in another order by some of their ranks.")
def groups_in_other_order():
    rank = begin()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    row, column = rows[rank // 2], columns[rank % 2]
    x = torch.ones(2)
    for group in (column, row) if rank in (0, 3) else (row, column):
        dist.all_reduce(x, group=group)  # at: 0 1 2 3


@bug(4, "pytorch/pytorch#130102", "Each rank makes only the group that it is in, so the calls of new_group differ.")
def own_group_only():
    rank = begin()
    group = dist.new_group([0, 3] if rank in (0, 3) else [1, 2])  # at: 0 1 2 3
    dist.barrier(group)


@bug(3, "vllm-project/llm-compressor#2869", "Only its members make a group, so ranks name the next group differently.")
def group_made_by_members():
    rank = begin()
    if rank < 2:
        dist.new_group([0, 1])  # at: 0
    group = dist.new_group([0, 1, 2])  # at: 2
    dist.all_reduce(torch.ones(2), group=group)


@bug(3, "pytorch/pytorch#173608", "Ranks that made other numbers of groups synchronize a new one locally.")
def groups_counted_apart():
    rank = begin()
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    if rank < 2:
        group = dist.new_group([0, 1], use_local_synchronization=True)
        dist.all_reduce(torch.ones(2), group=group)  # at: 0 1


@bug(3, "pytorch/pytorch#118277", "Keys are gathered over all ranks, though only a group of them loads the checkpoint.")
def gathered_in_the_wrong_group():
    rank = begin()
    group = dist.new_group([0, 1])
    if rank in (0, 1):
        keys = [None, None, None]
        dist.all_gather_object(keys, ["weight", "bias"])  # at: 0 1
        dist.barrier(group)


# Other sizes, types and roots


@bug(2, "Lightning-AI/pytorch-lightning#7773", "The last batch is smaller on one rank, and is gathered as it is.")
def gathered_shapes():
    rank = begin()
    batch = torch.ones(4 if rank == 0 else 3, 2)
    gathered = torch.empty(2 * len(batch), 2)
    dist.all_gather_into_tensor(gathered, batch)  # at: 0 1


@bug(2, "huggingface/accelerate#167", "Sentences are padded to the longest of the rank's own batch, then gathered.")
def unpadded_predictions():
    rank = begin()
    tokens = torch.zeros(2, 5 + rank, dtype=torch.int64)
    gathered = [torch.empty_like(tokens) for _ in range(2)]
    dist.all_gather(gathered, tokens)  # at: 0 1


@bug(2, "pytorch/pytorch#150433", "One rank's tensor is bfloat16, the other's float32.")
def other_dtype():
    rank = begin()
    loss = torch.tensor([1.5, 2.5], dtype=torch.float32 if rank == 0 else torch.bfloat16)
    dist.all_reduce(loss)  # at: 0 1
    return loss


@bug(2, "pytorch/pytorch#39706", "Each rank reduces to itself.")
def other_root():
    rank = begin()
    total = torch.ones(3)
    dist.reduce(total, dst=rank)  # at: 0 1
    dist.barrier()


@bug(2, "pytorch/pytorch#117486", "A rank expects more rows of all_to_all_single than the other sends to it.")
def other_splits():
    rank = begin()
    rows = torch.ones(4, 2)
    received = torch.empty(5 if rank == 0 else 4, 2)
    dist.all_to_all_single(received, rows, [2, 3] if rank == 0 else [2, 2], [2, 2])  # at: 0 1


@bug(2, "pytorch/pytorch#126600", "The last microbatch has fewer rows than the receiver's buffer.")
def uneven_microbatches():
    rank = begin()
    for rows in (3, 3, 2):
        if rank == 0:
            dist.send(torch.ones(rows, 4), 1)
        else:
            dist.recv(torch.empty(3, 4), 0)  # at: 1


# Messages


@bug(2, "pytorch/pytorch#108378", "A message is sent that nobody receives.")
def send_without_receive():
    if begin() == 0:
        work = dist.isend(torch.ones(4), 1)
        work.wait()  # at: 0


@bug(2, "NVIDIA/nccl#2130", "A batch has a receive that the other rank's batch has no send for.")
def batch_without_its_send():
    rank = begin()
    x, received = torch.ones(2), torch.empty(2)
    if rank == 0:
        batch = [dist.P2POp(dist.isend, x, 1), dist.P2POp(dist.irecv, received, 1)]
    else:
        batch = [dist.P2POp(dist.irecv, received, 0)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()  # at: 0


@bug(2, "meta-pytorch/torchcomms#2885", "Both ranks wait for a receive before they send.")
def receive_before_send():
    other = 1 - begin()
    x, received = torch.ones(2), torch.empty(2)
    for _ in range(2):
        dist.irecv(received, other).wait()  # at: 0 1
        dist.isend(x, other).wait()


# DDP


@bug(2, "Lightning-AI/pytorch-lightning#20404", "One rank's shard has a batch more than the other's.")
def uneven_batches():
    rank = begin()
    model = DistributedDataParallel(nn.Linear(2, 1))
    for batch in torch.ones(2 + rank, 4, 2):
        model(batch).sum().backward()  # at: 1


@bug(2, "Lightning-AI/pytorch-lightning#10947", "Each rank drops random samples before its sampler shares them out.")
def dataset_lengths():
    rank = begin()
    data = TensorDataset(torch.ones(8 if rank == 0 else 12, 2))
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data))
    model = DistributedDataParallel(nn.Linear(2, 1))
    for (batch,) in loader:
        model(batch).sum().backward()  # at: 1
    correct = torch.ones(1)
    dist.all_reduce(correct)  # at: 0


@bug(2, "pytorch/pytorch#54059", "Rank 0 validates with the DDP model, whose forward broadcasts buffers.")
def validated_on_rank_0():
    rank = begin()
    model = DistributedDataParallel(nn.BatchNorm1d(2))
    model(torch.randn(4, 2)).sum().backward()
    if rank == 0:
        model(torch.randn(4, 2))  # at: 0
    dist.barrier()  # at: 1


@bug(2, "pytorch/pytorch#49321", "The input decides on each rank which branches of the model get gradients.")
def other_branches():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 1), nn.Linear(2, 1)

        def forward(self, data):
            return sum(getattr(self, name)(x) for name, x in data.items())

    rank = begin()
    model = DistributedDataParallel(Branches())
    x = torch.ones(4, 2)
    model({"a": x, "b": x} if rank == 0 else {"a": x}).sum().backward()  # at: 0
    dist.barrier()  # at: 1


# FSDP and DTensor


def sharded(*layers: nn.Module) -> nn.Sequential:
    model = nn.Sequential(*layers)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@bug(2, "huggingface/accelerate#2000", "The main process alone gathers the state dict of an FSDP model.")
def state_dict_on_rank_0():
    rank = begin()
    model = sharded(nn.Linear(4, 4))
    if rank == 0:
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))  # at: 0
    dist.barrier()  # at: 1


@bug(2, "huggingface/transformers#29980", "Saving runs a sharded prompt encoder, and only rank 0 saves.")
def forward_on_rank_0():
    rank = begin()
    encoder = sharded(nn.Embedding(4, 4))
    if rank == 0:
        with torch.no_grad():
            encoder(torch.arange(4))  # at: 0
    dist.barrier()  # at: 1


@bug(2, "deepspeedai/DeepSpeed#8262", "Ranks stop generating at other lengths, though each token gathers parameters.")
def generated_lengths():
    rank = begin()
    student, teacher = sharded(nn.Linear(4, 4)), sharded(nn.Linear(4, 2))
    x = torch.ones(1, 4)
    with torch.no_grad():
        for _ in range(3 if rank == 0 else 2):
            x = student(x)  # at: 0
        teacher(x)  # at: 1


@bug(2, "deepspeedai/DeepSpeed#4808", "No token of one rank goes to a sharded expert, so its gather is skipped there.")
def unused_expert():
    rank = begin()
    experts = sharded(nn.Linear(4, 4), nn.Linear(4, 4))
    tokens = torch.ones(2, 4)
    chosen = [0, 1] if rank == 0 else [0]
    for index in chosen:
        tokens = experts[index](tokens)  # at: 0
    tokens.sum().backward()  # at: 1


@bug(2, "deepspeedai/DeepSpeed#8478", "A rank without gradients of experts skips a reduction of the norm for clipping.")
def clipped_norm():
    rank = begin()
    gradients = [torch.ones(2)]
    expert_gradients = [torch.ones(2)] if rank == 0 else []
    norm = torch.stack([g.square().sum() for g in gradients]).sum()
    if expert_gradients:
        expert_norm = torch.stack([g.square().sum() for g in expert_gradients]).sum()
        dist.all_reduce(expert_norm)  # at: 0
        norm += expert_norm
    dist.all_reduce(norm, op=dist.ReduceOp.MAX)  # at: 1


@bug(2, "areal-project/AReaL#187", "A DTensor is gathered for the log of rank 0 only.")
def full_tensor_on_rank_0():
    rank = begin()
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    if rank == 0:
        weight.full_tensor()  # at: 0
    dist.barrier()  # at: 1
