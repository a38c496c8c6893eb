"""`echelon simulate`: a script on simulated ranks, in this process and in virtual time."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.progress import Progress

from echelon.arguments import check_default_timeout, check_world_size
from echelon.call_site import shortened
from echelon.cli import ending_by_sigterm, fault_text, signal_of
from echelon.cli.completion import NETWORKS
from echelon.cli.misplaced import no_ranks, note_misplaced
from echelon.cli.options import Chrome, Html, Json, Png, Svg, check_files, check_name, files_of, value
from echelon.cli.output import exact, only_json, rich_console, to_json, working, write_files
from echelon.cli.run import above_progress, console, tell
from echelon.errors import InvalidWorldSize, LaunchError
from echelon.launch.output import Console
from echelon.launch.run import BY_ITSELF, Program
from echelon.wording import counted

if TYPE_CHECKING:
    from echelon.simulation.run import Simulation
    from echelon.simulation.script.run import Failure, Outcome

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@dataclass(frozen=True)
class SimulateOptions:
    """Options of `echelon simulate`, as they were given."""

    program: Annotated[str, typer.Argument(metavar="SCRIPT", help="Script to run; with -m a module.")]
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script.")] = None
    num_ranks: Annotated[
        int | None, typer.Option("-n", "--num-ranks", metavar="COUNT", help="Number of simulated ranks.  [required]")
    ] = None
    module: Annotated[bool, typer.Option("-m", "--module", help="Run a module, like python -m.")] = False
    network: Annotated[
        str | None, value("NAME", "Network between the ranks, such as 10GbE.  [default: messages take no time]")
    ] = None
    costs: Annotated[str | None, value("measured", "Charge computing by the CPU time measured here.")] = None
    faults: Annotated[
        list[str] | None, value("FAULTS", f"Faults, separated by commas; may be repeated: {fault_text.IN_WORDS}.")
    ] = None
    seed: Annotated[
        int, typer.Option(metavar="SEED", min=0, help="Seed of the order of events and of random numbers.")
    ] = 0
    explore: Annotated[
        int | None, value("COUNT", "Run with this many seeds, from --seed on, until one fails; print its output.")
    ] = None
    timeout: Annotated[
        float | None, value("SECONDS", "Default timeout of blocking calls, virtual seconds.  [default: 600]")
    ] = None
    collectives: Annotated[
        str | None,
        value("WAY", "Collectives as one event (whole) or as messages.  [default: messages with faults or --explore]"),
    ] = None
    order: Annotated[
        str, value("ORDER", "Order in which sums are taken: that of processes of one host (shm) or over TCP (tcp).")
    ] = "shm"
    late_sends: Annotated[bool, typer.Option("--late-sends", help="Find tensors that are changed while sent.")] = False
    memory: Annotated[bool, typer.Option("--memory", help="Print the peak memory of each rank's tensors.")] = False
    svg: Svg = None
    png: Png = None
    html: Html = None
    chrome: Chrome = None
    as_json: Json = False

    def check(self) -> None:
        """Checks which options are given together, before anything is run.

        Raises:
            LaunchError, ScheduleError: an option is missing or wrong.
            FileError: an output file cannot be written.
        """
        if self.num_ranks is None:
            raise LaunchError(no_ranks(simulate, self.program, self.args or [], is_module=self.module))
        if self.num_ranks < 1:
            raise InvalidWorldSize(f"-n {self.num_ranks}: a world has at least 1 rank: give -n 1 or more")
        check_world_size(self.num_ranks)
        check_name("--network", self.network, NETWORKS)
        check_name("--collectives", self.collectives, ("whole", "messages"))
        check_name("--order", self.order, ("shm", "tcp"))
        if self.timeout is not None:
            check_default_timeout(self.timeout, LaunchError)
        if self.costs not in (None, "measured"):
            raise LaunchError(f"--costs {self.costs}: only measured costs can be given here; leave it out for none")
        if self.explore is not None:
            if self.explore < 1:
                raise LaunchError(f"--explore {self.explore}: give the number of seeds, at least 1")
            for name in ("memory", "chrome", "svg", "png", "html"):
                if getattr(self, name):
                    raise LaunchError(f"--{name} with --explore: many runs have many results; give one --seed instead")
        Program(self.program, is_module=self.module).check()
        check_files(self)

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of `echelon.simulate` that are the same for every seed."""
        found: dict[str, Any] = {
            "network": self.network,
            "costs": self.costs,
            "faults": fault_text.parse(self.faults or (), self.num_ranks or 0),
            "memory": self.memory,
            "late_sends": self.late_sends,
            "collectives": self._collectives(),
            "order": self.order,
        }
        return found if self.timeout is None else {**found, "timeout": self.timeout}

    def _collectives(self) -> str | None:
        # As `echelon.explore`: in whole collectives there is less to explore.
        return "messages" if self.collectives is None and self.explore is not None else self.collectives

    def replay(self, seed: int) -> str:
        """Returns the command line that runs one seed again."""
        given: list[tuple[str, object]] = [
            ("--network", self.network),
            ("--costs", self.costs),
            *(("--faults", text) for text in self.faults or ()),
            ("--timeout", self.timeout),
            ("--collectives", self._collectives()),
            ("--order", self.order if self.order != "shm" else None),
            ("--seed", seed),
        ]
        words = ["echelon", "simulate", "-n", str(self.num_ranks)]
        words += [word for name, given_value in given if given_value is not None for word in (name, str(given_value))]
        words += ["--late-sends"] * self.late_sends + ["-m"] * self.module
        return shlex.join([*words, self.program, *(self.args or ())])


