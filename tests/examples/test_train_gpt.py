"""The example trains what one process trains, however its ranks are laid out and started."""

import contextlib
import itertools
import os
import re
import subprocess
import sys

import pytest

import echelon
from tests.helpers.examples import EXAMPLES, SMALL, import_example, train_gpt, train_gpt_as_rank


def losses(output):
    """Returns the loss of every line of progress."""
    return [float(loss) for loss in re.findall(r"^ *\d+/\d+ +([\d.]+)", output, re.MULTILINE)]


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (1, ""),
        (2, "--pp 2"),
        (3, "--pp 3"),
        (4, "--pp 4 --schedule gpipe"),
        (4, "--dp 2 --pp 2 --batch 13 --microbatches 4"),
    ],
)
def test_simulated_ranks_train_the_same_model_as_one_process(world_size, layout, tmp_path, capsys):
    train_gpt(["--simulate", str(world_size), *layout.split(), "--check", "--out", str(tmp_path)])
    output = capsys.readouterr().out
    assert "that is rounding" in output
    assert len(losses(output)) == 2  # the first step and the last one
    assert (tmp_path / "train_gpt.png").stat().st_size > 10_000


def test_real_processes_train_the_same_model_as_one_process(pool, tmp_path):
    pool.run(train_gpt_as_rank, 4, "--dp", "2", "--pp", "2", "--check", "--out", str(tmp_path))
    assert (tmp_path / "train_gpt.png").exists()


def test_the_loss_does_not_depend_on_the_layout(tmp_path, capsys):
    seen = []
    for layout in ("--dp 4 --pp 1", "--dp 1 --pp 4"):
        train_gpt(["--simulate", "4", *layout.split(), "--report-every", "1", "--out", str(tmp_path)])
        seen.append(losses(capsys.readouterr().out))
    assert len(seen[0]) == 3
    assert seen[0] == seen[1]


def test_it_goes_on_in_any_layout(tmp_path, capsys):
    arguments = [
        "--report-every",
        "1",
        "--out",
        str(tmp_path),
        "--checkpoint",
        str(tmp_path / "run"),
        "--save-every",
        "1",
    ]
    train_gpt(["--simulate", "1", "--check", "--out", str(tmp_path)])
    expected = losses(capsys.readouterr().out)
    example, ends = import_example(), []
    for last, ranks, layout in ((1, 4, "--dp 2 --pp 2"), (2, 3, "--pp 3"), (3, 2, "--dp 2")):
        with pytest.MonkeyPatch.context() as patch:
            # The rates of all steps follow from the number of steps, so the first ones end by a failure.
            if last < 3:
                patch.setattr(example, "batch_of", failing_from(example.batch_of, last))
            with contextlib.suppress(Killed):
                train_gpt(["--simulate", str(ranks), *layout.split(), *arguments])
        output = capsys.readouterr().out
        assert ("going on after step" in output) == (last > 1)
        ends += losses(output)
    assert ends[0] == expected[0]
    assert ends[-1] == expected[-1]
    assert len(ends) == 3


class Killed(Exception):
    pass


def failing_from(batch_of, first):
    def batch_or_failure(text, step, options):
        if step == first:
            raise Killed
        return batch_of(text, step, options)

    return batch_or_failure


def test_check_finds_weights_that_differ(tmp_path, monkeypatch):
    example = import_example()
    make_gpt, seeds = example.make_gpt, itertools.count()
    monkeypatch.setattr(example, "make_gpt", lambda *sizes: make_gpt(*sizes, seed=next(seeds)))
    with pytest.raises(echelon.PeerFailed, match=r"rank 0 failed: it exited with status 1: .*more than rounding"):
        train_gpt(["--simulate", "1", "--check", "--out", str(tmp_path)])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ("--dp 3 --pp 2", echelon.InvalidWorldSize, "dp=3 x pp=2 does not make 4 ranks"),
        ("--pp 3", echelon.InvalidWorldSize, "dp=1 x pp=3 does not make 4 ranks"),
        ("--pp 4 --layers 1", echelon.PartitionError, "cannot cut 3 layers into 4 stages"),
        ("--pp 4 --batch 2", echelon.SizeMismatch, "2"),
    ],
)
def test_bad_input_is_told_in_one_line(arguments, error, message):
    with pytest.raises(error, match=message) as caught:
        train_gpt(["--simulate", "4", *arguments.split()])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("options", ["--steps 0", "--report-every 0", "--save-every 0", "--prompt="])
def test_options_without_a_meaning_are_refused_before_the_training(options, capsys):
    """No steps were 400, and the others failed in the middle of the training or after it."""
    with pytest.raises(SystemExit):
        train_gpt(["--simulate", "1", *options.split()])
    assert "error: give --steps, --report-every and --save-every 1 or more" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "launcher",
    [
        [],
        ["-m", "echelon", "run", "-n", "4"],
        ["-m", "torch.distributed.run", "--nproc-per-node", "4"],
    ],
)
def test_every_launcher_starts_the_same_script(launcher, tmp_path):
    layout = ["--dp", "2", "--pp", "2"] if launcher else []
    command = [sys.executable, *launcher, str(EXAMPLES / "train_gpt.py"), *SMALL, *layout, "--check"]
    ended = subprocess.run(
        [*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=170, env=os.environ
    )
    assert ended.returncode == 0, ended.stderr
    assert "that is rounding" in ended.stdout
