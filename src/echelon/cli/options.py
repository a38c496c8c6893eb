"""Options of the commands: dataclasses as parameters, parsers of numbers, and their names in errors."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from fractions import Fraction
from typing import Annotated, Any, TypeAlias, TypeVar, cast

import typer
from typer.models import OptionInfo

from echelon.arguments import check_writable, choices
from echelon.cli.completion import completed
from echelon.errors import EchelonError, LaunchError, ScheduleError
from echelon.pipeline.plan.cost import Amount
from echelon.timeline.timeline import Time


def value(metavar: str, description: str) -> Any:
    """Returns typer's description of an option whose value is a text of the kind `metavar`."""
    return typer.Option(metavar=metavar, help=description)


Svg: TypeAlias = Annotated[str | None, value("FILE", "Draw the timeline as SVG.")]
Png: TypeAlias = Annotated[str | None, value("FILE", "Draw the timeline as PNG.")]
Html: TypeAlias = Annotated[str | None, value("FILE", "Write the timeline as a page with zoom and search.")]
Chrome: TypeAlias = Annotated[str | None, value("FILE", "Write the timeline as a Chrome trace (Perfetto).")]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_Options = TypeVar("_Options")


def command(function: Callable[[_Options], int | None]) -> Callable[..., int | None]:
    """Returns a function of a dataclass as a command with the fields as its parameters.

    The annotations of the fields are typer's. The docstring of the function is the help of the command. Its errors name
    arguments as they are typed.
    """
    # eval_str: annotations are strings here, by `from __future__ import annotations`.
    (parameter,) = inspect.signature(function, eval_str=True).parameters.values()
    options: type[_Options] = parameter.annotation

    def run(**given: object) -> int | None:
        try:
            return function(options(**given))
        except EchelonError as error:
            error.args = (as_typed(str(error), arguments_of(function)),)
            raise

    run.__doc__ = function.__doc__
    # typer knows no dataclasses, but it reads this signature instead of that of `run`.
    run.__signature__ = completed(inspect.signature(options, eval_str=True))  # type: ignore[attr-defined]
    return run


def options_of(command: Callable[..., object]) -> dict[str, bool]:
    """Returns the names of a command's options, long and short, each with whether a value follows."""
    return {
        option: each.annotation.__origin__ is not bool for each in _parameters(command) for option in _options(each)
    }


_OTHER_NAMES = {"num_ranks": "world_size", "chunks": "num_chunks"}
"""Names that functions have for the arguments of some options."""


def arguments_of(command: Callable[..., object]) -> dict[str, str]:
    """Returns the first option of each argument, by the names that the functions of a command have for it."""
    found = {each.name: options[0] for each in _parameters(command) if (options := _options(each))}
    return found | {other: found[name] for name, other in _OTHER_NAMES.items() if name in found}


def _parameters(command: Callable[..., object]) -> Iterable[inspect.Parameter]:
    parameters = inspect.signature(command, eval_str=True).parameters
    # As in `command`.
    options = next(iter(parameters.values())).annotation
    if is_dataclass(options):
        parameters = inspect.signature(cast("type", options), eval_str=True).parameters
    return parameters.values()


def _options(parameter: inspect.Parameter) -> list[str]:
    """Returns the names of a parameter's option. Empty for an argument."""
    found = [each for each in getattr(parameter.annotation, "__metadata__", ()) if isinstance(each, OptionInfo)]
    # Inside of Annotated, typer takes the first name for a default.
    names = [word for each in found for word in (each.default, *(each.param_decls or ())) if isinstance(word, str)]
    return names or [f"--{parameter.name.replace('_', '-')}"] * len(found)


def check_name(option: str, name: str | None, known: Iterable[str]) -> None:
    """Checks a name from a table before torch is imported, which takes seconds. Capitals make no difference.

    Raises:
        LaunchError: the name is not in the table. None is taken for an option that was not given.
    """
    if name is not None and name.lower() not in map(str.lower, known):
        raise LaunchError(f"{option} {name}: {choices(name, known)}")


# Above every real cost; sums of such values still fit a float.
_LARGEST = 10**100


def one_number(option: str, text: str) -> Time:
    """Returns the number that an option was given. An int if it is whole, so that sums stay exact.

    Raises:
        ScheduleError: `text` is not a number from 0 to 1e100.
    """
    try:
        value = Fraction(text.strip())  # exact, and it refuses "nan" and "inf"
    except (ValueError, ZeroDivisionError):
        raise ScheduleError(f"{option} {text}: not a number; give one, such as 1.5") from None
    if value > _LARGEST:
        raise ScheduleError(f"{option} {text[:20]}: above 1e100; give a smaller number, such as 1.5")
    if value < 0:
        raise ScheduleError(f"{option} {text}: below 0; give a number of at least 0, such as 1.5")
    return int(value) if value.denominator == 1 else float(value)


def amount(option: str, text: str) -> Amount:
    """Returns one number, or a tuple of the numbers between commas.

    Raises:
        ScheduleError: a part is not a number of at least 0.
    """
    # One value is no tuple: `Costs` spreads a number over any number of stages.
    values = tuple(one_number(option, part) for part in text.split(","))
    return values if len(values) > 1 else values[0]


def given(options: object, names: Iterable[str], read: Callable[[str, str], Any]) -> dict[str, Any]:
    """Returns the given options among `names`, each read by `read` from its option and its text."""
    texts = {name: getattr(options, name) for name in names}
    return {name: read("--" + name.replace("_", "-"), text) for name, text in texts.items() if text is not None}


_FILES = ("svg", "png", "html", "chrome", "csv")
"""Options of the commands that name an output file."""


def files_of(options: object) -> dict[str, str]:
    """Returns the output files that were asked for, by their options."""
    paths = {f"--{name}": getattr(options, name, None) for name in _FILES}
    return {option: path for option, path in paths.items() if path is not None}


def check_files(options: object) -> None:
    """Checks the names and the folders of a command's output files, before any work is done.

    Raises:
        ScheduleError: a name whose suffix is of another format.
        FileError: a file cannot be written, since its folder is missing, say.
    """
    # The figure's format follows from the name, so `--svg a.png` would write a PNG.
    files = files_of(options)
    for suffix in ("svg", "png", "html"):
        path = files.get(f"--{suffix}")
        if path is not None and not path.lower().endswith(f".{suffix}"):
            raise ScheduleError(f"--{suffix} {path}: give a name that ends in .{suffix}, such as plan.{suffix}")
    for path in files.values():
        check_writable(path)


_VALUE = r"""'[^']*'|"[^"]*"|\[[^\]]*\]|\([^)]*\)|[^\s,:;)]*"""


def as_typed(text: str, options: Mapping[str, str]) -> str:
    """Returns the text of an error with each argument as it is typed: `hosts=[3, 1]` of Python is `--hosts 3,1`.

    Args:
        text: an error of a function that the command has called, such as "hosts=[3, 1] have 4 ranks".
        options: options of the command by the names of the arguments.
    """
    names = "|".join(map(re.escape, options))
    # Not in a call, as in Kill(rank=1). Without "=" an argument stands at the beginning alone: "forward has 2 values".
    argument = rf"(?<![\w.(-])({names})=({_VALUE})|\A({names})(?= has )"
    return re.sub(argument, lambda found: _typed(options[found[1] or found[3]], found[2] or ""), text)


def _typed(option: str, value: str) -> str:
    if value[:1] in ("[", "("):
        value = ",".join(part.strip() for part in value[1:-1].split(","))
    elif value[:1] in ("'", '"'):
        value = value[1:-1]
    return f"{option} {value}".rstrip()
