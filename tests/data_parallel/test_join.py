"""Ranks with fewer batches than others."""

import warnings

import pytest
import torch
from torch import nn

import echelon
from echelon import DDP, CollectiveMismatch, SyncBatchNorm
from echelon.data_parallel.hooks import AccumulateIn, CompressTo, LocalSGD, PowerSGD
from echelon.launch import report
from tests.helpers.models import TINY_MB, assert_all_equal, batch, fill, gradients, loss_of, mlp, single


def train_uneven(group, num_batches, mode, average):
    module = nn.Sequential(fill(nn.Linear(4, 3)), nn.BatchNorm1d(3, momentum=0.5))
    model = DDP(module, group, bucket_mb=TINY_MB, buffers=mode, average=average)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(num_batches[group.rank]):
            optimizer.zero_grad()
            with model.no_sync():
                loss_of(model(batch(step + 10)[:4])).backward()
            loss_of(model(batch(step)[group.rank : group.rank + 4])).backward()
            optimizer.step()
    group.barrier()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("num_batches", [[3, 1, 0], [0, 2, 2], [2, 2], [0, 0]])
@pytest.mark.parametrize("mode", ["broadcast", "local"])
def test_ranks_with_fewer_batches_join(run, num_batches, mode):
    ranks = run(train_uneven, len(num_batches), num_batches, mode, "ranks")
    for state in ranks:
        assert all(torch.equal(state[name], ranks[0][name]) for name in state)
    moved = not torch.equal(ranks[0]["0.weight"], fill(nn.Linear(4, 3)).weight)
    assert moved == (max(num_batches) > 0)
    # Each batch had two forwards; buffers came from a rank that still had batches.
    assert ranks[0]["1.num_batches_tracked"] == 2 * max(num_batches)


def last_step(group, num_batches, average):
    model = DDP(mlp(), group, average=average)
    with model.join():
        for step in range(num_batches[group.rank]):
            model.zero_grad()
            loss_of(model(batch(step))).backward()
    return gradients(model)


@pytest.mark.parametrize(("average", "share"), [("ranks", 1 / 3), ("samples", 1.0)])
def test_ranks_that_have_left_count_as_zeros_or_not_at_all(run, average, share):
    expected = {name: gradient * share for name, gradient in single(mlp(), batch(1)).items()}
    assert_all_equal(run(last_step, 3, [1, 2, 0], average), expected)


