"""The recipe of feature maps makes its columns from cached layers: they are those of LayerTaps, but for float16 in the cache."""

import torch

from recipes import feature_maps
from tests.support.networks import IMAGES, network
from torchlssvm.features import LayerTaps, Views


def test_columns_are_those_of_layer_taps(tmp_path):
    def make():
        views = [[IMAGES], [IMAGES.flip(-1)]]
        return feature_maps.raw_taps(network(), "all"), views, 8, torch.arange(12)

    for _ in range(2):  # made, then read
        made = feature_maps.pooled("small", tmp_path, make)
    for pool, most in ((("mean",), None), (("mean", "std"), 24)):
        truth = Views(LayerTaps(network(), "all", pool, max_features=most), ["flip"])(IMAGES)
        torch.testing.assert_close(made.columns(bool, pool, most, views=2).double(), truth, rtol=0.01, atol=0.01)
    assert (made.n, made.y.tolist()) == (8, list(range(12)))
