"""Registry of the commands with their examples, and the exit statuses of their errors."""

from __future__ import annotations

import difflib
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version as version_of
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, cast

import typer
from typer.core import TyperGroup

from echelon._torch_versions import UnsupportedTorch
from echelon.cli import checkpoint, ended_by_sigint
from echelon.cli.bench import bench, tune
from echelon.cli.doctor import doctor
from echelon.cli.env import env
from echelon.cli.foresee import foresee
from echelon.cli.options import command
from echelon.cli.plan import plan
from echelon.cli.plan_collective import is_asked_for, plan_collective
from echelon.cli.run import run
from echelon.cli.simulate import simulate
from echelon.errors import EchelonError, FileError

EXAMPLES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "run": ("echelon run -n 4 train.py --epochs 2", "echelon run -n 2 -q -m package.train"),
        "simulate": (
            "echelon simulate -n 8 --network 25GbE --costs measured --png a.png train.py",
            "echelon simulate -n 4 --explore 1000 --faults kill:2@op=17 train.py",
        ),
        "foresee": (
            "echelon foresee -n 64 --gpu h100 --html step.html train.py --batch-size 8",
            'echelon foresee -n 16 --sweep "--tp {1,2,4} --pp {1,2}" train.py',
            "echelon foresee --calibrate here.json",
        ),
        "plan": (
            "echelon plan 1f1b -r 4 -m 16 --png plan.png",
            "echelon plan --compare -r 4 -m 16 --memory-limit 4",
            "echelon plan --search -r 8 -m 32 --forward 1,1,1,1,1,1,1,2",
        ),
        "plan all-reduce": (
            "echelon plan all-reduce -r 8",
            "echelon plan all-reduce --algorithm ring -r 4 --hosts 2x2 --svg ring.svg",
        ),
        "bench": (
            "echelon bench all-reduce -n 4 --max 16M --vs gloo",
            "echelon bench all-gather -n 8 --backend simulated --hosts 2x4",
        ),
        "tune": (
            "echelon tune -n 4",
            "echelon tune -n 8 --backend simulated --hosts 2x4 --output tuned.json",
        ),
        "doctor": ("echelon doctor", "srun --ntasks-per-node 1 echelon doctor"),
        "env": ("echelon env --json",),
        "checkpoint ls": ("echelon checkpoint ls checkpoints",),
        "checkpoint verify": ("echelon checkpoint verify checkpoints --step 100",),
        "checkpoint remove": ("echelon checkpoint remove checkpoints 110 120",),
        "checkpoint export": ("echelon checkpoint export checkpoints --hf model",),
        "checkpoint import": ("echelon checkpoint import checkpoints --dcp saved --step 100",),
    }
)
"""Command lines by the names of commands. A test parses each."""


def epilog(command: str) -> str:
    """Returns the end of a command's help."""
    # The mark keeps each line on its own.
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in EXAMPLES[command])


