"""The charts of a report, drawn by matplotlib as SVG and embedded in the page."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable
from typing import Any

from torchlssvm.errors import TorchLSSVMError
from torchlssvm.report.findings import Findings

BLUE, ORANGE, GREY = "#2f8fd8", "#e0701f", "#7b8794"  # legible on the light and on the dark page
PARTS_OVER_TIME = 20


def draw_charts(found: Findings) -> dict[str, str]:
    """All charts of a report, each as a data URI."""
    drawings = (draw_calibration, draw_rho, draw_accuracy, draw_leverage, draw_size)
    return {draw.__name__.removeprefix("draw_"): chart(draw, found) for draw in drawings}


def chart(draw: Callable[[Any, Findings], None], found: Findings) -> str:
    """Draw into new axes on a transparent ground."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise TorchLSSVMError("charts need the package matplotlib: pip install 'torchlssvm[report]'") from None

    colours: Any = {f"{name}.color": GREY for name in ("xtick", "ytick", "text")}
    colours |= {"axes.edgecolor": GREY, "axes.labelcolor": GREY, "grid.color": GREY, "grid.alpha": 0.3}
    with rc_context(colours | {"svg.hashsalt": "torchlssvm", "font.size": 11}):
        figure = Figure(figsize=(5.2, 3.2), layout="constrained")
        axes = figure.subplots()
        axes.grid(axis="y")
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes, found)
        out = io.BytesIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(out.getvalue()).decode('ascii')}"


def draw_calibration(axes: Any, found: Findings) -> None:
    """Accuracy against confidence, in bins."""
    confidence, accuracy, count = (t.tolist() for t in found.bins)
    most = max(count) or 1
    axes.plot([0, 1], [0, 1], "--", color=GREY, linewidth=1)
    axes.plot(confidence, accuracy, color=BLUE)
    axes.scatter(confidence, accuracy, s=[15 + 120 * c / most for c in count], color=BLUE)
    axes.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="confidence", ylabel="accuracy")


def draw_rho(axes: Any, found: Findings) -> None:
    """Draw the error for many values of rho, and mark the best value and the value in use."""
    rho = found.head["rho"]
    axes.plot(found.path.rhos.tolist(), found.path.errors.tolist(), color=BLUE)
    axes.axvline(found.path.rho, color=BLUE, linestyle="--", linewidth=1, label=f"best {found.path.rho:.3g}")
    if not math.isclose(rho, found.path.rho, rel_tol=1e-6):
        axes.axvline(rho, color=ORANGE, linestyle="--", linewidth=1, label=f"in use {rho:.3g}")
    axes.legend(frameon=False)
    axes.set(xscale="log", xlabel="rho", ylabel="error")


def over_time(found: Findings, values: Any) -> tuple[list[float], list[float]]:
    """Split the samples into consecutive parts, oldest first. Return the middle of each part and the mean of a value there."""
    n = len(found.added)
    parts = found.added.argsort(stable=True).tensor_split(min(PARTS_OVER_TIME, n))
    return [(i + 0.5) / len(parts) * n for i in range(len(parts))], [float(values[p].mean()) for p in parts]


def draw_accuracy(axes: Any, found: Findings) -> None:
    """Draw the leave-one-out accuracy in the order in which samples were added."""
    axes.plot(
        *over_time(found, (found.labels.proposed == found.labels.labels).double()), "o-", color=BLUE, markersize=4
    )
    axes.set(xlabel="samples, in the order they were added", ylabel="accuracy")


def draw_leverage(axes: Any, found: Findings) -> None:
    """Relative leverage in the order of adding."""
    at, heights = over_time(found, found.leverage)
    axes.bar(at, heights, width=0.9 * len(found.added) / len(at), color=BLUE)
    axes.axhline(1, color=GREY, linestyle="--", linewidth=1)
    axes.set(xlabel="samples, in the order they were added", ylabel="distance")


def draw_size(axes: Any, found: Findings) -> None:
    """Draw the number of samples after each event, and mark the erasures."""
    steps = [0]
    for entry in found.history:
        steps.append(steps[-1] + {"add": entry.samples, "remove": -entry.samples}.get(entry.kind, 0))
    places = [i + 1 for i, entry in enumerate(found.history) if entry.kind == "remove"]
    axes.plot(range(len(steps)), steps, color=BLUE)
    axes.plot(places, [steps[p] for p in places], "o", color=ORANGE)
    axes.set(xlabel="event", ylabel="samples", ylim=(0, None))
