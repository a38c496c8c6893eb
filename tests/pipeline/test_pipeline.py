"""The pipeline trains as one process does, on simulated ranks and on real processes."""

import json

import pytest
import torch
from torch import nn

import echelon
from echelon.pipeline import Costs, Pipeline, schedules
from echelon.timeline.figure import figure_of
from tests.helpers.models import fill
from tests.helpers.one_process import (
    WIDTH,
    gradients_of,
    loss_and_gradients,
    make_batch,
    make_model,
    train_alone,
)

RUNNABLE = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs")


def train_piped(group, schedule, num_microbatches, num_samples, num_layers, num_chunks=None, dtype=torch.float64):
    model = make_model(num_layers, dtype)
    pipe = Pipeline(model, group, schedule, num_microbatches, nn.functional.mse_loss, num_chunks=num_chunks)
    inputs, target = make_batch(num_samples, dtype)
    out = pipe.step(inputs if pipe.is_first else None, target=target if pipe.is_last else None, return_outputs=True)
    return out.loss, out.outputs, {name: p.grad for name, p in pipe.named_parameters()}, pipe.timeline


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_gradients_equal_those_of_one_process(run, schedule, world_size):
    results = run(train_piped, world_size, schedule, 4, 10, 4)
    loss, gradients = loss_and_gradients(make_model(4), make_batch(10), 4)
    got = gradients_of(results)
    assert got.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(got[name], gradient), name
    assert all(torch.equal(result[0], loss) for result in results)


def test_five_samples_in_three_microbatches_over_three_stages(run):
    results = run(train_piped, 3, "1f1b", 3, 5, 3)
    loss, gradients = loss_and_gradients(make_model(3), make_batch(5), 3)
    got = gradients_of(results)
    for name, gradient in gradients.items():
        assert torch.equal(got[name], gradient), name
    assert all(torch.equal(result[0], loss) for result in results)
    whole = nn.functional.mse_loss(make_model(3)(make_batch(5)[0]), make_batch(5)[1])
    torch.testing.assert_close(loss, whole)


