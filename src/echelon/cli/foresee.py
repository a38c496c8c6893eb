"""`echelon foresee`: a script foreseen on a cluster that is not there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, TextIO, cast

import typer
from rich.console import Console as RichConsole

from echelon.arguments import check_world_size, check_writable
from echelon.cli import ending_by_sigterm, signal_of, sweep
from echelon.cli.completion import NETWORKS
from echelon.cli.misfit import Options, cures, options_of
from echelon.cli.misplaced import no_ranks, note_misplaced
from echelon.cli.options import Chrome, Json, Png, Svg, arguments_of, as_typed, check_files, check_name, files_of, value
from echelon.cli.output import Counted, WarnedOnce, only_json, rich_console, to_json, working, write, write_files
from echelon.cli.run import above_progress, console, tell
from echelon.cli.sweep import combinations
from echelon.errors import InvalidWorldSize, LaunchError
from echelon.foresight.calibration_file import load, save
from echelon.foresight.play.cluster import hosts_of
from echelon.foresight.play.devices import device_named
from echelon.launch.output import Console
from echelon.launch.run import Program
from echelon.launch.status_line import columns_of_text
from echelon.wording import counted

if TYPE_CHECKING:
    from echelon.foresight.run import Foreseen


_OF_CLUSTER = ("gpu", "hosts", "network", "rails", "oversubscription")
_OF_STEPS = ("steps", "until", "seed")
"""Options that are arguments of `echelon.foresee`."""


@dataclass(frozen=True)
class ForeseeOptions:
    """Options of `echelon foresee`, as they were given."""

    program: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="Script to foresee; with -m a module.", show_default=False)
    ] = ""
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script.")] = None
    num_ranks: Annotated[
        int | None, typer.Option("-n", "--num-ranks", metavar="COUNT", help="Number of ranks.  [required]")
    ] = None
    module: Annotated[bool, typer.Option("-m", "--module", help="Run a module, like python -m.")] = False
    gpu: Annotated[str, value("NAME", "Device of every rank; or the file of --calibrate.")] = "h100"
    hosts: Annotated[
        str | None,
        value(
            "HOSTS",
            "Hosts: 2x4 (2 hosts of 4 ranks), their number, or ranks of each (4,4).  [default: as many as needed]",
        ),
    ] = None
    network: Annotated[str, value("NAME", "Network between the hosts.")] = "infiniband-400g"
    rails: Annotated[
        int,
        typer.Option(metavar="COUNT", min=0, help="Separate networks, one for each NIC of a host; 0 for a single one."),
    ] = 0
    oversubscription: Annotated[float, value("RATIO", "Bandwidth of a host's NICs, divided by that of its uplink.")] = (
        1.0
    )
    steps: Annotated[
        int | None,
        value("COUNT", "Steps to run; the last one is foreseen.  [default: 2, or 3 for a DDP of a static graph]"),
    ] = None
    until: Annotated[
        str | None, value("FUNCTION", "Function whose return ends a step.  [default: the optimizers' steps]")
    ] = None
    tokens: Annotated[int | None, value("COUNT", "Tokens of all ranks in a step, equal in a whole sweep.")] = None
    seed: Annotated[int, value("SEED", "Seed of the random ranks that confirm a role.")] = 0
    allow_writes: Annotated[
        bool, typer.Option("--allow-writes", help="Let the script write files, such as logs, but no checkpoints.")
    ] = False
    full: Annotated[
        bool, typer.Option("--full", help="Record all microbatches, even those that repeat an earlier one.")
    ] = False
    sweep: Annotated[
        str | None,
        value("ARGS", 'Foresee each combination of script arguments, as "--tp {1,2,4}"; files are of the best.'),
    ] = None
    calibrate: Annotated[
        str | None, value("FILE", "Measure this machine's GPU (--gpu cpu: its processors) for --gpu, and end.")
    ] = None
    svg: Svg = None
    png: Png = None
    html: Annotated[str | None, value("FILE", "Write the report with timeline and memory as one HTML file.")] = None
    chrome: Chrome = None
    json: Json = False

    def check(self) -> None:
        """Checks the options before anything is run.

        Raises:
            LaunchError, ScheduleError, InvalidWorldSize: an option is missing or wrong.
            FileError: an output file cannot be written.
        """
        if self.calibrate is not None:
            if self.program:
                raise LaunchError(f"--calibrate {self.calibrate} takes no script: foresee it afterwards, with --gpu")
            for each in fields(self):
                if each.name not in ("program", "gpu", "calibrate") and getattr(self, each.name) != each.default:
                    unused = {"num_ranks": "-n", "module": "-m"}.get(each.name, f"--{each.name.replace('_', '-')}")
                    raise LaunchError(f"{unused} with --calibrate: it takes --gpu alone; leave {unused} out")
            if not self.calibrate.endswith(".json"):
                raise LaunchError(f"--calibrate {self.calibrate}: give a file that ends in .json")
            check_writable(self.calibrate)  # before the minute that it takes
            return
        if not self.program:
            raise LaunchError("give a script, as: echelon foresee -n 64 train.py")
        if self.num_ranks is None:
            raise LaunchError(no_ranks(foresee, self.program, self.args or [], is_module=self.module))
        if self.num_ranks < 1:
            raise InvalidWorldSize(f"-n {self.num_ranks}: give at least 1 rank")
        check_world_size(self.num_ranks)
        if "," in self.gpu and not self.gpu.endswith(".json"):
            raise LaunchError(
                f"--gpu {self.gpu}: give one GPU; foresee the script once for each, or in Python play it again by "
                "foresee(...).on(gpu=...)"
            )
        # Before torch is imported, which takes seconds.
        device = load(self.gpu) if self.gpu.endswith(".json") else device_named(self.gpu)
        check_name("--network", self.network, (*NETWORKS, *device.networks))
        hosts_of(self.num_ranks, _hosts(self.hosts, self.num_ranks), device.per_host)
        if not self.oversubscription >= 1:
            raise LaunchError(f"--oversubscription {self.oversubscription:g}: give a ratio of at least 1")
        if self.steps is not None and self.steps < 1:
            raise LaunchError(f"--steps {self.steps}: give at least 1")
        if self.tokens is not None and self.tokens < 1:
            raise LaunchError(f"--tokens {self.tokens}: give at least 1")
        check_files(self)

    def words(self) -> list[str]:
        """Returns the options as words of a command line, without --sweep and the output's."""
        found = ["-n", str(self.num_ranks)]
        for name in (*_OF_CLUSTER, *_OF_STEPS, "tokens"):
            if (given := getattr(self, name)) is not None:
                found += [f"--{name}", str(given)]
        found += ["--allow-writes"] * self.allow_writes + ["--full"] * self.full
        return found + ["-m"] * self.module

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of `echelon.foresee`."""
        found = {name: getattr(self, name) for name in (*_OF_CLUSTER, *_OF_STEPS, "allow_writes", "full")}
        return found | {"hosts": _hosts(self.hosts, self.num_ranks)}


def foresee(options: ForeseeOptions) -> int:
    """Foresees a training step of a script on a cluster: time, memory, exposed communication, mistakes.

    Needs no GPU, and computes nothing: the script runs with tensors that have shapes but no values, on one rank for
    each role. Nothing is written to files. The exit status is 0, that of the first rank that failed, or 1 if the script
    does not fit into memory or its ranks disagree. Ctrl-C and SIGTERM end it, and --sweep with its table so far.
    Options go before SCRIPT; words after it are passed to the script.
    """
    options.check()
    if options.calibrate is not None:
        return _calibrate(options.calibrate, options.gpu)
    assert options.num_ranks is not None, "checked"
    shown = console(as_json=options.json)
    note_misplaced(shown, foresee, options.program, options.args or [])
    if options.sweep is not None:
        return _sweep(options, options.sweep)
    Program(options.program, is_module=options.module).check()
    try:
        with ending_by_sigterm(), only_json(options.json) as stdout:
            return _foresee(options, shown, stdout)
    except KeyboardInterrupt as error:
        ended_by = signal_of(error)
        shown.say(f"ended by {ended_by.name}")
        return 128 + ended_by  # as a shell reports it


def _foresee(options: ForeseeOptions, shown: Console, stdout: TextIO) -> int:
    assert options.num_ranks is not None, "checked"
    program = Program(options.program, tuple(options.args or ()), is_module=options.module)
    printed = Counted(shown.stdout)
    warned = WarnedOnce(shown.stderr)
    of_script = above_progress(replace(shown, stdout=cast("BinaryIO", printed), stderr=cast("BinaryIO", warned)))
    # Those of a sweep, and other programs, ask for JSON: lines of time would stand among the errors they read.
    what = f"foreseeing {counted(options.num_ranks, 'rank')}"
    with working(what, plain_after=None if options.json else 10.0):
        # Late: it imports torch, which takes seconds that `--help` need not wait.
        from echelon.foresight.run import foresee_script

        outcome = foresee_script(program, options.num_ranks, of_script, **options.arguments())
    if outcome.failure is not None:
        failure = outcome.failure
        if failure.error_type == LaunchError.__name__:  # --until, which is looked for while the script runs
            failure = replace(failure, text=as_typed(failure.text, arguments_of(foresee)))
        tell(failure, shown)
        if options.json:
            print(to_json(failure.to_json()), file=stdout)
        return failure.status
    seen = outcome.foreseen
    assert seen is not None
    if printed.num_bytes:
        shown.say("lines after a rank, such as [0], are the script's own: their times and values are of fake tensors")
    title = shlex.join([options.program, *(options.args or ())])
    written = write_files(
        (options.html, lambda path: seen.to_html(path, options.tokens, title)),
        (options.svg, seen.timeline.draw),
        (options.png, seen.timeline.draw),
        (options.chrome, seen.played.timeline(kernels=True).to_chrome),
    )
    report = seen.report(options.tokens, options.program)
    if options.json:
        print(to_json({"status": "finished", **report.to_json(), **_by_rank(seen), "files": written}), file=stdout)
    else:
        print(report.text(columns_of_text()), end="", file=stdout)
    for path in written:
        shown.say(f"wrote {path}")
    if not seen.fits and (found := _cures(program, seen)):
        shown.say(f"it does not fit: foresee {', or '.join(found)}")
    return 0 if seen.fits else 1


def _cures(program: Program, seen: Foreseen) -> list[str]:
    """Returns arguments of the script that may make it fit, as phrases."""
    advice = seen.advice
    # A single tensor may be the batch itself.
    if not (advice.smaller_batch or advice.smaller_tensor):
        return []
    options = Options() if program.is_module else options_of(program.name)
    recompute = options.recompute if advice.checkpointing else ""
    return cures([*program.args, *options.batches], seen.memory.fitting_share, recompute)


def _calibrate(path: str, gpu: str) -> int:
    # Late: they import torch.
    import torch

    from echelon.foresight.calibrate import calibrate
    from echelon.foresight.calibrate_gpu import calibrate_gpu

    shown = console()
    shown.say("measuring this machine: leave it alone for a minute")
    is_gpu = gpu.lower() != "cpu" and torch.cuda.is_available()
    with working("measuring"):
        device = calibrate_gpu() if is_gpu else calibrate()
    write_files((path, lambda file: save(device, file)))
    measured = device.name if is_gpu else f"{device.cores} processors"
    shown.say(f"wrote {path}: {measured}; use it by --gpu {path}")
    return 0


def _sweep(options: ForeseeOptions, text: str) -> int:
    each = combinations("--sweep", text)
    shown = rich_console(stderr=True)
    program = [options.program, *(options.args or [])]
    # The first combination may take a minute.
    number = counted(len(each), "combination")
    write(shown, f"echelon: foreseeing {number} of arguments, {sweep.at_once(len(each))} at once")
    with ending_by_sigterm():
        found, num_left, signal = sweep.sweep(
            *(options.words(), program, each),
            partial(sweep.run_all, shown=shown),
            lambda line: write(shown, f"echelon: {line}"),
        )
        written: list[str] = []
        if signal is None:
            try:
                written = _write_best(options, program, found, shown)
            except KeyboardInterrupt as error:
                signal = signal_of(error)
    if options.json:
        print(sweep.as_json(found, written))
    else:
        sweep.show(found, rich_console())
    if signal is not None:
        missing = ", ".join(files_of(options).values()) if not written else ""
        left_out = f"{num_left} of {counted(len(each), 'combination')} left out" if num_left or not missing else ""
        not_written = f"did not write {missing}" if missing else ""
        console().say(f"ended by {signal.name}: {', '.join(filter(None, (left_out, not_written)))}")
        return 128 + signal  # as a shell reports it
    return 0 if any(entry.fits for entry in found) else 1


def _write_best(
    options: ForeseeOptions, program: Sequence[str], found: Sequence[sweep.Entry], shown: RichConsole
) -> list[str]:
    """Foresees the best combination once more for the files that were asked for. Returns their paths."""
    files = files_of(options)
    if not files:
        return []
    names = ", ".join(files.values())
    best = found[0]
    if best.figures is None:
        write(shown, f"echelon: did not write {names}: every combination failed")
        return []
    words = [word for option, path in files.items() for word in (option, path)]
    command = ["foresee", *options.words(), *words, "--json", *program, *best.arguments]
    ((_, ended),) = sweep.run_all([command], shown)
    again = sweep.entry_of(best.arguments, ended)
    if again.figures is None:
        write(shown, f"echelon: did not write {names}: {again.reason}")
        return []
    write(shown, f"echelon: wrote {names}, of the best combination: {best.name}")
    return list(files.values())


def _hosts(text: str | None, num_ranks: int | None) -> int | list[int] | None:
    """Returns the number of equal hosts that an option names, or the ranks of each host.

    Raises:
        LaunchError: it is no number, no list of numbers and not as 2x4, or 2x4 does not have `num_ranks` ranks.
    """
    if text is None:
        return None
    if counts := re.fullmatch(r"(\d+)x(\d+)", text.strip()):
        number = int(counts[1]) * int(counts[2])
        if number != num_ranks:
            raise LaunchError(
                f"--hosts {text} is for {number} ranks, not for {num_ranks}: give numbers with that product"
            )
        return int(counts[1])
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise LaunchError(f"--hosts {text}: give a number of hosts, 2x4, or the ranks of each, as 8,8,4") from None
    return numbers[0] if "," not in text else numbers


def _by_rank(seen: Foreseen) -> dict[str, Any]:
    return {
        "classes": list(seen.classes),
        "peak_memory": list(seen.peak_memory),
        "live_memory": list(seen.live_memory),
    }
