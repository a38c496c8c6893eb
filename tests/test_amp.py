"""Mixed precision on DDP and Pipeline equals one process: bf16 and fp16, accumulation, clipping, skipped steps."""

import contextlib

import pytest
import torch
from torch import nn

import echelon
from echelon.errors import InvalidArgument
from echelon.pipeline import Pipeline

PARTS, STEPS = 4, 4
INPUTS = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
TARGETS = torch.arange(16) % 4


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def spoil(step, model, dtype):
    """Makes one gradient bad at one step, as an overflow of float16 does."""
    if step == 2 and dtype is torch.float16:
        next(iter(model.parameters())).grad[0] = torch.nan


def one_process(dtype):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16, init_scale=2.0**10)
    scales = []
    for step in range(STEPS):
        for inputs, targets in zip(INPUTS.chunk(PARTS), TARGETS.chunk(PARTS), strict=True):
            with torch.autocast("cpu", dtype):
                loss = nn.functional.cross_entropy(model(inputs), targets) / PARTS
            scaler.scale(loss).backward()
        spoil(step, model, dtype)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return model.state_dict(), scales


def in_pipeline(group, dtype, is_fused):
    scaler = echelon.amp.GradScaler(group, enabled=dtype is torch.float16, init_scale=2.0**10)

    def loss_of(output, target):
        return scaler.scale(nn.functional.cross_entropy(output, target))

    pipe = Pipeline(make_model(), group, "1f1b", PARTS, loss_of, at=["2"])
    optimizer = torch.optim.AdamW(pipe.parameters(), 0.01, fused=is_fused)
    scales = []
    for step in range(STEPS):
        with torch.autocast("cpu", dtype):
            pipe.step(INPUTS, target=TARGETS)
        if group.rank == 0:  # of one stage: the other must skip the step, too
            spoil(step, pipe, dtype)
        scaler.unscale_(optimizer)
        pipe.clip_grad_norm_(0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return pipe.state_dict(), scales


def in_ddp(group, dtype):
    model = make_model()
    ddp = echelon.DDP(model, group)
    optimizer = torch.optim.AdamW(ddp.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16, init_scale=2.0**10)
    inputs, targets = INPUTS.chunk(PARTS)[group.rank :: 2], TARGETS.chunk(PARTS)[group.rank :: 2]
    scales = []
    for step in range(STEPS):
        for number, (batch, target) in enumerate(zip(inputs, targets, strict=True)):
            is_last = number == len(inputs) - 1
            with contextlib.nullcontext() if is_last else ddp.no_sync():
                with torch.autocast("cpu", dtype):
                    loss = nn.functional.cross_entropy(ddp(batch), target) / len(inputs)
                scaler.scale(loss).backward()
        spoil(step, ddp, dtype)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return model.state_dict(), scales


def check(results, expected, dtype):
    state, scales = expected
    assert scales == ([1024.0, 1024.0, 512.0, 512.0] if dtype is torch.float16 else [1.0] * STEPS)
    for mine, my_scales in results:
        assert my_scales == scales
        for name, value in mine.items():
            torch.testing.assert_close(value, state[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ddp_with_accumulation_and_clipping_equals_one_process(run, dtype):
    check(run(in_ddp, 2, dtype), one_process(dtype), dtype)


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_pipeline_with_clipping_equals_one_process(run, dtype, is_fused):
    check(run(in_pipeline, 2, dtype, is_fused), one_process(dtype), dtype)


def without_unscale(group, is_fused):
    scaler = echelon.amp.GradScaler(group, init_scale=2.0)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight], 0.1, fused=is_fused)
    values = []
    for bad in (True, False):
        weight.grad = torch.full((2,), torch.inf if bad and group.rank == 1 else 1.0)
        scaler.step(optimizer)
        scaler.update()
        values.append(round(weight[0].item(), 4))
    saved = scaler.state_dict()
    other = echelon.amp.GradScaler(group)
    other.load_state_dict(saved)
    return values, scaler.get_scale(), other.get_scale()


@pytest.mark.parametrize("is_fused", [False, True])
def test_step_alone_skips_on_all_ranks(is_fused):
    assert echelon.simulate(without_unscale, 2, (is_fused,)).results == [([1.0, 0.9], 1.0, 1.0)] * 2


def uneven_stages(group):
    """Rank 0 has a parameter without elements in front, rank 1 is bad in one step, rank 2 has no gradient."""
    scaler = echelon.amp.GradScaler(group, init_scale=2.0)
    empty, weight = nn.Parameter(torch.ones(0)), nn.Parameter(torch.ones(2))
    weight.requires_grad_(group.rank != 2)
    optimizer = torch.optim.SGD([empty, weight], 0.5)
    values = []
    for bad in (True, False):
        if group.rank != 2:
            empty.grad, weight.grad = torch.ones(0), torch.full((2,), torch.inf if bad and group.rank == 1 else 1.0)
        scaler.step(optimizer)
        scaler.update()
        values.append(weight[0].item())
    return values, scaler.get_scale(), empty.grad is None and weight.grad is None


def test_ranks_without_gradients_or_elements_skip_the_same_steps():
    """The first rank made the step that the others skipped. The last one ended with an AssertionError."""
    trained = [([1.0, 0.5], 1.0, False)] * 2
    assert echelon.simulate(uneven_stages, 3).results == [*trained, ([1.0, 1.0], 1.0, True)]


def with_a_sparse_gradient(group):
    """Rank 1 is bad in the first step; rank 0 has rows of an embedding, one of them twice."""
    scaler = echelon.amp.GradScaler(group, init_scale=2.0)
    weight = nn.Parameter(torch.ones(3, 1))
    optimizer = torch.optim.SGD([weight], 0.5)
    values = []
    for bad in (True, False):
        entries = torch.full((2, 1), torch.inf if bad and group.rank == 1 else 1.0)
        weight.grad = torch.sparse_coo_tensor([[2, 2]], entries, (3, 1), check_invariants=True)
        scaler.step(optimizer)
        scaler.update()
        values.append(weight.flatten().tolist())
    return values


def test_sparse_gradients_are_scaled():
    expected = [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]
    assert echelon.simulate(with_a_sparse_gradient, 2).results == [expected, expected]


def test_wrong_arguments():
    with echelon.init() as group:
        with pytest.raises(InvalidArgument, match=r"group is 'cuda' \(str\)"):
            echelon.amp.GradScaler("cuda")
        with pytest.raises(InvalidArgument, match="device is of type"):
            echelon.amp.GradScaler(group, torch.float16)
