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
from torchlssvm.report.rendering import percent, render, signed

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
    suspicious, harmful = shown_samples(found, count)

    def card(i: int) -> dict[str, Any]:
        sample = (found.labels.ids or [])[i]
        shown = {"id": sample, "subject": found.subjects[i] or "", "label": names[int(found.labels.labels[i])]}
        if pictures is not None:
            return shown | {"picture": pictures(sample)}
        return shown | {"values": unusual_values(values[sample], found)}

    def proposal(i: int) -> dict[str, str]:
        now = int(found.labels.proposed[i])
        margin = signed(found.labels.margins[i], ".2f")
        return {"proposed": names[now], "share": percent(found.probabilities[i, now], 0), "note": margin}

    return render(
        "report.html.j2",
        found=found,
        stats=found.stats,
        title=title,
        time=time,
        multiclass=MULTICLASS_WORDS[found.head["multiclass"]],
        shown=SHOWN_EVENTS,
        removals=[e for e in found.history if e.kind == "remove"],
        owner={event: r.id for r in found.requests for event in r.events},
        opened=[r for r in found.requests if r.open],
        dof=degrees_of_freedom(found),
        selection=SELECTION_WORDS[found.path.method],
        charts=draw_charts(found),
        classes=class_rows(found, names),
        pictures=pictures is not None,
        suspicious=[card(i) | proposal(i) for i in suspicious],
        harmful=[card(i) | {"proposed": None, "note": signed(found.harm[i], "+.2g")} for i in harmful],
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
    return [(c, signed(x[c], ".4g"), signed(distance[c], "+.1f")) for c in columns]


def degrees_of_freedom(found: Findings) -> float | None:
    """Effective number of weights at the rho in use; None if the path of rho does not tell."""
    if found.path.dof is None:
        return None
    return float(found.path.dof[(found.path.rhos.log() - math.log(found.head["rho"])).abs().argmin()])


def class_rows(found: Findings, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the name, number of samples, accuracy, mean margin and most frequent wrong prediction of each class."""
    y, proposed, K = found.labels.labels, found.labels.proposed, len(names)
    confusion = torch.zeros(K, K, dtype=torch.int64)
    confusion.index_put_((y, proposed), torch.ones_like(y), accumulate=True)
    wrong = confusion - confusion.diag().diag()
    return [
        {
            "name": names[k],
            "samples": int(confusion[k].sum()),
            "accuracy": confusion[k, k] / confusion[k].sum(),  # NaN without samples
            "margin": found.labels.margins[y == k].mean(),
            "mistakes": int(wrong[k].max()),
            "mistaken_for": names[int(wrong[k].argmax())],
        }
        for k in range(K)
    ]


def class_names(given: Sequence[str] | None, K: int) -> list[str]:
    """Return a name for each class: the one given, or its number."""
    names: list[Any] = list(given or [])[:K]
    return [str(n) for n in names] + [str(k) for k in range(len(names), K)]
