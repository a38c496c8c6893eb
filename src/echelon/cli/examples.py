"""Examples of the commands, for the end of their help. A test parses each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

EXAMPLES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "run": ("echelon run -n 4 train.py --epochs 2", "echelon run -n 2 -q -m package.train"),
        "simulate": (
            "echelon simulate -n 8 --network 25GbE --costs measured --png a.png train.py",
            "echelon simulate -n 4 --explore 1000 --faults kill:2@op=17 train.py",
        ),
        "foresee": (
            "echelon foresee -n 64 --gpu h100 --html step.html train.py --batch-size 8",
            'echelon foresee -n 16 --sweep "--tp {1,2,4} --pp {1,2}" train.py',
            "echelon foresee --calibrate here.json",
        ),
        "plan": (
            "echelon plan 1f1b -r 4 -m 16 --png plan.png",
            "echelon plan --compare -r 4 -m 16 --memory-limit 4",
            "echelon plan --search -r 8 -m 32 --forward 1,1,1,1,1,1,1,2",
        ),
        "plan all-reduce": (
            "echelon plan all-reduce -r 8",
            "echelon plan all-reduce --algorithm ring -r 4 --hosts 2x2 --svg ring.svg",
        ),
        "bench": (
            "echelon bench all-reduce -n 4 --max 16M --vs gloo",
            "echelon bench all-gather -n 8 --backend simulated --hosts 2x4",
        ),
        "tune": (
            "echelon tune -n 4",
            "echelon tune -n 8 --backend simulated --hosts 2x4 --output tuned.json",
        ),
        "doctor": ("echelon doctor", "srun --ntasks-per-node 1 echelon doctor"),
        "env": ("echelon env --json",),
        "checkpoint ls": ("echelon checkpoint ls checkpoints",),
        "checkpoint verify": ("echelon checkpoint verify checkpoints --step 100",),
        "checkpoint remove": ("echelon checkpoint remove checkpoints 110 120",),
        "checkpoint export": ("echelon checkpoint export checkpoints --hf model",),
        "checkpoint import": ("echelon checkpoint import checkpoints --dcp saved --step 100",),
    }
)
"""Command lines by the names of commands."""


def epilog(command: str) -> str:
    """Returns the end of a command's help."""
    # The mark keeps each line on its own.
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in EXAMPLES[command])
