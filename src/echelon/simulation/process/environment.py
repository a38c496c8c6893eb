"""Environment variables, working folder and attributes of modules, of which each simulated rank has its own."""

from __future__ import annotations

import _posixsubprocess
import inspect
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

from echelon.replacements import Replacement, calling
from echelon.simulation.process.state import State

_Variables: TypeAlias = dict[Any, Any]

_ENVIRONMENT = 5
"""Place of the environment among the arguments of `_posixsubprocess.fork_exec`."""


def torchrun_variables(rank: int, hosts: Sequence[int]) -> dict[str, str]:
    """Returns the variables that torchrun sets for a rank.

    Args:
        rank: Rank in the world.
        hosts: Number of each rank's host.
    """
    host = hosts[rank]
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(hosts)),
        "LOCAL_RANK": str(hosts[:rank].count(host)),
        "LOCAL_WORLD_SIZE": str(hosts.count(host)),
        "GROUP_RANK": str(host),
        "GROUP_WORLD_SIZE": str(len(set(hosts))),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(len(hosts)),
        "ROLE_NAME": "default",
        # Without TORCHELASTIC_USE_AGENT_STORE: no agent serves a store.
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # No rank listens or connects there: torch's rendezvous is replaced, see `torch_distributed`.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


class Environment(State):
    """Environment of each rank: that of the process, and the variables that torchrun sets.

    C code sees the environment of the process, with the changes of all ranks.
    """

    def __init__(self, variables: Callable[[int], Mapping[str, str]]) -> None:
        """Takes a function that returns the further variables of a rank."""
        self._variables = variables
        # The mapping behind `os.environ`. Exchanging it reaches all who hold `os.environ` itself.
        self._outside: _Variables = os.environ._data  # type: ignore[attr-defined] # the only way to exchange all at once

    def first(self, rank: int) -> _Variables:  # noqa: D102
        # The mapping behind `os.environ` holds bytes.
        variables = {os.fsencode(name): os.fsencode(value) for name, value in self._variables(rank).items()}
        return {**self._outside, **variables}

    def take(self) -> _Variables:  # noqa: D102
        return os.environ._data  # type: ignore[attr-defined, no-any-return] # as above

    def put(self, state: _Variables) -> None:  # noqa: D102
        # `os.environb` has the same variables as bytes, behind a mapping of its own.
        os.environ._data = os.environb._data = state  # type: ignore[attr-defined] # as above

    def finish(self, states: Sequence[_Variables]) -> None:
        """Takes back the changes of ranks that C code sees."""
        outside = self._outside
        changed = {
            name for state in states for name in outside.keys() | state.keys() if outside.get(name) != state.get(name)
        }
        # Past `os.environ`, which has the values from before already, other than C code.
        for name in changed:
            if name in outside:
                os.putenv(name, outside[name])
            else:
                os.unsetenv(name)


class WorkingFolder(State):
    """Working folder. Threads that are no ranks see that of the rank whose program runs."""

    def take(self) -> str:  # noqa: D102
        try:
            return os.getcwd()
        except FileNotFoundError:  # it was removed
            return ""

    def put(self, state: str) -> None:  # noqa: D102
        if state and state != self.take():
            with suppress(FileNotFoundError):
                os.chdir(state)


def children_with_environment(is_rank: Callable[[], bool]) -> list[Replacement]:
    """Gives a process that a rank starts the environment of this rank.

    By default C code hands on its own environment, which has the changes of all ranks and lacks their first variables.

    Args:
        is_rank: Whether the calling thread is a rank.
    """

    def starting(popen: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(popen)

        def start(*args: Any, **kwargs: Any) -> None:
            call = signature.bind(*args, **kwargs)
            if is_rank() and call.arguments.get("env") is None:
                call.arguments["env"] = os.environ.copy()
            popen(*call.args, **call.kwargs)

        return start

    def start_python(fork_exec: Callable[..., int], *args: Any) -> int:
        """Starts a process of multiprocessing by "spawn", which gives no environment."""
        if is_rank() and args[_ENVIRONMENT] is None:
            variables = [name + b"=" + value for name, value in os.environb.items()]
            args = (*args[:_ENVIRONMENT], variables, *args[_ENVIRONMENT + 1 :])
        return fork_exec(*args)

    def run_command(system: Callable[[Any], int], command: Any) -> int:
        if not is_rank():
            return system(command)
        status = subprocess.call(command, shell=True)  # that is what os.system does
        # As wait() gives it: a signal in the low bits, an exit status above.
        return -status if status < 0 else status << 8

    return [
        Replacement(subprocess.Popen, "__init__", starting),
        Replacement(_posixsubprocess, "fork_exec", calling(start_python)),
        Replacement(os, "system", calling(run_command)),
    ]


class Attribute(NamedTuple):
    """Attribute of a module or a class, and the value with which a rank begins."""

    owner: Any
    name: str
    first: Callable[[int], Any] | None = None
    """Function of the rank. None: the value from before the simulation."""


class Attributes(State):
    """Attributes of modules and classes."""

    def __init__(self, attributes: Sequence[Attribute]) -> None:
        self._attributes = attributes

    def first(self, rank: int) -> list[Any]:  # noqa: D102
        return [
            outside if attribute.first is None else attribute.first(rank)
            for attribute, outside in zip(self._attributes, self.take(), strict=True)
        ]

    def take(self) -> list[Any]:  # noqa: D102
        return [getattr(attribute.owner, attribute.name) for attribute in self._attributes]

    def put(self, state: Sequence[Any]) -> None:  # noqa: D102
        for attribute, value in zip(self._attributes, state, strict=True):
            setattr(attribute.owner, attribute.name, value)
