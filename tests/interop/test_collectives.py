"""Every call of torch.distributed gives what it gives over Gloo, or where Gloo has none of it, what arithmetic says."""

import weakref

import pytest
import torch
import torch.distributed as dist

import echelon
from echelon._torch_private.distributed import resolve_process_group
from echelon._torch_private.tensors import fake_tensors
from echelon._torch_versions import release
from echelon.errors import EchelonError, SizeMismatch, UnsupportedOp
from echelon.interop.collectives import all_gather_single_coalesced, reduce_scatter_single_coalesced
from tests.helpers.torch_groups import all_gather_single, reduce_scatter_single

N = 2
RELEASE = release(torch.__version__)


def tensor_of(rank, shape=(3, 4), dtype=torch.float32):
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 7 + 2 * rank + 1).to(dtype).reshape(shape)


def reductions(rank):
    results = {}
    for op in ("SUM", "PRODUCT", "MIN", "MAX", "AVG"):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64):
            if op == "AVG" and not dtype.is_floating_point:
                continue
            tensor = tensor_of(rank, dtype=dtype)
            dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
            results[op, dtype] = tensor
    for op in ("BAND", "BOR", "BXOR"):
        tensor = tensor_of(rank, dtype=torch.int32)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
        results[op] = tensor
    return results


def moved(rank):
    """Makes every call that moves tensors, of odd strides too, and returns all that came."""
    mine, n = tensor_of(rank), dist.get_world_size()
    across = tensor_of(rank).t()
    got = {"broadcast": mine.clone(), "broadcast across": across.clone().t().contiguous().t()}
    dist.broadcast(got["broadcast"], 1)
    dist.broadcast(got["broadcast across"], 0)
    got["all_gather"] = [torch.empty(3, 4) for _ in range(n)]
    dist.all_gather(got["all_gather"], mine)
    got["all_gather_single"] = torch.empty(3 * n, 4)
    all_gather_single(got["all_gather_single"], mine)
    got["gather"] = [torch.empty(3, 4) for _ in range(n)] if rank == 1 else None
    dist.gather(mine, got["gather"], dst=1)
    got["scatter"] = torch.empty(3, 4)
    dist.scatter(got["scatter"], [mine + i for i in range(n)] if rank == 0 else None, src=0)
    got["reduce"] = mine.clone()
    dist.reduce(got["reduce"], 0)
    if rank != 0:
        del got["reduce"]
    got["reduce_scatter"] = torch.empty(3, 4)
    dist.reduce_scatter(got["reduce_scatter"], [mine * i for i in range(n)])
    got["reduce_scatter_single"] = torch.empty(2, 2)
    reduce_scatter_single(got["reduce_scatter_single"], tensor_of(rank, (2 * n, 2)))
    if RELEASE >= (2, 12):  # Gloo had none before
        got["all_to_all"] = [torch.empty(3, 4) for _ in range(n)]
        dist.all_to_all(got["all_to_all"], [mine + 10 * i for i in range(n)])
    got["all_to_all_single"] = torch.empty(4, n)
    dist.all_to_all_single(got["all_to_all_single"], tensor_of(rank, (4, n)))
    rows, other = ([3, 1], [3, 2]) if rank == 0 else ([2, 4], [1, 4])
    got["all_to_all_single, uneven"] = torch.empty(sum(other), 2)
    dist.all_to_all_single(got["all_to_all_single, uneven"], tensor_of(rank, (sum(rows), 2)), other, rows)
    got["shapes differ"] = torch.arange(6.0).reshape(2, 3) if rank == 0 else torch.zeros(6)
    dist.broadcast(got["shapes differ"], 0)
    got["objects"] = [None] * n
    dist.all_gather_object(got["objects"], {"rank": rank})
    got["truths"] = torch.tensor([rank == 0, False, True])
    dist.all_reduce(got["truths"], dist.ReduceOp.MAX)
    return got


