"""What the runtime promises beside right numbers: memory, buffers, schedules planned again."""

import random
import warnings

import numpy
import pytest
import torch
from torch import nn

import echelon
from echelon.pipeline import Pipeline, schedules
from echelon.pipeline.plan.fuse import split_stages
from tests.helpers.models import gradients
from tests.helpers.named_schedules import sizes_of
from tests.helpers.one_process import WIDTH, make_batch, make_model, train_alone

TRAINING = [name for name in schedules.names() if name != "forward-only"]


def simulate(fn, world_size, *args):
    return echelon.simulate(fn, world_size, args, timeout=20.0, late_sends=True).results


def named(name, num_ranks, num_microbatches, num_chunks=1):
    return schedules.build(name, *sizes_of(name, num_ranks, num_microbatches, num_chunks))


def step(pipe, batch, **kwargs):
    inputs, target = batch
    return pipe.step(inputs if pipe.is_first else None, target=target if pipe.is_last else None, **kwargs)


def assert_gradients(results, model):
    got = {name: gradient for rank in results for name, gradient in rank.items()}
    expected = gradients(model)
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(got[name], gradient), name


# Stages without halves


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x):
        return self.lstm(x)[0]


def recurrent_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Recurrent(), nn.Linear(WIDTH, WIDTH))


def train_recurrent(group, at_build):
    batch = make_batch(6, torch.float32)
    schedule = named("zb-h2", group.world_size, 3)
    cuts = ["2", "3"][: group.world_size - 1]
    example = (batch[0],) if at_build else None
    pipe = Pipeline(recurrent_model(), group, schedule, loss_fn=nn.functional.mse_loss, at=cuts, example=example)
    whole = {1} if cuts else {0}
    every = set(range(group.world_size))
    assert split_stages(pipe.schedule) == (every - whole if at_build else every)
    step(pipe, batch)
    assert split_stages(pipe.schedule) == every - whole
    assert pipe.timeline.steps == pipe.schedule.orders
    return gradients(pipe_modules(pipe))


def pipe_modules(pipe):
    return nn.ModuleDict() if not pipe.stages else _Named(pipe)


class _Named:
    def __init__(self, pipe):
        self.named_parameters = pipe.named_parameters


@pytest.mark.filterwarnings("ignore:stage 1 does its backward as a whole")
@pytest.mark.parametrize("at_build", [False, True])
def test_a_stage_that_cannot_be_split_is_planned_again_on_all_ranks(at_build):
    results = simulate(train_recurrent, 3, at_build)
    model = recurrent_model()
    train_alone(model, make_batch(6, torch.float32), 3)
    assert_gradients(results, model)


def test_a_warning_names_the_module_that_cannot_be_split():
    stages = [nn.Linear(WIDTH, WIDTH), Recurrent()]
    with echelon.init() as group:
        pipe = Pipeline(stages, group, "zb-v", 2, nn.functional.mse_loss)
        words = r"stage 1 does its backward as a whole \(B instead of I and W in zb-v\): 1.lstm \(LSTM\) computes all "
        with pytest.warns(UserWarning, match=words):
            step(pipe, make_batch(4, torch.float32))


def warned_alone(group):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe = Pipeline([nn.Linear(WIDTH, WIDTH), Recurrent()], group, "zb-h1", 2, nn.functional.mse_loss)
        try:
            step(pipe, make_batch(4, torch.float32))
        except (UserWarning, echelon.PeerFailed) as error:
            return type(error).__name__, str(error)
    return "no error", ""


def test_a_warning_that_is_an_error_on_one_rank_ends_the_step_on_all():
    """Only the rank of the stage warns; the others went on and waited for it."""
    (told, message), (raised, _) = simulate(warned_alone, 2)
    assert (told, raised) == ("PeerFailed", "UserWarning")
    assert "rank 1 failed: UserWarning: stage 1 does its backward as a whole" in message


def try_list_at_build(group):
    batch = make_batch(6, torch.float32)
    stages = [nn.Linear(WIDTH, WIDTH), Recurrent(), nn.Linear(WIDTH, WIDTH)]
    mine = [stage if index == group.rank else None for index, stage in enumerate(stages)]
    pipe = Pipeline(mine, group, "zb-h1", 3, nn.functional.mse_loss, example=(batch[0],))
    return split_stages(pipe.schedule)


@pytest.mark.filterwarnings("ignore:stage 1 does its backward as a whole")
def test_stages_of_a_list_are_tried_when_the_pipeline_is_built_if_there_is_an_example():
    assert simulate(try_list_at_build, 3) == [{0, 2}] * 3


