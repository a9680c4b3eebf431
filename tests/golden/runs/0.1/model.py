"""A small regression model and its data, as a user of version 0.1 wrote them."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.1), nn.Linear(width, 2))

    def forward(self, inputs):
        return self.layers(inputs)


def loaders(rows: int = 20):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(rows, 4, generator=generator)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    return DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=4)
