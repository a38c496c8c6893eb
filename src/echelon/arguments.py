"""Checks of arguments that many calls share: numbers, world sizes, timeouts, names from a list, files. Pure."""

from __future__ import annotations

import difflib
import errno
import functools
import inspect
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any, TypeGuard, TypeVar, cast

from echelon.errors import EchelonError, FileError, InvalidArgument, InvalidWorldSize
from echelon.wording import in_words

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])
_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def is_number(value: object) -> TypeGuard[Real]:
    """Whether a value is a number. A bool is an int in Python, and a mistake."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_amount(value: object) -> bool:
    """Whether a value is a finite number of at least 0, such as seconds."""
    return is_number(value) and 0 <= float(value) < math.inf


def is_factor(value: object) -> bool:
    """Whether a value is a finite number above 0."""
    return is_amount(value) and value != 0


def is_count(value: object, least: int = 0) -> TypeGuard[int]:
    """Whether a value is a whole number of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_integral(value: object, least: int = 0) -> TypeGuard[int]:
    """Whether a value is a whole number of at least `least`, also one of NumPy."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def is_iterable(value: object) -> TypeGuard[Iterable[Any]]:
    """Whether a value can be gone through. Text counts as one value."""
    # Without `iter`, by which a loader would start its workers. A tensor without dims has `__iter__`, too.
    has_items = hasattr(type(value), "__iter__") or hasattr(type(value), "__getitem__")
    return has_items and getattr(value, "ndim", None) != 0 and not isinstance(value, str | bytes)


# A number above these limits is a slip, or comes from a wrong variable.
MAX_WORLD_SIZE = 65_536
"""Ranks of one world."""
MAX_LOCAL_WORLD_SIZE = 4_096
"""Ranks of one world on one host."""


def check_world_size(world_size: object, name: str = "world_size", maximum: int = MAX_WORLD_SIZE) -> None:
    """Raises InvalidWorldSize unless `world_size`, given as `name`, is a number of ranks from 1 to `maximum`."""
    if not is_count(world_size, least=1):
        if callable(world_size):
            raise InvalidWorldSize(f"{name} is {named(world_size)}: the function comes first, then the number of ranks")
        raise InvalidWorldSize(f"{name}={world_size!r}: a world has at least 1 rank: give 1 or more")
    if world_size > maximum:
        where = "a world" if maximum == MAX_WORLD_SIZE else "one host"
        raise InvalidWorldSize(f"{name}={world_size}: {where} has at most {maximum:,} ranks: give a smaller number")


def check_seconds(timeout: object) -> float:
    """Returns the timeout of one call.

    Raises:
        InvalidArgument: `timeout` is not a number of seconds of at least 0.
    """
    # Exact types first: an isinstance of numbers.Real takes ten times as long. nan fails the comparison.
    if (type(timeout) is float or type(timeout) is int) and timeout >= 0:
        return timeout
    if is_number(timeout) and float(timeout) >= 0:  # numpy's, fractions
        return float(timeout)
    raise InvalidArgument(f"timeout={shown(timeout)}: use a number of seconds, 0 or more, or None for the group's own")


def check_default_timeout(timeout: object, error: type[EchelonError]) -> float:
    """Returns the default timeout of a group's calls. Raises `error` unless it is a number above 0."""
    if is_number(timeout) and float(timeout) > 0:
        return float(timeout)
    raise error(f"timeout={shown(timeout)}: use a number of seconds above 0")


def check_bucket_mb(size: object) -> float:
    """Returns the size of a bucket in mebibytes. Raises InvalidArgument unless it is a number above 0."""
    if is_number(size) and float(size) > 0:
        return float(size)
    raise InvalidArgument(f"bucket_mb={shown(size)}: use a size in mebibytes above 0, such as 25")


def shown(value: object) -> str:
    """Returns the repr of a wrong value. Only its type if the repr is long or has several lines, as for tensors."""
    text = repr(value)
    return text if len(text) <= 100 and "\n" not in text else f"<{type(value).__name__}>"