def flatten(results):
    return {key: list(value) if isinstance(value, tuple) else value for key, value in results.items()}


@pytest.mark.parametrize("function", [reductions, moved])
def test_results_are_those_of_gloo(in_world, function):
    ours, theirs = in_world(N, function), in_world(N, function, backend="gloo")
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine.keys() == expected.keys()
        for key in mine:
            torch.testing.assert_close(mine[key], expected[key], rtol=0, atol=0, msg=str(key))


def beyond_gloo(rank):
    scaled = torch.ones(3) * (rank + 1)
    if RELEASE >= (2, 13):
        dist.all_reduce(scaled, dist.ReduceOp.PREMUL_SUM(0.5))
    else:  # made by a private function, and without a factor that can be read
        with pytest.raises(UnsupportedOp, match="multiply the tensor, and use SUM"):
            dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
        scaled.fill_(1.5)
    uneven = [torch.empty(size) for size in (1, 3)]
    dist.all_gather(uneven, torch.full((1 if rank == 0 else 3,), float(rank)))
    parts = torch.empty(1 if rank == 0 else 2)
    dist.reduce_scatter(parts, [torch.ones(1), torch.full((2,), 2.0)])
    mean = torch.tensor([rank, 2 + rank, -2 - rank])
    dist.all_reduce(mean, dist.ReduceOp.AVG)  # as NCCL's: rounded towards zero
    for dtype in (torch.bool, torch.uint16, torch.uint32, torch.uint64):  # torch cannot divide them
        with pytest.raises(UnsupportedOp, match=f"op=AVG has no meaning for {dtype}"):
            dist.all_reduce(torch.ones(2, dtype=dtype), dist.ReduceOp.AVG)
    return scaled.tolist(), [tensor.tolist() for tensor in uneven], parts.tolist(), mean.tolist()


def test_what_gloo_cannot_do(in_world):
    scaled, uneven = [1.5] * 3, [[0.0], [1.0] * 3]
    mean = [0, 2, -2]
    assert in_world(N, beyond_gloo) == [(scaled, uneven, [2.0], mean), (scaled, uneven, [4.0, 4.0], mean)]


def in_place(rank, size):
    """Makes the calls whose input is a part of their output, or the other way round, as FSDP does."""
    gathered = torch.zeros(2 * size)
    gathered[rank * size : (rank + 1) * size] = rank + 1
    all_gather_single(gathered, gathered[rank * size : (rank + 1) * size])
    scattered = torch.arange(2.0 * size)
    own = scattered[rank * size : (rank + 1) * size]
    reduce_scatter_single(own, scattered)
    parts = list(torch.full((2, size), rank + 1.0))
    dist.all_gather(parts, parts[rank])
    return gathered, own, torch.stack(parts)


@pytest.mark.parametrize("size", [3, 300_000])
def test_input_and_output_may_be_one(in_world, size):
    for rank, (gathered, own, parts) in enumerate(in_world(N, in_place, size)):
        assert torch.equal(gathered, torch.tensor([1.0, 2.0]).repeat_interleave(size))
        assert torch.equal(own, 2 * torch.arange(2.0 * size)[rank * size : (rank + 1) * size])
        assert torch.equal(parts, torch.tensor([[1.0], [2.0]]).expand(2, size))


