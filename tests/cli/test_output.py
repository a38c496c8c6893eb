"""Tables that fit the terminal, progress on terminals alone, facts for bug reports, and completion."""

import contextlib
import io
import json
import os
import pty
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from echelon.cli import main
from echelon.cli.completion import NETWORKS
from echelon.cli.output import AboveProgress, WarnedOnce, print_table, working
from echelon.launch.status_line import columns_of_text
from echelon.simulation import PRESETS
from tests.helpers.commands import printed

ROWS = [("name", "time", "text"), ("a", "1.5", "some words that are too long for a narrow terminal"), ("b", "2", "")]


def shown(width, is_terminal, rows=ROWS, left=(0, 2)):
    console = Console(file=io.StringIO(), width=width, force_terminal=is_terminal, no_color=True, color_system=None)
    print_table(console, rows, left)
    return console.file.getvalue().splitlines()


def test_a_table_that_is_too_wide_is_wrapped_in_its_last_column():
    lines = shown(40, True)
    assert max(map(len, lines)) <= 40
    assert lines[1:] == ["a      1.5  some words that are too long", "            for a narrow terminal", "b        2"]


def test_a_script_gets_one_line_for_a_row():
    assert len(shown(40, False)) == 3
    assert shown(80, False)[1] == "a      1.5  some words that are too long for a narrow terminal"


def test_a_table_in_a_pipe_follows_the_variable(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert shown(40, False) == shown(40, True)


@pytest.mark.parametrize(("value", "columns"), [(None, 80), ("", 80), ("0", 80), ("wide", 80), ("120", 120), ("9", 40)])
def test_reports_follow_the_variable(monkeypatch, value, columns):
    if value is not None:
        monkeypatch.setenv("COLUMNS", value)
    assert columns_of_text() == columns


@pytest.mark.parametrize("value", ["", "0", "-5", "wide"])
def test_a_variable_that_is_no_width_changes_nothing(capsys, monkeypatch, value):
    monkeypatch.delenv("COLUMNS", raising=False)
    expected = printed(capsys, "plan", "--compare", "-r", "2", "-m", "2")
    monkeypatch.setenv("COLUMNS", value)
    assert printed(capsys, "plan", "--compare", "-r", "2", "-m", "2") == expected


def test_numbers_move_together_and_are_not_wrapped():
    rows = [("a", "bbbbbbbbbb", "cccccccccc"), ("1", "2", "3")]
    assert shown(23, True, rows, (0,)) == ["a bbbbbbbbbb cccccccccc", "1          2          3"]


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "interleaved-1f1b", "-r", "16", "-m", "64", "--chunks", "2"],
        ["plan", "--compare", "-r", "16", "-m", "64"],
        ["plan", "all-reduce", "-r", "16"],
        ["plan", "all-to-all"],
        ["plan", "all-reduce", "--algorithm", "ring", "-r", "16"],
    ],
)
def test_tables_fit_80_columns(capsys, monkeypatch, command):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes the stream for a terminal
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    lines = printed(capsys, *command).replace("\x1b[1m", "").replace("\x1b[0m", "").splitlines()
    assert [line for line in lines if len(line) > 80] == []


def test_work_is_shown_on_a_terminal_alone():
    for is_terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=is_terminal, width=80)
        with working("searching", console):
            pass
        assert ("searching" in console.file.getvalue()) == is_terminal


@pytest.mark.parametrize(("plain_after", "num_lines"), [(0.01, 2), (None, 0), (60.0, 0)])
def test_a_file_gets_a_line_on_long_work(plain_after, num_lines):
    written = io.StringIO()
    with working("searching", Console(file=written), plain_after=plain_after):
        while written.getvalue().count("\n") < num_lines:
            time.sleep(0.01)
        lines = written.getvalue().splitlines()[:2]
    assert [re.sub(r"\d+", "N", line) for line in lines] == ["echelon: searching, N s so far"] * num_lines
    assert "echelon-progress" not in {thread.name for thread in threading.enumerate()}


