"""The picture: accuracy through the steps on the left, suspicious digits on the right."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlssvm.demo import ERASED_USER, WRONG_SHARE, Story

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#595959"  # Okabe and Ito: told apart by colour-blind readers


def draw(story: Story, path: Path) -> None:
    """Draw accuracy through the steps on the left, suspicious digits on the right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.6), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(1, 1.4))[0]
    draw_accuracy(left, story)
    draw_digits(right, story)
    figure.savefig(path)


def draw_accuracy(figure: SubFigure, story: Story) -> None:
    """Draw the test accuracy after each step, and with clean labels from the start."""
    axes: Axes = figure.subplots()
    figure.subplots_adjust(left=0.13, right=0.96, top=0.85, bottom=0.2)
    names = ("learn", "correct", "erase")
    values = [100 * (story[name].accuracy or 0.0) for name in names]
    clean = 100 * story.clean
    low, span = min(*values, clean), max(1.0, max(*values, clean) - min(*values, clean))
    axes.axhline(clean, color=GREY, linestyle=(0, (5, 3)), linewidth=1.2, zorder=1)
    axes.text(-0.35, clean + 0.04 * span, f"all labels clean: {clean:.1f}%", color=GREY, fontsize=10, va="bottom")
    axes.plot(range(3), values, color=BLUE, linewidth=2, marker="o", markersize=9, zorder=2)
    for i, value in enumerate(values):
        axes.annotate(f"{value:.1f}%", (i, value), (9, -17), textcoords="offset points", color=BLUE, weight="bold")
    captions = (f"learn\n({WRONG_SHARE:.0%} wrong labels)", "correct\n(labels found)", f"erase\n(user {ERASED_USER})")
    times = [f"{caption}\n{story[name].milliseconds:.1f} ms" for caption, name in zip(captions, names, strict=True)]
    axes.set_xticks(range(3), times, fontsize=10)
    axes.set(xlim=(-0.4, 2.5), ylim=(low - 0.25 * span, low + 1.2 * span), ylabel="test accuracy (%)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.text(0.03, 0.93, "Each step is one exact, durable call", fontsize=13, weight="bold")


def draw_digits(figure: SubFigure, story: Story) -> None:
    """Draw three rows of suspicious digits: the top, the middle and the end of the list."""
    size, columns = len(story.suspicious), 8
    starts = (0, (size - columns) // 2, size - columns)
    grid: Any = figure.subplots(3, columns)
    figure.subplots_adjust(left=0.115, right=0.985, top=0.85, bottom=0.09, wspace=0.14, hspace=0.45)
    for row, start in zip(grid, starts, strict=True):
        for axes, rank in zip(row, range(start, start + columns), strict=True):
            draw_digit(axes, story, rank)
        ranks = f"rank\n{start + 1}–{start + columns}"
        row[0].set_ylabel(ranks, rotation=0, ha="right", va="center", fontsize=10, color=GREY, labelpad=6)
    title = f"The {size} lowest leave-one-out margins: {story.precision:.0%} are wrong labels"
    figure.text(0.03, 0.93, title, fontsize=13, weight="bold")
    figure.text(0.03, 0.025, "given label → proposed label", fontsize=10, color=GREY)
    figure.text(0.44, 0.025, "✓ the label was wrong", fontsize=10, color=BLUE, weight="bold")
    figure.text(0.73, 0.025, "✗ the label was right", fontsize=10, color=ORANGE, weight="bold")


def draw_digit(axes: Axes, story: Story, rank: int) -> None:
    """Draw one suspicious digit with its given and proposed label, and whether the suspicion was right."""
    i, right = int(story.suspicious[rank]), bool(story.right[rank])
    colour, mark = (BLUE, "✓") if right else (ORANGE, "✗")
    axes.imshow(story.task.images[i].numpy(), cmap="gray_r", vmin=0, vmax=1)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(color=colour, linewidth=2, linestyle="-" if right else (0, (2, 1.5)))
    given, proposed = int(story.task.given[i]), int(story.proposed[i])
    axes.set_title(f"{given} → {proposed} {mark}", fontsize=11, color=colour, weight="bold", pad=4)
