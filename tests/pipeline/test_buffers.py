"""Buffers are used again when nothing refers to their memory, and not before."""

import torch

from echelon.pipeline.run.transfer import Buffers

KIND = (torch.Size([2, 3]), torch.float32, torch.device("cpu"))


def test_a_buffer_is_used_again_when_nothing_refers_to_it():
    buffers = Buffers()
    places = {buffers.take(*KIND).data_ptr() for _ in range(5)}
    assert len(places) == len(buffers) == 1
    assert buffers.num_bytes == 24


def test_a_buffer_is_not_used_again_while_a_view_of_it_lives():
    buffers = Buffers()
    view = buffers.take(*KIND).detach().view(6)[2:4]
    other = buffers.take(*KIND)
    assert other.data_ptr() != view.untyped_storage().data_ptr()
    del other
    for _ in range(3):
        assert buffers.take(*KIND).data_ptr() != view.untyped_storage().data_ptr()
    assert len(buffers) == 2


def test_a_buffer_is_not_used_again_while_a_graph_needs_it():
    buffers = Buffers()
    taken = buffers.take(*KIND).fill_(3.0).requires_grad_()
    place, product = taken.data_ptr(), taken * taken
    del taken
    assert buffers.take(*KIND).data_ptr() != place
    product.sum().backward()
    del product
    assert place in {buffer.data_ptr() for buffer in [buffers.take(*KIND), buffers.take(*KIND)]}


def test_kinds_that_are_not_asked_for_any_more_are_freed():
    buffers = Buffers()
    buffers.take(*KIND)
    buffers.take(torch.Size([7]), *KIND[1:])
    buffers.forget_unused()
    assert len(buffers) == 2
    buffers.take(*KIND)
    buffers.forget_unused()
    assert len(buffers) == 1


def test_a_buffer_made_in_inference_can_be_saved_for_backward():
    buffers = Buffers()
    with torch.inference_mode():
        buffers.take(*KIND)
    leaf = buffers.take(*KIND).requires_grad_()
    (leaf * leaf).sum().backward()
    assert leaf.grad is not None
