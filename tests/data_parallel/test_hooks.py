"""Hooks send less, or keep more, and training reaches what it reaches without them."""

import pytest
import torch
from torch import nn

import echelon
from echelon import DDP
from echelon.data_parallel.hooks import AccumulateIn, CompressTo, GradientHook, LocalSGD, PowerSGD
from tests.helpers.models import (
    TINY_MB,
    Branches,
    assert_all_equal,
    backward,
    batch,
    fill,
    gradients,
    loss_of,
    mlp,
    part,
)


def train_with(group, name, steps=30):
    hook = HOOKS[name]()
    model = DDP(mlp(), group, bucket_mb=TINY_MB, hook=hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    inputs, target = part(batch(), group), part(torch.sin(batch())[:, :3], group)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), target).backward()
        optimizer.step()
    if isinstance(hook, LocalSGD):
        hook.average(list(model.parameters()), group)
    with torch.no_grad():
        whole = nn.functional.mse_loss(model(batch()), torch.sin(batch())[:, :3]).item()
    return whole, {name: value.detach().clone() for name, value in model.module.named_parameters()}


def plain(steps=30):
    return echelon.simulate(train_with, 1, ("none", steps)).results[0]


HOOKS = {
    "none": lambda: None,
    "default": lambda: GradientHook(),
    "float16": lambda: CompressTo(torch.float16),
    "bfloat16": lambda: CompressTo(torch.bfloat16),
    "powersgd": lambda: PowerSGD(rank=1, start_after=2),
    "local": lambda: LocalSGD(5),
    "every step": lambda: LocalSGD(1),
    "powersgd at once": lambda: PowerSGD(rank=2),
    "float32": lambda: AccumulateIn(torch.float32),
}


@pytest.fixture(scope="module")
def losses():
    """Losses of plain training, at its start and at its end."""
    return plain(0)[0], plain()[0]


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_reach_the_loss_of_plain_training(run, losses, name):
    start, expected = losses
    ranks = run(train_with, 3, name)
    for loss, weights in ranks:
        assert loss < start - 0.9 * (start - expected)
        assert all(torch.equal(weights[key], ranks[0][1][key]) for key in weights)


def test_a_period_of_1_is_plain_sgd(run):
    _, expected = plain(4)
    assert_all_equal([weights for _, weights in run(train_with, 2, "every step", 4)], expected)


def bytes_with(group, name):
    hook = HOOKS[name]()
    layer = fill(nn.Linear(64, 64, bias=False))
    model = DDP(layer, group, hook=hook)
    loss_of(model(torch.ones(1, 64))).backward()


