"""The code in docs/simulation.md runs, prints what stands below it, and its tests find the bugs."""

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "simulation.md"
BLOCK = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)


def blocks():
    return BLOCK.findall(PAGE.read_text(encoding="utf-8"))


def test_every_block_prints_what_it_says():
    assert len(blocks()) >= 6
    names = {}
    for code, expected in blocks():
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "program.py", "exec"), names)
        assert printed.getvalue() == expected


@pytest.mark.slow
def test_the_tests_pass_with_pytest(tmp_path, monkeypatch):
    """The example finds its three bugs, and what the section about pytest shows runs there."""
    (bugs,) = [code for code, _ in blocks() if "def test_the_race" in code]
    examples = [code for code, _ in blocks() if "def test_all_reduce" in code or "(simulated)" in code]
    (tmp_path / "test_three_bugs.py").write_text(bugs)
    (tmp_path / "test_all_reduce.py").write_text("import pytest, torch, echelon\n" + "\n".join(examples))
    # Not by its entry point, which needs an installation of this very version.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "echelon.pytest_plugin", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False)
    assert "6 passed" in done.stdout, done.stdout


def test_what_the_deadlock_says_is_what_the_page_shows(tmp_path):
    import echelon

    (code,) = [code for code, _ in blocks() if "def deadlock" in code]
    path = tmp_path / "test_three_bugs.py"
    path.write_text(code)
    names = {}
    exec(compile(code, str(path), "exec"), names)
    with pytest.raises(echelon.DeadlockError) as caught:
        echelon.simulate(names["deadlock"], 3)
    assert str(caught.value).replace(f"{tmp_path}/", "") + "\n" in PAGE.read_text(encoding="utf-8")


def test_the_command_prints_what_the_page_shows(tmp_path, monkeypatch, capsys):
    from echelon.cli import main

    page = PAGE.read_text(encoding="utf-8")
    (tmp_path / "hang.py").write_text(re.search(r"This is `hang.py`:\n\n```py\n(.*?)```", page, re.DOTALL)[1])
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```console\n\$ echelon (.*?)( 2> hang.txt)?\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 2
    for command, stdout_alone, expected in examples:
        assert main(command.split()) == 1
        out, err = capsys.readouterr()
        assert (out if stdout_alone else out + err) == expected


def test_the_page_has_a_text_for_each_fault():
    from echelon.cli.fault_text import parse

    page = PAGE.read_text(encoding="utf-8")
    found = parse(re.findall(r"`((?:kill|delay|slow|partition|pause):[^`]+)`", page), 4)
    assert {type(fault).__name__ for fault in found} == {"Kill", "Delay", "Slow", "NetworkPartition", "Pause"}
