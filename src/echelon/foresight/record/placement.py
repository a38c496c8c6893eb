"""Devices of one rank's tensors, as far as the program makes them plain: the host, or a GPU.

For the C++ of torch all recorded tensors are on the CPU. A tensor counts as on the host if a line of the program itself
makes it without a device, and so does a result of such tensors alone. A tensor counts as on a GPU if it is made or
moved there, and so does a result of such tensors. The device of all others is unknown, and fits both: the C++ of torch
makes tensors where nothing shows their device. To the program they say that they are on the CPU, as weights of a module
do before they are moved.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from echelon._torch_private.tensors import FakeTensor, dispatch_depth, local_part, storage_address, without_functions
from echelon.call_site import is_foreign
from echelon.foresight.record.callers import calling_file
from echelon.foresight.record.log import Log
from echelon.foresight.record.memory import Memory

FACTORIES = frozenset(
    {
        "arange",
        "empty",
        "eye",
        "from_numpy",
        "full",
        "linspace",
        "normal",
        "ones",
        "rand",
        "randint",
        "randn",
        "randperm",
        "tensor",
        "zeros",
    }
)
"""Functions of torch that make a tensor on the host unless they are given a device."""
MOVES = frozenset({"as_tensor", "cpu", "cuda", "to", "type_as"})
"""Functions that may move a tensor."""
_TAKES_BOTH = frozenset({"copy_", "_to_copy", "lift_fresh", "set_", "_local_scalar_dense", "_foreach_copy_"})
"""Operators that take tensors of several devices. Indexing does so, too."""
GPUS = tuple(torch.device("cuda", index) for index in range(256))
"""GPUs by their index. To make one is a function of torch, which a function mode would see."""
_DISTRIBUTED = os.path.join(os.sep, "torch", "distributed", "")
_MOVERS = tuple(
    os.path.join("torch", "distributed", name, "") for name in ("tensor", "fsdp", "checkpoint", "_composable")
)
"""Folders of torch whose collectives move tensors to the device of their mesh."""


class Where(NamedTuple):
    """Device of a result."""

    gpu: int
    """Index of the GPU. -1: the host."""
    place: int = -1
    """Line that made it on the host."""

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU."""
        return self.gpu >= 0