@pytest.mark.parametrize(
    ("name", "num_sent"),
    [("none", 64 * 64), ("float16", 64 * 64 // 2), ("powersgd at once", 2 * 2 * 64 + 1), ("local", 0)],
)
def test_hooks_send_less(name, num_sent):
    sent = sum(echelon.simulate(bytes_with, 2, (name,)).bytes_sent.values())
    rest = sum(echelon.simulate(bytes_with, 2, ("local",)).bytes_sent.values())  # start, summary
    assert sent - rest == 2 * 4 * num_sent


def low_rank(group):
    """Gradients of rank 1 pass PowerSGD of rank 1 without loss; what is lost of others comes with the next ones."""
    hook = PowerSGD(rank=1)
    model = DDP(fill(nn.Linear(8, 8, bias=False)), group, hook=hook)
    (model(torch.ones(1, 8)) * torch.arange(8.0)).sum().backward()
    exact = model.weight.grad.clone()
    model.zero_grad()
    sums = torch.zeros(8, 8)
    truth = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
    for _ in range(40):
        model.zero_grad()
        (model.weight * truth).sum().backward()
        sums += model.weight.grad
    return exact, sums / 40, truth


def test_powersgd_loses_nothing_for_good(run):
    for exact, mean, truth in run(low_rank, 2):
        torch.testing.assert_close(exact, torch.arange(8.0).unsqueeze(1).expand(8, 8))
        assert (mean - truth).norm() < 0.15 * truth.norm()


class OneOfTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x, which):
        return self.layers[which](x)


def not_used_in_between(group):
    hook = PowerSGD(rank=1)
    model = DDP(fill(OneOfTwo()), group, hook=hook)
    truth = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
    sums = torch.zeros(8, 8)
    for step in range(6):
        model.zero_grad()
        (model(torch.eye(8), step % 2) * truth.T).sum().backward()
        if step % 2 == 0:
            sums += model.layers[0].weight.grad
    return sums + hook.state_dict()["errors"]["layers.0.weight"], 3 * truth


def test_powersgd_keeps_the_error_of_a_parameter_that_no_rank_uses(run):
    """It was sent into a gradient that stays None, and lost."""
    for got, expected in run(not_used_in_between, 2):
        torch.testing.assert_close(got, expected)


def small_gradients(group, name, discards):
    """Each of 64 gradients is too small to change a sum in bfloat16."""
    layer = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    model = DDP(layer, group, hook=HOOKS[name]())
    with model.no_sync():
        if discards:
            model(torch.full((1, 1), 50.0, dtype=torch.bfloat16)).sum().backward()
            model.zero_grad(set_to_none=discards == "none")
        model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        for _ in range(64):
            model(torch.full((1, 1), 2.0**-9, dtype=torch.bfloat16)).sum().backward()
    model(torch.zeros(1, 1, dtype=torch.bfloat16)).sum().backward()
    return layer.weight.grad.item(), layer.weight.grad.dtype


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("discards", ["", "none", "zeros"])
def test_float32_accumulation_keeps_what_bfloat16_loses(run, world_size, discards):
    assert run(small_gradients, world_size, "none", discards) == [(1.0, torch.bfloat16)] * world_size
    kept = run(small_gradients, world_size, "float32", discards)
    assert kept == [(1.125, torch.bfloat16)] * world_size


REFUSED = {
    "compress to": lambda: CompressTo(torch.float64),
    "accumulate in": lambda: AccumulateIn(torch.bfloat16),
    "period=0": lambda: LocalSGD(0),
    "period='often'": lambda: LocalSGD("often"),
    "rank=0": lambda: PowerSGD(rank=0),
    "rank=None": lambda: PowerSGD(rank=None),
}


@pytest.mark.parametrize("message", REFUSED)
def test_hooks_refuse_bad_options(message):
    with pytest.raises(echelon.InvalidArgument, match=message) as caught:
        REFUSED[message]()
    assert isinstance(caught.value, ValueError)  # as they raised before InvalidArgument


def forward_then_zero_grad(group, hook, set_to_none):
    layer = fill(nn.Linear(4, 3, bias=False)).bfloat16()
    model = DDP(layer, group, hook=AccumulateIn() if hook else None)
    history = []
    for step in range(3):
        loss = loss_of(model(part(batch(step), group).bfloat16()))
        model.zero_grad(set_to_none)
        loss.backward()
        history.append(gradients(model))
    return history


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_forgets_what_was_zeroed_between_forward_and_backward(run, set_to_none):
    """The last step's gradients were added to for ever."""
    got = run(forward_then_zero_grad, 2, True, set_to_none)
    expected = run(forward_then_zero_grad, 2, False, set_to_none)
    for step in range(3):
        for name, value in expected[0][step].items():
            torch.testing.assert_close(got[0][step][name], value, rtol=0.02, atol=1e-3)
            assert torch.equal(got[0][step][name], got[1][step][name])


def changed_by_hand(group, change):
    """Accumulates 1 + 64 / 512 in bfloat16; what the user does to .grad in between counts."""
    layer = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    model = DDP(layer, group, hook=AccumulateIn())
    model.module(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
    if change == "scaled":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    elif change == "replaced":
        layer.weight.grad = torch.full((1, 1), 0.5, dtype=torch.bfloat16)
    elif change == "grad of a gradient":
        torch.autograd.grad((2 * layer.weight).sum(), layer.weight)
        assert layer.weight.grad.item() == 1.0
    with model.no_sync():
        for _ in range(63):
            model.module(torch.full((1, 1), 2.0**-9, dtype=torch.bfloat16)).sum().backward()
    model.module(torch.full((1, 1), 2.0**-9, dtype=torch.bfloat16)).sum().backward()
    return layer.weight.grad.item()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("change", "expected"), [("", 1.125), ("scaled", 0.625), ("replaced", 0.625), ("grad of a gradient", 1.125)]
)
def test_float32_accumulation_takes_what_was_done_to_grad(run, world_size, change, expected):
    assert run(changed_by_hand, world_size, change) == [pytest.approx(expected, abs=1e-3)] * world_size


def hidden_and_unused(group):
    """Under no_sync the second backward does not reach the branch, whose gradient stays visible."""
    model = DDP(fill(Branches()).bfloat16(), group, hook=AccumulateIn())
    x = part(batch(), group).bfloat16()
    with model.no_sync():
        for branches in (True, False):
            loss_of(model(x, branches)).backward()
    kept = model.branch.weight.grad is not None
    model.zero_grad()
    loss_of(model(x, False)).backward()
    return kept, model.branch.weight.grad


def test_float32_accumulation_of_parameters_that_some_backwards_do_not_reach(run):
    assert run(hidden_and_unused, 2) == [(True, None)] * 2


def complex_gradient(group, name):
    layer = nn.Linear(2, 2, bias=False, dtype=torch.complex64)
    with torch.no_grad():
        layer.weight.fill_(1 + 1j)
    model = DDP(layer, group, hook=HOOKS[name]())
    scale = torch.tensor(1.0 + 2j) * (group.rank + 1)
    (model(torch.ones(1, 2, dtype=torch.complex64)) * scale).sum().real.backward()
    return layer.weight.grad.flatten().tolist()


@pytest.mark.parametrize("name", ["none", "float16", "bfloat16", "powersgd at once", "float32", "local"])
def test_complex_gradients_keep_both_parts(run, name):
    for rank, got in enumerate(run(complex_gradient, 2, name)):
        factor = rank + 1 if name == "local" else 1.5
        assert got == [pytest.approx(factor * (1 - 2j))] * 4


def kinds_of_parameters(group, name, dtype):
    model = DDP(fill(nn.Linear(64, 64, bias=False, dtype=dtype)), group, hook=HOOKS[name]())
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(group.rank), dtype=torch.float64).to(dtype)
    model(x).sum().backward()
    return gradients(model)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_hooks_never_narrow_what_is_narrow_already(name, dtype):
    """float64 was added in float32, and a bfloat16 gradient would be sent as float16, with its small range."""
    expected = echelon.simulate(kinds_of_parameters, 2, ("none", dtype), late_sends=True).results
    got = echelon.simulate(kinds_of_parameters, 2, (name, dtype), late_sends=True).results
    loose = dtype == torch.float64 and name != "float32"
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, **({"rtol": 0.02, "atol": 0.02} if loose else {}))
        assert loose or torch.equal(mine["weight"], theirs["weight"])


