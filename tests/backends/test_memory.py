"""Tensors as bytes."""

import pytest
import torch

from echelon.backends.formats.wire import DTYPES
from echelon.backends.memory import bytes_of, check_tensor, copy_contiguous, describe, dtype_code, dtype_of, new_tensor
from echelon.errors import SizeMismatch, UnsupportedOp

CPU = frozenset({"cpu"})


@pytest.mark.parametrize("code", range(len(DTYPES)), ids=[name for name, _ in DTYPES])
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_crosses_as_it_is(code):
    dtype = dtype_of(code)
    assert dtype_code(dtype) == code
    assert dtype.itemsize == DTYPES[code][1]
    for shape in ((), (0,), (3,), (2, 0, 2), (2, 3)):
        raw = torch.arange(96, dtype=torch.uint8)[: dtype.itemsize * torch.Size(shape).numel()] % 2
        sent = raw.view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype)
        got = new_tensor(shape, dtype)
        bytes_of(got)[:] = bytes_of(sent)
        assert bytes(bytes_of(got)) == bytes(raw.numpy())
        assert got.shape == sent.shape


def test_the_bytes_are_the_tensors_own():
    tensor = torch.zeros(4)
    view = bytes_of(tensor[1:3])
    view[:] = torch.tensor([1.5, 2.5]).numpy().tobytes()
    assert tensor.tolist() == [0, 1.5, 2.5, 0]
    assert bytes_of(torch.nn.Parameter(tensor)).nbytes == 16


@pytest.mark.parametrize("num_elements", [2, 4])
def test_no_more_is_copied_than_there_is_and_fits(num_elements):
    memory = torch.zeros(4)
    with pytest.raises(SizeMismatch, match=f"expected 12 bytes, got {4 * num_elements}"):
        copy_contiguous(torch.ones(num_elements), memory[:3])
    assert not memory.any()


def test_dtypes_that_cannot_be_sent_are_named():
    with pytest.raises(UnsupportedOp, match=r"dtype torch.quint8 cannot be sent: convert"):
        dtype_code(torch.quint8)


def test_a_dtype_that_this_torch_lacks_is_named(monkeypatch):
    monkeypatch.setattr("echelon.backends.memory._DTYPES", (None,))
    with pytest.raises(UnsupportedOp, match="this torch has no dtype uint8, which a peer sent: use one version"):
        dtype_of(0)


def test_memory_that_is_not_there_is_named():
    with pytest.raises(UnsupportedOp, match=r"no memory for a message of \d+ bytes, uint8\[\d+\]: send it in parts"):
        new_tensor((1 << 62,), torch.uint8)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, 2).t(),
        torch.ones(4)[::2],
        torch.ones(1).expand(3),
        torch.ones(2, device="meta"),
        torch.eye(2).to_sparse(),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, dtype=torch.complex64).conj().imag,
        [1.0],
    ],
    ids=["transposed", "strided", "expanded", "meta", "sparse", "conjugate", "negative", "a list"],
)
def test_what_has_no_plain_bytes_is_refused(tensor):
    with pytest.raises(UnsupportedOp, match=r"^send"):
        check_tensor(tensor, CPU, "send")


def test_what_has_them_is_not():
    for tensor in (torch.tensor(1.0), torch.empty(0, 3), torch.ones(4)[1:3], torch.ones(1, 5).t()):
        check_tensor(tensor, CPU, "send")


def test_the_short_form():
    assert describe((2, 3), torch.bfloat16) == "bfloat16[2, 3]"
    assert describe(torch.ones(()).shape, torch.float32) == "float32[]"
