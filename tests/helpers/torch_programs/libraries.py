"""Programs with Accelerate, Hugging Face's Trainer, and Lightning's Fabric and Trainer.

The libraries are imported where they are used: they are not there in every installation, and take seconds.
"""

import os
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.torch_programs.common import WIDTH, Result, digest, mlp, program, shared_folder


def _dataset(samples=32):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, WIDTH, generator=generator)
    return TensorDataset(inputs, inputs.sin())


# Accelerate


@program
def accelerate(rank, world_size):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import set_seed

    AcceleratorState._reset_state(reset_partial_state=True)  # a process of the pool may have been in a smaller world
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(5, device_specific=True)
    noise = torch.rand(2).tolist()
    torch.manual_seed(0)
    layers = mlp()
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = DataLoader(_dataset(33), batch_size=2, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(layers, optimizer, loader, scheduler)
    losses, seen = [], []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            outputs = model(inputs)
            loss = (outputs - targets).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        seen.append(accelerator.gather_for_metrics(outputs.detach()))
    padded = accelerator.pad_across_processes(torch.ones(rank + 1))
    everywhere = [digest(model.parameters()), digest(seen), sum(map(len, seen)), padded.shape[0]]
    everywhere.append(accelerator.reduce(torch.tensor(float(rank)), "sum").item())
    with accelerator.main_process_first():
        order = accelerator.process_index, accelerator.num_processes, accelerator.is_main_process
    with shared_folder() as folder:
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        before = digest(model.parameters())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        accelerator.load_state(folder)
        everywhere.append(digest(model.parameters()) == before)
    accelerator.free_memory()
    return Result([losses, noise, order, scheduler.get_last_lr()], everywhere)


# Hugging Face's Trainer


class Regression(nn.Module):
    """Model as the Trainer calls it."""

    def __init__(self):
        super().__init__()
        self.layers = mlp()
        self.dropout = nn.Dropout(0.1)

    def forward(self, inputs, labels=None):
        outputs = self.dropout(self.layers(inputs))
        return {"loss": (outputs - labels).square().mean(), "logits": outputs}


def _trainer(folder, **options):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        max_steps=4,
        learning_rate=0.01,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        seed=11,
        **options,
    )
    samples = [{"inputs": inputs, "labels": targets} for inputs, targets in _dataset(40)]
    return Trainer(model=Regression(), args=arguments, train_dataset=samples, eval_dataset=samples[:9])


def _logged(trainer):
    return [
        entry[key] for entry in trainer.state.log_history for key in ("loss", "grad_norm", "eval_loss") if key in entry
    ]


@program
def transformers_trainer(rank, world_size):
    with shared_folder() as folder:
        trainer = _trainer(folder, save_steps=2, save_strategy="steps", gradient_accumulation_steps=2)
        trainer.train()
        metrics = trainer.evaluate()
        predictions = trainer.predict(trainer.eval_dataset).predictions
        first = digest(trainer.model.parameters())
        again = _trainer(folder, save_strategy="no", gradient_accumulation_steps=2)
        again.train(resume_from_checkpoint=os.path.join(folder, "checkpoint-2"))
        resumed = digest(again.model.parameters()) == first
    values = digest([torch.as_tensor(predictions)])
    return Result([_logged(trainer), resumed], [first, metrics["eval_loss"], values, trainer.args.world_size])


@program
def transformers_language_model(rank, world_size):
    """A GPT-2 of two layers, trained by the Trainer."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    tokens = torch.randint(32, (32, 16), generator=torch.Generator().manual_seed(1))
    samples = [{"input_ids": row, "labels": row} for row in tokens]
    with shared_folder() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=2,
            per_device_train_batch_size=1,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=samples)
        trainer.train()
    return Result(_logged(trainer), digest(trainer.model.parameters()))


# Lightning


@program
def lightning_fabric(rank, world_size):
    from lightning import Fabric
    from lightning.fabric.strategies import DDPStrategy

    strategy = DDPStrategy(process_group_backend=dist.get_backend())
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, precision="bf16-mixed")
    fabric.launch()
    fabric.seed_everything(3 + fabric.global_rank, verbose=False)
    noise = torch.rand(2).tolist()
    fabric.seed_everything(0, verbose=False)
    layers = mlp()
    model, optimizer = fabric.setup(layers, torch.optim.AdamW(layers.parameters(), lr=0.01))
    loader = fabric.setup_dataloaders(DataLoader(_dataset(), batch_size=1))
    losses = []
    for number, (inputs, targets) in enumerate(loader):
        is_last = number % 2 == 1
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = (model(inputs) - targets).square().mean()
            fabric.backward(loss)
        if is_last:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    everywhere = [digest(model.parameters()), fabric.all_reduce(torch.tensor(losses[-1])).item()]
    everywhere.append(fabric.all_gather(torch.tensor([float(rank)])).flatten().tolist())
    with shared_folder() as folder:
        fabric.save(os.path.join(folder, "state"), {"model": model, "optimizer": optimizer})
        before = digest(model.parameters())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        fabric.load(os.path.join(folder, "state"), {"model": model, "optimizer": optimizer})
        everywhere.append(digest(model.parameters()) == before)
    return Result([losses, noise], everywhere)


@program
def lightning_trainer(rank, world_size):
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = mlp()
            self.dropout = nn.Dropout(0.1)
            self.losses = []

        def training_step(self, batch, _):
            inputs, targets = batch
            loss = (self.dropout(self.layers(inputs)) - targets).square().mean()
            self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch, _):
            inputs, targets = batch
            self.log("error", (self.layers(inputs) - targets).abs().mean(), sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.01)

    lightning.seed_everything(0, verbose=False)
    with shared_folder() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few workers load the data, and few steps are logged
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=world_size,
            strategy=DDPStrategy(process_group_backend=dist.get_backend()),
            max_epochs=2,
            gradient_clip_val=0.5,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=True,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = Module()
        loaders = DataLoader(_dataset(), batch_size=1, shuffle=True), DataLoader(_dataset(16), batch_size=1)
        trainer.fit(module, *loaders)
        saved = os.path.join(folder, "saved.ckpt")
        trainer.save_checkpoint(saved)
        again = Module()
        again.load_state_dict(torch.load(saved, weights_only=True)["state_dict"])
        equal = digest(again.parameters()) == digest(module.parameters())
    metrics = [trainer.callback_metrics[name].item() for name in ("loss", "error")]
    return Result(module.losses, [metrics, digest(module.parameters()), equal, trainer.world_size])