def coalesced(rank):
    sums = [torch.full((size,), float(rank + 1)) for size in (2, 3)]
    with dist.distributed_c10d._coalescing_manager():
        for tensor in sums:
            dist.all_reduce(tensor)
    gathered = [torch.empty(2 * size) for size in (2, 3)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for out, tensor in zip(gathered, sums, strict=True):
            all_gather_single(out, tensor + rank)
    manager.wait()
    scattered = [torch.empty(1), torch.empty(2)]
    with dist.distributed_c10d._coalescing_manager():
        for out, size in zip(scattered, (2, 4), strict=True):
            reduce_scatter_single(out, torch.arange(float(size)))
    old_style = torch.full((2,), float(rank))
    with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.broadcast(old_style, 1, async_op=True)
    manager.wait()
    return [[tensor.tolist() for tensor in found] for found in (sums, gathered, scattered, [old_style])]


def test_coalesced_calls(in_world):
    sums, gathered = [[3.0] * 2, [3.0] * 3], [[3.0] * 2 + [4.0] * 2, [3.0] * 3 + [4.0] * 3]
    own = [[[0.0], [0.0, 2.0]], [[2.0], [4.0, 6.0]]]
    assert in_world(N, coalesced) == [[sums, gathered, own[rank], [[1.0] * 2]] for rank in range(N)]


def sparse(rank, op):
    places, values = torch.tensor([[0, 2 + rank]]), torch.tensor([1.0, 2.0 + rank])
    tensor = torch.sparse_coo_tensor(places, values, (4,), check_invariants=True)
    dist.all_reduce(tensor, op)
    return tensor.to_dense().tolist()


@pytest.mark.parametrize(
    ("op", "expected"), [(dist.ReduceOp.SUM, [2.0, 0.0, 2.0, 3.0]), (dist.ReduceOp.AVG, [1.0, 0.0, 1.0, 1.5])]
)
def test_sparse_tensors_are_summed_or_averaged(in_world, op, expected):
    assert in_world(N, sparse, op) == [expected] * N


def refused(rank):
    """Gives every call tensors that cannot be read, or not be written; returns the calls that took one."""
    other = 1 - rank
    ones, made = torch.ones(2, 2), {}
    with fake_tensors():
        made["fake"] = torch.ones(2, 2)
    made["compressed"] = torch.eye(2).to_sparse_csr()
    made["overlapping"] = torch.ones(3).as_strided((2, 2), (1, 1))
    calls = {
        "all_reduce": dist.all_reduce,
        "reduce": lambda tensor: dist.reduce(tensor, rank),
        "broadcast": lambda tensor: dist.broadcast(tensor, other),
        "all_gather": lambda tensor: dist.all_gather([tensor, ones.clone()], ones),
        "gather": lambda tensor: dist.gather(ones, [tensor, ones.clone()], dst=rank),
        "scatter": lambda tensor: dist.scatter(tensor, [ones, ones], src=rank),
        "reduce_scatter": lambda tensor: dist.reduce_scatter(tensor, [ones, ones]),
        "all_to_all": lambda tensor: dist.all_to_all([tensor, ones.clone()], [ones, ones]),
        "recv": lambda tensor: dist.recv(tensor, other),
    }
    accepted = []
    for kind, tensor in made.items():
        for name, call in calls.items():
            try:
                call(tensor)
            except UnsupportedOp:
                continue
            accepted.append((kind, name))
    dist.all_reduce(ones)
    return accepted, ones.tolist()


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_what_cannot_be_read_or_written_is_refused(in_world):
    assert in_world(N, refused) == [([], [[2.0, 2.0], [2.0, 2.0]])] * N


def expanded(rank):
    """Gives calls that only read it a tensor whose elements share memory. Gloo sends what stands behind the element."""
    tensor, into = torch.full((1,), rank + 1.0).expand(3), torch.zeros(3)
    dist.broadcast(tensor if rank == 0 else into, 0)
    gathered = torch.zeros(3 * N)
    all_gather_single(gathered, tensor)
    return (tensor if rank == 0 else into).tolist(), gathered.tolist()


def test_elements_that_share_memory_can_be_read(in_world):
    """The root of a broadcast raised torch's RuntimeError, after it had sent."""
    assert in_world(N, expanded) == [([1.0] * 3, [1.0] * 3 + [2.0] * 3)] * N


def misfits(rank):
    """Gives every call a list that is not one tensor of the right size for each rank; returns the calls that took it.

    They moved the elements on to the next tensor of the list, where Gloo raises an error.
    """
    two, lists = torch.ones(2), {"sizes": (3, 1), "more": (1, 1, 1, 1), "fewer": (4,)}
    accepted = []
    for kind, sizes in lists.items():
        several = [torch.ones(size) for size in (sizes if rank == 0 else reversed(sizes))]
        calls = {
            "all_to_all, in": lambda: dist.all_to_all([two.clone(), two.clone()], several),  # noqa: B023
            "all_to_all, out": lambda: dist.all_to_all(several, [two, two]),  # noqa: B023
            "all_gather": lambda: dist.all_gather(several, two),  # noqa: B023
            "all_gather_coalesced": lambda: dist.all_gather_coalesced([[each] for each in several], [two]),  # noqa: B023
            "gather": lambda: dist.gather(two, several, dst=rank),  # noqa: B023
            "scatter": lambda: dist.scatter(two, several, src=rank),  # noqa: B023
            "reduce_scatter": lambda: dist.reduce_scatter(two, several),  # noqa: B023
        }
        for name, call in calls.items():
            try:
                call()
            except SizeMismatch:
                continue
            accepted.append((kind, name))
    for outputs, expected in (([[two]] * 3, "2 lists of outputs"), ([[two, two]] * 2, "1 outputs")):
        with pytest.raises(SizeMismatch, match=f"expected {expected}"):
            dist.all_gather_coalesced(outputs, [two])
    for call in (all_gather_single_coalesced, reduce_scatter_single_coalesced):
        with pytest.raises(SizeMismatch, match="expected 1 outputs"):
            call(dist.group.WORLD.runner, [two.clone(), two.clone()], [two])
    with pytest.raises(SizeMismatch, match="3 rows, which 2 ranks do not divide"):
        dist.all_to_all_single(torch.empty(3, 2), torch.ones(3, 2))
    with pytest.raises(SizeMismatch, match="1 rows, which 2 ranks do not divide"):
        dist.all_to_all_single(torch.empty(()), torch.ones(()))
    rows, right = torch.ones(4, 2), [2, 2]
    for wrong in ([3, 2], [4], [2, 2, 0], [-1, 5]):
        with pytest.raises(SizeMismatch, match=r"\(input_split_sizes=\): expected 2 numbers of rows that add up to 4"):
            dist.all_to_all_single(rows.clone(), rows, right, wrong)
        with pytest.raises(SizeMismatch, match=r"\(output_split_sizes=\): expected 2 numbers of rows that add up to 4"):
            dist.all_to_all_single(rows.clone(), rows, wrong, right)
    dist.all_reduce(two)
    return accepted, two.tolist()


def test_a_list_has_a_tensor_of_the_right_size_for_each_rank(in_world):
    assert in_world(N, misfits) == [([], [2.0, 2.0])] * N


def moved_on(rank):
    """Gives rank 0 alone a wrong list, whose sum of sizes is right, or a wrong dtype or shape. Returns all errors.

    Elements were moved on to the next tensor of the list, and numbers cut to integers, without an error.
    """
    own, same, right = torch.ones(rank + 2), torch.ones(4), (2, 3, 4)
    sizes = right if rank else (2, 4, 3)
    outputs = [torch.zeros(size) for size in sizes]
    unequal = [torch.zeros(size) for size in (4, 3, 5)]
    whole = torch.zeros(4, dtype=torch.float32 if rank else torch.int64)
    entries = torch.ones(4 if rank else 5).to_sparse()
    calls = {
        "all_gather": lambda: dist.all_gather(outputs, own),
        "all_gather_coalesced": lambda: dist.all_gather_coalesced([[each] for each in outputs], [own]),
        "gather": lambda: dist.gather(same, None if rank else unequal, dst=0),
        "scatter": lambda: dist.scatter(whole, [same] * 3 if rank == 1 else None, src=1),
        "all_reduce": lambda: dist.all_reduce(entries),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.zeros(rank + 2), [torch.ones(size) for size in sizes]),
    }
    errors = []
    for name, call in calls.items():
        try:
            call()
        except EchelonError as error:
            errors.append((name, type(error).__name__))
    return errors


