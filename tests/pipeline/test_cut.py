"""Any module becomes stages that compute what it computes, bit for bit, with batches of any size."""

import functools
import logging
import re
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.func import functional_call

import echelon
from echelon.pipeline import Pipeline, split
from echelon.pipeline.cut import cut as cutting


class Block(nn.Module):
    """Adds to what comes in, so that two values cross a cut inside."""

    def __init__(self, width, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden, mask):
        mixed = mask.to(hidden.dtype) @ self.norm(hidden)
        return hidden + self.dropout(self.narrow(torch.tanh(self.wide(mixed))))


class Language(nn.Module):
    """Looks like a language model: a mask made from sizes, positions, tied weights, and a dict that comes out."""

    def __init__(self, num_blocks=2, width=8, dropout=0.0, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.register_buffer("positions", torch.linspace(0, 1, 64), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(num_blocks))
        self.head = nn.Linear(width, 11, bias=False)
        self.unused = nn.Linear(2, 2)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids, scale=1.0):
        length = ids.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        hidden = self.embedding(ids) + self.positions[:length, None] * scale
        for block in self.blocks:
            hidden = block(hidden, mask)
        return {"scores": self.head(hidden), "length": length, "name": "scores"}


def language(**kwargs):
    torch.manual_seed(0)
    return Language(**kwargs).double()


def ids_of(num_samples, length):
    return torch.randint(11, (num_samples, length), generator=torch.Generator().manual_seed(1))


def run_parts(parts, *inputs, **kwargs):
    value = inputs
    for part in parts.modules:
        value = part(*value, **kwargs) if isinstance(value, tuple) else part(value, **kwargs)
    return value


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


@pytest.fixture
def one_thread():
    """Computes as simulated ranks do: the gradient of a LayerNorm is added up by threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("mode", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_parts_compute_what_the_model_does(mode):
    model = language(num_blocks=3, dropout=0.2).train(mode)
    parts = split(model, at=["blocks.1", "blocks.2"], example=(ids_of(2, 5),))
    for module in parts.modules:
        module.train(mode)
    for shape in ((2, 5), (1, 5), (1, 1), (7, 9)):
        ids = ids_of(*shape)
        torch.manual_seed(3)
        expected = model(ids)
        wanted = gradients(model, expected["scores"].square().sum())
        torch.manual_seed(3)
        got = run_parts(parts, ids)
        assert got.keys() == expected.keys()
        assert torch.equal(got["scores"], expected["scores"])
        assert (got["length"], got["name"]) == (shape[1], "scores")
        for name, gradient in gradients(model, got["scores"].square().sum()).items():
            assert (gradient is None) == (wanted[name] is None)
            assert gradient is None or torch.equal(gradient, wanted[name]), name


@functools.cache
def language_in_two():
    """Model and its parts, for tests that change neither: a trace takes a second."""
    model = language()
    return model, split(model, at=["blocks.1"], example=(ids_of(2, 5),))


def test_parts_hold_the_parameters_of_the_model_under_their_names():
    model, parts = language_in_two()
    found = {}
    for part in parts.modules:
        found |= dict(part.named_parameters())
    assert {name: id(p) for name, p in found.items()} == {name: id(p) for name, p in model.named_parameters()}
    saved = [set(part.state_dict()) for part in parts.modules]
    assert saved[0] | saved[1] == set(model.state_dict())
    assert not saved[0] & saved[1]
    assert "blocks.0.wide.weight" in saved[0]
    assert {"blocks.1.wide.weight", "head.weight"} <= saved[1]


def test_a_tied_weight_has_in_each_part_the_name_of_the_layer_that_runs_there():
    parts = split(language(tied=True), at=["blocks.1"], example=(ids_of(2, 5),))
    first, last = (dict(part.named_parameters()) for part in parts.modules)
    assert first["embedding.weight"] is last["head.weight"]
    assert "head.weight" not in first
    assert "embedding.weight" not in last


def test_what_is_made_from_sizes_does_not_travel():
    _, parts = language_in_two()
    crossing = parts.modules[0](ids_of(3, 4))
    tensors = [value for value in crossing if isinstance(value, torch.Tensor)]
    assert [tuple(tensor.shape) for tensor in tensors] == [(3, 4, 8)]


def test_a_cut_inside_of_a_block_carries_what_it_adds_to():
    model = language(num_blocks=3)
    parts = split(model, at=["blocks.1.narrow", "blocks.2.wide"], example=(ids_of(2, 5),))
    assert torch.equal(run_parts(parts, ids_of(3, 4))["scores"], model(ids_of(3, 4))["scores"])


class Normalised(nn.Module):
    """Keeps count while it trains."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True))
        self.second = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))

    def forward(self, x):
        return self.second(self.first(x)) + x