def named(value: object) -> str:
    """Describes a wrong argument in a few words: "None", "2 (int)", "the class Linear", "of type Tensor"."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value).__name__
    return f"{value!r} ({kind})" if isinstance(value, str | int | float) else f"of type {kind}"


def choices(name: object, names: Iterable[str], otherwise: str = "use one of") -> str:
    """Returns the end of an error about an unknown name: the closest known name, if any, then all names.

    Several names that begin with the unknown one are all close.

    Args:
        name: the unknown name, of any type.
        names: all known names.
        otherwise: begins the list if no name is close.
    """
    by_lower = {each.lower(): each for each in names}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1) if isinstance(name, str) else []
    begun = [each for each in by_lower if each.startswith(name.lower())] if isinstance(name, str) and near else []
    meant = " or ".join(by_lower[each] for each in (begun if len(begun) > 1 else near))
    listed = ", ".join(by_lower.values())
    return f"did you mean {meant}? There are {listed}" if meant else f"{otherwise} {listed}"


def no_attribute(owner: str, name: str, known: Iterable[str], meant: Mapping[str, str] | None = None) -> AttributeError:
    """Returns the error for an attribute that an object lacks, with the nearest one it has.

    Args:
        owner: the object, such as "module 'echelon'".
        name: the missing attribute.
        known: attributes that it has.
        meant: attributes by names that other libraries give them, and texts that begin with a space as advice.
    """
    advice = _advice(name, known, meant)
    text = f"{owner} has no attribute {name!r}{': ' if advice else ''}{advice}"
    return AttributeError(text)


def refuse_others(**meant: str) -> Callable[[_Decorated], _Decorated]:
    """Returns a decorator of a function, or of a class for its constructor, that refuses wrong arguments with advice.

    It raises InvalidArgument for an unknown keyword, for an argument that is given twice or is missing, and for a value
    beyond the last place. Python's own errors do not say what to write.

    Args:
        meant: as for `no_attribute`: arguments by names that other libraries give them, and advice.
    """

    def decorate(decorated: _Decorated) -> _Decorated:
        call: Callable[..., Any] = decorated.__init__ if isinstance(decorated, type) else decorated  # type: ignore[misc]
        parameters = inspect.signature(call).parameters.values()
        known = [each.name for each in parameters if each.name != "self" and each.kind not in _REST]
        named_only = [each.name for each in parameters if each.kind == each.KEYWORD_ONLY]
        kinds = {each.kind for each in parameters}
        places = [each.name for each in parameters if each.kind == each.POSITIONAL_OR_KEYWORD]
        required = _required(call)
        most = math.inf if inspect.Parameter.VAR_POSITIONAL in kinds else len(places)
        takes_any = inspect.Parameter.VAR_KEYWORD in kinds

        @functools.wraps(call)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for name in kwargs:
                if name in places[: len(args)]:
                    raise InvalidArgument(
                        f"{name} is given by its place and by its name: the order is {_order(places)}"
                    )
                if name not in known and (name in meant or not takes_any):
                    raise InvalidArgument(no_argument(name, known, meant))
            if len(args) > most:
                value = args[int(most)]
                keywords = meant.get("kwargs", "").strip() if isinstance(value, Mapping) else ""
                names = f", one of {', '.join(named_only)}" if named_only else ""
                named_ones = f"give it by its name{names}" if names or takes_any else ""
                order = _order(places)
                advice = keywords or named_ones or (f"the order is {order}" if order else "leave it out")
                raise InvalidArgument(f"{shown(value)} has no place here: {advice}")
            if missing := [name for name in required if name not in places[: len(args)] and name not in kwargs]:
                raise InvalidArgument(missing_arguments(call, missing))
            return call(*args, **kwargs)

        if isinstance(decorated, type):
            decorated.__init__ = checked  # type: ignore[misc]
            return decorated
        return cast("_Decorated", checked)

    return decorate


def no_argument(name: str, known: Collection[str], meant: Mapping[str, str] | None = None) -> str:
    """Returns the text of an error for an unknown keyword. Arguments as for `no_attribute`."""
    others = choices(name, known) if known else "leave it out"
    return f"{name} is no argument here: {_advice(name, known, meant) or others}"


def missing_arguments(call: Callable[..., Any], missing: Sequence[str]) -> str:
    """Returns the text of an error for a call of a function without some required arguments."""
    required = _required(call)
    name = call.__qualname__.removesuffix(".__init__").rpartition(".")[2]
    more = ", ..." if len(_parameters(call)) > len(required) else ""
    are = "is" if len(missing) == 1 else "are"
    return f"{in_words(missing)} {are} missing: write {name}({', '.join(required)}{more})"


def _required(call: Callable[..., Any]) -> list[str]:
    """Returns the arguments that a function cannot do without."""
    return [each.name for each in _parameters(call) if each.default is each.empty and each.kind not in _REST]


def _parameters(call: Callable[..., Any]) -> list[inspect.Parameter]:
    return [each for each in inspect.signature(call).parameters.values() if each.name != "self"]


def _order(places: Iterable[str]) -> str:
    return ", ".join(each for each in places if each != "self")


def _advice(name: str, known: Iterable[str], meant: Mapping[str, str] | None) -> str:
    """Returns the advice on an unknown name, as `no_attribute` words it. Empty if there is none."""
    by_lower = {each.lower(): each for each in known if not each.startswith("_")}
    near = [by_lower[each] for each in difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.7)]
    other = (meant or {}).get(name, "")
    return other.strip() if other.startswith(" ") else f"did you mean {other or near[0]}?" if other or near else ""


def check_path(path: object, wanted: str = "the name of a file, such as 'plan.svg'") -> str:
    """Returns a path as text. Raises InvalidArgument if it is not a path, with the advice to give `wanted`."""
    if not isinstance(path, str | os.PathLike):
        raise InvalidArgument(f"path is {named(path)}: give {wanted}")
    name = os.fsdecode(path)
    if "\0" in name:
        raise InvalidArgument(f"path is {name!r}, with a null character: give {wanted}")
    return name


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Checks an output path, and maps errors of writing it inside the with block to FileError.

    Raises:
        InvalidArgument: `path` is not a path.
        FileError: it is a path of Windows, its folder is missing, or it cannot be written to.
    """
    name = check_path(path)
    # Legal as a name, but the file would lie in the current folder.
    if "\\" in os.path.basename(name) and not os.path.lexists(name):
        raise FileError(f"cannot write {name}: it is a path of Windows; separate folders with /, as in plans/plan.svg")
    try:
        yield
    except OSError as error:
        raise FileError(f"cannot write {name}: {_reason(name, error)}") from None