_SETTINGS: dict[str, Any] = {
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,  # brackets in a help text are brackets
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
_STATUSES = """Exit status: 0 if all went well. 1 if a run, a check or a forecast failed. 2 if the command line is
wrong. 130 after Ctrl-C. 141 if the reader of the output has gone. 143 after SIGTERM. `run`, `simulate` and `foresee`
end with the status of the first rank that failed. With `run` it is 128 + n if signal n ended that rank."""


class _Returned(NamedTuple):
    """Status that a command returned. typer's own are plain numbers: 0 after --help, 130 after Ctrl-C."""

    status: int | None


class _App(typer.Typer):
    """App whose commands answer Ctrl-C with a line. typer would end them without a word."""

    def command(self, *args: Any, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:  # type: ignore[override]
        register = super().command(*args, **options)

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def run(*values: Any, **given: Any) -> _Returned:
                try:
                    return _Returned(function(*values, **given))
                except KeyboardInterrupt:
                    return _Returned(ended_by_sigint())

            return register(run)

        return add


class _Group(TyperGroup):
    """Commands, of which `plan` has two sets of options: its first word decides."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if is_asked_for(args):
            return args[0], typer.main.get_command(collectives), args[1:]
        return super().resolve_command(ctx, args)


app = _App(
    name="echelon",
    cls=_Group,
    help="Distributed training on PyTorch: plan it, check it, simulate it, run it, draw it.",
    epilog=_STATUSES,
    **_SETTINGS,
)
collectives = _App(add_completion=False, **_SETTINGS)
"""`echelon plan` of a collective. A separate app, since its options differ from those of a pipeline schedule."""
checkpoints = _App(add_completion=False, **_SETTINGS)
app.add_typer(checkpoints, name="checkpoint", help="Lists, checks, removes and converts checkpoints.")


def _register(name: str, function: Callable[..., Any], short_help: str | None = None, **options: Any) -> None:
    """Adds a command, such as "run" or "checkpoint ls". Its help ends with its examples."""
    group, _, of_group = name.partition(" ")
    to = checkpoints if group == "checkpoint" else app
    to.command(of_group or name, epilog=epilog(name), short_help=short_help, **options)(function)


# Options after SCRIPT belong to the script, so these commands stop parsing there.
_STOPS: dict[str, Any] = {"context_settings": {"allow_interspersed_args": False}}
_register("run", run, **_STOPS)
_register("simulate", command(simulate), "Runs a script on simulated ranks.", **_STOPS)
_register("foresee", command(foresee), "Foresees a training step of a script on a cluster.", **_STOPS)
_register("plan", command(plan))
_register("bench", command(bench), "Measures the speed of a collective.")
_register("tune", command(tune), "Finds the fastest algorithms for this system.")
_register("doctor", doctor, "Checks this host for problems.")
_register("env", env, "Prints versions and host for a bug report.")
_register("checkpoint ls", checkpoint.ls)
_register("checkpoint verify", checkpoint.verify, "Reads every byte, and names what is damaged.")
_register("checkpoint remove", checkpoint.remove, "Removes checkpoints.")
_register("checkpoint export", checkpoint.export, "Writes a checkpoint in another format.")
_register("checkpoint import", checkpoint.import_)
collectives.command(epilog=epilog("plan all-reduce"))(command(plan_collective))


def _print_version(asked_for: bool) -> None:
    if asked_for:
        print(f"echelon {version_of('echelon')}")
        raise typer.Exit


@app.callback()
def _echelon(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


_UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__base__)
"""typer's exception for a wrong command line. Its name differs between versions of typer, so it is found as a base."""


_OF_OTHER_LAUNCHERS = dict.fromkeys(
    ("--np", "-np", "--nproc", "--nproc-per-node", "--nproc_per_node", "--ranks", "--num-processes", "--world-size"),
    "-n",
) | {
    **dict.fromkeys(("--nodes", "--nnodes", "--num-nodes"), "--hosts"),
    **{"--gpus": "-n", "--device": "--gpu", "--size": "--max"},
}
_OF_CLUSTERS = dict.fromkeys(
    ("--nodes", "--nnodes", "--num-nodes", "--hosts", "--hostfile", "-H", "--host", "-N"),
    "echelon run starts the ranks of this host; on several hosts use torchrun, srun or mpirun",
) | dict.fromkeys(
    ("--master-port", "--master_port", "--master-addr", "--master_addr", "--standalone", "--rdzv-backend"),
    "echelon run chooses the address itself: leave it out",
)
"""Advice on options for several hosts."""


def _unknown_option(error: Any) -> str:
    """Returns an error text for an unknown option, with the nearest known one. Empty for other errors."""
    # By the attribute: like its base, the exception has another module in each version of typer.
    name = getattr(error, "option_name", "")
    if not name or error.ctx is None:
        return ""
    known = [option for each in error.ctx.command.params for option in each.opts if option.startswith("-")]
    if name in known:  # another mistake than its name
        return ""
    if name == "--backend" and error.ctx.command.name == "run":
        return f"No such option: {name}; give echelon.init(backend=) one, or set ECHELON_BACKEND"
    if error.ctx.command.name == "run" and (advice := _OF_CLUSTERS.get(name)):
        return f"No such option: {name}; {advice}"
    other = _OF_OTHER_LAUNCHERS.get(name, "")
    other = "-r" if other == "-n" and "-r" in known else other  # as the pages write it for plans
    if other in known:
        return f"No such option: {name}; did you mean {other}?"
    near = difflib.get_close_matches(name, known, n=1)
    told = f"No such option: {name}{f'; did you mean {near[0]}?' if near else ''}"
    if not any(each.name == "program" for each in error.ctx.command.params):
        return told
    # Of a launcher and a script, the script has more options.
    return f"{told}{' Options' if near else '; options'} of the script come after its name"


_OF_OTHER_COMMANDS = {
    **dict.fromkeys(("launch", "start", "train", "torchrun", "spawn", "mpirun", "exec", "elastic"), "echelon run"),
    **{"version": "echelon --version", "help": "echelon --help", "sim": "echelon simulate"},
    **dict.fromkeys(("debug", "explore", "replay", "emulate"), "echelon simulate"),
    **dict.fromkeys(("predict", "estimate", "estimate-memory", "memory", "profile", "sweep"), "echelon foresee"),
    "calibrate": "echelon foresee --calibrate",
    **dict.fromkeys(("schedule", "schedules", "pipeline", "draw", "search"), "echelon plan"),
    **dict.fromkeys(("perf", "nccl-tests", "time"), "echelon bench"),
    **dict.fromkeys(("autotune", "optimize"), "echelon tune"),
    **dict.fromkeys(("diagnose", "test"), "echelon doctor"),
    **dict.fromkeys(("info", "collect-env", "collect_env"), "echelon env"),
    **dict.fromkeys(("ckpt", "checkpoints", "store", "merge-weights", "export", "import", "ls"), "echelon checkpoint"),
}
_OF_OTHER_CHECKPOINTS = {
    **dict.fromkeys(("rm", "delete", "del", "prune", "clean", "clear", "unlink", "rollback"), "remove"),
    **dict.fromkeys(("list", "show", "dir", "info", "steps", "latest", "inspect", "status"), "ls"),
    **dict.fromkeys(("check", "fsck", "validate", "test", "scrub"), "verify"),
    **dict.fromkeys(("convert", "to-hf", "save", "merge", "consolidate", "upload", "copy", "cp"), "export"),
    **dict.fromkeys(("from-dcp", "load", "read"), "import"),
}
"""Commands of Echelon by words for them in other tools."""


def _unknown_command(error: Any, words: Sequence[str]) -> str:
    """Returns an error text for a script or another tool's name in place of a command. Empty for other errors."""
    if not error.format_message().startswith("No such command"):
        return ""
    if is_of_checkpoint := error.ctx is not None and error.ctx.command.name == "checkpoint":
        words = words[words.index("checkpoint") + 1 :]
    name = words[0]
    if name.endswith(".py") and not is_of_checkpoint:
        return f"No such command '{name}': to run a script on 2 ranks, write echelon run -n 2 {name}"
    other = _OF_OTHER_CHECKPOINTS.get(name) if is_of_checkpoint else _OF_OTHER_COMMANDS.get(name)
    place = "echelon checkpoint " if is_of_checkpoint else ""
    return f"No such command '{name}'; did you mean {place}{other}?" if other else ""


_OF_TYPER = "Input should be "
"""Words with which typer itself begins the bounds of a number."""


def _bad_number(error: Any, words: Sequence[str]) -> str:
    """Returns an error text for an option whose value is no number, or out of bounds. Empty for other errors."""
    for option in getattr(getattr(error, "param", None), "opts", ()):
        for word, following in zip(words, [*words[1:], ""], strict=True):
            name, is_joined, value = word.partition("=")
            is_short = len(option) == 2 and len(name) > 2 and name.startswith(option)
            if is_short and not is_joined and _is_number(following):  # -mb 8, which typer takes for -m b
                return f"No such option: {word}; did you mean {option} {following}?"
            value = value if is_joined else name[2:] if is_short else following
            if name == option or is_short:
                if not value.removeprefix("-").isdecimal():
                    kind = "whole number" if _is_number(value) else "number"
                    return f"{option} {value}: not a {kind}; give one, such as {option} 2"
                if (bound := error.message.removeprefix(_OF_TYPER)) != error.message:
                    return f"{option} {value}: give a number {bound}"
    return ""


def _bare_sizes(error: Any, words: Sequence[str]) -> str:
    """Returns an error text for sizes of a plan without their options, as in plan 1f1b 4 8. Empty for other errors."""
    told = error.format_message()
    if words[:1] != ["plan"] or not told.startswith("Got unexpected extra argument"):
        return ""
    extra = told.rpartition("(")[2].rstrip(".)").split()
    sizes = [("-r", "-n", "--num-ranks"), *[("-m", "--num-microbatches")] * (not is_asked_for(words))]
    missing = [option for option, *others in sizes if not {option, *others} & set(words)]
    if len(extra) > len(missing) or not all(map(str.isdecimal, extra)) or {"--search", "--compare"} & set(words):
        return ""
    written = " ".join(f"{option} {size}" for option, size in zip(missing, [*extra, "16"], strict=False))
    return f"{' and '.join(extra)} {'has' if len(extra) == 1 else 'have'} no place here: write {written}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _command_of(error: Any, words: Sequence[str]) -> str:
    """Returns the command whose help describes the mistake, such as "echelon run"."""
    if error.ctx is not None:
        return str(error.ctx.command_path)
    # typer gives no context for an option without its value.
    known = {each.name for each in app.registered_commands}
    return f"echelon {words[0]}" if words and words[0] in known else "echelon"


def run_app(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit status. Errors of the user become one line on stderr."""
    # standalone_mode=False: typer would print errors in several lines and end the process itself.
    arguments = list(arguments)
    try:
        result = app(arguments or ["--help"], prog_name="echelon", standalone_mode=False)
    except (EchelonError, UnsupportedTorch) as error:
        print(f"echelon: {error}", file=sys.stderr)
        # 2 for a wrong argument, as typer's own errors; 1 for a failure of the run.
        return 2 if isinstance(error, ValueError | FileError) else 1
    except _UsageError as error:
        message = _unknown_option(error) or _unknown_command(error, arguments) or _bad_number(error, arguments)
        message = message or _bare_sizes(error, arguments) or error.format_message().rstrip(".")
        of_command = _command_of(error, arguments) + " all-reduce" * is_asked_for(arguments)
        see = " See" if message.endswith("?") else ": see"
        print(f"echelon: {message}{see} `{of_command} --help`", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        # Commands that only plan run without torch; the others import it late.
        if error.name != "torch":
            raise
        print("echelon: this command needs torch, which is not installed here: pip install torch", file=sys.stderr)
        return 1
    if isinstance(result, _Returned):
        return result.status or 0
    return ended_by_sigint() if result == 130 else int(result or 0)