def test_the_line_goes_to_the_stream_that_standard_error_was(monkeypatch):
    """While a program is foreseen, standard error is that of its ranks."""
    before, ranks = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", before)
    with working("foreseeing", plain_after=0.01):
        monkeypatch.setattr(sys, "stderr", ranks)
        while "s so far" not in before.getvalue() + ranks.getvalue():
            time.sleep(0.01)
    assert ranks.getvalue() == ""


def test_lines_appear_above_the_progress():
    out, terminal = io.BytesIO(), io.BytesIO()
    stream = AboveProgress(out, terminal)
    stream.write(b"[0] loss 1\n")
    stream.flush()
    assert (out.getvalue(), terminal.getvalue()) == (b"[0] loss 1\n", b"\r\x1b[2K")


SMALL = ["-n", "2", "--max", "8", "--backend", "simulated"]


def on_terminal(folder, *command, **environ):
    """Runs a command under a pseudo-terminal, as IPython runs `!command`, and returns what that gets."""
    ours, theirs = pty.openpty()
    # A kernel sets these two.
    environ = {**os.environ, "TERM": "xterm-color", "FORCE_COLOR": "1", "NO_COLOR": "", **environ}
    command_line = [sys.executable, "-m", "echelon", *command]
    with subprocess.Popen(command_line, cwd=folder, stdout=theirs, stderr=theirs, env=environ) as process:
        os.close(theirs)
        with open(ours, "rb", buffering=0) as terminal:
            read = b""
            # Linux reports the end of a terminal as an error.
            with contextlib.suppress(OSError):
                while True:
                    read += terminal.read(1 << 16)
        assert process.wait(30) == 0, read
    return read.decode().replace("\r\n", "\n")


SCRIPT = """\
import os
assert "ECHELON_TERMINAL" not in os.environ, "no bar of a rank"
print("a line")
"""


@pytest.mark.parametrize("variable", ["JPY_PARENT_PID=1", "MPLBACKEND=module://matplotlib_inline.backend_inline"])
@pytest.mark.parametrize(
    ("command", "line"),
    [
        (["plan", "1f1b", "-r", "2", "-m", "4"], "1f1b: 2 ranks, 2 stages, 4 microbatches"),
        (["run", "-q", "-n", "1", "script.py"], "[0] a line"),
        pytest.param(["simulate", "-n", "1", "script.py"], "[0] a line", marks=pytest.mark.slow),
        pytest.param(["bench", "all-reduce", *SMALL], "# wrong values: 0, OK", marks=pytest.mark.slow),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_the_cell_of_a_notebook_gets_plain_text(tmp_path, command, line, variable):
    """A notebook keeps what a terminal overwrites, as a line for each turn of the spinner."""
    (tmp_path / "script.py").write_text(SCRIPT)
    name, value = variable.split("=")
    shown = on_terminal(tmp_path, *command, **{name: value})
    assert line in shown.splitlines()
    assert "\x1b" not in shown
    assert "\r" not in shown


def test_a_terminal_gets_colors_and_progress(tmp_path):
    shown = on_terminal(tmp_path, "plan", "1f1b", "-r", "2", "-m", "4")
    assert "\x1b[1m1f1b: 2 ranks, 2 stages, 4 microbatches\x1b[0m\n" in shown
    assert "\r\x1b[2K" in shown
    assert "checking the schedule" in shown


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
@pytest.mark.parametrize(
    "command",
    [
        "plan gpipe -r 2 -m 2 --json",
        pytest.param("env --json", marks=pytest.mark.slow),  # it imports torch
        "run -q -n 1 script.py",
    ],
)
def test_a_closed_standard_stream_is_no_error(tmp_path, command, closed):
    (tmp_path / "script.py").write_text("print('a line', flush=True)")
    line = f'"{sys.executable}" -m echelon {command} {closed}'
    ended = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_env_has_versions_and_no_secret(capsys, monkeypatch):
    monkeypatch.setenv("ECHELON_SECRET", "not to be shown anywhere")
    text = printed(capsys, "env")
    values = json.loads(printed(capsys, "env", "--json"))
    assert "not to be shown" not in text + str(values)
    assert "ECHELON_SECRET" in values["variables set"]
    for name in ("echelon", "python", "torch", "backends"):
        assert values[name]
        assert name in text
    assert os.uname().nodename not in values.values()


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("pl", "plan"),
        ("plan --comp", "--compare"),
        ("plan all-reduce --algo", "--algorithm"),
        ("plan zb", "zb-h1 zb-h2 zb-v"),
        ("plan all", "all-reduce all-gather all-to-all"),
        ("bench all", "all_reduce all_gather all_to_all"),
        ("plan all-to-all --algorithm ", "pairwise bruck"),
        ("bench all_to_all --algorithm b", "bruck"),
        ("bench --algorithm br", "bruck"),
        ("bench all_reduce --backend s", "shm simulated"),
        ("tune --backend ", "tcp simulated"),
        ("tune --network 10", "10GbE 100GbE"),
        ("simulate --network lo", "loopback"),
        ("foresee --network infiniband-4", "infiniband-400g"),
        ("foresee --gpu a100-4", "a100-40g"),
    ],
)
def test_the_shell_completes(capsys, monkeypatch, words, completed):
    complete(monkeypatch, words)
    with pytest.raises(SystemExit):
        main([])
    assert capsys.readouterr().out.split() == completed.split()


