import subprocess
import sys

import pytest

from echelon.cli import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "-n", "0", __file__], "-n 0: a world has at least 1 rank: give -n 1 or more"),
        (["run", "-n", "1000000", __file__], "-n 1000000: one host starts at most 1024 ranks"),
        (["run", "-n", "2", "no.py"], "script 'no.py' does not exist in "),
        (["run", "-n", "two", __file__], "Invalid value for '-n'"),
        (["run", "-n", "2", "--grace", "-1", __file__], "--grace -1: use a number of seconds, 0 or more"),
        (["run", "-n", "2"], "Missing argument 'SCRIPT'"),
        (["run", __file__], "Missing option '-n'"),
        (["run", "--ranks", "2", __file__], "No such option: --ranks"),
        (["fly"], "No such command 'fly'"),
    ],
)
def test_a_wrong_command_line_is_an_error_of_one_line(capsys, arguments, message):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"echelon: {message}")
    assert error.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_lists_the_commands(capsys, arguments):
    assert main(arguments) == 0
    assert "run " in capsys.readouterr().out


def test_without_typer_there_is_a_hint(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "echelon.cli.app", raising=False)
    monkeypatch.setitem(sys.modules, "typer", None)
    assert main(["--help"]) == 1
    assert capsys.readouterr().err == "echelon: the command line needs typer: pip install 'echelon[cli]'\n"


def test_help_does_not_wait_for_torch():
    code = "import sys; from echelon.cli import main; main(['run', '--help']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30, stdout=subprocess.DEVNULL)


def test_python_m_echelon_is_the_command_line():
    ended = subprocess.run([sys.executable, "-m", "echelon", "fly"], capture_output=True, text=True, timeout=30)
    assert ended.returncode == 2
    assert ended.stderr == "echelon: No such command 'fly': see `echelon --help`\n"
