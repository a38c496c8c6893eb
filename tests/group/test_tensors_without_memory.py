"""Tensors without memory of their own are refused wherever a tensor is taken, and the group goes on."""

import re

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import echelon
from echelon import functional
from echelon._torch_private.tensors import fake_tensors
from echelon.data_parallel import DistributedDataParallel, SyncBatchNorm, ZeroOptimizer
from echelon.data_parallel.reducer import GradientReducer
from echelon.pipeline import Pipeline
from tests.helpers.torch_groups import mesh_of_one


def fake():
    with fake_tensors():
        return torch.ones(4, 4)


def freed_view():
    """Returns a view into an empty storage: its address is its offset, not 0."""
    whole = torch.ones(5, 4)
    view = whole[1:]
    whole.untyped_storage().resize_(0)
    return view


def collectives(group):
    """Returns the calls of a group that take a tensor."""
    other = 1 - group.rank
    ones = torch.ones(4, 4)
    return {
        "all_reduce": group.all_reduce,
        "async": lambda tensor: group.all_reduce(tensor, async_op=True),
        "reduce": lambda tensor: group.reduce(tensor, dst=0),
        "broadcast": lambda tensor: group.broadcast(tensor, src=0),
        "all_gather": group.all_gather,
        "gather": lambda tensor: group.gather(tensor, dst=group.rank),
        "scatter": lambda tensor: group.scatter(tensor, src=group.rank),
        "reduce_scatter": group.reduce_scatter,
        "all_to_all": group.all_to_all,
        "all_gather, out": lambda tensor: group.all_gather(ones, out=tensor),
        "gather, out": lambda tensor: group.gather(ones, dst=group.rank, out=tensor),
        "scatter, out": lambda tensor: group.scatter(ones, src=group.rank, out=tensor),
        "reduce_scatter, out": lambda tensor: group.reduce_scatter(ones, out=tensor),
        "all_to_all, out": lambda tensor: group.all_to_all(ones, out=tensor),
        "all_reduce_coalesced": lambda tensor: group.all_reduce_coalesced([ones, tensor]),
        "reduce_coalesced": lambda tensor: group.reduce_coalesced([ones, tensor], dst=0),
        "reduce_scatter_coalesced": lambda tensor: group.reduce_scatter_coalesced([ones, tensor]),
        "all_gather_coalesced": lambda tensor: group.all_gather_coalesced([ones, tensor]),
        "gather_coalesced": lambda tensor: group.gather_coalesced([ones, tensor], dst=0),
        "send": lambda tensor: group.send(tensor, other),
        "isend": lambda tensor: group.isend(tensor, other),
        "recv": lambda tensor: group.recv(other, out=tensor),
        "irecv": lambda tensor: group.irecv(other, out=tensor),
        "sendrecv": lambda tensor: group.sendrecv(tensor, other, other),
        "sendrecv, out": lambda tensor: group.sendrecv(ones, other, other, out=tensor),
        "batch": lambda tensor: group.batch_isend_irecv([echelon.SendTo(tensor, other)]),
    }


def functions(group):
    """Returns the functions that autograd goes through."""
    return {
        "all_reduce": lambda tensor: functional.all_reduce(tensor, group),
        "max": lambda tensor: functional.all_reduce(tensor, group, "max"),
        "reduce": lambda tensor: functional.reduce(tensor, 0, group),
        "broadcast": lambda tensor: functional.broadcast(tensor, 0, group),
        "all_gather": lambda tensor: functional.all_gather(tensor, group),
        "gather": lambda tensor: functional.gather(tensor, 0, group),
        "scatter": lambda tensor: functional.scatter(tensor, 0, group),
        "reduce_scatter": lambda tensor: functional.reduce_scatter(tensor, group),
        "all_to_all": lambda tensor: functional.all_to_all(tensor, group),
        "send": lambda tensor: functional.send(tensor, 1 - group.rank, group),
        "sendrecv": lambda tensor: functional.sendrecv(tensor, 1 - group.rank, 1 - group.rank, group),
    }


def wrapped(call):
    torch.func.vmap(call)(torch.ones(2, 4, 4))


def call_all(group):
    """Calls everything with a tensor of every kind; returns the calls that were not refused."""
    group.all_reduce(torch.ones(4, 4))  # a call like one before is checked less
    group.sendrecv(torch.ones(4, 4), 1 - group.rank, 1 - group.rank)
    kinds = {
        "fake": lambda call: call(fake()),
        "meta": lambda call: call(torch.ones(4, 4, device="meta")),
        "sparse": lambda call: call(torch.eye(4).to_sparse()),
        "wrapped": wrapped,
        "freed": lambda call: call(freed_view()),
    }
    accepted = []
    for kind, use in kinds.items():
        for name, call in (*collectives(group).items(), *functions(group).items()):
            try:
                use(call)
            except echelon.UnsupportedOp:
                continue
            accepted.append((kind, name))
    return accepted, group.all_reduce(torch.ones(4, 4))[0, 0].item()


