"""A script of torch.distributed that hangs on processes.  echelon simulate -n 3 examples/hang.py"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 1))
for _ in range(2 if dist.get_rank() == 0 else 3):  # rank 0 has one batch less
    model(torch.ones(4, 8)).sum().backward()
