"""The data: scikit-learn's digits with wrong labels and owners.

A fixed random ReLU layer stands for a frozen network; its weights are multiples of 1/8 and the pixels of 1/16, so the
features are the same numbers on every machine.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchlssvm import TorchLSSVMError

DIGIT_CLASSES, RELU_FEATURES, TRAINING_SAMPLES, USER_COUNT = 10, 512, 1297, 40
WRONG_SHARE = 0.2  # the fraction of training labels that is made wrong
ERASED_USER = 17  # the one who asks for erasure


@dataclass(frozen=True)
class Task:
    """Training samples with wrong labels and owners, and a test set."""

    images: Tensor  # (n, 8, 8)
    x: Tensor  # (n, J)
    truth: Tensor  # (n,)
    given: Tensor  # (n,)
    users: Tensor  # (n,)
    test_x: Tensor  # (m, J)
    test_y: Tensor  # (m,)
    seed: int


def load(seed: int) -> Task:
    """Split the digits, lift them to J features, make labels wrong and give every training sample an owner."""
    random = torch.Generator().manual_seed(seed)
    digits = import_extra("sklearn.datasets", "scikit-learn").load_digits()
    images, y = torch.as_tensor(digits.images / 16, dtype=torch.float32), torch.as_tensor(digits.target).long()
    weight = torch.randint(-8, 9, (64, RELU_FEATURES), generator=random) / 8
    bias = torch.randint(-8, 9, (RELU_FEATURES,), generator=random) / 8
    x = torch.relu(images.flatten(1) @ weight + bias)  # exact in float32, in whatever order it is summed

    order = torch.randperm(len(y), generator=random)
    train, test = order[:TRAINING_SAMPLES], order[TRAINING_SAMPLES:]
    truth, given = y[train], y[train].clone()
    bad = torch.randperm(TRAINING_SAMPLES, generator=random)[: round(WRONG_SHARE * TRAINING_SAMPLES)]
    given[bad] = (truth[bad] + torch.randint(1, DIGIT_CLASSES, (len(bad),), generator=random)) % DIGIT_CLASSES
    users = torch.randperm(TRAINING_SAMPLES, generator=random) % USER_COUNT
    return Task(images[train], x[train], truth, given, users, x[test], y[test], seed)


def import_extra(module: str, package: str) -> Any:
    """Import a module of an extra; the error names the extra to install."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise TorchLSSVMError(f"the demo needs {package}: pip install 'torchlssvm[sklearn,plot]'") from None
