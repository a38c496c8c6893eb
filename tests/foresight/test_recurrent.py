"""Recurrent networks on a GPU: their shapes, their products and what backward keeps."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from echelon import foresee
from echelon.foresight.trace import Allocate, Kernel
from tests.helpers.grids import covering

WIDTH, HIDDEN, STEPS, BATCH = 6, 8, 5, 3
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
CASES = {
    "plain": {},
    "batch first": {"batch_first": True},
    "two layers": {"num_layers": 2, "dropout": 0.1},
    "both directions": {"bidirectional": True, "num_layers": 2},
    "without biases": {"bias": False},
}


def train(kind, options, device="cuda", *, lengths=None, found=None):
    """Returns the shapes of outputs and gradients."""
    model = getattr(nn, kind)(WIDTH, HIDDEN, **options).to(device)
    x = torch.ones(BATCH, STEPS, WIDTH, device=device)
    x = (x if options.get("batch_first") else x.transpose(0, 1)).requires_grad_()
    given = x if lengths is None else pack_padded_sequence(x, lengths(), options.get("batch_first", False))
    out, last = model(given)
    if lengths is not None:
        out = pad_packed_sequence(out, options.get("batch_first", False))[0]
    last = last if isinstance(last, tuple) else (last,)
    (out.sum() + last[0].sum()).backward()
    shapes = [tuple(each.shape) for each in (out, *last, x.grad, *(each.grad for each in model.parameters()))]
    if found is not None:
        found.extend(shapes)
    return shapes


def kernels(seen):
    return [each for each in seen.traces[0].entries if isinstance(each, Kernel)]


@pytest.mark.parametrize(("case", "kind"), covering(CASES, GATES))
def test_outputs_and_gradients_have_the_shapes_of_torch(case, kind):
    options = CASES[case]
    found = []
    seen = foresee(lambda: train(kind, options, found=found), 1, gpu="h100")
    assert found == train(kind, options, "cpu")
    directions, layers = 2 if options.get("bidirectional") else 1, options.get("num_layers", 1)
    widths = [WIDTH, *[HIDDEN * directions] * (layers - 1)]
    forward = sum(2 * STEPS * BATCH * GATES[kind] * HIDDEN * (width + HIDDEN) * directions for width in widths)
    assert sum(each.flops for each in kernels(seen)) == 3 * forward


@pytest.mark.parametrize(("kind", "options"), covering(GATES, [{}, {"batch_first": True}]), ids=str)
def test_packed_sequences_have_the_shapes_of_torch(kind, options):
    found = []
    lengths = partial(torch.tensor, [5, 4, 2])
    seen = foresee(lambda: train(kind, options, lengths=lengths, found=found), 1, gpu="h100")
    assert found == train(kind, options, "cpu", lengths=lengths)
    found.clear()
    foresee(lambda: train(kind, options, "cpu", lengths=lengths, found=found), 1, gpu="cpu")
    assert found == train(kind, options, "cpu", lengths=lengths)
    products = [each for each in kernels(seen) if each.kind == "matmul"]
    assert products[0].shape == (1, 5 + 4 + 2, GATES[kind] * HIDDEN, WIDTH)
    assert not any("full length" in each for each in seen.assumptions)


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ([2, 5, 4], "do not decrease"),
        ([9, 5, 4], "of sequences of 5 steps"),
        ([5, 4], "a length for each of 3 sequences, and got 2"),
    ],
)
def test_lengths_that_torch_refuses_are_refused(lengths, text):
    for run in (
        lambda: train("GRU", {}, "cpu", lengths=partial(torch.tensor, lengths)),
        lambda: foresee(lambda: train("GRU", {}, lengths=partial(torch.tensor, lengths)), 1, gpu="h100"),
    ):
        with pytest.raises(RuntimeError) as raised:
            run()
    assert text in str(raised.value)


def test_an_input_on_the_cpu_is_an_error():
    with pytest.raises(RuntimeError, match=r"lstm takes a tensor of the CPU, made at .*test_recurrent.py"):
        foresee(lambda: nn.LSTM(WIDTH, HIDDEN, device="cuda")(torch.ones(STEPS, BATCH, WIDTH)), 1, gpu="h100")


def test_a_network_on_the_cpu_is_computed_there():
    def program():
        network = nn.GRU(WIDTH, HIDDEN).cuda().cpu()  # moved, so that its device is known
        network(torch.ones(STEPS, BATCH, WIDTH), torch.zeros(1, BATCH, HIDDEN))[0].sum().backward()
        torch.ones(2, device="cuda") + 1

    seen = foresee(program, 1, gpu="h100")
    assert not any(each.kind == "matmul" for each in kernels(seen))
    assert not any("recurrent" in each for each in seen.assumptions)


def test_unknown_lengths_are_full():
    found = []
    seen = foresee(lambda: train("GRU", {}, lengths=lambda: (torch.randn(3, 5) > 0).sum(1), found=found), 1, gpu="h100")
    assert found[0] == (STEPS, BATCH, HIDDEN)
    assert any(each.startswith("sequences are of full length at ") for each in seen.assumptions)


def test_steps_come_one_after_another():
    launches = [
        each.launches for each in kernels(foresee(train, 1, ("LSTM", {}, "cuda"), gpu="h100")) if each.launches > 1
    ]
    assert launches == [STEPS] * 4  # a product and the gates, forward and backward

    def seconds(steps):
        def program():
            nn.LSTM(64, 64, device="cuda")(torch.ones(steps, 4, 64, device="cuda"))

        return foresee(program, 1, gpu="h100").step_seconds

    assert seconds(800) - seconds(400) == pytest.approx(seconds(1200) - seconds(800), rel=0.01)
    assert seconds(800) - seconds(400) >= 400 * 2 * 2.5e-6  # at least the time of the launches


@pytest.mark.parametrize(("kind", "kept"), [("LSTM", 6), ("GRU", 5), ("RNN", 1)])
def test_backward_reads_some_values_of_each_unit(kind, kept):
    seen = foresee(train, 1, (kind, {}, "cuda"), gpu="h100")
    sizes = [each.num_bytes for each in seen.traces[0].entries if isinstance(each, Allocate)]
    assert 512 * math.ceil(kept * STEPS * BATCH * HIDDEN * 4 / 512) in sizes  # as the allocator rounds
    assert any(each.startswith("a recurrent network takes one step after another") for each in seen.assumptions)


def test_a_network_whose_input_needs_no_gradient_has_those_between_its_layers():
    def program(num_layers):
        nn.RNN(HIDDEN, HIDDEN, num_layers, device="cuda")(torch.ones(STEPS, BATCH, HIDDEN, device="cuda"))[
            0
        ].sum().backward()

    product = (1, STEPS * BATCH, HIDDEN, HIDDEN)
    for num_layers in (1, 2, 3):
        shapes = [each.shape for each in kernels(foresee(program, 1, (num_layers,), gpu="h100"))]
        assert shapes.count(product) == num_layers + (num_layers - 1)  # forward, and between layers


def test_products_are_those_of_its_precision():
    def program(precision):
        torch.backends.cudnn.rnn.fp32_precision = precision
        train("GRU", {})

    for precision, expected in (("tf32", "tf32"), ("ieee", "float32")):
        products = [each for each in kernels(foresee(program, 1, (precision,), gpu="a100")) if each.kind == "matmul"]
        assert {each.dtype for each in products} == {expected}


def test_autocast_reaches_it():
    def program():
        with torch.autocast("cuda", torch.bfloat16):
            train("LSTM", {}, found=found)

    found = []
    products = [each for each in kernels(foresee(program, 1, gpu="a100")) if each.kind == "matmul"]
    assert {each.dtype for each in products} == {"bfloat16"}
    assert found == train("LSTM", {}, "cpu")


def test_projections_are_an_assumption():
    seen = foresee(train, 1, ("LSTM", {"proj_size": 4}, "cuda"), gpu="h100")
    assert any("projections takes the kernels of a CPU" in each for each in seen.assumptions)
