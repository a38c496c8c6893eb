"""Calls of a rank into its recording, in order: communication, waits for it, and optimizers that begin and end.

Strategy. A program that computes nothing shows its operators, but not their time on processors, which depends on
caches, newly mapped memory and the interpreter. So a program that is foreseen for this machine runs once more, with
real tensors, one rank in a process. Its calls are answered with the values of the recording, and the time between two
calls is the time of the kernels that were recorded between the same two calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

_PAGE = 4096


@dataclass(slots=True, eq=False)
class Call:
    """One call."""

    kind: str
    """Name of the operation."""
    position: int
    """Number of entries of the step before it."""
    seconds: float
    """Seconds of the program since the call before."""
    values: Any = None
    """Values that the program got from other ranks. None if it got none, or if nothing is known of them."""
    is_answered: bool = False
    """Whether `values` are those of an earlier recording, and no other rank is asked."""


Answers: TypeAlias = Sequence[Sequence[Call]]
"""Calls of each step of a recorded rank."""


class OtherCalls(BaseException):
    """Raised in a program whose calls are not the recorded ones. A BaseException: `except Exception` does not catch it.

    A program that depends on values of its tensors may make other calls where they are real.
    """


class Calls:
    """Calls of one rank so far."""

    def __init__(
        self, answers: Answers = (), clock: Callable[[], float] = time.thread_time, keeps_values: bool = False
    ) -> None:
        """Begins without calls.

        Args:
            answers: calls of an earlier recording, whose values are given again. Further steps get those of the last.
            clock: returns the seconds of the program so far.
            keeps_values: whether a later recording is answered by these calls.
        """
        self.clock = clock
        self._keeps_values = keeps_values
        self.steps: list[list[Call]] = []
        """Calls of each step that has ended."""
        self._answers = answers
        self._present: list[Call] = []
        self._depth = 0
        self._since = self.clock()

    @property
    def are_answered(self) -> bool:
        """Whether an earlier recording answers the calls."""
        return bool(self._answers)

    def __len__(self) -> int:
        """Returns the number of calls of the present step."""
        return len(self._present)

    @contextmanager
    def call(self, kind: str, position: int) -> Iterator[Call]:
        """Inside, the program's time does not count. Calls within a call are part of it.

        Raises:
            OtherCalls: an earlier recording called something else here.
        """
        made = Call(kind, position, 0.0)
        is_outermost = not self._depth
        if is_outermost:
            made.seconds = self.clock() - self._since
            if self._answers:
                made.values, made.is_answered = self._answer(kind), True
            self._present.append(made)
        self._depth += 1
        try:
            yield made
        finally:
            self._depth -= 1
            if not self._keeps_values:
                # Otherwise all tensors that ranks have exchanged would live until the end.
                made.values = None
            if is_outermost:
                self._since = self.clock()

    def _answer(self, kind: str) -> Any:
        step = self._answers[min(len(self.steps), len(self._answers) - 1)]
        if len(self._present) >= len(step) or step[len(self._present)].kind != kind:
            known = step[len(self._present)].kind if len(self._present) < len(step) else "the end of the step"
            raise OtherCalls(f"call {len(self._present)} of the step is {kind} in place of {known}")
        return step[len(self._present)].values

    def end_step(self, num_calls: int, num_entries: int) -> None:
        """Ends a step after its first calls and entries.

        Raises:
            OtherCalls: an earlier recording had more calls.
        """
        if self._answers and num_calls != len(self._answers[min(len(self.steps), len(self._answers) - 1)]):
            raise OtherCalls(f"the step ends after {num_calls} calls")
        self.steps.append(self._present[:num_calls])
        self._present = self._present[num_calls:]
        for each in self._present:
            # Calls after the end of the step belong to the next one, which begins there.
            each.position -= num_entries

    def of_all_steps(self) -> Answers:
        """Returns the calls of each step that has ended. If none has, the calls of the whole program as one step."""
        return self.steps or [self._present]


# Answers: values of tensors that other ranks would have given


def answer(call: Call, outputs: Sequence[Tensor], inputs: Sequence[Tensor], values: Sequence[Tensor] | None) -> None:
    """Writes the values of a call into its outputs, see `give`. Mapping their memory counts as time of the program.

    Collectives were timed with tensors whose memory was mapped. A program often frees its buffers, and gets new ones
    whose pages the operating system maps at the first write.
    """
    begin = time.perf_counter()
    with torch.no_grad():
        for output in outputs:
            if output.is_contiguous() and not any(output is each for each in inputs):
                output.view(-1).view(torch.uint8)[::_PAGE].zero_()
    call.seconds += time.perf_counter() - begin
    give(outputs, inputs, values)


def give(outputs: Sequence[Tensor], inputs: Sequence[Tensor], values: Sequence[Tensor] | None) -> None:
    """Writes the values of a call into its outputs.

    Args:
        outputs: tensors to write.
        inputs: tensors that the rank has given. The same as `outputs` for a collective in place.
        values: known values of the outputs. None: they are copied from the inputs, or invented if there are none.
    """
    with torch.no_grad():
        if values is not None:
            for output, value in zip(outputs, values, strict=True):
                output.copy_(value.reshape(output.shape))
            return
        given = [each.detach().reshape(-1) for each in inputs if each.numel()]
        for number, output in enumerate(outputs):
            if any(output is each for each in inputs):
                continue
            if given and output.is_contiguous():
                _repeat(output.view(-1), given[number % len(given)])
            else:
                invent(output)


def invent(tensor: Tensor) -> None:
    """Fills a tensor with values that are safe to compute with: small random numbers, and zeros as indices."""
    with torch.no_grad():
        if tensor.is_floating_point():
            tensor.normal_()
        else:
            tensor.zero_()


def _repeat(output: Tensor, source: Tensor) -> None:
    for begin in range(0, len(output), len(source)):
        part = output[begin : begin + len(source)]
        part.copy_(source[: len(part)])
