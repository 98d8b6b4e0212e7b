"""Draw Figures 3, 4 and 5 of Cauwenberghs and Poggio's incremental SVM with their settings, and two more.

    python recipes/svm_trajectory.py                # writes svm_trajectory.png, a few seconds; needs matplotlib
    python recipes/svm_trajectory.py --no-picture   # only the numbers

The data are 100 non-separable points in two dimensions, with C = 10 and a Gaussian kernel with sigma = 1. The recipe draws:

- the coefficients while the points are learned one by one (Figure 3),
- g_c against alpha_c while one sample is unlearned (Figure 4) and for every support vector (Figure 5), with the straight line
  that linear response extends from the first segment,
- the decision boundary with the three sets,
- the coefficients along the regularization path.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
from torch import Tensor

from torchlssvm import IncrementalSVM
from torchlssvm.kernels import RBF

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#595959"


def points(n: int = 100, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Two overlapping bent clouds in the plane."""
    generator = torch.Generator().manual_seed(seed)
    angle = torch.rand(n, generator=generator, dtype=torch.float64) * torch.pi
    y = torch.arange(n) % 2
    arc = torch.stack([angle.cos() * 2, angle.sin() * 2 - 0.6], 1)
    x = torch.where(y[:, None] == 1, arc, torch.stack([1.8 - arc[:, 0], -arc[:, 1] + 0.4], 1))
    return x + 0.55 * torch.randn(n, 2, generator=generator, dtype=torch.float64), y


def learn(x: Tensor, y: Tensor) -> tuple[IncrementalSVM, Tensor]:
    """Learn one sample after another, and return alpha (T, n) after each event."""
    svm = IncrementalSVM(RBF(sigma=1.0), C=10.0, record=True)
    for i in range(len(x)):
        svm.add(x[i : i + 1], y[i : i + 1])
    alpha = torch.zeros(len(svm.trajectory), len(x), dtype=torch.float64)
    for t, step in enumerate(svm.trajectory):
        alpha[t, step.ids] = step.alpha
    return svm, alpha


def unlearn(svm: IncrementalSVM, x: Tensor, y: Tensor, c: int) -> tuple[Tensor, Tensor]:
    """alpha_c and g_c after each event while sample c is removed."""
    rest = copy.deepcopy(svm)
    rest.trajectory = []
    rest.remove([c])
    sign = 2.0 * y.double() - 1
    row = (svm.kernel(x[c : c + 1], x)[0]) * sign * sign[c]  # Q_c:
    alpha, g = [float(svm.alpha[c])], [float(svm.g[c])]
    for step in rest.trajectory:
        alpha.append(float(step.alpha[c]))
        g.append(float(row @ step.alpha + sign[c] * step.b) - 1)
    return torch.tensor(alpha, dtype=torch.float64), torch.tensor(g, dtype=torch.float64)


def draw(
    path: Path, svm: IncrementalSVM, x: Tensor, y: Tensor, alpha: Tensor, paths: dict[int, tuple[Tensor, Tensor]]
) -> None:
    """The five pictures in one."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(16, 9))
    colours = [ORANGE if label else BLUE for label in y.tolist()]

    axis = axes[0, 0]
    axis.scatter(x[:, 0], x[:, 1], c=torch.arange(len(x)), cmap="viridis", s=30)
    axis.set(title="Figure 3, left: the points in their order", xlabel="$x_1$", ylabel="$x_2$")

    axis = axes[0, 1]
    for i, colour in enumerate(colours):
        axis.plot(alpha[:, i], color=colour, lw=0.8, alpha=0.7)
    axis.set(title="Figure 3: coefficients during training", xlabel="event", ylabel=r"$\alpha_i$")

    axis = axes[0, 2]
    c = max(paths, key=lambda i: len(paths[i][0]))
    axis.plot(*paths[c], "o-", color=BLUE, ms=4, label="exact")
    linear = svm.leave_one_out("linear").margin
    axis.plot([paths[c][0][0], 0], [paths[c][1][0], linear[svm.ids == c][0]], "--", color=GREY, label="linear response")
    axis.axhline(-1, color=ORANGE, lw=1)
    axis.set(title=f"Figure 4: sample {c} is unlearned", xlabel=r"$\alpha_c$", ylabel="$g_c$")
    axis.legend()

    axis = axes[1, 0]
    for a, g in paths.values():
        axis.plot(a, g, color=ORANGE if float(g[-1]) < -1 else BLUE, lw=0.9, alpha=0.8)
    axis.axhline(-1, color=GREY, lw=1)
    axis.set(title="Figure 5: leave-one-out margins (errors below the line)", xlabel=r"$\alpha_c$", ylabel="$g_c$")

    axis = axes[1, 1]
    low, high = x.min(0).values - 0.5, x.max(0).values + 0.5
    grid = [torch.linspace(float(low[k]), float(high[k]), 150, dtype=torch.float64) for k in (0, 1)]
    mesh = torch.cartesian_prod(grid[0], grid[1])
    f = svm.decision(mesh).reshape(150, 150).T
    axis.contourf(*grid, f, levels=[-99, 0, 99], colors=[BLUE, ORANGE], alpha=0.12)
    axis.contour(*grid, f, levels=[-1, 0, 1], colors=GREY, linestyles=["--", "-", "--"], linewidths=1)
    for name, marker, size in (("margin", "o", 46), ("error", "X", 42), ("reserve", ".", 26)):
        ids = svm.partition()[name]
        axis.scatter(
            x[ids, 0],
            x[ids, 1],
            marker=marker,
            s=size,
            c=[colours[i] for i in ids.tolist()],
            label=f"{name} ({len(ids)})",
        )
    axis.set(title="The three sets", xlabel="$x_1$", ylabel="$x_2$")
    axis.legend()

    axis = axes[1, 2]
    other = IncrementalSVM(RBF(sigma=1.0), C=0.05).fit(x, y)
    way = other.regularization_path(10.0)
    for i, colour in enumerate(colours):
        axis.plot(way.C, way.alpha[:, i], color=colour, lw=0.8, alpha=0.7)
    axis.set(title=f"Regularization path, {len(way.C)} breakpoints", xlabel="C", ylabel=r"$\alpha_i$", xscale="log")

    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="folder of the picture (default: .)")
    parser.add_argument("--no-picture", action="store_true")
    options = parser.parse_args()
    x, y = points()
    svm, alpha = learn(x, y)
    support = svm.ids[svm.alpha > 0].tolist()
    print(f"{len(svm.trajectory)} events; margin {len(svm.margin)}, error {len(svm.error)}, reserve {len(svm.reserve)}")
    print(f"largest violation of the Kuhn-Tucker conditions: {svm.kkt_violation():.1e}")
    exact, linear = svm.leave_one_out(), svm.leave_one_out("linear")
    print(f"leave-one-out error: {exact.rate:.2f} exact, {linear.rate:.2f} by linear response")
    paths = {c: unlearn(svm, x, y, c) for c in support}
    worst = max(abs(float(paths[c][1][-1]) - float(exact.margin[svm.ids == c])) for c in support)
    print(f"paths drawn end where leave_one_out says, to {worst:.0e}")
    if not options.no_picture:
        options.out.mkdir(parents=True, exist_ok=True)
        picture = options.out / "svm_trajectory.png"
        draw(picture, svm, x, y, alpha, paths)
        print(f"written: {picture}")


if __name__ == "__main__":
    main()
