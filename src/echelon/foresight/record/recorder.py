"""Dispatch mode that writes each operation of a rank on fake tensors into its log."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from echelon._torch_private.autograd import is_in_backward
from echelon._torch_private.fake_results import FakeResults
from echelon._torch_private.modules import precision_of
from echelon._torch_private.tensors import (
    NO_FAKE_RESULT,
    DispatchMode,
    FakeTensor,
    HigherOrderOperator,
    known_value,
    real_tensors,
    set_known_value,
    without_functions,
)
from echelon.backends.memory import tensors_in
from echelon.call_site import is_own
from echelon.errors import EchelonError, UnsupportedOp
from echelon.foresight.record.here import Recording, name_of
from echelon.foresight.record.kernels.accumulation import in_place, usual_references
from echelon.foresight.record.kernels.convolutions import parts
from echelon.foresight.record.kernels.dtypes import check_dtypes, is_checked
from echelon.foresight.record.kernels.onednn import HAS_SCRATCH, scratch, with_workspace
from echelon.foresight.record.kernels.operators import (
    INTO_A_PART,
    KEEPS_TERMS,
    TAKES_MASKS,
    Documents,
    Operation,
    Operator,
    begins_of_documents,
    finds_overflow,
    flops_and_shape,
    is_negation,
    launches_of,
    operator,
)
from echelon.foresight.record.kernels.traffic import Accesses, accesses_of, num_bytes_of
from echelon.foresight.record.kernels.workspaces import HAS_WORKSPACE, workspaces
from echelon.foresight.record.log.callers import BETWEEN, REPLICAS, calling_file
from echelon.foresight.record.log.copies import COPIES, Copies, Move
from echelon.foresight.record.log.memory import sparse_tensor
from echelon.foresight.record.log.placement import GPU, Host, Where
from echelon.foresight.record.ranks.communication import functional_collective
from echelon.foresight.record.refusals import unknown_result
from echelon.foresight.record.routing import MASKS, decides_shape, without_masks
from echelon.foresight.trace import CONVOLUTIONS, TF32, UNKNOWN_STORAGE, HostWait, Kind

_PLAIN = frozenset({Tensor, torch.nn.Parameter, FakeTensor})
"""Classes of tensors that have no other tensors inside."""
_ON_HOST = ("device_mesh.py", "_mesh_layout.py", "distributed_c10d.py")
"""Files of torch whose own tensors are numbers on the host, such as the ranks of a mesh and the bytes of objects."""
_FOLDERS_ON_HOST = tuple(os.path.join(os.sep, "torch", *parts, "") for parts in (("optim",), ("utils", "data")))
"""Folders of torch's optimizers, which count their steps on the host, and of loaders, which draw indices there."""
_ON_TENSOR_CORES = frozenset({TF32, "bfloat16", "float16"})
_DEVICE_OF = torch.ops.prim.device.default
_CPU = torch.device("cpu")
_NUMBERED = frozenset({torch.device("cpu", 0)})
"""Devices that a real tensor says to be on the CPU. A fake one would keep the number, and differ from other tensors."""
_COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})
_OWN_KERNELS = frozenset({"_fused_rms_norm"})
"""Composite operators that are called as one kernel, see `fused`."""
_INTEGERS = frozenset({torch.int32, torch.int64, torch.uint8})
_OWN_ON_HOST = tuple(
    os.path.join(os.sep, "echelon", *parts)
    for parts in (
        ("data_parallel", "hooks.py"),
        ("data_parallel", "join.py"),
        ("data_parallel", "reducer.py"),
        ("data_parallel", "summary.py"),
        ("pipeline", "run", "loss.py"),
        ("pipeline", "run", "step.py"),
        ("collectives", "calls", "objects.py"),
        ("backends", "messages.py"),
        ("functional.py",),
    )
)
"""Files of this package whose new tensors are counts, times and bytes of objects."""
_OWN_MEMORY = os.path.join(os.sep, "echelon", "backends", "memory.py")
"""File of this package that makes tensors for others."""
_RECORDING = os.path.join(os.sep, "echelon", "foresight", "")
_CHECKED = tuple(os.path.join(os.sep, "torch", "nn", name) for name in ("init.py", "functional.py"))
"""Files of torch that read flags to refuse wrong values, or to draw them again, such as a negative variance."""
_MOST_READS = {True: 20_000, False: 100_000}
"""Flags, and other numbers, that one line may read in a row. A loop over batches may read one of each."""
_SMALL = 1 << 16
"""Elements up to which real tensors stay real in an operation that takes no fake one."""


