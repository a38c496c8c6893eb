"""Call of the function that each rank runs: `fn(group, *args)` where its signature takes that, else `fn(*args)`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from echelon.arguments import named, shown
from echelon.errors import LaunchError
from echelon.group.group import ProcessGroup

RANK_NAMES = ("rank", "local_rank")
"""Names by which a function made for torch.multiprocessing.spawn takes its rank."""

_KEYWORDS = "fn gets keyword arguments by functools.partial, as in functools.partial(fn, lr=1)"
OF_OTHER_LAUNCHERS = {
    **dict.fromkeys(("nprocs", "num_ranks", "num_processes", "n", "np"), "world_size"),
    "kwargs": f" {_KEYWORDS}",
    "join": " the call returns once all ranks have ended: leave it out",
}
"""Arguments that other libraries have for a run of a function on ranks, with advice."""

_GROUP = object()
"""Stands for the group, which does not exist yet when the signature is checked."""


class RankCall(NamedTuple):
    """Call that each rank makes: a function, its arguments, and whether the group comes before them."""

    function: Callable[..., Any]
    args: tuple[object, ...]
    takes_group: bool
    hint: str = ""
    """Note on an error of a function that may not have expected the group."""

    def run(self, group: ProcessGroup) -> Any:
        """Calls the function on this rank and returns its result.

        Raises:
            LaunchError: the result is a coroutine, as of a lambda that calls an async function.
        """
        result = self._called(group)
        if inspect.iscoroutine(result):
            result.close()  # Python would warn that nobody awaited it
            raise LaunchError(
                f"fn returned the coroutine {result.__name__}, of which no line has run: give a function that calls "
                f"asyncio.run({result.__name__}(...))"
            )
        return result

    def _called(self, group: ProcessGroup) -> Any:
        if not self.takes_group:
            return self.function(*self.args)
        try:
            return self.function(group, *self.args)
        except (TypeError, AttributeError) as error:
            if self.hint and ProcessGroup.__name__ in str(error):
                error.add_note(self.hint)
            raise


def rank_call(function: object, args: object) -> RankCall:
    """Returns the call that each rank makes.

    It is `function(group, *args)` where the signature takes that, and `function(*args)` where only that fits. A
    function of `*args`, or with one optional parameter, takes both, and gets the group. So does a function without a
    signature, such as some builtins. A first parameter with a default value of its own, as in `lambda lr=0.1: ...`, is
    no group.

    Args:
        function: the function of the user.
        args: its arguments, without the group.

    Raises:
        LaunchError: `function` is not callable, or is a model, a generator or an async function; `args` is no sequence;
            neither call fits; or the first parameter is named `rank` or `local_rank`.
    """
    if not callable(function):
        raise LaunchError(f"fn={function!r}: give the function that each rank runs, as fn(group, *args) or fn(*args)")
    if isinstance(function, nn.Module) or (isinstance(function, type) and issubclass(function, nn.Module)):
        raise LaunchError(f"fn is {named(function)}: give the function that each rank runs, which makes the model")
    # A call of either would run nothing, on all ranks without an error.
    code: Any = function
    while isinstance(code, functools.partial):
        code = code.func
    name = _name(code)
    called = (code, type(code).__call__)
    if any(map(inspect.iscoroutinefunction, called)):
        raise LaunchError(f"fn={name} is an async function: give one that calls asyncio.run({name}(...))")
    if any(inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each) for each in called):
        raise LaunchError(f"fn={name} is a generator, because it has a yield: give a function that returns its result")
    check_no_keywords("args", args)
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise LaunchError(f"args={args!r}: give a tuple of the arguments that come after the group, such as (x,)")
    args = tuple(args)
    signatures = _signatures(function)
    if signatures:
        check_no_rank(function, signatures[-1])
    # All signatures first, because a wrapper of (*args, **kwargs) takes any call. Then the wrapper's own alone: it may
    # add arguments, as unittest.mock.patch does, or leave some out.
    of_group = (False,) if any(map(_begins_with_a_value, signatures)) else (True, False)
    for required in (signatures, signatures[:1]):
        for takes_group in of_group:
            given = (_GROUP, *args) if takes_group else args
            if all(_fits(signature, given) for signature in required):
                is_ambiguous = takes_group and all(_fits(signature, args) for signature in required)
                return RankCall(function, args, takes_group, _hint(_name(function)) if is_ambiguous else "")
    name = _name(function)
    texts = [shown(value) for value in args]
    with_group, without = f"{name}({', '.join(['group', *texts])})", f"{name}({', '.join(texts)})"
    raise LaunchError(
        f"fn={name} takes neither {with_group} nor {without}: its signature is {name}{_plain(signatures[0])}: "
        "correct args, or the function's parameters"
    )


def check_no_keywords(name: str, value: object) -> None:
    """Raises LaunchError if an argument is a mapping, as of keyword arguments for the function."""
    if isinstance(value, Mapping):
        raise LaunchError(f"{name}={shown(value)}: {_KEYWORDS}")


def check_no_rank(function: Callable[..., Any], signature: inspect.Signature) -> None:
    """Raises LaunchError if the first parameter is named as a rank, which neither call would give the function."""
    positional = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if positional and positional[0] in RANK_NAMES:
        name = _name(function)
        further = {1: "", 2: ", n"}.get(len(positional), ", n, ...")
        raise LaunchError(
            f"fn={name} takes {positional[0]!r} first, as for torch.multiprocessing.spawn, and would get the group "
            f"there: give `lambda: {name}(int(os.environ['RANK']){further})`, for processes as a def at the top level "
            "of a module"
        )


def _signatures(function: Callable[..., Any]) -> list[inspect.Signature]:
    """Returns the signature of a function, then that of the function that it wraps. Empty if it has none."""
    try:
        return [inspect.signature(function, follow_wrapped=False), inspect.signature(function)]
    except (TypeError, ValueError):  # some builtins and classes written in C
        return []


def _hint(name: str) -> str:
    return (
        f"{name} got the group before args, as it takes one argument more: give args for all of its parameters, or "
        f"functools.partial({name}, ...) with the others by name"
    )


def _begins_with_a_value(signature: inspect.Signature) -> bool:
    """Whether the first parameter has a default value other than None, which stands for no group."""
    first = next(iter(signature.parameters.values()), None)
    return first is not None and first.default is not first.empty and first.default is not None


def _fits(signature: inspect.Signature, given: Sequence[object]) -> bool:
    try:
        signature.bind(*given)
    except TypeError:
        return False
    return True


def _name(function: object) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def _plain(signature: inspect.Signature) -> str:
    """Returns the text of a signature, without annotations, on one line."""
    parameters = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    text = str(signature.replace(parameters=parameters, return_annotation=signature.empty))
    return " ".join(text.split())
