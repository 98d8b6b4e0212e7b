"""The report: what it says, that it is one file, and how a real browser shows it."""

import base64
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from tests.support.browser import browser, seen
from torchlssvm import FixedPoint, LSSVMHead
from torchlssvm.cli import main
from torchlssvm.errors import StoreError
from torchlssvm.events import Add, Relabel, Remove
from torchlssvm.functional.calibration import expected_calibration_error
from torchlssvm.functional.sample_identity import fold_of
from torchlssvm.report import gather, write_report
from torchlssvm.report.findings import harm
from torchlssvm.report.pictures import source, uri
from torchlssvm.store import SampleStore


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A store of digits with wrong labels, an erased writer and a certificate, and pictures."""
    folder = tmp_path_factory.mktemp("report")
    data = load_digits()
    x, y = torch.as_tensor(data.images[:400] / 16).flatten(1), torch.as_tensor(data.target[:400])
    y[:12] = (y[:12] + 3) % 10
    ids = [f"digits:{i}" for i in range(400)]
    with SampleStore(folder / "store", head=LSSVMHead(64, 10, grid=FixedPoint(1.0))) as store:
        for a in range(0, 400, 100):
            part = slice(a, a + 100)
            store.apply(Add(ids=ids[part], x=x[part], y=y[part], subject=[f"writer{i % 9}" for i in range(100)]))
        store.apply(Relabel(ids=[ids[0]], y=[int(data.target[0])]))
        store.requests.open("writer5", request_id="R-1", received="2026-01-05", reason="<b>Art. 17</b>")
        erased = store.apply(Remove(subject="writer5"), request="R-1")
        store.head.select_rho()
        store.calibrate()
        (folder / "certificates").mkdir()
        store.certificate(erased.event_id).save(folder / "certificates" / "erasure.json")
    (folder / "certificates" / "other.json").write_text("{}")
    np.save(folder / "pictures.npy", (data.images[:400] * 255 / 16).astype(np.uint8))
    files = {"out": "report.html", "images": "pictures.npy", "certificates": "certificates"}
    options = [word for name, file in files.items() for word in (f"--{name}", str(folder / file))]
    assert main(["report", str(folder / "store"), "--json", "--count", "8", *options]) == 0
    return folder


def test_it_says_what_is_so(place) -> None:
    text = (place / "report.html").read_text()
    with SampleStore(place / "store", readonly=True) as store:
        found = gather(store)
        _, scores, labels = store.leave_one_out()
        assert found.accuracy == float((scores.argmax(1) == labels).double().mean())
        p = store.head.calibration(scores)
        assert found.ece[1] == expected_calibration_error(p, labels)
        assert f"{found.accuracy:.1%}" in text
        assert f"{found.ece[1]:.3f}" in text
        assert store.head.digest() not in text  # with the samples that are left, it would confirm a guess about others
        for i in found.labels.suspects[:8].tolist():
            assert found.labels.ids[i] in text
        assert text.count("data:image/png;base64,") == 8 + 8
        for entry in store.history():
            assert entry.event_id in text
    assert "erasure.json" in text
    assert "other.json" in text
    assert "writer5" not in text  # erased


def test_samples_of_a_subject_are_left_out_together(place, capsys) -> None:
    page = str(place / "by_subject.html")
    assert main(["report", str(place / "store"), "--out", page, "--groups", "subject", "--json"]) == 0
    with SampleStore(place / "store", readonly=True) as store:
        assert json.loads(capsys.readouterr().out)["accuracy"] == gather(store, groups="subject").accuracy
        assert gather(store, groups="subject").accuracy != gather(store).accuracy


def test_it_opens_with_erasures_requests_and_work_to_be_done(place) -> None:
    """Before all that is about the classifier."""
    text = (place / "report.html").read_text()
    order = [text.index(f"<h2>{title}</h2>") for title in ("Erasure", "Certificates", "The classifier", "Classes")]
    assert order == sorted(order)
    opening = text[order[0] : order[2]]
    assert re.search(r"Request R-1 is overdue by [\d,]+ days", opening)
    assert "torchlssvm receipt" in opening
    assert "torchlssvm compact" in opening
    assert '<span class="was">not yet</span>' in opening
    assert "&lt;b&gt;Art. 17" in opening
    assert "rho" not in opening.replace("torchlssvm", "")
    with SampleStore(place / "store", readonly=True) as store:
        assert (
            str(place / "report.html") in store.certificates.checkpoints()
        )  # certificates name it after the next erasure


def test_each_open_request_is_a_task_also_of_somebody_unknown(tmp_path) -> None:
    with SampleStore(tmp_path / "s", head=LSSVMHead(2, 2, grid=4.0)) as store:
        store.apply(Add(ids=["a", "b", "c", "d"], x=torch.eye(2).repeat(2, 1), y=[0, 1, 0, 1], subject="u1"))
        assert gather(store).waiting == []
        opened = store.requests.open("nobody", request_id="R-9")
        (task,) = gather(store).waiting
        assert "R-9" in task
        assert opened.due in task
        store.requests.close("R-9", "nothing is held")
        assert gather(store).waiting == []


def test_harm_is_what_retraining_a_half_says(place) -> None:
    with SampleStore(place / "store", readonly=True) as store:
        ids = store.find()
        change = harm(store, store.head, ids)
        rows = store.get(ids)
        rho = store.head.rho
    half = torch.tensor(fold_of(ids, 2))
    for i in (0, 7, 50):
        mine, others = half == half[i], half != half[i]
        target = 2 * torch.nn.functional.one_hot(rows.y[others], 10).double() - 1
        error = []
        for keep in (mine, mine & (torch.arange(len(ids)) != i)):
            model = LSSVMHead(64, 10, grid=FixedPoint(1.0), rho=rho).add(rows.x[keep], rows.y[keep])
            error.append(float((target - model(rows.x[others])).square().mean()))
        assert float(change[i]) == pytest.approx(error[1] - error[0], rel=1e-6, abs=1e-12)


def test_it_is_one_file_that_fetches_nothing(place) -> None:
    text = (place / "report.html").read_text()
    assert not re.search(r"https?:|<script|<link|<iframe|@import|url\(", text)
    assert "default-src 'none'" in text
    assert len(text) < 400_000


def test_hostile_names_are_text(tmp_path) -> None:
    x, y = torch.randn(30, 3), torch.arange(30) % 2
    evil = '<script>alert("x")</script>'
    with SampleStore(tmp_path / "s", head=LSSVMHead(3, 2)) as store:
        store.apply(
            Add(ids=[f"{evil}{i}" for i in range(30)], x=x, y=y, subject=evil, event_id=evil.replace("x", "event"))
        )
        write_report(store, tmp_path / "r.html", classes=[evil, evil], title=evil)
    text = (tmp_path / "r.html").read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def test_tables_show_the_values_that_stand_out(tmp_path) -> None:
    """Without pictures a sample is a row of a table: its label, and the features farthest from their means."""
    torch.manual_seed(0)
    x, y = torch.randn(60, 9).double(), torch.arange(60) % 2
    x[:, 0] += 4 * y
    x[3, 7] = 6.0
    y[3] = 1 - y[3]
    with SampleStore(tmp_path / "s", head=LSSVMHead(9, 2, grid=FixedPoint(64.0))) as store:
        store.apply(Add(ids=[f"row{i:02d}" for i in range(60)], x=x, y=y))
        write_report(store, tmp_path / "r.html", count=5)
        kept = store.get(["row03"]).x[0]
    text = (tmp_path / "r.html").read_text()
    assert "no picture" not in text
    row = next(r for r in text.split("<tr>") if ">row03" in r)
    shown = [(int(c), float(v)) for c, v in re.findall(r"<i>x(\d+)</i> (\S+)", row.replace("\N{MINUS SIGN}", "-"))]
    assert len(shown) == 6
    assert shown[0] == (7, 6.0)
    for column, value in shown:
        assert value == pytest.approx(float(kept[column]), rel=5e-3)
    assert (tmp_path / "r.html").stat().st_mode & 0o777 == 0o600


def test_weights_that_follow_the_counts_cost_one_solve_per_class(tmp_path, monkeypatch) -> None:
    """Not one per class and batch: a report with balanced weights took 45 times as long as one without."""
    from torchlssvm.linear import normal_equations

    torch.manual_seed(0)
    calls, solve = [], normal_equations.solve
    monkeypatch.setattr(normal_equations, "solve", lambda *a, **k: calls.append(0) or solve(*a, **k))
    counts = []
    for name, weight in (("plain", None), ("balanced", "balanced")):
        calls.clear()
        with SampleStore(tmp_path / name, head=LSSVMHead(6, 5, class_weight=weight, grid=FixedPoint(8.0))) as store:
            store.apply(Add(ids=range(3000), x=torch.randn(3000, 6), y=torch.arange(3000) % 5))
            write_report(store, tmp_path / f"{name}.html")
        counts.append(len(calls))
    assert counts[1] <= counts[0] + 5


def test_small_and_odd_stores(tmp_path) -> None:
    for name, n, options in (("two", 2, {}), ("pairs", 20, {"multiclass": "ovo"}), ("weights", 20, {"class_weight": "balanced"}), ("folds", 20, {"folds": 3})):  # fmt: skip
        with SampleStore(tmp_path / name, head=LSSVMHead(3, 4, **options)) as store:
            store.apply(Add(ids=range(n), x=torch.randn(n, 3), y=torch.arange(n) % 2))
            found = write_report(store, tmp_path / "two.html") if name == "two" else gather(store)
            assert torch.equal(found.labels.order, store.label_errors().order)
        assert 0 <= found.accuracy <= 1
    with (
        SampleStore(tmp_path / "none", head=LSSVMHead(3, 2)) as store,
        pytest.raises(StoreError, match="holds no samples"),
    ):
        write_report(store, tmp_path / "none.html")
    with SampleStore(tmp_path / "values", head=LSSVMHead(3, 2)) as store:
        store.apply(Add(ids=range(4), x=torch.randn(4, 3), y=torch.randn(4, 2)))
        with pytest.raises(ValueError, match="about labels"):
            write_report(store, tmp_path / "values.html")
    assert not (tmp_path / "none.html").exists()


def test_pictures(tmp_path) -> None:
    from PIL import Image

    grey, colour = (
        np.arange(12, dtype=np.uint8).reshape(3, 4) * 20,
        np.random.default_rng(0).integers(0, 255, (5, 4, 3), np.uint8),
    )
    for values in (grey, colour):
        encoded = base64.b64decode(uri(values).partition(",")[2])
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(encoded))), values)
    (tmp_path / "cats").mkdir()
    Image.fromarray(colour).resize((600, 400)).save(tmp_path / "cats" / "a.jpg")
    data = source(tmp_path)("cats/a.jpg")
    small = Image.open(io.BytesIO(base64.b64decode(data.partition(",")[2])))
    assert max(small.size) <= 224
    assert source(tmp_path)("cats/b.jpg") is None
    assert source(tmp_path / "cats")("../cats/a.jpg") is not None
    assert source(tmp_path / "cats")("../../etc/passwd") is None
    assert source(lambda sample: grey / 255)("a").startswith("data:image/png")
    assert source(np.zeros((3, 4, 4)))("x:7") is None
    with pytest.raises(ValueError, match="images must be"):
        source(tmp_path / "nothing")
    with pytest.raises(ValueError, match="an array of pictures"):
        source(np.zeros((3, 4)))


SEEN = """width: innerWidth, needed: document.documentElement.scrollWidth, images: document.images.length,
  pictures: [...document.images].filter(i => i.complete && i.naturalWidth > 0).length,
  page: getComputedStyle(document.body).backgroundColor, ink: getComputedStyle(document.body).color,
  charts: [...document.querySelectorAll("figure img")].filter(s => s.getBoundingClientRect().height > 100).length,
  tables: [...document.querySelectorAll(".panel")].map(p => p.scrollWidth - p.clientWidth)"""
"""Sizes and colours of a page."""


def brightness(colour: str) -> float:
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3


@browser
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (390, True)])
def test_in_a_browser(place, tmp_path, width, dark) -> None:
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    found = seen((place / "report.html").read_text(), tmp_path, width, SEEN, scheme)
    assert found["width"] == width
    assert found["needed"] <= width  # nothing sticks out
    assert len(found["tables"]) == 6
    assert max(found["tables"]) <= 0  # no column hides beyond the edge of its table
    assert found["pictures"] == found["images"] == 16 + 5
    assert found["charts"] == 5
    assert (brightness(found["page"]) < 60) == dark
    assert abs(brightness(found["page"]) - brightness(found["ink"])) > 150
