"""What Slurm's srun tells a rank.

SLURM_PROCID is also set in the script of a batch job, which is one process whatever the number of tasks; only srun
adds the variables of a step (SLURM_STEP_...).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from echelon.errors import LaunchError
from echelon.launch.nodelist import MAX_HOSTS, expand
from echelon.launch.translation import Translation
from echelon.launch.variables import Variables, parse

_NODELISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_NUM_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_TASKS = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def from_slurm(environ: Mapping[str, str]) -> Translation | None:
    """Returns what srun said; None if it did not start this rank. Raises LaunchError if a list of nodes is none."""
    if not environ.get("SLURM_PROCID") or is_batch_script(environ):
        return None
    size_name, _ = _first(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    hosts = _hosts(environ)
    num_hosts = len(hosts) or parse(_first(environ, *_NUM_NODES)[1])
    names = {"RANK": "SLURM_PROCID", "WORLD_SIZE": size_name, "LOCAL_RANK": "SLURM_LOCALID"}
    names["RESTART"] = "SLURM_RESTART_COUNT"
    values = {common: environ.get(own, "") for common, own in names.items()}
    values["LOCAL_WORLD_SIZE"] = values["WORLD_SIZE"] if num_hosts == 1 else _local_size(environ)
    if num_hosts != 1:
        values["MASTER_ADDR"] = _master(environ, hosts)
    names["LOCAL_WORLD_SIZE"] = _first(environ, *_TASKS_PER_NODE)[0]
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID", "")
    return Translation(
        "srun",
        Variables(values, names),
        f"slurm-{job}.{environ.get('SLURM_STEP_ID') or environ.get('SLURM_STEPID', '0')}" if job else "",
        num_hosts == 1,
    )


def is_batch_script(environ: Mapping[str, str]) -> bool:
    """Says whether this is what sbatch started: one process, in no step."""
    in_step = any(environ.get(name) for name in ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS"))
    return environ.get("ENVIRONMENT") == "BATCH" and bool(environ.get("SLURM_PROCID")) and not in_step


def check_alone(environ: Mapping[str, str]) -> None:
    """Raises LaunchError if this is the only process of a batch job that is to have several."""
    if is_batch_script(environ) and environ.get("SLURM_NTASKS", "1") != "1":
        raise LaunchError(
            f"SLURM_NTASKS={environ['SLURM_NTASKS']}, but this is the batch script's own process: "
            "start the ranks with srun, as `srun python train.py`"
        )


def _master(environ: Mapping[str, str], hosts: tuple[str, ...]) -> str:
    """Returns the host of rank 0, the first of the step; empty if that is not known."""
    if parse(environ.get("SLURM_HET_SIZE", "1")) != 1:
        return ""  # every component of such a job has a list of its own
    return hosts[0] if hosts else environ.get("SLURM_LAUNCH_NODE_IPADDR", "")


def _hosts(environ: Mapping[str, str]) -> tuple[str, ...]:
    text = _first(environ, *_NODELISTS)[1]
    return expand(text) if text else ()


def _local_size(environ: Mapping[str, str]) -> str:
    """Returns how many ranks this host has, from "4(x2),1" and the number of this node; empty if unknown."""
    counts: list[str] = []
    node = parse(environ.get("SLURM_NODEID", ""))
    for part in _first(environ, *_TASKS_PER_NODE)[1].split(","):
        found = _TASKS.fullmatch(part)
        if found is None or node is None or node >= MAX_HOSTS:
            return ""
        counts += [found.group(1)] * min(int(found.group(2) or 1), node + 1)
    return counts[node] if node is not None and 0 <= node < len(counts) else ""


def _first(environ: Mapping[str, str], *names: str) -> tuple[str, str]:
    """Returns the first of the variables that is set, and its text; the last one if none is."""
    for name in names:
        if environ.get(name):
            return name, environ[name]
    return names[-1], ""
