"""All stages of a pipeline get the same batch, or every rank says that they do not."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon.pipeline import Pipeline
from echelon.pipeline.run import samples
from tests.helpers.one_process import make_batch, make_model

DATA = TensorDataset(*make_batch(16))


def made(group, schedule="1f1b"):
    return Pipeline(make_model(4), group, schedule, 2, nn.functional.mse_loss)


def loader_of(group, where):
    """Makes a loader of each kind. Only `dp` and `same` give all ranks of a pipeline the same batches."""
    if where in ("dp", "pp"):
        return echelon.data.DataLoader(DATA, 4, group=echelon.Mesh(group, dp=1, pp=group.world_size)[where])
    if where == "sampler":
        return DataLoader(DATA, 4, sampler=echelon.data.DistributedSampler(DATA, group))
    if where in ("same", "own"):  # a loader of torch, with equal seeds or with a seed of each rank
        seed = group.rank if where == "own" else 0
        return DataLoader(DATA, 4, shuffle=True, generator=torch.Generator().manual_seed(seed))
    return echelon.data.DataLoader(DATA, 4, group=group)


def train(group, where, passes, schedule="1f1b"):
    pipe = made(group, schedule)
    is_first, is_last = group.rank == 0, group.rank == group.world_size - 1
    try:
        for inputs, target in loader_of(group, where):
            if passes == "inputs":
                pipe.step(inputs, target=target if is_last else None)
            elif passes == "needed":
                pipe.step(*[inputs] * is_first, target=target if is_last else None)
            elif passes == "gathered":
                pipe.step(group.all_gather(inputs), target=group.all_gather(target))
            elif passes == "augmented":
                pipe.step(inputs + 0.01 * group.rank, target=target)
            else:
                pipe.step(inputs, target=target)
    except echelon.EchelonError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


ADVICE = 'pass DataLoader(..., group=mesh["dp"]) with mesh = echelon.Mesh(group, dp=1, pp=2)'


@pytest.mark.parametrize(
    ("where", "passes", "problem"),
    [
        ("world", "all", "rank 0 passed another target to step() than rank 1"),
        ("pp", "inputs", "rank 1 passed other inputs to step() than rank 0"),
        ("sampler", "all", "rank 0 passed another target to step() than rank 1"),
        ("own", "all", "rank 0 passed another target to step() than rank 1"),
        ("own", "inputs", "rank 1 passed other inputs to step() than rank 0"),
        ("world", "needed", "step() got samples that were dealt to several ranks of this pipeline, [0, 1]"),
    ],
)
def test_other_samples_on_other_stages_end_the_step_on_all_ranks(run, where, passes, problem):
    for message in run(train, 2, where, passes):
        assert message.startswith(f"CollectiveMismatch: {problem}, and all stages need the same batch: {ADVICE}")


@pytest.mark.parametrize(
    ("where", "passes"),
    [
        *[(where, passes) for where in ("dp", "same") for passes in ("all", "inputs", "needed", "augmented")],
        ("world", "gathered"),
    ],
)
def test_the_same_samples_in_any_way_are_accepted(run, where, passes):
    assert run(train, 2, where, passes) == ["no error"] * 2


def replicas(group):
    mesh = echelon.Mesh(group, dp=2, pp=2)
    pipe = Pipeline(
        make_model(4), mesh["pp"], "zb-v", 2, nn.functional.mse_loss, num_chunks=2, data_parallel=mesh["dp"]
    )
    for inputs, target in echelon.data.DataLoader(DATA, 4, group=mesh["dp"]):
        pipe.step(inputs, target=target)
    for inputs, _ in echelon.data.DataLoader(DATA, 4, group=mesh["dp"]):
        pipe.eval().forward(inputs)
    # A loader of all ranks for something else does not matter.
    for ours, _ in zip(
        echelon.data.DataLoader(DATA, 4, group=mesh["dp"]), echelon.data.DataLoader(DATA, 2, group=group), strict=False
    ):
        pipe.train().step(*[ours[0]] * pipe.is_first, target=ours[1] if pipe.is_last else None)
    return "no error"


def test_replicas_get_samples_of_their_own(run):
    assert run(replicas, 4) == ["no error"] * 4


def one_rank_holds_both_ends(group):
    return train(group, "world", "all", "zb-v")


def test_samples_of_the_ranks_between_would_be_lost():
    """The first and the last stage of a V are on rank 0, which agrees with itself."""
    for message in echelon.simulate(one_rank_holds_both_ends, 2, timeout=20.0).results:
        assert "rank 1 passed another target to step() than rank 0" in message


def infer(group, where, passes):
    pipe = made(group).eval()
    try:
        for inputs, _ in loader_of(group, where):
            pipe.forward(*[inputs] * (passes == "all" or group.rank == 0))
    except echelon.EchelonError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("where", "passes", "problem"),
    [
        ("dp", "all", "no error"),
        ("dp", "needed", "no error"),
        ("same", "all", "no error"),
        ("own", "all", "CollectiveMismatch: rank 1 passed other inputs to forward() than rank 0, and all"),
        ("world", "all", "CollectiveMismatch: rank 1 passed other inputs to forward() than rank 0, and all"),
        ("world", "needed", "CollectiveMismatch: forward() got samples that were dealt to several ranks of this"),
    ],
)
def test_inference_compares_the_inputs(run, where, passes, problem):
    # The first rank only sends, and may have ended before another one compares.
    assert run(infer, 2, where, passes)[1].startswith(problem)


def in_place(group):
    pipe = Pipeline([nn.ReLU(inplace=True), nn.Linear(6, 6)], group, "1f1b", 2, nn.functional.mse_loss)
    inputs, target = make_batch(4, torch.float32)
    pipe.step(inputs, target=target if pipe.is_last else None)
    return "no error"


def test_a_stage_that_writes_to_its_input_is_no_difference():
    assert echelon.simulate(in_place, 2, timeout=20.0).results == ["no error"] * 2


@pytest.mark.parametrize(
    ("value", "other", "differ"),
    [
        (torch.arange(12), torch.arange(12), False),
        (torch.arange(12), torch.arange(12) + 1, True),
        (torch.arange(12).reshape(3, 4), torch.arange(12).reshape(3, 4).t().contiguous().t(), False),
        (torch.zeros(2, 3), torch.zeros(2, 4), True),  # padded to another length
        (torch.zeros(3, dtype=torch.complex64).conj(), torch.zeros(3, dtype=torch.complex64).conj(), False),
        (torch.ones(()), torch.zeros(()), True),
        (torch.empty(0, 3), torch.empty(0, 3), False),
        ({"x": torch.ones(2), "n": 3}, {"x": torch.zeros(2), "n": 3}, True),
        (torch.ones(100, 100, 30, requires_grad=True), torch.ones(100, 100, 30), False),
        (torch.ones(5000).bfloat16(), torch.zeros(5000).bfloat16(), True),
    ],
)
def test_checksums_differ_where_values_do(value, other, differ):
    one, two = (samples.Evidence(each, None, False).inputs() for each in (value, other))
    assert (one != two) == differ
    assert float(one) == one > samples.NOTHING


def test_values_that_cannot_be_read_are_not_compared():
    assert samples.Evidence(torch.ones(2, device="meta"), None, False).inputs() == samples.UNKNOWN
    assert samples.Evidence(object(), None, False).inputs() == samples.NOTHING
    assert samples.Evidence((), None, False).inputs() == samples.NOTHING
