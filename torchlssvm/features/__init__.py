"""Feature maps: several layers of a frozen network, fixed views of a sample, and random lifts.

For example, ``attach(RandomReLU(784, 2000), num_classes=10, in_features=2000)`` returns a classifier of 784 inputs that learns
and unlearns exactly.
"""

from torchlssvm.features.layer_taps import LayerTaps
from torchlssvm.features.nystroem import Nystroem
from torchlssvm.features.random import RandomFourier, RandomReLU
from torchlssvm.features.views import Views

__all__ = ["LayerTaps", "Nystroem", "RandomFourier", "RandomReLU", "Views"]
