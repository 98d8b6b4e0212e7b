"""Remove a sample that is only roughly known, and compare the error of the head with the noise in the sample.

    python recipes/approximate_removal.py                    # MNIST, half a minute on two cores
    python recipes/approximate_removal.py --samples 6000

This is the last experiment of Lee et al. It removes one sample from the MNIST task of ``mnist_parity.py`` (even against odd,
half of the labels wrong), with Gaussian noise of growing size on its pixels.

For many samples, the recipe prints and draws (OUT/approximate_removal.png) the error of w compared with the exact removal, the
error that ``remove_approximate`` predicted, and its bound. For comparison, it also shows the error if the sample is not
removed at all.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any

import torch
from mnist_parity import BLUE, GREEN, GREY, ORANGE, Task
from torch import Tensor

from torchlssvm import FixedPoint, LSSVMHead, RemovalError

NOISE = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)


def norm(w: Tensor) -> float:
    return float(w.norm())


def measure(task: Task, draws: int) -> list[dict[str, float]]:
    """For each noise level, the median error relative to |w| over samples and draws."""
    generator = torch.Generator().manual_seed(0)
    picks = task.wrong[:draws].tolist()
    head = LSSVMHead(task.x.shape[1], 2, rho=1.0, grid=FixedPoint(limit=8.0)).add(task.x, task.y)
    before = head.w.clone()
    exact = {}
    for i in picks:
        x, y = task.x[i : i + 1], task.y[i : i + 1]
        exact[i] = head.remove(x, y).w.clone()
        head.add(x, y)
    kept = median(norm(before - w) / norm(w) for w in exact.values())
    table = []
    for sigma in NOISE:
        found: list[list[float]] = []
        for i in picks:
            x, y = task.x[i : i + 1], task.y[i : i + 1]
            noise = sigma * torch.randn(x.shape, generator=generator)
            try:
                account = head.remove_approximate(x + noise, y)
            except RemovalError:  # without it the system would not be positive definite
                continue
            errors = norm(head.w - exact[i]), account.estimate(sigma), account.bound(float(noise.norm()))
            found.append([e / norm(exact[i]) for e in errors])
            head.add(x + noise, y)  # the same, bit for bit: the head is what it was
        row = {"noise": sigma, "refused": float(len(picks) - len(found)), "kept": kept}
        if found:
            row |= {name: median(f[k] for f in found) for k, name in enumerate(("error", "estimate", "bound"))}
            row["worst"] = max(f[0] / f[2] for f in found)
        table.append(row)
    return table


def show(task: Task, table: list[dict[str, float]]) -> None:
    print(f"{task.name}: {len(task.x)} samples; relative error of w after removing one sample with noise on its pixels")
    print("\n   noise    measured   estimated     bound    not removed at all   refused")
    for row in table:
        errors = "{error:12.1e}{estimate:12.1e}{bound:10.1e}".format(**row) if "error" in row else " " * 34
        print(f"{row['noise']:8.4f}{errors}{row['kept']:16.1e}{row['refused']:15.0f}")
    worst = max(r["worst"] for r in table if "worst" in r)
    print(
        f"\nMedians. Each error was below its bound; the closest came to {worst:.0%} of it. A removal is refused when"
    )
    print("the system would not be positive definite: the noise on pixels that are always 0 outweighs rho.")
    crossing = next((row["noise"] for row in table if row.get("error", 0.0) > row["kept"]), None)
    if crossing:
        print(f"From noise of {crossing:g} a pixel on, removing the noisy copy is worse than not removing the sample.")


def draw(table: list[dict[str, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
    table = [row for row in table if "error" in row]
    noise = [row["noise"] for row in table]
    for name, label, style in (
        ("bound", "bound", {"color": GREY, "linestyle": ":"}),
        ("error", "measured", {"color": BLUE, "marker": "o"}),
        ("estimate", "estimated", {"color": ORANGE, "linestyle": "--"}),
        ("kept", "sample not removed", {"color": GREEN}),
    ):
        axes.loglog(noise, [row[name] for row in table], label=label, **style)
    axes.set_xlabel("standard deviation of the noise in each pixel of the removed sample")
    axes.set_ylabel("relative error of w against the exact removal")
    axes.set_title("Removing one sample that is only roughly known")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    print(f"picture: {path}")


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, help="use only this many training samples")
    parser.add_argument(
        "--draws", type=int, default=20, help="number of samples to remove, one at a time (default: 20)"
    )
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="folder of the picture (default: .)")
    options = parser.parse_args(argv)
    task = Task(options.samples)
    table = measure(task, options.draws)
    show(task, table)
    picture = options.out / "approximate_removal.png"
    draw(table, picture)
    return {"table": table, "picture": picture}


if __name__ == "__main__":
    main()
