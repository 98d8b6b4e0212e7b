"""The recipe with the figures of the incremental SVM: its numbers hold, and the picture is drawn."""

import pytest
import torch

from tests.svm.truth import exact, rbf


def test_trajectories(load_recipe, tmp_path):
    recipe = load_recipe("svm_trajectory")
    x, y = recipe.points(40)
    svm, alpha = recipe.learn(x, y)
    truth, _ = exact(rbf(x.numpy(), x.numpy(), 0.5), 2.0 * y.numpy() - 1, torch.full((40,), 10.0).double().numpy())
    assert float((svm.alpha - torch.from_numpy(truth)).abs().max()) < 1e-6  # figure 3 ends at the solution
    assert float((alpha[-1] - svm.alpha).abs().max()) < 1e-6
    assert svm.kkt_violation() < 1e-10
    margins = svm.leave_one_out().margin
    paths = {c: recipe.unlearn(svm, x, y, c) for c in svm.ids[svm.alpha > 0].tolist()}
    for c, (a, g) in paths.items():  # figures 4 and 5: alpha_c falls to 0, g_c falls with it, in segments
        assert float(a[-1]) == pytest.approx(0.0, abs=1e-6)
        assert bool((a.diff() <= 1e-6).all())
        assert bool((g.diff() <= 1e-5).all())
        assert float(g[-1]) == pytest.approx(float(margins[c]), abs=1e-5)
    pytest.importorskip("matplotlib")
    recipe.draw(tmp_path / "figure.png", svm, x, y, alpha, paths)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
