"""A parameter in several stages is trained as the one parameter that it is."""

import pytest
import torch
from torch import nn

import echelon
from echelon.pipeline import Pipeline, split
from echelon.pipeline.cut.ties import ParameterPlace, find_ties
from tests.helpers.one_process import make_batch, make_model


def tied_model():
    model = make_model(4)
    model[6].weight = model[0].weight
    return model


def train_alone(num_steps=1, split_into=1):
    model = tied_model()
    for _ in range(num_steps):
        inputs, target = make_batch(6)
        for x, y in zip(inputs.tensor_split(split_into), target.tensor_split(split_into), strict=True):
            (nn.functional.mse_loss(model(x), y) * (len(x) / 6)).backward()
    return model


def train(group, schedule, num_chunks, num_steps, as_list):
    model = tied_model()
    if as_list:
        model = [model[:2], model[2:4], model[4:6], model[6:]]
    pipe = Pipeline(model, group, schedule, 2, nn.functional.mse_loss, num_chunks=num_chunks)
    inputs, target = make_batch(6)
    for _ in range(num_steps):
        pipe.step(inputs, target=target)
    gradients = {name: p.grad.clone() for name, p in pipe.named_parameters()}
    return gradients, pipe.clip_grad_norm_(1e-3), [p.shape for p in pipe.parameters()], set(pipe.state_dict())


@pytest.mark.parametrize(("schedule", "num_chunks"), [("1f1b", 2), ("zb-v", 2), ("interleaved-1f1b", 2)])
@pytest.mark.parametrize("num_steps", [1, 2])
def test_gradients_are_added_up_once_a_step(run, schedule, num_chunks, num_steps):
    schedule = "gpipe" if schedule == "1f1b" else schedule
    results = run(train, 4 if schedule == "gpipe" else 2, schedule, 1 if schedule == "gpipe" else 2, num_steps, False)
    model = train_alone(num_steps, 2)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    for gradients, found, shapes, _ in results:
        assert len(shapes) == len(gradients)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(found, norm.double(), rtol=1e-12, atol=0)
    holders = [gradients for gradients, *_ in results if {"0.weight", "6.weight"} & set(gradients)]
    copies = [gradients[name] for gradients in holders for name in ("0.weight", "6.weight") if name in gradients]
    assert all(torch.equal(copy, copies[0]) for copy in copies)
    assert set().union(*(names for *_, names in results)) == set(model.state_dict())


def test_stages_of_a_list_may_share_a_parameter(run):
    results = run(train, 4, "1f1b", None, 1, True)
    model = train_alone(1, 2)
    torch.testing.assert_close(results[0][0]["0.0.weight"], model[0].weight.grad, rtol=1e-12, atol=1e-14)
    assert torch.equal(results[0][0]["0.0.weight"], results[3][0]["3.6.weight"])


def partly_known(group):
    """Only rank 0 has both stages, so only it can see that they share a weight; rank 1 starts with another one."""
    first, last = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
    torch.manual_seed(group.rank)
    nn.init.normal_(last.weight)
    if group.rank == 0:
        first.weight = last.weight
    pipe = Pipeline([first if group.rank == 0 else None, last], group, "1f1b", 2, nn.functional.mse_loss)
    inputs, target = make_batch(4)
    optimizer = torch.optim.Adam(pipe.parameters())
    for _ in range(2):
        pipe.step(inputs, target=target)
        optimizer.step()
        optimizer.zero_grad()
    return next(weight for name, weight in pipe.state_dict().items() if name.endswith("weight"))


def test_a_rank_that_cannot_see_it_is_told():
    left, right = echelon.simulate(partly_known, 2, timeout=20.0).results
    assert torch.equal(left, right)


def replicated(group, no_sync):
    mesh = echelon.Mesh(group, dp=2, pp=2)
    pipe = Pipeline(tied_model(), mesh["pp"], "1f1b", 2, nn.functional.mse_loss, at=["4"], data_parallel=mesh["dp"])
    part = slice(0, 2) if mesh.coordinates["dp"] == 0 else slice(2, 6)
    inputs, target = make_batch(6)
    if no_sync:
        with pipe.no_sync():
            pipe.step(inputs[part], target=target[part])
    pipe.step(inputs[part], target=target[part])
    norm = pipe.clip_grad_norm_(1e9)
    return {name: p.grad for name, p in pipe.named_parameters()}, norm


@pytest.mark.parametrize("no_sync", [False, True])
def test_replicas_average_it_as_well(run, no_sync):
    model = train_alone(2 if no_sync else 1)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    for gradients, found in run(replicated, 4, no_sync):
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(found, norm.double(), rtol=1e-12, atol=0)


def test_running_statistics_of_two_stages_are_refused():
    """Each stage counted its own, so that they were not those of one process."""
    norm = nn.BatchNorm1d(6)
    model = nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 6), norm)
    with pytest.raises(echelon.PartitionError, match=r"^3 \(BatchNorm1d\) is in stages 0 and 1.*a layer of its own"):
        echelon.simulate(lambda group: Pipeline(model, group, "1f1b", 2, at=["2"]), 2)
    norm.eval()
    assert len(find_ties(split(model, at=["2"]))) == 2


def test_places_are_found_under_all_names():
    ties = find_ties(split(tied_model(), at=["4"]))
    assert ties == [(ParameterPlace(0, "0.weight"), ParameterPlace(1, "6.weight"))]
    assert find_ties(split(tied_model(), at=["7"])) == []


def load_one_name(group):
    pipe = Pipeline(tied_model(), group, "1f1b", 2, nn.functional.mse_loss, at=["4"])
    saved = {name: value + 1 for name, value in tied_model().state_dict().items()}
    wanted = saved.pop("6.weight")
    pipe.load_state_dict(saved)
    return all(torch.equal(value, saved.get(name, wanted)) for name, value in pipe.state_dict().items())


def test_a_state_dict_may_have_it_once():
    assert echelon.simulate(load_one_name, 2, timeout=20.0).results == [True, True]


class Product(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return x @ self.weight


def complex_tied(group):
    weight = nn.Parameter(torch.full((2, 2), 1 + 1j))
    pipe = Pipeline([Product(weight), Product(weight)], group, "1f1b", 2, lambda output, _: output.abs().mean())
    x = torch.ones(2, 2, dtype=torch.complex64)
    pipe.step(x, target=x)
    alone = weight.detach().clone().requires_grad_()
    (x @ alone @ alone).abs().mean().backward()
    return next(pipe.parameters()).grad, alone.grad


def test_a_complex_parameter_may_be_tied():
    for found, expected in echelon.simulate(complex_tied, 2).results:
        torch.testing.assert_close(found, expected)
