"""Output of the demo, as text and as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchlssvm import __version__
from torchlssvm.demo.data import ERASED_USER, RELU_FEATURES
from torchlssvm.demo.story import Story

TABLE_COLUMNS = 100
"""Characters of a line: a terminal of usual width shows it whole."""


def line(step: str, what: str, samples: str, accuracy: str, milliseconds: str, check: str) -> str:
    """Format a line of the table."""
    return f"{step:<10}{what:<30}{samples:>8}{accuracy:>9}{milliseconds:>8}  {check}"


def table(story: Story, picture: Path) -> str:
    """Format the steps as text, at most 100 columns wide (but for a long path)."""
    n, m = len(story.task.x), len(story.task.test_x)
    lines = [
        f"torchlssvm {__version__} demo, seed {story.task.seed}: scikit-learn's digits, {n} to learn, {m} to test.",
        f"A fixed random ReLU layer stands for a frozen network: {RELU_FEATURES} features.",
        "",
        line("step", "what", "samples", "test acc", "ms", "check"),
        "-" * TABLE_COLUMNS,
    ]
    for i, step in enumerate(story.steps, 1):
        accuracy = "" if step.accuracy is None else f"{step.accuracy:.1%}"
        check = step.check if step.passed else f"FAILED: {step.check}"
        lines.append(
            line(f"{i} {step.name}", step.what, str(step.samples), accuracy, f"{step.milliseconds:.1f}", check)
        )
    lines += [
        "-" * TABLE_COLUMNS,
        f"picture: {picture}",
        f"certificate of the erasure: {story.certificate_text}",
        f"digest after erasing user {ERASED_USER}, and of the head that never saw that user (first 16 of 64 digits):",
        f"{story.digest_after[:16]}  {story.digest_never_saw[:16]}  equal: {story.digests_equal}",
    ]
    return "\n".join(lines)


def summary(story: Story, picture: Path) -> dict[str, Any]:
    """Return the same figures for ``--json``."""
    return {
        "version": __version__,
        "seed": story.task.seed,
        "test_samples": len(story.task.test_x),
        "features": RELU_FEATURES,
        "user": ERASED_USER,
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
        "signed": story.signed,
        "compacted": story.certificate.compacted,
        "erased": story.certificate.erased,
        "traces": story.traces,
        "verification": story.verification,
        "checks": {step.name: step.passed for step in story.steps},
        "passed": story.passed,
        "picture": str(picture),
    }
