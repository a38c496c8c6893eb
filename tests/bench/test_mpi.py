"""A rank of mpirun, with a stand-in for mpi4py: a world of one rank, whose reductions leave the values alone."""

import json
import os
import subprocess
import sys
from dataclasses import asdict

import pytest

from echelon.bench.request import Request

STAND_IN = """\
class MPI:
    IN_PLACE = SUM = None

    class COMM_WORLD:
        rank, size = 0, 1
        bcast = staticmethod(lambda value, root: value)
        Allreduce = Send = Recv = staticmethod(lambda *arguments: None)
"""


@pytest.mark.slow
def test_a_rank_of_mpirun_measures_its_request(tmp_path):
    (tmp_path / "mpi4py.py").write_text(STAND_IN)
    request = Request("all_reduce", backend="tcp", largest="8", turns=1, iterations=1, vs="mpi", as_json=True)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "ECHELON_SECRET": "0123456789abcdef", "ECHELON_RUN_ID": "a"}
    command = [sys.executable, "-m", "echelon.bench.mpi", json.dumps(asdict(request))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, env=environ)
    assert ended.returncode == 0, ended.stderr
    subjects = json.loads(ended.stdout)["rows"][0]["subjects"]
    assert [(name, found["wrong"]) for name, found in subjects.items()] == [("tcp", 0), ("mpi", 0)]