def moved_on_in_simulation():
    dist.init_process_group("gloo")
    return moved_on(dist.get_rank())


@pytest.mark.filterwarnings("ignore:.*all_gather_coalesced")  # deprecated
@pytest.mark.parametrize("backend", ["echelon", "simulated"])
def test_a_wrong_list_of_the_right_sum_is_an_error(in_world, backend):
    is_simulated = backend == "simulated"
    results = echelon.simulate(moved_on_in_simulation, 3).results if is_simulated else in_world(3, moved_on)
    alone = ["all_gather", "all_gather_coalesced", "gather", "scatter"]
    on_all = [("all_reduce", "SizeMismatch"), ("reduce_scatter", "CollectiveMismatch")]
    assert results == [[*((name, "SizeMismatch") for name in alone), *on_all], on_all, on_all]


def overwritten(rank):
    """Overwrites tensors that a backward needs, and calls collectives in and outside of inference mode."""
    told = {}
    calls = {
        "all_reduce": dist.all_reduce,
        "all_reduce beside": lambda place: dist.all_reduce(place, async_op=True).wait(),
        "all_gather": lambda place: dist.all_gather(list(place), torch.ones(1)),
        "all_gather_single": lambda place: dist.all_gather_single(place, torch.ones(1, 1)),
        "broadcast": lambda place: dist.broadcast(place, 1),
        "recv": lambda place: dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, torch.ones(N, 1), 1 - rank), dist.P2POp(dist.irecv, place, 1 - rank)]
        )[1].wait(),
    }
    for name, call in calls.items():
        with torch.inference_mode():
            call(torch.zeros(N, 1))
        grown = torch.zeros(N, 1, requires_grad=True).exp()
        call(grown.detach())
        try:
            grown.sum().backward()
        except RuntimeError as error:
            told[name] = "modified by an inplace operation" in str(error)
    return told


