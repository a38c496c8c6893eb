"""Whatever way forward and backward are called: the right gradients, or an error on all ranks."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import echelon
from echelon import DDP, CollectiveMismatch, UnsupportedOp
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
    single,
)


class Fragile(nn.Module):
    """Raises once when asked to; has buffers or not."""

    def __init__(self, has_buffers):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3, momentum=0.5) if has_buffers else nn.Identity()
        self.fails = False

    def forward(self, x):
        if self.fails:
            self.fails = False
            raise ValueError("a bad sample")
        return self.norm(self.layer(x))


def fail_and_try_again(group, failing, has_buffers, average):
    module = fill(Fragile(has_buffers))
    model = DDP(module, group, average=average)
    history = []
    for step in range(3):
        model.zero_grad()
        module.fails = group.rank == failing and step == 1
        try:
            output = model(part(batch(step), group))
        except ValueError:
            output = model(part(batch(step), group))
        loss_of(output).backward()
        history.append(gradients(model))
    return history


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("has_buffers", [False, True])
@pytest.mark.parametrize("average", ["ranks", "samples"])
def test_a_forward_that_fails_on_one_rank_can_be_tried_again(run, failing, has_buffers, average):
    """It was counted twice, and waited for buffers that nobody sent while the others waited for gradients."""
    expected = run(fail_and_try_again, 2, None, has_buffers, average)
    ranks = run(fail_and_try_again, 2, failing, has_buffers, average)
    for step in range(3):
        assert_all_equal([history[step] for history in ranks], expected[0][step])


def fail_and_give_up(group, has_buffers):
    """Rank 1 has nothing to give in the second step, and says so."""
    module = fill(Fragile(has_buffers))
    model = DDP(module, group)
    for step in range(3):
        model.zero_grad()
        module.fails = group.rank == 1 and step == 1
        try:
            backward(model, group, step)
        except ValueError:
            model.sync_gradients()
    return gradients(model)


@pytest.mark.parametrize("has_buffers", [False, True])
def test_a_rank_whose_forward_failed_can_go_on_without_it(run, has_buffers):
    ranks = run(fail_and_give_up, 2, has_buffers)
    assert_all_equal(ranks, ranks[0])


def train_in_evaluation_mode(group, average, counts):
    """As fine-tuning with frozen statistics does; forwards that nobody differentiates are in between on one rank."""
    model = DDP(nn.Sequential(fill(nn.Linear(4, 3)), nn.BatchNorm1d(3)), group, average=average).eval()
    for step in range(2):
        model.zero_grad()
        if group.rank == 1:
            model(batch(7))
        loss_of(model(batch(step).split(counts)[group.rank])).backward()
    return gradients(model)


@pytest.mark.parametrize(("average", "counts"), [("ranks", [6, 6]), ("samples", [6, 6]), ("samples", [10, 2])])
def test_gradients_of_forwards_in_evaluation_mode(run, average, counts):
    """They had no samples, so that all gradients became zero."""
    expected = nn.Sequential(fill(nn.Linear(4, 3)), nn.BatchNorm1d(3)).eval()
    assert_all_equal(run(train_in_evaluation_mode, 2, average, counts), single(expected, batch(1)))


def evaluation_mode_on_one_rank(group, which, has_buffers):
    model = DDP(fill(Fragile(has_buffers)), group)
    try:
        for step in range(3):
            model.zero_grad()
            model.train(not (group.rank == which and step == 1))
            backward(model, group, step)
    except CollectiveMismatch as error:
        return str(error)
    return gradients(model)


@pytest.mark.parametrize("which", [0, 1])
def test_ranks_in_different_modes_are_told_if_there_are_buffers(run, which):
    """One waited for gradients and the other for buffers."""
    for told in run(evaluation_mode_on_one_rank, 2, which, True):
        assert "broadcast(src=0)" in told
        assert "all_reduce(mean)" in told
    assert_all_equal(run(evaluation_mode_on_one_rank, 2, which, False), single(fill(Fragile(False)), batch(2)))


def skip_whole_backwards(group, how):
    """Rank 1 does something else in the second step; every rank takes part in as many steps."""
    model = DDP(fill(Branches()), group)
    try:
        for step in range(4):
            model.zero_grad()
            loss = loss_of(model(part(batch(step), group), True))
            if group.rank == 0 or step != 1:
                loss.backward(retain_graph=True)
            elif how == "twice":
                loss.backward(retain_graph=True)
                loss.backward()
            elif how == "no parameter reached":
                (loss.detach().requires_grad_() * 2).backward()
            elif how == "two forwards":
                (loss + loss_of(model(batch(5), False))).backward()
    except echelon.EchelonError as error:
        return step, type(error).__name__, str(error)
    return "not told"


@pytest.mark.parametrize("how", ["twice", "no parameter reached", "two forwards", "skipped"])
def test_a_rank_on_another_branch_is_told_and_so_are_the_others(run, how):
    for step, name, message in run(skip_whole_backwards, 2, how):
        assert step <= 2
        assert name == "CollectiveMismatch"
        assert "a rank skipped a backward" in message


class OwnSGD(torch.optim.Optimizer):
    """Compiles without a break in its graph, which torch's own optimizers do not."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for each in self.param_groups:
            for parameter in each["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-each["lr"])


def compiled_steps(group, own, skips):
    """Takes three steps by a compiled optimizer; where `skips`, rank 1 has only that of the second step."""
    model = DDP(fill(Branches()), group)
    optimizer = (OwnSGD if own else torch.optim.SGD)(model.module.parameters(), lr=0.1)
    optimizer_step = torch.compile(optimizer.step, backend="aot_eager", fullgraph=own)
    loss_of(model(part(batch(), group), True)).backward()
    try:
        for step in range(3):
            if not (skips and group.rank == 1 and step == 1):
                model.zero_grad()
                loss_of(model(part(batch(step), group), True)).backward()
            optimizer_step()
        model.sync_gradients()
    except echelon.EchelonError as error:
        return step, type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.slow
def test_steps_of_a_compiled_optimizer_count(pool, own):
    """No hook is called in compiled code; a rank whose optimizer made one step more was not told."""
    assert pool.run(compiled_steps, 2, own, False, timeout=120.0) == [None, None]
    for step, name, message in pool.run(compiled_steps, 2, own, True, timeout=120.0):
        assert name == "CollectiveMismatch"
        assert step in (1, 2)
        assert "rank 0: 1 forward and 1 optimizer step; rank 1: 1 forward and 2 optimizer steps" in message


def call_the_module(group, buffers):
    module = nn.Sequential(fill(nn.Linear(4, 3)), nn.BatchNorm1d(3))
    model = DDP(module, group, buffers=buffers)
    for step in range(2):
        model.zero_grad()
        if step == 1:
            module.append(fill(nn.Linear(3, 2), seed=group.rank))
        module[1].running_mean.fill_(group.rank + 1.0)
        backward(model.module, group, step)
    return gradients(model), module[1].running_mean.clone()


@pytest.mark.parametrize(("buffers", "start"), [("broadcast", 1.0), ("average", 1.5)])
def test_calling_the_module_takes_in_new_parameters_and_synchronises_buffers(run, buffers, start):
    """The new layer's gradients stayed each rank's own."""
    module = nn.Sequential(fill(nn.Linear(4, 3)), nn.BatchNorm1d(3), fill(nn.Linear(3, 2)))
    for rank, (got, mean) in enumerate(ranks := run(call_the_module, 2, buffers)):
        assert all(torch.equal(got[name], ranks[0][0][name]) for name in got)
        assert got["2.weight"].norm() > 0
        observed = module[0](batch(1).chunk(2)[rank]).mean(0)
        torch.testing.assert_close(mean, 0.9 * start + 0.1 * observed.detach(), rtol=1e-5, atol=1e-5)


def wrap_twice(group, what):
    module = mlp()
    first = DDP(module, group)
    again = {"module": module, "wrapper": first, "part": module[2], "whole": nn.Sequential(module, nn.Linear(3, 3))}
    with pytest.raises(echelon.UnsupportedOp, match=r"'.*weight' is reduced by another .* del the other"):
        DDP(again[what], group)
    del first, again
    model = DDP(module, group)
    backward(model, group)
    return gradients(module)


@pytest.mark.parametrize("what", ["module", "wrapper", "part", "whole"])
def test_a_module_is_wrapped_once_at_a_time(run, what):
    """Each wrapper would read gradients that the other is reducing."""
    assert_all_equal(run(wrap_twice, 2, what), single(mlp(), batch()))


def wrap_anew(group):
    """After a failure, as its error says; the old wrapper still lives."""
    module = mlp()
    model = DDP(module, group)
    failing = module[0].weight.register_hook(lambda _: 1 / 0 if group.rank == 1 else None)
    with pytest.raises((ZeroDivisionError, echelon.PeerFailed)):
        backward(model, group)
    failing.remove()
    with pytest.raises(echelon.Closed, match="wrap the model anew"):
        backward(model, group)
    model = DDP(module, group)
    model.zero_grad()
    backward(model, group)
    return gradients(module)


def test_after_a_failure_the_module_can_be_wrapped_anew(run):
    assert_all_equal(run(wrap_anew, 2), single(mlp(), batch()))


class CheckpointedBranches(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.idle = nn.Linear(4, 4)

    def forward(self, x, used):
        for index in used:
            layer = self.layers[index]
            x = torch.tanh(
                layer(x) if self.use_reentrant is None else checkpoint(layer, x, use_reentrant=self.use_reentrant)
            )
        return x


USED = {0: (0, 2), 1: (2, 1)}
"""Which layers each rank uses: one both, two one rank each."""


def checkpointed_with_unused(group, use_reentrant, accumulates):
    model = DDP(fill(CheckpointedBranches(use_reentrant)), group, bucket_mb=TINY_MB)
    for _ in range(2):
        model.zero_grad()
        if accumulates:
            with model.no_sync():
                loss_of(model(part(batch(1), group).requires_grad_(), (1,))).backward()
        loss_of(model(part(batch(), group).requires_grad_(), USED[group.rank])).backward()
    return gradients(model)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("accumulates", [False, True])
def test_checkpoints_with_unused_parameters(run, use_reentrant, accumulates):
    expected = fill(CheckpointedBranches(None))
    for rank, inputs in enumerate(batch().chunk(2)):
        (loss_of(expected(inputs, USED[rank])) / 2).backward()
        if accumulates:
            (loss_of(expected(batch(1).chunk(2)[rank], (1,))) / 2).backward()
    assert_all_equal(run(checkpointed_with_unused, 2, use_reentrant, accumulates), gradients(expected))


def checkpoint_of_everything(group, use_reentrant):
    """The wrapper itself is what is checkpointed, so its forward runs again inside of backward."""
    module = nn.Sequential(fill(nn.Linear(4, 4)), nn.BatchNorm1d(4))
    model = DDP(module, group, average="samples")
    for step in range(2):
        model.zero_grad()
        inputs = part(batch(step), group).requires_grad_()
        loss_of(checkpoint(model, inputs, use_reentrant=use_reentrant)).backward()
    return gradients(model)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_of_the_whole_model(run, use_reentrant):
    expected = nn.Sequential(fill(nn.Linear(4, 4)), nn.BatchNorm1d(4))
    for inputs in batch(1).chunk(2):
        (loss_of(expected(inputs)) / 2).backward()
    assert_all_equal(run(checkpoint_of_everything, 2, use_reentrant), gradients(expected))


def no_samples(group):
    model = DDP(mlp(), group, average="samples")
    with pytest.raises(
        echelon.UnsupportedOp, match="but no rank has samples: samples are the rows of the first tensor"
    ):
        loss_of(model.module[4](model.module[:4](part(batch(), group)))).backward()
    return True


def test_weights_by_samples_need_samples(run):
    """All gradients became zero."""
    assert run(no_samples, 2) == [True, True]


def micro_batches(group, counts, in_no_sync):
    model = DDP(mlp(), group, average="samples")
    for step in range(2):
        model.zero_grad()
        with model.no_sync():
            losses = [loss_of(model(batch(step).split(counts)[group.rank])) for _ in range(2 * in_no_sync)]
            for loss in losses[:2]:
                loss.backward()
        loss_of(model(batch(step).split(counts)[group.rank])).backward()
    return gradients(model)


@pytest.mark.parametrize("in_no_sync", [0, 1])
def test_samples_of_accumulated_batches_count(run, in_no_sync):
    expected = single(mlp(), batch(1), 1 + 2 * in_no_sync)
    assert_all_equal(run(micro_batches, 3, [7, 4, 1], in_no_sync), expected)


def two_subgroups(group):
    mine = [group.subgroup(ranks) for ranks in ([0, 2], [1, 3])][group.rank % 2]
    model = DDP(mlp(seed=group.rank), mine, bucket_mb=TINY_MB, average="samples")
    for step in range(2):
        model.zero_grad()
        loss_of(model(batch(step + group.rank % 2).split([8, 4])[mine.rank])).backward()
    return gradients(model)


def test_models_of_two_subgroups_train_beside_each_other(run):
    ranks = run(two_subgroups, 4)
    for first in (0, 1):
        assert_all_equal(ranks[first::2], single(mlp(seed=first), batch(1 + first)))


class Parts(nn.Module):
    """Has a training step that calls its layers, never the module, as programs of Lightning do."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.encoder(x)))

    def training_step(self, x):
        return loss_of(self.head(torch.tanh(self.encoder(x))))


def unfreeze_without_a_forward(group, freezes_head):
    module = fill(Parts())
    module.encoder.requires_grad_(False)
    model = DDP(module, group, bucket_mb=TINY_MB)
    model.training_step(part(batch(), group)).backward()
    model.zero_grad()
    module.encoder.requires_grad_(True)
    module.head.requires_grad_(not freezes_head)
    model.training_step(part(batch(1), group)).backward()
    return gradients(model)


@pytest.mark.parametrize("freezes_head", [False, True])
def test_parameters_are_released_without_a_forward_of_the_module(run, freezes_head):
    """Gradients of the released parameters stayed local: the ranks went apart without an error."""
    expected = fill(Parts())
    expected.head.requires_grad_(not freezes_head)
    expected.training_step(batch(1)).backward()
    assert_all_equal(run(unfreeze_without_a_forward, 3, freezes_head), gradients(expected))


def freeze_while_gradients_accumulate(group, average):
    module = fill(Parts())
    model = DDP(module, group, average=average)
    with model.no_sync():
        backward(model, group)
    module.encoder.requires_grad_(False)
    backward(model, group, seed=1)
    return gradients(model)


@pytest.mark.parametrize("average", ["ranks", "samples"])
def test_what_a_frozen_parameter_accumulated_is_reduced(run, average):
    """It stayed local, and the next optimizer step made the ranks differ."""
    module = fill(Parts())
    loss_of(module(batch())).backward()
    module.encoder.requires_grad_(False)
    loss_of(module(batch(1))).backward()
    assert_all_equal(run(freeze_while_gradients_accumulate, 3, average), gradients(module))


def teacher_in_between(group, as_parameters):
    module = mlp()
    model = DDP(module, group)
    wrap = nn.Parameter if as_parameters else torch.Tensor.detach
    teacher = {name: wrap(0.5 * parameter.detach()) for name, parameter in module.named_parameters()}
    for step in range(2):
        model.zero_grad()
        output = model(part(batch(step), group))
        target = torch.func.functional_call(module, teacher, part(batch(step), group)).detach()
        (output - target).square().mean().backward()
    return gradients(model)


@pytest.mark.parametrize("as_parameters", [False, True])
def test_a_call_with_other_parameters_in_between(run, as_parameters):
    """The other parameters took the place of the module's, whose gradients stayed local."""
    module = mlp()
    half = {name: 0.5 * parameter.detach() for name, parameter in module.named_parameters()}
    target = torch.func.functional_call(module, half, batch(1))
    (module(batch(1)) - target).square().mean().backward()
    assert_all_equal(run(teacher_in_between, 2, as_parameters), gradients(module))


def inner_step(module, inputs):
    """Returns the loss after a step of gradient descent, as in meta-learning."""
    parameters = dict(module.named_parameters())
    loss = loss_of(torch.func.functional_call(module, parameters, inputs))
    found = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
    faster = {name: parameters[name] - 0.1 * one for name, one in zip(parameters, found, strict=True)}
    return loss_of(torch.func.functional_call(module, faster, inputs))


def meta_learning(group):
    model = DDP(mlp(), group)
    for step in range(2):
        model.zero_grad()
        inner_step(model.module, part(batch(step), group)).backward()
    return gradients(model)


def test_gradients_through_an_inner_step_are_reduced(run):
    module = mlp()
    (sum(inner_step(module, inputs) for inputs in batch(1).chunk(2)) / 2).backward()
    assert_all_equal(run(meta_learning, 2), gradients(module))


def step_inside_of_backward(group):
    model = DDP(mlp(), group)
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    with pytest.raises(UnsupportedOp, match=r"inside of backward.*step\(\) after backward"):
        backward(model, group)
    return True


def test_an_optimizer_step_inside_of_backward_is_refused(run):
    """It took gradients that were not reduced yet, so the ranks went apart without an error."""
    assert run(step_inside_of_backward, 2) == [True, True]


def update_inside_of_backward(group, is_before):
    module = mlp()

    def update(parameter):
        with torch.no_grad():
            parameter.sub_(0.1 * parameter.grad)
        parameter.grad = None

    if is_before:
        handles = [parameter.register_post_accumulate_grad_hook(update) for parameter in module.parameters()]
    model = DDP(module, group, bucket_mb=TINY_MB)
    if not is_before:
        handles = [parameter.register_post_accumulate_grad_hook(update) for parameter in module.parameters()]
    with pytest.raises(UnsupportedOp, match=r"parameter '0.weight' was set to None inside of backward"):
        backward(model, group)
    for handle in handles:
        handle.remove()
    model.load_state_dict(mlp().state_dict())
    model.zero_grad()
    backward(model, group)
    return gradients(model)


@pytest.mark.parametrize("is_before", [False, True])
def test_an_update_by_hand_inside_of_backward_is_refused(run, is_before):
    """As LOMO does. It took gradients that were not reduced yet, so the ranks went apart without an error."""
    assert_all_equal(run(update_inside_of_backward, 2, is_before), single(mlp(), batch()))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.scale * x


def call_functionally(group):
    ddp = DDP(Scaled(), group)
    values = {name: torch.zeros_like(each) for name, each in ddp.named_parameters()}
    with pytest.raises(UnsupportedOp, match=r"scale is a parameter .*give ddp\.module to torch\.func"):
        torch.func.functional_call(ddp, values, (torch.ones(3),))
    return torch.func.functional_call(ddp.module, values, (torch.ones(3),)).tolist()


def test_a_parameter_is_not_replaced_by_a_plain_tensor():
    assert echelon.simulate(call_functionally, 2).results == [[0.0] * 3] * 2
