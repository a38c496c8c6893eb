"""`echelon simulate`: scripts on simulated ranks, run by the command in this process."""

import builtins
import functools
import json
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import namedtuple
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from echelon.cli import main
from echelon.simulation import watchdog

Ended = namedtuple("Ended", "status out err")

START = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
"""


@pytest.fixture
def write(tmp_path):
    """Writes a script or a module, given as its source, and returns its path as from the working folder."""

    def write(source, name="script.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return name

    return write


@pytest.fixture
def simulate(capsys):
    """Runs `echelon simulate` with some words."""

    def simulate(*words):
        status = main(["simulate", *map(str, words)])
        return Ended(status, *capsys.readouterr())

    return simulate


def test_ranks_that_never_communicate_are_told_so(simulate, write):
    note = "echelon: note: no rank has communicated, so each of them ran the whole program by itself: call group = "
    script = write("print('alone')")
    assert simulate("-n", 2, script).err.startswith(note)
    assert "note" not in simulate("-n", 1, script).err
    assert "note" not in simulate("-n", 2, write(START + "dist.barrier()")).err


def test_a_script_of_torch_distributed_runs_as_each_rank(simulate, write):
    script = write(START + "total = torch.ones(1) * rank\ndist.all_reduce(total)\nprint(total.item(), *sys.argv)")
    ended = simulate("-n", 3, script, "--steps", "2")
    assert ended.status == 0
    assert sorted(ended.out.splitlines()) == [f"[{rank}] 3.0 script.py --steps 2" for rank in range(3)]
    assert ended.err == "echelon: 3 ranks, 0 s of virtual time, 16 B sent, seed 0\n"


def test_a_function_that_a_rank_replaces_in_a_module_that_it_has_imported_is_its_own(simulate, write):
    body = """
import colorsys
original = colorsys.rgb_to_hsv
colorsys.rgb_to_hsv = lambda *rgb: (rank, *original(*rgb))
dist.barrier()
print(colorsys.rgb_to_hsv(0, 0, 0))
"""
    sys.modules.pop("colorsys", None)
    ended = simulate("-n", 2, write(START + body))
    assert sorted(ended.out.splitlines()) == [f"[{rank}] ({rank}, 0.0, 0.0, 0)" for rank in range(2)]


def test_a_method_of_an_installed_class_that_a_script_replaces_is_noted_and_put_back(simulate, write):
    body = """
def twice(_, value):
    return 2 * value
torch.nn.Identity.forward = twice
dist.barrier()
print(torch.nn.Identity()(2))
"""
    before = torch.nn.Identity.forward
    ended = simulate("-n", 2, write(START + body))
    assert sorted(ended.out.splitlines()) == ["[0] 4", "[1] 4"]
    note, _ = ended.err.splitlines()
    assert note == (
        "echelon: note: torch.nn.modules.linear.Identity.forward was set to the function at script.py:7: unlike "
        "processes, simulated ranks share classes, so each rank had what the last one set"
    )
    assert torch.nn.Identity.forward is before


def test_swapped_collectives_are_noted(simulate, write):
    body = """
def tokens(n):
    dist.all_reduce(torch.tensor([n]))
def loss(x):
    dist.all_reduce(torch.tensor([x]))
for call in (tokens, loss) if rank == 0 else (loss, tokens):
    call(1.0)
