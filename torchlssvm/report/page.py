"""The HTML page of a report: one file that needs no other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

import torch
from torch import Tensor

from torchlssvm._version import __version__
from torchlssvm.report.charts import Axis, Chart, decades, linear, number
from torchlssvm.report.findings import Findings
from torchlssvm.report.pictures import Source
from torchlssvm.report.style import CSS
from torchlssvm.store import ErasureRequest
from torchlssvm.wording import counted

CONTENT_SECURITY_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""Rights that a browser gives the page: to show itself."""

SELECTION_WORDS = {"gcv": "generalized cross-validation", "kfold": "cross-validation in five folds"}
"""Descriptions of the ways in which the errors of many values of rho are estimated."""

MULTICLASS_WORDS = {"ovr": "one against the rest", "ovo": "one against one"}

SHOWN_EVENTS = 25
"""The last so many events are listed; the chart shows all."""


def page(found: Findings, pictures: Source, names: Sequence[str], title: str, time: str, count: int) -> str:
    """Write the whole page. names: of the classes; count: samples shown in each list."""
    body = [
        _header(found, title, time),
        _erasures(found),
        _tiles(found),
        _trust(found),
        _classes(found, names),
        _suspicious(found, pictures, names, count),
        _harmful(found, pictures, names, count),
        _over_time(found),
        _events(found),
        _choices(found),
        f"<footer>torchlssvm {escape(__version__)}. This page is one file: nothing is fetched, nothing is sent. It shows "
        "samples, ids and subjects of the store: erase it with them.</footer>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_SECURITY_POLICY}">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n{''.join(body)}\n</main>\n</body>\n</html>\n"
    )


def percent(value: float, digits: int = 1) -> str:
    """Format a share as a percentage."""
    return "–" if math.isnan(value) else f"{100 * value:.{digits}f}%"


def signed(value: float, form: str) -> str:
    """Format a number with a real minus sign."""
    return f"{value:{form}}".replace("-", "\N{MINUS SIGN}")


def figure(chart: Chart, caption: str, note: str = "") -> str:
    """Write a chart with its caption."""
    small = f"<small>{escape(note)}</small>" if note else ""
    return f"<figure><figcaption>{escape(caption)}{small}</figcaption>{chart.svg()}</figure>"


def table(head: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]]) -> str:
    """Write a table; head: names and classes of the columns; cells are HTML."""
    top = "".join(f'<th class="{kind}">{escape(name)}</th>' for name, kind in head)
    lines = ["".join(f'<td class="{k}">{cell}</td>' for cell, (_, k) in zip(r, head, strict=True)) for r in rows]
    return (
        f'<div class="panel"><table><thead><tr>{top}</tr></thead><tbody>'
        f"{''.join(f'<tr>{line}</tr>' for line in lines)}</tbody></table></div>"
    )


def _header(found: Findings, title: str, time: str) -> str:
    s, h = found.stats, found.head
    weight = h["class_weight"]
    form = f"{h['intercept']} intercept, {MULTICLASS_WORDS[h['multiclass']]}" + (
        f", {weight} weights" if isinstance(weight, str) else ""
    )
    return (
        f"<header><h1>{escape(title)}</h1><p>{escape(time[:16].replace('T', ' '))} UTC · {s['samples']:,} samples of "
        f"{s['subjects']:,} subjects, {s['classes']} classes, {s['features']:,} features · {escape(form)}</p></header>"
    )


def _erasures(found: Findings) -> str:
    """Erasures, requests and work to be done, for those who answer requests."""
    removals = [e for e in found.history if e.kind == "remove"]
    opened = [r for r in found.requests if r.open]
    tiles = [
        (f"{len(opened):,}", f"requests to be answered, {sum(r.overdue for r in opened):,} of them overdue"),
        (f"{sum(e.samples for e in removals):,}", f"samples erased, in {counted(len(removals), 'erasure')}"),
        (f"{len(found.waiting):,}", "things to be done, listed below"),
    ]
    out = f"<h2>Erasure</h2>{_tile_row(tiles)}"
    out += (
        f'<ul class="work">{"".join(f"<li>{escape(line)}</li>" for line in found.waiting)}</ul>'
        if found.waiting
        else ""
    )
    if found.requests:
        rows = [
            [
                f"<code>{escape(r.id)}</code>",
                escape(r.received[:10]),
                escape(r.due),
                _time_left(r),
                escape(r.state),
                escape(r.reason),
            ]
            for r in found.requests
        ]
        head = [("request", ""), ("received", ""), ("due", ""), ("", ""), ("state", ""), ("reason", "wrap")]
        out += table(head, rows)
    if removals:
        owner = {event: r.id for r in found.requests for event in r.events}
        rows = [
            [
                escape(e.time[:19].replace("T", " ")),
                f"{e.samples:,}",
                "yes" if e.position <= found.compacted else '<span class="was">not yet</span>',
                escape(owner.get(e.event_id, "none")),
            ]
            for e in reversed(removals[-SHOWN_EVENTS:])
        ]
        head = [("erased (UTC)", ""), ("samples", "n"), ("bytes destroyed", ""), ("for request", "wrap")]
        out += table(head, rows)
    return out + _certificates(found) + "<h2>The classifier</h2>"