# Memory


class Block(nn.Module):
    """Keeps more for I than for W, as attention does."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.norm(x + torch.sin(torch.tanh(torch.exp(self.layer(x) / 9))))


def measure(group, name, recompute):
    torch.manual_seed(0)
    schedule = named(name, 2, 6)
    model = nn.Sequential(*[Block() for _ in range(8)])
    pipe = Pipeline(model, group, schedule, loss_fn=nn.functional.mse_loss, recompute=recompute)
    step(pipe, make_batch(12, torch.float32))
    return pipe.memory(), pipe.timeline


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", TRAINING)
def test_memory_is_what_the_plan_says(name, recompute):
    for rank, ((planned, measured), timeline) in enumerate(results := simulate(measure, 2, name, recompute)):
        assert measured == planned > 0
        assert timeline.memory_unit == "B"
        for _, other in results:  # every rank has the strips of all ranks
            assert max(level.amount for level in other.memory[rank]) == planned


def measure_linear_stages(group):
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)])
    pipe = Pipeline(model, group, "gpipe", 2, nn.functional.mse_loss)
    step(pipe, make_batch(4, torch.float32))
    return pipe.memory().measured


def test_the_batch_is_not_counted():
    """The inputs of stage 0 are views of it, those of stage 1 are received for one microbatch."""
    first, last = simulate(measure_linear_stages, 2)
    received = output = 4 * WIDTH * 4
    assert (first, last) == (0, received + output)


def test_more_microbatches_in_flight_hold_more():
    (gpipe, _), (one_f_one_b, _) = (simulate(measure, 2, name, False)[0] for name in ("gpipe", "1f1b"))
    assert gpipe.measured == 3 * one_f_one_b.measured, "all 6 of them, not 2"
    recomputed, _ = simulate(measure, 2, "gpipe", True)[0]
    assert recomputed.measured < gpipe.measured / 4


# Buffers


def count_buffers(group, num_microbatches, num_steps):
    pipe = Pipeline(make_model(4), group, "1f1b", num_microbatches, nn.functional.mse_loss)
    for _ in range(num_steps):
        step(pipe, make_batch(2 * num_microbatches))
    return len(pipe._runtime.buffers)


def test_receive_buffers_are_as_many_as_the_plan_holds_not_as_there_are_microbatches(pool):
    """1F1B holds at most ranks - rank microbatches; up to 3 steps ahead, one more of each direction is posted."""
    for run in (simulate, pool.run):
        counts = run(count_buffers, 4, 16, 3)
        for rank, count in enumerate(counts):
            assert 0 < count <= (4 - rank) + 2 + 2
        assert counts == run(count_buffers, 4, 32, 2), "twice as many microbatches need no more"


def change_shapes(group):
    pipe = Pipeline(make_model(3), group, "zb-h1", 3, nn.functional.mse_loss)
    for num_samples in (7, 3, 12, 12, 5):
        step(pipe, make_batch(num_samples))
    return dict(gradients(pipe_modules(pipe)))


def test_shapes_change_between_steps_and_between_microbatches():
    results = simulate(change_shapes, 3)
    model = make_model(3)
    for num_samples in (7, 3, 12, 12, 5):
        train_alone(model, make_batch(num_samples), 3)
    assert_gradients(results, model)


class Grows(nn.Module):
    """Passes on another number of tensors each time."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return [x / (self.calls % 4 + 1)] * (self.calls % 4 + 1) if self.calls % 5 else ({"é" * 2000: [x]},)


class Sums(nn.Module):
    def forward(self, parts):
        return parts["é" * 2000][0] if isinstance(parts, dict) else torch.stack(parts).sum(0)


def change_structure(group):
    pipe = Pipeline([make_model(1), Grows(), Sums()], group, "1f1b", 3, nn.functional.mse_loss)
    return [step(pipe, make_batch(6)).loss for _ in range(4)]


def test_structures_change_between_steps_and_between_microbatches():
    loss = train_alone(make_model(1), make_batch(6), 3)
    for losses in simulate(change_structure, 3):
        for one in losses:
            torch.testing.assert_close(one, loss)


def keep_outputs(group):
    pipe = Pipeline([make_model(1), nn.Identity()], group, "1f1b", 2, nn.functional.mse_loss)
    outputs = [step(pipe, make_batch(4), return_outputs=True).outputs for _ in range(3)]
    kept = []
    pipe.stages[-1].module.register_forward_hook(lambda _module, _inputs, output: kept.append(output))
    step(pipe, (make_batch(4)[0] * 2, make_batch(4)[1]))
    step(pipe, make_batch(4))
    return outputs, kept


