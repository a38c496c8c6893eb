"""Arguments that may make a script fit: smaller batches, and activation checkpointing."""

import pytest

from echelon.cli.misfit import Options, cures, options_of
from echelon.cli.sweep import combinations


@pytest.mark.parametrize(
    ("arguments", "share", "text"),
    [
        ("", 0.5, ""),  # a script without arguments
        ("--lr 1 --batch-size 12 --steps 8", 0.76, "--batch-size {9,8,7,4}"),
        ("--batch 6", 0.9, "--batch {5,4,3,2}"),  # 4 is the largest that fits: {3,1} was advised
        ("--batch 8", 0.13, "--batch {1}"),
        ("--batch 8", 1.2, "--batch {7,6,5,3}"),  # fragments alone keep it from fitting
        ("--batch 64", 0.7, "--batch {40,32,24,16}"),
        ("--batch 64", 0.08, "--batch {4,2}"),
        ("--batch 8", 0.1, ""),  # not even one sequence fits
        ("--batch 8", 0.0, ""),
        ("--local_batch=2", 0.6, "--local_batch={1}"),
        ("--batch 1", 0.9, ""),
        ("--batch", 0.5, ""),
        ("--num-microbatches 8 --batches 4", 0.5, ""),
        ("--data batch 8", 0.5, ""),
        ("--per_device_train_batch_size=8", 0.5, "--per_device_train_batch_size={4,3,2}"),
        ("--bs 2", 0.5, "--bs {1}"),
        ("--gbs 64 --mbs=4", 0.5, "--mbs={2,1}"),
        ("--global-batch-size 64 --micro-batch-size 4", 0.5, "--micro-batch-size {2,1}"),
        ("--bsz-file 8", 0.5, ""),
        (
            "--per_device_eval_batch_size 8 --per_device_train_batch_size 8",
            0.5,
            "--per_device_train_batch_size {4,3,2}",
        ),
        ("--batch-norm-freq 8 --log-every-batch 8 --test-batch-size 8", 0.5, ""),
    ],
)
def test_smaller_batches_are_close_to_the_largest_one_that_fits(arguments, share, text):
    found = cures(arguments.split(), share, "")
    assert found == ([f'smaller batches by --sweep "{text}"'] if text else [])
    assert not text or combinations("--sweep", text)


@pytest.mark.parametrize(
    ("arguments", "share", "text"),
    [
        ("--batch 12", 0.76, "--recompute after the script's name"),
        ("--batch 8", 0.1, '--sweep "--recompute --batch {8,6,4,2}"'),
        ("--batch 1", 0.9, "--recompute after the script's name"),
        ("", 0.9, "--recompute after the script's name"),
    ],
)
def test_activation_checkpointing_is_tried_with_batches_that_do_not_fit_without_it(arguments, share, text):
    assert cures(arguments.split(), share, "--recompute")[-1] == f"activation checkpointing by {text}"


def test_a_state_that_is_too_large_has_no_cure_among_the_arguments():
    assert cures(["--batch", "8"], 0.0, "--recompute") == []


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ('p.add_argument("--recompute", action="store_true")', "--recompute"),
        ('p.add_argument("--remat", action=argparse.BooleanOptionalAction)', "--remat"),
        (
            'p.add_argument("-c", "--use_activation_checkpointing", action="store_true")',
            "--use_activation_checkpointing",
        ),
        ('p.add_argument("--no-recompute", action="store_true")', ""),
        ('p.add_argument("--recompute", type=int)', ""),  # it needs a value
        ('p.add_argument("--checkpoint", action="store_true")', ""),  # it stores the model
        ('p.add_argument("--no_recompute", action="store_true")', ""),
        ('p.add_argument("--disable-recompute", action="store_true")', ""),
        ('p.add_argument("--async-checkpointing", action="store_true")', ""),  # of the model
        ('p.add_argument("--ac", action="store_true", help="activation checkpointing")', "--ac"),
        ('p.add_argument("-g", "--gc", action="store_true", help="Use gradient checkpoints")', "--gc"),
        ('p.add_argument("--save-memory", action="store_true", help="recompute in backward")', "--save-memory"),
        ('p.add_argument("--fast", action="store_true", help="no activation checkpointing")', ""),
        ('p.add_argument("--fast", action="store_true", help="Disable activation checkpointing")', ""),
        ('p.add_argument("--ac", action="store_true", help="write a checkpoint")', ""),
        ('p.add_argument("--ac", type=int, help="activation checkpointing")', ""),
        ('p.add_argument("--ac", action="store_true", help=TEXT)', ""),
        ("recompute = True", ""),
        ("this is no Python", ""),
    ],
)
def test_the_option_for_recomputation_is_read_from_the_script(text, option, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(text)
    assert options_of(str(script)).recompute == option


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('p.add_argument("-b", "--batch-size", type=int, default=32)', ("--batch-size", "32")),
        ('p.add_argument("--lr", default=1)\np.add_argument("--mbs", default=4, type=int)', ("--mbs", "4")),
        ('p.add_argument("--batch-size", type=int)', ()),
        ('p.add_argument("--batch-size", type=int, default=SIZE)', ()),
        ('p.add_argument("--eval-batch-size", type=int, default=8)', ()),
        ('p.add_argument("--batch-file", default="8")', ()),
        ('p.add_argument("batch", default=8)', ()),
    ],
)
def test_the_batch_by_default_is_read_from_the_script(text, words, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(text)
    assert options_of(str(script)) == Options("", words)


def test_a_batch_that_is_given_goes_before_the_default():
    assert cures(["--batch", "6", "--batch-size", "32"], 0.5, "") == ['smaller batches by --sweep "--batch {3,2,1}"']
    assert cures(["--lr", "1", "--batch-size", "2"], 0.5, "") == ['smaller batches by --sweep "--batch-size {1}"']


@pytest.mark.parametrize("beginning", [b"# -*- coding: latin-1 -*-\nname = '\xe9'\n", b"\xef\xbb\xbf"])
def test_a_script_in_another_encoding_is_read(beginning, tmp_path):
    (tmp_path / "train.py").write_bytes(beginning + b"p.add_argument('--recompute', action='store_true')")
    assert options_of(str(tmp_path / "train.py")).recompute == "--recompute"


def test_a_script_that_cannot_be_read_has_no_option(tmp_path):
    (tmp_path / "train.py").write_bytes(b"\xff\x00")
    assert options_of(str(tmp_path / "train.py")).recompute == ""
    assert options_of(str(tmp_path / "none.py")).recompute == ""
    (tmp_path / "deep.py").write_text("a + " * 5000 + "a")
    assert options_of(str(tmp_path / "deep.py")).recompute == ""
