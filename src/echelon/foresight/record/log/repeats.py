"""Microbatches that repeat an earlier one: their entries are copied from it, and their modules do not run.

Strategy. A microbatch is a call of a module that no other module calls, and the backward pass through its output. Both
are recorded as segments of the log, with all facts that determine them: the module's hooks, flags and the gradients
that exist, the forms of inputs and gradients, and the program's line. A later microbatch with equal facts repeats both,
if together they left the module as they found it, and no memory allocated but that of results. A repeated call returns
tensors of the recorded form. Their node in the graph writes the entries of the backward pass.

In the step that is kept, the first, the second and the last microbatch always run, and are compared. A difference
ends the recording: it is then done again, with all microbatches.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from echelon._torch_private.autograd import Backward, backward_with, is_in_backward, register_first_hook
from echelon._torch_private.distributed import chunks_noted
from echelon._torch_private.fake_results import Form, form_of, made_of
from echelon._torch_private.states import random_numbers, state_of, surroundings
from echelon._torch_private.tensors import FakeTensor, tree_flatten, tree_unflatten, without_functions
from echelon._torch_versions import REPEATS_NAMES, missing
from echelon.foresight.record.here import recording_here
from echelon.foresight.record.log.log import Log
from echelon.foresight.record.log.memory import Memory
from echelon.foresight.record.log.segments import Counters, MovedSegment, Segment, moved
from echelon.foresight.record.routing import Routing
from echelon.foresight.trace import Entry, Free
from echelon.replacements import Replacement

_TENSOR = object()
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


class NotRepeated(BaseException):
    """Raised in a program whose microbatches differ where they were assumed to be equal: all of them have to run.

    A BaseException: `except Exception` does not catch it.
    """


class _Moment(NamedTuple):
    """State of the log and of a module at one time."""

    position: int
    counters: Counters
    facts: Hashable
    gradients: Hashable
    storages: tuple[int | None, ...]
    """Storages of the module's tensors."""
    counts: tuple[int, ...]
    """Counts of exchanged values, groups, streams and random numbers, none of which a repeated call can make."""

    @property
    def state(self) -> tuple[Hashable, Hashable, tuple[int | None, ...]]:
        """State of the module: equal if nothing has changed."""
        return self.facts, self.gradients, self.storages


class _Output(NamedTuple):
    """Tensor that a module returns."""

    form: Form
    storage: int
    requires_grad: bool


@dataclass
class _Call:
    """A call of a module, and its backward pass."""

    key: Hashable
    inputs: tuple[int, ...]
    """Storages of the tensors among its arguments."""
    begin: _Moment
    number: int
    """Number among all calls of the rank."""
    end: _Moment | None = None
    forward: Segment | None = None
    outputs: tuple[_Output, ...] = ()
    leaves: tuple[Any, ...] = ()
    """Result as leaves: `_TENSOR` for each tensor."""
    structure: Any = None
    wanted: Sequence[weakref.ref[torch.Tensor]] = ()
    """Arguments whose gradients are wanted."""
    original: _Call | None = None
    """Call that it repeats. None: it has run."""
    held: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    """Memory that the graph would keep until some point of the backward pass."""

    @property
    def written(self) -> Segment:
        """Entries of the call."""
        assert self.forward is not None
        return self.forward

    @property
    def is_steady(self) -> bool:
        """Whether the call alone left its module as it was. Otherwise its backward pass has to restore it.

        FSDP gathers the parameters of the outermost module in forward, and keeps them until backward.
        """
        return self.end is not None and self.end.state == self.begin.state


class _Backward(NamedTuple):
    """A recorded backward pass of a call."""

    call: _Call
    segment: Segment
    storages: tuple[int | None, ...]
    gradient: int
    """Storage of the output's gradient."""
    gradients: tuple[_Output | None, ...]
    """Gradients of the wanted arguments."""


@dataclass
class _Known:
    """Calls with equal facts."""

    call: _Call
    """Latest call that has run."""
    backwards: dict[Hashable, _Backward] = field(default_factory=dict)
    """Latest backward pass by its facts."""
    is_repeated: bool = False
    """Whether one of them has been repeated. Then all that run have to be equal."""


@dataclass
class _Pass:
    """Backward pass that runs."""

    is_whole: bool
    module: nn.Module | None = None
    call: _Call | None = None
    begin: _Moment | None = None
    key: Hashable = None
    gradient: int = -1
    end: tuple[int, Counters] | None = None
    """Number of entries and counters at the end of a repeated pass."""


