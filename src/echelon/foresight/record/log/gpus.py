"""GPUs of a rank's host, as far as its program names them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Gpus:
    """GPUs of one rank's host, and their names in the program so far.

    The chosen one is one of the named ones, and then the program has named CUDA as the device of a tensor as well. No
    line is known as long as no GPU is named.
    """

    count: int
    """Number of GPUs of the host."""
    present_line: Callable[[], str]
    """Returns the line of the program that is running."""
    current: int = 0
    """Index of the GPU that is current."""
    has_tensors: bool = False
    """Whether the program has named CUDA as the device of a tensor."""
    chosen: int | None = None
    """GPU that the program has named last by its number."""
    named: set[int] = field(default_factory=set)
    """Numbers of all GPUs that the program has named."""
    first_line: str = ""
    """Line that has named CUDA or a GPU first. Empty before."""
    shares_by_nccl: bool = False
    """Whether NCCL has communicated tensors of the GPU between this rank and another one of its host."""
    mesh_type: str = "cpu"
    """Type of device of the program's meshes."""

    @property
    def own(self) -> int:
        """Index of the GPU that has the rank's tensors."""
        return self.current if self.chosen is None else self.chosen

    def name(self, index: int | None = None) -> None:
        """Notes that the program names CUDA as a device, or a GPU by its number."""
        self.first_line = self.first_line or self.present_line()
        if index is not None:
            self.named.add(index)

    def choose(self, index: int) -> None:
        """Notes that the program names a GPU as the device of a tensor."""
        self.name(index)
        self.has_tensors, self.chosen = True, index