def test_no_call_takes_one_and_the_group_goes_on(on_backend):
    assert on_backend(call_all, 2) == [([], 2.0)] * 2


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (fake, "not FakeTensor: pass a tensor that was made outside of FakeTensorMode"),
        (lambda: torch.eye(2).to_sparse(), r"not one of layout torch.sparse_coo: call .to_dense\(\) first"),
        (lambda: torch.eye(2).to_mkldnn(), r"not one of layout torch._mkldnn: call .to_dense\(\) first"),
        (lambda: torch.ones(2, device="meta"), r"a tensor on meta, .*: give it memory there first"),
        (nn.UninitializedParameter, "tensor with a shape, not UninitializedParameter: run one forward of the model"),
        (lambda: torch.zeros(2).as_subclass(nn.Parameter), None),
        (lambda: nn.Buffer(torch.zeros(2)), None),
    ],
    ids=["fake", "sparse", "mkldnn", "meta", "uninitialized", "parameter", "buffer"],
)
def test_the_error_says_what_to_do(make, advice):
    def reduce(group):
        return group.all_reduce(make())

    if advice is None:
        echelon.simulate(reduce, 1)
    else:
        with pytest.raises(echelon.UnsupportedOp, match=f"^all_reduce.*{advice}"):
            echelon.simulate(reduce, 1)


def reduce_under_fake_mode(group):
    ones = torch.ones(2)
    group.all_reduce(ones)
    messages = []
    for call in (lambda: group.all_reduce(ones), group.barrier, lambda: group.recv(1 - group.rank)):
        with fake_tensors(), pytest.raises(echelon.UnsupportedOp) as caught:
            call()
        messages.append(str(caught.value))
    assert all("inside of FakeTensorMode" in message for message in messages)
    return group.all_reduce(ones).tolist()


def test_a_call_inside_of_fake_mode_is_refused(on_backend):
    assert on_backend(reduce_under_fake_mode, 2) == [[4.0, 4.0]] * 2


def in_grad(call):
    torch.func.grad(lambda x: (call(), x.sum())[1])(torch.ones(2))


def in_functionalize(call):
    torch.func.functionalize(lambda x: (call(), x * 2)[1])(torch.ones(2))


def in_fake_mode(call):
    with fake_tensors():
        call()


def use_in_transforms(group):
    """Calls everything inside of a transform with a plain tensor from outside; returns the calls that went through."""
    ones, accepted, messages = torch.ones(4, 4), [], []
    group.all_reduce(torch.ones(4, 4))
    for transform in (in_grad, in_functionalize):
        for name, call in (
            *collectives(group).items(),
            *functions(group).items(),
            ("barrier", lambda _: group.barrier()),
        ):
            try:
                transform(lambda call=call: call(ones))
            except echelon.UnsupportedOp as error:
                messages.append(str(error))
                continue
            accepted.append((transform.__name__, name))
    assert all("inside of a transform of torch.func" in message for message in messages)
    return accepted, group.all_reduce(torch.ones(1)).item()


def test_a_call_inside_of_a_transform_is_refused_for_plain_tensors_too(on_backend):
    assert on_backend(use_in_transforms, 2) == [([], 2.0)] * 2


def wait_in_modes(group):
    """Waits inside of a mode for a message that comes later; returns what came, and the errors."""
    other, messages, sums = 1 - group.rank, [], []
    for mode in (in_grad, in_functionalize, in_fake_mode):
        for numel in (4, 100_000):
            if group.rank == 0:
                work = group.irecv(1)
                with pytest.raises(echelon.UnsupportedOp) as caught:
                    mode(work.wait)
                messages.append(str(caught.value))
                group.barrier()
                sums.append(work.wait().sum().item())
            else:
                group.barrier()
                group.send(torch.ones(numel), other)
    return messages, sums, group.all_reduce(torch.ones(1)).item()


def test_a_wait_inside_of_a_mode_is_refused_and_the_message_still_comes(on_backend):
    (messages, sums, total), _ = on_backend(wait_in_modes, 2)
    assert all("receive from rank 1, tag 0" in message and "was called inside of" in message for message in messages)
    assert sums == [4.0, 100_000.0] * 3
    assert total == 2.0


def use_duals(group):
    ones = torch.ones(4, 4)
    group.all_reduce(torch.ones(4, 4))  # a call like one before is checked less
    accepted, messages = [], set()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(ones, ones.clone())
        for name, call in (*collectives(group).items(), *functions(group).items()):
            try:
                call(dual)
                accepted.append(name)
            except echelon.UnsupportedOp as error:
                messages.add(str(error).partition(" takes ")[2])
        plain = group.all_reduce(torch.ones(1)).item()
    return accepted, messages, plain


@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_a_tensor_with_a_tangent_is_refused(pool, backend):
    advice = "a tensor without a tangent of forward-mode AD: pass torch.autograd.forward_ad.unpack_dual(tensor).primal"
    assert pool.run(use_duals, 2, backend=backend) == [([], {advice}, 2.0)] * 2


