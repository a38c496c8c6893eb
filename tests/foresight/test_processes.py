"""Ranks recorded in child processes have the traces of one process, and its errors."""

import json
import subprocess
import sys
from collections import Counter

import pytest

from echelon.foresight.record.ranks.processes import packed, unpacked
from echelon.foresight.trace import (
    Allocate,
    Collective,
    Copy,
    Free,
    Group,
    HostKernel,
    HostWait,
    Kernel,
    Message,
    RecordEvent,
    Trace,
    Wait,
    WaitEvent,
)


def test_bytes_of_a_trace():
    reads = ((1, 512), (2, 1024))
    entries = (
        Allocate(1, 512, "activations", 0, -1, 3),
        Kernel(0, "mm", "matmul", 8, "float32", (1, 2, 2, 2), reads, (), 1, "forward", 0, 0, is_compiled=True),
        Collective(0, 1, "all_reduce", 0, 512, "float32", "sum", -1, False, reads, reads, "backward", 0, -1),
        Message(0, 2, True, 1, 0, 7, 512, "float32", False, -1, "forward", 0, -1, is_ordered=False),
        Wait(0, 1, 0),
        RecordEvent(1, 4),
        WaitEvent(0, 4),
        HostWait(-1, -1, 0),
        Free(1),
        Copy(0, True, 64, "other", 0, 0),
        HostKernel("add", 64, 1, "optimizer", 0, 0),
    )
    whole = Trace(
        3,
        8,
        entries,
        (Allocate(2, 1024, "parameters", -1, 0),),
        (Group((0, 3), "dp", 1),),
        ("train.py:1",),
        ("layer",),
        is_step=True,
        assumptions=("one",),
        skipped=("other",),
        computed=((0, 1, "0F3"),),
        earlier=entries[2:8],
        has_expandable_segments=True,
    )
    assert unpacked(packed(whole)) == whole
    assert repr(unpacked(packed(whole))) == repr(whole)  # the kinds of entries, too


# In a process of its own: only one without further threads is forked.
PROGRAM = """
import json, mmap, os, sys, warnings
from unittest.mock import patch
warnings.simplefilter("ignore")
import echelon
from echelon.foresight.record import run
from tests.foresight.test_pipelines import pipeline

parent, mark = os.getpid(), mmap.mmap(-1, 32)

def main():
    rank = int(os.environ["RANK"])
    mark[rank] = 1 + (os.getpid() != parent)
    print("rank", rank)
    with open("note.txt", "w") as file:  # which is skipped, and read back
        file.write(str(rank))
    with open("note.txt") as file:
        assert file.read() == str(rank)
    if "fails" in sys.argv and rank == 31:
        raise ValueError("of the program")
    pipeline(4, "Interleaved1F1B" if "ring" in sys.argv else "1F1B", microbatches=4)

found = []
for most in (1, 1 << 60):
    mark[:] = bytes(32)
    with patch.object(run, "MANY_ENTRIES", most), patch.object(run, "MANY_RANKS", most):
        try:
            seen = echelon.foresee(main, 32)
        except ValueError as error:
            found.append([list(mark[:]), "", f"{error} {error.__notes__}"])
        else:
            traces = {rank: repr(trace) for rank, trace in seen.traces.items()}
            found.append([list(mark[:]), repr((seen.classes, seen.step_seconds, seen.live_memory, traces)), ""])
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    "word", ["line", pytest.param("ring", marks=pytest.mark.slow), pytest.param("fails", marks=pytest.mark.slow)]
)
def test_traces_and_errors_are_those_of_one_process(word):
    done = subprocess.run([sys.executable, "-c", PROGRAM, word], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *printed, found = done.stdout.splitlines()
    (forked, result, error), (alone, result_alone, error_alone) = json.loads(found)
    assert 2 in forked
    assert 2 not in alone
    if word == "fails":
        assert "of the program" in error
        assert "rank 31" in error
        assert error == error_alone
    else:
        assert result == result_alone
        assert [each > 0 for each in forked] == [each > 0 for each in alone]
        assert set(forked) == {0, 2}
        assert Counter(printed) == {f"rank {rank}": 2 for rank, each in enumerate(forked) if each}


VALUES = """
import json, warnings
from unittest.mock import patch
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
import echelon
from echelon.foresight.record import run

def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    width = [64 if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(width, 0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(width[0], 8, device="cuda"))
    optimizer = torch.optim.SGD(model.parameters())
    while True:
        model(torch.ones(2, 64, device="cuda")).sum().backward()
        optimizer.step()

found = []
for entries, ranks in ((1, 1), (run.MANY_ENTRIES, run.MANY_RANKS), (1 << 60, 1 << 60)):
    with patch.object(run, "MANY_ENTRIES", entries), patch.object(run, "MANY_RANKS", ranks):
        seen = echelon.foresee(main, 17)
    found.append(repr((seen.classes, seen.step_seconds, seen.traces)))
print(json.dumps(found))
"""


def test_values_of_rank_0_reach_ranks_that_are_recorded_later():
    """Rank 0 was recorded in a child process, and its values were gone: a deadlock was found that is none."""
    done = subprocess.run([sys.executable, "-c", VALUES], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    in_children, usual, alone = json.loads(done.stdout.splitlines()[-1])
    assert in_children == usual == alone