class Placement:
    """Known devices of one rank's tensors."""

    def __init__(self, log: Log, memory: Memory) -> None:
        self.is_hidden = False
        """Whether tensors say that they are on the CPU, as to torch's own code that finds the forms of results."""
        self._log = log
        self._memory = memory

    def gpu_of(self, tensor: Tensor) -> int | None:
        """Returns the index of the GPU that a fake tensor is known to be on. None: the host, or unknown."""
        # Beside the recorder's mode there is that of fake tensors. Without them torch itself handles the tensor.
        if dispatch_depth() < 2:
            return None
        with without_functions():
            number = self._memory.known(tensor)
        return None if number is None else self._memory.on_gpu.get(number)

    def made(self, tensor: object, device: Any, depth: int = 1) -> None:
        """Notes a tensor that a function of torch has made.

        Args:
            tensor: the tensor.
            device: device that the function was given. None: it was given none.
            depth: number of frames between this call and the line that called the function.
        """
        if not isinstance(tensor, FakeTensor):
            return
        if device is not None:
            self._arrive(tensor, device)
        # A library may move its tensor later, where nothing shows it.
        elif not is_foreign(sys._getframe(depth).f_code.co_filename):
            with without_functions():
                self._memory.stay_on_host(tensor, self._log.place())

    def moved(self, tensor: object, out: Any, device: Any) -> Any:
        """Returns the result of a move. It has memory of its own if it is on another device than the tensor.

        Args:
            tensor: the tensor that is moved.
            out: the result of torch, which mostly is the same tensor.
            device: goal of the move.
        """
        if type(out) is Tensor and is_gpu(device):
            out = torch.ops.aten.lift_fresh(out)  # a tensor with values, as of an array
        elif not isinstance(out, Tensor) or not isinstance(local_part(out), FakeTensor):
            return out
        elif isinstance(tensor, Tensor) and is_gpu(device) != local_part(out).is_cuda and self._shares(tensor, out):
            out = out.clone()  # for the C++ of torch both are on the CPU, so it has moved nothing
        self._arrive(out, device)
        return out

    def _shares(self, tensor: Tensor, other: Tensor) -> bool:
        """Whether two tensors have the same memory."""
        with without_functions():
            first, second = (local_part(each).untyped_storage() for each in (tensor, other))
            return storage_address(first) == storage_address(second)

    def _arrive(self, tensor: Tensor, device: Any) -> None:
        """Notes the device of a new tensor. Only a tensor of the GPU is known to be on the host if that is its goal."""
        if is_gpu(device):
            self._enter(tensor, self.index_of(device))
            return
        local = local_part(tensor)
        with without_functions():
            number = self._memory.known(local)
            # As `zeros_like` of a tensor of the GPU: the operation that made it took one there.
            if number is not None and self._memory.on_gpu.pop(number, None) is not None:
                self._memory.stay_on_host(local, self._log.place())

    def index_of(self, device: Any) -> int:
        """Returns the index of a device that is a GPU. Without an index it is the GPU that is current."""
        index = torch.device(device).index
        return self._log.device if index is None else index

    def _enter(self, tensor: object, gpu: int) -> None:
        """Notes that a tensor is on a GPU."""
        if not isinstance(tensor, Tensor) or not isinstance(local := local_part(tensor), FakeTensor):
            return
        with without_functions():
            number = self._memory.number(local)
            if number in self._memory.on_host:
                self._memory.enter_gpu(number, local)
        self._memory.on_gpu[number] = gpu

    def of_results(self, name: str, inputs: Sequence[Tensor], before: Sequence[int]) -> Where | None:
        """Returns the device of an operator's results. None: it is unknown.

        Args:
            name: name of the operator.
            inputs: its tensors.
            before: their storages.

        Raises:
            RuntimeError: it takes tensors of the host and of the GPU.
        """
        on_gpu, on_host = self._memory.on_gpu, self._memory.on_host
        gpu = -1
        for each in before:  # without a generator, as each kernel asks
            if each in on_gpu:
                gpu = on_gpu[each]
                break
        if not on_host or on_host.keys().isdisjoint(before) or _of_distributed():
            return Where(gpu) if gpu >= 0 else None
        # torch takes numbers of the host beside tensors of the GPU, but no tensors with dimensions.
        hosts = [number for number, each in zip(before, inputs, strict=False) if number in on_host and each.dim()]
        if gpu < 0:
            # A tensor of an unknown device makes that of the result unknown, too.
            is_on_host = len(hosts) == sum(each.dim() > 0 for each in inputs)
            return (
                Where(-1, on_host[next(each for each in (*hosts, *before) if each in on_host)]) if is_on_host else None
            )
        if hosts and not self.takes_both(name):
            raise RuntimeError(
                f"{name} takes a tensor of the CPU, made at {self._line(hosts[0])}, and one of the GPU: move the first "
                "one by .to(device)"
            )
        return Where(gpu)

    def resulted(self, outputs: Iterable[Tensor], before: Sequence[int], where: Where | None) -> None:
        """Notes the device of an operator's results, without the inputs that it has changed."""
        if where is None:
            return
        for each in outputs:
            number = self._memory.known(each)
            if number is None or number in before:
                continue
            if where.is_gpu:
                self._memory.on_gpu[number] = where.gpu
            else:
                self._memory.leave_gpu(number, where.place)

    @staticmethod
    def takes_both(name: str) -> bool:
        """Whether an operator takes tensors of the host beside tensors of the GPU."""
        return name in _TAKES_BOTH or "index" in name

    def written(self, tensors: Iterable[Tensor], gpu: int | None = None) -> None:
        """Notes tensors that an operator has written on a GPU, or communication on the current one."""
        gpu = self._log.device if gpu is None else gpu
        memory = self._memory
        for number in map(memory.known, tensors):
            if number is not None and number not in memory.on_host and number not in memory.on_gpu:
                memory.on_gpu[number] = gpu

    def check_group(self, tensors: Iterable[Tensor], backend: str) -> None:
        """Raises RuntimeError if a backend that takes tensors of GPUs alone is given one of the host."""
        for each in tensors:
            number = self._memory.known(each)
            if number is not None and number in self._memory.on_host and not _of_library():
                raise RuntimeError(
                    f"{backend} takes no tensor of the CPU, as the one made at {self._line(number)}: move it by "
                    ".to(device)"
                )

    def _line(self, number: int) -> str:
        """Returns the line that made a storage on the host."""
        place = self._memory.on_host[number]
        return "an unknown line" if place < 0 else list(self._log.places)[place]


def is_gpu(value: Any) -> bool:
    """Whether an argument names a GPU."""
    if isinstance(value, str):
        return value == "cuda" or value.startswith("cuda:")
    return isinstance(value, torch.device) and value.type == "cuda"


def _of_library() -> bool:
    """Whether DTensor or another library that moves tensors by itself calls a collective for the program."""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and is_foreign(path := frame.f_code.co_filename):
        if any(folder in path for folder in _MOVERS):
            return True
        frame = frame.f_back
    return False


def _of_distributed() -> bool:
    """Whether torch's own code for parallelism calls an operator. It moves tensors to the device of its mesh."""
    return _DISTRIBUTED in calling_file()
