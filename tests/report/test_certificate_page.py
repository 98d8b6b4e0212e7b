"""The page about a certificate: what it says and does not say, and how a browser and a printer show it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.browser import browser, chromium, seen
from torchlssvm import FixedPoint, LSSVMHead, audit
from torchlssvm.audit import Check, Outcome
from torchlssvm.cli import main
from torchlssvm.events import Add, Remove
from torchlssvm.report.certificate_page import CertificateFacts, certificate_page
from torchlssvm.store import SampleStore

pytest.importorskip("cryptography", reason="signatures need torchlssvm[audit]")
UNSIGNED = {"signature": Check("signature", Outcome.NOT_CHECKED, {"signed": False})}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with an erasure on request, its receipt and its signed certificate."""
    folder = tmp_path_factory.mktemp("page")
    audit.new_key(folder / "key.pem")
    x, y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2
    with SampleStore(folder / "store", head=LSSVMHead(4, 2, grid=FixedPoint(8.0))) as store:
        store.apply(Add([f"photo-{i}" for i in range(12)], x, y, [f"<i>Zoë</i> {i // 4}" for i in range(12)]))
        store.requests.open("<i>Zoë</i> 1", request_id="R-1", reason="Art. 17 <GDPR>", received="2026-11-02")
        done = store.apply(Remove(subject="<i>Zoë</i> 1"), request="R-1")
        store.write_receipt([done.event_id], folder / "receipt.json")
        store.certificate(["R-1", done.event_id], folder / "key.pem").save(folder / "before.json")
        store.compact()
        store.certificate(["R-1", done.event_id], folder / "key.pem").save(folder / "cert.json")
    return folder


def show(place: Path, *options: object, certificate: str = "cert.json") -> str:
    """The page that the command writes."""
    out = place / "page.html"
    assert (
        main(["certificate", "show", str(place / certificate), "--html", str(out), "--force", *map(str, options)]) == 0
    )
    return out.read_text()


def test_it_says_what_was_checked_and_what_is_not_covered(place: Path) -> None:
    key = audit.public_key(place / "key.pem.pub")
    trusted = f"Example & Co={place / 'key.pem.pub'}"
    text = show(place, "--store", place / "store", "--receipt", place / "receipt.json", "--public-key", trusted)
    for said in (
        "Example &amp; Co (signature checked)",
        "request R-1, received on 2026-11-02",
        "Art. 17 &lt;GDPR&gt;",
        "4 samples were erased on 20",
        "Their bytes are destroyed",
        "&lt;i&gt;Zoë&lt;/i&gt; 1: 4 samples (photo-4, photo-5, photo-6, photo-7)",
        "4 samples erased; none is in the store",
        "Backups and copies",
        "handed out earlier",
        "The network that computes",
        "torchlssvm verify cert.json --store STORE",
        audit.key_id(key),
    ):
        assert said in text, said
    assert re.search("SHA-256.*[0-9a-f]{64}", text, re.S)
    assert "<i>" not in text
    assert "Content-Security-Policy" in text
    assert not re.search(r"(src|href)=|<script", text)


def test_without_the_key_nothing_is_claimed(place: Path) -> None:
    text = show(place, certificate="before.json")
    assert "Issuer not verified. The certificate says:" in text
    assert "NOT yet destroyed" in text
    assert "unknown: pass the issuer&#39;s public key" in text
    assert "key named in the file (not checked)" in text
    assert "Zoë" not in text
    assert "photo-" not in text
    certificate = audit.Certificate.load(place / "cert.json")
    unsigned = CertificateFacts(replace(certificate, signatures=()), b"", "c.json", UNSIGNED)
    assert "anybody could have written it" in certificate_page(unsigned)


def test_the_name_of_the_holder_comes_from_the_trusted_key_and_not_from_the_hint(place: Path) -> None:
    """An envelope that names the issuer's key and was signed by another one: the page shows the key that has signed."""
    other = audit.new_key(place / "other.pem")
    certificate = replace(audit.Certificate.load(place / "cert.json"), signatures=())
    forged = audit.sign(certificate, place / "other.pem")
    hint = audit.key_id(audit.public_key(place / "key.pem.pub"))
    replace(forged, signatures=(replace(forged.signatures[0], keyid=hint),)).save(place / "forged.json")
    text = show(place, "--public-key", f"Other={other}", certificate="forged.json")
    assert "Other (signature checked)" in text
    assert hint not in text
    assert audit.key_id(audit.public_key(other)) in text
    issuer = f"Issuer={place / 'key.pem.pub'}"
    assert main(["certificate", "show", str(place / "forged.json"), "--public-key", issuer]) == 3


def test_a_page_is_written_when_the_certificate_holds_only(place: Path, tmp_path: Path) -> None:
    data = (place / "cert.json").read_text().replace("A", "B", 1)
    (tmp_path / "altered.json").write_text(data)
    options = ["--public-key", str(place / "key.pem.pub"), "--html", str(tmp_path / "page.html")]
    assert main(["certificate", "show", str(tmp_path / "altered.json"), *options]) == 3
    assert not (tmp_path / "page.html").exists()
    (tmp_path / "page.html").write_text("kept")
    assert main(["certificate", "show", str(place / "cert.json"), *options]) == 1
    assert (tmp_path / "page.html").read_text() == "kept"
    inside = ["--html", str(place / "store" / "page.html")]
    assert main(["certificate", "show", str(place / "cert.json"), *inside]) == 1


@browser
@pytest.mark.parametrize("width", [1200, 390])
def test_in_a_browser(place: Path, tmp_path: Path, width: int) -> None:
    """Nothing sticks out; with many erasures and long names, too."""
    certificate = audit.Certificate.load(place / "cert.json")
    event = certificate.events[-1]
    long = [event | {"event_id": "x" * 120, "position": i} for i in range(1, 40)]
    facts = CertificateFacts(replace(certificate, events=long), b"", "n" * 90, UNSIGNED)
    assert (
        seen(certificate_page(facts), tmp_path, width, "needed: document.documentElement.scrollWidth")["needed"]
        <= width
    )


@browser
def test_it_prints_on_one_page(place: Path, tmp_path: Path) -> None:
    show(place, "--store", place / "store", "--receipt", place / "receipt.json", "--public-key", place / "key.pem.pub")
    chromium(tmp_path, f"--print-to-pdf={tmp_path / 'page.pdf'}", (place / "page.html").as_uri())
    assert re.search(rb"/Count 1\b", (tmp_path / "page.pdf").read_bytes())