def _time_left(request: ErasureRequest) -> str:
    if not request.open:
        return "answered"
    days = request.days_left
    return f'<span class="was">{counted(-days, "day")} late</span>' if days < 0 else f"{counted(days, 'day')} left"


def _certificates(found: Findings) -> str:
    """The certificate files of a folder."""
    if not found.certificates:
        return ""
    lines = []
    for r in found.certificates:
        state = r.problem or ("the state now" if r.current else "an earlier state")
        lines.append(
            [
                escape(r.file),
                escape(r.time[:19].replace("T", " ")),
                f"{r.erased:,}",
                "yes" if r.signed else "no",
                escape(state),
            ]
        )
    head = [("certificate", "wrap"), ("time (UTC)", ""), ("erased", "n"), ("signed", ""), ("is about", "wrap")]
    note = '<p class="note">Read, not verified: <code>torchlssvm verify</code> does that.</p>'
    return f"<h2>Certificates</h2>{note}{table(head, lines)}"


def _tile_row(tiles: Sequence[tuple[str, str]]) -> str:
    """A row of figures, each with its meaning."""
    return f'<div class="tiles">{"".join(f"<div class=tile><b>{b}</b><span>{escape(t)}</span></div>" for b, t in tiles)}</div>'


def _tiles(found: Findings) -> str:
    dof = "" if found.path.dof is None else f", {number(_at_rho(found, found.path.dof))} degrees of freedom"
    tiles = [
        (percent(found.accuracy), "accuracy, each sample by the model that never saw it"),
        (f"{found.ece[1]:.3f}", f"calibration error of its probabilities ({found.ece[0]:.3f} uncalibrated)"),
        (f"{len(found.labels.suspects):,}", "samples whose label the model without them would change"),
        (number(found.head["rho"]), f"rho{dof}"),
        (f"{len(found.history):,}", "events"),
        (f"{found.drift:.0e}" if found.drift else "0", "drift of the weights from their statistics"),
    ]
    return _tile_row(tiles)


def _at_rho(found: Findings, values: Tensor) -> float:
    """Return the value of a path at the rho in use."""
    nearest = (found.path.rhos.log() - math.log(found.head["rho"])).abs().argmin()
    return float(values[nearest])


def _trust(found: Findings) -> str:
    confidence, accuracy, count = (t.tolist() for t in found.bins)
    unit = Axis(0.0, 1.0, [0.0, 0.25, 0.5, 0.75, 1.0])
    reliable = Chart(unit, unit, "confidence", "accuracy", "accuracy against confidence, in 15 bins")
    reliable.line([0, 1], [0, 1], "ideal")
    most = max(count) or 1
    reliable.line(confidence, accuracy)
    reliable.dots(confidence, accuracy, sizes=[2.5 + 6 * math.sqrt(c / most) for c in count])
    rhos, errors = found.path.rhos.tolist(), found.path.errors.tolist()
    rho = found.head["rho"]
    path = Chart(
        decades([*rhos, rho]), linear(errors), "rho", "error", f"{SELECTION_WORDS[found.path.method]} error against rho"
    )
    path.line(rhos, errors)
    path.mark(found.path.rho, f"best {number(found.path.rho)}", "first")
    if not math.isclose(rho, found.path.rho, rel_tol=1e-6):
        path.mark(rho, f"in use {number(rho)}")
    return (
        '<h2>Can it be trusted?</h2><div class="charts">'
        + figure(
            reliable, "Calibration", f"{found.calibration.method}, on leave-one-out scores; a dot's size is its share"
        )
        + figure(path, "Regularization", SELECTION_WORDS[found.path.method])
        + "</div>"
    )


def _classes(found: Findings, names: Sequence[str]) -> str:
    y, proposed, K = found.labels.labels, found.labels.proposed, len(names)
    confusion = torch.zeros(K, K, dtype=torch.int64)
    confusion.index_put_((y, proposed), torch.ones_like(y), accumulate=True)
    rows = []
    for k in range(K):
        total = int(confusion[k].sum())
        wrong = confusion[k].clone()
        wrong[k] = 0
        most = int(wrong.argmax())
        usual = f"{escape(names[most])} ({int(wrong[most])})" if int(wrong[most]) else ""
        share = percent(int(confusion[k, k]) / total) if total else "–"
        margin = signed(float(found.labels.margins[y == k].mean()), ".2f") if total else "–"
        rows.append([escape(names[k]), f"{total:,}", share, margin, usual])
    head = [("class", ""), ("samples", "n"), ("accuracy", "n"), ("margin", "n"), ("taken for", "wrap")]
    return "<h2>Classes</h2>" + table(head, rows)


def _card(found: Findings, pictures: Source, i: int, lines: Sequence[str]) -> str:
    sample = (found.labels.ids or ())[i]
    data = pictures(sample)
    picture = '<div class="blank">no picture</div>'
    if data is not None:
        kind = "small" if data.startswith("data:image/png") else ""
        picture = f'<img class="{kind}" alt="{escape(sample, quote=True)}" src="{data}">'
    whose = f" · {escape(found.subjects[i] or '')}" if found.subjects[i] else ""
    return f'<div class="sample">{picture}{"<br>".join(lines)}<div class="id">{escape(sample)}{whose}</div></div>'