def test_buffers_change_in_training_and_not_in_evaluation():
    torch.manual_seed(0)
    model, other = Normalised().double(), Normalised().double()
    other.load_state_dict(model.state_dict())
    x = torch.randn(6, 4, dtype=torch.float64)
    parts = split(other, at=["second"], example=(x,))
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    assert torch.equal(run_parts(parts, x), expected)
    for name, buffer in model.named_buffers():
        assert torch.equal(dict(other.named_buffers())[name], buffer), name
    for part in parts.modules:
        part.eval()
    before = {name: buffer.clone() for name, buffer in other.named_buffers()}
    assert torch.equal(run_parts(parts, x), model.eval()(x))
    for name, buffer in other.named_buffers():
        assert torch.equal(buffer, before[name])


class Masked(nn.Module):
    """Takes several inputs, some by keyword, nested."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, pair, *, options, factor=2):
        x, y = pair["x"], pair["y"]
        hidden = self.first(x) * options[0][..., None]
        return self.second(hidden + y) * factor, options[1]


def masked_inputs(num_samples):
    draw = torch.Generator().manual_seed(num_samples)
    x, y = (torch.randn(num_samples, 4, generator=draw, dtype=torch.float64) for _ in range(2))
    return {"x": x, "y": y}, [torch.rand(num_samples, generator=draw, dtype=torch.float64), "text"]


def test_inputs_may_be_nested_and_given_by_keyword():
    torch.manual_seed(0)
    model = Masked().double()
    pair, options = masked_inputs(3)
    parts = split(model, at=["second"], example=(pair,), example_kwargs={"options": options, "factor": 3})
    pair, options = masked_inputs(5)
    got, text = run_parts(parts, pair, options=options, factor=3)
    assert torch.equal(got, model(pair, options=options, factor=3)[0])
    assert text == "text"
    with pytest.raises(echelon.SizeMismatch, match="factor=: expected \\[3\\], got \\[4\\]"):
        run_parts(parts, pair, options=options, factor=4)
    with pytest.raises(echelon.SizeMismatch, match="stage 0: expected the keyword argument options, got none"):
        run_parts(parts, pair)
    with pytest.raises(echelon.SizeMismatch, match="got other, too: give the Pipeline example_kwargs= with other"):
        run_parts(parts, pair, options=options, other=1)


def test_an_example_of_one_sample_leaves_the_number_open():
    model = language()
    parts = split(model, at=["blocks.1"], example=(ids_of(1, 5),))
    assert torch.equal(run_parts(parts, ids_of(4, 6))["scores"], model(ids_of(4, 6))["scores"])


class Long(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, x):
        x = self.first(x[..., None])
        return self.second(x * 2 if x.shape[1] > 8 else x)


def test_sizes_that_take_another_path_are_refused():
    """The trace knows the one path only; to run it all the same would give a wrong result."""
    parts = split(Long(), at=["second"], example=(torch.ones(2, 4),))
    assert torch.equal(run_parts(parts, torch.ones(3, 8)), run_parts(parts, torch.ones(3, 8)))
    with pytest.raises(echelon.SizeMismatch, match="takes another path"):
        run_parts(parts, torch.ones(3, 9))


class Four(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.second(self.first(x).view(4, 3))


class OnValues(Four):
    def forward(self, x):
        return self.second(x if x.sum() > 0 else -x)


@pytest.mark.parametrize(("model", "words"), [(Four(), "works for 4 samples only"), (OnValues(), "cannot be traced")])
def test_models_that_cannot_be_traced_are_told_why(model, words):
    with pytest.raises(echelon.PartitionError, match=words) as caught:
        split(model, at=["second"], example=(torch.ones(4, 3),))
    assert "\n" not in str(caught.value)


class Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


@pytest.mark.parametrize(("model", "width"), [(OnValues(), 3), (Four(), 5)])
def test_torch_prints_nothing_of_a_model_that_cannot_be_traced(model, width, capsys):
    records, torch_log = Records(), logging.getLogger("torch")
    torch_log.addHandler(records)
    try:
        with pytest.raises(echelon.PartitionError) as caught:
            split(model, at=["second"], example=(torch.ones(4, width),))
    finally:
        torch_log.removeHandler(records)
    assert re.search(rf" at {re.escape(__file__)}:\d+: ", str(caught.value)), "the line of the model"
    assert capsys.readouterr() == ("", "")
    assert records.messages == []


def test_a_model_on_the_meta_device_is_cut_without_memory():
    with torch.device("meta"):
        model = Language(width=8)
    parts = split(model, 2, example=(ids_of(2, 5),))
    assert all(p.is_meta for part in parts.modules for p in part.parameters())
    for part in parts.modules:
        part.to_empty(device="cpu")
        part.load_state_dict({name: language().float().state_dict()[name] for name in part.state_dict()})
    # A buffer that is not saved has to be made anew, as for any model that was on the meta device.
    for part in parts.modules:
        part.positions = torch.linspace(0, 1, 64)
    torch.testing.assert_close(run_parts(parts, ids_of(3, 4))["scores"], language().float()(ids_of(3, 4))["scores"])


@pytest.mark.parametrize(("num_blocks", "num_stages"), [(4, 2), pytest.param(6, 3, marks=pytest.mark.slow)])
def test_a_measured_cut_divides_the_blocks_evenly(num_blocks, num_stages, monkeypatch):
    """With a clock that advances by the number of weights of what is run, whatever the machine does meanwhile."""
    model = language(num_blocks=num_blocks, width=64)
    before = {name: buffer.clone() for name, buffer in model.state_dict().items()}
    now = [0.0]

    def run(piece, copies, leaves, kwargs):
        now[0] += 1.0 + sum(parameter.numel() for parameter in piece.parameters())
        return functional_call(piece, copies, leaves, kwargs)

    monkeypatch.setattr(cutting, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(cutting, "functional_call", run)
    parts = split(model, num_stages, example=(ids_of(2, 5),))
    blocks = [{name.split(".")[1] for name in part.state_dict() if "blocks" in name} for part in parts.modules]
    assert [len(held) for held in blocks] == [2] * num_stages
    assert len(parts.costs) == num_stages
    for stage, at in enumerate(parts.at, 1):
        assert f"stage {stage}: from {at} on" in str(parts)
    assert len(parts.at) == num_stages - 1
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in model.parameters())


def chain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 2)).double()


def test_a_chain_is_measured_layer_by_layer():
    parts = split(chain(), 2, example=(torch.randn(256, 4, dtype=torch.float64),))
    assert len(parts.costs) == 2
    assert sum(len(part) for part in parts.modules) == 4


def test_a_chain_can_be_cut_inside_of_a_layer():
    model = nn.Sequential(chain(), chain()[1:])
    model[1][0] = nn.Linear(2, 64).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    parts = split(model, at=["0.1"], example=(x,))
    assert torch.equal(run_parts(parts, x), model(x))


class Named(nn.Module):
    """Has names as Language, and is traced in a tenth of the time."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.blocks = nn.ModuleList(nn.Sequential(OrderedDict(wide=nn.Linear(4, 4))) for _ in range(3))

    def forward(self, ids):
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