@pytest.mark.parametrize("schedule", RUNNABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_runnable_schedule_is_exact(schedule, dtype):
    chunks = 1 if schedule in ("gpipe", "1f1b") else 2
    num_microbatches = 8
    args = (schedule, num_microbatches, 11, 4, chunks, dtype)
    results = echelon.simulate(train_piped, 2, args, timeout=20.0, late_sends=True).results
    loss, gradients = loss_and_gradients(make_model(4, dtype), make_batch(11, dtype), num_microbatches)
    got = gradients_of(results)
    for name, gradient in gradients.items():
        assert torch.equal(got[name], gradient), name
    assert all(torch.equal(result[0], loss) for result in results)


def test_outputs_come_in_batch_order_where_the_last_stage_is(run):
    results = run(train_piped, 2, "1f1b", 3, 7, 2)
    assert results[0][1] is None
    torch.testing.assert_close(results[1][1], make_model(2)(make_batch(7)[0]).detach())


def test_the_timeline_is_what_ran(run):
    results = run(train_piped, 2, "1f1b", 4, 8, 2)
    planned = schedules.build("1f1b", num_ranks=2, num_microbatches=4)
    for _, _, _, timeline in results:
        assert timeline.steps == planned.orders
        assert timeline.makespan >= 0  # simulated ranks compute in no time
        for starts, ends in zip(timeline.starts, timeline.ends, strict=True):
            times = [time for pair in zip(starts, ends, strict=True) for time in pair]
            assert times == sorted(times)
        assert len(timeline.transfers) == 8
        for transfer in timeline.transfers:
            made = timeline.ends[transfer.source_rank][transfer.source]
            assert made <= timeline.starts[transfer.target_rank][transfer.target]


def recompute(group):
    pipe = Pipeline(make_model(2), group, "1f1b", 4, nn.functional.mse_loss, recompute=True)
    pipe.step(make_batch(8)[0], target=make_batch(8)[1])
    return pipe.timeline


def test_a_step_that_recomputes_begins_after_the_one_before():
    for timeline in echelon.simulate(recompute, 2, costs=Costs(1.0, 1.0, 1.0)).results:
        for starts, ends in zip(timeline.starts, timeline.ends, strict=True):
            times = [time for pair in zip(starts, ends, strict=True) for time in pair]
            assert times == sorted(times)


def timed(group):
    pipe = Pipeline(make_model(3), group, "1f1b", 4, nn.functional.mse_loss)
    pipe.step(make_batch(8)[0], target=make_batch(8)[1])
    return pipe.timeline


def test_every_rank_can_write_the_step_of_all_ranks_into_one_trace_and_below_its_plan(tmp_path):
    costs = Costs(forward=1.0, backward_input=1.0, backward_weight=1.0)
    planned = schedules.build("1f1b", num_ranks=3, num_microbatches=4).simulate(costs)
    for rank, timeline in enumerate(echelon.simulate(timed, 3, costs=costs).results):
        timeline.to_chrome(tmp_path / f"{rank}.json")
        events = json.loads((tmp_path / f"{rank}.json").read_text())["traceEvents"]
        spans = [(event["pid"], event["name"], event["ts"] / 1e6) for event in events if event["ph"] == "X"]
        assert spans == [
            (rank, str(step), start)
            for rank, steps in enumerate(planned.steps)
            for step, start in zip(steps, planned.starts[rank], strict=True)
        ]
    timeline.draw(tmp_path / "step.svg", against=planned)
    titles = [text.get_text() for text in figure_of(timeline, against=planned).texts]
    assert titles == [
        *("1f1b, simulated", "makespan 18 s, bubble rate 33.3 %, peak activations 3 2 1"),
        *("1f1b, measured", "makespan 18 s, bubble rate 33.3 %, peak activations 288 B, 384 B, 192 B"),
    ]
    assert (tmp_path / "step.svg").read_text().count("makespan 18 s") == 2


def two_steps(group):
    pipe = Pipeline(make_model(2), group, "1f1b", 2, nn.functional.mse_loss)
    inputs, target = make_batch(4)
    for _ in range(2):
        loss = pipe.step(inputs, target=target).loss
    return loss, None, {name: parameter.grad for name, parameter in pipe.named_parameters()}, None


def test_a_second_step_doubles_the_gradient(run):
    """An earlier system gave 1.25 times the gradient."""
    once, twice = make_model(2), make_model(2)
    train_alone(once, make_batch(4), 2)
    for _ in range(2):
        train_alone(twice, make_batch(4), 2)
    got = gradients_of(run(two_steps, 2))
    for (name, parameter), single in zip(twice.named_parameters(), once.parameters(), strict=True):
        assert torch.equal(got[name], parameter.grad)
        torch.testing.assert_close(got[name], 2 * single.grad, rtol=1e-14, atol=1e-16)


def data_parallel_steps(group, no_sync):
    mesh = echelon.Mesh(group, dp=2, pp=2)
    dp = mesh.coordinates["dp"]
    pipe = Pipeline(make_model(2), mesh["pp"], "1f1b", 2, nn.functional.mse_loss, data_parallel=mesh["dp"])
    inputs, target = (tensor[:3] if dp == 0 else tensor[3:] for tensor in make_batch(8))
    if no_sync:
        with pipe.no_sync():
            pipe.step(inputs, target=target)
    losses = pipe.step(inputs, target=target).loss
    return losses, None, {name: parameter.grad for name, parameter in pipe.named_parameters()}, dp


@pytest.mark.parametrize("no_sync", [False, True])
def test_data_parallel_pipelines_weigh_all_samples_equally(run, no_sync):
    """3 samples on one replica and 5 on the other count like 8 in one batch; accumulated steps add up."""
    results = run(data_parallel_steps, 4, no_sync)
    loss, gradients = loss_and_gradients(make_model(2), make_batch(8), 1)
    for replica in (results[:2], results[2:]):
        got = gradients_of(replica)
        for name, gradient in gradients.items():
            torch.testing.assert_close(got[name], gradient * (2 if no_sync else 1), rtol=1e-12, atol=1e-14)
    for left, right in zip(gradients_of(results[:2]).items(), gradients_of(results[2:]).items(), strict=True):
        assert left[0] == right[0]
        assert torch.equal(left[1], right[1])
    for result in results:
        torch.testing.assert_close(result[0], loss)


def released_and_frozen(group, makes_on_meta):
    """Returns the weights after two steps, of which the second trains the other layer."""
    mesh = echelon.Mesh(group, dp=2, pp=2)
    with torch.device("meta" if makes_on_meta else "cpu"):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(4)])
    train_only(model, 0)
    pipe = Pipeline(model, mesh["pp"], "1f1b", 2, nn.functional.mse_loss, data_parallel=mesh["dp"], at=["2"])
    if makes_on_meta:
        for stage in pipe.stages:
            stage.module.to_empty(device="cpu")  # with values of its own on each rank
    if mesh.coordinates["dp"] == 0 or not makes_on_meta:
        pipe.load_state_dict(four_layers().state_dict())
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    inputs, target = (tensor.chunk(2)[mesh.coordinates["dp"]] for tensor in make_batch(8))
    for odd in (0, 1):
        for stage in pipe.stages:
            train_only(stage.module, odd)
        optimizer.zero_grad()
        pipe.step(inputs, target=target)
        optimizer.step()
    return pipe.state_dict()


