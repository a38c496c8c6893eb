"""The reducer by itself, as the pipeline uses it: explicit calls instead of hooks."""

import pytest
import torch

import echelon
from echelon.data_parallel.reducer import GradientReducer
from tests.helpers.models import TINY_MB


def make(group, count=6, size=30):
    """Parameters of 120 bytes each, one bucket for each; parameter p of rank r has the gradient 10 p + r."""
    parameters = [torch.nn.Parameter(torch.zeros(size)) for _ in range(count)]
    for index, parameter in enumerate(parameters):
        parameter.grad = torch.full((size,), 10.0 * index + group.rank)
    named = [(f"p{index}", parameter) for index, parameter in enumerate(parameters)]
    return parameters, GradientReducer(named, group, bucket_mb=TINY_MB)


def values(parameters):
    return [parameter.grad[0].item() for parameter in parameters]


def expected(world_size, count=6):
    return [10.0 * index + (world_size - 1) / 2 for index in range(count)]


def reduce_at_once(group):
    parameters, reducer = make(group)
    reducer.reduce()
    first = values(parameters)
    before = [parameter.grad for parameter in parameters]
    reducer.reduce()
    in_place = all(parameter.grad is grad for parameter, grad in zip(parameters, before, strict=True))
    return first, in_place, reducer.reduction is not None


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gradients_become_their_mean_in_place(run, world_size):
    assert run(reduce_at_once, world_size) == [(expected(world_size), True, False)] * world_size


def start_then_finish(group):
    parameters, reducer = make(group)
    reducer.start()
    started = reducer.reduction is not None, reducer.num_launched
    reducer.start()
    for parameter in parameters:
        parameter.grad = None
    reducer.finish()
    return started, values(parameters)


def test_start_takes_the_gradients_and_finish_gives_them_back(run):
    assert run(start_then_finish, 2) == [((True, 6), expected(2))] * 2


def fill_in_other_orders(group):
    parameters, reducer = make(group)
    orders = [[5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5], [5, 0, 3, 1, 4]]
    launched = []
    for index in orders[group.rank]:
        reducer.ready(index)
        launched.append(reducer.num_launched)
    reducer.finish()
    return launched, values(parameters)


def test_buckets_are_launched_in_the_same_order_on_every_rank(run):
    """Buckets of equal size that are launched in the order they fill would swap their contents unnoticed."""
    ranks = run(fill_in_other_orders, 3)
    assert [launched for launched, _ in ranks] == [[1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 6], [1, 1, 1, 1, 3]]
    assert [got for _, got in ranks] == [expected(3)] * 3


def another_gradient(group):
    _, reducer = make(group)
    reducer.ready(4)
    reducer.ready(4)
    reducer.ready(5)
    with pytest.raises(echelon.UnsupportedOp, match=r"'p4' got another gradient .* use use_reentrant=False") as caught:
        reducer.ready(4)
    reducer.finish()
    return str(caught.value).count("\n")


def test_a_gradient_that_comes_too_late_is_refused(run):
    assert run(another_gradient, 2) == [0, 0]


def some_missing(group):
    parameters, reducer = make(group)
    parameters[0].grad = None
    if group.rank:
        parameters[1].grad = None
    reducer.reduce()
    return parameters[0].grad, values(parameters[1:])


def test_a_missing_gradient_counts_as_zeros_unless_all_miss_it(run):
    for nothing, got in run(some_missing, 2):
        assert nothing is None
        assert got == [5.0, *expected(2)[2:]]


def odd_dtypes(group):
    kinds = [torch.complex64, torch.float16, torch.bfloat16, torch.float64, torch.float16]
    parameters = [torch.nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in kinds]
    parameters.append(torch.nn.Parameter(torch.zeros(0)))
    parameters.append(torch.nn.Parameter(torch.tensor(0.0)))
    reducer = GradientReducer([(str(index), p) for index, p in enumerate(parameters)], group)
    for parameter in parameters[:4] + parameters[5:]:
        parameter.grad = torch.full_like(parameter, group.rank + 1.0)
    parameters[0].grad *= 1j
    reducer.reduce()
    return [None if p.grad is None else (p.grad.dtype, p.grad.shape, p.grad.tolist()) for p in parameters]


def test_every_dtype_and_shape(run):
    for got in run(odd_dtypes, 2):
        assert got == [
            (torch.complex64, (3,), [1.5j] * 3),
            (torch.float16, (3,), [1.5] * 3),
            (torch.bfloat16, (3,), [1.5] * 3),
            (torch.float64, (3,), [1.5] * 3),
            None,
            (torch.float32, (0,), []),
            (torch.float32, (), 1.5),
        ]


