"""Tensors of every kind in every call: with a graph, of inference mode, conj and neg views, with gaps in memory.

Each rank's kind is its own affair: where rank 0 gives another kind than the others, all get what ordinary tensors give.
"""

import functools
import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import echelon
from echelon import functional
from echelon.data_parallel.hooks import AccumulateIn
from echelon.group.messages import RecvFrom, SendTo
from echelon.pipeline import Pipeline

RANKS = 3
SMALL, LARGE = (6, 4), (6, 12_000)
REFUSED = "Inplace update to inference tensor outside InferenceMode"
MODIFIED = "modified by an inplace operation"


def conj_view(values):
    return values.conj_physical().conj()


def neg_view(values):
    return torch._neg_view(-values)


def with_gaps(values):
    return values.new_empty(len(values), 2 * values.shape[1])[:, ::2].copy_(values)


def transposed(values):
    return values.t().clone(memory_format=torch.contiguous_format).t()


KINDS = {
    "ordinary": lambda values: values.clone(),
    "leaf": lambda values: values.clone().requires_grad_(),
    "in a graph": lambda values: values.clone().requires_grad_() * 1,
    "inference": lambda values: values.clone(),
    "conj": conj_view,
    "neg": neg_view,
    "gaps": with_gaps,
    "transposed": transposed,
}


def made(kind, values):
    """Returns these values as a tensor of a kind."""
    is_inference = kind.startswith("inference")
    with torch.inference_mode(is_inference):
        tensor = KINDS[kind.removeprefix("inference ")](values)
    assert tensor.is_inference() == is_inference
    assert tensor.is_conj() == kind.endswith("conj")
    assert tensor.is_neg() == kind.endswith("neg")
    assert tensor.is_contiguous() != (kind.endswith("gaps") or kind == "transposed")
    return tensor


