"""A small CNN on handwritten digits, in one process. examples/digits_ddp.py is the same on several ranks."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils import data

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(digits.target)
train_set = data.TensorDataset(images[:1500], labels[:1500])

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 4 * 4, 10)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = data.DataLoader(train_set, batch_size=32, shuffle=True)

for _ in range(6):
    for batch, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch), targets)
        loss.backward()
        optimizer.step()

with torch.no_grad():
    accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
print(f"accuracy {accuracy:.3f}")
