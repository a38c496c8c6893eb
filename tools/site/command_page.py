"""Page of the command line, made from the commands themselves: their help texts, arguments and options."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer

from echelon.cli import app as cli
from echelon.cli.app import EXAMPLES

_INTRODUCTION = """# Commands

`echelon COMMAND --help` prints the same on a terminal. `python -m echelon` is the same program. The exit status is 0
after success, 2 for a wrong argument, 130 after Ctrl-C, 141 if the reader of the output has gone, 143 after SIGTERM,
and 1 for any other failure, unless a command says otherwise.
"""


def page() -> str:
    """Returns the page in Markdown."""
    return "\n".join([_INTRODUCTION, *(_section(name, command) for name, command in commands())])


def commands() -> Iterator[tuple[str, Any]]:
    """Yields the name and the parsed form of every command, in the order of `echelon --help`."""
    for name, command in _below("echelon", typer.main.get_command(cli.app)):
        yield name, command
        if name == "echelon plan":  # the options of a collective differ, so they are those of an app of its own
            yield f"{name} all-reduce", typer.main.get_command(cli.collectives)


def _below(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    below = getattr(command, "commands", {})
    if not below:
        yield name, command
    for word, inner in below.items():
        if not inner.hidden:
            yield from _below(f"{name} {word}", inner)


def _section(name: str, command: Any) -> str:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    usage = " ".join([name, *["[OPTIONS]"] * bool(options), *(_metavar(argument) for argument in arguments)])
    parts = [f"## {name}", f"```text\n{usage}\n```", inspect.cleandoc(command.help or "").replace("\f", "")]
    for title, parameters in (("argument", arguments), ("option", options)):
        rows = [_row(parameter) for parameter in parameters if not getattr(parameter, "hidden", False)]
        if rows:
            # The class is for the style sheet: names of options do not wrap.
            table = "\n".join([f"| {title} | meaning |", "|---|---|", *rows])
            parts.append(f'<div class="options" markdown>\n\n{table}\n\n</div>')
    parts.append("\n".join(["```sh", *EXAMPLES[name.removeprefix("echelon ")], "```"]))
    return "\n\n".join(parts) + "\n"


def _metavar(parameter: Any) -> str:
    name = parameter.metavar or (parameter.name or "").upper()
    return (name if parameter.required else f"[{name}]") + "..." * (parameter.nargs == -1)


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        names = f"`{parameter.metavar or (parameter.name or '').upper()}`"
    else:
        names = ", ".join(f"`{option}`" for option in [*parameter.opts, *parameter.secondary_opts])
        if not parameter.is_flag:
            names += f" `{parameter.metavar or _kind(parameter)}`"
    text = _escaped(parameter.help or "")
    default = parameter.default
    is_number = isinstance(default, int | float) and not isinstance(default, bool)
    if (is_number or (isinstance(default, str) and default)) and "[default" not in text:
        text += f" [default: {default}]"
    return f"| {names} | {text} |"


def _kind(parameter: Any) -> str:
    of_typer = getattr(parameter, "type_descriptor", None)  # from typer 0.27 on; before, a type of click
    name = str(of_typer.annotation if of_typer else parameter.type.name)
    return "NUMBER" if "int" in name or "float" in name else "TEXT"


def _escaped(text: str) -> str:
    # A pipe would end the cell, an angle bracket begin a tag, a bracket before a bracket a link.
    for mark in ("\\", "|", "<", "*", "_", "["):
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())
