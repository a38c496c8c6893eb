"""Operations that read values of tensors by themselves: foreseen, or refused by one line."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from echelon import UnsupportedOp, foresee

X, SIGNAL = (10, 4), (2, 4000)
DEVICE = "cuda"


def on_gpu(*shape):
    return torch.randn(*shape, device=DEVICE)


def splits_by_unknown_places():
    torch.tensor_split(on_gpu(*X), torch.randn(2).long())


def applies_a_function():
    torch.randn(3).apply_(lambda each: each + 1)


def maps_two():
    torch.randn(3).map_(torch.randn(3), lambda one, other: one + other)


def reads_a_storage():
    return torch.randn(3).storage().tolist()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("gpu", ["h100", "cpu"])
@pytest.mark.parametrize(
    ("name", "program"), [("apply_", applies_a_function), ("map_", maps_two), ("tolist", reads_a_storage)]
)
def test_reads_of_values_are_refused_at_their_line(name, program, gpu):
    with pytest.raises(UnsupportedOp, match=rf"^{name} at .*test_refusals\.py:\d+: torch cannot tell its result"):
        foresee(program, 1, gpu=gpu)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_an_error_of_code_that_reads_fake_tensors_is_the_cause():
    with pytest.raises(UnsupportedOp) as caught:
        foresee(reads_a_storage, 1)
    assert isinstance(caught.value.__cause__, NotImplementedError)
    assert not hasattr(caught.value, "__notes__")
    assert any(each.name == "reads_a_storage" for each in caught.traceback)  # the frames of the program are kept


class Named(torch.Tensor):
    """Class of tensors that a program makes of ordinary ones."""


def names_a_tensor():
    on_gpu(3).as_subclass(Named)


def test_tensors_of_a_class_of_the_program_are_refused_at_their_line():
    with pytest.raises(UnsupportedOp, match=r"^an operation at .*test_refusals\.py:\d+: torch cannot tell its result"):
        foresee(names_a_tensor, 1)


def calls_an_operator():
    doubled = torch.library.custom_op(
        "echelon_test::doubled", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    doubled(on_gpu(3))


def test_an_operator_without_a_fake_implementation_is_refused_at_its_line():
    with pytest.raises(UnsupportedOp, match=r"^an operator at .*test_refusals\.py:\d+ has no fake implementation"):
        foresee(calls_an_operator, 1)


def multiplies_wrongly():
    on_gpu(2, 3) @ on_gpu(2, 3)


def fails():
    raise AttributeError("of the program")


@pytest.mark.parametrize(("error", "program"), [(RuntimeError, multiplies_wrongly), (AttributeError, fails)])
def test_errors_of_the_program_are_its_own(error, program):
    with pytest.raises(error) as caught:
        foresee(program, 1)
    assert not isinstance(caught.value, UnsupportedOp)


def splits():
    for places in (torch.tensor([2, 5]), [2, 5], (2, 5)):
        assert [len(each) for each in torch.tensor_split(on_gpu(*X), places)] == [2, 3, 5]
    assert [len(each) for each in on_gpu(*X).tensor_split(3, dim=0)] == [4, 3, 3]
    parts = on_gpu(*X).tensor_split(tensor_indices_or_sections=torch.tensor(2), dim=1)
    assert [each.shape for each in parts] == [(10, 2), (10, 2)]


@pytest.mark.parametrize("gpu", ["h100", "cpu"])
def test_a_tensor_is_split_at_known_indices(gpu, monkeypatch):
    if gpu == "cpu":
        monkeypatch.setitem(globals(), "DEVICE", "cpu")
    assert foresee(splits, 1, gpu=gpu).step_seconds > 0


def splits_by_places_of_the_gpu():
    torch.tensor_split(on_gpu(*X), torch.tensor([2, 5], device="cuda"))


def test_a_tensor_is_split_at_indices_of_the_host_alone():
    with pytest.raises(UnsupportedOp, match=r"^tensor_split at .*test_refusals\.py:\d+: torch cannot tell"):
        foresee(splits_by_unknown_places, 1)
    with pytest.raises(RuntimeError, match="tensor_split expected tensor_indices_or_sections to be on cpu"):
        foresee(splits_by_places_of_the_gpu, 1)


def transforms_back():
    x = on_gpu(*SIGNAL).requires_grad_()
    for length, options in (
        (4000, {}),
        (4000, {"length": 4000}),
        (4300, {"length": 4300}),
        (3900, {"center": False, "length": 3900}),
        (4000, {"window": torch.hann_window(300, device="cuda"), "win_length": 300, "normalized": True}),
        (4000, {"onesided": False, "hop_length": 50, "window": torch.ones(400, device="cuda")}),
    ):
        given = {key: value for key, value in options.items() if key != "length"}
        spectrum = torch.stft(x, 400, return_complex=True, **given)
        assert torch.istft(spectrum, 400, **options).shape == (2, length)
        assert torch.istft(spectrum[0], 400, **options).shape == (length,)
    spectrum = torch.stft(x * 1j, 400, return_complex=True, onesided=False)
    back = torch.istft(spectrum, 400, return_complex=True, onesided=False)
    assert back.shape == (2, 4000)
    assert back.is_complex()
    back.abs().sum().backward()
    assert x.grad.shape == SIGNAL


@pytest.mark.filterwarnings("ignore:A window was not provided")
def test_spectra_are_transformed_back():
    seen = foresee(transforms_back, 1)
    assert {each.name for each in seen.traces[0].entries if type(each).__name__ == "Kernel"} >= {"_fft_c2r", "_fft_c2c"}
    assert not any("value of a tensor" in each for each in seen.assumptions)


def numbers():
    loss = on_gpu(3).mean()
    assert torch.tensor([loss, 2.0], device=DEVICE).shape == (2,)
    assert torch.as_tensor([[loss, loss], [loss, 1]]).dtype == torch.float32
    assert loss.new_tensor([loss, 2.0]).shape == (2,)
    assert torch.tensor([[torch.tensor(3), 4], [1, 2]]).tolist() == [[3, 4], [1, 2]]


@pytest.mark.parametrize("gpu", ["h100", "cpu"])
def test_a_tensor_is_made_of_numbers_that_are_tensors(gpu, monkeypatch):
    if gpu == "cpu":
        monkeypatch.setitem(globals(), "DEVICE", "cpu")
    seen = foresee(numbers, 1, gpu=gpu)
    assert any(each.startswith("a value of a tensor is 1 at ") for each in seen.assumptions)


def shares():
    layer = nn.Linear(3, 3).share_memory()
    layer(torch.ones(2, 3)).sum().backward()


def test_shared_memory_of_a_tensor_is_no_matter():
    assert foresee(shares, 1).step_seconds > 0


def sends_a_tensor():
    dist.init_process_group("nccl")
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, {"loss": on_gpu(3)})


def pickles():
    pickle.dumps(nn.Linear(3, 3, device="cuda"))


@pytest.mark.parametrize("program", [sends_a_tensor, pickles])
def test_pickled_tensors_are_refused_by_one_line(program):
    with pytest.raises(UnsupportedOp, match=r"^a tensor is pickled at .*test_refusals\.py:\d+, and .*loss\.item\(\)"):
        foresee(program, 2)


def reads_a_buffer_back():
    torch.save(on_gpu(3), buffer := io.BytesIO())
    torch.load(io.BytesIO(buffer.getvalue()))


def test_a_copy_of_a_buffer_that_a_skipped_save_left_empty_is_refused_by_one_line():
    with pytest.raises(UnsupportedOp, match=r"^torch\.load of an empty buffer at .*test_refusals\.py:\d+: .* same"):
        foresee(reads_a_buffer_back, 1)


def asks_for_flash_attention():
    x = on_gpu(1, 2, 8, 16)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        nn.functional.scaled_dot_product_attention(x, x, x)


def test_attention_without_a_kernel_for_its_type_fails_as_on_a_gpu():
    with pytest.raises(RuntimeError, match=r"No available kernel: .*SDPBackend\.MATH"):
        foresee(asks_for_flash_attention, 1)


def copies():
    x = on_gpu(3).requires_grad_()
    y = copy.copy(x)
    assert y.requires_grad
    assert y.data_ptr() == x.data_ptr()


def test_a_shallow_copy_of_a_tensor_shares_its_memory():
    assert foresee(copies, 1).step_seconds > 0


def copies_of_state():
    """A parameter stays one, with its attributes. An optimizer counts its steps in a tensor with data."""
    model = nn.Linear(4, 4, device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    model.weight.group = "decayed"
    other = nn.Linear(4, 4)
    other.weight = copy.copy(model.weight)
    assert other.weight.group == "decayed"
    while True:
        model(on_gpu(2, 4)).sum().backward()
        optimizer.step()
        best = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer), copy.deepcopy(torch.get_rng_state())
        assert best[0]["state"][0]["step"] == optimizer.state_dict()["state"][0]["step"]


def test_copies_of_parameters_and_of_the_state_of_an_optimizer():
    assert foresee(copies_of_state, 1).step_seconds > 0


class Saved(nn.Linear):
    def __init_subclass__(cls):
        raise TypeError("this class has no subclasses")

    def save(self, path):
        raise TypeError("code that torch traces has a method of its own")


def traces():
    layer = torch.jit.trace(Saved(4, 4, device="cuda"), on_gpu(2, 4))
    layer(on_gpu(8, 4)).sum().backward()
    assert type(layer) is Saved
    layer.save("never written.pt")
    doubled = torch.jit.trace(lambda x: 2 * x, on_gpu(2))
    doubled.save("never written.pt")
    assert doubled(on_gpu(3)).shape == (3,)
    torch.jit.freeze(nn.Linear(4, 4, device="cuda").eval())(on_gpu(2, 4))


def test_code_that_torch_jit_traces_runs_as_it_is():
    seen = foresee(traces, 1)
    assert sum(each.startswith("torch.jit.") for each in seen.assumptions) == 3
    assert sum(each.startswith("torch.jit.save") for each in seen.skipped) == 2
    assert "save" not in vars(nn.Linear(1, 1))
    products = [each.flops for each in seen.traces[0].entries if getattr(each, "kind", "") == "matmul"]
    assert products == [2 * 8 * 4 * 4, 2 * 8 * 4 * 4, 2 * 2 * 4 * 4]
