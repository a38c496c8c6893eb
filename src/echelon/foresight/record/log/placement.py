"""Devices of one rank's tensors, as far as the program makes them plain: the host, or its GPU.

For torch all recorded tensors are on the CPU. A tensor counts as on the host if a line of the program itself makes it
without a device, and so does a result of such tensors alone. A tensor counts as on the GPU if it is made there, or is a
parameter that is moved there, and so does a result of such tensors. The device of all others is unknown, and fits both:
libraries move tensors where nothing shows it.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from echelon._torch_private.tensors import FakeTensor, as_fake, local_part, tree_leaves, without_functions
from echelon.call_site import is_foreign
from echelon.foresight.record.log.callers import calling_file, is_of_torch
from echelon.foresight.record.log.copies import Copies
from echelon.foresight.record.log.log import Log
from echelon.foresight.record.log.memory import Memory

if TYPE_CHECKING:
    from echelon.foresight.record.ranks.threads import Threads

FACTORIES = frozenset(
    {
        "arange",
        "empty",
        "eye",
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
MOVES = frozenset({"as_tensor", "cpu", "to"})
"""Functions that may move a tensor."""
_TAKES_BOTH = frozenset(
    {"copy_", "_to_copy", "lift_fresh", "set_", "_local_scalar_dense", "_foreach_copy_", "_ctc_loss"}
    | {"_pack_padded_sequence", "tensor_split"}
)
"""Operators that take tensors of several devices. Indexing does so, too."""
_OF_BAGS = frozenset({"_embedding_bag", "_embedding_bag_backward"})
"""Operators whose tensors after the second one are offsets, which torch makes itself on the device of the indices."""
HOST = "host"
"""Goal of a move that can mean nothing but the host."""


class Host(NamedTuple):
    """The host as the device of a result."""

    place: int
    """Line that made it there. -1: none of the program did, such as in a program that is an installed package."""


GPU: Final = "gpu"
"""The GPU as the device of a result."""
Where: TypeAlias = Host | Literal["gpu"] | None
"""Device of a result. None: it is unknown."""
_TO_EMPTY = os.path.join("torch", "nn", "modules", "module.py")
"""File of torch that makes the tensors of a module on the device that the program names."""
_WITH_VALUES = frozenset({Tensor, nn.Parameter})
"""Types of tensors that are not fake, and wrap none."""
_DISTRIBUTED = os.path.join(os.sep, "torch", "distributed", "")
_MOVERS = tuple(
    os.path.join("torch", "distributed", name, "") for name in ("tensor", "fsdp", "checkpoint", "_composable")
)
"""Folders of torch whose collectives move tensors to the device of their mesh."""
_REDUCES = os.path.join("torch", "distributed", "fsdp", "_fully_shard", "_fsdp_collectives.py")
"""File of FSDP2 that moves gradients to the host, and nothing else to a device."""


class Placement:
    """Known devices of one rank's tensors."""

    def __init__(self, log: Log, memory: Memory) -> None:
        self.copies = Copies(log, memory)
        self.still: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Wrappers of torch that leave their arguments where they are."""
        self._log = log
        self._memory = memory
        self._gpu, self._unsure = _gpus(0)

    def making(self, depth: int) -> AbstractContextManager[None]:
        """Returns a context for a function that makes a tensor without a device: a line of the program makes it there.

        `depth` is the number of frames between this call and the line that calls the function.
        """
        if is_foreign(sys._getframe(depth).f_code.co_filename):
            return nullcontext()
        return self._memory.on_the_host(self._log.place())

    def made(self, tensor: object, on_gpu: bool, depth: int = 1) -> None:
        """Notes a tensor that a function of torch has made, on the GPU or without a device.

        `depth` is the number of frames between this call and the line that called the function.
        """
        if on_gpu:
            self._enter(tensor)  # as `zeros_like` of a tensor of the host
            self._begin(tensor)
        # A library may move its tensor later, where nothing shows it.
        elif isinstance(tensor, FakeTensor) and not is_foreign(sys._getframe(depth).f_code.co_filename):
            with without_functions():
                self._memory.leave_gpu(tensor, self._log.place())

    def made_on_host(self, tensor: object, is_pinned: bool, depth: int = 1) -> None:
        """Notes a new tensor in pinned memory, or one for which a line of the program or `to_empty` names the CPU."""
        path = sys._getframe(depth).f_code.co_filename
        is_fixed = is_pinned or path.endswith(_TO_EMPTY)
        local = local_part(tensor) if isinstance(tensor, Tensor) else None
        if not isinstance(local, FakeTensor) or (is_foreign(path) and not is_fixed):
            self.lose(tensor)
            return
        with without_functions():
            self._memory.leave_gpu(local, self._log.place())
            if is_fixed:
                self._memory.fix(self._memory.known(local), is_pinned)

    def moved(self, tensor: object, out: Any, goals: Sequence[Any], non_blocking: bool, depth: int = 1) -> Any:
        """Returns the result of a move, which has memory of its own.

        Args:
            tensor: the tensor that is moved.
            out: the result of torch, which mostly is the same tensor.
            goals: devices and tensors that the call names.
            non_blocking: whether the call says that the host need not wait.
            depth: number of frames between this call and the line that moves it.
        """
        number = self._memory.number_inside(out)
        is_on_host, is_fixed = number in self._memory.on_host, self._memory.is_fixed(number)
        path = sys._getframe(depth).f_code.co_filename
        names_gpu = any(is_gpu(each) and not self.is_unsure(each) for each in goals)
        # A tensor of an unknown device is on the GPU, too. torch's own code names the CPU in place of the GPU where it
        # moves a tensor from the host, as FSDP does.
        if is_fixed and not names_gpu:
            names_gpu = any(map(is_gpu, goals)) or (is_of_torch(path) and any(map(_is_device, goals)))
        if names_gpu:
            if is_on_host:
                return self.copies.to_gpu(out, non_blocking)
            self._begin(out)  # another tensor if it has another type
            return out
        if self._names_host(goals, path):
            return self.copies.to_host(out, non_blocking)
        if not is_fixed:
            self.lose(tensor)
            self.lose(out)
        return out

    def device_of(self, tensor: object) -> torch.device | None:
        """Returns the device on which a program finds a tensor. None: the one that torch says.

        A tensor whose device is unknown is on a GPU once the program has named one; see `is_unsure`.
        """
        number = self._memory.number_inside(tensor)
        if number in self._memory.on_host or type(tensor) in _WITH_VALUES or _is_meta(tensor):
            return None
        if not (is_known := number in self._memory.on_gpu) and not self._log.gpus.has_tensors:
            return None
        gpu = self.gpu
        return gpu if is_known else self._unsure

    def device_in_thread(self, tensor: object) -> torch.device | None:
        """Returns the device on which a thread of the program finds a fake tensor. None: the host."""
        return None if self._memory.number_inside(tensor) in self._memory.on_host else self.gpu

    def of_thread(self, threads: Threads | None, tensor: Any, non_blocking: bool) -> Any:
        """Returns a fake tensor of the host in place of a real one, which a thread of the program has made."""
        if threads is None or not threads.have_started or type(tensor) not in _WITH_VALUES:
            return tensor
        fake = as_fake(threads.mode, tensor)
        with without_functions():
            self._memory.leave_gpu(fake, self._log.place())
            if non_blocking:  # no note says so, but this is how a program moves a pinned tensor
                self._memory.fix(self._memory.known(fake), is_pinned=True)
        return fake

    def goal_of(self, tensor: Tensor) -> Any:
        """Returns the goal of a move to the device of a tensor. None: it is unknown."""
        return HOST if self._memory.number_inside(tensor) in self._memory.on_host else self.device_of(tensor)

    @property
    def gpu(self) -> torch.device:
        """The rank's GPU."""
        if (own := self._log.gpus.own) != self._gpu.index:
            self._gpu, self._unsure = _gpus(own)
        return self._gpu

    def is_unsure(self, device: object) -> bool:
        """Whether this is the device of a tensor whose device is unknown, as the program has read it."""
        return device is self._unsure

    def is_read(self, device: object) -> bool:
        """Whether the program has read this device from a tensor, so that it has not chosen its number."""
        return device is self._gpu or device is self._unsure

    @staticmethod
    def _names_host(goals: Sequence[Any], path: str) -> bool:
        """Whether a line of a file moves a tensor to the host for certain. `HOST` is the goal of `x.cpu()`."""
        # torch's own code finds tensors of the GPU on the CPU, and names the CPU in place of a GPU.
        return HOST in goals or path.endswith(_REDUCES) or (any(map(is_host, goals)) and not is_of_torch(path))

    def _begin(self, tensor: object) -> None:
        """Notes that a tensor is on the GPU, where it takes memory."""
        if isinstance(tensor, Tensor) and isinstance(local := local_part(tensor), FakeTensor):
            with without_functions():
                self._memory.on_gpu.add(self._memory.number(local))

    def lose(self, tensor: object) -> None:
        """Notes that the device of a tensor is unknown."""
        if (number := self._memory.number_inside(tensor)) is not None:
            self._enter(tensor)
            self._memory.on_gpu.discard(number)

    def _enter(self, tensor: Any) -> None:
        """Notes that a tensor may be on the GPU from now on."""
        if (number := self._memory.number_inside(tensor)) in self._memory.on_host:
            with without_functions():
                self._memory.enter_gpu(number, local_part(tensor))

    def arrived(self, tensor: Any) -> Any:
        """Returns the copy on the GPU of a tensor of the host, which a library moves. Other values are as they are."""
        is_on_host = self._memory.number_inside(tensor) in self._memory.on_host
        return self.copies.to_gpu(tensor, non_blocking=False) if is_on_host else tensor

    def forget(self, tensors: Iterable[object]) -> None:
        """Notes tensors that a library may have moved to the GPU."""
        for tensor in tensors:
            if self._memory.is_fixed(self._memory.number_inside(tensor)):
                continue
            self._enter(tensor)
            if isinstance(tensor, nn.Parameter) and (number := self._memory.number_inside(tensor)) is not None:
                self._memory.on_gpu.add(number)

    def called(self, module: nn.Module, inputs: object) -> None:
        """Takes a module's own tensors that no line has moved for ones of the host, as the inputs of its first call.

        Only beside tensors of the GPU: a program without any is foreseen as if its lines moved everything.
        """
        if not self._memory.on_gpu:
            return
        memory = self._memory
        own = (*nn.Module.parameters(module, recurse=False), *nn.Module.buffers(module, recurse=False))
        unknown = [
            (number, each)
            for number, each in zip(map(memory.number_inside, own), own, strict=True)
            if number in memory.live and number not in memory.on_gpu and number not in memory.on_host
        ]
        if not unknown:
            return
        given = [memory.number_inside(each) for each in tree_leaves(inputs) if isinstance(each, Tensor)]
        # The program would fail if they were on the GPU.
        if given and all(number in memory.on_host for number in given):
            for number, each in unknown:
                with without_functions():
                    memory.leave_gpu(each, memory.live[number].place)

    def of_results(self, name: str, inputs: Sequence[Tensor], before: Sequence[int]) -> Where:
        """Returns the device of an operator's results.

        Args:
            name: name of the operator.
            inputs: its tensors.
            before: their storages.

        Raises:
            RuntimeError: it takes tensors of the host and of the GPU.
        """
        on_gpu, on_host = self._memory.on_gpu, self._memory.on_host
        is_on_gpu = not on_gpu.isdisjoint(before)
        if not on_host or on_host.keys().isdisjoint(before):
            return GPU if is_on_gpu else None
        # torch's code for parallelism moves tensors to the device of its mesh, but not those that it offloads itself.
        if not any(map(self._memory.is_fixed, before)) and _of_distributed():
            return GPU if is_on_gpu else None
        if name in _OF_BAGS:
            # The others may be offsets that torch has made itself. In the backward they are on the device of those.
            kept = [i for i, each in enumerate(before) if i < 2 or (each in on_host and name == "_embedding_bag")]
            inputs, before = [inputs[i] for i in kept], [before[i] for i in kept]
            if on_host.keys().isdisjoint(before):
                return GPU if is_on_gpu else None
        # torch takes numbers of the host beside tensors of the GPU, but no tensors with dimensions.
        hosts = [number for number, each in zip(before, inputs, strict=False) if number in on_host and each.dim()]
        if not is_on_gpu:
            # A tensor of an unknown device makes that of the result unknown, too.
            is_on_host = len(hosts) == sum(each.dim() > 0 for each in inputs)
            made = next(each for each in (*hosts, *before) if each in on_host)
            return Host(on_host[made].place) if is_on_host else None
        if hosts and not self.takes_both(name) and not _of_distributed():
            raise RuntimeError(
                f"{name} takes a tensor of the CPU, made at {self._line(hosts[0])}, and one of the GPU: move the first "
                "one by .to(device)"
            )
        return GPU

    def of_call(self, name: str, inputs: Sequence[Tensor]) -> Where:
        """Returns the device of the results of a function with these tensors; see `of_results`."""
        with without_functions():
            return self.of_results(name, inputs, [self._memory.number(each) for each in inputs])

    def resulted(self, outputs: Iterable[Tensor], before: Sequence[int], where: Where) -> None:
        """Notes the device of an operator's results, without the inputs that it has changed."""
        if where is None:
            return
        for each in outputs:
            number = self._memory.known(each)
            if number is None or number in before:
                continue
            if where == GPU:
                self._memory.on_gpu.add(number)
            else:
                self._memory.leave_gpu(each, where.place)
                if any(map(self._memory.is_fixed, before)):
                    self._memory.fix(number)

    @staticmethod
    def takes_both(name: str) -> bool:
        """Whether an operator takes tensors of the host beside tensors of the GPU."""
        return name in _TAKES_BOTH or "index" in name

    def written(self, tensors: Iterable[Tensor]) -> None:
        """Notes tensors of the GPU that communication or an operator has written."""
        on_host = self._memory.on_host
        found = (self._memory.known(each) for each in tensors)
        self._memory.on_gpu.update(each for each in found if each is not None and each not in on_host)

    def check_group(self, tensors: Iterable[Tensor], backend: str) -> None:
        """Raises RuntimeError if a backend that takes tensors of GPUs alone is given one of the host."""
        for each in tensors:
            number = self._memory.known(each)
            if number is not None and number in self._memory.on_host and not _of_library():
                raise RuntimeError(
                    f"{backend} takes no tensor of the CPU, as the one made at {self._line(number)}: move it by "
                    ".to(device)"
                )

    def check_fixed(self, tensors: Iterable[Tensor], backend: str) -> None:
        """Raises RuntimeError if a backend that takes tensors of GPUs alone is given one that was moved to the host."""
        for each in tensors:
            number = self._memory.known(each)
            if number is not None and self._memory.is_fixed(number):
                raise RuntimeError(
                    f"{backend} at {self._log.line()} takes no tensor of the CPU, as of what is offloaded at "
                    f"{self._line(number)}: begin with init_process_group('cpu:gloo,cuda:{backend}')"
                )

    def _line(self, number: int) -> str:
        """Returns the line that made a storage on the host."""
        return self._log.line_of(self._memory.on_host[number].place)


def _is_meta(tensor: object) -> bool:
    """Whether a tensor is on the meta device, where no tensor has memory."""
    with without_functions():
        return isinstance(tensor, Tensor) and local_part(tensor).is_meta


def _gpus(index: int) -> tuple[torch.device, torch.device]:
    """Returns two equal devices, of which each has an identity of its own."""
    return torch.device("cuda", index), torch.device("cuda", index)


def is_gpu(value: Any) -> bool:
    """Whether an argument names a GPU."""
    if isinstance(value, str):
        return value == "cuda" or value.startswith("cuda:")
    return isinstance(value, torch.device) and value.type == "cuda"


def is_host(value: Any) -> bool:
    """Whether an argument names the CPU."""
    return value == "cpu" if isinstance(value, str) else _is_device(value) and value.type == "cpu"


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device)


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
