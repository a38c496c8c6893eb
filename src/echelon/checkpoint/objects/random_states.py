"""States of random generators, of the process and of the user."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from echelon.arguments import named
from echelon.errors import InvalidArgument

# Python's state is a tuple of 625 numbers: as an array it takes a line of the manifest, not 625.


def process_state() -> dict[str, Any]:
    """Returns the states of `random`, `numpy.random` and torch, for the CPU and this rank's GPU."""
    state = {"python": _of_python(random.getstate()), "numpy": np.random.get_state(legacy=False)}
    state["torch"] = torch.get_rng_state()
    # Asking a GPU for its state would initialize CUDA in programs that never use it.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_process_state(state: Mapping[str, Any]) -> None:
    """Sets the states that `process_state` returned."""
    random.setstate(_to_python(state["python"]))
    kind = np.random.get_state(legacy=False)["bit_generator"]
    if kind == state["numpy"]["bit_generator"]:  # the program may have installed another one since
        np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    # A run of GPUs may go on without one.
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def states_of(generators: object, where: str = "generators") -> Any:
    """Returns the states of one generator, or of a list or dict of generators, in the same form.

    Raises:
        InvalidArgument: something else is among them.
    """
    if isinstance(generators, Mapping):
        return {str(key): states_of(one, f"{where}[{key!r}]") for key, one in generators.items()}
    if isinstance(generators, list | tuple):
        return [states_of(one, f"{where}[{index}]") for index, one in enumerate(generators)]
    if isinstance(generators, torch.Generator):
        return {"torch": generators.get_state()}
    if isinstance(generators, np.random.Generator):
        return {"numpy": generators.bit_generator.state}
    if isinstance(generators, np.random.RandomState):
        return {"numpy": generators.get_state(legacy=False)}
    if isinstance(generators, random.Random):
        return {"python": _of_python(generators.getstate())}
    raise InvalidArgument(
        f"{where} is {named(generators)}: give generators of torch, numpy or random, alone or in a list or dict"
    )


def set_states(generators: object, states: Any, where: str = "generators") -> None:
    """Sets the states that `states_of` returned for generators in the same form.

    Raises:
        InvalidArgument: the form or the kind of a generator is another one.
    """
    if isinstance(generators, Mapping):
        _check_form(set(map(str, generators)), set(states) if isinstance(states, Mapping) else None, where)
        for key, one in generators.items():
            set_states(one, states[str(key)], f"{where}[{key!r}]")
        return
    if isinstance(generators, list | tuple):
        _check_form(len(generators), len(states) if isinstance(states, list) else None, where)
        for index, (one, state) in enumerate(zip(generators, states, strict=True)):
            set_states(one, state, f"{where}[{index}]")
        return
    kind, state = _only(states)
    if kind == "torch" and isinstance(generators, torch.Generator):
        generators.set_state(state)
    elif kind == "numpy" and isinstance(generators, np.random.Generator):
        generators.bit_generator.state = state
    elif kind == "numpy" and isinstance(generators, np.random.RandomState):
        generators.set_state(state)
    elif kind == "python" and isinstance(generators, random.Random):
        generators.setstate(_to_python(state))
    else:
        raise InvalidArgument(
            f"{where} is {named(generators)}, and the checkpoint has a generator of {kind or 'nothing'} there: pass "
            "generators in the form in which they were saved"
        )


def _only(states: object) -> tuple[str, Any]:
    """Returns the kind and the state of one generator. Empty and None if there is something else."""
    if isinstance(states, Mapping) and len(states) == 1:
        return next(iter(states.items()))
    return "", None


def _check_form(live: object, saved: object, where: str) -> None:
    if live != saved:
        raise InvalidArgument(
            f"{where} has {live} here and {saved} in the checkpoint: pass generators in the form in which they were "
            "saved"
        )


def _of_python(state: tuple[Any, ...]) -> list[Any]:
    version, numbers, gauss = state
    return [version, np.array(numbers, dtype=np.uint32), gauss]


def _to_python(state: list[Any]) -> tuple[Any, ...]:
    version, numbers, gauss = state
    return version, tuple(numbers.tolist()), gauss