def _suspicious(found: Findings, pictures: Source, names: Sequence[str], count: int) -> str:
    cards = []
    for i in found.labels.suspects[:count].tolist():
        was, now = int(found.labels.labels[i]), int(found.labels.proposed[i])
        p = percent(float(found.probabilities[i, now]), 0)
        lines = [
            f'<span class="was">{escape(names[was])}</span> → <span class="now">{escape(names[now])}</span> {p}',
            f"margin {signed(float(found.labels.margins[i]), '.2f')}",
        ]
        cards.append(_card(found, pictures, i, lines))
    text = "Label as given, and the one preferred by the model that never saw the sample, for a person to check."
    return f'<h2>Most suspicious labels</h2><p class="note">{text}</p>' + (
        f'<div class="samples">{"".join(cards)}</div>' if cards else '<p class="note">None.</p>'
    )


def _harmful(found: Findings, pictures: Source, names: Sequence[str], count: int) -> str:
    known = torch.nan_to_num(found.harm, nan=math.inf)
    order = [i for i in known.argsort(stable=True)[:count].tolist() if known[i] < 0]
    cards = []
    for i in order:
        lines = [escape(names[int(found.labels.labels[i])]), f"loss {signed(float(known[i]), '+.2g')}"]
        cards.append(_card(found, pictures, i, lines))
    text = "Each sample is judged on the half of the samples that its model has not seen: the loss falls most without these."
    return f'<h2>Most harmful samples</h2><p class="note">{text}</p>' + (
        f'<div class="samples">{"".join(cards)}</div>'
        if cards
        else '<p class="note">None, or too few samples to tell.</p>'
    )


def _over_time(found: Findings) -> str:
    n = len(found.added)
    order, bins = found.added.argsort(stable=True), min(20, n)
    parts = order.tensor_split(bins)
    right = (found.labels.proposed == found.labels.labels).double()
    at = [(i + 0.5) / bins * n for i in range(bins)]
    edges = [i / bins * n for i in range(bins + 1)]
    share = [float(right[p].mean()) for p in parts]
    far = [float(found.leverage[p].mean()) for p in parts]
    x = linear([0.0, float(n)])
    x = Axis(0.0, float(n), [t for t in x.ticks if 0 <= t <= n])
    accuracy = Chart(
        x, linear(share), "samples, in the order they were added", "accuracy", "accuracy in the order of adding"
    )
    accuracy.line(at, share)
    accuracy.dots(at, share)
    distance = Chart(
        x, linear([*far, 1.0], zero=True), "samples, in the order they were added", "distance", "leverage in order"
    )
    distance.bars(edges, far)
    distance.line([0, n], [1, 1], "ideal")
    held, steps = 0, [0]
    for entry in found.history:
        held += {"add": entry.samples, "remove": -entry.samples}.get(entry.kind, 0)
        steps.append(held)
    axis = linear([0.0, float(max(1, len(found.history)))])
    size = Chart(axis, linear(steps, zero=True), "event", "samples", "samples held after each event")
    size.line(list(range(len(steps))), steps)
    for kind, style in (("remove", "second"),):
        places = [i + 1 for i, e in enumerate(found.history) if e.kind == kind]
        size.dots(places, [steps[p] for p in places], style)
    return (
        '<h2>Over time</h2><div class="charts">'
        + figure(accuracy, "Leave-one-out accuracy", "of twenty parts of the samples, the oldest first")
        + figure(
            distance,
            "Distance from the rest",
            "leverage relative to the mean; a part that rises above 1 is unlike the others",
        )
        + figure(size, "Samples held", "after each event; erasures are marked")
        + "</div>"
    )


def _events(found: Findings) -> str:
    rows = [
        [
            str(e.position),
            escape(e.time[:19].replace("T", " ")),
            escape(e.kind),
            f"{e.samples:,}",
            f"<code>{escape(e.event_id)}</code>",
        ]
        for e in reversed(found.history[-SHOWN_EVENTS:])
    ]
    more = len(found.history) - len(rows)
    note = f'<p class="note">The last {len(rows)} of {len(found.history):,}.</p>' if more > 0 else ""
    head = [("", "n"), ("time (UTC)", ""), ("kind", ""), ("samples", "n"), ("event", "wrap")]
    return "<h2>Events</h2>" + note + table(head, rows)


def _choices(found: Findings) -> str:
    rows = [[escape(k), escape(v)] for k, v in sorted(found.choices.items())] or [["rho", "as given"]]
    text = "Numbers that samples have had a say in; certificates name them too."
    return f'<h2>Chosen from data</h2><p class="note">{text}</p>' + table([("what", ""), ("how", "wrap")], rows)


def class_names(given: Sequence[str] | None, K: int) -> list[str]:
    """Return names of all classes; numbers where there are none."""
    names: list[Any] = list(given or [])[:K]
    return [str(n) for n in names] + [str(k) for k in range(len(names), K)]
