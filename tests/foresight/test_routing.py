"""Programs whose shapes depend on values: routed experts, masks and counts."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from echelon import UnsupportedOp, foresee
from echelon.foresight.record import routing
from echelon.foresight.record.run import record
from echelon.foresight.trace import Collective, HostKernel, HostWait, Kernel
from tests.foresight import programs

TOKENS, WIDTH, EXPERTS, CHOSEN = 48, 16, 8, 2


def recorded(program, world_size=1):
    return record(program, world_size)[0]


def shapes(trace):
    """Shapes of the matrix products of the forward."""
    kernels = [each for each in trace.entries if isinstance(each, Kernel)]
    return [each.shape for each in kernels if each.kind == "matmul" and each.phase != "backward"]


def assumptions(trace):
    return {each.rpartition(" at ")[0] for each in trace.assumptions}


def chosen(device, experts=EXPERTS):
    """Indices of the experts of each token, and their weights, as a router gives them."""
    return torch.randn(TOKENS, experts, device=device).softmax(-1).topk(CHOSEN, -1)


def by_nonzero(tokens, indices, experts):
    for number, expert in enumerate(experts):
        places = (indices == number).any(-1).nonzero().squeeze(-1)
        expert(tokens[places])


def by_where(tokens, indices, experts):
    mask = nn.functional.one_hot(indices, len(experts)).permute(2, 1, 0)
    for number in mask.sum(dim=(-1, -2)).greater(0).nonzero():
        _, places = torch.where(mask[number[0]])
        experts[number[0]](tokens[places])


def by_mask(tokens, indices, experts):
    for number, expert in enumerate(experts):
        expert(tokens[indices.eq(number).any(-1)])


def by_sorting(tokens, indices, experts):
    order = indices.view(-1).argsort(stable=True)
    counts = torch.bincount(indices.view(-1), minlength=len(experts))
    for part, expert in zip(tokens[order // CHOSEN].split(counts.tolist()), experts, strict=True):
        expert(part)


@pytest.mark.parametrize("route", [by_nonzero, by_where, by_mask, by_sorting])
def test_experts_get_equally_many_tokens(route):
    def program():
        device = programs.begin()
        experts = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(EXPERTS)).to(device)
        route(torch.randn(TOKENS, WIDTH, device=device), chosen(device).indices, experts)

    trace = recorded(program)
    assert shapes(trace) == [(1, TOKENS * CHOSEN // EXPERTS, 4, WIDTH)] * EXPERTS
    assert assumptions(trace) == {"indices are chosen evenly"}
    assert any(isinstance(each, HostWait) for each in trace.entries)


def counts_of_all(counts):
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts)
    return received


def functional_counts_of_all(counts):
    """As torchtitan exchanges them."""
    size = dist.get_world_size()
    split = [len(counts) // size] * size
    received = torch.ops._c10d_functional.all_to_all_single(counts, split, split, dist.group.WORLD.group_name)
    return torch.ops._c10d_functional.wait_tensor(received)


@pytest.mark.parametrize("exchange", [counts_of_all, functional_counts_of_all])
def test_tokens_that_travel_to_their_experts_arrive(exchange):
    world_size = 4

    def program():
        device = programs.begin()
        per_rank = EXPERTS // world_size
        indices = chosen(device).indices.view(-1)
        counts = torch.histc(indices, bins=EXPERTS, min=0, max=EXPERTS - 1)
        received = exchange(counts)
        sizes = counts.view(world_size, per_rank).sum(1).tolist()
        new_sizes = received.view(world_size, per_rank).sum(1).tolist()
        tokens = torch.randn(TOKENS * CHOSEN, WIDTH, device=device)
        arrived = tokens.new_empty(sum(new_sizes), WIDTH)
        dist.all_to_all_single(arrived, tokens, new_sizes, sizes)
        owners = torch.repeat_interleave(torch.arange(per_rank, device=device).repeat(world_size), received)
        expert = nn.Linear(WIDTH, 4).to(device)
        expert(arrived[owners == 0])

    trace = recorded(program, world_size)
    _, tokens = [each for each in trace.entries if isinstance(each, Collective)]
    assert tokens.num_bytes == TOKENS * CHOSEN * WIDTH * 4
    assert shapes(trace) == [(1, TOKENS * CHOSEN // 2, 4, WIDTH)]


def test_values_that_follow_from_nothing_are_assumed():
    results = {}

    def program():
        device = programs.begin()
        numbers = torch.randn(6, 5, device=device)
        labels = (9 * torch.rand(30, device=device)).long()
        results["mask"] = numbers[numbers > 0].shape
        results["selected"] = torch.masked_select(numbers, numbers[0] > 0).shape
        results["unique"] = labels.unique().shape
        results["counts"] = torch.bincount(labels, minlength=9).shape
        numbers[numbers > 1] = 0.0
        # A value that the program has written is known, also after it was changed in place.
        flags = torch.zeros(4, dtype=torch.int64, device=device)
        flags[1:3] += 2
        results["known"] = flags.tolist()
        flags.add_(labels[:4])
        results["unknown"] = flags.tolist()
        results["repeated"] = labels.repeat_interleave(labels, output_size=64).shape

    trace = recorded(program)
    assert results == {
        "mask": (30,),
        "selected": (30,),
        "unique": (30,),
        "counts": (9,),
        "known": [0, 2, 2, 0],
        "unknown": [1, 1, 1, 1],
        "repeated": (64,),
    }
    assert {"all elements are chosen", "all elements differ", "all elements are 0"} < assumptions(trace)


@pytest.mark.parametrize("gpu", ["cpu", "h100"])
def test_a_number_written_by_a_mask_needs_no_positions(gpu):
    """As `x[mask] = 0`, for which torch has one kernel. Positions would take 16 bytes for each element."""

    def program():
        x = torch.randn(64, 16, device="cpu" if gpu == "cpu" else "cuda", requires_grad=True)
        hidden = x * 1
        hidden[hidden < 0] = 0
        hidden[:, (hidden > 1).any(0)] = 2.0
        hidden[(hidden > 1).any(1)] = torch.tensor(1.0)
        hidden.sum().backward()
        labels = torch.arange(64, device=x.device)
        labels[labels > 61] = -100
        assert labels.tolist() == [*range(62), -100, -100]

    seen = foresee(program, 1, gpu=gpu, network="shared-memory" if gpu == "cpu" else "infiniband-400g")
    assert not [each for each in seen.assumptions if "elements" in each]
    names = [entry.name for entry in seen.traces[0].entries if isinstance(entry, Kernel | HostKernel)]
    assert "nonzero" not in names
    assert names.count("masked_fill_") == 4
    assert names.count("masked_fill") == 3  # backward


@pytest.mark.parametrize("gpu", ["cpu", "h100"])
def test_layers_that_are_left_out_by_chance_stay(gpu):
    """As LayerDrop of Hugging Face's models does. All layers were left out."""

    def program():
        x = torch.ones(4, 4, device="cpu" if gpu == "cpu" else "cuda")
        for chance in (torch.rand([]), torch.rand(1)):
            if chance < 0.1:
                continue
            x = x @ x

    seen = foresee(program, 1, gpu=gpu)
    assert [entry.name for entry in seen.traces[0].entries if isinstance(entry, Kernel)].count("mm") == 2
    assert [each.rpartition(" at ")[0] for each in seen.assumptions if " at " in each] == ["a random number is 0.5"]