def train(group):
    """Gives tensors without memory to data-parallel training; returns the errors."""
    messages = {}

    def refused(name, call):
        with pytest.raises(echelon.UnsupportedOp) as caught:
            call()
        messages[name] = str(caught.value)

    model = nn.Linear(4, 4)
    with fake_tensors():
        faked = nn.Linear(4, 4)
    buffered = nn.Linear(4, 4)
    buffered.register_buffer("mask", torch.eye(4).to_sparse())
    refused("parameter", lambda: DistributedDataParallel(faked, group))
    refused("buffer", lambda: DistributedDataParallel(buffered, group))
    refused("reducer", lambda: GradientReducer(faked.named_parameters(), group.subgroup([0, 1])))
    refused("zero", lambda: ZeroOptimizer(torch.optim.SGD, faked.parameters(), group, lr=0.1))
    norm = SyncBatchNorm(4, group)
    refused("norm", lambda: torch.func.vmap(norm)(torch.ones(2, 3, 4)))
    refused("sparse norm", lambda: norm(torch.eye(4).to_sparse()))
    wrapped_model = DistributedDataParallel(model, group)
    wrapped_model(torch.ones(2, 4)).sum().backward()
    optimizer = ZeroOptimizer(torch.optim.SGD, model.parameters(), group, lr=0.1)
    optimizer.step()
    return messages, group.all_reduce(torch.ones(1)).item()


def test_data_parallel_training_takes_none(on_backend):
    for messages, total in on_backend(train, 2):
        assert "parameter 'weight', takes a tensor with memory of its own, not FakeTensor" in messages["parameter"]
        assert "buffer 'mask', takes a dense tensor" in messages["buffer"]
        assert "parameter 'weight', takes" in messages["reducer"]
        assert "parameter 0, takes" in messages["zero"]
        assert "SyncBatchNorm takes" in messages["norm"]
        assert "SyncBatchNorm takes" in messages["sparse norm"]
        assert total == 2.0


class Sparse(nn.Module):
    """A stage with an output that no message can carry."""

    def forward(self, x):
        return x.to_sparse()


def pipe(group, case):
    stages = [Sparse() if case == "output" else nn.Linear(4, 4), nn.Linear(4, 4)]
    pipeline = Pipeline(stages, group, "gpipe", 2, nn.functional.mse_loss)
    batch, target = torch.ones(4, 4), torch.ones(4, 4)
    if case == "input":
        batch = batch.to_sparse()
    elif case == "target":
        target = target.to_sparse()
    try:
        pipeline.step(batch, target=target)
    except echelon.EchelonError as error:
        return type(error).__name__, str(error), group.all_reduce(torch.ones(1)).item()
    return "nothing", "", 0.0


@pytest.mark.parametrize(
    ("case", "rank", "expected"),
    [
        ("input", 0, r"inputs of step\(\) takes a dense tensor"),
        ("target", 1, r"target of step\(\) takes a dense tensor"),
        ("output", 0, "a transfer between two stages takes a dense tensor"),
    ],
)
def test_a_pipeline_takes_none(on_backend, case, rank, expected):
    outcomes = on_backend(pipe, 2, case)
    kind, message, _ = outcomes[rank]
    assert kind == "UnsupportedOp"
    assert re.search(expected, message)
    assert outcomes[1 - rank][0] == "PeerFailed"
    assert [total for _, _, total in outcomes] == [2.0, 2.0]


def clip(group):
    pipeline = Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], group, "gpipe", 2, nn.functional.mse_loss)
    ones = torch.ones(4, 4)
    pipeline.step(ones, target=ones)
    weight = next(pipeline.parameters())
    before, messages = weight.grad, []
    for norm_type in (2.0, float("inf")):
        if group.rank == 1:
            weight.grad = weight.grad.to_sparse()
        with pytest.raises(echelon.UnsupportedOp) as caught:
            pipeline.clip_grad_norm_(1e-3, norm_type)
        messages.append(str(caught.value))
        weight.grad = before
    return messages, pipeline.clip_grad_norm_(1e-3).item() > 0


def test_a_norm_over_all_stages_is_refused_on_all_ranks_and_the_pipeline_goes_on(on_backend):
    (first, goes_on), (second, _) = on_backend(clip, 2)
    assert goes_on
    assert all("another rank has a gradient without memory of its own" in message for message in first)
    assert all("the gradient of 1.weight, takes a dense tensor" in message for message in second)


def use_dtensors(group):
    from torch.distributed.tensor import Shard, distribute_tensor  # takes a second

    with mesh_of_one() as mesh:
        tensor = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        accepted, messages = [], set()
        for name, call in (*collectives(group).items(), *functions(group).items()):
            try:
                call(tensor)
                accepted.append(name)
            except echelon.UnsupportedOp as error:
                messages.add(str(error).partition(" takes ")[2])
        return accepted, messages, group.all_reduce(tensor.to_local())[0, 0].item()


@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_a_dtensor_is_refused(pool, backend):
    advice = "a tensor with memory of its own, not DTensor: pass tensor.to_local(), this rank's part"
    assert pool.run(use_dtensors, 2, backend=backend) == [([], {advice}, 2.0)] * 2
