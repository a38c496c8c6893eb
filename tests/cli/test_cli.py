import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import typer

from echelon.cli import main
from echelon.cli.app import app, collectives
from tests.helpers.commands import imported_by, printed, refusal

PLAIN = str(Path(__file__).with_name("conftest.py"))
"""A file that names no option."""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "-n", "0", __file__], "-n 0: a world has at least 1 rank: give -n 1 or more"),
        (["run", "-n", "1000000", __file__], "-n 1000000: one host starts at most 1024 ranks"),
        (["run", "-n", "2", "no.py"], "script 'no.py' does not exist in "),
        (["run", "-n", "2", "/"], "script '/' is a folder: name a file in it, or run a package with -m"),
        (["run", "-n", "two", __file__], "-n two: not a number; give one, such as -n 2: see `echelon run --help`"),
        (["run", "-n", "2", "--grace", "-1", __file__], "--grace -1: use a number of seconds, 0 or more"),
        (["run", "-n", "2"], "Missing argument 'SCRIPT'"),
        (["run", __file__], "Missing option '-n' / '--num-ranks': say how many ranks to start: echelon run -n 2 "),
        (
            ["run", "s.py", "-n", "2"],
            "-n stands after the script, which gets it; options go before: echelon run -n 2 s.py",
        ),
        (
            ["run", "s.py", "a", "-n2"],
            "-n2 stands after the script, which gets it; options go before: echelon run -n 2 s",
        ),
        (["run", "s.py", "--num-ranks=4"], "--num-ranks=4 stands after the script, which gets it; options go before: "),
        (
            ["run", PLAIN, "--epochs", "4", "--grace=2", "-n", "2", "--quiet"],
            "--grace=2, -n and --quiet stand after the script, which gets them; options go before: "
            f"echelon run --grace 2 -n 2 --quiet {PLAIN} --epochs 4",
        ),
        (
            ["run", "-m", "json.tool", "--grace", "2", "-n", "2"],
            "-n stands after the script, which gets it; options go before: echelon run -n 2 -m json.tool --grace 2",
        ),
        (
            ["foresee", PLAIN, "--gpu", "a100"],
            "-n is missing, and --gpu stands after the script, which gets it; options go before: "
            f"echelon foresee -n 2 --gpu a100 {PLAIN}",
        ),
        (["run", "--ranks", "2", __file__], "No such option: --ranks"),
        (
            ["run", "--backend", "tcp", __file__],
            "No such option: --backend; give echelon.init(backend=) one, or set ECHELON_",
        ),
        (["fly"], "No such command 'fly': see `echelon --help`"),
        (["plan", "--fly"], "No such option: --fly: see `echelon plan --help`"),
        (["plan", "barrier", "--fly"], "No such option: --fly: see `echelon plan all-reduce --help`"),
    ],
)
def test_a_wrong_command_line_is_an_error_of_one_line(capsys, arguments, message):
    assert refusal(capsys, *arguments).startswith(message)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_the_commands(capsys, arguments):
    assert listed(printed(capsys, *arguments)) == [
        *("run", "simulate", "foresee", "plan", "bench", "tune", "doctor", "env", "checkpoint")
    ]


def test_help_lists_the_commands_of_checkpoints(capsys):
    assert listed(printed(capsys, "checkpoint", "--help")) == ["ls", "verify", "remove", "export", "import"]


def listed(text):
    """Returns the names of the commands that a help lists."""
    commands = text.partition("Commands:")[2].partition("Exit status")[0].split("\n")
    assert not any(line.endswith("...") for line in commands), "a description is too long for its line"
    return [line.split()[0] for line in commands if line.strip()]


