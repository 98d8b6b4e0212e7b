"""``torchlssvm demo``: learn, find wrong labels, correct them, erase a user, verify. Each step is one exact call.

The data ships with scikit-learn: 1,797 digits of 8x8 pixels. A fixed random ReLU layer stands for a frozen network; its
weights are multiples of 1/8 and the pixels of 1/16, so the features are the same numbers on every machine.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from torchlssvm import FixedPoint, LSSVMHead, TorchLSSVMError, __version__

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

T = TypeVar("T")

CLASSES, FEATURES, TRAIN, USERS = 10, 512, 1297, 40
NOISE = 0.2  # the fraction of training labels that is made wrong
USER = 17  # the one who asks for erasure
BATCH = 97  # of the head that verifies; the first one learns in one batch
WIDTH, PICTURE = 100, "torchlssvm_demo.png"
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#595959"  # Okabe and Ito: told apart by colour-blind readers


# -- the data ----------------------------------------------------------------------------------------------------------


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
    digits = needs("sklearn.datasets", "scikit-learn").load_digits()
    images, y = torch.as_tensor(digits.images / 16, dtype=torch.float32), torch.as_tensor(digits.target).long()
    weight = torch.randint(-8, 9, (64, FEATURES), generator=random) / 8
    bias = torch.randint(-8, 9, (FEATURES,), generator=random) / 8
    x = torch.relu(images.flatten(1) @ weight + bias)  # exact in float32, in whatever order it is summed

    order = torch.randperm(len(y), generator=random)
    train, test = order[:TRAIN], order[TRAIN:]
    truth, given = y[train], y[train].clone()
    bad = torch.randperm(TRAIN, generator=random)[: round(NOISE * TRAIN)]
    given[bad] = (truth[bad] + torch.randint(1, CLASSES, (len(bad),), generator=random)) % CLASSES
    users = torch.randperm(TRAIN, generator=random) % USERS
    return Task(images[train], x[train], truth, given, users, x[test], y[test], seed)


def needs(module: str, package: str) -> Any:
    """Import what an extra installs, or say which one."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise TorchLSSVMError(f"the demo needs {package}: pip install 'torchlssvm[sklearn,plot]'") from None


# -- the story ---------------------------------------------------------------------------------------------------------


def new_head() -> LSSVMHead:
    """An empty head. The grid is fixed beforehand, so that no sample, erased or not, has a say in it."""
    return LSSVMHead(FEATURES, CLASSES, grid=FixedPoint(limit=64.0))


def leave_one_out(head: LSSVMHead, x: Tensor, y: Tensor) -> Tensor:
    """Scores of each sample by the head that never saw that sample, without retraining.

        e_i = (y_i - f(x_i)) / (1 - h_i),    h_i = 1/n + (x_i - mu)^T A_c^-1 (x_i - mu),    A_c^-1 = P / rho

    is the error of the head without sample i at x_i, so y_i - e_i is its score. x: (n, J), y: (n,): all samples held by
    a head with a free intercept and a grid. Returns (n, K).
    """
    assert head.grid is not None
    x = head.grid.snap(x)
    target = 2.0 * torch.nn.functional.one_hot(y, head.num_classes).to(x.dtype) - 1.0
    centred = x - x.mean(0)
    h = 1 / len(x) + ((centred @ head.P) * centred).sum(1) / head.rho
    scores: Tensor = head(x)
    return target - (target - scores) / (1 - h)[:, None]


def margins(scores: Tensor, y: Tensor) -> Tensor:
    """The score of the given label minus the best other score. scores: (n, K), y: (n,); returns (n,)."""
    own = scores.gather(1, y[:, None])
    return (own - scores.scatter(1, y[:, None], -torch.inf).amax(1, keepdim=True))[:, 0]


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """What a call returns, and its milliseconds."""
    start = time.perf_counter()
    out = call()
    return out, 1e3 * (time.perf_counter() - start)


@dataclass(frozen=True)
class Step:
    """A row of the table."""

    name: str
    what: str
    samples: int
    accuracy: float | None
    milliseconds: float
    check: str
    passed: bool