"""
    ended = simulate("-n", 2, write(START + body))
    assert ended.status == 0
    note, _ = ended.err.splitlines()
    assert (
        note == "echelon: note: #1 of group 'world' was called at script.py:8 on rank 0 and at script.py:10 on rank 1"
    )


def test_a_script_of_echelon_runs_as_each_rank(simulate, write):
    script = write("import echelon, torch\ngroup = echelon.init()\nprint(group.all_reduce(torch.ones(2)).tolist())")
    assert sorted(simulate("-n", 2, script).out.splitlines()) == ["[0] [2.0, 2.0]", "[1] [2.0, 2.0]"]


def test_an_option_after_the_script_is_the_scripts(simulate, write):
    ended = simulate("-n", 1, write("import sys; print(sys.argv[1:])"), "--network", "10GbE")
    assert ended.out == "[0] ['--network', '10GbE']\n"
    assert ended.err.startswith("echelon: note: --network stands after the script, which gets it; options of echelon ")


def test_the_environment_is_that_of_torchrun(simulate, write):
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    script = write(f"import os\nprint(*[os.environ[name] for name in {names}])")
    out = simulate("-n", 2, script).out
    assert sorted(out.splitlines()) == ["[0] 0 0 2 2 127.0.0.1 29500", "[1] 1 1 2 2 127.0.0.1 29500"]


def test_torchs_own_question_for_torchrun_is_answered(simulate, write):
    names = ["GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_RUN_ID"]
    names += ["TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"]
    script = write(
        f"""
        import os, torch.distributed as dist
        assert dist.is_torchelastic_launched() and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ
        dist.init_process_group("gloo")
        print(*[os.environ[name] for name in {names}])
        """
    )
    out = simulate("-n", 2, script).out
    assert sorted(out.splitlines()) == ["[0] 0 1 0 2 default none 0 0", "[1] 0 1 1 2 default none 0 0"]


def test_main_is_the_script(simulate, write, tmp_path):
    script = write(
        """
        import pickle, sys
        class Config: ...
        assert sys.modules["__main__"].Config is Config
        assert type(pickle.loads(pickle.dumps(Config()))) is Config
        assert __spec__ is None and __package__ is None
        if __name__ == "__main__":
            print(__file__, sys.path[0], sep="|")
        """
    )
    assert simulate("-n", 1, script).out == f"[0] {tmp_path}/script.py|{tmp_path}\n"


def test_a_module_runs_like_python_with_m(simulate, write, tmp_path):
    write("", "package/__init__.py")
    write("value = 1", "package/part.py")
    write(
        "import sys\nfrom .part import value\nprint(__name__, __spec__.name, value, *sys.argv)", "package/__main__.py"
    )
    ended = simulate("-n", 2, "-m", "package", "x")
    expected = f"__main__ package.__main__ 1 {tmp_path}/package/__main__.py x"
    assert sorted(ended.out.splitlines()) == [f"[0] {expected}", f"[1] {expected}"]


def test_each_rank_has_its_own_modules_of_the_folder_and_shares_installed_ones(simulate, write):
    write("", "package/__init__.py")
    write("import os\nrank = os.environ['RANK']\nseen = []", "package/state.py")
    write("from package import state\ndef add(): state.seen.append(state.rank)", "helper.py")
    script = write(
        START
        + textwrap.dedent(
            """
            import helper
            from package import state
            for _ in range(2):
                helper.add()
                dist.barrier()
            import package.state
            assert package.state is state is sys.modules["package.state"]
            print(state.seen, id(torch))
            """
        )
    )
    out = simulate("-n", 2, script).out
    assert sorted(out.splitlines()) == [f"[{rank}] ['{rank}', '{rank}'] {id(sys.modules['torch'])}" for rank in (0, 1)]


@pytest.mark.parametrize("way", ["the project", "sys.path"])
def test_each_rank_has_its_own_modules_beside_the_folder(simulate, write, tmp_path, monkeypatch, way):
    """As with `pip install -e`, or a script that adds the folder above."""
    write("import os\nrank = os.environ['RANK']", "src/of_a_test/state.py")
    write("", "src/of_a_test/__init__.py")
    source = START + "from of_a_test import state\nprint(state.rank)\ndist.barrier()"
    if way == "the project":
        write("", "pyproject.toml")
        monkeypatch.syspath_prepend(str(tmp_path / "src"))
    else:
        source = f"import sys\nsys.path.insert(0, {str(tmp_path / 'src')!r})\n" + source
    out = simulate("-n", 2, write(source, "scripts/train.py")).out
    assert sorted(out.splitlines()) == ["[0] 0", "[1] 1"]


def test_an_import_that_waits_for_other_ranks_holds_no_lock(simulate, write):
    write(START + "dist.barrier()\nfrom inner import value", "outer.py")
    write("import torch.distributed as dist\ndist.barrier()\nvalue = dist.get_rank()\ndist.barrier()", "inner.py")
    script = write("import outer\nprint(outer.value)")
    ended = simulate("-n", 4, script)
    assert sorted(ended.out.splitlines()) == ["[0] 0", "[1] 1", "[2] 2", "[3] 3"], ended.err


def test_the_source_of_a_module_is_compiled_once(simulate, write):
    write("def f(): ...", "helper.py")
    script = write("import helper\nprint(id(helper.f.__code__), id(helper.f))")
    first, second = (line.split()[1:] for line in simulate("-n", 2, script).out.splitlines())
    assert first[0] == second[0]
    assert first[1] != second[1]


def test_lines_are_whole_and_marked(simulate, write):
    script = write(START + "sys.stdout.write('a '); dist.barrier(); print(rank)\nsys.stderr.write('end')")
    ended = simulate("-n", 2, script)
    assert sorted(ended.out.splitlines()) == ["[0] a 0", "[1] a 1"]
    assert sorted(ended.err.splitlines()[:2]) == ["[0] end", "[1] end"]


def test_streams_print_logs_and_folders_are_those_of_a_process(simulate, write, tmp_path):
    """Each of these is a habit of training scripts, by which rank 0 alone speaks."""
    write("x", "a/x")
    script = write(
        START
        + textwrap.dedent(
            """
            import builtins, io, logging
            logging.root.setLevel(logging.INFO if rank == 0 else logging.WARNING)
            logger = logging.getLogger(__name__)
            logger.addHandler(logging.StreamHandler(sys.stdout))
            dist.barrier()
            logger.info("information")
            if rank == 1:
                os.chdir("a")
            dist.barrier()
            print(os.path.basename(os.getcwd()))
            show = print
            if rank != 0:
                builtins.print = lambda *_: None
            dist.barrier()
            print("rank 0 prints")
            if rank == 0:
                sys.stdout = io.StringIO()
            dist.barrier()
            show("rank 1 shows")
            """
        )
    )
    ended = simulate("-n", 2, script)
    assert ended.status == 0
    assert [line for line in ended.out.splitlines() if line.startswith("[0]")] == [
        "[0] information",
        f"[0] {tmp_path.name}",
        "[0] rank 0 prints",
    ]
    assert [line for line in ended.out.splitlines() if line.startswith("[1]")] == ["[1] a", "[1] rank 1 shows"]


def test_a_logger_of_a_package_has_what_its_rank_sets(simulate, write):
    script = write(
        START
        + textwrap.dedent(
            """
            import logging
            logger = logging.getLogger("torch")
            logger.setLevel(logging.ERROR if rank else logging.INFO)
            logger.addHandler(logging.NullHandler())
            logger.propagate = rank == 0
            dist.barrier()
            own = [each for each in logger.handlers if type(each) is logging.NullHandler]
            print(logger.level, len(own), logger.propagate, logger.isEnabledFor(logging.WARNING))
            """
        )
    )
    logger = logging.getLogger("torch")
    before = logger.level, list(logger.handlers), logger.propagate
    methods = logging.Logger.addHandler, logging.Logger.addFilter, logging.Logger.__setattr__
    out = simulate("-n", 3, script).out
    assert sorted(out.splitlines()) == ["[0] 20 1 True True", "[1] 40 1 False False", "[2] 40 1 False False"]
    assert (logger.level, logger.handlers, logger.propagate) == before
    assert (logging.Logger.addHandler, logging.Logger.addFilter, logging.Logger.__setattr__) == methods


def test_functions_for_the_exit_are_called_at_the_end_of_a_rank(simulate, write):
    script = write(START + "import atexit\natexit.register(lambda: (dist.barrier(), print('bye')))\nprint('end')")
    out = simulate("-n", 2, script).out.splitlines()
    assert [line for line in out if line.startswith("[0]")] == ["[0] end", "[0] bye"]


@pytest.mark.parametrize(
    ("leaves", "status", "told"),
    [
        ("sys.exit(3)", 3, "rank 1 exited with status 3 (script.py:7)"),
        ("os._exit(4)", 4, "rank 1 exited with status 4 (script.py:7)"),
        ("sys.exit('no data')", 1, "rank 1 exited with status 1: no data (script.py:7)"),
        ("dist.all_reduce(torch.ones(rank))", 1, "rank 1 raised CollectiveMismatch: all_reduce(sum) of float32[1]"),
    ],
)
def test_the_status_is_that_of_the_first_rank_that_fails(simulate, write, leaves, status, told):
    script = write(START + f"if rank == 1:\n    {leaves}\ndist.all_reduce(torch.ones(0))")
    ended = simulate("-n", 2, script)
    assert ended.status == status
    assert f"echelon: {told}" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("width", "rest", "hint"),
    [
        (9, "", "stage 0 was given (float32[2, 9],)"),
        (2, ".loss.backward()", "if this is the loss of a Pipeline's step(), step() has run the backward already: "),
    ],
)
def test_the_line_of_an_error_has_advice_and_shapes(simulate, write, width, rest, hint):
    script = write(
        START
        + f"""