def complete(monkeypatch, words):
    """Sets the variables by which Bash asks for completion of the last word."""
    monkeypatch.setenv("_ECHELON_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"echelon {words}")
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ") + 1))


def test_completion_does_not_wait_for_torch(monkeypatch):
    """A shell starts a process for each TAB."""
    complete(monkeypatch, "foresee --gpu a100-4")
    code = "import sys\nfrom echelon.cli import main\ntry:\n    main([])\nfinally:\n    print(*sys.modules)\n"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    completed, modules = ended.stdout.splitlines()
    assert completed == "a100-40g"
    assert not {"torch", "numpy"} & set(modules.split())


def test_completion_knows_every_network():
    assert tuple(PRESETS) == NETWORKS


def test_help_says_the_exit_statuses(capsys):
    text = " ".join(printed(capsys, "--help").split())
    assert "Exit status: 0 if all went well. 1 if a run, a check or a forecast failed. 2 if the command line" in text
    assert "130 after Ctrl-C. 141 if the reader of the output has gone. 143 after SIGTERM." in text


def test_run_says_what_it_starts(capfd, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import os, sys\nsys.exit(3 if len(sys.argv) > 1 else 0)\n")
    assert main(["run", "-n", "2", str(script)]) == 0
    line, alone = capfd.readouterr().err.splitlines()
    assert line.startswith(f"echelon: starting 2 ranks of {script}, ")
    assert alone.startswith(
        "echelon: note: no rank seems to have joined a group, so each of them ran the whole program by itself"
    )
    assert line.endswith(" each, backend auto (shared memory)")
    assert main(["run", "-q", "-n", "2", str(script), "fail"]) == 3
    err = capfd.readouterr().err
    assert "all 2 ranks failed alike: each exited with status 3\n" in err
    assert "joined" not in err


@pytest.mark.parametrize(
    ("backend", "num_ranks", "obstacle", "said"),
    [
        ("", 2, "", "auto (shared memory)"),
        ("auto", 2, "no library", "auto (TCP)"),
        ("", 1, "", "auto"),
        ("shm", 2, "", "shm"),
        ("gloo", 2, "no library", "gloo"),
    ],
)
def test_run_says_which_backend_auto_becomes(capfd, monkeypatch, tmp_path, backend, num_ranks, obstacle, said):
    monkeypatch.setattr("echelon.launch.backends.obstacle", lambda: obstacle)
    monkeypatch.setenv("ECHELON_BACKEND", backend)
    script = tmp_path / "nothing.py"
    script.write_text("")
    assert main(["run", "-n", str(num_ranks), str(script)]) == 0
    assert capfd.readouterr().err.splitlines()[0].endswith(f" each, backend {said}")


@pytest.mark.slow
@pytest.mark.parametrize(("native", "name", "said"), [("1", "shm", "shared memory"), ("0", "tcp", "TCP")])
def test_auto_becomes_the_backend_that_run_says(tmp_path, native, name, said):
    script = tmp_path / "name.py"
    script.write_text("import echelon\nprint(echelon.init(timeout=30).backend.name)\n")
    ended = subprocess.run(
        [sys.executable, "-m", "echelon", "run", "-n", "2", str(script)],
        env=os.environ | {"ECHELON_NATIVE": native},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert sorted(ended.stdout.splitlines()) == [f"[0] {name}", f"[1] {name}"], ended.stderr
    assert ended.stderr.splitlines()[0].endswith(f", backend auto ({said})")


def test_warnings_that_another_rank_has_written_are_left_out():
    target = io.BytesIO()
    stream = WarnedOnce(target)
    warning = b"a.py:1: UserWarning: old\n", b"  call()\n"
    for line in (
        *(b"[0] " + each for each in warning),
        *(b"\x1b[32m[1] \x1b[0m" + each for each in warning),
        b"[1]   step 1\n",
        b"[0] step 2\n",
        b"[1] step 2\n",
        b"[0] a.py:1: UserWarning: old\n",
    ):
        assert stream.write(line) == len(line)
    assert target.getvalue() == (
        b"[0] a.py:1: UserWarning: old\n[0]   call()\n[1]   step 1\n[0] step 2\n[1] step 2\n"
        b"[0] a.py:1: UserWarning: old\n"
    )


SERVED = """
import os, socket, time
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["R" + "ANK"] == "0":
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    server.bind(address)
    server.listen()
    server.accept()
else:
    for _ in range(1000):
        try:
            socket.create_connection(address)
            break
        except OSError:
            time.sleep(0.01)
"""
"""Ranks that meet as those of torch do. No word of the source says so."""


@pytest.mark.parametrize(
    "source",
    [
        *(SERVED, "# calls init_process_group(init_method='file:///tmp/meeting')", "-n 1"),
        "import os; print(os.environ['RANK'])",  # ranks may share work without a group
        "import os; print(os.environ['WORLD_SIZE'])",
    ],
)
def test_run_says_nothing_of_ranks_that_meet_or_are_alone(capfd, tmp_path, source):
    script = tmp_path / "train.py"
    script.write_text("" if source == "-n 1" else source)
    assert main(["run", "-n", "1" if source == "-n 1" else "2", str(script)]) == 0
    assert "joined" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "script",
    ["from parts import meeting", "import parts.meeting", "from parts import more", "import parts.inner.deep", "-m"],
)
def test_run_says_nothing_of_a_program_whose_module_makes_the_group(capfd, tmp_path, monkeypatch, script):
    monkeypatch.chdir(tmp_path)
    Path("parts/inner").mkdir(parents=True)
    Path("parts/inner/deep.py").write_text("from .. import meeting\n")
    Path("parts/meeting.py").write_text("# calls init_process_group(init_method='file:///tmp/meeting')\n")
    Path("parts/more.py").write_text("from . import meeting\nfrom .meeting import *\n")
    Path("parts/old.py").write_text("try:\n    import other\nexcept ImportError: pass\n")
    Path("train.py").write_text(script)
    assert main(["run", "-n", "2", *(["-m", "parts.more"] if script == "-m" else ["train.py"])]) == 0
    assert "joined" not in capfd.readouterr().err
    Path("train.py").write_text("import json, parts.old")
    assert main(["run", "-n", "2", "train.py"]) == 0
    assert "joined" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("call", ["echelon.init()", "getattr(dist, 'init_' + 'process_group')('gloo'); dist.barrier()"])
def test_run_finds_groups_of_echelon_and_of_torch(capfd, tmp_path, call):
    script = tmp_path / "train.py"
    script.write_text(f"import torch.distributed as dist, echelon\n{call}")
    assert main(["run", "-n", "2", str(script)]) == 0
    assert "joined" not in capfd.readouterr().err