def test_what_the_user_keeps_of_a_received_value_is_not_overwritten():
    outputs, kept = simulate(keep_outputs, 2)[1]
    whole = make_model(1)(make_batch(4)[0]).detach()
    for output in outputs:
        torch.testing.assert_close(output, whole)
    torch.testing.assert_close(torch.cat(kept[2:]).detach(), whole)
    assert not torch.equal(torch.cat(kept[:2]), whole)


# Recomputation and reduction


def recompute(group, stages):
    torch.manual_seed(group.rank)
    model = nn.Sequential(*make_model(2), nn.Dropout(0.0), *make_model(2))
    pipe = Pipeline(model, group, "zb-v", 4, nn.functional.mse_loss, recompute=stages)
    calls = []
    for stage in pipe.stages:
        stage.module.register_forward_hook(lambda *_, index=stage.index: calls.append(index))
    step(pipe, make_batch(9))
    counted = [calls.count(stage.index) for stage in pipe.stages]
    calls.clear()
    step(pipe, make_batch(9))
    assert [calls.count(stage.index) for stage in pipe.stages] <= counted
    return dict(gradients(pipe_modules(pipe))), {index: calls.count(index) for index in calls}


@pytest.mark.parametrize("stages", [[1], True])
def test_recomputed_stages_run_their_forward_twice_and_give_the_same(stages):
    results = simulate(recompute, 2, stages)
    model = nn.Sequential(*make_model(2), nn.Dropout(0.0), *make_model(2))
    for _ in range(2):
        train_alone(model, make_batch(9), 4)
    assert_gradients([rank for rank, _ in results], model)
    calls = {index: count for _, counted in results for index, count in counted.items()}
    assert calls == {stage: 8 if stages is True or stage in stages else 4 for stage in range(4)}


def random_recompute(group, recompute):
    torch.manual_seed(3)
    model = nn.Sequential(*make_model(1), nn.Dropout(0.5), *make_model(1))
    pipe = Pipeline(model, group, "1f1b", 2, nn.functional.mse_loss, recompute=recompute)
    loss = step(pipe, make_batch(8)).loss
    return loss, dict(gradients(pipe_modules(pipe)))


def test_recomputation_draws_the_same_random_numbers():
    (loss, plain), (again, recomputed) = (simulate(random_recompute, 1, flag)[0] for flag in (False, True))
    assert torch.equal(loss, again)
    for name, gradient in plain.items():
        assert torch.equal(gradient, recomputed[name])


def count_statistics(group, schedule, recompute):
    torch.manual_seed(0)
    num_stages = schedule.num_stages
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).double() for _ in range(num_stages)]
    pipe = Pipeline(stages, group, schedule, loss_fn=nn.functional.mse_loss, recompute=recompute)
    for _ in range(2):
        step(pipe, make_batch(12))
    return pipe.state_dict()


@pytest.mark.parametrize("name", ["gpipe", "zb-v"])
def test_running_statistics_count_a_microbatch_that_is_run_again_once(name):
    schedule = named(name, 2, 4)
    both = (simulate(count_statistics, 2, schedule, recompute) for recompute in (False, True))
    for plain, again in zip(*both, strict=True):
        assert {int(value) for key, value in again.items() if key.endswith("num_batches_tracked")} == {8}
        for key, value in plain.items():
            assert torch.equal(again[key], value), key


class Memory(nn.Module):
    """Normalises by buffers that each training forward moves on, one by another tensor and one in place.

    BatchNorm does so in its outputs in evaluation alone, spectral normalisation in all of its forwards.
    """

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("scale", torch.ones(WIDTH))
        self.register_buffer("mask", torch.ones(2**15))  # 256 KiB that do not change

    def forward(self, x):
        hidden = self.layer(x)
        self.mean = 0.5 * self.mean + 0.5 * hidden.detach().mean(0)
        self.scale.data.lerp_(hidden.detach().square().mean(0).sqrt(), 0.5)
        return torch.tanh((hidden - self.mean) * self.scale.clone() * self.mask[0])


def with_buffers():
    torch.manual_seed(0)
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(Memory(), spectral, Memory(), nn.Linear(WIDTH, WIDTH)).double()


def train_with_buffers(group, schedule, recompute):
    pipe = Pipeline(with_buffers(), group, schedule, loss_fn=nn.functional.mse_loss, recompute=recompute)
    for num_samples in (9, 12):
        step(pipe, make_batch(num_samples))
    return dict(gradients(pipe_modules(pipe))), pipe.state_dict()


