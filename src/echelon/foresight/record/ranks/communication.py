"""Communication of fake tensors, recorded: calls of a process group, and functional collectives."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from echelon._torch_private.distributed import resolve_process_group
from echelon._torch_private.fake_results import FakeResults
from echelon._torch_private.tensors import FakeTensor, known_value, real_tensors, set_known_value
from echelon.backends.memory import tensors_in
from echelon.errors import UnsupportedOp
from echelon.foresight.record.here import Recording, recording_here
from echelon.foresight.record.log.callers import called_by_program
from echelon.foresight.record.log.calls import Call, answer
from echelon.foresight.record.log.placement import Host
from echelon.foresight.record.ranks.exchange import RecordingBackend
from echelon.foresight.record.ranks.mail import Route
from echelon.foresight.record.ranks.works import RecordedWork
from echelon.foresight.trace import Collective, Group, Wait
from echelon.group.group import ProcessGroup
from echelon.interop.process_group import EchelonProcessGroup
from echelon.interop.works import Done, Options, Runner, seconds

_OPS = {"AVG": "mean", "PREMUL_SUM": "sum"}
"""Names of reductions that are not torch's own names in lower case."""
_KEPT = 4096
"""Works that are kept: torch's C++ may hold a Work whose Python half nobody else holds, and call that half later."""


class _Form(NamedTuple):
    """Form of a method of torch's process group."""

    kind: str
    is_in_place: bool = False
    """Whether the method has one argument of tensors. Otherwise outputs come before inputs."""


_FORMS: Mapping[str, _Form] = {
    "allreduce": _Form("all_reduce", is_in_place=True),
    "allreduce_coalesced": _Form("all_reduce", is_in_place=True),
    "reduce": _Form("reduce", is_in_place=True),
    "broadcast": _Form("broadcast", is_in_place=True),
    "barrier": _Form("barrier", is_in_place=True),
    "reduce_scatter": _Form("reduce_scatter"),
    "reduce_scatter_single": _Form("reduce_scatter"),
    "reduce_scatter_single_coalesced": _Form("reduce_scatter"),
    "reduce_scatter_tensor_coalesced": _Form("reduce_scatter"),
    "_reduce_scatter_base": _Form("reduce_scatter"),
    "allgather": _Form("all_gather"),
    "allgather_coalesced": _Form("all_gather"),
    "all_gather_single": _Form("all_gather"),
    "all_gather_single_coalesced": _Form("all_gather"),
    "allgather_into_tensor_coalesced": _Form("all_gather"),
    "_allgather_base": _Form("all_gather"),
    "gather": _Form("gather"),
    "gather_single": _Form("gather"),
    "scatter": _Form("scatter"),
    "alltoall": _Form("all_to_all"),
    "all_to_all_single": _Form("all_to_all"),
    "alltoall_base": _Form("all_to_all"),
}
"""Collectives of torch's process group, by the name of the method."""


def reduction_of(op: Any) -> str:
    """Returns the name of one of torch's reductions, such as "mean" for AVG. By default it is torch's in lower case."""
    name: str = op.op.name
    return _OPS.get(name, name.lower())


class _AtOnce(Runner):
    """Runner whose collectives of real tensors have ended when they return. None of them takes long."""

    def run(
        self,
        call: Callable[..., Any],
        settle: Callable[[Any], Sequence[Tensor]],
        options: Options | None,
        *,
        is_behind_all: bool = False,  # noqa: ARG002
    ) -> dist.Work:
        return Done(settle(call(async_op=False, timeout=None if options is None else seconds(options.timeout))))