def test_autograd_sees_what_is_overwritten_and_inference_mode_leaves_nothing_behind(in_world):
    told = in_world(N, overwritten)
    assert told == [dict.fromkeys(told[0], True)] * N
    assert len(told[0]) == 6


FUNCTIONAL = (
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "all_gather_into_tensor_out",
    "all_reduce",
    "all_reduce_",
    "all_reduce_coalesced",
    "all_reduce_coalesced_",
    "all_to_all_single",
    "batch_p2p_ops",
    "broadcast",
    "broadcast_",
    "irecv",
    "isend",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_tensor_out",
    "wait_tensor",
    "wait_tensors",
)
SINCE = {"irecv": (2, 12), "isend": (2, 12), "wait_tensors": (2, 15)}
"""The version of torch that brought an operator, if it is newer than 2.11."""


def test_all_functional_collectives_are_known():
    """A torch that has more of them needs a look at which of these its C++ takes past Python."""
    # dir(torch.ops._c10d_functional) would list only used ones.
    known = [each.partition("::") for each in torch._C._dispatch_get_all_op_names()]
    found = {name for space, _, name in known if space == "_c10d_functional"}
    found -= {"_wrap_tensor_autograd"}  # of torch's Python, without a group
    assert found == {name for name in FUNCTIONAL if SINCE.get(name, RELEASE) <= RELEASE}


