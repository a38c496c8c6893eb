"""Lists of tensors at once give what their tensors give one by one, in as many messages as one tensor takes."""

import pytest
import torch

import echelon

DTYPES = (torch.float32, torch.int64, torch.bfloat16, torch.float32, torch.uint16, torch.complex64, torch.float32)
SHAPES = ((3, 2), (), (5,), (0, 4), (7,), (2, 1, 2), (1, 3))


def tensors_of(rank, uneven=False):
    generator = torch.Generator().manual_seed(rank)
    tensors = []
    for number, (dtype, shape) in enumerate(zip(DTYPES, SHAPES, strict=True)):
        if uneven and shape:
            shape = ((shape[0] + rank * number) % 5, *shape[1:])
        tensors.append(torch.randint(0, 9, shape, generator=generator).to(dtype))
    return tensors


def equal(left, right):
    return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())


def reduce_lists(group, op):
    mine = tensors_of(group.rank)
    results = {"all_reduce": (group.all_reduce_coalesced(tensors_of(group.rank), op), [t.clone() for t in mine])}
    for tensor in results["all_reduce"][1]:
        group.all_reduce(tensor, op)
    last = group.world_size - 1
    results["reduce"] = (group.reduce_coalesced(tensors_of(group.rank), last, op), [t.clone() for t in mine])
    for tensor in results["reduce"][1]:
        group.reduce(tensor, last, op)
    rows = [tensor for tensor in mine if tensor.dim()]
    parts = [group.reduce_scatter(tensor, op) for tensor in rows]
    results["reduce_scatter"] = (group.reduce_scatter_coalesced(rows, op), parts)
    return {name: all(map(equal, got, wanted)) for name, (got, wanted) in results.items()}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("op", ["sum", "product"])
def test_reducing_lists_gives_what_reducing_one_by_one_does(run, world_size, op):
    assert all(all(same.values()) for same in run(reduce_lists, world_size, op))


def gather_lists(group):
    mine = tensors_of(group.rank, uneven=True)
    together, last = group.all_gather_coalesced(mine), group.world_size - 1
    on_last = group.gather_coalesced(mine, last)
    one_by_one = [group.all_gather(tensor) for tensor in mine]
    assert (on_last is None) == (group.rank != last)
    return all(map(equal, together, one_by_one)) and (on_last is None or all(map(equal, on_last, one_by_one)))


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_gathering_lists_gives_what_gathering_one_by_one_does(run, world_size):
    assert all(run(gather_lists, world_size))


def many_kinds(group):
    """Strided, conjugate and requiring a gradient; the results are written into the tensors given."""
    base = torch.zeros(4, 6)
    leaf = torch.ones(3, requires_grad=True)
    wave = torch.full((2,), 1 + 2j)
    group.all_reduce_coalesced([base[::2, 1::3], leaf, wave.conj()])
    works = [group.all_reduce_coalesced([torch.ones(2), torch.ones(3).int()], async_op=True) for _ in range(3)]
    empty = group.all_reduce_coalesced([]), group.all_gather_coalesced([]), group.reduce_scatter_coalesced([])
    return base.sum().item(), leaf.tolist(), wave.tolist(), [[t.tolist() for t in work.wait()] for work in works], empty


def test_any_kind_of_tensor_and_async(run):
    for base, leaf, wave, asynchronous, empty in run(many_kinds, 3):
        assert (base, leaf, wave) == (0.0, [3.0] * 3, [3 + 6j] * 2)
        assert asynchronous == [[[3.0] * 2, [3] * 3]] * 3
        assert empty == ([], [], [])


def count_messages(group, act):
    act(group)


@pytest.mark.parametrize(
    ("act", "messages"),
    [
        (lambda group: group.all_reduce_coalesced([torch.ones(2), torch.ones(3), torch.ones(4)]), 1),
        (lambda group: group.all_reduce_coalesced([torch.ones(2), torch.ones(3).int(), torch.ones(4)]), 2),
        (lambda group: group.all_gather_coalesced([torch.ones(2), torch.ones(3).int(), torch.ones(4).half()]), 1),
    ],
)
def test_messages_are_those_of_one_tensor_for_each_dtype(act, messages):
    trace = echelon.simulate(act, 2, collectives="messages").trace.splitlines()
    assert sum("rank 0 sends to rank 1" in line for line in trace) == messages


def different_lists(group):
    tensors = [torch.ones(2), torch.ones(3)] if group.rank else [torch.ones(3), torch.ones(2)]
    try:
        group.all_reduce_coalesced(tensors)
    except echelon.EchelonError as error:
        return str(error)
    return ""


def test_ranks_with_different_lists_are_told(run):
    for told in run(different_lists, 2):
        assert "2 tensors: float32[2], float32[3]" in told
        assert "2 tensors: float32[3], float32[2]" in told


def fail_in_the_first_of_two(group):
    shape = 2 + group.rank
    work = group.all_reduce_coalesced([torch.ones(shape), torch.ones(2).int()], async_op=True)
    with pytest.raises((echelon.CollectiveMismatch, echelon.PeerFailed)) as caught:
        work.wait()
    return str(caught.value)


def test_an_error_of_the_first_dtype_is_that_of_the_whole(run):
    for told in run(fail_in_the_first_of_two, 2):
        assert "float32[2]" in told
        assert "float32[3]" in told


def refused(group):
    messages = []
    for act in (
        lambda: group.all_reduce_coalesced([torch.ones(1), torch.ones(2).int()], "mean"),
        lambda: group.all_reduce_coalesced([torch.ones(1), torch.ones(1).expand(3)]),
        lambda: group.reduce_scatter_coalesced([torch.ones(1), torch.tensor(1.0)]),
    ):
        with pytest.raises(echelon.EchelonError) as caught:
            act()
        messages.append(str(caught.value))
    return messages


def test_what_cannot_be_is_refused_before_anything_is_sent():
    messages = echelon.simulate(refused, 1).results[0]
    assert "op='mean' has no meaning for torch.int32" in messages[0]
    assert "tensor 1 writes the tensor in place, but its elements share memory" in messages[1]
    assert "tensor 1: expected a tensor with at least 1 dim" in messages[2]