class Calls:
    """Makes all calls of a group, with tensors of one kind to read and of another to write."""

    def __init__(self, group, reads, writes, shape, dtype, async_op):
        self.group, self.reads, self.writes, self.async_op = group, reads, writes, async_op
        self.shape, self.dtype = shape, dtype
        self.found = []

    def values(self, rank, shape=None):
        shape = self.shape if shape is None else shape
        count = torch.Size(shape).numel()
        real = (torch.arange(count, dtype=torch.float32) % 13 + rank).view(shape)
        return torch.complex(real, real + 1).to(self.dtype) if self.dtype.is_complex else real.to(self.dtype)

    def given(self):
        return made(self.reads, self.values(self.group.rank))

    def place(self, rows=None):
        """Returns a place for a result, of as many rows."""
        if rows is None:
            return made(self.writes, self.values(self.group.rank))
        return made(self.writes, torch.zeros(rows, *self.shape[1:], dtype=self.dtype))

    def call(self, operation, *args, **kwargs):
        result = operation(*args, **kwargs, async_op=self.async_op)
        return result.wait() if self.async_op else result

    def wrote(self, result, place):
        assert result is place
        self.found.append(place.detach().resolve_conj().resolve_neg().clone())

    def returned(self, result):
        assert not result.is_inference()
        assert not result.requires_grad
        self.found.append(result)

    def make_all(self):
        self.in_place()
        self.with_results()
        self.coalesced()
        self.messages()
        self.call(self.group.barrier)
        return self.found

    def in_place(self):
        group = self.group
        for operation in (group.all_reduce, functools.partial(group.all_reduce, op="max"), group.broadcast):
            if self.dtype.is_complex and isinstance(operation, functools.partial):
                continue
            place = self.place()
            self.wrote(self.call(operation, place), place)
        place = self.place()
        self.wrote(self.call(group.reduce, place, 2), place)

    def with_results(self):
        group, rank, rows = self.group, self.group.rank, self.shape[0]
        is_first = rank == 0
        for operation, count in (
            (group.all_gather, RANKS * rows),
            (group.reduce_scatter, rows // RANKS),
            (group.all_to_all, rows),
        ):
            self.returned(self.call(operation, self.given()))
            place = self.place(count)
            self.wrote(self.call(operation, self.given(), out=place), place)
        for place in (None, self.place(RANKS * rows)):
            came = self.call(group.gather, self.given(), 0, out=place)
            assert (came is None) == (not is_first)
            if came is not None:
                self.wrote(came, place) if place is not None else self.returned(came)
        for place in (None, self.place(rows // RANKS)):
            came = self.call(group.scatter, self.given() if rank == 1 else None, 1, out=place)
            self.wrote(came, place) if place is not None else self.returned(came)

    def coalesced(self):
        group = self.group
        places = [self.place(), self.place(2)]
        results = self.call(group.all_reduce_coalesced, places)
        results += self.call(group.all_reduce_coalesced, places[:1])
        results += self.call(group.reduce_coalesced, places, 1)
        for result, place in zip(results, [*places, places[0], *places], strict=True):
            self.wrote(result, place)
        lists = [
            self.call(group.all_gather_coalesced, [self.given(), self.given()[:4]]),
            self.call(group.gather_coalesced, [self.given(), self.given()[:2]], 2) or [],
            self.call(group.reduce_scatter_coalesced, [self.given(), self.given()[:4]]),
        ]
        for results in lists:
            for result in results:
                self.returned(result)

    def messages(self):
        group, rank = self.group, self.group.rank
        after, before = (rank + 1) % RANKS, (rank - 1) % RANKS
        self.returned(group.sendrecv(self.given(), after, before))
        sent = group.isend(self.given(), after, tag=1)
        self.returned(group.irecv(before, tag=1).wait() if self.async_op else group.recv(before, tag=1))
        sent.wait()
        sent = group.isend(self.given(), after, tag=2)
        self.returned(group.recv_any(tag=2).tensor)
        sent.wait()
        if not is_plain(self.place()):
            with pytest.raises(echelon.UnsupportedOp, match="contiguous"):
                group.recv(before, out=self.place())
            self.writes = "ordinary"  # the messages below are not this rank's alone
        place, sent = self.place(self.shape[0]), group.isend(self.given(), after, tag=3)
        receive = group.irecv(before, tag=3, out=place) if self.async_op else None
        self.wrote(receive.wait() if receive else group.recv(before, tag=3, out=place), place)
        sent.wait()
        place = self.place(self.shape[0])
        self.wrote(group.sendrecv(self.given(), after, before, out=place), place)


def is_plain(tensor):
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


ALL_KINDS = (*KINDS, "inference gaps", "inference conj", "inference neg")


def sweep(group, who, cases):
    """Makes all calls with each kind on some of the ranks, first in inference mode, and compares with ordinary ones."""
    known = {}
    num_compared = 0
    for shape, kind, is_inside, async_op in cases:
        dtype = torch.complex64 if kind.endswith("conj") else torch.float32
        own = kind if group.rank in who else "ordinary"
        is_refused = own.startswith("inference") and not is_inside
        with torch.inference_mode() if is_inside and group.rank in who else nullcontext():
            found = Calls(group, own, "ordinary" if is_refused else own, shape, dtype, async_op).make_all()
        if (shape, dtype) not in known:
            known[shape, dtype] = Calls(group, "ordinary", "ordinary", shape, dtype, False).make_all()
        case = f"{kind}, inside={is_inside}, {shape}, async_op={async_op}"
        assert len(found) == len(known[shape, dtype]), case
        for number, (one, other) in enumerate(zip(found, known[shape, dtype], strict=True)):
            assert torch.equal(one, other), f"{case}: result {number}"
            num_compared += 1
    return num_compared


MODES = [(True, True), (False, False), (True, False), (False, True)]
"""Inside of inference mode, and beside the caller."""
QUICK = [(SMALL, kind, *MODES[(2 * (number % 2)) + part]) for number, kind in enumerate(ALL_KINDS) for part in (0, 1)]
EVERY = [(shape, kind, *mode) for shape in (SMALL, LARGE) for kind in ALL_KINDS for mode in MODES]


@pytest.mark.parametrize(
    ("who", "cases"),
    [
        pytest.param((0,), QUICK, id="one rank"),
        pytest.param((0,), EVERY, id="one rank, every case", marks=pytest.mark.slow),
        pytest.param((0, 1, 2), EVERY, id="all ranks, every case", marks=pytest.mark.slow),
    ],
)
def test_tensors_of_every_kind_give_what_ordinary_ones_do(on_backend, who, cases):
    assert min(on_backend(sweep, RANKS, who, cases)) > 20 * len(cases)


def writers(group, place, rows):
    """Returns calls that overwrite `place`, or a place for as many rows as they return."""
    after, before = (group.rank + 1) % RANKS, (group.rank - 1) % RANKS
    mine = torch.full((RANKS, 2), 1.0 + group.rank)

    def async_op(operation, *args, **kwargs):
        return lambda: operation(*args, **kwargs, async_op=True).wait()

    def message(receive):
        work = group.isend(torch.ones(rows, 2), after)
        receive()
        work.wait()

    return {
        "all_reduce": lambda: group.all_reduce(place),
        "all_reduce again": lambda: group.all_reduce(place),
        "all_reduce beside": async_op(group.all_reduce, place),
        "broadcast": lambda: group.broadcast(place, 1),
        "broadcast beside": async_op(group.broadcast, place, 1),
        "all_gather": lambda: group.all_gather(mine[:1], out=place),
        "all_gather beside": async_op(group.all_gather, mine[:1], out=place),
        "scatter": lambda: group.scatter(mine.repeat(RANKS, 1), 1, out=place),
        "reduce_scatter": lambda: group.reduce_scatter(mine.repeat(RANKS, 1), out=place),
        "all_to_all": lambda: group.all_to_all(mine, out=place),
        "all_reduce_coalesced": lambda: group.all_reduce_coalesced([mine.clone(), place]),
        "all_reduce_coalesced beside": async_op(group.all_reduce_coalesced, [mine.clone(), mine.long(), place]),
        "recv": lambda: message(lambda: group.recv(before, out=place)),
        "irecv": lambda: message(lambda: group.irecv(before, out=place).wait()),
        "sendrecv": lambda: group.sendrecv(torch.ones(rows, 2), after, before, out=place),
    }


ROOTED = ("reduce", "reduce_coalesced", "gather")


def roots(group, place):
    """Returns the calls ROOTED, which overwrite `place` on rank 1 alone."""
    mine = torch.full((1, 2), 1.0 + group.rank)
    return {
        "reduce": lambda: group.reduce(place, 1),
        "reduce_coalesced": lambda: group.reduce_coalesced([place], 1),
        "gather": lambda: group.gather(mine, 1, out=place),
    }


def refuse_inference_tensors(group):
    """Gives inference tensors outside of the mode where they would be written, on all ranks and on one."""
    refused = []
    for number, call in enumerate(writers(group, torch.inference_mode()(torch.zeros)(RANKS, 2), RANKS)):
        with torch.inference_mode():
            place = torch.zeros(RANKS, 2)
        if group.rank == 2 * (number % 2) and call not in ("recv", "irecv"):  # these are tried below
            with pytest.raises(RuntimeError, match=REFUSED):
                writers(group, place, RANKS)[call]()
            assert torch.equal(place, torch.zeros(RANKS, 2))
            refused.append(call)
        writers(group, torch.zeros(RANKS, 2), RANKS)[call]()
    if group.rank == 1:
        for call in ROOTED:
            with torch.inference_mode():
                place = torch.zeros(RANKS, 2)
            with pytest.raises(RuntimeError, match=REFUSED):
                roots(group, place)[call]()
            refused.append(call)
    with torch.inference_mode():
        place = torch.zeros(3)
    for receive in (group.recv, group.irecv):
        with pytest.raises(RuntimeError, match=REFUSED):
            receive((group.rank + 1) % RANKS, out=place)
    with pytest.raises(RuntimeError, match=REFUSED):
        group.batch_isend_irecv(
            [SendTo(torch.ones(3), 0 if group.rank else 1), RecvFrom(0 if group.rank else 1, 0, place)]
        )
    assert torch.equal(group.broadcast(place if group.rank == 1 else torch.ones(3), 1), torch.zeros(3))
    return [*refused, group.all_reduce(torch.ones(1)).item()]


def test_inference_tensors_are_refused_where_torch_refuses_them_before_anything_is_sent(on_backend):
    results = on_backend(refuse_inference_tensors, RANKS)
    assert [result[-1] for result in results] == [float(RANKS)] * RANKS
    assert {call for result in results for call in result[:-1]} >= {
        "all_reduce",
        "all_gather beside",
        "gather",
        "reduce",
    }


def overwrite_what_a_graph_saved(group):
    """Overwrites what exp() has saved for its backward; returns what that says."""
    told = {}
    for call in writers(group, None, RANKS):
        grown = torch.zeros(RANKS, 2, requires_grad=True).exp()
        is_known = call == "all_reduce again" or call.endswith("recv")
        writers(group, grown.detach() if is_known else grown, RANKS)[call]()  # detached, it is still the same memory
        told[call] = backward(grown.sum())
    for call in ROOTED:
        grown = torch.zeros(RANKS, 2, requires_grad=True).exp()
        roots(group, grown)[call]()
        told[call] = backward(grown.sum())
    return told


def backward(loss):
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_autograd_sees_that_a_saved_tensor_was_overwritten_on_all_ranks_alike(on_backend):
    for rank, told in enumerate(on_backend(overwrite_what_a_graph_saved, RANKS)):
        for call, words in told.items():
            is_written = rank == 1 or call not in ROOTED
            assert bool(re.search(MODIFIED, words)) == is_written, f"{call} on rank {rank}: {words!r}"


def save_while_it_is_under_way(group):
    """Saves tensors for a backward between the beginning and the end of what overwrites them."""
    told = []
    weight = torch.ones(RANKS, 2, requires_grad=True)
    for begin in (group.all_reduce, lambda place, async_op: group.all_gather(torch.ones(1, 2), place, async_op)):
        place = torch.zeros(RANKS, 2)
        if group.rank == 0:  # comes when the others have saved theirs, so no operation has ended before
            for rank in range(1, RANKS):
                group.recv(rank)
        work = begin(place, async_op=True)
        loss = (weight * place).sum()
        if group.rank != 0:
            group.send(torch.ones(1), 0)
        work.wait()
        told.append(backward(loss) if group.rank != 0 else MODIFIED)
    place = torch.zeros(RANKS, 2)
    work = group.irecv((group.rank - 1) % RANKS, out=place)
    loss = (weight * place).sum()
    group.barrier()
    group.send(torch.ones(RANKS, 2), (group.rank + 1) % RANKS)
    work.wait()
    return [*told, backward(loss)]


def test_autograd_sees_the_end_of_what_runs_beside_the_caller_too(on_backend):
    for told in on_backend(save_while_it_is_under_way, RANKS):
        assert [bool(re.search(MODIFIED, words)) for words in told] == [True] * 3


def reduce_leaves(group):
    """Overwrites leaves that require a gradient, outside of no_grad, as torch.distributed allows."""
    leaf = torch.full((3,), 1.0, requires_grad=True)
    assert group.all_reduce(leaf) is leaf
    assert group.broadcast(leaf, 1) is leaf
    assert leaf.is_leaf
    (leaf * leaf).sum().backward()
    return leaf.tolist(), leaf.grad.tolist()


def test_leaves_are_overwritten_and_stay_leaves(on_backend):
    assert on_backend(reduce_leaves, RANKS) == [([3.0] * 3, [6.0] * 3)] * RANKS


def open_in_inference_mode(group):
    """Makes all that a group keeps in inference mode, and uses it outside."""
    with torch.inference_mode():
        part = group.subgroup(range(RANKS))
        made = [part.empty((4, 4)), group.empty(300_000), part.all_gather(torch.ones(1, 3))]
    for tensor in made:
        assert not tensor.is_inference()
        part.all_reduce(tensor.fill_(1.0))
        group.reduce(tensor, 0)
    return part.all_reduce(torch.ones(2)).tolist()


def test_a_group_that_was_opened_in_inference_mode_goes_on_outside(on_backend):
    assert on_backend(open_in_inference_mode, RANKS) == [[float(RANKS)] * 2] * RANKS


def train_and_evaluate(group, evaluation, wraps_inside):
    """Trains with every wrapper, evaluating in between; returns all parameters and buffers at the end."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4)]
    stages = [nn.Linear(4, 4) for _ in range(RANKS)]
    with evaluation() if wraps_inside else nullcontext():
        model = echelon.SyncBatchNorm.convert(nn.Sequential(*layers), group)
        ddp = echelon.DDP(model, group, bucket_mb=1e-4)
        optimizer = echelon.ZeroOptimizer(torch.optim.SGD, ddp.parameters(), group, lr=0.1, momentum=0.9)
        pipe = Pipeline(stages, group, "1f1b", RANKS, nn.functional.mse_loss)
    learnt = torch.optim.SGD(pipe.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(group.rank)
    of_all = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))  # for all stages
    for _ in range(3):
        x = torch.randn(6, 4, generator=generator)
        with evaluation():
            held = torch.randn(6, 4, generator=generator)
            ddp.eval()(held)
            ddp.train()(held)
            ddp.broadcast_parameters()
            pipe.eval()
            pipe.forward(of_all)
            pipe.train()
            functional.all_gather(functional.all_reduce(held, group), group)
            metrics = group.all_reduce(held.sum())
            assert metrics.isfinite()
        ddp(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        pipe.step(of_all, target=of_all)
        learnt.step()
        learnt.zero_grad()
    tensors = [*model.parameters(), *model.buffers(), *pipe.parameters()]
    assert not any(tensor.is_inference() for tensor in tensors)
    return [tensor.tolist() for tensor in tensors]


@pytest.mark.parametrize("wraps_inside", [False, True], ids=["wrapped outside", "wrapped inside"])
def test_evaluations_in_inference_mode_change_nothing_about_training(on_backend, wraps_inside):
    expected = on_backend(train_and_evaluate, RANKS, torch.no_grad, False)
    assert on_backend(train_and_evaluate, RANKS, torch.inference_mode, wraps_inside) == expected


class Shifted(nn.Module):
    """A model with a constant of its own, which a traced stage keeps."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(self.first(x).relu() * torch.tensor([1.0, 2.0, 3.0, 4.0]))


def keep_from_inference_mode(group):
    """Has stages traced, and gradients reduced in a wider dtype, in inference mode; then goes on outside."""
    torch.manual_seed(0)
    ddp, model = echelon.DDP(nn.Linear(8, 8), group, hook=AccumulateIn(torch.float64)), Shifted()
    with torch.inference_mode():
        pipe = Pipeline(model, group, "1f1b", 2, nn.functional.mse_loss, example=(torch.ones(4, 4),))
    for _ in range(2):
        with ddp.no_sync():
            ddp(torch.ones(2, 8)).sum().backward()
        with torch.inference_mode():
            ddp.sync_gradients()
        ddp.weight.grad.mul_(2.0)
        ddp(torch.ones(2, 8)).sum().backward()
        pipe.step(torch.ones(4, 4), target=torch.zeros(4, 4))
    return [tensor.is_inference() for tensor in (*pipe.state_dict().values(), ddp.weight.grad)]


def test_what_is_kept_from_inference_mode_trains_outside():
    for found in echelon.simulate(keep_from_inference_mode, 2).results:
        assert not any(found)