def four_layers():
    return fill(nn.Sequential(*[nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(4)]))


def train_only(model, odd):
    """Freezes every other layer."""
    for number, layer in enumerate(model):
        layer.requires_grad_(number % 2 == odd)


@pytest.mark.parametrize("makes_on_meta", [False, True])
def test_replicas_reduce_what_is_released_or_gets_memory_later(run, makes_on_meta):
    """Gradients of released layers stayed local: the replicas went apart without an error. Meta models were refused."""
    model = four_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for odd in (0, 1):
        train_only(model, odd)
        optimizer.zero_grad()
        train_alone(model, make_batch(8), 1)
        optimizer.step()
    for got in run(released_and_frozen, 4, makes_on_meta):
        for name, value in got.items():
            torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-12, atol=1e-14)


def train_replicas(group):
    """Returns the losses of three steps, and the weights after them."""
    mesh = echelon.Mesh(group, dp=2, pp=2)
    pipe = Pipeline(make_model(2), mesh["pp"], "1f1b", 2, nn.functional.mse_loss, data_parallel=mesh["dp"])
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    inputs, target = (tensor.chunk(2)[mesh.coordinates["dp"]] for tensor in make_batch(8))
    losses = []
    for _ in range(3):
        losses.append(pipe.step(inputs, target=target).loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses, pipe.state_dict()


def test_replicas_train_as_one_process_does(run):
    model, losses = make_model(2), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        losses.append(train_alone(model, make_batch(8), 1))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[2] < losses[0]
    for found, weights in run(train_replicas, 4):
        torch.testing.assert_close(found, losses)
        for name, value in weights.items():
            torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-12, atol=1e-14)


class Several(nn.Module):
    """Passes a nested value on: tensors that need gradients, one that does not, and plain data."""

    def __init__(self, index):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(float(index + 2), dtype=torch.float64))

    def forward(self, x, extra=None, *, power):
        if extra is None:
            extra = {"ids": torch.arange(len(x)), "name": "é", "unused": x * 3, "none": None}
        return self.scale * x**power + extra["ids"].unsqueeze(1), extra


class Last(nn.Module):
    def forward(self, x, extra, *, power):
        assert extra["name"] == "é"
        assert extra["none"] is None
        assert not extra["ids"].requires_grad
        return x