@pytest.mark.parametrize(("name", "recompute"), [("1f1b", True), ("gpipe", [0]), ("zb-h1", False), ("zb-v", True)])
def test_each_microbatch_gets_the_buffers_that_the_one_before_left(name, recompute):
    """A forward that was run again, or tried before the first step, began with later buffers, or left its own."""
    model = with_buffers()
    for num_samples in (9, 12):
        train_alone(model, make_batch(num_samples), 4)
    if name == "1f1b":
        results = echelon.simulate(train_with_buffers, 2, (named(name, 2, 4), recompute), timeout=20.0).results
    else:
        results = simulate(train_with_buffers, 2, named(name, 2, 4, 2 if name == "zb-v" else 1), recompute)
    assert_gradients([rank for rank, _ in results], model)
    for _, state in results:
        for key, value in state.items():
            assert torch.equal(model.state_dict()[key], value), key


class Depth(nn.Module):
    """Takes one of two layers, as Python's random numbers and NumPy's say."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))

    def forward(self, x):
        return self.layers[random.random() < 0.5](x) * numpy.random.rand()


def random_depth(group, recompute):
    torch.manual_seed(3)
    pipe = Pipeline(nn.Sequential(Depth(), Depth()), group, "gpipe", 4, nn.functional.mse_loss, recompute=recompute)
    random.seed(1)
    numpy.random.seed(1)
    loss = step(pipe, make_batch(8)).loss
    return loss, dict(gradients(pipe_modules(pipe))), (random.random(), numpy.random.rand())


def test_recomputation_draws_what_python_and_numpy_drew():
    """Gradients were those of another function than the loss."""
    (loss, plain, after), (again, recomputed, then) = (simulate(random_depth, 1, flag)[0] for flag in (False, True))
    assert torch.equal(loss, again)
    assert after == then
    for name, gradient in plain.items():
        assert torch.equal(gradient, recomputed[name]), name


def thaw(group, schedule):
    model = thawing_model()
    pipe = Pipeline(model, group, schedule, loss_fn=nn.functional.mse_loss)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for at in range(3):
            model[:2].requires_grad_(at > 0)
            step(pipe, make_batch(9))
    return dict(gradients(pipe_modules(pipe))), [str(each.message) for each in caught]


def thawing_model():
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Sequential(layer, nn.Tanh(), layer), nn.Tanh()).double()


def test_what_is_released_later_may_not_be_split():
    """With stage 0 frozen, stage 1 has no I. Then its layer that is applied twice ended the pipeline."""
    model = thawing_model()
    for at in range(3):
        model[:2].requires_grad_(at > 0)
        train_alone(model, make_batch(9), 4)
    results = simulate(thaw, 2, named("zb-h1", 2, 4))
    assert_gradients([rank for rank, _ in results], model)
    said = [line for _, lines in results for line in lines]
    assert [line.partition(" microbatch")[0] for line in said] == ["stage 1 does the whole backward of"]
    assert "2.0 (Linear) is used in several places, unlike in the first step" in said[0]


def watch_reductions(group, name):
    schedule = named(name, 2, 4)
    pipe = Pipeline(make_model(4), group, schedule, loss_fn=nn.functional.mse_loss)
    seen = []

    def done(stage):
        gradient = [parameter.grad.clone() for parameter in pipe.stages[place[stage]].module.parameters()]
        seen.append((stage, gradient))

    place = {stage.index: number for number, stage in enumerate(pipe.stages)}
    pipe._replicas.start = done
    step(pipe, make_batch(8))
    assert sorted(stage for stage, _ in seen) == sorted(place)
    for stage, at_reduction in seen:
        for parameter, gradient in zip(pipe.stages[place[stage]].module.parameters(), at_reduction, strict=True):
            assert torch.equal(parameter.grad, gradient)
    return [stage for stage, _ in seen]


@pytest.mark.parametrize("name", TRAINING)
def test_each_stage_is_reduced_once_and_when_its_gradients_are_complete(name):
    simulate(watch_reductions, 2, name)


def use_inputs_again(group):
    pipe = Pipeline([nn.Identity(), make_model(1)], group, "gpipe", 2)
    inputs = make_batch(4)[0].clone()
    output = pipe.forward(inputs if pipe.is_first else None)
    inputs.zero_()  # the first stage has sent them as they are
    return output


def test_inputs_may_be_overwritten_after_a_forward():
    output = simulate(use_inputs_again, 2)[1]
    torch.testing.assert_close(output, make_model(1)(make_batch(4)[0]).detach())
