"""Advice for a step that does not fit, by the kinds and the lines of the tensors at its peak."""

import pytest

from echelon.foresight.advice import advice_on
from echelon.foresight.play.allocator import memory_of
from echelon.foresight.trace import Allocate
from tests.helpers.traces import Step

GIB = 1 << 30


def allocated(*sizes):
    """Returns a step with tensors of (GiB, kind, line, module)."""
    step = Step().kernel(1)
    step.places = [f"train.py:{line}" for line in range(10)]
    for storage, (size, kind, line, module) in enumerate(sizes):
        step.entries.append(Allocate(storage, size * GIB, kind, line, module))
    return step


def text(step, limit=4):
    trace = step.trace()
    return str(advice_on(memory_of(trace), trace, limit * GIB))


def evenly(num, kind="activations", module=0):
    return [(1, kind, index % 8, module) for index in range(num)]


def test_activations_take_a_smaller_batch_or_checkpointing():
    assert text(allocated(*evenly(8))) == "Use a smaller batch or activation checkpointing"


def test_a_step_that_recomputes_is_not_told_to():
    assert text(allocated(*evenly(8)).kernel(1, phase="recompute")) == "Use a smaller batch"


@pytest.mark.parametrize("kind", ["parameters", "gradients", "optimizer"])
def test_more_ranks_help_if_the_state_is_large(kind):
    few, many = (allocated(*evenly(16), (size, kind, 9, -1)) for size in (1, 3))
    assert text(few) == "Use a smaller batch or activation checkpointing"
    assert text(many) == f"{text(few)}, or shard parameters and optimizer state over more ranks"
    assert text(allocated((3, kind, 9, -1))) == "Shard parameters and optimizer state over more ranks"


def test_no_batch_is_small_enough_if_the_state_is_too_large():
    step = allocated(*evenly(8), (3, "optimizer", 9, -1))
    assert text(step, limit=3) == "Shard parameters and optimizer state over more ranks"


def test_logits_and_loss_are_computed_in_chunks():
    # Logits in 16 bits, the same in 32, and the loss's own, as of `cross_entropy(logits.float(), y)`.
    step = allocated((2, "activations", 4, 0), (4, "other", 5, -1), (4, "other", 5, -1), (1, "parameters", 9, -1))
    step.kernel(1, name="_to_copy", reads=((0, 1),), writes=((1, 1),))
    step.kernel(1, name="_log_softmax", reads=((1, 1),), writes=((2, 1),))
    held = "At the peak logits and loss hold 10.0 of 11.0 GiB"
    assert text(step) == f"{held}: compute the loss in chunks, or use a smaller batch"


def test_a_small_loss_is_not_named():
    step = allocated(*evenly(8), (1, "other", 9, -1)).kernel(1, name="nll_loss_forward", reads=((8, 1),))
    assert "chunks" not in text(step)


def test_a_single_tensor_outside_of_modules_is_named_alone():
    step = allocated((9, "other", 3, -1), (1, "activations", 4, 0))
    rest = "make that tensor smaller, or use a smaller batch or activation checkpointing"
    assert text(step) == f"At the peak train.py:3 holds 9.0 of 10.0 GiB: {rest}"
    assert (
        text(allocated((9, "other", 3, -1))) == "At the peak train.py:3 holds 9.0 of 9.0 GiB: make that tensor smaller"
    )


def test_a_line_that_holds_most_is_named():
    step = allocated(*[(1, "activations", 3, 0)] * 5, *evenly(3))
    assert text(step) == "At the peak train.py:3 holds 5.0 of 8.0 GiB: use a smaller batch or activation checkpointing"


def test_buffers_of_communication_take_a_larger_gpu():
    assert text(allocated((4, "communication", 3, -1))) == "Use a GPU with more memory"
