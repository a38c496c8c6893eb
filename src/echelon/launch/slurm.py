"""Translation of the variables of Slurm's srun, and expansion of Slurm's lists of host names.

SLURM_PROCID is also set in the script of a batch job, which is one process for any number of tasks. Only srun adds the
variables of a step (SLURM_STEP_...).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

from echelon.errors import LaunchError
from echelon.launch.variables import Translation, Variables, parse

MAX_HOSTS = 1 << 17
"""Most hosts in a list. More are a mistake, and would take long to expand."""
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def expand(text: str) -> tuple[str, ...]:
    """Expands a list of hosts in Slurm's notation: "gpu[01-03,7],login" is gpu01 gpu02 gpu03 gpu7 login, in this order.

    Raises:
        LaunchError: `text` is no such list, or stands for more than 2^17 hosts.
    """
    hosts: list[str] = []
    position = 0
    while position <= len(text):
        parts: list[list[str]] = []
        while found := _PART.match(text, position):
            bracket, plain = found.groups()
            parts.append([plain] if plain is not None else _numbers(bracket, text))
            position = found.end()
        # Checked before the product is expanded: "[1-9999][1-9999]" is 16 characters and 10^8 names.
        count = len(hosts) + _product(parts)
        if not parts or (position < len(text) and text[position] != ","):
            raise LaunchError(f"{text!r} is not a list of hosts such as 'gpu[01-04],login': correct it")
        if count > MAX_HOSTS:
            raise LaunchError(f"{text!r} stands for more than {MAX_HOSTS} hosts: correct it")
        hosts += ("".join(names) for names in itertools.product(*parts))
        position += 1
    return tuple(hosts)


def _numbers(text: str, whole: str) -> list[str]:
    """Expands "01-03,7" into its numbers, each as wide as its range's first number."""
    numbers: list[str] = []
    for part in text.split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise LaunchError(f"{whole!r}: [{text}] is not a list of numbers such as [01-04,7]: correct it")
        first, last = found.group(1), found.group(2) or found.group(1)
        if not 0 <= int(last) - int(first) < MAX_HOSTS:
            raise LaunchError(f"{whole!r}: {part} is not a range of up to {MAX_HOSTS} numbers: correct it")
        numbers += (f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1))
    return numbers


def _product(parts: list[list[str]]) -> int:
    count = 1
    for names in parts:
        count *= len(names)
    return count


_NODELISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_NUM_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_TASKS = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def from_slurm(environ: Mapping[str, str]) -> Translation | None:
    """Translates the variables of srun. None if it did not start this rank.

    Raises:
        LaunchError: a list of nodes is malformed.
    """
    if not environ.get("SLURM_PROCID") or is_batch_script(environ):
        return None
    # The step's variables before the job's: srun may start fewer ranks than the job has tasks.
    size_name, _ = _first(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    hosts = _hosts(environ)
    # Without a list of nodes, their number still tells whether all ranks are on this host.
    num_hosts = len(hosts) or parse(_first(environ, *_NUM_NODES)[1])
    names = {"RANK": "SLURM_PROCID", "WORLD_SIZE": size_name, "LOCAL_RANK": "SLURM_LOCALID"}
    names["RESTART"] = "SLURM_RESTART_COUNT"
    values = {common: environ.get(own, "") for common, own in names.items()}
    values["LOCAL_WORLD_SIZE"] = values["WORLD_SIZE"] if num_hosts == 1 else _local_size(environ)
    if num_hosts != 1:
        values["MASTER_ADDR"] = _master(environ, hosts)
    names["LOCAL_WORLD_SIZE"] = _first(environ, *_TASKS_PER_NODE)[0]
    # With the step's number: a job may run several steps, and each is a world of its own.
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID", "")
    return Translation(
        "srun",
        Variables(values, names),
        f"slurm-{job}.{environ.get('SLURM_STEP_ID') or environ.get('SLURM_STEPID', '0')}" if job else "",
        num_hosts == 1,
    )


def is_batch_script(environ: Mapping[str, str]) -> bool:
    """Whether this process is a batch script that sbatch started: a single process outside any step."""
    in_step = any(environ.get(name) for name in ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS"))
    return environ.get("ENVIRONMENT") == "BATCH" and bool(environ.get("SLURM_PROCID")) and not in_step


def check_alone(environ: Mapping[str, str]) -> None:
    """Raises LaunchError if this is the batch script of a job with several tasks."""
    if is_batch_script(environ) and environ.get("SLURM_NTASKS", "1") != "1":
        raise LaunchError(
            f"SLURM_NTASKS={environ['SLURM_NTASKS']}, but this is the batch script's own process: "
            "start the ranks with srun, as `srun python train.py`"
        )


def _master(environ: Mapping[str, str], hosts: tuple[str, ...]) -> str:
    """Returns the host of rank 0, which is the first of the step. Empty if it is unknown."""
    # Each component of a heterogeneous job has a list of its own, so the first host need not be rank 0's.
    if parse(environ.get("SLURM_HET_SIZE", "1")) != 1:
        return ""
    return hosts[0] if hosts else environ.get("SLURM_LAUNCH_NODE_IPADDR", "")


def _hosts(environ: Mapping[str, str]) -> tuple[str, ...]:
    text = _first(environ, *_NODELISTS)[1]
    return expand(text) if text else ()


def _local_size(environ: Mapping[str, str]) -> str:
    """Returns the number of ranks on this host, from "4(x2),1" and the number of this node. Empty if unknown."""
    counts: list[str] = []
    node = parse(environ.get("SLURM_NODEID", ""))
    for part in _first(environ, *_TASKS_PER_NODE)[1].split(","):
        found = _TASKS.fullmatch(part)
        if found is None or node is None or node >= MAX_HOSTS:
            return ""
        # At most node + 1 entries are needed, so a huge repeat count takes no memory.
        counts += [found.group(1)] * min(int(found.group(2) or 1), node + 1)
    return counts[node] if node is not None and 0 <= node < len(counts) else ""


def _first(environ: Mapping[str, str], *names: str) -> tuple[str, str]:
    """Returns name and text of the first variable that is set. The last name and an empty text if none is."""
    for name in names:
        if environ.get(name):
            return name, environ[name]
    return names[-1], ""
