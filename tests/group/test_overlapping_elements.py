"""A tensor whose elements overlap in memory can be read, and is refused wherever it would be written."""

import itertools

import pytest
import torch
from torch import nn

import echelon
from echelon.backends.admission import elements_overlap
from echelon.data_parallel import DistributedDataParallel

SHAPES = [(), (0,), (1,), (3,), (1, 3), (3, 1), (2, 3), (3, 0), (2, 2, 2), (3, 1, 2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_what_overlaps_is_found_out_exactly(shape):
    memory = torch.zeros(200)
    for strides in itertools.product(range(7), repeat=len(shape)):
        places = [sum(map(int.__mul__, index, strides)) for index in itertools.product(*map(range, shape))]
        assert elements_overlap(memory.as_strided(shape, strides)) == (len(set(places)) < len(places)), strides


def test_a_large_transposed_tensor_is_known_by_its_strides(monkeypatch):
    monkeypatch.setattr(torch, "zeros", None)  # which would mark each element
    tensor = torch.empty(64, 32, 16)
    for seen in (tensor, tensor.permute(2, 0, 1), tensor[::2, 1::3], tensor.permute(1, 2, 0)[3:, :, ::5]):
        assert not elements_overlap(seen)
    assert elements_overlap(tensor[:1].expand(2, 32, 16))


def overlapping():
    """Returns 3 x 3 elements that stand on 5 places."""
    return torch.arange(5.0).as_strided((3, 3), (1, 1))


def write_overlapping(group):
    """Returns the calls that wrote to overlapping elements."""
    ones = torch.ones(3, 3)
    peer = (group.rank + 1) % group.world_size
    others = [rank for rank in range(group.world_size) if rank != group.rank]
    accepted = []
    for kind, out in (("strided", overlapping()), ("expanded", torch.ones(3, 1).expand(3, 3))):
        wide = torch.ones(11).as_strided((9, 3), (1, 1)) if kind == "strided" else torch.ones(9, 1).expand(9, 3)
        calls = {
            "all_reduce": lambda out=out: group.all_reduce(out),
            "async": lambda out=out: group.all_reduce(out, async_op=True),
            "reduce": lambda out=out: group.reduce(out, dst=group.rank),
            "broadcast": lambda out=out: group.broadcast(out, src=others[0]),
            "all_reduce_coalesced": lambda out=out: group.all_reduce_coalesced([ones, out]),
            "reduce_coalesced": lambda out=out: group.reduce_coalesced([ones, out], dst=group.rank),
            "all_gather": lambda out=wide: group.all_gather(ones, out=out),
            "gather": lambda out=wide: group.gather(ones, dst=group.rank, out=out),
            "scatter": lambda out=out: group.scatter(ones, src=group.rank, out=out),
            "reduce_scatter": lambda out=out: group.reduce_scatter(ones, out=out),
            "all_to_all": lambda out=out: group.all_to_all(ones, out=out),
            "recv": lambda out=out: group.recv(peer, out=out),
            "irecv": lambda out=out: group.irecv(peer, out=out),
            "sendrecv": lambda out=out: group.sendrecv(ones, peer, peer, out=out),
        }
        for name, call in calls.items():
            try:
                call()
            except echelon.UnsupportedOp:
                continue
            accepted.append((kind, name))
    return accepted, group.all_reduce(torch.ones(1)).item()


def test_none_is_written(on_backend):
    assert on_backend(write_overlapping, 3) == [([], 3.0)] * 3


def read_overlapping(group):
    """Reads overlapping elements, which is no harm."""
    size, last = group.world_size, group.world_size - 1
    group.reduce(overlapping() if group.rank < last else torch.zeros(3, 3), dst=last)
    sent = group.broadcast(overlapping() if group.rank == 0 else torch.zeros(3, 3), src=0)
    rows = group.all_gather(overlapping())
    part = group.reduce_scatter(overlapping())
    came = group.sendrecv(overlapping(), (group.rank + 1) % size, (group.rank - 1) % size)
    return sent.tolist(), rows.tolist(), part.tolist(), came.tolist()


def test_all_are_read(on_backend):
    values = overlapping().tolist()
    for rank, (sent, rows, part, came) in enumerate(on_backend(read_overlapping, 3)):
        assert sent == came == values
        assert rows == values * 3
        assert part == [[3 * value for value in values[rank]]]


def wrap_overlapping(group):
    """Wraps a model with a buffer whose elements overlap; with other values on each rank it would be written."""
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.full((1,), 1.0).expand(2))
    DistributedDataParallel(model, group)  # equal everywhere
    model.register_buffer("mask", torch.full((1,), float(group.rank)).expand(2))
    if group.rank == 0:
        DistributedDataParallel(model, group)
        return "nothing"
    with pytest.raises(echelon.UnsupportedOp, match="elements share memory") as caught:
        DistributedDataParallel(model, group)
    return str(caught.value)


def test_a_buffer_is_not_written():
    _, message = echelon.simulate(wrap_overlapping, 2).results
    assert message.startswith("a broadcast of parameters and buffers writes the tensor in place, but its elements")


def wrap_strided(group):
    model = nn.Linear(2, 2)
    model.register_buffer("strided", torch.full((4,), float(group.rank + 1))[::2])
    model.register_buffer("conjugate", torch.full((2,), complex(0.0, group.rank + 1)).conj())
    DistributedDataParallel(model, group)
    return model.strided.tolist(), model.conjugate.tolist()


def test_buffers_of_any_strides_are_those_of_rank_0():
    assert echelon.simulate(wrap_strided, 2).results == [([1.0, 1.0], [-1j, -1j])] * 2