def nested_values(group):
    stages = [Several(0), Several(1), Last()]
    pipe = Pipeline(stages, group, "1f1b", 2, nn.functional.mse_loss)
    inputs, target = make_batch(4)
    out = pipe.step(inputs, target=target, power=2)
    return out.loss, None, {name: parameter.grad for name, parameter in pipe.named_parameters()}, None


def test_stages_pass_nested_values_and_take_keyword_arguments(run):
    results = run(nested_values, 3)
    stages = [Several(0), Several(1), Last()]
    inputs, target = make_batch(4)
    total = 0
    for x, y in zip(inputs.tensor_split(2), target.tensor_split(2), strict=True):
        loss = nn.functional.mse_loss(stages[2](*stages[1](*stages[0](x, power=2), power=2), power=2), y) / 2
        loss.backward()
        total += loss.detach()
    got = gradients_of(results)
    assert sorted(got) == ["0.scale", "1.scale"]
    torch.testing.assert_close(got["0.scale"], stages[0].scale.grad)
    torch.testing.assert_close(got["1.scale"], stages[1].scale.grad)
    torch.testing.assert_close(results[0][0], total)


def infer(group, num_samples):
    pipe = Pipeline(make_model(2), group, "1f1b", 4, nn.functional.mse_loss).eval()
    inputs, _ = make_batch(num_samples)
    out = pipe.forward(inputs if pipe.is_first else None)
    return out, out is not None and out.requires_grad, [stage.module.training for stage in pipe.stages]


@pytest.mark.parametrize("num_samples", [1, 3, 9])
def test_inference_takes_any_number_of_samples(run, num_samples):
    for rank, (out, has_graph, training) in enumerate(run(infer, 2, num_samples)):
        assert not has_graph
        assert training == [False]
        if rank == 1:
            torch.testing.assert_close(out, make_model(2)(make_batch(num_samples)[0]).detach())
        else:
            assert out is None


def clip(group, max_norm):
    pipe = Pipeline(make_model(2), group, "1f1b", 2, nn.functional.mse_loss)
    inputs, target = make_batch(4)
    pipe.step(inputs, target=target)
    norm = pipe.clip_grad_norm_(max_norm)
    return norm, None, {name: parameter.grad for name, parameter in pipe.named_parameters()}, None


def clip_by_torch(group):
    pipe = Pipeline(make_model(2), group, "1f1b", 2, nn.functional.mse_loss)
    inputs, target = make_batch(4)
    pipe.step(inputs, target=target)
    nn.utils.clip_grad_value_(pipe.parameters(), 1.0)
    nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)


def test_clipping_by_the_norm_of_one_rank_alone_is_refused(run):
    with pytest.raises(echelon.UnsupportedOp, match=r"the norm of this rank's stages alone: call pipe\.clip_grad"):
        run(clip_by_torch, 2)
    run(clip_by_torch, 1)  # one rank has all stages


@pytest.mark.parametrize("max_norm", [0.01, 100.0])
def test_clipping_uses_the_norm_over_all_stages(run, max_norm):
    model = make_model(2)
    train_alone(model, make_batch(4), 2)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    results = run(clip, 2, max_norm)
    got = gradients_of(results)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad)
    torch.testing.assert_close(results[0][0], norm)


def clip_in_dtypes(group, *dtypes):
    pipe = Pipeline(make_model(2), group, "1f1b", 2, nn.functional.mse_loss)
    for parameter in pipe.parameters():
        if (dtype := dtypes[group.rank]) is not None:
            parameter.data = parameter.data.to(dtype)
            parameter.grad = torch.ones_like(parameter)
    return pipe.clip_grad_norm_(1.0).dtype


def test_a_norm_has_the_dtype_of_the_gradients(run):
    assert run(clip_in_dtypes, 2, torch.bfloat16, torch.bfloat16) == [torch.bfloat16] * 2
    assert run(clip_in_dtypes, 2, torch.bfloat16, torch.float64) == [torch.float64] * 2
    assert run(clip_in_dtypes, 2, None, torch.float16) == [torch.float16] * 2, "one rank has no gradients"


