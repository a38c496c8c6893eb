"""Decorator of tests that run on simulated ranks. It needs no pytest."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import BoundArguments, Signature
from typing import Any

from echelon.arguments import check_world_size, choices, is_count, refuse_others, shown
from echelon.call_site import is_own
from echelon.errors import EchelonError, LaunchError
from echelon.group.group import ProcessGroup
from echelon.launch.call import RANK_NAMES
from echelon.simulation import simulate

_OPTIONS = tuple(name for name in inspect.signature(simulate).parameters if name not in ("fn", "world_size", "args"))


@refuse_others()
def simulated(
    world_size: int, *, seeds: int | Iterable[int] | None = None, **options: Any
) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Returns a decorator of a test: its body runs on every rank of a simulated world.

    The test keeps its fixtures and parameters, which are the same objects on every rank. A parameter named `group` is
    no fixture: it gets the rank's group. The decorated test can also be called without pytest, and returns None.

        @echelon.testing.simulated(world_size=4, seeds=20)
        def test_the_sum(group, tmp_path): ...

    Args:
        world_size: number of ranks.
        seeds: number of runs, with the seeds 0, 1, ..., or the seeds themselves. The exception of the first failing
            seed has a note with the seed. None: one run.
        options: further arguments of `echelon.simulate`, by name: `seed`, `network`, `costs`, `faults`, `timeout`, ...

    Raises:
        InvalidWorldSize, LaunchError: an argument is invalid, or the decorated object is not an ordinary function.
    """
    if callable(world_size):
        raise LaunchError("@simulated has no number of ranks: write @simulated(world_size=4)")
    check_world_size(world_size)
    for name in options:
        if name not in _OPTIONS:
            raise LaunchError(f"@simulated(..., {name}=) is unknown: {choices(name, ('seeds', *_OPTIONS))}")
    numbers = None if seeds is None else _numbers(seeds)
    if numbers is not None and "seed" in options:
        raise LaunchError("@simulated(..., seeds=, seed=) has both: give seed= to replay one run, seeds= for several")

    def decorate(test: Callable[..., object]) -> Callable[..., None]:
        signature = _check_test(test)
        seen = _without_group(signature)

        @functools.wraps(test)
        def run(*args: object, **kwargs: object) -> None:
            __tracebackhide__ = True  # pytest leaves this frame out
            body = _body(test, signature, seen.bind_partial(*args, **kwargs))
            if numbers is None:
                _simulate(body, world_size, options)
            for count, seed in enumerate(numbers or ()):
                try:
                    _simulate(body, world_size, {**options, "seed": seed})
                except BaseException as error:  # pytest.fail raises no Exception
                    error.add_note(_replay(world_size, options, seed, count))
                    raise

        run.__signature__ = seen  # type: ignore[attr-defined] # read by inspect.signature, and so by pytest
        return run

    return decorate


def _numbers(seeds: int | Iterable[int]) -> Sequence[int]:
    """Returns the seeds of all runs. Raises LaunchError if there are none."""
    if isinstance(seeds, int):
        numbers: Sequence[int] = range(seeds) if is_count(seeds) else ()
    else:
        numbers = tuple(seeds) if isinstance(seeds, Iterable) else ()
    if not numbers or not all(map(is_count, numbers)):
        raise LaunchError(f"seeds={shown(seeds)}: give the number of runs, at least 1, or seeds such as range(10, 20)")
    return numbers


def _check_test(test: object) -> Signature:
    """Returns the signature of a test. Raises LaunchError unless it is a function that can run on ranks."""
    if not inspect.isfunction(test):
        raise LaunchError(f"@simulated is given {shown(test)}: put it next to the def of a test function")
    name = test.__name__
    if inspect.iscoroutinefunction(test) or inspect.isasyncgenfunction(test) or inspect.isgeneratorfunction(test):
        raise LaunchError(f"@simulated {name} is async or yields, so no rank would run its body: make it a plain def")
    signature = inspect.signature(test)
    first = next((each for each in signature.parameters if each not in ("self", "cls")), "")
    if first in RANK_NAMES:
        raise LaunchError(
            f"@simulated {name} takes {first!r} first, as for torch.multiprocessing.spawn, and would get one value on "
            f"all ranks: use `group.rank` or `int(os.environ['RANK'])`; to run such a program, call "
            "`echelon.simulate(lambda: main(int(os.environ['RANK']), n), n)`"
        )
    return signature


def _without_group(signature: Signature) -> Signature:
    # pytest would look for a fixture of that name.
    return signature.replace(parameters=[each for name, each in signature.parameters.items() if name != "group"])


def _body(test: Callable[..., object], signature: Signature, given: BoundArguments) -> Callable[[ProcessGroup], object]:
    """Returns the function of a rank, which calls the test with the given arguments and its group."""

    def body(group: ProcessGroup) -> object:
        arguments = dict(given.arguments)
        if "group" in signature.parameters:
            arguments["group"] = group
        complete = BoundArguments(signature, arguments)
        return test(*complete.args, **complete.kwargs)

    return body


def _simulate(body: Callable[[ProcessGroup], object], world_size: int, options: Mapping[str, Any]) -> None:
    __tracebackhide__ = True
    try:
        simulate(body, world_size, **options)
    except BaseException as error:
        # Without the frames of the simulator, which comes before the test: pytest would print the source of each.
        inner = error.__traceback__
        while inner is not None and is_own(inner.tb_frame.f_code.co_filename):
            inner = inner.tb_next
        # A deadlock has no frame of the test, and its message names the lines. Other errors keep theirs.
        if inner is not None or isinstance(error, EchelonError):
            error.__traceback__ = inner
        raise


def _replay(world_size: int, options: Mapping[str, object], seed: int, count: int) -> str:
    more = "".join(f", {name}=..." for name in options)
    return (
        f"seed {seed} fails, after {count} that passed; to replay it: "
        f"@echelon.testing.simulated(world_size={world_size}{more}, seed={seed})"
    )
