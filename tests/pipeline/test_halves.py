"""I and W together do what a whole backward does: the same products, once each, and the same bits."""

import re
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from echelon._torch_private.tensors import DispatchMode
from echelon.pipeline.stage.stage import Forward, Made, Stage

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu_backward")


class Products(DispatchMode):
    """Counts the costly operations, and whether they make gradients of the input, of the weights, or both."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name == "convolution_backward":
            self.counts["product"] += sum(args[-1][:2])  # the input's and the weight's, as asked for
        elif name in PRODUCTS:
            self.counts["product"] += 1
        return func(*args, **(kwargs or {}))


class NestedCall(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(6, 18), nn.Linear(6, 6)

    def forward(self, x):
        q, k, v = self.into(x).unflatten(-1, (3, 2, 3)).permute(2, 0, 3, 1, 4)
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


class Twice(nn.Module):
    """Uses a layer, and a bias, in several places."""

    def __init__(self, layer, act=torch.tanh):
        super().__init__()
        self.layer, self.act = layer, act

    def forward(self, x):
        return self.layer(self.act(self.layer(x)))


class Experts(nn.Module):
    """Slices of stacked weights, each for some of the rows, as mixtures of experts have them."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3, 6, 6)), nn.Parameter(torch.randn(3, 6))

    def forward(self, x):
        made = [nn.functional.linear(x, self.weight[i], self.bias[i]) for i, x in enumerate(x.tensor_split(3))]
        return torch.cat(made)