class RecordedGroup(EchelonProcessGroup):
    """Process group whose communication of fake tensors is recorded. Communication of real tensors takes place."""

    def __init__(self, group: ProcessGroup, store: Any) -> None:
        super().__init__(group, store)
        self.runner = _AtOnce(group)
        recording = recording_here()
        self._number = 0 if recording is None else recording.log.new_group(group.ranks)
        self._kept: deque[RecordedWork] = deque(maxlen=_KEPT)
        self.takes_gpu_only = ""
        """Backend that takes no tensors of the host. Empty if it does, or if it is not known."""
        self.shares_by_nccl = False
        """Whether NCCL communicates its tensors of GPUs, and several of its ranks are on this rank's host."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the world."""
        return self.group.ranks

    @property
    def described(self) -> Group:
        """Group of the trace."""
        description = self.getGroupDesc()
        # torch itself gives these descriptions, which name nothing.
        name = "" if description in ("undefined", "default_pg", "mesh_default") else description.removeprefix("mesh_")
        return Group(self.ranks, name, self._number)

    def record_collective(
        self, recording: Recording, form: _Form, args: Sequence[Any], options: Mapping[str, Any]
    ) -> RecordedWork:
        """Records a collective of fake tensors and returns its Work."""
        outputs, inputs, opts = _arguments(form, args, options)
        self._check_place(recording, (*inputs, *outputs))
        # The whole array is the output of an all-gather, and the input of a reduce-scatter.
        num_bytes = max(_num_bytes(outputs), _num_bytes(inputs))
        if form.kind in ("gather", "scatter"):
            # Only the root has the whole array.
            num_bytes = len(self.ranks) * min(map(_num_bytes, filter(None, (outputs, inputs))))
        root = getattr(opts, "rootRank", -1) if form.kind in ("broadcast", "reduce", "gather", "scatter") else -1
        op: Any = getattr(opts, "reduceOp", None)
        is_async = getattr(opts, "asyncOp", True)
        entry = recording.collective(
            form.kind,
            self.described,
            inputs,
            outputs,
            num_bytes=num_bytes,
            op=reduction_of(op) if op is not None and form.kind in ("all_reduce", "reduce", "reduce_scatter") else "",
            root=self.ranks[root] if root >= 0 else -1,
            blocking=not is_async,
        )
        if form.kind == "all_reduce":
            self._reduce_known(recording, outputs, entry.op)
        recording.routing.communicated(_with_op(entry), inputs, outputs, self.rank(), len(self.ranks))
        return self._keep(RecordedWork(recording.log, entry.number, outputs, entry.blocking))

    def run_collective(
        self,
        recording: Recording,
        call: Call,
        form: _Form,
        run: Callable[[], object],
        args: Sequence[Any],
        options: Mapping[str, Any],
    ) -> RecordedWork:
        """Runs a collective of real values, or answers it as it was answered before. Returns its Work."""
        outputs, inputs, opts = _arguments(form, args, options)
        recording.log.num_exchanged += 1
        with real_tensors():
            if call.is_answered:
                answer(call, outputs, inputs, call.values)
            else:
                run()
                call.values = [each.detach().clone() for each in outputs]
        return self._keep(RecordedWork(recording.log, -1, outputs, not getattr(opts, "asyncOp", True)))

    def _reduce_known(self, recording: Recording, tensors: Sequence[Tensor], op: str) -> None:
        """Reduces values that are known, such as a flag. They are assumed to be equal on all ranks."""
        for tensor in tensors:
            if (value := known_value(tensor)) is None:
                continue
            if len(self.ranks) > 1 and (name := called_by_program()):
                recording.log.assume(f"all ranks contribute the same value to {name}")
            # Mean, minimum and maximum of equal values are the value itself.
            if op == "sum":
                with real_tensors():
                    set_known_value(tensor, value * len(self.ranks))

    def _check_place(self, recording: Recording, tensors: Sequence[Tensor]) -> None:
        if self.shares_by_nccl and not any(
            recording.memory.known(each) in recording.memory.on_host for each in tensors
        ):
            recording.log.gpus.shares_by_nccl = True
        if self.takes_gpu_only and recording.placement is not None:
            recording.placement.check_group(tensors, self.takes_gpu_only)
            recording.placement.written(tensors)

    # Several operations at once: tensors of every device are the group's own

    def _start_coalescing(self, _: torch.device) -> None:
        super()._start_coalescing(torch.device("cpu"))

    def _end_coalescing(self, _: torch.device) -> Any:
        return super()._end_coalescing(torch.device("cpu"))

    # Messages

    def _route(self, is_send: bool, peer: int, tag: int) -> Route:
        src, dst = (self.rank(), peer) if is_send else (peer, self.rank())
        return Route(self.ranks, self._number, src, dst, tag)

    def pass_value(
        self, recording: Recording, call: Call, is_send: bool, tensor: Tensor, peer: int, tag: int
    ) -> RecordedWork:
        """Sends or receives the value of a real tensor, or answers a receive as it was answered before."""
        work = RecordedWork(recording.log, -1, [tensor], False)
        recording.log.num_exchanged += 1
        if call.is_answered:
            if not is_send:
                answer(call, [tensor], (), call.values)
            return self._keep(work)
        route = self._route(is_send, peer, tag)
        backend = _recording_backend(self.group)
        mail = backend.exchange.mail
        with real_tensors():
            if is_send:
                # A copy, because the program may change its tensor before the receiver gets it.
                mail.send(route, tensor.detach().clone())
            elif (value := mail.receive(backend.boundary, backend.timeout, route, mail.next_of(route))) is not None:
                tensor.copy_(value.reshape(tensor.shape))
                call.values = [value]
        return self._keep(work)

    def _flag(self, is_send: bool, tensor: Tensor, peer: int, tag: int) -> Callable[[], None] | None:
        """Sends the value of a fake tensor of one integer. For a receive, returns a function that waits for it."""
        if tensor.numel() != 1 or tensor.is_floating_point() or peer < 0:
            return None
        route = self._route(is_send, peer, tag)
        backend = _recording_backend(self.group)
        mail = backend.exchange.mail
        if is_send:
            mail.send(route, known_value(tensor))
            return None
        # Now, not at the wait: receives get the values in the order in which they were posted.
        number = mail.next_of(route)

        def settle() -> None:
            with real_tensors():
                value = mail.receive(backend.boundary, backend.timeout, route, number)
            if value is not None:
                set_known_value(tensor, value)

        return settle

    def record_message(self, recording: Recording, is_send: bool, tensor: Tensor, peer: int, tag: int) -> RecordedWork:
        """Records a send or a receive of a fake tensor and returns its Work."""
        log = recording.log
        recording.memory.number(tensor)
        self._check_place(recording, (tensor,))
        if not is_send:
            # Its former values are overwritten.
            recording.routing.drop([tensor])
        peer_in_world, batch = self.ranks[peer] if peer >= 0 else -1, log.next_of_batch()
        number = recording.message(is_send, peer_in_world, self.described, tag, tensor, batch=batch)
        settle = self._flag(is_send, tensor, peer, tag)
        log.num_exchanged += settle is not None
        return self._keep(RecordedWork(log, number, [tensor], False, settle))

    def _keep(self, work: RecordedWork) -> RecordedWork:
        self._kept.append(work)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work