def functional(rank):
    """Calls every functional collective, and returns what each gives."""
    name, peer, own = dist.group.WORLD.group_name, 1 - rank, rank + 1.0
    operators = torch.ops._c10d_functional
    two = lambda: torch.full((2,), own)  # noqa: E731
    calls = {
        "all_reduce": operators.all_reduce(two(), "sum", name),
        "all_reduce_": operators.all_reduce_(two(), "avg", name),
        "all_reduce_coalesced": operators.all_reduce_coalesced([two(), two()], "max", name),
        "all_reduce_coalesced_": operators.all_reduce_coalesced_([two()], "min", name),
        "all_gather_into_tensor": operators.all_gather_into_tensor(two(), 2, name),
        "all_gather_into_tensor_coalesced": operators.all_gather_into_tensor_coalesced([two()], 2, name),
        "all_gather_into_tensor_out": operators.all_gather_into_tensor_out(two(), 2, name, out=torch.empty(4)),
        "reduce_scatter_tensor": operators.reduce_scatter_tensor(two(), "sum", 2, name),
        "reduce_scatter_tensor_coalesced": operators.reduce_scatter_tensor_coalesced([two()], "sum", 2, name),
        "reduce_scatter_tensor_out": operators.reduce_scatter_tensor_out(two(), "sum", 2, name, out=torch.empty(1)),
        "all_to_all_single": operators.all_to_all_single(two(), [1, 1], [1, 1], name),
        "broadcast": operators.broadcast(two(), 1, name),
        "broadcast_": operators.broadcast_(two(), 0, name),
    }
    if SINCE["isend"] <= RELEASE:
        swapped = operators.isend if rank == 0 else operators.irecv
        calls["isend, irecv"] = swapped(two(), peer, 0, name)
        both = [torch.empty(2), two()]
        calls["batch_p2p_ops"] = operators.batch_p2p_ops(["irecv", "isend"], [peer, peer], [0, 0], both, name)[0]
    wait = operators.wait_tensor
    return {
        call: [wait(tensor).tolist() for tensor in result] if isinstance(result, list) else wait(result).tolist()
        for call, result in calls.items()
    }


def test_functional_collectives_come_through_python(in_world):
    both = [1.0, 1.0, 2.0, 2.0]
    same = {
        "all_reduce": [3.0, 3.0],
        "all_reduce_": [1.5, 1.5],
        "all_reduce_coalesced": [[2.0, 2.0], [2.0, 2.0]],
        "all_reduce_coalesced_": [[1.0, 1.0]],
        "all_gather_into_tensor": both,
        "all_gather_into_tensor_coalesced": [both],
        "all_gather_into_tensor_out": both,
        "reduce_scatter_tensor": [3.0],
        "reduce_scatter_tensor_coalesced": [[3.0]],
        "reduce_scatter_tensor_out": [3.0],
        "all_to_all_single": [1.0, 2.0],
        "broadcast": [2.0, 2.0],
        "broadcast_": [1.0, 1.0],
    }
    first, second = in_world(N, functional)
    has_messages = SINCE["isend"] <= RELEASE
    assert first == same | ({"isend, irecv": [], "batch_p2p_ops": [2.0, 2.0]} if has_messages else {})
    assert second == same | ({"isend, irecv": [1.0, 1.0], "batch_p2p_ops": [1.0, 1.0]} if has_messages else {})


def functional_of_2_15(rank):
    """Calls operators in the ways that torch 2.15 added: with a group in place of its name, with a ReduceOp."""
    operators, world, two = torch.ops._c10d_functional, dist.group.WORLD, torch.full((2,), rank + 1.0)
    halved = operators.all_reduce(two, dist.ReduceOp.PREMUL_SUM(0.5), world)
    gathered = operators.all_gather_into_tensor_out(two, 2, world, out=torch.empty(4))
    scattered = operators.reduce_scatter_tensor_out(two, "sum", 2, world, out=torch.empty(1))
    return [tensor.tolist() for tensor in operators.wait_tensors([halved, gathered, scattered])]


@pytest.mark.skipif(RELEASE < (2, 15), reason="torch before 2.15 takes names of groups and of reductions only")
def test_functional_collectives_take_a_group_and_a_reduce_op(in_world):
    assert in_world(N, functional_of_2_15) == [[[1.5, 1.5], [1.0, 1.0, 2.0, 2.0], [3.0]]] * N