def save_and_load(group):
    pipe = Pipeline(make_model(3), group, "gpipe", 2, nn.functional.mse_loss, at=["2", "4"])
    whole = {name: value + 1 for name, value in make_model(3).state_dict().items()}
    before = set(pipe.state_dict())
    pipe.load_state_dict(whole)
    same = all(torch.equal(value, whole[name]) for name, value in pipe.state_dict().items())
    del whole[next(iter(before))]
    with pytest.raises(KeyError, match="the state dict has no"):
        pipe.load_state_dict(whole)
    return before, same


def test_state_dicts_have_the_names_of_the_unsplit_model(run):
    results = run(save_and_load, 3)
    assert [names for names, _ in results] == [{f"{2 * rank}.weight", f"{2 * rank}.bias"} for rank in range(3)]
    assert all(same for _, same in results)


class Breaks(nn.Module):
    def forward(self, x):
        raise RuntimeError("the fuse has blown")


def break_one_stage(group):
    stages = [make_model(1), Breaks(), make_model(1)]
    pipe = Pipeline(stages, group, "1f1b", 3, nn.functional.mse_loss)
    inputs, target = make_batch(3)
    try:
        pipe.step(inputs, target=target)
    except Exception as error:
        return type(error).__name__, str(error)
    return "no error", ""


def test_an_exception_in_a_stage_reaches_every_rank(run):
    results = run(break_one_stage, 3)
    assert results[1] == ("RuntimeError", "the fuse has blown")
    for kind, message in (results[0], results[2]):
        assert kind == "PeerFailed"
        assert "rank 1 failed: RuntimeError in 1F0, forward of microbatch 0 in stage 1: the fuse has blown" in message


def sum_of_squares(output, target):
    return nn.functional.mse_loss(output, target, reduction="sum")


def sum_losses(group):
    pipe = Pipeline(make_model(2), group, "1f1b", 3, sum_of_squares, loss_reduction="sum")
    inputs, target = make_batch(5)
    loss = pipe.step(inputs, target=target).loss
    return loss, None, {name: parameter.grad for name, parameter in pipe.named_parameters()}, None


def test_sums_of_losses_add_up(run):
    results = run(sum_losses, 2)
    loss, gradients = loss_and_gradients(make_model(2), make_batch(5), 3, loss_fn=sum_of_squares, is_mean=False)
    got = gradients_of(results)
    for name, gradient in gradients.items():
        assert torch.equal(got[name], gradient)
    assert all(torch.equal(result[0], loss) for result in results)


def masked_mean(output, target):
    keep = ~target.isnan()
    return (output[keep] - target[keep]).square().mean()


def weighted_losses(group):
    mesh = echelon.Mesh(group, dp=2, pp=2)
    half = slice(0, 4) if mesh.coordinates["dp"] == 0 else slice(4, 6)
    pipe = Pipeline(
        make_model(2),
        mesh["pp"],
        "1f1b",
        2,
        masked_mean,
        data_parallel=mesh["dp"],
        loss_weight=lambda target: float((~target.isnan()).sum()),
    )
    inputs, target = masked_batch()
    loss = pipe.step(inputs[half], target=target[half]).loss
    return loss, None, {name: parameter.grad for name, parameter in pipe.named_parameters()}, None


def masked_batch():
    inputs, target = make_batch(6)
    target = target.clone()
    target[0, 1:] = target[2] = target[5, 3] = float("nan")
    return inputs, target


def test_microbatches_may_weigh_by_what_counts_in_them(run):
    """Unequal numbers of tokens: the mean is over all tokens of all replicas, not a mean of means."""
    model = make_model(2)
    inputs, target = masked_batch()
    loss = masked_mean(model(inputs), target)
    loss.backward()
    results = run(weighted_losses, 4)
    for replica in (results[:2], results[2:]):
        got = gradients_of(replica)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(got[name], parameter.grad)
    for result in results:
        torch.testing.assert_close(result[0], loss.detach())
