"""`echelon run` on real processes. The scripts import no torch, so each test takes a fraction of a second."""

import contextlib
import io
import os
import re
import select
import signal
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import threading
from collections import namedtuple

import pytest

import echelon
from echelon.cli.foresee import foresee
from echelon.cli.misplaced import note_misplaced
from echelon.cli.options import options_of
from echelon.cli.run import run as run_command
from echelon.cli.simulate import simulate
from echelon.launch import whereabouts
from echelon.launch.output import Console, MarkedStream

Ended = namedtuple("Ended", "status out err")

PRELUDE = """
import os, pathlib, signal, subprocess, sys, threading, time
rank = int(os.environ["RANK"])
"""


@pytest.fixture
def script(tmp_path):
    """Writes a script, given as its source, and returns its path."""

    def write(source):
        path = tmp_path / "script.py"
        path.write_text(PRELUDE + textwrap.dedent(source))
        return str(path)

    return write


def command(num_ranks, *arguments):
    return [sys.executable, "-m", "echelon", "run", "-q", "-n", str(num_ranks), *arguments]


def run(num_ranks, *arguments, **environ):
    ended = subprocess.run(
        command(num_ranks, *arguments), capture_output=True, text=True, timeout=90, env={**os.environ, **environ}
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


@contextlib.contextmanager
def started(num_ranks, *arguments):
    """A launcher that runs while the with block does."""
    with subprocess.Popen(
        command(num_ranks, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


def has_ended(pid, seconds=10):
    """Waits for the end of a process that need not be our child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


def test_lines_are_marked_with_the_rank_that_printed_them(script):
    ended = run(3, script("print('hello'); print('to', 'stderr', file=sys.stderr)"))
    assert ended.status == 0
    assert sorted(ended.out.splitlines()) == ["[0] hello", "[1] hello", "[2] hello"]
    assert sorted(ended.err.splitlines()) == ["[0] to stderr", "[1] to stderr", "[2] to stderr"]


def test_every_rank_is_told_who_it_is(script):
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
    path = script(f"print(*[os.environ[name] for name in {names}], os.environ['MASTER_PORT'] > '0')")
    ended = run(2, path, RANK="7", TORCHELASTIC_RUN_ID="outer")
    assert sorted(ended.out.splitlines()) == ["[0] 0 0 2 2 127.0.0.1 True", "[1] 1 1 2 2 127.0.0.1 True"]


def test_ranks_share_a_new_secret_and_nothing_of_another_launcher(script):
    path = script("print(os.environ['ECHELON_SECRET'], os.environ.get('TORCHELASTIC_RUN_ID'))")
    first, second = (run(2, path, TORCHELASTIC_RUN_ID="outer").out.split() for _ in range(2))
    assert len(first[1]) == 64
    assert first[1] == first[4] != second[1]
    assert first[2] == "None"


def test_threads_are_shared_out_unless_given(script):
    path = script("print(os.environ['OMP_NUM_THREADS'])")
    environ = {"OMP_NUM_THREADS": "5"}
    assert run(1, path, **environ).out == "[0] 5\n"
    del environ["OMP_NUM_THREADS"]
    ended = subprocess.run(
        command(1, path),
        capture_output=True,
        text=True,
        timeout=30,
        env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
    )
    assert ended.stdout == f"[0] {len(os.sched_getaffinity(0))}\n"


def test_what_follows_the_script_is_passed_on(script):
    path = script("print(sys.argv[1:])")
    assert run(1, path, "-n", "3", "--grace", "x").out == "[0] ['-n', '3', '--grace', 'x']\n"


@pytest.mark.parametrize(
    ("source", "args", "misplaced"),
    [
        ("", ["--grace", "2"], "--grace stands after the script, which gets it"),
        ("", ["--quiet", "--grace=2"], "--quiet and --grace stand after the script, which gets them"),
        ("parser.add_argument('--grace')", ["--grace", "2"], None),
        ("class Options:\n    grace: float = 1.0", ["--grace", "2"], None),
        ("", ["--epochs", "2", "grace"], None),
    ],
)
def test_a_misplaced_option_is_pointed_out_unless_the_script_has_it(tmp_path, source, args, misplaced):
    path = tmp_path / "script.py"
    path.write_text(source)
    told = io.BytesIO()
    note_misplaced(Console(told, told), run_command, str(path), args)
    expected = f"echelon: note: {misplaced}; options of echelon run go before {path}\n" if misplaced else ""
    assert told.getvalue().decode() == expected


@pytest.mark.parametrize("command", [run_command, simulate, foresee])
def test_misplaced_options_are_those_of_the_command(command):
    known = options_of(command)
    assert (known["-n"], known["--num-ranks"], known["-m"], known["--module"]) == (True, True, False, False)
    assert ("--late-sends" in known) == (command is simulate)
    assert ("--allow-writes" in known) == (command is foresee)


def test_a_module_runs_like_python_m():
    ended = run(1, "-m", "json.tool", "--help")
    assert ended.status == 0
    assert "json.tool" in ended.out


def test_output_comes_at_once(script):
    with started(1, script("print('now'); threading.Event().wait()")) as launcher:
        assert launcher.stdout.readline() == "[0] now\n"


def test_the_traceback_and_the_status_of_a_failing_rank_are_passed_on(script):
    ended = run(2, script("if rank == 1: raise ValueError('bad')"))
    assert ended.status == 1
    assert "[1] ValueError: bad" in ended.err
    assert ended.err.splitlines()[-1] == "echelon: rank 1 exited with status 1: ValueError: bad"
    assert run(2, script("sys.exit(3 * rank)")).status == 3


def test_a_killed_rank_is_named_and_the_others_end_soon(script):
    path = script("os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else threading.Event().wait()")
    ended = run(3, "--grace", "0.5", path)
    assert ended.status == 128 + signal.SIGKILL
    assert "echelon: rank 1 was killed by SIGKILL" in ended.err
    assert "then ranks 0 and 2 kept running for 0.5 s and were terminated" in ended.err


def test_a_rank_that_ignores_sigterm_is_killed(script):
    path = script("""
        if rank == 1:
            sys.exit(1)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Event().wait()
    """)
    ended = run(2, "--grace", "0.5", path)
    assert ended.status == 1  # and not at all, if it went on


REPORTING = """
    from echelon.errors import PeerFailed
    from echelon.launch import report
    class Group:
        rank = rank
        def abort(self, reason, origin=None): pathlib.Path(sys.argv[1], f"aborted{self.rank}").touch()
    def wait_for(name):
        while not pathlib.Path(sys.argv[1], name).exists(): time.sleep(0.01)
    report.report_uncaught(Group())
"""


def test_a_survivor_that_reports_first_does_not_hide_the_cause(script, tmp_path):
    path = script(
        textwrap.dedent(REPORTING)
        + textwrap.dedent("""
        if rank == 1:
            wait_for("aborted0")
            os.kill(os.getpid(), signal.SIGKILL)
        raise PeerFailed(1, "its process died")
    """)
    )
    ended = run(2, path, str(tmp_path))
    assert ended.status == 128 + signal.SIGKILL
    lines = ended.err.splitlines()
    assert lines[0] == "echelon: rank 1 was killed by SIGKILL"
    assert lines[1].startswith("echelon: then rank 0 raised PeerFailed: rank 1 failed: its process died (")
    assert lines[2] == "echelon: root cause: rank 1 was killed by SIGKILL"


def test_the_others_may_still_report_after_the_first_end_was_noticed(script, tmp_path):
    path = script(
        textwrap.dedent(REPORTING)
        + textwrap.dedent("""
        if rank == 1:
            pathlib.Path(sys.argv[1], "pid.new").write_text(str(os.getpid()))
            pathlib.Path(sys.argv[1], "pid.new").rename(pathlib.Path(sys.argv[1], "pid"))
            sys.exit(7)
        wait_for("pid")
        while pathlib.Path("/proc", pathlib.Path(sys.argv[1], "pid").read_text()).exists():
            time.sleep(0.01)  # the launcher has not noticed yet
        raise PeerFailed(1, "it left")
    """)
    )
    ended = run(2, path, str(tmp_path))
    assert ended.status == 7
    assert "echelon: then rank 0 raised PeerFailed: rank 1 failed: it left (" in ended.err


def test_the_traceback_of_the_cause_comes_first_and_only_once(script, tmp_path):
    path = script(
        textwrap.dedent(REPORTING)
        + textwrap.dedent("""
        if rank == 2:
            raise KeyError("the cause")
        wait_for("aborted2")
        raise PeerFailed(2, "KeyError: the cause", f"rank {rank} in barrier, #1 at train.py:5")
    """)
    )
    ended = run(3, path, str(tmp_path))
    assert ended.status == 1
    lines = ended.err.splitlines()
    assert lines[0].startswith("echelon: rank 2 raised KeyError: 'the cause' (")
    assert lines[1] == "[2] Traceback (most recent call last):"
    assert ended.err.count("Traceback") == 1
    assert lines[-2] == "echelon: then ranks 0 and 1 failed in barrier, #1 at train.py:5"
    assert lines[-1] == lines[0].replace("rank 2", "root cause: rank 2"), "with one place"


@pytest.mark.parametrize("text", ["short", "long " * 40 + "text"])
def test_the_first_and_the_last_line_have_the_hint(script, tmp_path, text):
    path = script(
        textwrap.dedent(REPORTING)
        + textwrap.dedent(f"""
        from echelon.hint import Hint
        if rank == 1:
            error = ValueError({text!r})
            error.add_note(Hint("do that"))
            error.add_note("in stage 1")
            raise error
        wait_for("aborted1")
        raise PeerFailed(1, "ValueError: {text}")
    """)
    )
    lines = run(2, path, str(tmp_path)).err.splitlines()
    assert lines[0].startswith(f"echelon: rank 1 raised ValueError: {text} ({path}:")
    assert lines[0].endswith("): do that")
    assert lines[-1].startswith("echelon: root cause: rank 1 raised ValueError")
    assert lines[-1].endswith(": do that")


def test_files_are_named_as_from_the_working_folder(script, tmp_path, monkeypatch):
    """As `echelon simulate` names them."""
    path = script(
        textwrap.dedent(REPORTING)
        + textwrap.dedent("""
        if rank == 1:
            raise KeyError("the cause")
        wait_for("aborted1")
        raise PeerFailed(1, "KeyError: the cause")
    """)
    )
    monkeypatch.chdir(tmp_path)
    first, *_, then, cause = run(2, path, str(tmp_path)).err.splitlines()
    assert re.fullmatch(r"echelon: rank 1 raised KeyError: 'the cause' \(script\.py:\d+\)", first)
    assert re.search(r" \(script\.py:\d+\)$", then)
    assert re.search(r" \(script\.py:\d+\)$", cause)


def test_a_long_error_is_told_once(script, tmp_path):
    path = script(
        textwrap.dedent(REPORTING)
        + textwrap.dedent("""
        if rank == 1:
            raise ValueError("long " * 40 + "text")
        wait_for("aborted1")
        raise PeerFailed(1, f"ValueError: {'long ' * 40}text")
    """)
    )
    ended = run(2, path, str(tmp_path))
    assert ended.err.count("long long text") == 1
    *_, trace, then, cause = ended.err.splitlines()
    assert trace == "[1] ValueError: see above"
    assert then.startswith("echelon: then rank 0 raised PeerFailed: rank 1 failed: ValueError: see above (")
    assert re.fullmatch(rf"echelon: root cause: rank 1 raised ValueError \({path}:\d+\), see above", cause)


def test_an_error_with_a_file_name_that_is_no_text_is_told(script):
    """The launcher failed on the name, and said nothing of the rank."""
    ended = run(
        2,
        script(
            """
            from echelon.launch import report
            if rank == 1:
                error = OSError(f"no file {os.fsdecode(bytes([255]))}")
                assert report.write(os.environ["ECHELON_ERROR_FILE"], report.describe(1, error))
                sys.exit(1)
            """
        ),
    )
    assert ended.status == 1
    assert "echelon: rank 1 raised OSError: no file \\udcff" in ended.err
    assert "[1] OSError: no file \\udcff" in ended.err


def test_a_job_that_cannot_be_started_is_told_without_a_traceback(script, tmp_path):
    text = "raise echelon.LaunchError(\"backend='mpi' needs mpi: use backend='gloo'\")"
    ended = run(2, script(textwrap.dedent(REPORTING) + "import echelon\n" + text), str(tmp_path))
    first, last = ended.err.splitlines()
    assert "raised LaunchError: backend='mpi' needs mpi: use backend='gloo' (" in first
    assert last.startswith("echelon: all 2 ranks failed alike: each raised LaunchError: ")


def test_ranks_that_all_fail_alike_have_no_root_cause(script, tmp_path):
    path = script(textwrap.dedent(REPORTING) + "raise KeyError('the cause')")
    ended = run(3, path, str(tmp_path))
    assert ended.status == 1
    assert ended.err.splitlines()[-1].startswith(
        "echelon: all 3 ranks failed alike: each raised KeyError: 'the cause' ("
    )
    assert "root cause" not in ended.err
    assert "then rank" not in ended.err
    ended = run(2, script("sys.exit(3)"))
    assert ended.err.splitlines()[-1] == "echelon: all 2 ranks failed alike: each exited with status 3"
    ended = run(
        2, script(textwrap.dedent(REPORTING) + "raise ValueError('one long line of a message\\n' * 8)"), str(tmp_path)
    )
    assert ended.err.count("message one long line") == 7, "not in the traceback, and not at the end"
    assert re.search(r"all 2 ranks failed alike: each raised ValueError \(.*\), see above\n$", ended.err)
    ended = run(3, script("sys.exit(3 * (rank > 0))"))
    assert "alike" not in ended.err, "rank 0 ended well"


def test_a_rank_that_reported_but_does_not_leave_is_still_the_cause(script, tmp_path):
    path = script(
        textwrap.dedent(REPORTING)
        + textwrap.dedent("""
        if rank == 0:
            threading.Thread(target=threading.Event().wait).start()
            raise KeyError("the cause")
        wait_for("aborted0")
        raise PeerFailed(0, "KeyError: the cause")
    """)
    )
    ended = run(2, "--grace", "0.5", path, str(tmp_path))
    assert ended.err.startswith("echelon: rank 0 raised KeyError: 'the cause' (")
    assert ended.status == 1


UNKNOWN = (
    "where the ranks were is not known, as none has answered: run a script that hangs by echelon simulate, or on the "
    "backend of echelon.interop"
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_ranks(script, number):
    path = script("""
        signal.signal(signal.SIGRTMAX - 7, signal.SIG_IGN)  # it answers no questions
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            print(os.getpid())
            threading.Event().wait()
        except KeyboardInterrupt:
            print("interrupted")
    """)
    with started(2, path) as launcher:
        pids = [int(launcher.stdout.readline().split()[1]) for _ in range(2)]
        launcher.send_signal(number)
        out, err = launcher.communicate(timeout=20)
    assert launcher.returncode == 128 + number
    assert sorted(out.splitlines()) == ["[0] interrupted", "[1] interrupted"]
    assert err == f"echelon: ended by {number.name}\nechelon: {UNKNOWN}\n"
    assert all(has_ended(pid) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_prints_where_the_ranks_are(script, number, tmp_path):
    path = script(
        textwrap.dedent(REPORTING)
        + textwrap.dedent("""
        def work():
            print("there")
            threading.Event().wait()  # for ever
        work()
    """)
    )
    with started(2, path, str(tmp_path)) as launcher:
        for _ in range(2):
            launcher.stdout.readline()
        launcher.send_signal(number)
        _, err = launcher.communicate(timeout=20)
    assert launcher.returncode == 128 + number
    first, *places = err.splitlines()
    assert first == f"echelon: ended by {number.name}"
    pattern = rf"echelon: rank(s 0 and 1 were| \d was) at {re.escape(path)}:\d+: (print|threading\.Event).*"
    assert places
    assert all(re.fullmatch(pattern, line) for line in places), places


def test_places_are_named_as_from_the_working_folder(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = script(textwrap.dedent(REPORTING) + "print('there')\nthreading.Event().wait()\n")
    with started(1, path, str(tmp_path)) as launcher:
        launcher.stdout.readline()
        launcher.send_signal(signal.SIGTERM)
        _, err = launcher.communicate(timeout=20)
    assert re.fullmatch(r"echelon: rank 0 was at script\.py:\d+: .*", err.splitlines()[1])


HANGING = """
if rank == 0:
    import threading
    print(sorted({"torch", "echelon"} & set(sys.modules)))
    threading.Event().wait()
"""
"""Each rank answers, though no rank has a group, and rank 1 has ended."""


def test_a_rank_without_a_group_says_where_it_is(script):
    path = script(HANGING)
    with started(2, path) as launcher:
        assert launcher.stdout.readline() == "[0] []\n", "nothing of Echelon is imported for that"
        launcher.send_signal(signal.SIGTERM)
        _, err = launcher.communicate(timeout=20)
    assert re.search(rf"^echelon: rank 0 was at {re.escape(path)}:\d+: (print|threading)", err, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ranks_that_hang_in_gloo_say_where_they_are(script):
    path = script("""
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        threading.Timer(1.0, print, ["there"]).start()
        if rank == 0:
            dist.all_reduce(torch.ones(2))
        else:
            dist.recv(torch.ones(3), 0)
    """)
    with started(2, path) as launcher:
        for _ in range(2):
            launcher.stdout.readline()
        launcher.send_signal(signal.SIGTERM)
        _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGTERM
    told = [re.sub(r" at .*:\d+:", ":", line) for line in err.splitlines() if " was at " in line]
    assert told == [
        "echelon: rank 0 was: dist.all_reduce(torch.ones(2))",
        "echelon: rank 1 was: dist.recv(torch.ones(3), 0)",
    ]


def test_a_rank_that_has_become_another_program_is_not_asked(script):
    """The question would end it, before its own answer to SIGTERM."""
    path = script("""
        program = "trap 'echo ended well; exit' TERM; echo there; while :; do sleep 0.1; done"
        os.execv("/bin/sh", ["sh", "-c", program])
    """)
    with started(1, path) as launcher:
        launcher.stdout.readline()
        launcher.send_signal(signal.SIGTERM)
        out, err = launcher.communicate(timeout=20)
    assert out == "[0] ended well\n"
    assert UNKNOWN in err


@pytest.mark.parametrize("before", [None, "", "other", "other:more"])
def test_a_program_sees_nothing_of_the_start_of_its_rank(script, tmp_path, monkeypatch, before):
    """A sitecustomize of the user runs, too."""
    for name in ("other", "more"):
        (tmp_path / name).mkdir()
    (tmp_path / "other" / "sitecustomize.py").write_text("import builtins\nbuiltins.seen = 'yes'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    needed = os.path.dirname(os.path.dirname(echelon.__file__))
    value = None if before is None else os.pathsep.join(filter(None, (before, needed)))
    ended = run(
        1,
        script("""
            at_start = [path for path in sys.path if "at_start" in path]
            seen = globals()["__builtins__"].__dict__.get("seen")
            print(os.environ.get("PYTHONPATH"), seen, at_start)
        """),
        **({} if value is None else {"PYTHONPATH": value}),
    )
    assert ended.out == f"[0] {value} {'yes' if before and 'other' in before else None} []\n"


CHILD = """
    import multiprocessing, multiprocessing.util
    def child():
        print(multiprocessing.util.get_temp_dir(), flush=True)
        time.sleep(60)
    multiprocessing.get_context("fork").Process(target=child).start()
"""
"""Rank whose child, as a DataLoader's worker, has a folder for its sockets."""


def test_children_of_ranks_that_are_killed_leave_no_folder(script, monkeypatch):
    """Each worker of a DataLoader left one, /tmp/pymp-*, when its rank was killed or the launcher got SIGTERM."""
    with tempfile.TemporaryDirectory() as place:  # of a short name
        monkeypatch.setenv("TMPDIR", place)
        with started(2, script(CHILD)) as launcher:
            for _ in range(2):
                folder = launcher.stdout.readline().split()[1]
                assert os.path.dirname(folder) == place
            launcher.send_signal(signal.SIGTERM)
            launcher.communicate(timeout=20)
        assert not os.listdir(place)


def test_a_folder_of_a_long_name_is_left_to_multiprocessing(script, tmp_path, monkeypatch):
    """A socket's whole name has 107 bytes at most."""
    place = tmp_path / ("n" * 90)
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    assert "/pymp-" in run(1, script("import multiprocessing.util; print(multiprocessing.util.get_temp_dir())")).out


def test_ranks_that_the_host_cannot_start_are_told_in_one_line(script):
    limited = ["sh", "-c", 'ulimit -n 14; exec "$@"', "sh", *command(4, script("time.sleep(60)"))]
    ended = subprocess.run(limited, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert re.fullmatch(r"echelon: rank \d cannot be started \(Too many open files\): start fewer .*\n", ended.stderr)


def test_places_are_told_once_for_ranks_at_the_same_line():
    stack = 'Current thread (most recent call first):\n  File "{}", line 1 in wait\n  File "no.py", line 7 in main\n'
    place = whereabouts.place_in(stack.format(threading.__file__))
    assert place == "no.py:7"
    assert whereabouts.place_in("Current thread (most recent call first):\n") == "the start or the end of the program"
    assert whereabouts.place_in("") == ""
    assert whereabouts.in_words({0: place, 1: place, 2: "", 3: "end"}, [4]) == [
        "ranks 0 and 1 were at no.py:7",
        "rank 3 was at end",
        "rank 2 did not answer",
        "rank 4 had ended",
    ]
    assert whereabouts.in_words({0: ""}, [1]) == [UNKNOWN]


def test_ranks_that_have_not_come_to_their_program_are_still_starting(tmp_path):
    stack = (
        'Current thread (most recent call first):\n  File "{}", line 3 in f\n  File "<frozen site>", line 626 in main\n'
    )
    error_file = str(tmp_path / "error")
    (asked,) = whereabouts.stacks({os.getpid(): error_file}).values()
    places = {0: whereabouts.place_in(stack.format(threading.__file__)), 1: whereabouts.place_in(asked)}
    assert whereabouts.in_words(places, []) == ["ranks 0 and 1 were still starting"]


def test_a_stack_without_its_outer_lines_names_the_library():
    stack = 'Current thread (most recent call first):\n  File "<frozen importlib._bootstrap>", line 3 in f\n'
    place = whereabouts.place_in(f'{stack}  File "{threading.__file__}", line 1 in wait\n  ...\n')
    assert place.startswith("a line of a library, in calls too deep to see the program's: ")
    assert f"{threading.__file__}:1" in place


def test_ranks_do_not_outlive_a_launcher_that_is_killed(script):
    path = script("signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid()); threading.Event().wait()")
    with started(2, path) as launcher:
        pids = [int(launcher.stdout.readline().split()[1]) for _ in range(2)]
        launcher.kill()
        assert all(has_ended(pid) for pid in pids)


def test_the_children_of_a_failed_rank_end_with_it(script):
    path = script("""
        print(subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"]).pid)
        sys.exit(1)
    """)
    ended = run(1, path)
    assert ended.status == 1
    assert has_ended(int(ended.out.split()[1]))


def test_a_child_that_keeps_the_output_open_does_not_keep_the_launcher(script):
    path = script("""
        print(subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"]).pid)
    """)
    with started(1, path) as launcher:
        child = int(launcher.stdout.readline().split()[1])
        assert launcher.wait(timeout=20) == 0
        os.kill(child, signal.SIGKILL)


def test_the_job_ends_when_nobody_reads_its_output(script):
    path = script("print(os.getpid()); [print('more') for _ in iter(int, 1)]")
    with started(1, path) as launcher:
        pid = int(launcher.stdout.readline().split()[1])
        launcher.stdout.close()
        assert launcher.wait(timeout=20) == 141
        assert has_ended(pid)


@pytest.mark.slow
def test_a_failure_inside_of_init_is_the_headline(script):
    """It was "exited with status 1"."""
    path = script("""
        import echelon
        echelon.init(timeout=-1 if rank == 1 else 60.0)
    """)
    ended = run(2, "--grace", "0.2", path)
    assert ended.status == 1
    assert ended.err.startswith("echelon: rank 1 raised LaunchError: timeout=-1: use a number of seconds above 0 (")
    assert "exited with status" not in ended.err


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_collective_that_one_rank_calls_takes_a_screen_at_most(script, backend):
    path = script("""
        import echelon, torch

        def train(group):
            group.all_reduce(torch.ones(4))

        group = echelon.init(timeout=20.0)
        if rank == 0:
            train(group)
    """)
    ended = run(2, path, ECHELON_BACKEND=backend)
    lines = ended.err.splitlines()
    assert len(lines) <= 24
    assert "tuned table" not in ended.err
    assert lines[0].startswith("echelon: rank 0 raised CollectiveMismatch: all_reduce(sum) of float32[4], #1 of group ")
    assert "rank 1 has closed its group, before its first operation" in lines[0]
    assert any("in train" in line for line in lines)
    assert any("train(group)" in line for line in lines)


def test_a_failure_before_there_is_a_group_is_named_by_the_line_of_its_exception(script):
    path = script("""
        if rank == 1:
            try:
                nowhere
            finally:
                print("[rank1]:[W1124] a warning of torch, after the traceback", file=sys.stderr)
    """)
    assert run(2, path).err.splitlines()[-1] == (
        "echelon: rank 1 exited with status 1: NameError: name 'nowhere' is not defined"
    )


@pytest.mark.parametrize(
    "source",
    [
        'raise AssertionError("Unknown backend type echelon")',
        pytest.param(
            'import torch.distributed as dist\ndist.init_process_group("echelon")', marks=pytest.mark.slow, id="torch"
        ),
    ],
)
def test_a_backend_that_was_not_registered_comes_with_advice(script, source):
    assert run(1, script(source)).err.splitlines()[-1] == (
        "echelon: rank 0 exited with status 1: AssertionError: Unknown backend type echelon: "
        "import echelon.interop.torch_distributed first, which registers it"
    )


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (
            "AssertionError('Torch not compiled with CUDA enabled')",
            "keep tensors on the CPU, as x.to(group.device) does",
        ),
        ("RuntimeError('No CUDA GPUs are available')", "keep tensors on the CPU, as x.to(group.device) does"),
        ('RuntimeError("Distributed package doesn\'t have NCCL built in")', "give init_process_group 'gloo'"),
    ],
)
def test_a_script_for_gpus_without_a_group_comes_with_advice(script, error, advice):
    """Only a script with a group of Echelon got it."""
    *_, last = run(2, script(f"raise {error}")).err.splitlines()
    assert advice in last
    assert last.startswith("echelon: all 2 ranks failed alike: each exited with status 1: ")
    assert last.endswith(", or run the script for GPUs that are not there by echelon foresee")


@pytest.mark.parametrize(
    "words", ["553] Connection closed by peer [127.0.0.1]:1", "537] Read error [127.0.0.1]:1: Connection reset by peer"]
)
def test_a_gloo_script_whose_peer_has_left_comes_with_advice(script, words):
    text = f"[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:{words}"
    path = script(f"import os\nif os.environ['RANK'] == '1': raise RuntimeError({text!r})")
    *_, last = run(2, path).err.splitlines()
    assert last.startswith("echelon: rank 1 exited with status 1: RuntimeError: ")
    assert ": a peer has ended or left: echelon simulate -n N script.py names the line" in last


def test_the_last_words_of_a_stream_are_the_exception_or_the_last_line():
    def words(text):
        stream = MarkedStream(1, io.BytesIO())
        stream.feed(text.encode())
        stream.finish()
        return stream.last_words()

    traceback = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nKeyError: "x[0]: y"\n'
    marked = "".join(f"[rank1]: {line}\n" for line in traceback.splitlines())
    assert words(f"begin\n{traceback}a warning at the end\n") == words(marked) == 'KeyError: "x[0]: y"'
    assert words("begin\n\nno data\n  indented") == "no data"
    error = "RuntimeError: Error(s) in loading state_dict for Linear:"
    assert words(f"Traceback (most recent call last):\n{error}\n\tsize mismatch for weight\nlater") == (
        f"{error} size mismatch for weight"
    )
    assert words("x" * 1000) == "x" * 300 + "..."
    assert words("") == words("  \n") == ""


CRASH = """\
terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at pair.cc:456] 8 vs 4. Is there a distributed collective mismatch in your code?
Fatal Python error: Aborted

Thread 0x00007ffb0a7f9b80 (most recent call first):
  File "{torch}/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "{script}", line 2 in <module>
"""
OTHER_THREAD = """
Thread 0x00007ffb0a7f9b81 (most recent call first):
  File "{script}", line 1 in read

Current thread 0x00007ffb0a7f9b80 (most recent call first):"""


def test_a_crash_in_c_plus_plus_has_its_words_and_the_line_of_the_user(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import torch\ntorch.distributed.all_reduce(x)\n")
    library = os.path.join(sysconfig.get_path("purelib"), "torch")
    stream = MarkedStream(1, io.BytesIO())
    assert stream.crash() == ""
    stream.feed(CRASH.format(torch=library, script=path).encode())
    told = (
        f"at {path}:2: torch.distributed.all_reduce(x): [enforce fail at pair.cc:456] 8 vs 4. Is there a distributed "
        "collective mismatch in your code?"
    )
    assert stream.crash() == told
    stream = MarkedStream(1, io.BytesIO())
    text = CRASH.replace("\nThread 0x00007ffb0a7f9b80 (most recent call first):", OTHER_THREAD)
    stream.feed(text.format(torch=library, script=path).encode())
    assert stream.crash() == told, "the thread that crashed"


@pytest.mark.parametrize(("number", "has_words"), [("SIGABRT", True), ("SIGKILL", False)])
def test_a_crash_of_gloo_leads_to_a_simulation(script, number, has_words):
    what = "  what():  8 vs 4. Is there a distributed collective mismatch in your code?"
    ended = run(
        1,
        script(f"""
        sys.stderr.write({what!r} + "\\n"); sys.stderr.flush()
        os.kill(os.getpid(), signal.{number})
    """),
    )
    last = ended.err.splitlines()[-1]
    assert last.startswith(f"echelon: rank 0 was killed by {number}")
    words = (
        ": 8 vs 4. Is there a distributed collective mismatch in your code?: ranks have called different collectives: "
        "run the script by echelon simulate, which names both lines"
    )
    assert last.endswith(words) == has_words, "of another signal, earlier text on stderr is no reason"