@pytest.mark.parametrize(
    ("model", "kwargs", "words"),
    [
        (3, {}, "model is 3 \\(int\\): pass an nn.Module"),
        ([1, 2], {}, "entry 0 of the list of stages is 1"),
        (nn.Sequential(), {"num_stages": 2}, "cannot cut 0 layers into 2 stages"),
        (nn.Linear(2, 2), {"num_stages": 2}, "pass example="),
        (language(), {"at": ["blocks.2"]}, "must be run once to be cut: pass example="),
        (nn.Linear(2, 2), {}, "the number of parts is missing"),
        (nn.Linear(2, 2), {"at": "h.1"}, "give a list of names"),
        (nn.Linear(2, 2), {"num_stages": 2, "example": torch.ones(2, 2)}, "example=\\(inputs,\\)"),
        (nn.Linear(2, 2), {"num_stages": 2, "example": (torch.ones(2, 2),)}, "use at most 1"),
        (Four(), {"num_stages": 2, "example": (torch.ones(4, 5),)}, "cannot be traced"),
        (chain(), {"at": ["2", "1"]}, "in their order"),
        (chain(), {"at": ["nine"]}, "the layers are 0, 1, 2, 3"),
        (chain(), {"at": ["1"], "num_stages": 3}, "makes 2 stages, but the schedule has 3"),
        (chain(), {"num_stages": 2, "example": (torch.ones(2, 9),)}, "cannot be run with this example"),
        (Named(), {"at": ["blocks.7"], "example": (ids_of(2, 5),)}, r"did you mean blocks.2\? There are blocks.0"),
        (Named(), {"at": ["nothing"], "example": (ids_of(2, 5),)}, "use names such as blocks.0"),
        (Named(), {"at": ["wide"], "example": (ids_of(2, 5),)}, "all end so: write the whole name"),
        (Named(), {"at": ["blocks.2", "blocks.1"], "example": (ids_of(2, 5),)}, "in the order in which they run"),
        (Normalised(), {"at": ["first"], "example": (torch.ones(2, 4),)}, "not the first"),
        ([nn.Linear(2, 2)] * 2, {"at": ["0"], "num_stages": 2}, "cut already"),
    ],
)
def test_what_cannot_be_cut_gets_one_line(model, kwargs, words):
    with pytest.raises(echelon.PartitionError, match=words) as caught:
        split(model, **kwargs)
    assert "\n" not in str(caught.value)


# In a pipeline