def check_writable(path: str | os.PathLike[str]) -> None:
    """Checks an output path before the work whose result is written there.

    Raises:
        InvalidArgument, FileError: as `writing` does.
    """
    with writing(path):
        name = os.fspath(path)
        os.stat(os.path.join(os.path.dirname(name), "."))  # raises for a folder that is missing, or a file
        place = name if os.path.lexists(name) else os.path.dirname(name) or "."
        reason = errno.EISDIR if os.path.isdir(name) else 0 if os.access(place, os.W_OK) else errno.EACCES
        if reason:
            raise OSError(reason, os.strerror(reason))


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Maps errors of reading a file inside the with block to FileError.

    Raises:
        InvalidArgument: `path` is not a path.
        FileError: there is no such file, or it cannot be read.
    """
    name = check_path(path)
    try:
        yield
    except FileNotFoundError:
        folder = os.path.dirname(os.path.abspath(name))
        raise FileError(f"cannot read {name}: there is no such file in {folder}; give the path of one") from None
    except OSError as error:
        raise FileError(f"cannot read {name}: {error.strerror}; give a file that can be read") from None


def _reason(name: str, error: OSError) -> str:
    folder = os.path.dirname(name)
    if isinstance(error, FileNotFoundError) and folder and not os.path.isdir(folder):
        return f"the folder {folder} does not exist; make it first: mkdir -p {folder}"
    return f"{error.strerror}; give a place that can be written to"