class _Arguments(NamedTuple):
    outputs: Sequence[Tensor]
    inputs: Sequence[Tensor]
    options: Any


def _arguments(form: _Form, args: Sequence[Any], options: Mapping[str, Any]) -> _Arguments:
    """Returns the arguments of a collective of torch's process group. Its options come last, or are left out."""
    *values, opts = (*args, *options.values())
    if isinstance(opts, Tensor | list | tuple):
        values, opts = [*values, opts], None
    outputs = list(tensors_in(values[:1]))
    return _Arguments(outputs, outputs if form.is_in_place else list(tensors_in(values[1:2])), opts)


def _recording_backend(group: ProcessGroup) -> RecordingBackend:
    assert isinstance(group.backend, RecordingBackend), "every group of a recorded rank has one"
    return group.backend


def _collective(name: str, form: _Form) -> Callable[..., Any]:
    def call(self: RecordedGroup, /, *args: Any, **options: Any) -> Any:
        run = functools.partial(getattr(super(RecordedGroup, self), name), *args, **options)
        if (recording := recording_here()) is None:
            with real_tensors():
                return run()
        recording.log.num_of_all += len(self.ranks) == _recording_backend(self.group).world_size
        with recording.log.call(form.kind) as made:
            if any(isinstance(each, FakeTensor) for each in tensors_in(args)):
                return self.record_collective(recording, form, args, options)
            work = self.run_collective(recording, made, form, run, args, options)
            # A barrier has no tensors, real or fake. Its ranks wait while they are recorded, and in the step.
            return self.record_collective(recording, form, args, options) if form.kind == "barrier" else work

    call.__name__, call.__doc__ = name, f"Records or runs {form.kind}."
    return call


