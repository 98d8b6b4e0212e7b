"""Small networks as people have them: blocks in stages, and an encoder of tokens."""

import torch
from torch import nn

GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randn(12, 3, 16, 16, generator=GENERATOR)
LABELS = torch.arange(12) % 3


class Block(nn.Module):
    """Two convolutions that share one ReLU module, and a way around them."""

    def __init__(self, width: int):
        super().__init__()
        self.conv1, self.conv2, self.relu = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1), nn.ReLU()

    def forward(self, x):
        return self.relu(self.conv2(self.relu(self.conv1(x))) + x)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3)
        self.stage1, self.stage2 = nn.Sequential(Block(6), Block(6)), nn.Sequential(Block(6))
        self.fc = nn.Linear(6, 5)

    def forward(self, x):
        return self.fc(self.stage2(self.stage1(self.stem(x))).mean((2, 3)))


class Tokens(nn.Module):
    """An encoder as transformers have them: input ids and a mask in, layers that return tuples."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense, self.act = nn.Linear(4, 4), nn.GELU()

        def forward(self, h):
            return (h + self.act(self.dense(h)),)

    def __init__(self):
        super().__init__()
        self.embed, self.layer = nn.Embedding(10, 4), nn.ModuleList([self.Layer(), self.Layer()])

    def forward(self, input_ids, attention_mask=None):
        h = self.embed(input_ids)
        for layer in self.layer:
            (h,) = layer(h)
        return h


def network() -> nn.Module:
    torch.manual_seed(1)
    return Network()
