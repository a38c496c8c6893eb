"""Losses that ignore a part of the targets: the mean over what counts, as one process has it."""

import pytest
import torch
from torch import nn

import echelon
from echelon.pipeline import Pipeline

IGNORED = -100


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 11)).double()


def make_batch():
    """8 samples of 5 tokens; of the first and of the last two none counts."""
    ids = torch.randint(0, 11, (8, 5), generator=torch.Generator().manual_seed(1))
    target = ids.clone()
    target[[0, 6, 7]] = IGNORED
    target[3, 2:] = IGNORED
    return ids, target


def mean_loss(scores, target):
    return nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def num_tokens(target):
    return (target != IGNORED).sum()


def hits(scores, target):
    """Divides by what counts, as such functions do."""
    return {"hits": ((scores.argmax(-1) == target).sum() / num_tokens(target))}


def train(group, schedule, num_microbatches, replicas):
    mesh = echelon.Mesh(group, dp=replicas, pp=2)
    pipe = Pipeline(
        make_model(),
        mesh["pp"],
        schedule,
        num_microbatches,
        mean_loss,
        loss_weight=num_tokens,
        metrics=hits,
        data_parallel=mesh["dp"] if replicas > 1 else None,
    )
    ids, target = (tensor.chunk(replicas)[mesh.coordinates["dp"]] for tensor in make_batch())
    out = pipe.step(ids, target=target)
    return out.loss, out.metrics, {name: parameter.grad for name, parameter in pipe.named_parameters()}


@pytest.mark.parametrize(
    ("schedule", "num_microbatches", "replicas"), [("1f1b", 2, 1), ("zb-h1", 4, 1), ("gpipe", 8, 1), ("zb-h1", 4, 2)]
)
def test_microbatches_in_which_nothing_counts_count_nothing(run, schedule, num_microbatches, replicas):
    """A mean over no token is no number, which made the whole step fail, or would have been added into gradients."""
    model, (ids, target) = make_model(), make_batch()
    scores = model(ids)
    loss = mean_loss(scores, target)
    loss.backward()
    for found, metrics, gradients in run(train, 2 * replicas, schedule, num_microbatches, replicas):
        torch.testing.assert_close(found, loss.detach())
        assert metrics == pytest.approx({"hits": hits(scores, target)["hits"].item()})
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-9, atol=1e-12)


def weigh(group, weight):
    pipe = Pipeline(make_model(), group, "1f1b", 2, mean_loss, loss_weight=lambda _: weight)
    pipe.step(make_batch()[0], target=make_batch()[1])


@pytest.mark.parametrize("weight", [-1.0, float("nan"), None, "3", torch.ones(2)])
def test_weights_that_are_no_amounts_are_refused(weight):
    with pytest.raises(echelon.SizeMismatch, match=r"loss_weight\(target\): expected a number of at least 0"):
        echelon.simulate(weigh, 1, (weight,))


class Logarithm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x):
        return (x * self.scale).log()


def ignore_what_is_not_a_number(group):
    pipe = Pipeline([Logarithm()], group, "gpipe", 2, lambda output, _: output.mean(), loss_weight=torch.sum)
    inputs = torch.tensor([1.0, 4.0, -1.0, -4.0], dtype=torch.float64)
    out = pipe.step(inputs, target=torch.tensor([1.0, 1.0, 0.0, 0.0]))
    return out.loss.item(), next(pipe.parameters()).grad.item()


def test_an_output_that_is_not_a_number_does_not_matter_where_nothing_counts(run):
    (loss, gradient) = run(ignore_what_is_not_a_number, 1)[0]
    assert loss == pytest.approx(torch.tensor(4.0).log().item() / 2)
    assert gradient == pytest.approx(1.0)