import echelon
from echelon.pipeline import Pipeline
layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
pipe = Pipeline(layers, echelon.init(), "1f1b", 2, torch.nn.functional.mse_loss)
pipe.step(torch.ones(4, {width}), target=torch.ones(4, 2)){rest}
"""
    )
    line = next(line for line in simulate("-n", 2, script).err.splitlines() if line.startswith("echelon: rank "))
    assert f" (script.py:11): {hint}" in line


def test_an_error_of_ours_that_torch_wraps_is_told_as_it_is(simulate, write):
    """torch's C++ waits for the future of a collective, and raises a RuntimeError that has the text of ours."""
    script = write(
        START
        + """
from echelon.errors import Timeout
from echelon.interop.works import Outcome
future = Outcome()
def fail():
    raise Timeout("late: call it sooner")
future.settle(fail)
torch._C._distributed_c10d._create_work_from_future(future).result()
"""
    )
    ended = simulate("-n", 2, script)
    assert ended.status == 1
    assert re.search(r"echelon: rank \d raised Timeout: late: call it sooner", ended.err)
    assert "At:" not in ended.err


def test_an_exception_is_shown_with_the_traceback_of_the_script(simulate, write):
    write("def divide(number):\n    return 1 / number", "helper.py")
    script = write(START + "import helper\ndist.barrier()\nhelper.divide(rank)")
    ended = simulate("-n", 2, script)
    assert ended.status == 1
    assert "echelon: rank 0 raised ZeroDivisionError: division by zero (helper.py:2)" in ended.err
    assert [line for line in ended.err.splitlines() if " line " in line] == [
        f'[0]   File "{os.getcwd()}/script.py", line 8, in <module>',
        f'[0]   File "{os.getcwd()}/helper.py", line 2, in divide',
    ]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("KeyboardInterrupt", "KeyboardInterrupt"),
        ("Own('no')", "Own: no"),
        ("Mute()", "Mute: <exception str() failed>"),
    ],
)
def test_an_exception_of_any_kind_is_that_of_the_rank(simulate, write, error, told):
    script = write(
        START
        + textwrap.dedent(
            f"""
            class Own(BaseException): ...
            class Mute(Exception):
                def __str__(self): raise RuntimeError
            if rank == 1:
                raise {error}
            dist.barrier()
            """
        )
    )
    ended = simulate("-n", 2, script)
    assert ended.status == 1
    assert f"echelon: rank 1 raised {told} (script.py:11)\n[1] Traceback" in ended.err


def test_the_programs_excepthook_is_called(simulate, write):
    script = write(START + "sys.excepthook = lambda *error: print('hook', error[1])\nraise ValueError(f'of {rank}')")
    ended = simulate("-n", 2, script)
    assert sorted(ended.out.splitlines()) == ["[0] hook of 0", "[1] hook of 1"]
    assert "rank 0 raised ValueError: of 0 (script.py:7)" in ended.err