def test_layers_of_a_library_that_are_left_out_by_chance_stay():
    """The library makes the number where its models are, as far as a forecast knows."""

    def program():
        from transformers import M2M100Config, M2M100Model

        sizes = {
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
        }
        config = M2M100Config(vocab_size=16, d_model=16, encoder_layers=2, decoder_layers=2, **sizes)
        words = torch.ones(2, 4, dtype=torch.int64, device="cuda")
        M2M100Model(config).cuda()(input_ids=words, decoder_input_ids=words)

    seen = foresee(program, 1, gpu="h100")
    # Layers of the encoder have one, those of the decoder two.
    assert [entry.kind for entry in seen.traces[0].entries if isinstance(entry, Kernel)].count("attention") == 2 + 2 * 2
    found = [each.rpartition(" at ")[0] for each in seen.assumptions if " at " in each]
    # The second one is of the decoder's mask, ones of float32.
    assert found == ["a random number is 0.5", "a value of a tensor is true"]


@pytest.mark.parametrize(
    "rates",
    [
        lambda: [each.item() for each in torch.linspace(0, 0.5, 3)],
        lambda: [each.item() for each in torch.Tensor(np.linspace(0, 0.5, 3))],
        lambda: torch.tensor([0.0, 0.25, 0.5]).tolist(),
        lambda: [0.0, *(torch.logspace(-2, -1, 2, 2)).tolist()],
    ],
    ids=["linspace", "numpy", "tensor", "logspace"],
)
def test_rates_that_the_program_makes_are_known(rates):
    """Vision models leave out layers by rates of linspace. They were read as 1."""
    found = []
    seen = foresee(lambda: (found.extend(rates()), torch.ones(2, device="cuda") + 1), 1, gpu="h100")
    assert found == [0.0, 0.25, 0.5]
    assert not any("a value of a tensor" in each for each in seen.assumptions)


