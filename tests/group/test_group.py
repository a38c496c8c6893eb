"""The group's operations, on simulated ranks and on real processes."""

import re
import warnings

import pytest
import torch

import echelon

WORLD_SIZES = (1, 2, 3, 4)


def each_op(group):
    mine = torch.arange(7, dtype=torch.float64) + group.rank + 1
    integers = torch.tensor([group.rank + 1, 6])
    got = {op: group.all_reduce(mine.clone(), op).tolist() for op in ("sum", "mean", "product", "min", "max")}
    got |= {op: group.all_reduce(integers.clone(), op).tolist() for op in ("band", "bor", "bxor")}
    return got


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_reduce(run, world_size):
    stack = torch.stack([torch.arange(7, dtype=torch.float64) + rank + 1 for rank in range(world_size)])
    for got in run(each_op, world_size):
        assert got["sum"] == stack.sum(0).tolist()
        assert got["mean"] == pytest.approx(stack.mean(0).tolist(), rel=1e-15)
        assert got["product"] == stack.prod(0).tolist()
        assert got["min"] == stack.amin(0).tolist()
        assert got["max"] == stack.amax(0).tolist()
        expected = [0, 0, 0]
        for rank in range(world_size):
            value = rank + 1
            expected = (
                [value, value, value] if rank == 0 else [expected[0] & value, expected[1] | value, expected[2] ^ value]
            )
        assert [got["band"][0], got["bor"][0], got["bxor"][0]] == expected


def each_shape(group):
    generator = torch.Generator().manual_seed(group.rank)
    results = []
    for shape in ((), (0,), (1,), (5,), (3, 0), (17, 3)):
        results.append(group.all_reduce(torch.randn(shape, generator=generator)))
    strided = torch.randn(6, 4, generator=generator)
    results.append(group.all_reduce(strided[::2].t()))
    return results, strided


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_reduce_takes_any_shape_and_is_bit_identical(run, world_size):
    ranks = run(each_shape, world_size)
    generators = [torch.Generator().manual_seed(rank) for rank in range(world_size)]
    for index, shape in enumerate(((), (0,), (1,), (5,), (3, 0), (17, 3))):
        expected = sum(torch.randn(shape, generator=generator) for generator in generators)
        for results, _ in ranks:
            torch.testing.assert_close(results[index], expected)
            assert torch.equal(results[index], ranks[0][0][index])
    originals = [torch.randn(6, 4, generator=generator) for generator in generators]
    for (_, strided), original in zip(ranks, originals, strict=True):
        torch.testing.assert_close(strided[::2], sum(originals)[::2])
        assert torch.equal(strided[1::2], original[1::2])


def sum_of_halves(group):
    value = torch.tensor([1.0, 2048.0] if group.rank == 0 else [2.0**-11, 1.0], dtype=torch.float16)
    return group.all_reduce(value), group.all_reduce(torch.full((1,), 256.0, dtype=torch.bfloat16), "mean")


def test_half_precision_is_accumulated_in_float32(run):
    """Eight times 2**-11 vanishes one by one beside 1.0 in float16, and 256 + 256 + ... rounds in bfloat16."""
    for total, mean in run(sum_of_halves, 4):
        assert total.dtype == torch.float16
        assert total.tolist() == [1.0 + 2 * 2.0**-10, 2052.0]
        assert mean.item() == 256.0


def broadcast_from(group, src):
    tensor = torch.full((2, 3), float(group.rank))
    returned = group.broadcast(tensor, src)
    return tensor, returned.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_broadcast_from_every_rank(run, world_size):
    for src in range(world_size):
        for tensor, in_place in run(broadcast_from, world_size, src):
            assert tensor.tolist() == [[float(src)] * 3] * 2
            assert in_place


