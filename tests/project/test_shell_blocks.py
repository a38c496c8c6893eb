"""Blocks of shell commands in README.md and docs/: a test runs each of them, or the reason against it stands here."""

import ast
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp

from echelon.checkpoint import Store
from echelon.foresight.calibration_file import save
from echelon.foresight.play.devices import DEVICES
from tests.helpers.pages import blocks_of

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(sh|bash|shell|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)

TUTORIALS = "tests/project/test_tutorials.py::test_every_block_prints_what_the_page_shows"
ELSEWHERE = {
    "README.md": {
        "tests/examples/test_readme.py::test_the_readme_shows_what_a_hang_prints": ("echelon simulate",),
        "tests/examples/test_readme.py::test_the_readme_shows_what_64_gpus_are_foreseen_to_do": ("echelon foresee",),
        "tests/examples/test_readme.py::test_the_plan_command_runs": ("echelon plan",),
        "tests/examples/test_readme.py::test_the_other_python_blocks_run": ("echelon checkpoint",),
    },
    "docs/bench.md": {
        "tests/bench/test_docs.py::test_what_is_simulated_prints_what_it_says": (
            "echelon bench all_reduce -n 16 --backend simulated",
        )
    },
    "docs/cluster.md": {
        "tests/launch/test_cluster.py::test_on_one_host_nothing_has_to_be_set": ("echelon run",),
        "tests/launch/test_cluster.py::test_by_hand_over_ipv6": ("RANK=0",),
        "tests/launch/test_cluster.py::test_torchrun_on_two_hosts": (
            "torchrun --nnodes 2 --node-rank 0",
            "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-id",
        ),
        "tests/launch/test_cluster.py::test_mpirun_on_two_hosts": ("mpirun --host",),
        "tests/launch/test_cluster.py::test_srun_on_two_hosts_by_its_environment": ("#!/bin/bash",),
    },
    "docs/collectives.md": {
        "tests/collectives/test_docs.py::test_the_shell_prints_what_it_says": ("echelon plan",),
    },
    "docs/plan.md": {
        "tests/pipeline/test_plan_docs.py::test_commands_print_what_stands_below_them": ("echelon plan",),
    },
    "docs/simulation.md": {
        "tests/simulation/test_docs.py::test_the_command_prints_what_the_page_shows": ("echelon simulate",),
    },
    "docs/coming_from/torchrun_and_ddp.md": {TUTORIALS: ("torchrun", "echelon run")},
    "docs/tutorials/debug_torch_distributed.md": {TUTORIALS: ("echelon simulate",)},
    "docs/tutorials/foresee_a_cluster.md": {TUTORIALS: ("echelon foresee",)},
    "docs/tutorials/from_one_process_to_ddp.md": {TUTORIALS: ("python", "echelon run")},
    "docs/tutorials/hugging_face_pipeline.md": {TUTORIALS: ("echelon checkpoint export",)},
    "docs/tutorials/write_a_schedule.md": {TUTORIALS: ("echelon run",)},
}
"""Blocks that tests of their pages run: page, test, beginnings of the blocks."""

AS_README = {("docs/foresee.md", "echelon foresee -n 64 --gpu h100")}
"""Blocks whose command the README has, too, and its test runs."""

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
if device == "cuda":
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
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
    listed = [(case.page, case.beginning) for case in CASES] + [STUCK, *NOT_RUN, *AS_README]
    for block in blocks():
        here = sum(block.page == page and begins(block, beginning) for page, beginning in listed)
        assert here + is_run_elsewhere(block) == 1, f"{block.page}: {block.code}"
    for page, beginning in listed:
        assert sum(block.page == page and begins(block, beginning) for block in blocks()) == 1, beginning
    for page, tests in ELSEWHERE.items():
        for beginning in (each for beginnings in tests.values() for each in beginnings):
            assert any(block.page == page and block.code.startswith(beginning) for block in blocks()), beginning


def test_the_readme_has_the_commands_that_its_test_runs_for_other_pages():
    readme = [block.code for block in blocks() if block.page == "README.md"]
    for page, beginning in AS_README:
        (code,) = (block.code for block in blocks() if block.page == page and begins(block, beginning))
        assert code in readme


class Source:
    """Definitions of a file of tests, and what they name."""

    def __init__(self, file: str) -> None:
        self.definitions: dict[str, ast.stmt] = {}
        self.of_pages: set[str] = set()
        """Names that are imported from tests.helpers.pages, which runs all blocks of a page."""
        for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                self.definitions[node.name] = node
            elif isinstance(node, ast.ImportFrom) and node.module == "tests.helpers.pages":
                self.of_pages = {alias.name for alias in node.names}
            elif isinstance(node, ast.Assign):
                self.definitions |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}

    def named_by(self, name: str) -> set[str]:
        """Returns the names in a definition; an argument of a test is the name of a fixture."""
        found = list(ast.walk(self.definitions[name])) if name in self.definitions else []
        return {node.id for node in found if isinstance(node, ast.Name)} | {
            node.arg for node in found if isinstance(node, ast.arg)
        }

    def reached_from(self, name: str) -> set[str]:
        """Returns a name with all names that its definition needs."""
        reached: set[str] = set()
        waiting = {name}
        while waiting:
            reached |= waiting
            waiting = {other for each in waiting for other in self.named_by(each)} - reached
        return reached

    def texts_of(self, names: Iterable[str]) -> set[str]:
        """Returns the constant texts in definitions."""
        nodes = (node for name in names if name in self.definitions for node in ast.walk(self.definitions[name]))
        return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def takes(test: str, page: str, block: str) -> bool:
    """Whether a test reads a page, and runs all of its blocks or has the beginning or the pattern of this one."""
    file, _, name = test.partition("::")
    source = Source(file)
    assert name in source.definitions, f"{file} has no {name}"
    reached = source.reached_from(name)
    texts = source.texts_of(reached)
    folder = Path(page).parent.name
    if Path(page).name not in texts and not {folder, "*.md"} <= texts:
        return False
    if "outputs" in reached & source.of_pages:
        return True
    lists = {each for each in source.named_by(name) if each.isupper()}
    texts = source.texts_of([name]) | {text for text in source.texts_of(lists) if "```" in text}
    beginnings = {text for text in texts if re.match(r"\S+[ =]\S", text)}  # a program and more
    return any(line.startswith(text) for line in block.splitlines() for text in beginnings) or any(
        re.search(text, block, re.MULTILINE | re.DOTALL) for text in texts if text.startswith(("```", "^"))
    )


@pytest.mark.parametrize(("page", "test"), [(page, test) for page, tests in ELSEWHERE.items() for test in tests])
def test_the_test_elsewhere_takes_the_block(page, test):
    text = (ROOT / page).read_text(encoding="utf-8")
    found = [match[0] for match in BLOCK.finditer(text)]
    for beginning in ELSEWHERE[page][test]:
        taken = [block for block in found if re.search(rf"^(?:\$ )?{re.escape(beginning)}", block, re.MULTILINE)]
        assert taken
        assert all(takes(test, page, block) for block in taken), beginning


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