def plan_again(group):
    parameters, reducer = make(group)
    reducer.plan([("only", parameters[2])])
    reducer.reduce()
    return values(parameters), group.rank


def test_other_parameters_can_be_planned(run):
    for got, rank in run(plan_again, 2):
        assert got == [20.5 if index == 2 else 10.0 * index + rank for index in range(6)]


def one_gives_up(group):
    _, reducer = make(group)
    reducer.ready(5)
    if group.rank == 1:
        reducer.abandon()
        reducer.abandon()
    with pytest.raises(echelon.Closed if group.rank == 1 else echelon.PeerFailed) as caught:
        reducer.finish()
    with pytest.raises(echelon.Closed):
        reducer.start()
    return str(caught.value), group.all_reduce(torch.ones(1)).item()


def test_giving_up_is_told_to_all_and_harms_no_other_group(run):
    ranks = run(one_gives_up, 3)
    for message, total in ranks:
        assert "rank 1 failed: its backward failed with 1 of 6 buckets of gradients under way" in message
        assert total == 3.0


def seconds_of_a_reduction(group):
    _, reducer = make(group)
    group.barrier()
    begin = group.backend.now()
    reducer.reduce()
    return group.backend.now() - begin


def test_two_buckets_travel_at_a_time():
    """Six buckets of a message each, and the summary behind them: four times the latency, not seven."""
    network = echelon.Network(latency=1.0, bandwidth=1e12)
    took = echelon.simulate(seconds_of_a_reduction, 2, network=network).results
    assert took == pytest.approx([4.0, 4.0], rel=0.01)


def seconds_behind_backward(group):
    parameters = [torch.nn.Parameter(torch.zeros(1 << 18)) for _ in range(40)]
    reducer = GradientReducer([(f"p{index}", parameter) for index, parameter in enumerate(parameters)], group)
    for index in reversed(range(40)):
        with group.backend.compute("backward"):
            parameters[index].grad = torch.zeros(1 << 18)
        reducer.ready(index)
    begin = group.backend.now()
    reducer.finish()
    return group.backend.now() - begin


def test_what_backward_cannot_hide_is_little_with_large_buckets_too():
    """40 MiB take 336 ms on this link beside a backward of 600; with a full bucket before the last 119 were left."""
    network = echelon.Network(latency=1e-3, bandwidth=1e9 / 8)
    took = echelon.simulate(seconds_behind_backward, 2, network=network, costs={"backward": 15e-3}).results
    assert max(took) < 0.05


def one_disagrees_about_the_second_bucket(group):
    _, reducer = make(group)
    if group.rank == 1:
        reducer.groups[-1].barrier(async_op=True).exception()
    with pytest.raises(echelon.EchelonError):
        reducer.reduce()
    with pytest.raises(echelon.Closed, match=r"given up because .*barrier.*: end all ranks"):
        reducer.reduce()
    with pytest.raises(echelon.CollectiveMismatch):
        reducer.group.barrier()
    return True


def test_what_ended_a_bucket_is_why_the_reduction_is_given_up():
    assert echelon.simulate(one_disagrees_about_the_second_bucket, 2, timeout=20.0).results == [True] * 2


def abandon_in_a_subgroup(group):
    part = group.subgroup([0, 2])
    if part is None:
        return ""
    _, reducer = make(part)
    part.barrier()  # else the first rank may hear of the end while it makes its reducer
    if part.rank == 1:
        reducer.start()
        reducer.abandon()
    with pytest.raises((echelon.PeerFailed, echelon.Closed)) as caught:
        reducer.reduce()
    return str(caught.value)


def test_an_abandoned_reduction_of_a_subgroup_names_the_rank_in_the_world(run):
    first, _, last = run(abandon_in_a_subgroup, 3)
    assert "rank 2 failed: its backward failed with 6 of 6 buckets" in first
    assert "given up because rank 2 failed: its backward failed with" in last


def come_late(group):
    _, reducer = make(group)
    with group.backend.compute(f"rank {group.rank}"):
        pass
    with pytest.raises(echelon.EchelonError) as caught:
        reducer.reduce()
    return type(caught.value).__name__, getattr(caught.value, "rank", None), group.backend.now()


def test_after_a_timeout_the_others_are_told_of_the_rank_that_was_waited_for():
    """Rank 0 waits for its timeout. Rank 2, which came later, blames rank 1 for it and not rank 0."""
    costs = {"rank 1": 100.0, "rank 2": 5.0}
    first, _, last = echelon.simulate(come_late, 3, timeout=20.0, costs=costs).results
    assert first == ("Timeout", None, 20.0)
    assert last == ("PeerFailed", 1, 20.0)