def simulate(options: SimulateOptions) -> int:
    """Runs a script on simulated ranks in this process: any program of torch.distributed, or of Echelon.

    One rank runs at a time, in an order that the seed decides, so a run repeats exactly. Time is virtual. Marks
    each line of output with its rank. The exit status is 0, that of the first rank that failed, or 1 for a deadlock
    or ranks that disagree. Ctrl-C and SIGTERM end it, and print where the ranks were. Options go before SCRIPT;
    words after it are passed to the script.
    """
    options.check()
    arguments, shown = options.arguments(), console(as_json=options.as_json)
    note_misplaced(shown, simulate, options.program, options.args or [])
    try:
        with ending_by_sigterm(), only_json(options.as_json) as stdout:
            if options.explore is not None:
                return _explore(options, arguments, shown, stdout)
            return _run(options, arguments, shown, stdout)
    except KeyboardInterrupt as interrupt:
        ended_by = signal_of(interrupt)
        shown.say(f"ended by {ended_by.name}")
        for line in "\n".join(getattr(interrupt, "__notes__", ())).splitlines():
            shown.say(shortened(line))
        return 128 + ended_by


def _run(options: SimulateOptions, arguments: dict[str, Any], shown: Console, stdout: TextIO) -> int:
    # Programs ask for JSON: lines of time would stand among the errors that they read.
    plain_after = None if options.as_json else 10.0
    with working(f"simulating {counted(options.num_ranks or 0, 'rank')}", plain_after=plain_after):
        outcome = _outcome(options, arguments, options.seed, above_progress(shown))
    if outcome.failure is not None:
        tell(outcome.failure, shown)
        for path in files_of(options).values():
            shown.say(f"did not write {path}: the run failed")
        if options.as_json:
            print(to_json(_failed(options, options.seed, outcome.failure)), file=stdout)
        return outcome.failure.status
    simulation = outcome.simulation
    assert simulation is not None
    notes = _notes(simulation)
    for note in notes:
        shown.say(f"note: {note}")
    written = write_files(
        (options.svg, simulation.timeline.draw),
        (options.png, simulation.timeline.draw),
        (options.html, simulation.timeline.draw),
        (options.chrome, simulation.timeline.to_chrome),
    )
    if simulation.peak_memory is not None:
        for rank, peak in enumerate(simulation.peak_memory):
            shown.say(f"rank {rank}: peak of {_in_units(peak)}")
    for path in written:
        shown.say(f"wrote {path}")
    shown.say(_summary(simulation))
    if options.as_json:
        print(to_json({**_finished(simulation), "notes": notes, "files": written}), file=stdout)
    return 0