def test_an_error_at_the_exit_is_shown_as_python_shows_it(simulate, write):
    script = write("import atexit\ndef f(): raise ValueError('late')\natexit.register(f)")
    ended = simulate("-n", 1, script)
    first, second, line, *_, last = ended.err.replace("[0] ", "").splitlines()[:-1]
    assert first.startswith("Exception ignored in atexit callback: <function f at ")
    assert second.startswith("Traceback")
    assert "script.py" in line
    assert last == "ValueError: late"
    assert ended.status == 0


def test_a_rank_closes_its_stream_for_itself(simulate, write):
    script = write(START + "if rank == 0: sys.stdout.close()\ndist.barrier()\nif rank == 1: print('open')")
    assert simulate("-n", 2, script).out == "[1] open\n"


def test_a_loss_that_broadcasts_its_target_is_warned_of_once(write):
    source = """
        import echelon, torch
        from echelon.pipeline import Pipeline
        stages = [torch.nn.Linear(2, 1), torch.nn.Identity()]
        pipe = Pipeline(stages, echelon.init(), "gpipe", 4, torch.nn.MSELoss())
        for _ in range(2): pipe.step(torch.ones(8, 2), target=torch.ones(8))
    """
    # A process of its own: pytest catches warnings.
    command = [sys.executable, "-m", "echelon", "simulate", "-n", "2", write(textwrap.dedent(source))]
    errors = subprocess.run(command, capture_output=True, text=True, timeout=60).stderr
    (line,) = [each for each in errors.splitlines() if "Using a target size" in each]
    assert line.startswith("[1] ")


def test_a_mistake_in_the_source_is_told_once(simulate, write):
    ended = simulate("-n", 2, write("print('x'"))
    assert ended.status == 1
    line = write("print('x'") + ":1: SyntaxError: '(' was never closed: print('x'"
    assert ended.err == f"echelon: {line}\n"
    path = write("x = 1\0")
    assert simulate("-n", 1, path).err == (
        f"echelon: {path}: SyntaxError: source code string cannot contain null bytes\n"
    )


def test_a_deadlock_is_explained_without_a_traceback(simulate, write):
    ended = simulate("-n", 2, write(START + "if rank == 0:\n    dist.barrier()"))
    assert ended == (
        1,
        "",
        "echelon: DeadlockError: no rank can go on at 0 s: rank 0 waits for rank 1, which has returned: make both call "
        "the same operations\n"
        "  rank 0 waits for rank 1 in barrier, #1 by dissemination, at script.py:7: dist.barrier()\n"
        "  rank 1 has returned, after no call\n",
    )