def gather_uneven(group):
    rows = torch.full((group.rank, 2), group.rank)
    out = torch.empty(group.world_size * (group.world_size - 1) // 2, 2, dtype=rows.dtype)
    return group.all_gather(rows), group.all_gather(rows, out=out) is out, group.all_gather(torch.tensor(group.rank))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_gather_concatenates_uneven_rows(run, world_size):
    expected = [[rank, rank] for rank in range(world_size) for _ in range(rank)]
    for rows, used_out, scalars in run(gather_uneven, world_size):
        assert rows.tolist() == expected
        assert used_out
        assert scalars.tolist() == list(range(world_size))


def scatter_rows(group, num_rows):
    tensor = torch.arange(num_rows * 2, dtype=torch.float64).reshape(num_rows, 2) * (group.rank + 1)
    before = tensor.clone()
    return group.reduce_scatter(tensor), group.reduce_scatter(tensor, "mean"), torch.equal(tensor, before)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("num_rows", [0, pytest.param(1, marks=pytest.mark.slow), 7, 8])
def test_reduce_scatter_splits_uneven_rows(run, world_size, num_rows):
    total = torch.arange(num_rows * 2, dtype=torch.float64).reshape(num_rows, 2) * (world_size * (world_size + 1) / 2)
    parts = total.tensor_split(world_size)
    for part, (got, mean, unchanged) in zip(parts, run(scatter_rows, world_size, num_rows), strict=True):
        assert got.tolist() == part.tolist()
        torch.testing.assert_close(mean, part / world_size)
        assert unchanged


def reduce_to(group, dst, op):
    tensor = torch.tensor([group.rank + 1.0, 2.0])
    return group.reduce(tensor, dst, op), tensor


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_reduce_changes_the_tensor_of_one_rank(run, world_size):
    for dst in range(world_size):
        for op, first in (
            ("sum", world_size * (world_size + 1) / 2),
            ("mean", (world_size + 1) / 2),
            ("max", world_size),
        ):
            for rank, (returned, tensor) in enumerate(run(reduce_to, world_size, dst, op)):
                assert tensor[0].item() == (first if rank == dst else rank + 1)
                assert torch.equal(returned, tensor)


def gather_and_scatter(group, root):
    rows = torch.full((group.rank + 1, 2), group.rank)
    table = torch.arange(7).reshape(7, 1) if group.rank == root else None
    return group.gather(rows, root), group.scatter(table, root)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_gather_and_scatter_move_uneven_rows(run, world_size):
    parts = torch.arange(7).reshape(7, 1).tensor_split(world_size)
    for root in range(world_size):
        for rank, (gathered, scattered) in enumerate(run(gather_and_scatter, world_size, root)):
            assert torch.equal(scattered, parts[rank])
            if rank == root:
                assert gathered[:, 0].tolist() == [src for src in range(world_size) for _ in range(src + 1)]
            else:
                assert gathered is None


def gather_and_scatter_into(group, root, extra):
    """Returns what two places hold afterwards, whether they were returned, and how many fitted on this rank."""
    count, is_root = group.world_size, group.rank == root
    rows = torch.full((group.rank + 1, 2), group.rank)
    gathered = torch.zeros(count * (count + 1) // 2 + extra, 2, dtype=rows.dtype)
    scattered = torch.zeros(len(torch.arange(7).tensor_split(count)[group.rank]) + extra, 1, dtype=torch.int64)
    refused = []
    for name, call, place in (
        ("gather", lambda: group.gather(rows, root, out=gathered), gathered if is_root else None),
        ("scatter", lambda: group.scatter(torch.arange(7)[:, None] if is_root else None, root, scattered), scattered),
    ):
        try:
            assert call() is place
        except echelon.SizeMismatch as error:
            refused.append(f"{name}: {error}")
    group.barrier()
    return gathered, scattered, refused


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_gather_and_scatter_write_where_they_are_told(run, world_size):
    parts = torch.arange(7)[:, None].tensor_split(world_size)
    for root in {0, world_size - 1}:
        for rank, (gathered, scattered, refused) in enumerate(run(gather_and_scatter_into, world_size, root, 0)):
            assert torch.equal(scattered, parts[rank])
            wanted = [src for src in range(world_size) for _ in range(src + 1)]
            assert gathered[:, 0].tolist() == (wanted if rank == root else [0] * len(wanted))
            assert not refused


def test_gather_and_scatter_refuse_a_place_of_another_shape_and_the_group_goes_on(run):
    for rank, (gathered, scattered, refused) in enumerate(run(gather_and_scatter_into, 2, 0, 1)):
        assert [text.partition(":")[0] for text in refused] == (["gather", "scatter"] if rank == 0 else ["scatter"])
        assert all("out=" in text and "int64[" in text for text in refused)
        assert not gathered.any()
        assert not scattered.any()


def test_scatter_without_a_tensor_is_refused_where_it_is_missing():
    with pytest.raises(echelon.SizeMismatch, match="scatter on its src, rank 0"):
        echelon.simulate(lambda group: group.scatter(None, 0), 1)


def exchange_rows(group, even):
    size = group.world_size
    if even:
        return group.all_to_all(torch.arange(size * 2).reshape(size * 2, 1) + 100 * group.rank)
    splits = [(group.rank + dst) % 3 for dst in range(size)]
    rows = torch.tensor([10 * group.rank + dst for dst in range(size) for _ in range(splits[dst])])
    expected = [(src + group.rank) % 3 for src in range(size)]
    out = torch.empty(sum(expected), dtype=rows.dtype)
    return group.all_to_all(rows, out=out, in_splits=splits, out_splits=expected)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_to_all_exchanges_even_and_uneven_parts(run, world_size):
    for rank, rows in enumerate(run(exchange_rows, world_size, True)):
        assert rows[:, 0].tolist() == [100 * src + 2 * rank + row for src in range(world_size) for row in (0, 1)]
    for rank, rows in enumerate(run(exchange_rows, world_size, False)):
        assert rows.tolist() == [10 * src + rank for src in range(world_size) for _ in range((src + rank) % 3)]


def wrong_splits(group):
    with pytest.raises(echelon.SizeMismatch, match="2 numbers that add up to 4"):
        group.all_to_all(torch.ones(4), in_splits=[1, 2])
    with pytest.raises(echelon.EchelonError, match="elements: make them agree"):
        group.all_to_all(torch.ones(4), out_splits=[1, 3])


def test_all_to_all_refuses_splits_that_do_not_add_up(run):
    run(wrong_splits, 2)


def talk_to_all(group):
    works = [
        group.isend(torch.tensor([group.rank, dst]), dst, tag=dst)
        for dst in range(group.world_size)
        if dst != group.rank
    ]
    got = [group.recv(src, tag=group.rank).tolist() for src in range(group.world_size) if src != group.rank]
    for work in works:
        work.wait()
    group.barrier()
    return got


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_rank_talks_to_every_other(run, world_size):
    for rank, got in enumerate(run(talk_to_all, world_size)):
        assert got == [[src, rank] for src in range(world_size) if src != rank]


def many_at_once(group):
    works = [group.all_reduce(torch.full((1000,), float(number)), async_op=True) for number in range(20)]
    blocking = group.all_reduce(torch.ones(3)).tolist()
    return [work.wait()[0].item() for work in works], blocking, all(work.is_completed() for work in works)


def test_asynchronous_operations_do_not_mix(run):
    """Untagged buckets were swapped in an earlier system."""
    for sums, blocking, completed in run(many_at_once, 3):
        assert sums == [3.0 * number for number in range(20)]
        assert blocking == [3.0] * 3
        assert completed


def barrier_behind_others(group):
    tensors = [torch.ones(300, 100).T for _ in range(10)]  # results of such views are copied into them
    works = [group.all_reduce(each, async_op=True) for each in tensors]
    group.barrier()
    return [each.unique().tolist() for each in tensors], len(works)


def test_a_barrier_ends_after_asynchronous_operations_before_it(run):
    assert run(barrier_behind_others, 3) == [([[3.0]] * 10, 10)] * 3


def overlapping_subgroups(group):
    left, right = group.subgroup([0, 1]), group.subgroup([2, 1])
    works = {}
    for name, part in (("right", right), ("left", left)) if group.rank == 1 else (("left", left), ("right", right)):
        if part is not None:
            works[name] = part.all_reduce(torch.tensor([10.0**group.rank]), async_op=True)
    return {name: work.wait().item() for name, work in works.items()}, right and right.rank


def test_subgroups_have_their_own_ranks_and_never_mix(run):
    results = run(overlapping_subgroups, 3)
    assert results == [({"left": 11.0}, None), ({"left": 11.0, "right": 110.0}, 1), ({"right": 110.0}, 0)]


def exchange_objects(group):
    value = {"rank": group.rank, "deep": [None, True, 1.5, "é" * group.rank]}
    return group.all_gather_object(value), group.broadcast_object(value if group.rank == 1 else None, src=1)


def test_objects_travel_as_json(run):
    for gathered, sent in run(exchange_objects, 3):
        assert [value["rank"] for value in gathered] == [0, 1, 2]
        assert sent == {"rank": 1, "deep": [None, True, 1.5, "é"]}


def mesh_sums(group):
    mesh = echelon.Mesh(group, dp=2, pp=2)
    value = torch.tensor([10.0**group.rank])
    sums = [mesh[axis].all_reduce(value.clone()).item() for axis in ("dp", "pp")]
    return mesh.coordinates, sums


def test_mesh_groups_ranks_along_each_axis(run):
    assert run(mesh_sums, 4) == [
        ({"dp": 0, "pp": 0}, [101.0, 11.0]),
        ({"dp": 0, "pp": 1}, [1010.0, 11.0]),
        ({"dp": 1, "pp": 0}, [101.0, 1100.0]),
        ({"dp": 1, "pp": 1}, [1010.0, 1100.0]),
    ]


def bad_mesh(group):
    echelon.Mesh(group, dp=2, pp=2)


def test_mesh_that_does_not_fit_names_the_numbers(run):
    with pytest.raises(echelon.InvalidWorldSize, match=r"dp=2 x pp=2 does not make 3 ranks"):
        run(bad_mesh, 3)


def disagree(group):
    shape = (4,) if group.rank == 1 else (5,)
    try:
        group.all_reduce(torch.ones(shape))
    except echelon.EchelonError as error:
        return type(error).__name__, str(error)
    return "no error", ""


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_disagree_are_told(run, world_size):
    outcomes = run(disagree, world_size)
    assert all(kind in ("CollectiveMismatch", "PeerFailed") for kind, _ in outcomes), outcomes
    assert all("float32[4]" in text and "float32[5]" in text for _, text in outcomes), outcomes


def size_mismatch(group):
    if group.rank == 0:
        group.send(torch.ones(3), 1)
        group.send(torch.ones(2), 1)
        return None
    with pytest.raises(echelon.SizeMismatch, match=r"expected float32\[2\], got float32\[3\]") as caught:
        group.recv(0, out=torch.zeros(2))
    return caught.value.got, group.recv(0, out=torch.zeros(2)).tolist()


def test_a_size_mismatch_leaves_the_group_usable(run):
    assert run(size_mismatch, 2)[1] == ("float32[3]", [1.0, 1.0])


def bad_calls(group):
    messages = []
    with warnings.catch_warnings(action="ignore"):  # torch calls them a prototype
        uneven = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for call in (
        lambda: group.broadcast(torch.ones(1), src=2),
        lambda: group.send(torch.ones(1), -1),
        lambda: group.send(torch.ones(1), group.rank),
        lambda: group.all_reduce(torch.ones(1), "average"),
        lambda: group.all_reduce(torch.ones(1, dtype=torch.int64), "mean"),
        lambda: group.all_reduce(torch.ones(1, device="meta")),
        lambda: group.subgroup([0, 0]),
        lambda: group.send(torch.ones(1), 1 - group.rank, tag=-1),
        lambda: group.send(torch.ones(1), 1 - group.rank, tag=[1]),
        lambda: group.all_reduce(torch.ones(1), ["sum"]),
        lambda: group.all_reduce(uneven),
        lambda: group.send(uneven, 1 - group.rank),
        lambda: group.all_reduce(torch.ones(1), ""),
        lambda: group.reduce_scatter(torch.ones(2), None),
        lambda: group.reduce(torch.ones(1), 0, []),
    ):
        with pytest.raises(echelon.EchelonError) as caught:
            call()
        messages.append(str(caught.value))
    group.barrier()
    return messages


def test_bad_arguments_get_one_line_and_do_no_harm(run):
    for messages in run(bad_calls, 2):
        assert "src=2 is not a rank of this group of 2" in messages[0]
        assert "did you mean avg? There are sum, mean, product, " in messages[3]
        assert "cannot send to itself" in messages[2]
        assert "got [1]: choose another" in messages[8]
        assert "op=['sum']: use one of sum" in messages[9]
        assert "all_reduce takes a dense tensor, not a nested one" in messages[10]
        assert "send takes a dense tensor, not a nested one" in messages[11]
        assert all("use one of sum" in message for message in messages[12:])
        assert not any("\n" in message for message in messages)


def true_is_one(group):
    here = torch.full((2,), float(group.rank))
    group.broadcast(here, True if group.rank else 1)
    rows = group.all_to_all(torch.arange(4.0), in_splits=[True, 3])
    return here.tolist(), len(rows)


def test_a_bool_is_the_number_that_it_equals(run):
    assert run(true_is_one, 2) == [([1.0, 1.0], 2), ([1.0, 1.0], 6)]


def leave_early(group):
    if group.rank == 1:
        raise ValueError("no coffee left")
    group.all_reduce(torch.ones(1))


def test_the_first_failing_ranks_own_exception_is_raised(run):
    with pytest.raises(ValueError, match="no coffee left") as caught:
        run(leave_early, 3)
    assert "rank 1" in " ".join(caught.value.__notes__)


def wait_for_a_rank_that_left(group):
    if group.rank == 1:
        group.abort("no coffee left")
        return None
    try:
        group.all_reduce(torch.ones(1))
    except echelon.PeerFailed as error:
        return error.rank, str(error)
    return None


def test_every_survivor_is_told_who_left_and_why(run):
    outcomes = run(wait_for_a_rank_that_left, 4)
    for outcome in (outcomes[0], outcomes[2], outcomes[3]):
        assert outcome[0] == 1
        assert "no coffee left" in outcome[1]
        assert "all_reduce(sum) of float32[1], #1 of group 'world'" in outcome[1]


def time_out(group):
    if group.rank == 0:
        with pytest.raises(echelon.Timeout, match=r"rank 0 in barrier, #1 of group 'world'.*rank 1"):
            group.barrier(timeout=0.1)
        group.send(torch.ones(1), 1)
    else:
        group.recv(0)
    return group.rank


def test_a_timeout_names_operation_and_peer(run):
    assert run(time_out, 2) == [0, 1]


def set_no_timeout(group):
    """Used to fail the next collective of this rank alone, after it had taken its number."""
    if group.rank == 0:
        with pytest.raises(echelon.InvalidArgument, match="timeout='5'"):
            group.timeout = "5"
        with pytest.raises(echelon.InvalidArgument, match="timeout=nan"):
            group.timeout = float("nan")
    return group.all_reduce(torch.ones(1)).item()


def test_a_default_timeout_is_checked_where_it_is_set(run):
    assert run(set_no_timeout, 2) == [2.0, 2.0]


def use_after_close(group):
    group.barrier()
    group.close()
    group.close()
    with pytest.raises(echelon.Closed, match="closed"):
        group.all_reduce(torch.ones(1))
    return repr(group)


def test_a_closed_group_says_so(run):
    assert re.fullmatch(
        r"<ProcessGroup 'world': rank 0 of 2 over (shm|simulated|gloo), closed>", run(use_after_close, 2)[0]
    )


class Odd(torch.Tensor):
    """A tensor whose addition fails, as a kernel may."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (torch.add, torch.Tensor.to):  # Gloo adds by itself, after that
            raise RuntimeError("the kernel is out of order")
        return super().__torch_function__(function, types, args, kwargs or {})


def fail_inside(group):
    ones = torch.ones(4096)  # so many that every rank adds up a part
    try:
        group.all_reduce(ones.as_subclass(Odd) if group.rank == 1 else ones)
        group.barrier()  # the others may have been done before rank 1 failed
    except Exception as error:
        return type(error).__name__, str(error)
    return "no error", ""


def test_any_exception_inside_a_collective_ends_it_on_all_ranks(run):
    outcomes = run(fail_inside, 3)
    assert outcomes[1] == ("RuntimeError", "the kernel is out of order")
    for kind, text in (outcomes[0], outcomes[2]):
        assert kind == "PeerFailed"
        assert "rank 1 failed: RuntimeError: the kernel is out of order" in text
