"""The HTML page of a report: one file that needs no others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchlssvm.report.charts import draw_charts
from torchlssvm.report.findings import Findings
from torchlssvm.report.pictures import Source
from torchlssvm.report.rendering import render
from torchlssvm.wording import counted

SELECTION_WORDS = {"gcv": "generalized cross-validation", "kfold": "cross-validation in five folds"}
MULTICLASS_WORDS = {"ovr": "one against the rest", "ovo": "one against one"}

SHOWN_EVENTS = 25
"""The number of most recent events in the list. The chart shows all events."""

SHOWN_VALUES = 6
"""The number of feature values that are listed for a sample, the most unusual ones."""


def page(
    found: Findings, pictures: Source | None, values: dict[str, Tensor], names: Sequence[str], title: str, time: str,
    count: int,
) -> str:  # fmt: skip
    """Write the whole page.

    Args:
        found: the findings.
        pictures: the picture of each sample. Without pictures, the page shows the ``values`` of their features.
        values: the features (J,) of the samples that the page shows, by id.
        names: the names of the classes.
        title: the title of the page.
        time: the time at which the page is written.
        count: how many samples each list shows.
    """
    weight = found.head["class_weight"]
    form = f"{found.head['intercept']} intercept, {MULTICLASS_WORDS[found.head['multiclass']]}"
    suspicious, harmful = shown_samples(found, count)

    def card(i: int) -> dict[str, Any]:
        sample = (found.labels.ids or [])[i]
        shown = {"id": sample, "subject": found.subjects[i] or "", "label": names[int(found.labels.labels[i])]}
        if pictures is not None:
            return shown | {"picture": pictures(sample)}
        return shown | {"values": unusual_values(values[sample], found)}

    def proposal(i: int) -> dict[str, str]:
        now = int(found.labels.proposed[i])
        margin = signed(float(found.labels.margins[i]), ".2f")
        return {"proposed": names[now], "share": percent(float(found.probabilities[i, now]), 0), "note": margin}

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
        pictures=pictures is not None,
        suspicious=[card(i) | proposal(i) for i in suspicious],
        harmful=[card(i) | {"proposed": None, "note": signed(float(found.harm[i]), "+.2g")} for i in harmful],
    )


def shown_samples(found: Findings, count: int) -> tuple[list[int], list[int]]:
    """Return the row numbers of the most suspicious samples, and of those whose removal lowers the loss most."""
    known = torch.nan_to_num(found.harm, nan=math.inf)
    harmful = [i for i in known.argsort(stable=True)[:count].tolist() if known[i] < 0]
    return found.labels.suspects[:count].tolist(), harmful


def unusual_values(x: Tensor, found: Findings) -> list[tuple[int, str, str]]:
    """Return the most unusual features: index, value and distance from the mean in standard deviations. x: (J,)."""
    distance = torch.where(found.spread > 0, (x - found.mean) / found.spread, 0.0)
    columns = distance.abs().argsort(descending=True, stable=True)[:SHOWN_VALUES].tolist()
    return [(c, signed(float(x[c]), ".4g"), signed(float(distance[c]), "+.1f")) for c in columns]


def percent(value: float, digits: int = 1) -> str:
    """Format a share as a percentage."""
    return "–" if math.isnan(value) else f"{100 * value:.{digits}f}%"


def signed(value: float, form: str) -> str:
    """Format a number with a real minus sign."""
    return f"{value:{form}}".replace("-", "\N{MINUS SIGN}")


def erasure_tiles(found: Findings) -> list[tuple[str, str]]:
    """Return the main figures for people who answer requests, each with an explanation."""
    removals = [e for e in found.history if e.kind == "remove"]
    opened = [r for r in found.requests if r.open]
    return [
        tile(len(opened), "open request", f"{sum(r.overdue for r in opened):,} overdue"),
        tile(sum(e.samples for e in removals), "erased sample", f"in {counted(len(removals), 'erasure')}"),
        tile(len(found.waiting), "open task", "listed below" if found.waiting else "nothing to do"),
    ]


def tile(number: int, noun: str, more: str) -> tuple[str, str]:
    """A number, and its noun with a remark."""
    return f"{number:,}", f"{noun}{'' if number == 1 else 's'}, {more}"


def classifier_tiles(found: Findings) -> list[tuple[str, str]]:
    """The main figures of the classifier, each with its meaning."""
    dof = ""
    if found.path.dof is not None:
        nearest = (found.path.rhos.log() - math.log(found.head["rho"])).abs().argmin()
        dof = f", {float(found.path.dof[nearest]):.4g} degrees of freedom"
    return [
        (percent(found.accuracy), "leave-one-out accuracy: a model trained without the sample scores it"),
        (f"{found.ece[1]:.3f}", f"calibration error of the probabilities ({found.ece[0]:.3f} uncalibrated)"),
        tile(len(found.labels.suspects), "suspicious label", "listed below"),
        (f"{found.head['rho']:.4g}", f"rho{dof}"),
        tile(len(found.history), "event", "in the journal"),
        (f"{found.drift:.0e}" if found.drift else "0", "drift: distance of the weights from a fresh solve"),
    ]


def class_rows(found: Findings, names: Sequence[str]) -> list[list[str]]:
    """Return the name, number of samples, accuracy, mean margin and most frequent wrong prediction of each class."""
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


def class_names(given: Sequence[str] | None, K: int) -> list[str]:
    """Return a name for each class: the one given, or its number."""
    names: list[Any] = list(given or [])[:K]
    return [str(n) for n in names] + [str(k) for k in range(len(names), K)]