def test_a_run_that_fails_has_no_picture_and_says_so(simulate, write, tmp_path):
    script = write(START + "if rank == 0:\n    dist.barrier()")
    ended = simulate("-n", 2, "--html", "step.html", "--chrome", "step.json", script)
    assert ended.status == 1
    assert ended.err.endswith(
        "echelon: did not write step.html: the run failed\nechelon: did not write step.json: the run failed\n"
    )
    assert not list(tmp_path.glob("step.*"))


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_shows_where_each_rank_is(simulate, write, name, status):
    script = write(
        START
        + textwrap.dedent(
            f"""
            import signal, threading
            if rank == 1:
                signal.pthread_kill(threading.main_thread().ident, signal.{name})
                while True:
                    sum(range(1000))
            dist.barrier()
            """
        )
    )
    ended = simulate("-n", 2, script)
    assert ended.status == status
    assert ended.err.splitlines()[0] == f"echelon: ended by {name}"
    assert "echelon: rank 1 runs, at script.py:1" in ended.err
    assert "echelon: rank 0 waits for rank 1 in barrier" in ended.err or "rank 0 has not begun" in ended.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("-n", 2, "missing.py"), "script 'missing.py' does not exist"),
        (("-n", 2, "-m", "missing"), "no module is called 'missing'"),
        (("script.py",), "Missing option '-n'"),
        (("script.py", "-n", 4), "-n stands after the script, which gets it; options go before: echelon simulate -n 4"),
        (("-n", 0, "script.py"), "-n 0: a world has at least 1 rank"),
        (("-n", 2, "--network", "10Gb", "script.py"), "--network 10Gb: did you mean 10GbE?"),
        (("-n", 2, "--costs", "free", "script.py"), "--costs free: only measured costs"),
        (("-n", 2, "--faults", "kill:1", "script.py"), "--faults kill:1: write it as kill:2@op=17"),
        (("-n", 2, "--faults", "kill:5@t=1", "script.py"), ": 5 is not one of 2 ranks: use 0 to 1"),
        (("-n", 2, "--seed", "-1", "script.py"), "--seed -1: give a number greater than or equal to 0"),
        (("-n", 2, "--order", "mpi", "script.py"), "--order mpi: use one of shm, tcp"),
        (("-n", 2, "--collectives", "none", "script.py"), "--collectives none: use one of whole, messages"),
        (("-n", 2, "--explore", "0", "script.py"), "--explore 0: give the number of seeds"),
        (("-n", 2, "--explore", "9", "--memory", "script.py"), "--memory with --explore"),
        (("-n", 2, "--png", "a.svg", "script.py"), "--png a.svg: give a name that ends in .png"),
        (("--json", "script.py"), "Missing option '-n'"),
        (("-n", 2, "--json", "missing.py"), "script 'missing.py' does not exist"),
        (("-n", 2, "--json", "--seed", "-1", "script.py"), "--seed -1: give a number greater than or equal to 0"),
        (("-n", 2, "--json", "--explore", "0", "script.py"), "--explore 0: give the number of seeds"),
        (("-n", 2, "--json", "--fly", "script.py"), "No such option: --fly"),
    ],
)
def test_a_wrong_command_is_told_in_one_line(simulate, write, words, told):
    write("print('never run')")
    ended = simulate(*words)
    assert (ended.status, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert told in ended.err


def test_a_fault_ends_a_rank(simulate, write):
    script = write(START + "dist.all_reduce(torch.ones(2))\nprint('end')")
    ended = simulate("-n", 2, "--faults", "delay:*-*:1,kill:1@op=2", script)
    assert ended.status == 1
    assert "rank 0 raised PeerFailed: rank 1 failed: killed" in ended.err


def test_a_fault_that_never_happens_is_noted(simulate, write):
    script = write(START + "dist.send(torch.ones(2), 1) if dist.get_rank() == 0 else dist.recv(torch.ones(2), 0)")
    ended = simulate("-n", 2, "--faults", "kill:1@op=100,delay:0-1:1", script)
    assert ended.status == 0
    told = [line for line in ended.err.splitlines() if "did not happen" in line]
    assert told == ["echelon: note: kill:1@op=100 did not happen: rank 1 sent and received 1 message"]


def test_what_a_simulation_finds_is_told_and_written(simulate, write, tmp_path):
    script = write(START + "dist.all_reduce(torch.ones(1000))")
    words = ("--network", "10GbE", "--costs", "measured", "--memory", "--chrome", "a.json", "--png", "a.png")
    ended = simulate("-n", 2, *words, script)
    assert ended.status == 0
    assert (tmp_path / "a.json").stat().st_size > 0
    assert (tmp_path / "a.png").stat().st_size > 0
    *told, summary = ended.err.splitlines()
    assert told == [
        "echelon: rank 0: peak of 4 kB",
        "echelon: rank 1: peak of 4 kB",
        "echelon: wrote a.png",
        "echelon: wrote a.json",
    ]
    assert summary.startswith("echelon: 2 ranks, 0.")


def test_exploring_shows_the_failing_seed_alone_and_how_to_replay_it(simulate, write):
    script = write(RACE)
    ended = simulate("-n", 3, "--explore", 20, script, "a b")
    assert ended.status == 1
    assert ended.out == "[0] first is 2\n"
    last = ended.err.splitlines()[-1]
    words = ("-n", "3", "--collectives", "messages", "--seed", last.split()[2])
    assert last.endswith(f"to replay it: echelon simulate {' '.join(words)} script.py 'a b'")
    again = simulate(*words, script, "a b")
    assert (again.status, again.out) == (1, "[0] first is 2\n")


def test_exploring_tells_how_many_seeds_passed(simulate, write):
    ended = simulate("-n", 2, "--seed", 5, "--explore", 3, write(START + "dist.barrier()\nprint('x')"))
    assert ended == (0, "", "echelon: 2 ranks, 3 seeds passed, from 5 on\n")


def test_json_has_the_results_and_the_lines_for_people_stay_on_stderr(simulate, write):
    script = write(
        START
        + "print('own')\nif rank == 0:\n    dist.send(torch.ones(1000), 1)\nelse:\n    dist.recv(torch.ones(1000))"
    )
    words = ("--seed", 3, "--network", "10GbE", "--memory", "--chrome", "a.json")
    ended = simulate("-n", 2, "--json", *words, script)
    found = json.loads(ended.out)
    assert found.pop("elapsed") > 3.2e-6  # 4 kB at 10 Gbit/s
    assert found == {
        "status": "finished",
        "num_ranks": 2,
        "seed": 3,
        "bytes_sent": 4000,
        "bytes_by_pair": [{"sender": 0, "receiver": 1, "bytes": 4000}],
        "peak_memory": [4000, 8000],
        "notes": [],
        "files": ["a.json"],
    }
    plain = simulate("-n", 2, *words, script)
    assert ended.err == plain.out + plain.err


def test_the_marks_of_ranks_have_the_colours_of_the_stream_that_gets_them(simulate, write, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    script = write("print('own')")
    assert simulate("-n", 1, script).out == "\x1b[36m[0] \x1b[0mown\n"
    assert simulate("-n", 1, "--json", script).err.startswith("[0] own\n")


def test_json_has_the_notes(simulate, write):
    found = json.loads(simulate("-n", 2, "--json", write("print('alone')")).out)
    (note,) = found["notes"]
    assert note.startswith("no rank has communicated, so each of them ran the whole program by itself")
    assert (found["peak_memory"], found["files"]) == (None, [])


@pytest.mark.parametrize(
    ("leaves", "status", "found"),
    [
        ("sys.exit(3)", 3, ("failed", 1, "SystemExit", "rank 1 exited with status 3 (script.py:7)")),
        (
            "1 / 0",
            1,
            ("failed", 1, "ZeroDivisionError", "rank 1 raised ZeroDivisionError: division by zero (script.py:7)"),
        ),
        (
            "dist.barrier()",
            1,
            ("deadlock", None, "DeadlockError", "DeadlockError: no rank can go on at 0 s: rank 1 waits for rank 0"),
        ),
        (
            "raise echelon.errors.UnsupportedOp('no: yes')",
            1,
            ("failed", 1, "UnsupportedOp", "rank 1 raised UnsupportedOp: no: yes"),
        ),
    ],
)
def test_json_has_the_failure(simulate, write, tmp_path, leaves, status, found):
    script = write(START + f"if rank == 1:\n    {leaves}".replace("raise echelon", "import echelon; raise echelon"))
    plain = simulate("-n", 2, "--seed", 4, "--html", "a.html", script)
    ended = simulate("-n", 2, "--seed", 4, "--html", "a.html", "--json", script)
    assert ended.status == plain.status == status
    assert ended.err == plain.err
    values = json.loads(ended.out)
    names = ("status", "num_ranks", "seed", "failed_rank", "error_type", "error")
    assert tuple(values) == names
    *others, error = (values[name] for name in names)
    assert others == [found[0], 2, 4, *found[1:3]]
    assert error.startswith(found[3])
    assert f"echelon: {error}\n" in ended.err


def test_json_has_a_mistake_in_the_source(simulate, write):
    found = json.loads(simulate("-n", 2, "--json", write("print('x'")).out)
    assert (found["status"], found["failed_rank"], found["error_type"]) == ("failed", None, "SyntaxError")


RACE = """
import echelon, torch
group = echelon.init()
if group.rank > 0:
    group.send(torch.ones(1), 0)
else:
    first = group.recv_any().src
    group.recv(3 - first)
    print("first is", first)
    assert first == 1
"""


def test_json_of_exploring_has_the_failing_seed(simulate, write):
    script = write(RACE)
    words = ("-n", 3, "--seed", 1, "--explore", 20)
    plain, ended = simulate(*words, script), simulate(*words, "--json", script)
    assert ended.status == plain.status == 1
    assert ended.err == plain.out + plain.err
    found = json.loads(ended.out)
    seed = found["seed"]
    assert found == {
        "status": "failed",
        "num_ranks": 3,
        "seed": seed,
        "failed_rank": 0,
        "error_type": "AssertionError",
        "error": "rank 0 raised AssertionError (script.py:10)",
        "replay": f"echelon simulate -n 3 --collectives messages --seed {seed} script.py",
        "first_seed": 1,
        "num_tried": seed,
        "num_failed": 1,
    }


def test_json_of_exploring_has_the_number_of_seeds(simulate, write):
    ended = simulate("-n", 2, "--seed", 5, "--explore", 3, "--json", write(START + "dist.barrier()\nprint('x')"))
    assert (ended.status, ended.err) == (0, "echelon: 2 ranks, 3 seeds passed, from 5 on\n")
    assert json.loads(ended.out) == {
        "status": "finished",
        "num_ranks": 2,
        "first_seed": 5,
        "num_tried": 3,
        "num_failed": 0,
    }


AROUND_PYTHON = """
import ctypes
print("print")
os.write(1, b"write\\n")
ctypes.CDLL(None).puts(b"puts")
os.system("echo child")
print("dunder", file=sys.__stdout__)
dist.barrier()
"""
"""C code, child processes and `sys.__stdout__` know the file descriptor, not the streams of the ranks."""

TO_THE_END = """
import contextlib, threading, time
def noise():
    while True:
        os.write(1, b"noise ")
        with contextlib.suppress(ValueError):  # it is closed below
            print("noise")
        time.sleep(0.001)
if rank == 0:
    threading.Thread(target=noise, daemon=True).start()
    sys.__stdout__.close()
else:
    sys.stdout.close()
"""
"""A thread prints until the process ends, and the streams of a rank and of the process are closed."""

BESIDE = """
try:
    import beside
except ModuleNotFoundError as error:
    print(error)
"""


def json_of_a_process(command, folder, script):
    """Runs a command as `python -m echelon`, which finds modules in the working folder; returns its JSON and errors."""
    # C has a buffer then, which is written when the process ends.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "echelon", command, "-n", "2", "--json", script]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, env=environ)
    assert (ended.returncode, ended.stdout[-1:]) == (0, "\n"), ended.stderr[-2000:]
    return json.loads(ended.stdout), ended.stderr


SHOWN = {"[0] print", "[1] print", "write", "puts", "dunder"}


def test_a_process_prints_whole_json_and_does_not_search_its_folder(write, tmp_path):
    """One process for all of it, since it imports torch for seconds.

    Whatever a script does to standard output, JSON is whole, and output that goes around Python does not mix into it.
    The folder of the command is not searched for modules: `python scripts/train.py` does not either.
    """
    write("", "beside.py")
    found, errors = json_of_a_process(
        "simulate", tmp_path, write(START + BESIDE + AROUND_PYTHON + TO_THE_END, "scripts/train.py")
    )
    assert found["status"] == "finished"
    assert {*SHOWN, "[0] No module named 'beside'"} <= set(re.sub("(noise *\n?)+", "", errors).splitlines())


@pytest.mark.slow
def test_output_that_goes_around_python_does_not_mix_into_json_of_foresee(write, tmp_path):
    _, errors = json_of_a_process("foresee", tmp_path, write(START + AROUND_PYTHON))
    assert set(errors.splitlines()) >= SHOWN


def test_a_caller_in_the_same_process_keeps_its_standard_output(write, capfd):
    script = write("print('x')")
    for _ in range(2):
        assert main(["simulate", "-n", "1", "--json", script]) == 0
        assert json.loads(capfd.readouterr().out)["status"] == "finished"
    os.write(1, b"own")
    assert capfd.readouterr() == ("own", "")


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("torch.cuda.set_device(rank)", "CUDA at script.py:6: torch.cuda.set_device(rank): simulated ranks compute on"),
        ("torch.ones(1).to('cuda')", "CUDA at script.py:6: torch.ones(1).to('cuda'): simulated ranks compute on"),
        ("torch.cuda.Stream()", "CUDA at script.py:6: torch.cuda.Stream(): simulated ranks compute on"),
        ("os.fork()", "os.fork at script.py:6: os.fork(): simulated ranks are threads"),
        ("os.kill(os.getpid(), 9)", "os.kill of the process at script.py:6"),
        ("os.kill(-os.getpgrp(), 18)", "os.kill of the process at script.py:6"),
        ("os.killpg(os.getpgrp(), 18)", "os.killpg of the process at script.py:6"),
        ("__import__('signal').alarm(5)", "signal.alarm at script.py:6"),
        ("dist.rpc.init_rpc('a')", "torch.distributed.rpc.init_rpc at script.py:6"),
        (
            "import multiprocessing as m; m.Process(target=lambda: 0).start()",
            "a process of <lambda> is started at script.py:6",
        ),
        (
            "torch.multiprocessing.spawn(print, nprocs=3)",
            "torch.multiprocessing.spawn(nprocs=3) on 2 simulated ranks",
        ),
    ],
)
def test_a_call_that_concerns_the_process_is_refused_in_one_line(simulate, write, source, told):
    ended = simulate("-n", 2, write(f"{START}{source}"))
    assert ended.status == 1
    assert told in ended.err
    assert ended.err.count("\n") == 1