class Story:
    """The five steps in their order, with everything they found out. Times include bringing the weights up to date."""

    def __init__(self, task: Task):
        self.task = task
        self.head = new_head()
        self.labels = task.given.clone()  # what the head holds now
        self.steps: list[Step] = []
        self.clean = self.accuracy(new_head().add(task.x, task.truth))
        for step in (self.learn, self.find, self.correct, self.erase, self.verify):
            step()

    def accuracy(self, head: LSSVMHead) -> float:
        """On the test set."""
        return float((head.predict(self.task.test_x) == self.task.test_y).double().mean())

    def __getitem__(self, name: str) -> Step:
        return next(step for step in self.steps if step.name == name)

    @property
    def passed(self) -> bool:
        """Whether every check holds."""
        return all(step.passed for step in self.steps)

    def learn(self) -> None:
        """One pass over samples with wrong labels."""
        x, y = self.task.x, self.task.given
        _, ms = timed(lambda: self.head.add(x, y).weight)
        check, passed = "every sample counted once", torch.equal(self.head.counts, y.bincount(minlength=CLASSES))
        what = f"add once, {NOISE:.0%} of labels wrong"
        self.steps.append(Step("learn", what, len(x), self.accuracy(self.head), ms, check, passed))

    def find(self) -> None:
        """Rank all samples by their leave-one-out margin and suspect the lowest."""
        x, given, truth = self.task.x, self.task.given, self.task.truth
        scores, ms = timed(lambda: leave_one_out(self.head, x, given))
        self.proposed = scores.argmax(1)
        self.suspicious = margins(scores, given).argsort(stable=True)[: round(NOISE * len(x))]
        self.right = given[self.suspicious] != truth[self.suspicious]
        self.precision, self.chance = float(self.right.double().mean()), float((given != truth).double().mean())
        what, passed = "lowest leave-one-out margins", self.precision > 2 * self.chance
        check = f"{self.precision:.0%} wrong (chance {self.chance:.0%})"
        self.steps.append(Step("find", what, len(self.right), None, ms, check, passed))

    def correct(self) -> None:
        """Relabel the suspicious samples that are really wrong, as a person who checks the list would."""
        wrong = self.suspicious[self.right]
        x, old, new = self.task.x[wrong], self.labels[wrong], self.task.truth[wrong]
        _, ms = timed(lambda: self.head.relabel(x, old, new).weight)
        self.labels[wrong] = new
        accuracy, before = self.accuracy(self.head), self["learn"].accuracy or 0.0
        what, check = "relabel those really wrong", f"not lower (clean {self.clean:.1%})"
        self.steps.append(Step("correct", what, len(wrong), accuracy, ms, check, accuracy >= before))

    def erase(self) -> None:
        """Remove one user's samples; no other sample is looked at."""
        gone = self.task.users == USER
        x, y = self.task.x[gone], self.labels[gone]
        self.digest_before = self.head.digest()
        _, ms = timed(lambda: self.head.remove(x, y).weight)
        self.digest_after = self.head.digest()
        accuracy, passed = self.accuracy(self.head), self.digest_after != self.digest_before
        self.steps.append(Step("erase", f"remove user {USER}", len(x), accuracy, ms, "digest changed", passed))

    def verify(self) -> None:
        """Compare with a head that never saw the user: the others' samples in another order and in other batches."""
        kept = torch.nonzero(self.task.users != USER)[:, 0]
        order = kept[torch.randperm(len(kept), generator=torch.Generator().manual_seed(self.task.seed))]

        def relearn() -> LSSVMHead:
            head = new_head()
            for batch in order.split(BATCH):
                head.add(self.task.x[batch], self.labels[batch])
            return head.refresh()

        other, ms = timed(relearn)
        self.head.refresh()
        self.digest_never_saw = other.digest()
        self.digests_equal = self.digest_never_saw == self.digest_after
        pairs = (self.head.weight, other.weight), (self.head.bias, other.bias)
        self.bit_identical = all(torch.equal(mine, theirs) for mine, theirs in pairs)
        passed = self.digests_equal and self.bit_identical
        what, check = f"head that never saw user {USER}", "digest, w bit-identical"
        self.steps.append(Step("verify", what, len(kept), self.accuracy(other), ms, check, passed))


# -- what it prints ----------------------------------------------------------------------------------------------------


def line(step: str, what: str, samples: str, accuracy: str, milliseconds: str, check: str) -> str:
    """A line of the table."""
    return f"{step:<10}{what:<30}{samples:>8}{accuracy:>9}{milliseconds:>8}  {check}"