def _message(name: str) -> Callable[..., Any]:
    def call(self: RecordedGroup, /, tensors: Sequence[Tensor], *args: int) -> Any:
        if (recording := recording_here()) is None:
            with real_tensors():
                return getattr(super(RecordedGroup, self), name)(tensors, *args)
        with recording.log.call(name) as made:
            if isinstance(tensors[0], FakeTensor):
                if name == "recv_anysource":
                    raise UnsupportedOp(
                        f"a receive from any rank at {recording.log.line()} is not foreseen, since the message that "
                        "comes first depends on time: name its source, as by dist.recv(tensor, src)"
                    )
                return self.record_message(recording, name == "send", tensors[0], *args)
            if name != "recv_anysource" or made.is_answered:
                recording.log.next_of_batch()
                peer, tag = args if name != "recv_anysource" else (-1, *args)
                return self.pass_value(recording, made, name == "send", tensors[0], peer, tag)
            with real_tensors():
                return getattr(super(RecordedGroup, self), name)(tensors, *args)

    call.__name__, call.__doc__ = name, "Records or runs a message."
    return call


for _name, _form in _FORMS.items():
    setattr(RecordedGroup, _name, _collective(_name, _form))
for _name in ("send", "recv", "recv_anysource"):
    setattr(RecordedGroup, _name, _message(_name))


# Functional collectives, as of DTensor

_KINDS = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "broadcast": "broadcast",
}
_FUNCTIONAL_OPS = {"avg": "mean"}


def functional_collective(
    recording: Recording,
    results: FakeResults,
    func: Any,
    name: str,
    inputs: Sequence[Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Records a functional collective of fake tensors. Returns its result."""
    log, memory = recording.log, recording.memory
    if name == "wait_tensor":
        number = log.pending.pop(memory.number(args[0]), None)
        if number is not None:
            with log.call("wait"):
                log.entries.append(Wait(log.stream, number, log.place()))
        # Torch's registry of works forgets the tensor. The result is the tensor itself, with its known numbers.
        out = results.run(func, args, kwargs)
        return args[0] if isinstance(args[0], FakeTensor) else out
    base = name.rstrip("_").removesuffix("_out").removesuffix("_coalesced")
    with log.call(_KINDS.get(base, base)):
        out = results.run(func, args, kwargs)
        outputs = list(tensors_in((out,)))
        # The group is the last text, and the reduction, if there is one, the first.
        words = [each for each in (*args, *kwargs.values()) if isinstance(each, str | dist.ProcessGroup)]
        group = resolve_process_group(words[-1])
        assert isinstance(group, RecordedGroup), "every group of a recorded rank is one"
        before = _on_host(recording, group, inputs)
        log.num_of_all += len(group.ranks) == _recording_backend(group.group).world_size
        entry = recording.collective(
            _KINDS.get(base, base),
            group.described,
            inputs,
            outputs,
            num_bytes=max(_num_bytes(inputs), _num_bytes(outputs)),
            op=_FUNCTIONAL_OPS.get(str(words[0]), str(words[0])) if len(words) > 1 else "",
            root=group.ranks[args[1]] if base == "broadcast" else -1,
            blocking=base == "shard_dim_alltoall",
        )
        recording.routing.communicated(_with_op(entry), inputs, outputs, group.rank(), len(group.ranks))
        log.pending.update((memory.number(each), entry.number) for each in outputs)
        if before:
            assert recording.placement is not None
            recording.placement.resulted(outputs, before, Host(recording.memory.on_host[before[0]].place))
        return out


def _on_host(recording: Recording, group: RecordedGroup, inputs: Sequence[Tensor]) -> list[int]:
    """Returns the storages of tensors that were moved to the host. Raises RuntimeError if the backend takes none."""
    memory = recording.memory
    found = [number for number in map(memory.known, inputs) if number is not None and memory.is_fixed(number)]
    if found and group.takes_gpu_only and recording.placement is not None:
        recording.placement.check_fixed(inputs, group.takes_gpu_only)
    if found:
        recording.log.assume("communication of tensors of the CPU takes the time of 'nccl'")
    return found


def _with_op(entry: Collective) -> str:
    return f"{entry.kind}({entry.op})" if entry.op else entry.kind


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(each.nbytes for each in tensors)
