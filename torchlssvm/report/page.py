"""The HTML page of a report: one file that needs no other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from torchlssvm.report.charts import draw_charts
from torchlssvm.report.findings import Findings
from torchlssvm.report.pictures import Source
from torchlssvm.report.rendering import render
from torchlssvm.wording import counted

SELECTION_WORDS = {"gcv": "generalized cross-validation", "kfold": "cross-validation in five folds"}
MULTICLASS_WORDS = {"ovr": "one against the rest", "ovo": "one against one"}

SHOWN_EVENTS = 25
"""Events listed, the last ones; the chart shows all."""


def page(found: Findings, pictures: Source, names: Sequence[str], title: str, time: str, count: int) -> str:
    """Write the whole page. names: of the classes; count: samples shown in each list."""
    weight = found.head["class_weight"]
    form = f"{found.head['intercept']} intercept, {MULTICLASS_WORDS[found.head['multiclass']]}"
    return render(
        "report.html.j2",
        found=found,
        stats=found.stats,
        title=title,
        time=time,
        form=form + (f", {weight} weights" if isinstance(weight, str) else ""),
        shown=SHOWN_EVENTS,
        removals=[e for e in found.history if e.kind == "remove"],
        owner={event: r.id for r in found.requests for event in r.events},
        erasure_tiles=erasure_tiles(found),
        classifier_tiles=classifier_tiles(found),
        selection=SELECTION_WORDS[found.path.method],
        charts=draw_charts(found),
        classes=class_rows(found, names),
        suspicious=[suspicious_card(found, pictures, names, i) for i in found.labels.suspects[:count].tolist()],
        harmful=harmful_cards(found, pictures, names, count),
    )


def percent(value: float, digits: int = 1) -> str:
    """Format a share as a percentage."""
    return "–" if math.isnan(value) else f"{100 * value:.{digits}f}%"


def signed(value: float, form: str) -> str:
    """Format a number with a real minus sign."""
    return f"{value:{form}}".replace("-", "\N{MINUS SIGN}")


def erasure_tiles(found: Findings) -> list[tuple[str, str]]:
    """The main figures for those who answer requests, each with its meaning."""
    removals = [e for e in found.history if e.kind == "remove"]
    opened = [r for r in found.requests if r.open]
    return [
        (f"{len(opened):,}", f"open requests, {sum(r.overdue for r in opened):,} of them overdue"),
        (f"{sum(e.samples for e in removals):,}", f"samples erased, in {counted(len(removals), 'erasure')}"),
        (f"{len(found.waiting):,}", f"open task{'' if len(found.waiting) == 1 else 's'}, listed below"),
    ]


def classifier_tiles(found: Findings) -> list[tuple[str, str]]:
    """The main figures of the classifier, each with its meaning."""
    dof = ""
    if found.path.dof is not None:
        nearest = (found.path.rhos.log() - math.log(found.head["rho"])).abs().argmin()
        dof = f", {float(found.path.dof[nearest]):.4g} degrees of freedom"
    return [
        (percent(found.accuracy), "accuracy, each sample scored by a model trained without it"),
        (f"{found.ece[1]:.3f}", f"calibration error of its probabilities ({found.ece[0]:.3f} uncalibrated)"),
        (f"{len(found.labels.suspects):,}", "samples whose label a model trained without them would change"),
        (f"{found.head['rho']:.4g}", f"rho{dof}"),
        (f"{len(found.history):,}", "events"),
        (f"{found.drift:.0e}" if found.drift else "0", "drift of the weights from their statistics"),
    ]


def class_rows(found: Findings, names: Sequence[str]) -> list[list[str]]:
    """For each class its name, samples, accuracy, mean margin, and the class it is most often taken for."""
    y, proposed, K = found.labels.labels, found.labels.proposed, len(names)
    confusion = torch.zeros(K, K, dtype=torch.int64)
    confusion.index_put_((y, proposed), torch.ones_like(y), accumulate=True)
    rows = []
    for k in range(K):
        total = int(confusion[k].sum())
        wrong = confusion[k].clone()
        wrong[k] = 0
        most = int(wrong.argmax())
        usual = f"{names[most]} ({int(wrong[most])})" if int(wrong[most]) else ""
        share = percent(int(confusion[k, k]) / total) if total else "–"
        margin = signed(float(found.labels.margins[y == k].mean()), ".2f") if total else "–"
        rows.append([names[k], f"{total:,}", share, margin, usual])
    return rows


def card(found: Findings, pictures: Source, names: Sequence[str], i: int, note: str) -> dict[str, Any]:
    """One sample with its picture."""
    sample, label = (found.labels.ids or ())[i], names[int(found.labels.labels[i])]
    shown = {"id": sample, "subject": found.subjects[i], "picture": pictures(sample), "label": label, "note": note}
    return shown | {"proposed": None, "share": ""}


def suspicious_card(found: Findings, pictures: Source, names: Sequence[str], i: int) -> dict[str, Any]:
    """A sample with its label and the one that is proposed."""
    now = int(found.labels.proposed[i])
    shown = card(found, pictures, names, i, f"margin {signed(float(found.labels.margins[i]), '.2f')}")
    return shown | {"proposed": names[now], "share": percent(float(found.probabilities[i, now]), 0)}


def harmful_cards(found: Findings, pictures: Source, names: Sequence[str], count: int) -> list[dict[str, Any]]:
    """The samples without which the loss on the others falls most."""
    known = torch.nan_to_num(found.harm, nan=math.inf)
    order = [i for i in known.argsort(stable=True)[:count].tolist() if known[i] < 0]
    return [card(found, pictures, names, i, f"loss {signed(float(known[i]), '+.2g')}") for i in order]


def class_names(given: Sequence[str] | None, K: int) -> list[str]:
    """Return names of all classes; numbers where there are none."""
    names: list[Any] = list(given or [])[:K]
    return [str(n) for n in names] + [str(k) for k in range(len(names), K)]
