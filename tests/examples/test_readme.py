"""The README shows the small examples as they are, and they run."""

import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch

import echelon
from echelon.cli import main
from tests.helpers.examples import EXAMPLES, run_example, run_example_as_rank
from tests.helpers.pages import FORECAST_OF, LONG_WORK

OUTPUTS = {
    "ddp.py": r"loss 0\.\d+ on 2 ranks\n",
    "pipeline.py": r"loss 0\.\d+, bubble 11% as planned, \d+% as measured\n",
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_readme_quotes_the_example(name):
    readme = (EXAMPLES.parent / "README.md").read_text()
    assert f"```python\n{(EXAMPLES / name).read_text()}```\n" in readme


@pytest.mark.parametrize("backend", ["auto", pytest.param("gloo", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OUTPUTS)
def test_the_example_runs_on_real_processes(name, backend, pool, tmp_path):
    outputs = pool.run(run_example_as_rank, 2, name, tmp_path, backend=backend)
    assert re.fullmatch(OUTPUTS[name], outputs[0])
    assert outputs[1] == ""


@pytest.mark.slow  # the next test runs them so without their pictures, the one above on processes with them
@pytest.mark.parametrize("name", OUTPUTS)
def test_the_example_runs_on_simulated_ranks(name, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    echelon.simulate(lambda _: run_example(name), 2, costs="measured")
    assert re.fullmatch(OUTPUTS[name], capsys.readouterr().out)


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_example_needs_no_matplotlib(name, monkeypatch, tmp_path, capsys):
    """A plain installation has none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    echelon.simulate(lambda _: run_example(name), 2, costs="measured")
    assert re.fullmatch(OUTPUTS[name], capsys.readouterr().out)
    assert not list(tmp_path.iterdir())


def test_the_other_python_blocks_run(capsys, tmp_path, monkeypatch):
    readme = (EXAMPLES.parent / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    own = [block for block in blocks if not block.startswith('"""')]
    assert len(own) == len(blocks) - len(OUTPUTS) == 2
    checkpoints, planning = sorted(own, key=lambda block: "checkpoint" not in block)
    exec(planning, {})
    assert capsys.readouterr().out == "14.9% bubble, at most 4 activations\n"
    monkeypatch.chdir(tmp_path)
    model, steps = torch.nn.Linear(64, 64), []
    names = {"echelon": echelon, "model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    exec(checkpoints, names | {"train_step": steps.append})
    exec(checkpoints, names | {"train_step": steps.append})  # there is nothing left to do
    assert steps == list(range(1, 301))
    assert echelon.checkpoint.Store("runs/gpt").steps() == [100, 200, 300]
    with open("runs/gpt/step-00000300/rank-00000.safetensors", "r+b") as file:
        file.seek(1000)
        file.write(b"damaged")
    ((command, expected),) = re.findall(r"```console\n\$ echelon (checkpoint .*)\n((?:.*\n)*?)```", readme)
    assert main(command.split()) == 1
    assert capsys.readouterr().out == expected
    with pytest.raises(echelon.CheckpointError, match=r"is damaged: .*bias, weight.*load step=200"):
        exec(checkpoints, names)


def test_the_plan_command_runs(capsys):
    readme = (EXAMPLES.parent / "README.md").read_text()
    (command,) = re.findall(r"^echelon plan .*$", readme, re.MULTILINE)
    assert main(command.split()[1:]) == 0
    assert "bubble rate 27.3 %" in capsys.readouterr().out


def test_the_readme_shows_what_a_hang_prints(monkeypatch, capfd):
    monkeypatch.chdir(EXAMPLES.parent)
    readme = (EXAMPLES.parent / "README.md").read_text()
    assert f"```py\n{(EXAMPLES / 'hang.py').read_text()}```\n" in readme
    ((command, expected),) = re.findall(r"```console\n\$ echelon (simulate .*)\n((?:.*\n)*?)```", readme)
    assert main(command.split()) == 1
    assert capfd.readouterr().err == expected


def test_the_first_screen_shows_a_hang_and_a_picture_in_few_words():
    first, *_ = (EXAMPLES.parent / "README.md").read_text().split("\n## ")
    assert "```console\n$ echelon simulate" in first
    assert "\n![" in first
    assert len(re.sub(r"```.*?```", "", first, flags=re.DOTALL).split()) < 160


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_readme_shows_what_64_gpus_are_foreseen_to_do():
    if not version("torch").startswith(FORECAST_OF):
        pytest.skip(f"shows a forecast by torch {FORECAST_OF}")
    readme = (EXAMPLES.parent / "README.md").read_text()
    ((command, expected),) = re.findall(r"```console\n\$ echelon (foresee .*)\n((?:.*\n)*?)```", readme)
    ended = subprocess.run(
        [sys.executable, "-m", "echelon", *shlex.split(command)],
        cwd=EXAMPLES.parent,
        env=os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # as on a terminal, in the order in which they come
        text=True,
        timeout=390,
        check=False,
    )
    assert LONG_WORK.sub("", ended.stdout) == expected
    assert ended.returncode == 0
