"""Lightning over Echelon.  torchrun --nproc-per-node 2 examples/interop/train_lightning.py"""

import os

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon.interop.torch_distributed  # noqa: F401 # makes "echelon" a backend of torch.distributed


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch, _):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.layers(inputs), targets)
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


lightning.seed_everything(0, verbose=False)
inputs = torch.randn(1024, 8)
loader = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).sin()), batch_size=32, shuffle=True)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(os.environ["WORLD_SIZE"]),
    strategy=DDPStrategy(process_group_backend="echelon"),
    max_epochs=6,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Regression(), loader)
if trainer.global_rank == 0:
    loss, backend = trainer.callback_metrics["loss"], torch.distributed.get_backend()
    print(f"loss {loss:.3f} on {trainer.world_size} ranks over {backend}")
torch.distributed.destroy_process_group()
