"""Blocks of shell commands in README.md and docs/: a test runs each of them, or the reason against it stands here."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp

from echelon.checkpoint import Store
from echelon.foresight.calibrate import save
from echelon.foresight.play.devices import DEVICES
from tests.helpers.pages import blocks_of

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(sh|bash|shell|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)

ELSEWHERE = {
    "README.md": {
        "tests/examples/test_readme.py": ("echelon simulate", "echelon foresee", "echelon plan", "echelon ch")
    },
    "docs/bench.md": {"tests/bench/test_docs.py": ("echelon bench all_reduce -n 16 --backend simulated",)},
    "docs/cluster.md": {
        "tests/launch/test_cluster.py": (
            "echelon run",
            "RANK=0",
            "torchrun --nnodes 2 --node-rank 0",
            "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-id",
            "mpirun --host",
            "#!/bin/bash",
        )
    },
    "docs/collectives.md": {"tests/collectives/test_docs.py": ("echelon plan",)},
    "docs/foresee.md": {"tests/examples/test_readme.py": ("echelon foresee -n 64 --gpu h100",)},
    "docs/plan.md": {"tests/pipeline/test_plan_docs.py": ("echelon plan",)},
    "docs/simulation.md": {"tests/simulation/test_docs.py": ("echelon simulate",)},
    "docs/coming_from/torchrun_and_ddp.md": {"tests/project/test_tutorials.py": ("torchrun", "echelon run")},
    "docs/tutorials/debug_torch_distributed.md": {"tests/project/test_tutorials.py": ("echelon simulate",)},
    "docs/tutorials/foresee_a_cluster.md": {"tests/project/test_tutorials.py": ("echelon foresee",)},
    "docs/tutorials/from_one_process_to_ddp.md": {"tests/project/test_tutorials.py": ("python", "echelon run")},
    "docs/tutorials/hugging_face_pipeline.md": {"tests/project/test_tutorials.py": ("echelon checkpoint export",)},
}
"""Blocks that tests of their pages run: page, file of the tests, beginnings of the blocks."""

NOT_RUN = {
    ("docs/cluster.md", "kubectl"): "needs a cluster: test_cluster.py runs the manifest's command, without Kubernetes",
}
"""Blocks that no test runs, with the reason."""

INIT = """\
import torch
import echelon

group = echelon.init(timeout=60)
total = group.all_reduce(torch.ones(1))
if group.rank == 0:
    print("ranks", int(total.item()))