def resolved(rank):
    world = dist.group.WORLD
    return resolve_process_group(world) is world, resolve_process_group(world.group_name) is world


def test_a_group_is_found_by_its_name_or_by_itself(in_world):
    assert in_world(1, resolved) == [(True, True)]


def under_way(rank, early):
    """Has rank `early` call an operator before the other does, and returns what becomes of its tensor meanwhile."""
    operators, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    value, token = torch.full((2,), rank + 1.0, requires_grad=True), torch.zeros(1)
    if rank != early:
        dist.recv(token, early)
    result = operators.all_reduce(value, "max", name)  # autograd takes the result over when this returns
    version = result._version
    if rank == early:
        dist.send(token, 1 - early)
    total = operators.wait_tensor(result)
    return total.tolist(), result.requires_grad, result._version - version


@pytest.mark.parametrize("early", range(N))
def test_a_functional_collective_under_way_leaves_its_tensor_to_autograd(in_world, early):
    """It used to be written through a view, which autograd refused once the tensor had a gradient function."""
    assert in_world(N, under_way, early) == [([2.0, 2.0], True, 0)] * N


def gathered(rank):
    options = dist.distributed_c10d.GatherOptions()
    options.rootRank = 1
    out = torch.zeros(2, 3)
    dist.group.WORLD.gather_single(out, tensor_of(rank, (3,)), options).wait()
    return out.tolist()


def test_gather_into_one_tensor(in_world):
    """`dist.gather_single` calls it, which came with torch 2.14 and is not there over Gloo."""
    assert in_world(N, gathered) == [[[0.0] * 3] * 2, [[1.0, 2.0, 3.0], [3.0, 4.0, 5.0]]]


def held_by_cpp_alone(rank):
    """Starts more operations than a few whose Works only C++ holds, then waits for all, the first one first."""
    operators, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    outs = [torch.empty(N) for _ in range(40)]
    for number, out in enumerate(outs):
        operators.all_gather_into_tensor_out(torch.tensor([100.0 * rank + number]), N, name, out=out)
    dist.barrier()
    return [operators.wait_tensor(out).tolist() for out in outs]


def test_an_operation_that_only_cpp_holds_can_be_waited_for_however_many_came_after_it(in_world):
    wanted = [[float(number), 100.0 + number] for number in range(40)]
    assert in_world(N, held_by_cpp_alone) == [wanted] * N


def dropped(rank):
    """Starts operations on large tensors and drops them; returns how many of them still hold these at their end."""
    group = dist.group.WORLD
    tensors = [torch.ones(10_000) for _ in range(4)]
    references = [weakref.ref(tensor) for tensor in tensors]
    while tensors:
        dist.all_reduce(tensors.pop(), async_op=True)
    dist.all_reduce(torch.ones(1), async_op=True).wait()  # all before it have ended by then
    dist.all_reduce(torch.ones(1), async_op=True)  # whoever comes next sweeps
    return len(group.runner._orphans._kept), sum(reference() is not None for reference in references)


def test_operations_that_are_dropped_leave_large_tensors_behind(in_world):
    assert in_world(N, dropped) == [(5, 0)] * N


class Talks(torch.nn.Module):
    """Begins many operations in its forward."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        for work in [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(40)]:
            work.wait()
        return self.layer(x)


def joined(rank):
    """DDP's `join` has C++ hold an operation from the forward to the backward, and wait for it there."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(Talks())
    with model.join(divide_by_initial_world_size=False):
        for _ in range(2):
            model(torch.full((4, 8), float(rank))).sum().backward()
    return model.module.layer.weight.grad.unique().tolist()


def test_ddp_joins_whatever_its_forward_begins(in_world):
    assert in_world(N, joined) == [[4.0]] * N