def test_spawn_of_torch_runs_the_function_as_each_rank(simulate, write):
    script = write(
        """
        import os, torch.distributed as dist, torch.multiprocessing as mp
        def run(rank, world_size):
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
            dist.init_process_group("gloo", rank=rank, world_size=world_size)
            dist.barrier()
            print(rank, world_size)
        if __name__ == "__main__":
            mp.spawn(run, args=(2,), nprocs=2)
            assert mp.spawn(lambda _: None, nprocs=2, join=False).join()
        """
    )
    assert sorted(simulate("-n", 2, script).out.splitlines()) == ["[0] 0 2", "[1] 1 2"]


def test_operators_are_defined_once_for_all_ranks_and_not_after_the_end(simulate, write):
    """torch refuses a second definition, or frees the first one: the rank that had made it called into freed memory."""
    script = write(
        START
        + textwrap.dedent(
            """
            @torch.library.custom_op("echelon_tests::double", mutates_args=())
            def double(tensor: torch.Tensor) -> torch.Tensor:
                return tensor * 2
            library = torch.library.Library("echelon_tests_of_library", "DEF")
            library.define("triple(Tensor x) -> Tensor")
            library.impl("triple", lambda x: x * 3 if library else None, "CPU")
            torch.library.define("echelon_tests::more", "(Tensor x) -> Tensor")
            @torch.library.impl("echelon_tests::more", "cpu")
            def more(x): return x + 1
            dist.barrier()
            one = torch.ones(1)
            ops = torch.ops.echelon_tests
            print(double(one).item(), torch.ops.echelon_tests_of_library.triple(one).item(), ops.more(one).item())
            """
        )
    )
    for seed in range(3):
        ended = simulate("-n", 2, "--seed", seed, script)
        assert sorted(ended.out.splitlines()) == ["[0] 2.0 3.0 2.0", "[1] 2.0 3.0 2.0"], ended.err