def two_epochs(group):
    model = DDP(mlp(), group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with model.join(optimizer.step):
            for step in range(2 - group.rank):
                optimizer.zero_grad()
                loss_of(model(batch(step))).backward()
                optimizer.step()
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def test_after_join_ranks_are_in_step_again(run):
    """Only one of them made an optimizer step since gradients were last reduced."""
    ranks = run(two_epochs, 2)
    assert_all_equal(ranks, ranks[0])


def uneven_forwards(group):
    model = DDP(mlp(), group)
    with model.join():
        loss = loss_of(model(batch()))
        if group.rank == 0:
            loss = loss + loss_of(model(batch(1)))
        loss.backward()


def test_different_numbers_of_forwards_are_told_while_joining(run):
    with pytest.raises(CollectiveMismatch, match="rank 0 forward, rank 1 reduction"):
        run(uneven_forwards, 2)


JOINING = {
    "float16": lambda: CompressTo(torch.float16),
    "powersgd": lambda: PowerSGD(rank=1),
    "local": lambda: LocalSGD(2),
    "float32": lambda: AccumulateIn(torch.float32),
}


def join_with_a_hook(group, name, average):
    dtype = torch.bfloat16 if name == "float32" else torch.float32
    model = DDP(mlp().to(dtype), group, average=average, hook=JOINING[name]())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(5 - 2 * group.rank):
            optimizer.zero_grad()
            loss_of(model(batch(step).to(dtype).split([7, 4, 1])[group.rank])).backward()
            optimizer.step()
    return {key: value.detach().float() for key, value in model.named_parameters()}


@pytest.mark.parametrize("name", JOINING)
@pytest.mark.parametrize("average", ["ranks", "samples"])
def test_ranks_join_with_hooks(run, name, average):
    ranks = run(join_with_a_hook, 3, name, average)
    for got in ranks:
        for key, value in mlp().named_parameters():
            assert torch.equal(got[key], ranks[0][key])
            assert not torch.allclose(got[key], value, rtol=0.01, atol=1e-3)


def last_local_steps(group, average, counts):
    model = DDP(mlp(), group, average=average, hook=LocalSGD(10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(2 - group.rank):
            optimizer.zero_grad()
            loss_of(model(batch(step).split(counts)[group.rank])).backward()
            optimizer.step()
    return {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize(
    ("average", "counts", "shares"), [("ranks", [9, 3], (1 / 2, 1 / 2)), ("samples", [9, 3], (18 / 21, 3 / 21))]
)
def test_the_last_local_steps_of_all_ranks_count(run, average, counts, shares):
    """Those of all but one rank were lost at the end."""
    expected = {name: torch.zeros_like(value) for name, value in mlp().named_parameters()}
    for rank, share in enumerate(shares):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2 - rank):
            optimizer.zero_grad()
            loss_of(model(batch(step).split(counts)[rank])).backward()
            optimizer.step()
        for name, value in model.named_parameters():
            expected[name] += share * value.detach()
    assert_all_equal(run(last_local_steps, 2, average, counts), expected)


def join_with_collectives_inside(group, training):
    module = SyncBatchNorm.convert(nn.Sequential(fill(nn.Linear(4, 3)), nn.BatchNorm1d(3)), group)
    model = DDP(module, group).train(training)
    with model.join():
        for step in range(2 - group.rank):
            loss_of(model(batch(step))).backward()
    return gradients(model)


def test_a_model_that_calls_collectives_cannot_be_joined(run):
    """Those with batches waited for those without, for ever."""
    with pytest.raises(echelon.UnsupportedOp, match=r"'1' is a SyncBatchNorm, .* give ranks without samples empty"):
        run(join_with_collectives_inside, 2, True)
    ranks = run(join_with_collectives_inside, 2, False)
    assert_all_equal(ranks, ranks[0])


def epochs_with_momentum(group, num_batches, passes_update):
    """Two epochs in which ranks have different numbers of batches, with optimizer, clipping and scheduler."""
    model = DDP(mlp(), group, average="samples")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def update():
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()

    for _ in range(2):
        with model.join(update if passes_update else None):
            for step in range(num_batches[group.rank]):
                optimizer.zero_grad()
                loss_of(model(batch(step)[group.rank :: group.world_size])).backward()
                update()
    moments = [state["momentum_buffer"] for state in optimizer.state_dict()["state"].values()]
    return [*(each.detach().clone() for each in model.parameters()), *moments], scheduler.get_last_lr()


def test_ranks_with_fewer_batches_update_with_the_others(run):
    ranks = run(epochs_with_momentum, 3, [3, 1, 2], True)
    for tensors, rates in ranks:
        assert rates == ranks[0][1] == [0.1 / 8]
        assert all(torch.equal(one, other) for one, other in zip(tensors, ranks[0][0], strict=True))


def warned_of_missed_updates(group):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        epochs_with_momentum(group, [3, 1], False)
    return [str(each.message) for each in caught]


def test_a_rank_whose_optimizer_differs_is_told_before_the_next_epoch(run):
    first, second = run(warned_of_missed_updates, 2)
    assert first == []
    assert second == [
        "rank 1 had no batch in 2 steps of earlier join() blocks, so its optimizer and scheduler differ from those of "
        "other ranks: pass the function that steps them: ddp.join(update)"
    ]


def join_by_a_number(group):
    with pytest.raises(echelon.InvalidArgument, match=r"^update is 3 \(int\): give a function without arguments"):
        DDP(mlp(), group).join(3).__enter__()


def test_an_update_that_is_no_function_is_refused(run):
    run(join_by_a_number, 1)


def join_with_a_closure(group):
    model = DDP(mlp(), group)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model(batch()))
        loss.backward()
        return loss

    with model.join(lambda: optimizer.step(closure)):
        for _ in range(2 - group.rank):
            optimizer.step(closure)


def test_an_update_that_runs_forwards_is_refused(run):
    """Each rank took part in the updates of the others in turn, and all went on for ever."""
    with pytest.raises(echelon.UnsupportedOp, match=r"update of join\(\) runs a forward, for which this rank has no"):
        run(join_with_a_closure, 2)


def barrier_inside_join(group):
    model = DDP(mlp(), group)
    with model.join():
        if group.rank == 0:
            group.barrier()


def test_a_collective_inside_join_is_told_to_follow_the_block(run):
    with pytest.raises((echelon.CollectiveMismatch, echelon.DeadlockError)) as caught:
        run(barrier_inside_join, 2)
    told = report.describe(0, caught.value).traceback
    assert "if a rank waits in ddp.join()" in told
    assert "call collectives after the block" in told
