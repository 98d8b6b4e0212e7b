"""Feature maps: a kernel machine's reach with a linear head's cost, for very many samples.

``attach(RandomReLU(784, 2000), num_classes=10, in_features=2000)`` is a classifier that learns and unlearns exactly.
"""

from torchlssvm.features.layer_taps import LayerTaps
from torchlssvm.features.nystroem import Nystroem
from torchlssvm.features.random import RandomFourier, RandomReLU

__all__ = ["LayerTaps", "Nystroem", "RandomFourier", "RandomReLU"]
