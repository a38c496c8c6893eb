"""The collectives of one group that torch.distributed does, as one rank does them.

Strategy. Operations pass one at a time, in the order in which they were called, whatever threads they come in: the
engine pairs them by their order. Each begins with an agreement of all ranks (see there), so the engine only ever sees
ranks that do the same. The first operation makes the group's process group, when all have come; one that fails takes it
apart, and closes its connections, by which the engine's operation fails on the other ranks as well.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol, TypeVar

import torch

from echelon.backends.memory import new_tensor
from echelon.backends.native import AnyPlace, Call, Gathered, NativeCollectives, Place
from echelon.backends.operators import Operator
from echelon.backends.torch_distributed import moving, reducing
from echelon.backends.torch_distributed.agreement import Agreement
from echelon.backends.torch_distributed.engine import Engine, EngineFailed
from echelon.backends.turnstile import Turnstile
from echelon.errors import PeerFailed

T = TypeVar("T")
Facts = Sequence[Sequence[int]]


class Host(Protocol):
    """What a group needs of the backend."""

    @property
    def rank(self) -> int:
        """This rank of the world."""
        ...

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors are, if they are not in the CPU's memory."""
        ...

    def now(self) -> float:
        """Returns the time, in seconds."""
        ...

    def finish_queued(self) -> None:
        """Returns when this rank's device has done what the calling thread's stream holds."""
        ...

    def check(self, context: int) -> None:
        """Raises why the group cannot begin an operation."""
        ...

    def look_around(self, deadline: float, context: int, ranks: Sequence[int]) -> None:
        """Raises why this rank need not wait longer: what it was told, a rank's death, or that its time is up."""
        ...

    def explain(self, failure: EngineFailed, call: Call, context: int, ranks: Sequence[int]) -> NoReturn:
        """Raises what the failure of an engine means."""
        ...

    def open(self, context: int, ranks: Sequence[int], call: Call) -> Engine:
        """Returns a new engine for a group; all its ranks call it."""
        ...


class TorchCollectives(NativeCollectives):
    """The collectives of one group."""

    def __init__(self, host: Host, context: int, ranks: tuple[int, ...], agree: Agreement) -> None:
        """Connects nothing yet.

        Args:
            host: see there.
            context: of the group.
            ranks: the world's rank of each member.
            agree: how they agree on an operation before it begins.
        """
        self._host = host
        self._context = context
        self._ranks = ranks
        self._agree = agree
        self._turnstile = Turnstile()
        self._engine: Engine | None = None
        self._interrupted: int | None = None

    def all_reduce(self, call: Call, tensor: torch.Tensor, operator: Operator) -> None:  # noqa: D102
        self._pass(call, tensor, (), lambda engine, _: reducing.all_reduce(engine, tensor, operator))

    def reduce(self, call: Call, tensor: torch.Tensor, dst: int, operator: Operator) -> None:  # noqa: D102
        self._pass(call, tensor, (), lambda engine, _: reducing.reduce(engine, tensor, dst, operator))

    def reduce_scatter(  # noqa: D102
        self, call: Call, tensor: torch.Tensor, operator: Operator, place: Place
    ) -> torch.Tensor:
        return self._pass(call, tensor, (), lambda engine, _: reducing.reduce_scatter(engine, tensor, operator, place))

    def broadcast(self, call: Call, tensor: torch.Tensor, src: int) -> None:  # noqa: D102
        self._pass(call, tensor, (), lambda engine, _: moving.broadcast(engine, tensor, src))

    def all_gather(self, call: Call, rows: torch.Tensor, place: Place) -> torch.Tensor:  # noqa: D102
        return self._pass(call, rows, (len(rows),), lambda engine, told: moving.all_gather(engine, told, rows, place))

    def gather(  # noqa: D102
        self, call: Call, rows: torch.Tensor, dst: int, place: Place
    ) -> torch.Tensor | None:
        return self._pass(call, rows, (len(rows),), lambda engine, told: moving.gather(engine, told, rows, dst, place))

    def scatter(  # noqa: D102
        self, call: Call, tensor: torch.Tensor | None, src: int, place: AnyPlace
    ) -> torch.Tensor:
        device = self._host.device
        facts = moving.scatter_facts(tensor, device)
        return self._pass(
            call, None, facts, lambda engine, told: moving.scatter(engine, told, tensor, src, device, place)
        )

    def all_to_all(  # noqa: D102
        self, call: Call, rows: torch.Tensor, splits: Sequence[int] | None, place: Place
    ) -> Gathered:
        parts = rows.tensor_split(len(self._ranks)) if splits is None else torch.split(rows, list(splits))
        facts = [len(part) for part in parts]
        return self._pass(call, rows, facts, lambda engine, told: moving.all_to_all(engine, told, parts, rows, place))

    def barrier(self, call: Call) -> None:
        """Returns when all ranks have come, which is what they agree on, and each's GPU has done what it had queued."""

        def run() -> None:
            self._host.finish_queued()
            self._agree(call, ())

        self._in_turn(call, run)

    def empty(self, call: Call, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:  # noqa: D102
        self._in_turn(call, lambda: self._agree(call, ()))
        return new_tensor(tuple(shape), dtype)

    def close(self) -> None:
        """Takes the process group apart, if there is one."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _pass(
        self, call: Call, tensor: torch.Tensor | None, facts: Sequence[int], act: Callable[[Engine, Facts], T]
    ) -> T:
        """Does an operation on tensors when it is its turn, once all ranks have agreed on it."""
        where = "cpu" if tensor is None else tensor.device.type
        if where != "cpu":  # ranks that differ in this would be in two engines
            call = call._replace(operation=f"{call.operation} on {where}")

        def run() -> T:
            told = self._agree(call, facts)
            try:
                engine = self._engine = self._engine or self._host.open(self._context, self._ranks, call)
                seconds = call.deadline - self._host.now()
                with engine.limited(seconds, lambda: self._host.look_around(call.deadline, self._context, self._ranks)):
                    return act(engine, told)
            except EngineFailed as failure:
                _forget_operation(failure)
                self._host.explain(failure, call, self._context, self._ranks)

        return self._in_turn(call, run)

    def _in_turn(self, call: Call, act: Callable[[], T]) -> T:
        number = call.sequence
        if not self._turnstile.is_open_to(number):
            self._turnstile.enter(number, lambda: self._host.look_around(call.deadline, self._context, self._ranks))
        try:
            self._host.check(self._context)
            if self._interrupted is not None:
                raise PeerFailed(self._host.rank, f"its operation #{self._interrupted} was interrupted")
            return act()
        except BaseException:
            self._interrupted = self._interrupted or number
            self.close()
            raise
        finally:
            self._turnstile.leave(number)


def _forget_operation(failure: BaseException) -> None:
    """Lets go of what the functions that an error came through had in hand: the operation holds the connections."""
    error: BaseException | None = failure
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__