def layout_changes(group, size):
    """Two matrices of one shape change places when the order of gradients is learnt, after the first reduction."""

    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.zeros(size, size)) for _ in "ab")

        def forward(self, for_a, for_b):
            return (self.b * for_b).sum() * 1.0 + (self.a * for_a).sum() * 1.0

    model = DDP(Backwards(), group, bucket_mb=TINY_MB, hook=PowerSGD(rank=1))
    truth = {name: torch.randn(size, size, generator=torch.Generator().manual_seed(ord(name))) for name in "ab"}
    sums = {name: torch.zeros(size, size) for name in "ab"}
    for step in range(12):
        model.zero_grad()
        present = step == 0  # what the first reduction leaves out comes later, to the same parameter
        model(truth["a"] * present, truth["b"] * (0.0 * present)).backward()
        for name in "ab":
            sums[name] += getattr(model, name).grad
    return (sums["a"] - truth["a"]).norm() / truth["a"].norm(), sums["b"].norm()


def test_what_powersgd_leaves_out_comes_back_to_its_own_parameter(run):
    for lost, strayed in run(layout_changes, 2, 6):
        assert lost < 0.2
        assert strayed == 0


def overflow_once(group):
    layer = fill(nn.Linear(16, 16, bias=False))
    model = DDP(layer, group, hook=PowerSGD(rank=1))
    norms = []
    for step in range(3):
        model.zero_grad()
        (model.weight * (torch.inf if step == 1 and group.rank == 1 else 1.0)).sum().backward()
        norms.append(layer.weight.grad.isfinite().all().item())
    return norms


def test_powersgd_recovers_from_a_gradient_that_overflowed(run):
    assert run(overflow_once, 2) == [[True, False, True]] * 2