def test_the_command_line_is_part_of_a_plain_installation():
    """Without an extra: `pip install .` gives a working command."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    plain = {re.match(r"[\w-]+", line).group() for line in project["dependencies"]}
    assert {"typer", "rich"} <= plain


@pytest.mark.parametrize("command", ["run", "simulate", "plan", "bench", "tune", "doctor"])
def test_help_does_not_wait_for_torch(command):
    imported = imported_by(command, "--help")
    assert "echelon.cli.app" in imported
    assert not {"torch", "numpy"} & imported


def test_the_version_is_that_of_the_package(capsys):
    assert printed(capsys, "--version") == f"echelon {version('echelon')}\n"


def test_python_m_echelon_is_the_command_line():
    ended = subprocess.run([sys.executable, "-m", "echelon", "fly"], capture_output=True, text=True, timeout=30)
    assert ended.returncode == 2
    assert ended.stderr == "echelon: No such command 'fly': see `echelon --help`\n"


@pytest.mark.parametrize("command", [["doctor"], ["bench", "all_reduce"], ["tune"]])
def test_without_torch_a_command_that_needs_it_says_so_in_one_line(tmp_path, command):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module named torch', name='torch')\n")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-m", "echelon", *command], capture_output=True, text=True, timeout=60, env=environ
    )
    assert ended.returncode == 1
    assert ended.stderr == "echelon: this command needs torch, which is not installed here: pip install torch\n"


def interrupted(*args, **kwargs):
    raise KeyboardInterrupt


class Interrupting:
    """Finder of modules that is interrupted by Ctrl-C at one of them."""

    def __init__(self, name):
        self.name = name

    def find_spec(self, name, path=None, target=None):
        if name == self.name:
            raise KeyboardInterrupt


def import_interrupted(monkeypatch, name):
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(name), *sys.meta_path])


def test_ctrl_c_during_the_imports_of_the_command_line_is_one_line(monkeypatch, capsys):
    import_interrupted(monkeypatch, "echelon.cli.app")
    assert main(["env"]) == 130
    assert capsys.readouterr().err == "echelon: ended by SIGINT\n"


def test_ctrl_c_during_the_imports_of_a_command_is_one_line(monkeypatch, capsys):
    import_interrupted(monkeypatch, "echelon.bench.measure")
    assert main(["bench", "all-reduce", "-n", "2"]) == 130
    assert capsys.readouterr().err == "echelon: ended by SIGINT\n"


def test_ctrl_c_while_options_are_read_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr("echelon.cli.app.version_of", interrupted)
    assert main(["--version"]) == 130
    assert capsys.readouterr().err == "echelon: ended by SIGINT\n"


def test_scripts_and_calibration_files_are_checked_before_torch_is_imported(monkeypatch, capsys, tmp_path):
    # The functions that import it.
    monkeypatch.setattr("echelon.cli.simulate._run", interrupted)
    monkeypatch.setattr("echelon.cli.foresee._foresee", interrupted)
    for command in ("simulate", "foresee"):
        assert "is a folder" in refusal(capsys, command, "-n", "2", str(tmp_path))
    (tmp_path / "train.py").touch()
    (tmp_path / "bad.json").write_text("{}")
    words = "-n", "2", "--gpu", str(tmp_path / "bad.json"), str(tmp_path / "train.py")
    assert "bad.json: format is missing: make the file by" in refusal(capsys, "foresee", *words)


def test_ctrl_c_while_simulate_imports_torch_imports_no_more_of_it(monkeypatch, capfd, tmp_path):
    (tmp_path / "train.py").touch()
    monkeypatch.setattr("echelon.cli.simulate._run", interrupted)
    import_interrupted(monkeypatch, "echelon.simulation.script.run")
    assert main(["simulate", "-n", "2", "train.py"]) == 130
    assert capfd.readouterr().err == "echelon: ended by SIGINT\n"


@pytest.mark.parametrize(
    ("command", "with_errors"),
    [
        ("plan 1f1b -r 4 -m 8", False),
        ("plan 1f1b -r 4 -m 8", True),
        ("plan --compare -r 4 -m 8 --json", False),
        pytest.param("plan --compare -r 4 -m 8 --json", True, marks=pytest.mark.slow),
        pytest.param("env", False, marks=pytest.mark.slow),
        pytest.param("env", True, marks=pytest.mark.slow),
        ("simulate -n 2 lines.py", False),
        pytest.param("simulate -n 2 lines.py", True, marks=pytest.mark.slow),
    ],
)
def test_a_closed_pipe_ends_a_command_without_a_word(tmp_path, monkeypatch, command, with_errors):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # at its end Python writes what is left
    (tmp_path / "lines.py").write_text("for _ in range(1000): print('line')")
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [sys.executable, "-m", "echelon", *command.split()],
        stdout=writer,
        stderr=writer if with_errors else subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr or "") == (141, "")


@pytest.mark.parametrize("command", ["--version", "plan gpipe -r 2 -m 2", "plan --compare -r 2 -m 2 --json"])
def test_a_full_disk_is_told_in_one_line(command):
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "echelon", *command.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    told = "echelon: cannot write the output: No space left on device; write it to another place\n"
    assert (ended.returncode, ended.stderr) == (1, told)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["simulate -n 2", "simulate -n 2 --json", "run -q -n 2", "foresee -n 2"])
def test_a_full_disk_under_the_output_of_a_script_is_told_in_one_line(tmp_path, command):
    (tmp_path / "lines.py").write_text("for _ in range(1000): print('line')")
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "echelon", *command.split(), "lines.py"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("echelon: cannot write the output: No space left on device")


def test_a_script_that_may_not_be_read_is_one_line(monkeypatch, capsys, tmp_path):
    (tmp_path / "train.py").touch()
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may read all
    told = refusal(capsys, "run", "-n", "2", "train.py")
    assert told == "script 'train.py' cannot be read: give yourself the right to: chmod u+r train.py"


WITH_OUTPUT = {
    "simulate": (["simulate", "-n", "1"], ["train.py"]),
    "foresee": (["foresee", "-n", "1"], ["train.py"]),
    "plan": (["plan", "gpipe", "-r", "2", "-m", "2"], []),
    "plan all-reduce": (["plan", "all-reduce", "--algorithm", "ring", "-r", "2"], []),
}
"""Commands that write files: words before and after the option of the file."""
OUTPUTS = {
    "simulate": {"--chrome": "json", "--png": "png", "--html": "html", "--svg": "svg"},
    "foresee": {"--chrome": "json", "--png": "png", "--html": "html", "--svg": "svg", "--calibrate": "json"},
    "plan": {"--chrome": "json", "--png": "png", "--html": "html", "--svg": "svg", "--csv": "csv"},
    "plan all-reduce": {"--chrome": "json", "--png": "png", "--html": "html", "--svg": "svg"},
}
"""Their options that name an output file, each with the end of its name."""
READ_OR_MADE = {("checkpoint export", "--config"), ("tune", "--output")}
"""Options with a file that is read, or whose folder the command makes."""


def test_every_option_with_an_output_file_is_checked():
    options = [(name, each) for name, one in every_command().items() for each in one.params]
    found = {(name, each.opts[0]) for name, each in options if each.metavar == "FILE"}
    assert found - READ_OR_MADE == {(name, option) for name, options in OUTPUTS.items() for option in options}


def every_command():
    groups = typer.main.get_command(app).commands
    checkpoints = {f"checkpoint {name}": each for name, each in groups.pop("checkpoint").commands.items()}
    return groups | checkpoints | {"plan all-reduce": typer.main.get_command(collectives)}


def test_every_command_whose_result_is_a_report_has_json():
    without = {name for name, one in every_command().items() if not any("--json" in each.opts for each in one.params)}
    assert without == {"run", "checkpoint remove", "checkpoint export", "checkpoint import"}


def test_every_option_with_a_value_names_it():
    """typer's own names are those of types, such as "<int range>"."""
    options = [(name, each) for name, one in every_command().items() for each in one.params]
    with_value = [(name, each) for name, each in options if each.param_type_name == "option" and not each.is_flag]
    assert not [(name, each.opts[0]) for name, each in with_value if each.metavar is None]


def test_the_options_of_the_output_have_one_order():
    order = ("--svg", "--png", "--html", "--chrome", "--csv", "--json")
    for name, one in every_command().items():
        given = [each.opts[0] for each in one.params if each.opts[0] in order]
        assert given == sorted(given, key=order.index), name


@pytest.mark.parametrize(
    ("name", "option", "suffix"),
    [(name, option, suffix) for name, options in OUTPUTS.items() for option, suffix in options.items()],
)
def test_a_missing_folder_is_refused_before_the_work(monkeypatch, capfd, tmp_path, name, option, suffix):
    (tmp_path / "train.py").write_text("open('begun', 'w')")
    monkeypatch.setattr("echelon.cli.plan._make", None)  # the work of these two
    monkeypatch.setattr("echelon.cli.plan_collective.build", None)
    before, after = WITH_OUTPUT[name] if option != "--calibrate" else (["foresee"], [])
    told = refusal(capfd, *before, option, f"no/a.{suffix}", *after)
    assert told == f"cannot write no/a.{suffix}: the folder no does not exist; make it first: mkdir -p no"
    assert not (tmp_path / "begun").exists()
