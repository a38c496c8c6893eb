"""What autograd saves for the backward of one microbatch: counted, and let go of where only I needed it.

A graph frees what it saved when its backward has run, or all at once when it is dropped. Between the two halves of a
backward neither helps: W needs a part of it. So every saved tensor is kept in a box of ours, which is emptied after I
has looked into it, unless the node that looked will be run again by W.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.autograd.graph import saved_tensors_hooks

from echelon._torch_private import version_of


class _Box:
    """A tensor and its version; None once it has been let go of."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.version = version_of(tensor)


class SavedTensors:
    """The saved tensors of a microbatch between its forward and the end of its backward."""

    def __init__(self) -> None:
        self._boxes: list[weakref.ref[_Box]] = []  # the graph owns them, and frees them as it runs
        self._spent: list[_Box] = []
        self._keeps = True

    def saving(self) -> AbstractContextManager[None]:
        """Collects what is saved inside."""
        return saved_tensors_hooks(self._pack, self._unpack)

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """Inside, lets go of what a backward has used, but for the nodes between `enter` and `leave`."""
        self._keeps = False
        try:
            yield
        finally:
            self._empty_spent()
            self._keeps = True

    def enter(self) -> None:
        """Says that a node is run that will be run again. What earlier ones used has served."""
        self._empty_spent()
        self._keeps = True

    def leave(self) -> None:
        """Says that it has been run."""
        self._keeps = False

    def tensors(self) -> list[torch.Tensor]:
        """Returns what is held."""
        boxes = (reference() for reference in self._boxes)
        return [box.tensor for box in boxes if box is not None and box.tensor is not None]

    def _pack(self, tensor: torch.Tensor) -> _Box:
        box = _Box(tensor)
        self._boxes.append(weakref.ref(box))
        return box

    def _unpack(self, box: _Box) -> torch.Tensor:
        tensor = box.tensor
        if tensor is None:
            raise RuntimeError(
                "a tensor saved for backward was asked for again after it was let go of: a formula of this stage looks "
                "at what it saved outside of its own call; use a schedule with whole backwards (B) for it"
            )
        if version_of(tensor) != box.version:
            raise RuntimeError(
                f"a tensor of shape {list(tensor.shape)} that backward needs was changed in place after the forward "
                f"saved it (version {version_of(tensor)}, saved {box.version}): change a copy of it"
            )
        if not self._keeps:
            self._spent.append(box)
        return tensor

    def _empty_spent(self) -> None:
        for box in self._spent:
            box.tensor = None
        self._spent.clear()


def num_bytes(tensors: Iterable[torch.Tensor], but: Collection[int] = ()) -> int:
    """Returns the bytes that tensors hold, memory that several share once.

    Args:
        tensors: of any kind.
        but: addresses of memory that does not count, see `address`.
    """
    sizes = {address(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(size for start, size in sizes.items() if start not in but)


def address(tensor: torch.Tensor) -> int:
    """Returns where the memory that a tensor is in begins."""
    return tensor.untyped_storage().data_ptr()
