"""Steps of one rank: a step ends when the program's optimizers have stepped."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from echelon._torch_private.autograd import Backward, backward_with, is_in_backward
from echelon._torch_private.distributed import static_graph_by
from echelon._torch_private.tensors import FakeTensor
from echelon.call_site import is_own
from echelon.errors import UnsupportedOp
from echelon.foresight.record.here import Recording, in_ranks, recording_here
from echelon.foresight.record.log.callers import calling_file
from echelon.foresight.record.log.log import Log
from echelon.foresight.record.log.memory import Memory
from echelon.foresight.record.ranks.threads import refuse_in_thread
from echelon.foresight.trace import Allocate, Entry, Kernel, Order, Trace
from echelon.pipeline.stage.stage import Stage
from echelon.replacements import Replacement, replaced

if TYPE_CHECKING:
    from echelon.foresight.record.log.repeats import Repeats


MOST_BACKWARDS = 1_000
"""Backwards that a program with an optimizer may compute without a step of one. Accumulation takes some hundred."""
_MOST_OF_OTHERS = 20_000
"""The same for a program that has made no optimizer, which may end by itself, and for schedules of pipelines."""
MOST_ROUNDS = 16
"""Rounds for which an optimizer is waited for. A WGAN has 5 of its critic, and MAML 10, and each round is recorded."""
_OF_STATIC_GRAPH = 3
"""First typical step of a DDP with a static graph: in the two before it, it reduces gradients after the backward."""
_ALIKE = 0.01
"""Relative difference of FLOPs up to which steps are alike."""
_LARGE = 1 << 20
"""Bytes that a step leaves, from which on they are worth an assumption."""
_CALLERS = tuple(os.path.join("torch", *parts) for parts in (("autograd", "__init__.py"), ("_tensor.py",)))
"""Files of torch between a backward and the code that calls it."""
_Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
_PIPELINES = os.path.join(os.sep, "torch", "distributed", "pipelining", "")


class StepsDone(BaseException):
    """Raised in a program once all steps are recorded. A BaseException: `except Exception` does not catch it."""


class Timing(NamedTuple):
    """Steps that are timed with real tensors, after the others."""

    steps: int
    """Least number of steps."""
    seconds: float
    """Least time of all of them."""
    clock: Callable[[], float] = time.perf_counter
    """Returns the seconds of the program so far."""
    meet: Callable[[], None] = lambda: None
    """Waits for the ranks that are timed at the same time. Called where an optimizer begins."""


class _End(NamedTuple):
    """End of a step, or of a round of it."""

    position: int
    """Number of entries before it."""
    num_calls: int
    live: list[Allocate]
    """Storages that are alive."""


class Steps:
    """Steps of one rank so far."""

    def __init__(
        self,
        log: Log,
        memory: Memory,
        num_steps: int,
        by_optimizers: bool = True,
        timing: Timing | None = None,
        repeats: Repeats | None = None,
        may_add_steps: bool = False,
    ) -> None:
        self.entries: Sequence[Entry] | None = None
        """Entries of the last step that has ended. None before the first end."""
        self.computed: Sequence[tuple[int, int, object]] = ()
        """Its steps of a schedule, as in `Log.computed`."""
        self.live: Sequence[Allocate] = ()
        """Storages that were alive when it began."""
        self.earlier: list[Order] = []
        """Communication, waits and events before it."""
        self._work = (0, 0)
        """FLOPs of the backwards and the optimizers of the last two steps."""
        self.num_done = 0
        self.are_done = False
        """Whether the program is being ended, after its last step."""
        self._num_uncounted = 0
        """Steps that are unlike the ones after them."""
        self._log = log
        self._memory = memory
        self._num_steps = num_steps
        self._may_add_steps = may_add_steps
        """Whether more steps may run if the last one would be unlike later ones."""
        self._timing = timing
        self._repeats = repeats
        self._since = 0.0
        """Time at which the first steps had ended and the timed ones began."""
        self._by_optimizers = by_optimizers
        """Whether optimizers end a step. Otherwise `finish` alone does."""
        # By weak reference: an optimizer that the program drops need not step.
        self._made: weakref.WeakKeyDictionary[Optimizer, str] = weakref.WeakKeyDictionary()
        """Optimizers that have to step before a step ends, with the lines where they were made."""
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._of_round: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Optimizers that have stepped in this round: a round ends when one of them steps again."""
        self._rounds: list[_End] = []
        """Ends of rounds in this step."""
        self._has_had_rounds = False
        """Whether a step had several rounds."""
        self._waited_for: list[str] = []
        """Lines of optimizers that had not stepped at the end of the latest round."""
        self._last: weakref.ref[Optimizer] | None = None
        """Optimizer that has ended the step before."""
        self._live_at_begin: list[Allocate] = []
        self._end = _End(0, 0, [])
        """End of the latest step of an optimizer."""
        self._num_backwards = 0
        """Backwards since an optimizer had stepped last."""

    def made(self, optimizer: Optimizer) -> None:
        """Notes a new optimizer."""
        self._made[optimizer] = self._log.line()

    def made_static(self) -> None:
        """Notes that a DDP takes its graph as static: its first steps are unlike later ones."""
        added = self.num_done + _OF_STATIC_GRAPH - self._num_steps
        if added <= 0 or self._timing is not None:
            return
        if not self._may_add_steps:
            self._log.assume(
                "a DDP with a static graph overlaps no reduction with its first two backwards (typical with "
                f"steps={self._num_steps + added}, or without a number of steps)"
            )
            return
        self._num_steps += added
        if self._repeats is not None:
            self._repeats.num_left += added

    def begin(self, optimizer: Optimizer) -> None:
        """Notes the call of an optimizer's `step`."""
        log = self._log
        with log.call("begin of an optimizer"):
            if not log.phases.optimizer_depth:
                if optimizer in self._of_round and self._by_optimizers:
                    self._end_round()
                if self._timing is not None:
                    self._timing.meet()
                else:
                    gc.collect()  # at fixed points only, so that memory is freed at the same entry in every run
                self._mark(optimizer)
            log.phases.optimizer_depth += 1

    def _end_round(self) -> None:
        """Ends a round. Ends the step, too, if no other optimizer is waited for any longer."""
        # They may step at a slower rate, such as a generator after some updates of its critic.
        self._waited_for = self._missing()
        self._of_round.clear()
        self._rounds.append(self._end)
        self._has_had_rounds = True
        if self._waited_for and len(self._rounds) < MOST_ROUNDS:
            return
        self._leave_out()
        # A step of many rounds is unlike the ones after it.
        self._finish(self._end, counts=not self._waited_for)

    def _missing(self) -> list[str]:
        """Returns the lines of optimizers that have not stepped, and have parameters that no other one has updated."""
        # Of one that is wrapped or replaced by another, all parameters have been updated.
        updated = {id(each) for optimizer in self._stepped for each in _parameters(optimizer)}
        return [
            line
            for each, line in self._made.items()
            if each not in self._stepped and any(id(one) not in updated for one in _parameters(each))
        ]

    def _leave_out(self) -> None:
        """Lets steps end without optimizers that have not stepped, and perhaps never will."""
        for line in self._waited_for:
            self._log.assumptions.of(
                f"the optimizer made at {line} does not step: if it does later, name a function whose return ends a "
                "step by --until FUNCTION"
            )
        stepped = [(each, line) for each, line in self._made.items() if each in self._stepped]
        self._made = weakref.WeakKeyDictionary(stepped)

    def end_program(self) -> None:
        """Ends the first steps of a program that has ended while an optimizer was waited for."""
        has_repeated = self._repeats is not None and self._repeats.num_repeated
        # Repeated microbatches are recorded again then, because the last one of a step has to run.
        if self.entries is not None or has_repeated or not self._rounds:
            return
        self._leave_out()
        before = _End(0, 0, [])
        for each in tuple(self._rounds):
            self._finish(_End(each.position - before.position, each.num_calls - before.num_calls, each.live))
            before = each

    def _mark(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            self._memory.mark(group["params"], "parameters")
            self._memory.mark((each.grad for each in group["params"]), "gradients")

    def with_noted_closure(self, optimizer: Optimizer, arguments: _Arguments) -> _Arguments | None:
        """Returns the arguments of an optimizer's `step` with a closure whose calls are noted. None if it has none."""
        args, kwargs = arguments
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            return None

        def noted(*given: Any, **named: Any) -> Any:
            with self._log.phases.in_closure():
                result = closure(*given, **named)
            self._mark(optimizer)  # The gradients are new.
            return result

        return ((args[0], noted, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": noted})

    def end(self, optimizer: Optimizer) -> None:
        """Notes that an optimizer has stepped. Raises StepsDone after the last step."""
        log = self._log
        with log.call("end of an optimizer"):
            log.phases.optimizer_depth -= 1
            # Also if it is wrapped by another one.
            self._stepped.add(optimizer)
            for state in optimizer.state.values():
                self._memory.mark(state.values(), "optimizer")
            if log.phases.optimizer_depth:
                return
            self._of_round.add(optimizer)
            self._num_backwards = 0
            self._end = self._here()
            if self._by_optimizers and all(each in self._stepped or not _has_parameters(each) for each in self._made):
                last, self._last = self._last and self._last(), weakref.ref(optimizer)
                # A slow optimizer may come first in its round: then the first step has one round alone, and the second
                # one lacks its last round.
                self._finish_here(counts=last is None or last is optimizer or self._num_uncounted > 0)

    def backward(self) -> None:
        """Counts a backward. Raises UnsupportedOp after too many backwards without a step of an optimizer."""
        # A backward within another one is that of reentrant checkpointing. LBFGS computes backwards in its step.
        if not self._by_optimizers or self._timing is not None or self._log.phases.optimizer_depth or is_in_backward():
            return
        self._num_backwards += 1
        if self._num_backwards <= MOST_BACKWARDS:  # fast path
            return
        has_optimizer = any(map(_has_parameters, self._made))
        most = MOST_BACKWARDS if has_optimizer and not _is_of_schedule() else _MOST_OF_OTHERS
        if self._num_backwards > most:
            raise UnsupportedOp(
                f"{most:,} backwards, the last one at {self._log.line()}, without a step of an optimizer, which ends a "
                "step of the program: call optimizer.step() after the backward, or name a function whose return ends a "
                "step by --until FUNCTION"
            )

    def finish(self) -> None:
        """Ends a step here. Raises StepsDone after the last step."""
        with self._log.call("end of a step"):
            self._finish_here()

    def _finish_here(self, counts: bool = True) -> None:
        if self._timing is None:
            gc.collect()
        self._finish(self._here(), counts)

    def _here(self) -> _End:
        return _End(len(self._log.entries), len(self._log.calls), list(self._memory.live.values()))

    def _finish(self, end: _End, counts: bool = True) -> None:
        """Ends a step. Unless it `counts`, one more is recorded."""
        position, num_calls, live = end
        self._log.calls.end_step(num_calls, position)
        if self.entries is not None:
            self.earlier += [entry for entry in self.entries if isinstance(entry, Order)]
        self.entries, self.live = self._log.entries[:position], self._live_at_begin
        self.computed = self._log.drop(position)
        self._live_at_begin = live
        self._stepped.clear()
        self._of_round.clear()
        self._rounds.clear()
        self._log.forget_graph()
        if self._repeats is not None:
            self._repeats.end_step(counts)
        if not counts:
            self._num_uncounted += 1
            return
        self.num_done += 1
        self._work = self._work[1], _flops_of_training(self.entries)
        if self.num_done == self._num_steps:
            self._since = time.monotonic()
        if self._has_enough():
            self.are_done = True
            raise StepsDone

    def _has_enough(self) -> bool:
        if self._timing is None:
            return self.num_done == self._num_steps
        timed = self.num_done - self._num_steps
        return timed >= self._timing.steps and time.monotonic() - self._since >= self._timing.seconds

    def trace(self, rank: int, world_size: int) -> Trace:
        """Returns the last step, or the whole program if it has no optimizer."""
        log = self._log
        before, last = self._work
        # Steps of several optimizers at different rates begin unlike later ones.
        if abs(last - before) > _ALIKE * before > 0 and not self._has_had_rounds:
            log.assumptions.of(
                f"steps are alike from now on: backward and optimizer of this one have {last / before:.3g} times the "
                f"FLOPs of the one before (--steps {self.num_done + 1} foresees the next one)"
            )
        at_begin, at_end = _bytes_of(self.live), _bytes_of(self._live_at_begin)
        if at_end - at_begin > max(_ALIKE * at_begin, _LARGE) and self.num_done > 1 and not self._has_had_rounds:
            log.assumptions.of(
                f"memory stays as it is from now on: this step leaves {(at_end - at_begin) / 2**20:.3g} MiB more than "
                f"it began with, as by tensors in a list (--steps {self.num_done + 1} foresees the next one)"
            )
        entries = log.entries if self.entries is None else self.entries
        live = (each._replace(kind=log.kinds.get(each.storage, each.kind)) for each in self.live)
        return Trace(
            rank=rank,
            world_size=world_size,
            entries=tuple(log.with_kinds(entries)),
            live=tuple(live),
            groups=log.named_groups(world_size),
            places=tuple(log.places),
            modules=tuple(log.modules),
            is_step=self.entries is not None,
            assumptions=tuple(log.assumptions),
            skipped=tuple(log.skipped),
            computed=tuple(log.computed if self.entries is None else self.computed),
            earlier=tuple(self.earlier),
        )


def _flops_of_training(entries: Sequence[Entry]) -> int:
    """Returns the FLOPs of a step without forwards: an evaluation has some, too."""
    return sum(each.flops for each in entries if type(each) is Kernel and each.phase in ("backward", "optimizer"))


def _bytes_of(live: Sequence[Allocate]) -> int:
    return sum(each.num_bytes for each in live if not each.on_host)


def _has_parameters(optimizer: Optimizer) -> bool:
    return next(_parameters(optimizer), None) is not None


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (each for group in optimizer.param_groups for each in group["params"] if each.requires_grad)


def _is_of_schedule() -> bool:
    """Whether the schedule of a pipeline computes a backward, as it does for each microbatch and stage."""
    path = calling_file(_CALLERS)
    return _PIPELINES in path or is_own(path)


@contextmanager
def steps_noted() -> Iterator[None]:
    """Inside, optimizers of recorded ranks note their steps, and their backwards are counted."""

    def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
        if (recording := recording_here()) is None:
            refuse_in_thread("steps an optimizer")
            return None
        recording.steps.begin(optimizer)
        return recording.steps.with_noted_closure(optimizer, (args, kwargs))

    def after(optimizer: Optimizer, *_: Any) -> None:
        if (recording := recording_here()) is not None:
            recording.steps.end(optimizer)

    def counted(asked: Backward) -> AbstractContextManager[None]:
        if (recording := recording_here()) is None:
            if any(isinstance(each, FakeTensor) for each in asked.roots):
                refuse_in_thread("computes a backward")
            return nullcontext()
        recording.steps.backward()
        return recording.log.phases.backward(asked.makes_graph)

    hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
    try:
        with replaced(
            [
                Replacement(Optimizer, "__init__", in_ranks(_make)),
                Replacement(Stage, "recompute", in_ranks(_recompute)),
                *static_graph_by(in_ranks(_make_static)),
                *backward_with(counted),
            ]
        ):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _make(recording: Recording, original: Callable[..., None], optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
    original(optimizer, *args, **kwargs)
    recording.steps.made(optimizer)


def _make_static(recording: Recording, original: Callable[..., None], ddp: Any) -> None:
    original(ddp)
    recording.steps.made_static()


def _recompute(recording: Recording, original: Callable[..., None], stage: Stage, *args: Any, **kwargs: Any) -> None:
    with recording.log.phases.repeating():
        original(stage, *args, **kwargs)