@pytest.mark.parametrize(
    "is_finite",
    [
        lambda x: not x.isnan().any(),
        lambda x: x.isnan().sum() == 0,
        lambda x: x.isinf().sum() < 1,
        lambda x: x.isnan().logical_not().all(),
        lambda x: torch.isfinite(x).all(),
    ],
)
def test_values_are_finite_however_a_program_asks(is_finite):
    found = []
    foresee(lambda: found.append(bool(is_finite(torch.ones(4, device="cuda") + 1))), 1, gpu="h100")
    assert found == [True]


def test_a_number_on_the_gpu_is_written_at_positions():
    def program():
        x = torch.randn(64, 16, device="cuda")
        x[x < 0] = torch.zeros((), device="cuda")

    assert any("all elements are chosen" in each for each in foresee(program, 1, gpu="h100").assumptions)


@pytest.mark.parametrize("index", [lambda x, mask: x[mask], lambda x, mask: x[:, mask[:5]].fill_(0)])
def test_a_mask_of_another_size_is_refused_as_by_torch(index):
    x, mask = torch.randn(6, 4), torch.ones(7, dtype=torch.bool)
    with pytest.raises(IndexError, match="The shape of the mask") as real:
        index(x, mask)

    def program():
        index(torch.randn(6, 4, device="cuda"), torch.ones(7, dtype=torch.bool, device="cuda"))

    with pytest.raises(IndexError) as foreseen:
        foresee(program, 1, gpu="h100")
    assert str(foreseen.value) == str(real.value)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_flags_are_written_at_positions(dtype):
    """Values of the type of masks are no masks."""

    def program():
        flags = torch.zeros(8, 50, dtype=dtype, device="cuda")
        positions = torch.arange(0, 50, 7, device="cuda")
        flags[:, positions] = 1
        flags[positions[:3]] = torch.ones(3, 50, dtype=dtype, device="cuda")
        assert flags.shape == (8, 50)

    names = [each.name for each in recorded(program).entries if isinstance(each, Kernel)]
    assert names.count("index_put_") == 2


def test_a_gradient_goes_back_through_a_mask():
    def program():
        device = programs.begin()
        tokens = torch.randn(TOKENS, WIDTH, device=device, requires_grad=True)
        tokens[chosen(device).indices.eq(3).any(-1)].sum().backward()
        assert tokens.grad.shape == tokens.shape

    recorded(program)


def test_a_received_tensor_has_unknown_values():
    results = []

    def program():
        device = programs.begin()
        numbers = torch.zeros(2, dtype=torch.int64, device=device)
        (dist.send if dist.get_rank() else dist.recv)(numbers, 1 - dist.get_rank())
        results.append(numbers.tolist())

    record(program, 2, (0, 1))
    assert sorted(results) == [[0, 0], [1, 1]]


def test_too_many_values_are_refused(monkeypatch):
    monkeypatch.setattr(routing, "_MOST", 10)

    def program():
        torch.randn(11, device=programs.begin()).gt(0).nonzero()

    with pytest.raises(UnsupportedOp, match="nonzero's result depends on the values of 11 fake elements"):
        recorded(program)


def llama(mask, **options):
    """Forward and backward of a small Llama, with a mask of ones or none."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64)).cuda().bfloat16()
    model.config.use_cache = options.get("cache", True)
    if options.get("recompute"):
        model.gradient_checkpointing_enable()
    ids = torch.randint(0, 64, (1, 32), device="cuda")
    model(input_ids=ids, attention_mask=torch.ones_like(ids) if mask else None, labels=ids).loss.backward()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("mask", "options"),
    [(False, {}), (True, {}), (False, {"cache": False}), (False, {"recompute": True}), (True, {"recompute": True})],
)
def test_a_mask_of_ones_is_left_out_as_in_a_run(mask, options):
    from transformers.utils import import_utils  # as late as in other tests: it takes a second

    before = import_utils.is_fake_tensor
    seen = foresee(lambda: llama(mask, **options), 1)
    attention = {each.name for each in seen.traces[0].entries if isinstance(each, Kernel) and each.kind == "attention"}
    assert attention == {"_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"}
    assert seen.assumptions == ("no optimizer has stepped: the whole program is one step",)
    assert import_utils.is_fake_tensor is before


def test_ones_of_the_shape_of_chosen_indices_follow_from_no_choice():
    def program():
        ids = torch.randint(0, 9, (4, 8), device="cuda")
        assert torch.ones_like(ids).all()
        assert (ids.new_zeros(3) + 1).sum().item() == 3

    assert not recorded(program).assumptions