def _explore(options: SimulateOptions, arguments: dict[str, Any], shown: Console, stdout: TextIO) -> int:
    from echelon.simulation.script.output import Kept

    count = options.explore or 0
    # Output of the seeds is kept, so nothing else is written to a terminal that shows the progress.
    terminal = rich_console(stderr=True)
    with Progress(console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        for seed in progress.track(range(options.seed, options.seed + count), count, description="exploring"):
            # A thousand runs print a thousand times the same: only the failing one is shown.
            kept = Kept(shown)
            failure = _outcome(options, arguments, seed, kept.console).failure
            if failure is not None:
                break
    if failure is not None:
        kept.release()
        tell(failure, shown)
        passed = seed - options.seed
        replay = options.replay(seed)
        shown.say(f"seed {seed} fails, after {passed} that passed; to replay it: {replay}")
        if options.as_json:
            failed = {**_failed(options, seed, failure), "replay": replay}
            tried = {"first_seed": options.seed, "num_tried": passed + 1, "num_failed": 1}
            print(to_json({**failed, **tried}), file=stdout)
        return failure.status
    shown.say(f"{counted(options.num_ranks or 0, 'rank')}, {counted(count, 'seed')} passed, from {options.seed} on")
    if options.as_json:
        finished = {"status": "finished", "num_ranks": options.num_ranks}
        tried = {"first_seed": options.seed, "num_tried": count, "num_failed": 0}
        print(to_json({**finished, **tried}), file=stdout)
    return 0


def _outcome(options: SimulateOptions, arguments: dict[str, Any], seed: int, shown: Console) -> Outcome:
    # Late: it imports torch, which takes seconds that `--help` need not wait.
    from echelon.simulation.script.run import run_script

    program = Program(options.program, tuple(options.args or ()), is_module=options.module)
    assert options.num_ranks is not None, "checked"
    return run_script(program, options.num_ranks, shown, seed=seed, **arguments)


def _notes(simulation: Simulation) -> list[str]:
    notes = [shortened(note) for note in simulation.notes]
    if len(simulation.results) > 1 and not simulation.bytes_sent:
        notes.append(f"no rank has communicated, so {BY_ITSELF}")
    return notes


def _finished(simulation: Simulation) -> dict[str, Any]:
    sent = [
        {"sender": sender, "receiver": receiver, "bytes": num_bytes}
        for (sender, receiver), num_bytes in sorted(simulation.bytes_sent.items())
    ]
    return {
        "status": "finished",
        "num_ranks": len(simulation.results),
        "seed": simulation.seed,
        "elapsed": exact(simulation.elapsed),
        "bytes_sent": sum(simulation.bytes_sent.values()),
        "bytes_by_pair": sent,
        "peak_memory": simulation.peak_memory,
    }


def _failed(options: SimulateOptions, seed: int, failure: Failure) -> dict[str, Any]:
    status, *others = failure.to_json().items()
    return dict([status, ("num_ranks", options.num_ranks), ("seed", seed), *others])


def _summary(simulation: Simulation) -> str:
    sent = _in_units(sum(simulation.bytes_sent.values()))
    ranks = counted(len(simulation.results), "rank")
    return f"{ranks}, {simulation.elapsed:.6g} s of virtual time, {sent} sent, seed {simulation.seed}"


def _in_units(num_bytes: int) -> str:
    for size, unit in _UNITS:
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} B"