class Decoder(nn.Module):
    """Slices of one weight project the queries, and what they attend to."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, bias=False, batch_first=True)

    def forward(self, x):
        return self.attention(x, memory := torch.tanh(x), memory)[0]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        return torch.tanh(x @ self.weight) @ self.weight.T + self.weight.sum()


class Double(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return 2 * x

    @staticmethod
    def backward(_, gradient):
        return 2 * gradient


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.flatten(0, -2).T @ gradient.flatten(0, -2)


class Custom(nn.Module):
    def __init__(self, *, at_weight):
        super().__init__()
        self.layer, self.at_weight = nn.Linear(6, 6), at_weight

    def forward(self, x):
        return Product.apply(x, self.layer.weight) if self.at_weight else Double.apply(self.layer(Double.apply(x)))


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant):
        super().__init__()
        self.inside, self.reentrant = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), reentrant

    def forward(self, x):
        return checkpoint(self.inside, x, use_reentrant=self.reentrant)


class First(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, x):
        return self.inside(x)[0]


def floats(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


SPLITTABLE = {
    "linear": lambda: (nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6, bias=False)), floats(4, 6)),
    "linear of 3 dims": lambda: (nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)), floats(4, 5, 6)),
    "conv1d": lambda: (nn.Sequential(nn.Conv1d(2, 3, 3), nn.ReLU(), nn.Conv1d(3, 2, 3)), floats(4, 2, 9)),
    "conv2d": lambda: (nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 3)), floats(4, 2, 9, 9)),
    "conv3d": lambda: (nn.Sequential(nn.Conv3d(2, 3, 2), nn.ReLU(), nn.Conv3d(3, 2, 2)), floats(2, 2, 4, 4, 4)),
    "batch norm": lambda: (nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)), floats(4, 2, 5, 5)),
    "embedding": lambda: (nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 6)), torch.arange(8).reshape(2, 4)),
    "layer norm": lambda: (nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.LayerNorm(6)), floats(4, 6)),
    "attention": lambda: (nn.Sequential(nn.LayerNorm(6), NestedCall()), floats(2, 5, 6)),
    "transformer": lambda: (nn.TransformerEncoderLayer(6, 2, 12, 0.0, batch_first=True), floats(2, 5, 6)),
    "a product twice": lambda: (Twice(nn.Linear(6, 6, bias=False)), floats(4, 6)),
    "experts": lambda: (Experts(), floats(9, 6)),
    "decoder": lambda: (Decoder(), floats(2, 5, 6)),
    "weight norm": lambda: (nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), floats(4, 6)),
    "weight norm twice": lambda: (Twice(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6, False))), floats(4, 6)),
    "prelu": lambda: (nn.Sequential(nn.Linear(6, 6), nn.PReLU()), floats(4, 6)),
    "a formula without weights": lambda: (Custom(at_weight=False), floats(4, 6)),
    "frozen": lambda: (nn.Sequential(nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 6)), floats(4, 6)),
}

REFUSED = {
    "a layer twice": (lambda: (Twice(nn.Linear(6, 6)), floats(4, 6)), r"^layer \(Linear\) is used in several places"),
    "a norm twice": (
        lambda: (Twice(nn.LayerNorm(6), nn.Linear(6, 6)), floats(4, 6)),
        r"layer \(LayerNorm\) is used in several places",
    ),
    "a convolution twice": (
        lambda: (Twice(nn.Conv1d(2, 2, 3, padding=1)), floats(4, 2, 9)),
        r"layer \(Conv1d\) is used in several places",
    ),
    "a weight and its transpose": (lambda: (Tied(), floats(4, 6)), r"^\(Tied\) is used in several places"),
    "LSTM": (lambda: (First(nn.LSTM(6, 6)), floats(3, 2, 6)), r"inside \(LSTM\) computes all of its gradients at once"),
    "GRU": (lambda: (First(nn.GRU(6, 6)), floats(3, 2, 6)), r"inside \(GRU\)"),
    "checkpoint": (lambda: (Checkpointed(reentrant=False), floats(4, 6)), "Checkpointed runs its forward again"),
    "reentrant checkpoint": (lambda: (Checkpointed(reentrant=True), floats(4, 6)), "Checkpointed refuses it"),
    "a formula with weights": (
        lambda: (Custom(at_weight=True), floats(4, 6)),
        r"layer \(Linear\) computes all of its gradients at once \(ProductBackward\)",
    ),
}


def prepared(make):
    torch.manual_seed(0)
    module, x = make()
    stage = Stage(1, module)
    leaf = x.clone().requires_grad_(x.is_floating_point())
    return stage, leaf, Forward(leaf, {}, None, lambda value, *_: made_of(stage, value))


def made_of(stage, value):
    output = stage.call(value, {})
    return Made(output, [output])


def whole(make):
    stage, _, forward = prepared(make)
    made = stage.forward(0, forward, splits=False)
    with Products() as products:
        (found,) = stage.backward(0, [torch.cos(made.output.detach())]) or [None]
    return found, [p.grad for p in stage.module.parameters()], products.counts


@pytest.mark.parametrize("case", SPLITTABLE)
def test_two_halves_are_a_whole(case):
    make = SPLITTABLE[case]
    stage, _, forward = prepared(make)
    assert not stage.probe(forward).refusal
    made = stage.forward(0, forward, splits=True)
    with Products() as for_input:
        (found,) = stage.backward_input(0, [torch.cos(made.output.detach())]) or [None]
    assert all(parameter.grad is None for parameter in stage.module.parameters())
    with Products() as for_weights:
        stage.backward_weight(0)
    gradient, gradients, products = whole(make)
    assert (found is None) == (gradient is None)
    assert found is None or torch.equal(found, gradient)
    for parameter, expected in zip(stage.module.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, expected) if expected is not None else parameter.grad is None
    assert for_input.counts + for_weights.counts == products, "each product once"
    assert stage.num_held == 0


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_halves_is_named(case):
    make, words = REFUSED[case]
    stage, _, forward = prepared(make)
    refusal = stage.probe(forward).refusal
    assert re.search(words, refusal), refusal


def test_products_that_a_whole_backward_shares_are_not_done_twice():
    """What the test above counts: an input gradient and a weight gradient for each layer."""
    _, _, products = whole(SPLITTABLE["linear"])
    assert products == {"product": 4}
    _, _, products = whole(SPLITTABLE["conv2d"])
    assert products == {"product": 4}


def test_probing_leaves_no_trace():
    torch.manual_seed(0)
    stage = Stage(1, nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)))
    for parameter in stage.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: value.clone() for name, value in stage.module.state_dict().items()}
    state = torch.get_rng_state()
    leaf = floats(4, 6).requires_grad_()
    assert not stage.probe(Forward(leaf, {}, None, lambda value, *_: made_of(stage, value))).refusal
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in stage.module.state_dict().items())
    assert all(torch.equal(parameter.grad, torch.ones_like(parameter)) for parameter in stage.module.parameters())
    assert leaf.grad is None
    assert stage.num_held == 0


def test_a_hook_on_a_tensor_counts_once():
    """W runs the backward of some nodes again; a hook there has changed the gradient already."""

    class Hooked(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            out.register_hook(lambda gradient: 3 * gradient)
            return out.relu()

    def make():
        return Hooked(6, 6), floats(4, 6)

    stage, _, forward = prepared(make)
    made = stage.forward(0, forward, splits=True)
    stage.backward_input(0, [torch.cos(made.output.detach())])
    stage.backward_weight(0)
    for parameter, expected in zip(stage.module.parameters(), whole(make)[1], strict=True):
        assert torch.equal(parameter.grad, expected)


def test_what_only_the_input_needed_is_let_go_of():
    """An attention's queries, keys and values are needed by I alone; the inputs of its layers by W, too."""
    stage, leaf, forward = prepared(SPLITTABLE["attention"])
    stage.is_metered = True
    but = {parameter.untyped_storage().data_ptr() for parameter in stage.module.parameters()}
    made = stage.forward(0, forward, splits=True)
    after_forward = stage.num_bytes(0, but)
    stage.backward_input(0, [torch.cos(made.output.detach())])
    size = leaf.nbytes
    # x, normalized, mean and 1 / deviation, q k v, sums of exponentials, attended, and as many gradients as kept inputs
    saved = after_forward / size
    assert 6 <= saved < 7
    # x, normalized, attended, their two gradients (3 + 1), and the gradient of the normalized
    assert stage.num_bytes(0, but) / size < 3 + 3 + 1 + 1 + 1
    stage.backward_weight(0)
    assert stage.num_bytes(0, but) == 0