class Repeats:
    """Calls of modules of one rank that are repeated."""

    def __init__(self, log: Log, memory: Memory, routing: Routing, num_steps: int) -> None:
        self.num_repeated = 0
        self._log = log
        self._memory, self._routing = memory, routing
        self.num_left = num_steps
        self._depth = 0
        self._passes: list[_Pass] = []
        self._known: dict[Hashable, _Known] = {}
        self._leaf = torch.empty((), requires_grad=True)
        """Argument of each repeated call: with it, results have gradients even if no other argument has."""
        self._excluded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Modules all of whose calls run."""
        self._num_calls = 0
        self._alone: _Call | None = None
        """Repeated call whose backward pass has to come before any other call."""
        self._counts: Counter[int] = Counter()
        """Calls in this step, by module."""
        self._expected: dict[int, int] = {}
        """Calls in a step, by module."""
        self._num_open = 0
        """Repeated calls without a backward pass so far."""
        self._was_repeated: set[int] = set()
        """Modules with repeated calls in this step."""

    # Program

    def expect(self, module: nn.Module, num_calls: int) -> None:
        """Notes how often a module is called in a step."""
        self._expected[id(module)] = num_calls

    def end_step(self, counts: bool = True) -> None:
        """Ends a step. Unless it `counts`, it is no measure for later ones, and one more is recorded.

        Raises:
            NotRepeated: the last microbatch of the last step has not run, or a repeated call has had no backward pass.
        """
        self.num_left -= counts
        is_last = counts and not self.num_left
        differs = any(self._counts[each] != self._expected.get(each) for each in self._was_repeated)
        if self._num_open or (is_last and differs):
            raise NotRepeated
        self._expected = {**self._expected, **self._counts} if counts else {}
        self._counts.clear()
        self._was_repeated.clear()

    def called(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Calls a module, or repeats an earlier call."""
        if self._depth or is_in_backward() or not torch.is_grad_enabled() or module in self._excluded:
            return original(module, *args, **kwargs)
        self._depth += 1
        try:
            call = self._call(module, args, kwargs)
            if call is None:
                return original(module, *args, **kwargs)
            if self._alone is not None:
                raise NotRepeated
            self._counts[id(module)] += 1
            known = self._known.get(call.key)
            # A call can only be repeated together with its backward pass.
            if known is not None and known.backwards and self._may_repeat(module):
                known.is_repeated = True
                return self._repeat(module, call, known.call, args, kwargs)
            out = original(module, *args, **kwargs)
            self._run(module, call, out)
            return out
        finally:
            self._depth -= 1

    def _may_repeat(self, module: nn.Module) -> bool:
        number, expected = self._counts[id(module)], self._expected.get(id(module))
        if expected is None:  # in a warm-up step, which is not kept
            return self.num_left > 1
        return number < expected and (number > 2 or self.num_left > 1)

    # Facts

    def _moment(self, module: nn.Module) -> _Moment:
        log = self._log
        with without_functions():
            state = state_of(module)
            storages = tuple(
                self._memory.known(each) if isinstance(each, FakeTensor) else None for each in state.tensors
            )
            given = tuple(map(self._given, state.tensors, storages))
        facts = state.facts, given, log.stream, log.gpus.current, len(log.pending)
        counts = log.num_exchanged, len(log.groups), log.new_stream.next, random_numbers()
        return _Moment(len(log.entries), log.counters, facts, state.gradients, storages, counts)

    def _given(self, tensor: object, number: int | None) -> Hashable:
        """Returns the values of a tensor, and its place on the host, if one of them is known. Else None."""
        if number is None or not isinstance(tensor, FakeTensor):
            return None
        host = self._memory.on_host.get(number)
        found = host and (host.is_fixed, host.is_pinned), self._routing.summary(tensor)
        return None if found == (None, None) else found

    def _call(self, module: nn.Module, args: Any, kwargs: Any) -> _Call | None:
        """Returns a call with its facts. None if it cannot be repeated."""
        with without_functions():
            if (settings := surroundings(module)) is None:
                return None
            leaves, structure = tree_flatten((args, kwargs))
            facts: list[Hashable] = [id(module), self._log.place(), str(structure), settings]
            inputs: list[int] = []
            wanted: list[weakref.ref[torch.Tensor]] = []
            for leaf in leaves:
                if type(leaf) is FakeTensor:
                    number = self._memory.known(leaf)
                    # The gradient of another argument would flow on, or be added to one that is there.
                    if number is None or (leaf.requires_grad and not (leaf.is_leaf and leaf.grad is None)):
                        return None
                    first = (*inputs, number).index(number)
                    given = self._given(leaf, number)
                    facts.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad, first, given))
                    inputs.append(number)
                    if leaf.requires_grad:
                        wanted.append(weakref.ref(leaf))
                elif isinstance(leaf, _PLAIN):
                    facts.append((type(leaf), leaf))
                else:
                    return None
        begin = self._moment(module)
        if not any(storage is not None for storage in begin.storages):
            return None
        self._num_calls += 1
        return _Call((*facts, begin.facts), tuple(inputs), begin, self._num_calls, wanted=wanted)

    # Calls that run

    def _run(self, module: nn.Module, call: _Call, out: Any) -> None:
        """Records a call that has run."""
        call.end = self._moment(module)
        call.forward = self._segment(call.begin)
        leaves, call.structure = tree_flatten(out)
        outputs, differentiable = self._outputs(call, leaves)
        if outputs is None or not differentiable or call.end.counts != call.begin.counts:
            return
        call.outputs = outputs
        call.leaves = tuple(_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        known = self._known.get(call.key)
        if known is None:
            self._known[call.key] = _Known(call)
        else:
            if not self._are_equal(known.call, call):
                if known.is_repeated:
                    raise NotRepeated
                known.backwards.clear()
            known.call = call
        for number, leaf in differentiable:
            # Before other hooks, such as FSDP2's, which write entries of the backward pass.
            register_first_hook(leaf, partial(self._backward_begins, module, call, number))

    def _outputs(
        self, call: _Call, leaves: Sequence[Any]
    ) -> tuple[tuple[_Output, ...] | None, list[tuple[int, torch.Tensor]]]:
        """Returns the tensors of a result, and the differentiable ones. None if a tensor cannot be made again."""
        outputs: list[_Output] = []
        differentiable = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                form = form_of(leaf)
                number = self._memory.known(leaf) if form is not None else None
                is_new = number is not None and call.written.has_made(number)
                is_new &= number not in [each.storage for each in outputs]
                # The program may read known values.
                if form is None or number is None or not is_new or self._routing.summary(leaf) is not None:
                    return None, []
                if leaf.requires_grad:
                    differentiable.append((len(outputs), leaf))
                outputs.append(_Output(form, number, leaf.requires_grad))
            elif not isinstance(leaf, _PLAIN):
                return None, []
        return tuple(outputs), differentiable

    def _segment(self, begin: _Moment) -> Segment:
        return Segment(tuple(self._log.entries[begin.position :]), begin.counters, self._log.counters)

    def _are_equal(self, former: _Call, call: _Call) -> bool:
        """Whether two calls wrote equal entries."""
        if _result(former) != _result(call):
            return False
        again = moved(former.written, [MovedSegment(former.written, call.begin.counters)], _storages(former, call))
        return call.written.is_copy(former.written, again)

    @contextmanager
    def backward(self, is_whole: bool) -> Iterator[None]:
        """Notes a backward pass."""
        self._passes.append(_Pass(is_whole))
        try:
            yield
            self._backward_ends(self._passes[-1])
        finally:
            self._passes.pop()

    def _backward_begins(self, module: nn.Module, call: _Call, output: int, gradient: torch.Tensor) -> None:
        """Notes that the gradient of a result has arrived."""
        if self._begin(module, call, output, gradient) is None:
            # A backward pass through several calls, or a part of the graph, leaves no segment for each call.
            self._excluded.add(module)
            if self._passes:
                self._passes[0].is_whole = False

    def _begin(self, module: nn.Module, call: _Call, output: int, gradient: torch.Tensor) -> _Pass | None:
        """Begins the backward pass of a call. Returns None if it is not the only one of its backward."""
        if len(self._passes) != 1 or not self._passes[0].is_whole or self._passes[0].call:
            return None
        with without_functions():
            if type(gradient) is not FakeTensor or (number := self._memory.known(gradient)) is None:
                return None
            form = gradient.shape, gradient.stride(), gradient.dtype
        backward = self._passes[0]
        backward.module, backward.call, backward.gradient = module, call, number
        backward.begin = self._moment(module)
        facts, ran = backward.begin.facts, call.original or call
        # A repeated call has not changed its module as the call that it repeats did.
        before = call.begin if call.original is not None else call.end
        if not ran.is_steady and before is not None and facts == before.facts:
            facts = None
        backward.key = output, form, self._log.place(), facts, ran.is_steady and backward.begin.gradients
        return backward

    def _backward_ends(self, backward: _Pass) -> None:
        call, begin, log = backward.call, backward.begin, self._log
        if call is None or begin is None or backward.module is None or not backward.is_whole:
            return
        if backward.end is not None:
            if backward.end != (len(log.entries), log.counters):
                raise NotRepeated
            return
        known = self._known.get(call.key)
        if known is None:
            return
        segment = self._segment(begin)
        gradients = self._gradients(call, segment)
        end = self._moment(backward.module)
        if call.is_steady:
            is_steady = end.state == begin.state
        else:
            # Another call in between would have found the module changed.
            is_steady = end.state == call.begin.state and call.number == self._num_calls
        is_steady = is_steady and end.counts == begin.counts
        if gradients is None or not is_steady or not self._is_clean(call, segment, gradients):
            if known.is_repeated and backward.key in known.backwards:
                raise NotRepeated
            return
        made = _Backward(call, segment, begin.storages, backward.gradient, gradients)
        former = known.backwards.get(backward.key)
        if known.is_repeated and former is not None and not self._are_equal_backwards(former, made):
            raise NotRepeated
        known.backwards[backward.key] = made

    def _gradients(self, call: _Call, segment: Segment) -> tuple[_Output | None, ...] | None:
        """Returns the gradients of the wanted arguments. None if they cannot be made again."""
        found: list[_Output | None] = []
        for reference in call.wanted:
            tensor = reference()
            gradient = None if tensor is None else tensor.grad
            if gradient is None:
                found.append(None)
                continue
            form, number = form_of(gradient), self._memory.known(gradient)
            if form is None or number is None or not segment.has_made(number):
                return None
            found.append(_Output(form, number, requires_grad=False))
        return tuple(found)

    def _is_clean(self, call: _Call, segment: Segment, gradients: Sequence[_Output | None]) -> bool:
        """Whether no memory but that of results outlives a call and its backward pass."""
        results = {each.storage for each in (*call.outputs, *gradients) if each is not None}
        return call.written.made | segment.made <= call.written.freed | segment.freed | results

    def _are_equal_backwards(self, former: _Backward, made: _Backward) -> bool:
        if _forms(former.gradients) != _forms(made.gradients):
            return False
        again = _moved_backward(former, made.call, made.segment.begin, made.storages, made.gradient)
        return made.segment.is_copy(former.segment, again)

    # Calls that do not run

    def _repeat(self, module: nn.Module, call: _Call, former: _Call, args: Any, kwargs: Any) -> Any:
        """Writes the entries of a call, and returns its result."""
        self.num_repeated += 1
        self._num_open += 1
        self._was_repeated.add(id(module))
        call.original = former
        self._alone = None if former.is_steady else call
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        by_number = dict(zip(call.inputs, tensors, strict=True))
        place = MovedSegment(former.written, call.begin.counters)
        for entry in moved(former.written, [place], _storages(former, call)):
            if type(entry) is Free and entry.storage in by_number:
                self._memory.disown(by_number[entry.storage])
            self._memory.append(entry)
        self._log.counters = call.begin.counters.plus(former.written.end, former.written.begin)
        shift = call.begin.counters.storage - former.begin.counters.storage
        call.outputs = tuple(each._replace(storage=each.storage + shift) for each in former.outputs)
        # The graph would keep this memory until backward: the end of the storage then writes the entry.
        freed = self._freed(call)
        for number, was in zip(call.inputs, former.inputs, strict=True):
            if was in freed:
                call.held[number] = by_number[number].untyped_storage()
        wanted = [leaf for leaf in tensors if leaf.requires_grad]
        outputs = iter(_Repeated.apply(self, module, call, self._leaf, *wanted))  # type: ignore[no-untyped-call]
        leaves = [next(outputs) if leaf is _TENSOR else leaf for leaf in former.leaves]
        return tree_unflatten(leaves, former.structure)

    def results(self, call: _Call) -> tuple[FakeTensor, ...]:
        """Returns the tensors of a result."""
        assert call.original is not None
        made = tuple(self._made(each) for each in call.outputs)
        freed = self._freed(call)
        for tensor, output, was in zip(made, call.outputs, call.original.outputs, strict=True):
            if was.storage in freed:
                call.held[output.storage] = tensor.untyped_storage()
        return made

    def _freed(self, call: _Call) -> set[int]:
        """Returns the storages that backward passes of an equal call have freed."""
        return {each for backward in self._known[call.key].backwards.values() for each in backward.segment.freed}

    def _made(self, output: _Output) -> FakeTensor:
        tensor = made_of(output.form)
        self._memory.adopt(tensor, output.storage)
        return tensor

    def repeat_backward(
        self, module: nn.Module, call: _Call, gradients: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor | None, ...]:
        """Writes the entries of a backward pass, and returns the gradients of the wanted arguments."""
        self._num_open -= 1
        self._alone = None
        given = [(number, each) for number, each in enumerate(gradients) if each is not None]
        backward = self._begin(module, call, *given[0]) if len(given) == 1 else None
        if backward is None or backward.begin is None:
            raise NotRepeated
        former = self._known[call.key].backwards.get(backward.key)
        if former is None:
            raise NotRepeated
        begin, counters = backward.begin, backward.begin.counters
        for entry in _moved_backward(former, call, counters, begin.storages, backward.gradient):
            if type(entry) is Free:
                if entry.storage in call.held:
                    del call.held[entry.storage]  # the end of the storage writes the entry
                    continue
                if entry.storage == backward.gradient:
                    self._memory.disown(given[0][1])
            self._memory.append(entry)
        end = counters.plus(former.segment.end, former.segment.begin)
        self._log.counters = end
        backward.end = begin.position + len(former.segment.entries), end
        shift = counters.storage - former.segment.begin.storage
        return tuple(
            None if each is None else self._made(each._replace(storage=each.storage + shift))
            for each in former.gradients
        )


class _Repeated(torch.autograd.Function):
    """Node of a repeated call."""

    @staticmethod
    def forward(ctx: Any, repeats: Repeats, module: nn.Module, call: _Call, *_: torch.Tensor) -> Any:
        """Returns the result of a call as it was recorded."""
        # Zeros for missing gradients would be entries that the repeated pass has not.
        ctx.set_materialize_grads(False)
        ctx.repeats, ctx.module, ctx.call = repeats, module, call
        made = repeats.results(call)
        ctx.mark_non_differentiable(
            *(each for each, output in zip(made, call.outputs, strict=True) if not output.requires_grad)
        )
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        """Returns the gradients of a call as they were recorded."""
        # For repeats, module, call and leaf, which get no gradients.
        return (None, None, None, None, *ctx.repeats.repeat_backward(ctx.module, ctx.call, gradients))


def _forms(outputs: Iterable[_Output | None]) -> list[object]:
    return [each and (each.form, each.requires_grad) for each in outputs]


def _result(call: _Call) -> list[object]:
    return [call.structure, call.leaves, call.is_steady, *_forms(call.outputs)]


def _storages(
    former: _Call, call: _Call, states: tuple[Sequence[int | None], Sequence[int | None]] | None = None
) -> dict[int, int]:
    """Returns the counterparts of a former call's arguments and of its module's state."""
    before, after = states or (former.begin.storages, call.begin.storages)
    pairs = [*zip(before, after, strict=True), *zip(former.inputs, call.inputs, strict=True)]
    return {old: new for old, new in pairs if old is not None and new is not None}


def _moved_backward(
    former: _Backward, call: _Call, begin: Counters, state: Sequence[int | None], gradient: int
) -> Iterator[Entry]:
    """Yields the entries of a backward pass as another call writes them.

    Args:
        former: the backward pass.
        call: the other call.
        begin: counters where its backward pass begins.
        state: storages of its module's tensors there.
        gradient: storage of its output's gradient.
    """
    states = (former.storages, state) if former.call.is_steady else None
    storages = _storages(former.call, call, states) | {former.gradient: gradient}
    places = [MovedSegment(former.call.written, call.begin.counters), MovedSegment(former.segment, begin)]
    return moved(former.segment, places, storages)


def _repeats_here() -> Repeats | None:
    recording = recording_here()
    return None if recording is None else recording.repeats


@cache
def can_repeat() -> bool:
    """Whether this torch has the private names that repeated microbatches need."""
    return not missing(REPEATS_NAMES)


def microbatches_repeated() -> list[Replacement]:
    """Lets modules of recorded ranks be called by the `Repeats` of their recording, if it has one."""

    def calling_repeats(original: Callable[..., Any]) -> Callable[..., Any]:
        def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            repeats = _repeats_here()
            return original(self, *args, **kwargs) if repeats is None else repeats.called(original, self, args, kwargs)

        return called

    def backward(asked: Backward) -> AbstractContextManager[None]:
        repeats = _repeats_here()
        return nullcontext() if repeats is None else repeats.backward(asked.is_whole)

    def expect(module: nn.Module, num_calls: int) -> None:
        if (repeats := _repeats_here()) is not None:
            repeats.expect(module, num_calls)

    return [Replacement(nn.Module, "__call__", calling_repeats), *backward_with(backward), *chunks_noted(expect)]