"""

TRAIN = """\
import argparse
import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.01)
rate = parser.parse_args().lr
dist.init_process_group()
device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64, device=device))
optimizer = torch.optim.SGD(model.parameters(), rate)
for _ in range(3):
    model(torch.ones(8, 64, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    print("trained with", rate)
"""


def clone(folder: Path) -> None:
    """A clone of the repository, whose outputs go into the folder of the test."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "hatch_build.py", "native", "examples"):
        (folder / name).symlink_to(ROOT / name)


def script(text: str) -> Callable[[Path], object]:
    """A train.py of the reader's own."""
    return lambda folder: (folder / "train.py").write_text(text)


def measured_gpu(folder: Path) -> None:
    """A GPU that was measured, and a train.py."""
    save(DEVICES["h100"], folder / "mine.json")
    script(TRAIN)(folder)


def checkpoints(*steps: int) -> Callable[[Path], None]:
    """A folder runs/gpt with checkpoints of these steps, a checkpoint of torch's and a configuration."""

    def prepare(folder: Path) -> None:
        model = torch.nn.Linear(4, 4)
        store = Store(folder / "runs" / "gpt")
        for step in steps:
            store.save(step, model=model)
        store.close()
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "other" / "checkpoint", no_dist=True)
        (folder / "gpt2").mkdir()
        (folder / "gpt2" / "config.json").write_text("{}\n")

    return prepare


class Case(NamedTuple):
    """Block that runs here as it stands on its page."""

    page: str
    beginning: str
    """Beginning of its first command."""
    prints: str
    """Pattern that its output contains."""
    prepare: Callable[[Path], object] = script(INIT)
    """Makes the files that the page takes for granted."""
    instead: tuple[tuple[str, str], ...] = ()
    """Parts of the block and their replacements, each with its reason as a comment."""
    then: str = ""
    """Command in the same shell that shows the effect of the block."""


CASES = [
    # Installing takes minutes and a network: `python tools/release.py --rehearse` does it.
    Case("README.md", "pip install .", r"\[0\] loss 0\.\d+ on 2 ranks", clone, (("pip install .", "true"),)),
    # Both create a virtual environment and run for minutes. The commands of `demo` run one by one in this file.
    Case(
        "README.md",
        "make demo",
        r"echelon run -n 4 examples/train_gpt\.py --dp 2 --pp 2\n(?:.*\n)*.* -m pytest -m \"not slow\"",
        clone,
        (("make ", "make --dry-run "),),
    ),
    # 400 steps take minutes.
    Case(
        "README.md",
        "echelon run -n 4",
        r"validation loss",
        clone,
        (("--pp 2", "--pp 2 --steps 4 --validation-windows 32 --sample 20"),),
    ),
    # Each of these measured for one to two minutes on two busy cores: fewer turns, smaller tensors and fewer ranks.
    Case(
        "README.md",
        "echelon bench all_reduce",
        r"# wrong values: 0, OK\n(?:.*\n)*wrote .*/echelon/tuned\.json",
        instead=(("gloo", "gloo --max 64K --turns 1"), ("tune -n 4", "tune -n 2 --max 4K --turns 1")),
    ),
    Case(
        "docs/bench.md",
        "echelon bench all_reduce -n 4",
        r"(?:# wrong values: 0, OK\n(?:.*\n)*){3}(?:.*\n)*.*\"mpi",
        instead=(
            ("64M --factor 16", "64K --factor 16 --turns 1"),
            ("--root 1", "--root 1 --max 64K --turns 1"),
            ("gloo", "gloo --max 64K --turns 1"),
            ("mpi", "mpi --max 64K --turns 1"),
        ),
    ),
    Case(
        "docs/bench.md",
        "echelon tune",
        r"wrote .*/echelon/tuned\.json",
        instead=(("-n 4", "-n 2 --max 4K --turns 1"),),
    ),
    Case(
        "docs/checkpoints.md",
        "echelon checkpoint remove",
        r"\nstep 20: whole\n$",
        checkpoints(20, 30),
        then="echelon checkpoint verify runs/gpt",
    ),
    Case(
        "docs/checkpoints.md",
        "echelon checkpoint export",
        r"\nstep 300: whole\n$",
        checkpoints(200, 300),
        then="echelon checkpoint verify runs/gpt",
    ),
    Case("docs/cluster.md", "export ECHELON_SECRET", r"^64\n$", then="echo ${#ECHELON_SECRET}"),
    Case("docs/cluster.md", "torchrun --nproc-per-node 2 --max-restarts", r"step 200", clone),
    # Only the loopback interface is on every host.
    Case(
        "docs/cluster.md",
        "export ECHELON_INTERFACE",
        r"\[0\] ranks 2\n",
        instead=(("eth0", "lo"),),
        then="echelon run -q -n 2 train.py",
    ),
    Case(
        "docs/collectives.md",
        "export ECHELON_ALL_REDUCE",
        r"\[0\] ranks 2\n",
        then="ECHELON_BACKEND=tcp echelon run -q -n 2 train.py; echelon doctor",
    ),
    Case("docs/foresee.md", "echelon foresee -n 8", r"\nstep  +", clone),
    Case("docs/foresee.md", "echelon foresee --calibrate here", r"\nstep  +", script(TRAIN)),
    # Measuring a GPU needs one: tests/foresight/test_calibrate_gpu.py does it.
    Case(
        "docs/foresee.md",
        "echelon foresee --calibrate mine",
        r"64 x \S+ on 8 hosts(?:.*\n)*step  +",
        measured_gpu,
        (("echelon foresee --calibrate mine.json", "true"),),
    ),
    Case("docs/simulate_torch.md", "echelon simulate", r"\[0\] trained with 0\.1\n", script(TRAIN)),
]
STUCK = ("docs/tutorials/debug_torch_distributed.md", "echelon run -q -n 3 stuck.py")


class Block(NamedTuple):
    """Block of a page, without prompts and outputs."""

    page: str
    code: str


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        for language, text in BLOCK.findall(page.read_text(encoding="utf-8")):
            lines = [line for line in text.splitlines() if language != "console" or line.startswith("$ ")]
            code = "".join(f"{line.removeprefix('$ ')}\n" for line in lines)
            found.append(Block(str(page.relative_to(ROOT)), code))
    return found


def begins(block: Block, beginning: str) -> bool:
    return any(line.startswith(beginning) for line in block.code.splitlines()[:2])  # the first may be a comment


def is_run_elsewhere(block: Block) -> bool:
    return any(block.code.startswith(beginnings) for beginnings in ELSEWHERE.get(block.page, {}).values())


def test_no_block_is_left_out():
    listed = [(case.page, case.beginning) for case in CASES] + [STUCK, *NOT_RUN]
    for block in blocks():
        here = sum(block.page == page and begins(block, beginning) for page, beginning in listed)
        assert here + is_run_elsewhere(block) == 1, f"{block.page}: {block.code}"
    for page, beginning in listed:
        assert sum(block.page == page and begins(block, beginning) for block in blocks()) == 1, beginning
    for page, tests in ELSEWHERE.items():
        for file, beginnings in tests.items():
            assert (ROOT / file).exists()
            for beginning in beginnings:
                assert any(block.page == page and block.code.startswith(beginning) for block in blocks()), beginning


def programs(folder: Path) -> dict[str, str]:
    """Makes the commands of an installation in a folder, and returns the environment in which a shell finds them."""
    modules = {"echelon": "-m echelon", "torchrun": "-m torch.distributed.run", "python": ""}
    binaries = folder / "bin"
    binaries.mkdir()
    for name, arguments in modules.items():
        (binaries / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments} "$@"\n')
        (binaries / name).chmod(0o755)
    own = {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "100", "XDG_CONFIG_HOME": str(folder / "config")}
    return os.environ | own | {"PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"}


def start(code: str, folder: Path) -> subprocess.Popen[str]:
    """Starts a shell that runs commands in a folder, up to the first one that fails."""
    return subprocess.Popen(
        ["bash", "-euc", code],
        cwd=folder,
        env=programs(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(shell: subprocess.Popen[str]) -> None:
    """Ends all processes of a shell that has not ended."""
    if shell.poll() is None:
        os.killpg(shell.pid, signal.SIGTERM)
    shell.communicate(timeout=30)


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # of torch, which saves without ranks
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{Path(case.page).stem}: {case.beginning}")
def test_the_block_runs_as_it_stands_on_its_page(case, tmp_path):
    if "mpi" in dict(case.instead) and not shutil.which("mpirun"):
        pytest.skip("mpirun is not installed: apt-get install openmpi-bin")
    (code,) = (block.code for block in blocks() if block.page == case.page and begins(block, case.beginning))
    for old, new in case.instead:
        assert old in code
        code = code.replace(old, new)
    case.prepare(tmp_path)
    shell = start(code + case.then, tmp_path)
    try:
        printed, _ = shell.communicate(timeout=400)
    finally:
        end(shell)
    assert shell.returncode == 0, printed
    assert re.search(case.prints, printed), printed


WATCHED = """\
import sys, threading, time

def lines():
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame is not None:
        if frame.f_code.co_filename.endswith("stuck.py"):
            yield frame.f_lineno
        frame = frame.f_back

def watch():
    while not {{{places}}}.intersection(lines()):
        time.sleep(0.05)
    print("there", flush=True)

threading.Thread(target=watch, daemon=True).start()
"""
"""Module that says when its rank is at the line at which the page shows it."""


@pytest.fixture
def stuck(tmp_path):
    """Runs the hanging program of the tutorial. Gives the shell, and the two outputs on the page."""
    text = (ROOT / STUCK[0]).read_text(encoding="utf-8")
    (program,) = (block.code for block in blocks_of(text) if block.kind == "stuck.py")
    (code,) = (block.code for block in blocks() if block.page == STUCK[0] and begins(block, STUCK[1]))
    interrupted, timed_out = re.findall(r"^```text\n(.*?)^```", text.partition(f"```sh\n{code}```")[2], re.M | re.S)
    places = ", ".join(re.findall(r"at stuck\.py:(\d+)", interrupted))
    (tmp_path / "watched.py").write_text(WATCHED.format(places=places))
    assert "\n\nimport torch\n" in program
    (tmp_path / "stuck.py").write_text(program.replace("\n\nimport torch\n", "\nimport watched\nimport torch\n"))
    shell = start(f"exec {code}", tmp_path)
    yield shell, interrupted, timed_out
    end(shell)


def said(printed: str) -> str:
    """Returns the launcher's own lines, without the tracebacks that the page leaves out."""
    return "".join(line for line in printed.splitlines(keepends=True) if line.startswith("echelon: "))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_hang_of_the_tutorial_ends_by_ctrl_c_as_the_page_shows(stuck):
    shell, interrupted, _ = stuck
    ranks = 0
    while ranks < 3:
        line = shell.stdout.readline()
        assert line, "the program has ended"
        ranks += line.endswith("there\n")
    shell.send_signal(signal.SIGINT)
    printed, _ = shell.communicate(timeout=60)
    assert shell.returncode == 130
    assert said(printed) == interrupted


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_hang_of_the_tutorial_ends_by_its_timeout_as_the_page_shows(stuck):
    shell, _, timed_out = stuck
    printed, _ = shell.communicate(timeout=100)
    assert shell.returncode == 1
    found = re.sub(r"waited 2\d\.\d s", "waited 20.0 s", said(printed))
    if "rank 1 raised" in found.partition("\n")[0]:  # either of the two may be the first
        found = re.sub(r"rank ([12])\b", lambda match: f"rank {3 - int(match[1])}", found)
    assert found == timed_out