def test_a_saved_tensor_changed_in_place_is_noticed():
    """torch notices; through hooks for saved tensors it would not."""
    weight = nn.Parameter(torch.ones(4, 6))
    stage = Stage(1, nn.Identity())
    stage.is_metered = True
    leaf = floats(4, 6).requires_grad_()

    def make(value, *_):
        middle = value * 2
        output = middle * weight
        middle.add_(1)
        return Made(output, [output])

    stage.forward(0, Forward(leaf, {}, None, make), splits=True)
    with pytest.raises(RuntimeError, match="changed in place after the forward saved it"):
        stage.backward_input(0, [torch.ones(4, 6)])


def test_a_graph_unlike_the_one_that_was_probed_is_done_as_a_whole():
    make = REFUSED["a layer twice"][0]
    stage, _, forward = prepared(make)
    made = stage.forward(0, forward, splits=True)
    with pytest.warns(
        UserWarning, match=r"stage 1 does the whole backward of microbatch 0 in its I.*in several places"
    ):
        found = stage.backward_input(0, [torch.cos(made.output.detach())])
    stage.backward_weight(0)
    of_input, of_weights, _ = whole(make)
    assert torch.equal(found[0], of_input)
    assert all(torch.equal(one.grad, two) for one, two in zip(stage.module.parameters(), of_weights, strict=True))
    assert stage.num_held == 0


class Replacing(nn.Linear):
    """Replaces its buffer by another one, and changes another in place."""

    def __init__(self):
        super().__init__(6, 6)
        self.register_buffer("replaced", torch.ones(6))
        self.register_buffer("changed", torch.ones(6))

    def forward(self, x):
        self.replaced = 0.5 * self.replaced
        self.changed.data.mul_(0.5)
        return super().forward(x) + self.replaced + self.changed


def test_probing_leaves_buffers_that_a_forward_replaces():
    stage, _, forward = prepared(lambda: (Replacing(), floats(4, 6)))
    before = dict(stage.module.named_buffers())
    assert not stage.probe(forward).refusal
    for name, buffer in stage.module.named_buffers():
        assert buffer is before[name]
        assert torch.equal(buffer, torch.ones(6)), name
