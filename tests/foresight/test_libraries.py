"""Models and trainers of other libraries are recorded as they are."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from echelon.foresight.record.run import record
from echelon.foresight.trace import Collective, Kernel

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
VOCAB = 128


def kinds(trace):
    return {entry.kind for entry in trace.entries if isinstance(entry, Collective)}


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes))


def llama_fsdp():
    """A model on the meta device, sharded, then given memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    dist.init_process_group("nccl")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=VOCAB))
    model.gradient_checkpointing_enable()
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cuda")
    model.train()
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        tokens = torch.randint(0, VOCAB, (2, 32), device="cuda")
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_llama_of_transformers_under_fsdp():
    trace = record(llama_fsdp, 4)[0]
    assert trace.is_step
    assert kinds(trace) == {"all_gather", "reduce_scatter"}
    assert any(entry.phase == "recompute" for entry in trace.entries if isinstance(entry, Kernel))
    assert "model.layers.1.self_attn.q_proj" in trace.modules


def test_trainer_of_transformers(tmp_path):
    from transformers import Trainer, TrainingArguments

    def main():
        row = {"input_ids": list(range(32)), "labels": list(range(32))}
        options = {"per_device_train_batch_size": 2, "max_steps": 9, "save_steps": 1, "logging_steps": 1}
        arguments = TrainingArguments(tmp_path / "out", **options, bf16=True, report_to=[], disable_tqdm=True)
        Trainer(model=gpt2(), args=arguments, train_dataset=[row] * 64).train()

    trace = record(main, 4)[0]
    assert trace.is_step
    assert "all_reduce" in kinds(trace)
    assert list(tmp_path.iterdir()) == []
    assert any("safetensors" in text for text in trace.skipped)


def test_accelerate():
    from accelerate import Accelerator

    def main():
        accelerator = Accelerator(mixed_precision="bf16")
        model = torch.nn.Linear(64, 64)
        data = torch.utils.data.DataLoader(torch.randn(64, 64), batch_size=4, shuffle=True)
        model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), data)
        for rows in data:
            accelerator.backward(model(rows).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    trace = record(main, 4)[0]
    assert trace.is_step
    assert kinds(trace) == {"all_reduce"}


def test_lightning():
    import lightning

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(64, 64)

        def training_step(self, batch, index):
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def main():
        off = dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "barebones"), False
        )
        trainer = lightning.Trainer(max_steps=9, devices=4, accelerator="gpu", strategy="ddp", **off)
        trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(64, 64), batch_size=2))

    trace = record(main, 4)[0]
    assert trace.is_step
    assert "all_reduce" in kinds(trace)