def by_samples(group, name, counts, accumulates):
    model = DDP(mlp(), group, average="samples", hook=HOOKS[name]())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(accumulates):
            loss_of(model(batch(10 * step + micro).split(counts)[group.rank])).backward()
        optimizer.step()
    if isinstance(hook := model._sync.hook, LocalSGD):
        hook.average(list(model.parameters()), group)
    return {key: value.detach().clone() for key, value in model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [("none", 1e-6), ("every step", 1e-6), ("float32", 1e-6), ("float16", 2e-3), ("bfloat16", 1e-2)],
)
@pytest.mark.parametrize("accumulates", [1, 2])
@pytest.mark.parametrize("counts", [[6, 6], [9, 3]])
def test_hooks_and_weights_by_samples(run, name, tolerance, counts, accumulates):
    """Local gradients were multiplied by each rank's share, and again by every later reduction."""
    expected = mlp()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(accumulates):
            loss_of(expected(batch(10 * step + micro))).backward()
        optimizer.step()
    ranks = run(by_samples, 2, name, counts, accumulates)
    for got in ranks:
        for key, value in expected.named_parameters():
            torch.testing.assert_close(got[key], value.detach(), rtol=tolerance, atol=tolerance)
            assert torch.equal(got[key], ranks[0][key])


def leave_out_a_local_step(group):
    model = DDP(mlp(), group, hook=LocalSGD(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, group, step)
        if group.rank == 0 or step:  # as a GradScaler does when a rank's own gradients overflow
            optimizer.step()
    model(batch())
    return {key: value.detach().clone() for key, value in model.named_parameters()}


def test_with_local_sgd_a_rank_may_leave_out_a_step(run):
    ranks = run(leave_out_a_local_step, 2)
    assert ranks[0].keys() == ranks[1].keys()


def local_gradients(group, counts):
    model = DDP(fill(Branches()), group, average="samples", hook=LocalSGD(4))
    for _ in range(2):
        loss_of(model(batch().split(counts)[group.rank], group.rank == 1)).backward()
    return gradients(model)


def test_local_sgd_leaves_gradients_as_they_are(run):
    for rank, got in enumerate(run(local_gradients, 2, [9, 3])):
        expected = fill(Branches())
        for _ in range(2):
            loss_of(expected(batch().split([9, 3])[rank], rank == 1)).backward()
        assert_all_equal([got], gradients(expected))


def large_batch_in_half_precision(group, name):
    layer = nn.Linear(1, 1, bias=False, dtype=torch.float16)
    model = DDP(layer, group, average="samples", hook=HOOKS[name]())
    results = []
    for _ in range(2):
        model.zero_grad()
        model(torch.full((4096, 1), 20.0, dtype=torch.float16)).mean().backward()
        results.append(layer.weight.grad.item())
    return results


@pytest.mark.parametrize("name", ["none", "float16"])
def test_the_number_of_samples_overflows_nothing(run, name):
    """A gradient of 20 times 4096 samples is more than float16 can hold."""
    assert run(large_batch_in_half_precision, 2, name) == [[20.0, 20.0]] * 2


class Failing(GradientHook):
    def reduce(self, bucket, group):
        if group.rank == 1:
            raise ValueError("no change left")
        super().reduce(bucket, group)


def failing_hook(group):
    model = DDP(mlp(), group, hook=Failing())
    try:
        backward(model, group)
    except (ValueError, echelon.PeerFailed) as error:
        return type(error).__name__, str(error)
    return None


def test_a_hook_that_fails_on_one_rank_is_told_to_all(run):
    first, second = run(failing_hook, 2)
    assert second == ("ValueError", "no change left")
    assert first[0] == "PeerFailed"
    assert "rank 1" in first[1]


class Names(GradientHook):
    def __init__(self):
        self.seen = []

    def reduce(self, bucket, group):
        self.seen.append((bucket.number, tuple(bucket.names), bucket.weight))
        for name, piece in zip(bucket.names, bucket.pieces, strict=True):
            if name.endswith("bias"):
                piece.mul_(0)
        super().reduce(bucket, group)


def hook_by_name(group):
    hook = Names()
    model = DDP(mlp(), group, hook=hook, average="samples")
    backward(model, group)
    return hook.seen, model.get_parameter("0.bias").grad.norm().item(), model.get_parameter("0.weight").grad.norm() > 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_hook_is_told_the_names_and_its_weight_on_one_rank_too(run, world_size):
    names = ("4.bias", "4.weight", "2.bias", "2.weight", "0.bias", "0.weight")
    for seen, for_bias, for_weight in run(hook_by_name, world_size):
        assert seen == [(0, names, 12.0 / world_size)]
        assert for_bias == 0
        assert for_weight


def other_options(group):
    DDP(mlp(), group, hook=PowerSGD(rank=4, seed=group.rank))


def test_hooks_with_different_options_are_told(run):
    with pytest.raises(echelon.CollectiveMismatch, match=r"hook=PowerSGD\(rank=4, start_after=0, seed=0\)"):
        run(other_options, 2)
