"""Process that simulated ranks share: its functions act for the calling rank, and its states are exchanged."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from echelon.errors import LaunchError
from echelon.replacements import Replacement, replaced
from echelon.simulation.process.calls import ProcessCalls
from echelon.simulation.process.environment import (
    Attribute,
    Attributes,
    Environment,
    WorkingFolder,
    torchrun_variables,
)
from echelon.simulation.process.library_state import LibraryState, Settings, shared_collections
from echelon.simulation.process.modules import MainModule
from echelon.simulation.process.patches import Patches
from echelon.simulation.process.precision import Precisions
from echelon.simulation.process.random_state import RandomState, on_one_core
from echelon.simulation.process.state import ProgramWithStates, RankStates, State
from echelon.simulation.process.torch_distributed import TorchDistributed

if TYPE_CHECKING:
    from echelon.simulation.world import World

_ALLOCATIONS = 100_000
"""Number of new objects between two runs of the garbage collector. Python's default is 700."""

# A simulation replaces functions and states of the process, of which there is one.
_is_simulating = threading.Lock()


@contextmanager
def only_simulation() -> Iterator[None]:
    """Inside, this is the only simulation of the process.

    Raises:
        LaunchError: another one is running.
    """
    if not _is_simulating.acquire(blocking=False):
        raise LaunchError(
            "a simulation is running in this process already: run one after the other, or in processes of their own"
        )
    try:
        yield
    finally:
        _is_simulating.release()


class SharedProcess:
    """Process that the ranks of a world share."""

    def __init__(
        self, world: World, torch_distributed: TorchDistributed, fn: object, hosts: Sequence[int], seed: int = 0
    ) -> None:
        """Notes the present states, with which the ranks begin.

        Args:
            world: world of the ranks.
            torch_distributed: their torch.distributed.
            fn: function that each of them runs.
            hosts: number of each rank's host, as its environment has it.
            seed: seed of their random states.
        """
        scheduler, has_own_modules = world.scheduler, isinstance(fn, ProgramWithStates)
        self._world = world
        self.torch = torch_distributed
        self.calls = ProcessCalls(scheduler.rank_here, len(hosts), has_own_modules)
        self._patches = Patches(scheduler.is_running_here, has_own_modules)
        self._states = [self._patches, *_states(torch_distributed, seed, hosts)]
        if isinstance(fn, ProgramWithStates):
            self._states += fn.states()

    @contextmanager
    def entered(self, *contexts: AbstractContextManager[object]) -> Iterator[None]:
        """Inside, ranks may run. Afterwards the process is as before.

        Args:
            contexts: further contexts, which are entered in order.
        """
        num_threads = torch.get_num_threads()
        self._world.rank_states = rank_states = RankStates(self._states, len(self._world.hosts))
        try:
            with ExitStack() as stack:
                for each in (
                    _rarer_collections(),
                    on_one_core(),
                    replaced(_without_locks()),
                    self.torch.installed(),
                    self.calls.replaced(),
                    *contexts,
                    self._patches.noted(),
                ):
                    stack.enter_context(each)
                yield
        finally:
            rank_states.restore()
            torch.set_num_threads(num_threads)

    def notes(self) -> Iterator[str]:
        """Yields sentences about states that ranks have shared, though processes would not."""
        return (note for state in self._states for note in state.notes)


def _states(torch_distributed: TorchDistributed, seed: int, hosts: Sequence[int]) -> list[State]:
    """Returns the states of the process that each rank has for itself."""
    # Those of warnings, as `catch_warnings` puts back what it found, and a rank may wait inside of it.
    names = [(sys, "excepthook"), (warnings, "showwarning"), (warnings, "_showwarnmsg_impl")]
    attributes = [*(Attribute(owner, name) for owner, name in names), *torch_distributed.attributes()]
    attributes += shared_collections()
    variables = functools.partial(torchrun_variables, hosts=hosts)
    return [
        RandomState(seed),
        Environment(variables),
        WorkingFolder(),
        Attributes(attributes),
        MainModule(),
        Precisions(),
        Settings(),
        LibraryState(),
    ]


@contextmanager
def _rarer_collections() -> Iterator[None]:
    """Inside, the garbage collector runs rarely."""
    # A simulation makes many small objects, and few reference cycles. With the default threshold half of its time goes
    # into collections, which traverse all objects, most of them torch's: 30 us per message.
    before = gc.get_threshold()
    gc.set_threshold(_ALLOCATIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _without_locks() -> list[Replacement]:
    """Lets `functools.cached_property` compute without its lock.

    Python 3.11 has one lock for a property of all objects of a class. A rank that communicates in the property, as
    Transformers' `TrainingArguments` does, would hold it over its wait. Python 3.12 has none.
    """
    if sys.version_info >= (3, 12):
        return []
    # A property of the class comes before the attribute of the same name that each cached property has.
    lock = property(lambda _: nullcontext(), _keep_lock)
    return [Replacement(functools.cached_property, "lock", lambda _: lock, may_be_missing=True)]


def _keep_lock(cached: Any, lock: object) -> None:
    cached.__dict__["lock"] = lock