def mean_of_squares(output, target):
    return nn.functional.mse_loss(output["scores"], target)


def train(group, at, sizes):
    pipe = Pipeline(
        language(),
        group,
        "1f1b",
        2,
        mean_of_squares,
        at=at,
        example=(ids_of(2, 5),),
    )
    losses = []
    for num_samples, length in sizes:
        target = torch.full((num_samples, length, 11), 0.25, dtype=torch.float64)
        losses.append(pipe.step(ids_of(num_samples, length), target=target).loss)
    return losses, {name: p.grad for name, p in pipe.named_parameters()}, pipe.at, set(pipe.state_dict()), repr(pipe)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("at", [["blocks.1"], None])
def test_a_pipeline_trains_a_module_that_knows_nothing_of_it(at, caplog):
    sizes = [(2, 5), (5, 3), (4, 7)]
    with caplog.at_level(logging.INFO, logger="echelon"):
        results = echelon.simulate(train, 2, (at, sizes), timeout=20.0).results
    model, losses = language(), []
    for num_samples, length in sizes:
        total = 0
        for ids in ids_of(num_samples, length).tensor_split(2):
            target = torch.full((len(ids), length, 11), 0.25, dtype=torch.float64)
            loss = mean_of_squares(model(ids), target) * (len(ids) / num_samples)
            loss.backward()
            total += loss.detach()
        losses.append(total)
    gradients = results[0][1] | results[1][1]
    for name, parameter in model.named_parameters():
        assert (gradients[name] is None) == (parameter.grad is None)
        assert parameter.grad is None or torch.equal(gradients[name], parameter.grad), name
    for got, _, chosen, _, text in results:
        assert got == losses
        assert chosen == results[0][2]
        assert f"cut before {chosen[0]}" in text
        assert at is None or chosen == ("blocks.1",)
    assert results[0][3] | results[1][3] == set(model.state_dict())
    told = [record.getMessage() for record in caplog.records if "measured" in record.getMessage()]
    assert len(told) == (at is None)
    assert all("stage 0: from the first layer on" in text for text in told)


class Cache:
    """An output that is no tensor, such as a cache of keys and values."""


class WithCache(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, inputs):
        return self.layers(inputs), Cache()


def makes_pipeline(group):
    mesh = echelon.Mesh(group, dp=2, pp=2)
    torch.manual_seed(0)
    example = (torch.ones(2, 4),)
    Pipeline(WithCache(), mesh["pp"], "1f1b", 2, at=["layers.2"], example=example, data_parallel=mesh["dp"])


def test_an_output_that_is_left_out_is_told_once(caplog):
    """Each rank traces the model several times, and told it each time."""
    echelon.simulate(makes_pipeline, 4)
    told = [record.getMessage() for record in caplog.records if record.name == "echelon"]
    assert told == [
        "the outputs of the model hold a Cache, which a pipeline leaves out (None): give a model of transformers "
        "use_cache=False in its config"
    ]


def chooses_badly(group):
    try:
        Pipeline(Four(), group, "1f1b", 2, mean_of_squares, example=(torch.ones(4, 3),))
    except echelon.PartitionError as error:
        return str(error)
    return "no error"


def test_what_one_rank_finds_out_is_told_to_all():
    for message in echelon.simulate(chooses_badly, 2, timeout=20.0).results:
        assert "works for 4 samples only" in message


def one_rank_cannot_trace(group):
    mesh = echelon.Mesh(group, dp=2, pp=2)
    model, width = (Four(), 3) if group.rank == 2 else (WithCache(), 4)
    example = (torch.ones(4, width),)
    try:
        Pipeline(model, mesh["pp"], "1f1b", 2, mean_of_squares, example=example, data_parallel=mesh["dp"])
    except echelon.PartitionError as error:
        return str(error)
    return "no error"


def test_an_error_of_any_rank_is_told_to_all():
    for message in echelon.simulate(one_rank_cannot_trace, 4, timeout=20.0).results:
        assert "works for 4 samples only" in message


def test_all_ranks_trace_before_one_measures(monkeypatch):
    """A model takes seconds to trace: rank 1 neither waits for the measurement nor disturbs it."""
    steps = []

    def noted(name):
        function = getattr(cutting, name)
        monkeypatch.setattr(cutting, name, lambda *args, **kwargs: steps.append(name) or function(*args, **kwargs))

    noted("trace")
    noted("_measure")
    echelon.simulate(train, 2, (None, [(2, 5)]), timeout=20.0)
    assert steps == ["trace", "trace", "_measure"]


def test_names_of_layers_are_a_list():
    def make(group):
        with pytest.raises(echelon.PartitionError, match=r"at='1': give a list of names of layers, as at=\['1'\]"):
            Pipeline(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), group, "1f1b", 2, nn.MSELoss(), at="1")

    echelon.simulate(make, 2)