def table(story: Story, picture: Path) -> str:
    """The steps as text, at most 100 columns wide (but for a long path)."""
    n, m = len(story.task.x), len(story.task.test_x)
    lines = [
        f"torchlssvm {__version__} demo, seed {story.task.seed}: scikit-learn's digits, {n} to learn, {m} to test.",
        f"A fixed random ReLU layer stands for a frozen network: {FEATURES} features.",
        "",
        line("step", "what", "samples", "test acc", "ms", "check"),
        "-" * WIDTH,
    ]
    for i, step in enumerate(story.steps, 1):
        accuracy = "" if step.accuracy is None else f"{step.accuracy:.1%}"
        check = step.check if step.passed else f"FAILED: {step.check}"
        lines.append(
            line(f"{i} {step.name}", step.what, str(step.samples), accuracy, f"{step.milliseconds:.1f}", check)
        )
    lines += [
        "-" * WIDTH,
        f"picture: {picture}",
        f"digest after erasing user {USER}, and of the head that never saw that user (first 16 of 64 digits):",
        f"{story.digest_after[:16]}  {story.digest_never_saw[:16]}  equal: {story.digests_equal}",
    ]
    return "\n".join(lines)


def summary(story: Story, picture: Path) -> dict[str, Any]:
    """The same, for ``--json``."""
    return {
        "version": __version__,
        "seed": story.task.seed,
        "test_samples": len(story.task.test_x),
        "features": FEATURES,
        "user": USER,
        "samples": {step.name: step.samples for step in story.steps},
        "milliseconds": {step.name: round(step.milliseconds, 3) for step in story.steps},
        "accuracy": {
            "noisy": story["learn"].accuracy,
            "corrected": story["correct"].accuracy,
            "erased": story["erase"].accuracy,
            "clean": story.clean,
        },
        "precision": story.precision,
        "chance": story.chance,
        "digest_before": story.digest_before,
        "digest_after": story.digest_after,
        "digest_never_saw": story.digest_never_saw,
        "digests_equal": story.digests_equal,
        "bit_identical": story.bit_identical,
        "checks": {step.name: step.passed for step in story.steps},
        "passed": story.passed,
        "picture": str(picture),
    }


def run(out: Path, seed: int, as_json: bool) -> int:
    """Tell the story, write the picture and print; 0 if every check holds, else 1."""
    needs("matplotlib", "matplotlib")  # before any work
    out.mkdir(parents=True, exist_ok=True)
    story, path = Story(load(seed)), out / PICTURE
    draw(story, path)
    print(json.dumps(summary(story, path), indent=2) if as_json else table(story, path))
    return 0 if story.passed else 1


# -- the picture -------------------------------------------------------------------------------------------------------


def draw(story: Story, path: Path) -> None:
    """Accuracy through the steps on the left, suspicious digits on the right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.6), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(1, 1.4))[0]
    draw_accuracy(left, story)
    draw_digits(right, story)
    figure.savefig(path)


def draw_accuracy(figure: SubFigure, story: Story) -> None:
    """Test accuracy after each step, and with clean labels from the start."""
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
    captions = (f"learn\n({NOISE:.0%} wrong labels)", "correct\n(labels found)", f"erase\n(user {USER})")
    times = [f"{caption}\n{story[name].milliseconds:.1f} ms" for caption, name in zip(captions, names, strict=True)]
    axes.set_xticks(range(3), times, fontsize=10)
    axes.set(xlim=(-0.4, 2.5), ylim=(low - 0.25 * span, low + 1.2 * span), ylabel="test accuracy (%)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.text(0.03, 0.93, "Each step is one exact call", fontsize=13, weight="bold")


def draw_digits(figure: SubFigure, story: Story, columns: int = 8) -> None:
    """Three rows of suspicious digits: the top, the middle and the end of the list."""
    size = len(story.suspicious)
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
    """One suspicious digit with its given and proposed label, and whether the suspicion was right."""
    i, right = int(story.suspicious[rank]), bool(story.right[rank])
    colour, mark = (BLUE, "✓") if right else (ORANGE, "✗")
    axes.imshow(story.task.images[i].numpy(), cmap="gray_r", vmin=0, vmax=1)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(color=colour, linewidth=2, linestyle="-" if right else (0, (2, 1.5)))
    given, proposed = int(story.task.given[i]), int(story.proposed[i])
    axes.set_title(f"{given} → {proposed} {mark}", fontsize=11, color=colour, weight="bold", pad=4)
