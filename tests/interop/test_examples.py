"""What is built on torch.distributed trains over Echelon, unchanged: the scripts of examples/interop."""

import importlib.util
import re

import pytest

from tests.helpers.examples import run_example_as_rank
from tests.helpers.torch_groups import launched

N = 2


def run_script(group, name, folder):
    if name == "train_accelerate":
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)  # a process of the pool may have been in a larger world
    with launched(group):
        return run_example_as_rank(group, f"interop/{name}.py", folder)


def loss_of(pool, tmp_path, name, **options):
    printed = "".join(pool.run(run_script, N, name, str(tmp_path), timeout=50.0, **options))
    found = re.search(r"^loss (\d\.\d+) on 2 ranks over echelon$", printed, re.MULTILINE)
    assert found is not None, printed
    return float(found[1])


@pytest.mark.parametrize("name", ["train_ddp", "train_fsdp2", "train_dtensor", "train_pipelining"])
def test_what_torch_brings_trains(pool, tmp_path, name):
    assert loss_of(pool, tmp_path, name) < 0.5


def test_a_checkpoint_is_loaded_as_it_was_saved(pool, tmp_path):
    first, second = pool.run(run_script, N, "train_checkpoint", str(tmp_path), timeout=50.0)
    losses = re.fullmatch(r"loss (\S+) after a resume, (\S+) without, on 2 ranks\n", first)
    assert losses[1] == losses[2]
    assert float(losses[1]) < 0.5
    assert second == ""


@pytest.mark.slow  # importing them takes long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("library", ["lightning", "accelerate"])
def test_libraries_train(pool, tmp_path, library):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install -c constraints.txt 'echelon[interop]'")
    assert loss_of(pool, tmp_path, f"train_{library}") < 0.5
