"""Everything that Echelon uses of torch without torch promising to keep it, with the reason."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode", "at_end_of_backward"]
# TorchDispatchMode: the one way to see every tensor that a thread makes, in backward too. Documented, but in a module
# whose name says that it is private.


def at_end_of_backward(finish: Callable[[], None], abandon: Callable[[], None]) -> None:
    """Calls `finish` when the backward pass that is running has computed everything, or `abandon` if it fails.

    To be called from a hook that runs in a backward pass. What `finish` raises comes out of `backward()`.

    torch has no public way: hooks see one tensor each and cannot know which is the last, because a parameter that was
    not used has none; `register_multi_grad_hook` runs before the last gradient is accumulated, and for
    `torch.autograd.grad` as well. The engine owns the callback; that it is dropped uncalled tells of a failure.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(_End(finish, abandon))


class _End:
    def __init__(self, finish: Callable[[], None], abandon: Callable[[], None]) -> None:
        self._finish = finish
        self._abandon = abandon
        self._called = False

    def __call__(self) -> None:
        self._called = True
        self._finish()

    def __del__(self) -> None:
        if not self._called:
            self._abandon()
