"""Feature maps of a frozen network: several of its layers, fixed views of a sample, random lifts.

``attach(RandomReLU(784, 2000), num_classes=10, in_features=2000)`` is a classifier that learns and unlearns exactly.
"""

from torchlssvm.features.layer_taps import LayerTaps
from torchlssvm.features.nystroem import Nystroem
from torchlssvm.features.random import RandomFourier, RandomReLU
from torchlssvm.features.views import Views

__all__ = ["LayerTaps", "Nystroem", "RandomFourier", "RandomReLU", "Views"]
