"""Programs of torch.distributed alone, started by torchrun: the ranks of its default group save and load together."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from echelon.checkpoint import Store

dist.init_process_group(sys.argv[2])
torch.manual_seed(dist.get_rank())
model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
optimizer = torch.optim.AdamW(model.parameters())
store = Store(sys.argv[1])
step = store.load(model=model, optimizer=optimizer) or 0
model(torch.ones(2, 3)).sum().backward()
optimizer.step()
store.save(step + 1, model=model, optimizer=optimizer, wait=False)
store.close()
if dist.get_rank() == 0:
    print("went on from", step)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("backend", ["gloo", "echelon"])
def test_its_default_group_saves(backend, tmp_path):
    script = tmp_path / "program.py"
    script.write_text("import echelon.interop.torch_distributed\n" + PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    for step in range(2):
        ended = subprocess.run(
            [*command, str(tmp_path / "run"), backend],
            capture_output=True,
            text=True,
            timeout=110,
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout == f"went on from {step}\n"