def test_a_cached_property_may_wait_for_other_ranks(simulate, write):
    """In Python 3.11 it has a lock, which all ranks share where the class is that of an installed package."""
    script = write(
        START
        + textwrap.dedent(
            """
            import functools
            class Setup:
                @functools.cached_property
                def total(self):
                    total = torch.ones(1)
                    dist.all_reduce(total)
                    return total.item()
            shared = torch.__dict__.setdefault("_class_of_a_test", Setup)
            print(shared().total)
            """
        )
    )
    try:
        assert sorted(simulate("-n", 2, script).out.splitlines()) == ["[0] 2.0", "[1] 2.0"]
    finally:
        del sys.modules["torch"]._class_of_a_test
    assert "lock" not in vars(functools.cached_property)


def test_signals_can_be_set_up(simulate, write):
    script = write(
        """
        import signal
        def handler(*_): ...
        before = signal.signal(signal.SIGTERM, handler)
        assert signal.getsignal(signal.SIGTERM) is handler
        assert signal.signal(signal.SIGTERM, before) is handler
        """
    )
    handler = signal.getsignal(signal.SIGTERM)
    assert simulate("-n", 2, script).status == 0
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_thread_of_the_program_may_compute_but_not_communicate(simulate, write):
    talk = START + textwrap.dedent(
        """
        import threading
        results = []
        thread = threading.Thread(target=lambda: results.append({}), name="mine")
        thread.start()
        thread.join()
        print(len(results))
        """
    )
    assert sorted(simulate("-n", 2, write(talk.format("1"))).out.splitlines()) == ["[0] 1", "[1] 1"]
    ended = simulate("-n", 2, write(talk.format("dist.barrier()")))
    assert ended.status == 1
    assert ended.err.startswith("echelon: UnsupportedOp: thread 'mine' communicates at script.py:9: thread = ")
    assert ended.err.count("\n") == 1


