"""Pipelines of models that are cut by a trace, foreseen."""

import gc
from dataclasses import replace
from functools import partial
from statistics import mean

import pytest
import torch
from torch import nn

import echelon
from echelon.foresight.play.devices import device_named
from echelon.foresight.record.run import record
from echelon.foresight.trace import Kernel, Message
from echelon.pipeline import Costs, Pipeline, schedules, split
from echelon.simulation import Network
from tests.foresight.test_echelon import communication

VOCABULARY, LENGTH, WIDTH, NUM_MICROBATCHES = 64, 16, 32, 4


class Decoder(nn.Module):
    """Model that makes tensors of its own on the device of its inputs, and on the device that `device` names."""

    def __init__(self, device):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.device = device

    def forward(self, ids):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            heads = layer(x).unflatten(-1, (2, -1)).transpose(1, 2)
            x = x + nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).mean(1).repeat(
                1, 1, 2
            )
        return x * torch.ones(1, device=self.device).to(x.dtype)


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=4,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config)


def eager_llama():
    return llama("eager")


def llama(attention="sdpa"):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        attn_implementation=attention,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def train(group, make_model, at, device="cpu", dtype=torch.float32):
    def loss_of(output, target):
        logits = getattr(output, "logits", output)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())

    model = make_model().to(device, dtype)
    ids = torch.zeros(2 * NUM_MICROBATCHES, LENGTH, dtype=torch.long).to(device)
    pipe = Pipeline(model, group, "1f1b", NUM_MICROBATCHES, loss_of, at=[at], example=(ids[:2],))
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    while True:
        pipe.step(ids, target=ids)
        optimizer.step()
        optimizer.zero_grad()


def sent_bytes(seen, dtype):
    """Returns the bytes of each message of a type that a rank sends to the other one."""
    messages = [communication(trace, Message) for _, trace in sorted(seen.traces.items())]
    return [[each.num_bytes for each in row if each.is_send and each.dtype == dtype] for row in messages]


def test_a_traced_model_is_foreseen_on_gpus():
    def main(group):
        train(group, lambda: Decoder("cuda"), "layers.1", "cuda", torch.bfloat16)

    seen = echelon.foresee(main, 2, gpu="h100")
    sums = 2 * LENGTH * WIDTH * 2
    assert sent_bytes(seen, "bfloat16") == [[sums] * NUM_MICROBATCHES] * 2
    for trace in seen.traces.values():
        names = [kernel.name for kernel in communication(trace, Kernel)]
        # The kernel that a GPU takes, once a layer and microbatch.
        assert names.count("_scaled_dot_product_flash_attention") == NUM_MICROBATCHES
        assert not any("for_cpu" in name for name in names)


def test_tracing_is_no_part_of_the_program():
    def main(cuts):
        model = Decoder("cpu")
        ids = torch.zeros(2, LENGTH, dtype=torch.long)
        if cuts:
            assert len(split(model, at=["layers.1"], example=(ids,)).modules) == 2
        gc.collect()  # as at the end of a step: torch leaves cycles that hold the model
        model(ids)

    with_cut, without = (record(partial(main, cuts), 1, gpu=None)[0] for cuts in (True, False))
    assert [type(each) for each in with_cut.entries] == [type(each) for each in without.entries]
    assert with_cut.modules == without.modules


MODELS = pytest.mark.parametrize(
    ("make_model", "at"), [(gpt2, "transformer.h.2"), (llama, "model.layers.2"), (eager_llama, "model.layers.2")]
)


@pytest.mark.slow
@pytest.mark.timeout(300)  # two ranks trace the model twice each
@pytest.mark.parametrize("gpu", ["cpu", "h100"])
@MODELS
def test_models_of_hugging_face_are_foreseen(make_model, at, gpu):
    # Messages take no time, and no multiprocessors from kernels.
    device = replace(device_named(gpu), communication_sms=0)
    network = Network(latency=0.0, bandwidth=1e30)
    seen = echelon.foresee(train, 2, (make_model, at), gpu=device, hosts=2, network=network)
    sums = 2 * LENGTH * WIDTH * 4
    assert sent_bytes(seen, "float32") == [[sums] * NUM_MICROBATCHES] * 2
    rows = [
        [span for span in role.phase_spans() if not isinstance(span.step, str)] for role in seen.played.roles.values()
    ]
    window = max(row[-1].end - row[0].start for row in rows)
    bubble = 1 - max(sum(span.end - span.start for span in row) for row in rows) / window
    # Kernels of this size take less time than the host needs to launch them. So the plan gets the times of whole steps.
    forward, backward = (
        [mean(span.end - span.start for span in row if (span.step.kind == "F") == is_forward) for row in rows]
        for is_forward in (True, False)
    )
    costs = Costs(
        forward=forward, backward_input=[0.0, backward[1] / 2], backward_weight=[backward[0], backward[1] / 2]
    )
    plan = schedules.build("1f1b", 2, NUM_MICROBATCHES).simulate(costs)
    assert bubble == pytest.approx(plan.bubble_rate, abs=0.02)
    assert window == pytest.approx(plan.span, rel=0.02)
