"""Inference tensors are worked on through ordinary ones, in any thread, and changes are told to autograd."""

import threading

import pytest
import torch

from echelon.backends.memory import new_tensor, plain
from echelon.backends.modes import announce_changes, normal_mode, outside_autograd, overwrite


def inference(shape):
    with torch.inference_mode():
        return torch.zeros(shape)


def test_an_ordinary_tensor_is_itself_outside_of_autograd():
    tensor = torch.zeros(3)
    assert outside_autograd(tensor) is tensor
    assert plain(tensor) is tensor


def test_an_inference_tensor_has_an_ordinary_one_over_the_same_memory():
    tensor = inference((4, 6))[1:, ::2]
    alias = outside_autograd(tensor)
    alias.fill_(1.0)
    assert not alias.is_inference()
    assert alias.stride() == tensor.stride()
    assert tensor.sum() == tensor.numel()


def test_a_lazy_view_of_inference_mode_is_overwritten_by_what_it_stands_for():
    with torch.inference_mode():
        tensor = torch.zeros(2, dtype=torch.complex64).conj()
    values = torch.tensor([1 + 2j, 3j])
    overwrite(tensor, values)
    assert tensor.tolist() == values.tolist()


def test_an_inference_tensor_is_overwritten_in_any_thread():
    tensor = inference(3)
    thread = threading.Thread(target=overwrite, args=(tensor, torch.ones(3)))
    thread.start()
    thread.join()
    assert tensor.tolist() == [1.0] * 3


def test_what_the_library_makes_is_ordinary_in_inference_mode():
    with torch.inference_mode():
        assert not new_tensor((2,), torch.float32).is_inference()
        with normal_mode():
            assert not torch.empty(2).is_inference()
        assert torch.empty(2).is_inference()


def test_no_tensor_counts_as_changed_if_torch_refuses_one_of_them():
    tensor = torch.zeros(2)
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode"):
        announce_changes([tensor, inference(0), inference((2, 2))])
    assert tensor._version == 0
    announce_changes([tensor, tensor[:1]])
    assert tensor._version == 2
    with torch.inference_mode():
        announce_changes([tensor, inference(2)])
    assert tensor._version == 3
