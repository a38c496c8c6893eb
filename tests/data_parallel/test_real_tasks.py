"""Real data and models, trained as users do: as well on several ranks as in one process."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from echelon import DDP, SyncBatchNorm, ZeroOptimizer
from echelon.data_parallel import AccumulateIn, CompressTo, LocalSGD, PowerSGD

EPOCHS = 10


def digits():
    """1,797 handwritten digits of 8 by 8 pixels; every fifth is kept for testing, 1,434 are for training."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    labels = torch.tensor(labels)
    is_test = torch.arange(len(labels)) % 5 == 0
    return (images[~is_test][:1434], labels[~is_test][:1434]), (images[is_test], labels[is_test])


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


HOOKS = {
    "plain": lambda: None,
    "bfloat16": lambda: CompressTo(torch.bfloat16),
    "float16": lambda: CompressTo(torch.float16),
    "powersgd": lambda: PowerSGD(rank=4, start_after=5),
    "local": lambda: LocalSGD(4),
    "float32": lambda: AccumulateIn(torch.float32),
}


def train_digits(group, name):
    """Returns the loss of each step, of all ranks together, and the accuracy at the end."""
    torch.set_num_threads(1)
    train, (test_images, test_labels) = digits()
    data = TensorDataset(*train)
    sampler = DistributedSampler(data, group.world_size, group.rank, seed=1)
    loader = DataLoader(data, batch_size=96 // group.world_size, sampler=sampler)
    hook = HOOKS[name]()
    dtype = torch.bfloat16 if name == "float32" else torch.float32
    model = DDP(SyncBatchNorm.convert(network().to(dtype), group), group, hook=hook, average="samples")
    # With LocalSGD each rank has gradients of its own, so its optimizer's state is its own as well.
    make = torch.optim.SGD if name == "local" else functools.partial(ZeroOptimizer, torch.optim.SGD, group=group)
    optimizer = make(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images.to(dtype)).float(), labels)
            loss.backward()
            optimizer.step()
            losses.append(group.all_reduce(loss.detach(), "mean").item())
    if isinstance(hook, LocalSGD):
        hook.average(list(model.parameters()), group)
    model.eval()
    with torch.no_grad():
        return losses, (model(test_images.to(dtype)).argmax(1) == test_labels).float().mean().item()


@pytest.fixture(scope="module")
def alone(pool):
    ((losses, accuracy),) = pool.run(train_digits, 1, "plain", timeout=50.0)
    assert accuracy > 0.965
    return losses, accuracy


def test_digits_are_learnt_as_well_as_in_one_process(pool, alone):
    """DistributedSampler gives all ranks together the batches of one process, so the losses are the same."""
    for losses, accuracy in pool.run(train_digits, 2, "plain", timeout=50.0):
        torch.testing.assert_close(losses[:15], alone[0][:15], rtol=1e-4, atol=1e-4)
        assert accuracy > alone[1] - 0.015


@pytest.mark.slow  # test_hooks.py trains a small model with each
@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        ("powersgd", 0.2),
        ("bfloat16", 5e-3),
        ("float16", 5e-3),
        ("local", 0.5),
        ("float32", 0.03),
    ],
)
def test_digits_are_learnt_with_less_traffic_or_precision(pool, alone, name, tolerance):
    for losses, accuracy in pool.run(train_digits, 2, name, timeout=50.0):
        torch.testing.assert_close(losses[:20], alone[0][:20], rtol=tolerance, atol=tolerance)
        assert accuracy > 0.965


def train_gpt2(group):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=128, n_positions=64, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0
    )
    model = DDP(GPT2LMHeadModel(config), group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    text = torch.tensor(list(__doc__.encode())).repeat(6)[: 8 * 64].view(8, 64)
    mine = text.chunk(group.world_size)[group.rank]
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        optimizer.step()
        losses.append(group.all_reduce(loss.detach(), "mean").item())
    return losses


def test_a_hugging_face_model_trains_as_in_one_process(pool):
    pytest.importorskip("transformers")
    (alone,) = pool.run(train_gpt2, 1, timeout=50.0)
    for losses in pool.run(train_gpt2, 2, timeout=50.0):
        torch.testing.assert_close(losses, alone, rtol=1e-4, atol=1e-4)
    assert alone[-1] < 0.8 * alone[0]