class Recorder(DispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations of the thread in which it is active. A mode of fake tensors must be active below it."""

    supports_higher_order_operators = True
    """So that they come here, and get an error with their line."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording
        self.log, self.memory, self.routing = recording.log, recording.memory, recording.routing
        self._placement = recording.placement
        placement = recording.placement
        self._copies = Copies(recording.log, recording.memory) if placement is None else placement.copies
        self._results = FakeResults()
        self._references = usual_references()
        self._of_overflow: dict[int, bool] = {}
        """Storages that say whether values are infinite or not a number: True, assumed to be 0 or false. Or are not."""
        self._reads = (-1, 0)
        """Line of the program that has read an assumed value last, and how often in a row."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE_OF and type(args[0]) is FakeTensor:
            return args[0].fake_device  # three of four calls, since torch asks fake tensors for it in Python
        for kind in types:
            if kind not in _PLAIN:
                return NotImplemented  # such as DTensor: the operations on its inner tensors come here
        if isinstance(func, HigherOrderOperator):
            raise self._unknown(str(func))
        kwargs = kwargs or {}
        func = in_place(func, args, self._references)
        if kwargs.get("device") in _NUMBERED:
            kwargs = {**kwargs, "device": _CPU}
        inputs = [*tensors_in(args), *(tensors_in(kwargs.values()) if kwargs else ())]
        facts = operator(func)
        if facts.is_composite and facts.role != "collective" and facts.name not in _OWN_KERNELS:
            with self:  # a mode is off while it handles an operator
                return func.decompose(*args, **kwargs)
        operation = Operation(func, facts, inputs, args, kwargs)
        if facts.communicating is not None:
            return self._communicated(operation, facts.communicating)
        if not any(isinstance(each, FakeTensor) for each in inputs) and _is_on_host(operation):
            with real_tensors():
                return func(*args, **kwargs)
        if kwargs.get("layout") in _COMPRESSED:  # first: torch would log an error of its own
            raise sparse_tensor(self.log.line())
        match facts.role:
            case "view":
                return self._viewed(operation)
            case "allocation":
                return self._allocated(operation)
            case "kernel":
                return self._kernel(operation)
            case "collective":
                return functional_collective(self._recording, self._results, func, facts.name, inputs, args, kwargs)
            case "read":
                return self._read(facts, args)

    def _communicated(self, operation: Operation, function: Callable[..., Any]) -> Any:
        """Runs the function of an operator that communicates, since its fake implementation only makes results."""
        try:
            with self:  # a mode is off while it handles an operator
                return function(*operation.args, **operation.kwargs)
        except EchelonError:
            raise
        except Exception as error:  # as in a kernel of Triton
            self.log.assume(
                f"communication of {operation.facts.custom_name} counts up to a {type(error).__name__}, as its code "
                "cannot run with fake tensors"
            )
            return self._computed(operation)

    def _viewed(self, operation: Operation) -> Any:
        """Makes a view, whose numbers may be known."""
        func, facts, inputs, args, kwargs = operation
        out = self._results.run(func, args, kwargs)
        if facts.name == "lift_fresh" and not isinstance(args[0], FakeTensor):
            self.routing.wrote(out, args[0])  # the numbers of torch.tensor
        elif self.routing.concerns(func, inputs, False):
            self.routing.follow(func, inputs, (), args, kwargs, out)
        return out

    def _allocated(self, operation: Operation) -> Any:
        """Makes an empty tensor, on the host if it is like tensors of the host."""
        func, facts, inputs, args, kwargs = operation
        where: Where = None
        if inputs and self._placement is not None and self.memory.on_host:
            with without_functions():
                before = [each for each in map(self.memory.known, inputs) if each is not None]
                where = self._placement.of_results(facts.name, inputs, before)
        out = self._results.run(func, args, kwargs)
        if where is None or where == GPU:
            self.memory.number(out)
        else:
            with self.memory.on_the_host(where.place):
                self.memory.number(out)
        return out

    def _is_number(self, tensor: Tensor) -> bool:
        """Whether a tensor is a number of the host, as torch makes one of the value in `x[mask] = 0`."""
        if tensor.numel() != 1:
            return False
        if self._placement is None or not isinstance(tensor, FakeTensor):
            return True
        number = self.memory.known(tensor)
        if number not in self.memory.on_host and known_value(tensor) is not None and number not in self.memory.on_gpu:
            self.memory.leave_gpu(tensor, self.log.place())
            return True
        # The gradient of such an assignment writes a zero, which lies where the number was: nearly always the host.
        return number in self.memory.on_host or (tensor.ndim == 0 and is_in_backward())

    def _unknown(self, name: str) -> UnsupportedOp:
        return unknown_result(name, self.log.line())

    def _read(self, facts: Operator, args: Sequence[Any]) -> object:
        """Returns the value of a tensor if it is known, else an assumed one: finite, 1, or true."""
        log = self.log
        if facts.name == "_local_scalar_dense" and (value := known_value(args[0])) is not None:
            with real_tensors():
                return value.item()
        if self.memory.known(args[0]) not in self.memory.on_host:
            log.entries.append(HostWait(log.stream, -1, log.place()))
        if facts.name != "_local_scalar_dense":
            log.assume(f"two tensors are {'close' if facts.name == 'allclose' else 'equal'}")
            return True
        is_flag = args[0].dtype == torch.bool
        if (value := self.routing.read(args[0])) is not None:
            if self.routing.is_chosen(args[0]):
                self._count_reads(is_flag)
            with real_tensors():
                return value.item()
        number = self.memory.number(args[0])
        if is_flag and _is_checked():
            return False
        if (of_overflow := self._of_overflow.get(number)) is None:
            self._count_reads(is_flag)
            log.assume(f"a value of a tensor is {'true' if is_flag else 1}")
        else:  # no loop waits for such values
            log.assume("no value is infinite or not a number")
        kind = bool if is_flag else float if args[0].dtype.is_floating_point else int
        return kind(not of_overflow)

    def _count_reads(self, is_flag: bool) -> None:
        """Counts the values that one line reads in a row. Raises UnsupportedOp if it seems to be a loop without end."""
        place = self.log.place()
        self._reads = (place, self._reads[1] + 1 if self._reads[0] == place else 1)
        if self._reads[1] > _MOST_READS[is_flag]:
            raise UnsupportedOp(
                f"a loop at {self.log.line()} goes on for {_MOST_READS[is_flag]:,} rounds, since it reads values of "
                "recorded tensors, which are assumed: let it end by a number of rounds, too"
            )

    def _decided(self, operation: Operation) -> Any:
        """Records an operator whose results have a shape that depends on values. The host waits for that shape."""
        func, _, inputs, args, kwargs = operation
        device = inputs[0].device
        with without_functions():
            before = [self.memory.number(each) for each in inputs]
        out = self.routing.made(func, args, kwargs, lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device))
        with without_functions():
            self._enter(operation, before, out)
        self.log.entries.append(HostWait(self.log.stream, -1, self.log.place()))
        return out

    def _kernel(self, operation: Operation) -> Any:
        """Records an operator that computes, by a way of its own if shapes depend on values."""
        func, facts, _, args, kwargs = operation
        if decides_shape(func):
            return self._decided(operation)
        if facts.name in TAKES_MASKS and any(each.dtype in MASKS for each in tensors_in(args[1:2])):
            # A mode is off while it handles an operator. The parts of this one are recorded by themselves.
            with self:
                return without_masks(func, facts.name, args, kwargs, self._is_number)
        return self._computed(operation)

    def _computed(self, operation: Operation) -> Any:
        """Records an operator that computes: finds its device, makes its results, and writes it into the log."""
        func, facts, inputs, args, kwargs = operation
        held: list[Tensor] = []
        """Memory for the time of the operation. It is freed when the results have theirs."""
        # Before the operation, so that the memory of a new input counts before that of its outputs.
        with without_functions():
            before = [self.memory.number(each) for each in inputs]
            where, move = self._device_of(facts, inputs, before)
        on_host = self._placement is None or where not in (None, GPU)
        if is_checked(facts.name) and not facts.takes_dtype:
            check_dtypes(facts.name, args, on_host)
        out = self._result(operation, on_host, held)
        with without_functions():
            self._note(operation, before, out, where, move)
        if self.routing.concerns(func, inputs, bool(facts.writes)):
            self.routing.follow(func, inputs, operation.written(), args, kwargs, out)
        return out

    def _device_of(self, facts: Operator, inputs: Sequence[Tensor], before: Sequence[int]) -> tuple[Where, Move | None]:
        """Returns the device of an operator's results, and the move for which it clones a tensor."""
        if self._placement is None or not before:
            return None if self.memory.making is None else Host(self.memory.making), None
        move = self._placement.copies.move if facts.name == "clone" else None
        if move is None:
            return self._placement.of_results(facts.name, inputs, before), None
        return GPU if move.place is None else Host(move.place), move

    def _result(self, operation: Operation, on_host: bool, held: list[Tensor]) -> Any:
        """Makes the results of an operator, and holds memory that it has for the time of computing."""
        func, facts, _, args, kwargs = operation
        try:
            if facts.name == "_grouped_mm":
                return self._grouped(func, args, kwargs)
            out = self._results.run(func, args, kwargs)
        except NO_FAKE_RESULT:
            raise self._unknown(facts.name) from None
        if facts.name in HAS_SCRATCH:
            return self._by_onednn(operation, out, on_host, held)
        if facts.name in HAS_WORKSPACE and not on_host:
            self._hold(operation, out, held)
        return out

    def _note(self, operation: Operation, before: Sequence[int], out: Any, where: Where, move: Move | None) -> None:
        """Writes an operator into the log, and notes the device of its results; see `_enter`."""
        facts, placement = operation.facts, self._placement
        if facts.name in KEEPS_TERMS:
            _keep_terms(out, operation.args)
        with nullcontext() if where is None or where == GPU else self.memory.on_the_host(where.place):
            self._enter(operation, before, out, where, move)
        if placement is not None and before:
            placement.resulted(tensors_in((out,)), before, where)
            if where == GPU and facts.writes and not placement.takes_both(facts.name):
                placement.written(operation.written())
        # Unknown places are those of libraries, such as Hugging Face's, which mean the host.
        if facts.name == "rand" and out.numel() == 1 and (placement is None or where != GPU):
            # A program compares it with a probability: LayerDrop leaves out a layer if the number is smaller.
            self.log.assume("a random number is 0.5")
            with real_tensors():
                set_known_value(out, torch.full(out.shape, 0.5, dtype=out.dtype))

    def _by_onednn(self, operation: Operation, out: Any, on_host: bool, held: list[Tensor]) -> Any:
        """Returns the result with the workspace of an LSTM. On the host, memory for the time of computing is held."""
        name, args = operation.facts.name, operation.args
        if on_host and (num_bytes := scratch(name, args, out)):
            held.append(operation.inputs[0].new_empty(num_bytes, dtype=torch.uint8))
            with without_functions():
                self.memory.number(held[0])
        return with_workspace(out, args) if name == "mkldnn_rnn_layer" else out

    def _hold(self, operation: Operation, out: Any, held: list[Tensor]) -> None:
        """Holds the workspaces of an operator on a GPU, which it allocates after its results."""
        with without_functions():
            for each in tensors_in((out,)):
                self.memory.number(each)
            for num_bytes in workspaces(operation.facts.name, operation.args):
                held.append(operation.inputs[0].new_empty(num_bytes, dtype=torch.uint8))
                self.memory.number(held[-1])

    def _grouped(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Makes the result of a grouped product. torch's fake one takes bfloat16 alone, its kernels all floats."""
        dtype = args[0].dtype
        if dtype == torch.bfloat16:
            return self._results.run(func, args, kwargs)
        halved = [
            each.to(torch.bfloat16) if isinstance(each, Tensor) and each.is_floating_point() else each for each in args
        ]
        return func(*halved, **{**kwargs, "out_dtype": None}).to(kwargs.get("out_dtype") or dtype)

    def _enter(
        self, operation: Operation, before: Sequence[int], out: Any, where: Where = None, move: Move | None = None
    ) -> None:
        """Writes an operator into the log: a kernel, a copy, or a computation of the host.

        Args:
            operation: the operator.
            before: storages of its inputs.
            out: its results.
            where: their device.
            move: move of its input between the host and the GPU, for which it is a clone.
        """
        facts, inputs, number = operation.facts, operation.inputs, self.memory.number
        outputs = [out] if isinstance(out, Tensor) else list(tensors_in((out,)))
        if facts.name in INTO_A_PART:
            outputs, inputs = outputs[:1], inputs[:-1]
        after = [number(each) for each in outputs]
        if facts.may_return_view and not facts.writes and all(key in before for key in after):
            return  # as `contiguous` of a contiguous tensor
        written = operation.written() if facts.writes else []
        for each in written:
            self.memory.resized(each.untyped_storage())
        if not inputs and not outputs:
            return
        if move is not None:
            self._copies.write(move, inputs[0], out)
            return
        args, kwargs = operation.args, operation.kwargs
        if facts.name in COPIES and self.memory.on_host and self._copies.write_copies(args, kwargs):
            return
        self._follow_overflow(operation, before, written[-1:] if facts.writes else outputs)
        # Not strict: `inputs` may have lost the last one above.
        read = list(zip(before, inputs, strict=False))
        changed = [(number(each), each) for each in written]
        accesses = accesses_of(operation, read, changed, zip(after, outputs, strict=True), number)
        if where is not None and where != GPU:
            self._enter_on_host(operation, inputs, accesses)
            return
        if facts.is_slower and self._placement is not None:
            self.log.assume(f"{facts.name.lstrip('_')} takes the time of its bytes alone, which is too short")
        if facts.name in CONVOLUTIONS and self._placement is not None:
            storages = zip(map(id, (*inputs, *outputs)), (*before, *after), strict=True)
            self._enter_convolution(operation, out, dict(storages))
            return
        if facts.custom_name and facts.flops is None and self._placement is not None:
            self.log.assume(
                f"{facts.custom_name} takes the time of its bytes alone, without communication or products inside of "
                "it (torch.utils.flop_counter.register_flop_formula says the number of products)"
            )
        flops, shape = (
            flops_and_shape(facts, args, kwargs, out, self._documents(operation)) if facts.kind != "other" else (0, ())
        )
        self._launch(operation, outputs, facts.kind, flops, shape, accesses, facts.name)

    def _documents(self, operation: Operation) -> Documents | None:
        """Returns the lengths of the documents of attention. None if it has none, or they are unknown."""
        if (begins := begins_of_documents(operation.facts.name, operation.args)) is None:
            return None
        known = [each if each is None else self.routing.read(each) for each in begins]
        # Queries and keys of different numbers of documents are an error of the kernel on a GPU.
        if any(each is None for each in known) or len({each.shape for each in known if each is not None}) > 1:
            self.log.assume("each sequence of attention is as long as the longest")
            return None
        with real_tensors():
            lengths = [each.diff().tolist() for each in known if each is not None]
        return list(zip(*lengths, strict=True))

    def _follow_overflow(self, operation: Operation, before: Sequence[int], results: Iterable[Tensor]) -> None:
        """Notes results that say whether values are infinite or not a number, by themselves or by their inputs."""
        found = self._of_overflow
        if (says := finds_overflow(operation)) is None and found and before:
            said = {found.get(each) for each in before}
            says = said.pop() if len(said) == 1 else None
            says = says if says is None else says != is_negation(operation)
        if says is not None:
            found.update((self.memory.number(each), says) for each in results)

    def _enter_on_host(self, operation: Operation, inputs: Sequence[Tensor], accesses: Accesses) -> None:
        """Writes an operator that the host computes."""
        facts, args = operation.facts, operation.args
        # One tensor of a list after another.
        launches = len(args[0]) if facts.is_foreach and args and isinstance(args[0], list | tuple) else 1
        num_bytes = sum(size for _, size in (*accesses.reads, *accesses.writes))
        self._copies.computed(facts.name, inputs, num_bytes, launches)

    def _enter_convolution(self, operation: Operation, out: Any, storages: Mapping[int, int]) -> None:
        """Writes the kernels of a convolution on a GPU.

        Args:
            operation: the convolution.
            out: its results.
            storages: storages of its tensors, by the identity of the tensor.
        """
        converts = self._dtype_of(operation, ()) in _ON_TENSOR_CORES and not self.log.is_compiled()
        for part in parts(operation.facts.name, operation.args, out, converts):
            written = part.writes
            # An expanded gradient, as of a sum, is made whole by the change of its layout, or else by torch.
            reads = tuple(
                (storages[id(each)], num_bytes_of(each) if written is None else each.nbytes) for each in part.reads
            )
            copied = (UNKNOWN_STORAGE, part.reads[0].nbytes)
            writes = copied if written is None else (storages[id(written)], num_bytes_of(written))
            made = part.reads if written is None else [written]
            self._launch(operation, made, part.kind, part.flops, part.shape, Accesses(reads, (writes,)), part.name)

    def _dtype_of(self, operation: Operation, outputs: Sequence[Tensor]) -> str:
        """Returns the type in which a kernel computes."""
        facts, inputs = operation.facts, operation.inputs
        floating = [each.dtype for each in inputs if each.is_floating_point()]
        dtype = next(iter(floating), None)
        if facts.kind == "matmul" and floating:
            # A product of 16 bits may be added to float32, and float8 has scales of float32.
            dtype = min(floating, key=lambda each: each.itemsize)
        if dtype is None:
            dtype = next((each.dtype for each in (*inputs, *outputs)), torch.float32)
        if facts.precision_of and dtype == torch.float32 and self._placement is not None:
            return TF32 if precision_of("cuda", facts.precision_of) == "tf32" else "float32"
        return name_of(dtype)

    def _launch(
        self,
        operation: Operation,
        outputs: Sequence[Tensor],
        kind: Kind,
        flops: int,
        shape: tuple[int, ...],
        accesses: Accesses,
        name: str,
    ) -> None:
        """Writes a kernel of an operator into the log."""
        self._recording.kernel(
            name,
            kind,
            operation.inputs,
            accesses.reads,
            accesses.writes,
            dtype=self._dtype_of(operation, outputs),
            flops=flops,
            shape=shape,
            launches=launches_of(operation.facts, operation.args),
            is_compiled=self.log.is_compiled(),
        )


def _keep_terms(loss: Tensor, args: Sequence[Any]) -> None:
    """Gives a loss, a single number, the memory that torch computes its terms in."""
    terms = math.prod(torch.broadcast_shapes(args[0].shape, args[1].shape))  # type: ignore[no-untyped-call]
    if terms > loss.numel():
        loss.untyped_storage().resize_(terms * loss.element_size())


def _is_on_host(operation: Operation) -> bool:
    """Whether an operation without fake tensors computes with values of the host."""
    _, facts, inputs, _, kwargs = operation
    if inputs and facts.name != "lift_fresh":
        small = all(each.numel() <= (1 if each.is_floating_point() else _SMALL) for each in inputs)
        return small or _of_own(sys._getframe(2)) is not None
    # For an operator without inputs, only the caller shows whether its tensor needs values.
    if (own := _of_own(sys._getframe(2))) is not None:
        return own.endswith(_OWN_ON_HOST)
    path = calling_file()
    # The reducer of DDP, in C++, writes numbers of buckets and parameters into tensors of integers.
    if path.endswith(REPLICAS):
        return kwargs.get("dtype") in _INTEGERS
    return path.endswith(_ON_HOST) or any(folder in path for folder in _FOLDERS_ON_HOST)


def _is_checked() -> bool:
    """Whether torch's own code reads a flag that is true if values are wrong."""
    return calling_file((*BETWEEN, "_tensor.py")).endswith(_CHECKED)


def _of_own(frame: FrameType | None) -> str | None:
    """Returns the file of this package that calls an operation. None if the caller is not of this package."""
    while frame is not None:
        path = frame.f_code.co_filename
        if is_own(path) and _RECORDING not in path and not path.endswith(_OWN_MEMORY):
            return path
        if not is_own(path) and not path.endswith(BETWEEN):
            return None
        frame = frame.f_back
    return None