def test_a_rank_that_blocks_outside_of_the_scheduler_is_told(simulate, write, monkeypatch):
    monkeypatch.setattr(watchdog, "PATIENCE", 0.5)
    # The test runner has threads of its own that wait for pipes.
    monkeypatch.setattr(watchdog.Watchdog, "_waits_outside", lambda *_: False)
    script = write(
        START
        + textwrap.dedent(
            """
            import threading
            locks = torch.__dict__.setdefault("_lock_of_a_test", threading.Lock())
            with locks:
                dist.barrier()
            """
        )
    )
    try:
        ended = simulate("-n", 2, script)
    finally:
        del sys.modules["torch"]._lock_of_a_test
    assert ended.status == 1
    assert "waits for another thread outside of Echelon, at script.py:9: with locks:" in ended.err
    assert "in barrier, #1 by dissemination, at script.py:10: dist.barrier()" in ended.err


def test_the_process_is_as_before(simulate, write):
    write("value = 1", "helper.py")
    script = write(
        START
        + textwrap.dedent(
            """
            import helper, logging
            os.environ["OF_A_RANK"] = "1"
            sys.path.append("of a rank")
            sys.argv.append("of a rank")
            logging.basicConfig()
            logging.getLogger("of a rank")
            os.chdir("/")
            if rank == 0:
                sys.exit(1)
            dist.barrier()
            """
        )
    )

    def state():
        return (
            {name: id(module) for name, module in sys.modules.items()},
            (list(sys.meta_path), list(sys.path), list(sys.argv), dict(os.environ), os.getcwd()),
            (sys.stdout, sys.stderr, print, threading.excepthook, sys.excepthook, signal.signal, os.fork, os._exit),
            (list(logging.root.handlers), logging.root.level, "of a rank" in logging.root.manager.loggerDict),
            (threading.active_count(), torch_calls()),
        )

    def torch_calls():
        torch = sys.modules["torch"]
        return torch.cuda.is_available, torch.cuda._lazy_init, torch.multiprocessing.spawn

    assert simulate("-n", 2, script).status == 1  # whatever is imported late is imported now
    before = state()
    assert simulate("-n", 2, script).status == 1
    assert state() == before


@pytest.mark.slow
def test_workers_of_a_loader_and_pools_work(simulate, write):
    write("def square(x): return x * x", "task.py")
    script = write(
        START
        + textwrap.dedent(
            """
            from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
            from multiprocessing import Pool
            from task import square
            from torch.utils.data import DataLoader
            from torch.utils.data.distributed import DistributedSampler
            data = list(range(8))
            import warnings
            warnings.filterwarnings("ignore", "This DataLoader will create")  # if the machine has few cores
            for batch in DataLoader(data, batch_size=2, num_workers=2, sampler=DistributedSampler(data, shuffle=False)):
                dist.all_reduce(batch)
                print(batch.tolist())
            for pool in (Pool(2), ThreadPoolExecutor(2), ProcessPoolExecutor(2)):
                with pool:
                    print(list(pool.map(square, [1, 2, 3])))
            """
        )
    )
    ended = simulate("-n", 2, script)
    assert ended.status == 0, ended.err
    expected = ["[0] [1, 5]", "[0] [9, 13]", *["[0] [1, 4, 9]"] * 3]
    assert [line for line in ended.out.splitlines() if line.startswith("[0]")] == expected


@pytest.mark.slow
def test_a_rank_that_waits_for_the_outside_is_left_alone(simulate, write, monkeypatch):
    monkeypatch.setattr(watchdog, "PATIENCE", 0.5)
    script = write("import subprocess, time\ntime.sleep(2.5)\nsubprocess.run(['sleep', '2.5'])\nprint('end')")
    assert simulate("-n", 1, script).out == "[0] end\n"


EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("ddp", "pipeline", "train_gpt --steps 2"),
        *(
            f"interop/train_{name}"
            for name in ("accelerate", "checkpoint store", "ddp", "dtensor", "fsdp2", "lightning")
        ),
        "interop/train_pipelining",
    ],
)
def test_the_examples_run(name, tmp_path):
    """In a process of their own, as a user runs them."""
    script, *words = name.split()
    command = [sys.executable, "-m", "echelon", "simulate", "-n", "4", str(EXAMPLES / f"{script}.py"), *words]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "loss" in ended.stdout
    assert "echelon: 4 ranks" in ended.stderr


@pytest.mark.slow
def test_a_signal_from_outside_ends_a_rank_that_sleeps(write, tmp_path):
    script = write("import time\nprint('sleeps'), time.sleep(60)")
    command = [sys.executable, "-u", "-m", "echelon", "simulate", "-n", "2", script]
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as ended:
        assert ended.stdout.readline().endswith("sleeps\n")
        ended.send_signal(signal.SIGINT)
        _, err = ended.communicate(timeout=40)
    assert ended.returncode == 130
    assert "runs, at script.py:2: print('sleeps'), time.sleep(60)" in err
    assert "has not begun" in err
    assert time.monotonic() - began < 30


def test_a_long_simulation_is_under_way(simulate, write, monkeypatch):
    """It was silent for as long as its ranks were, such as while a pipeline is traced."""
    under_way = []

    @contextmanager
    def working(what, **_):
        under_way.append(what)
        yield
        under_way.clear()

    monkeypatch.setattr("echelon.cli.simulate.working", working)
    monkeypatch.setattr(builtins, "under_way", under_way, raising=False)
    assert simulate("-n", 1, write("print(under_way)")).out == "[0] ['simulating 1 rank']\n"
