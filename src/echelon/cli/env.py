"""`echelon env`: versions, host and backends, for a report of a bug."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

from echelon.cli.options import Json
from echelon.cli.output import print_table, rich_console, to_json
from echelon.cores import num_cores

_PACKAGES = ("torch", "numpy", "typer", "rich", "matplotlib", "accelerate", "lightning", "transformers")


def env(as_json: Json = False) -> None:
    """Prints versions, host and backends for the report of a bug.

    Shows no secret: no host name, user, path or value of a variable. Needs no launcher.
    """
    values = found(os.environ)
    if as_json:
        print(to_json(values))
        return
    print_table(rich_console(), [("what", "found"), *values.items()], left=(0, 1))


def found(environ: Any) -> dict[str, str]:
    """Returns each fact by its name. Imports torch if it is installed, which takes seconds."""
    cores = f"{os.cpu_count()} cores, {num_cores()} for this process"
    # Names alone: a value may be the secret.
    variables = sorted(name for name in environ if name.startswith(("ECHELON_", "OMP_NUM_THREADS", "TORCH_", "NCCL_")))
    return {
        "echelon": version_of("echelon"),
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}".rstrip(", "),
        "machine": f"{platform.machine()}, {cores}, {_memory()}",
        **{name: version_of(name) for name in _PACKAGES},
        **_of_torch(),
        "variables set": ", ".join(variables) or "none",
    }


def version_of(package: str) -> str:
    """Returns the installed version of a package, or "not installed". Does not import it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _memory() -> str:
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"


def _of_torch() -> dict[str, str]:
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        return {"torch build": f"cannot be imported: {str(error).partition(chr(10))[0]}"}
    from echelon.backends.shared.memory.support import obstacle

    engines = ("gloo", "nccl", "mpi", "ucc")
    there = [name for name in engines if dist.is_available() and getattr(dist, f"is_{name}_available")()]
    problem = obstacle()
    build = "debug" if torch.version.debug else "release"
    return {
        "torch build": f"{torch.__version__}, {build}, CUDA {torch.version.cuda or 'none'}",
        "torch threads": str(torch.get_num_threads()),
        "GPUs": str(torch.cuda.device_count()),
        "backends": ", ".join(["tcp", *([] if problem else ["shm"]), *there]),
        "shared memory": problem or "yes",
    }
