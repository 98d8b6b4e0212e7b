"""A page that explains a certificate of erasure in plain words, as one HTML file that can be printed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from torchlssvm.audit.certificate import Certificate
from torchlssvm.audit.checks import Check, Outcome
from torchlssvm.report.rendering import render, when
from torchlssvm.wording import counted, listed

SHOWN_ERASURES = 6
"""The largest number of erasures that are listed one by one, so that everything fits on one page."""


@dataclass(frozen=True)
class CertificateFacts:
    """A certificate file, and the results of its checks when the page was made.

    Attributes:
        certificate, file: the certificate, and the bytes of its file.
        name: the name of the file.
        checks: the checks that were made, by name. The page names people only if the receipt was checked, and the holder of a
            key only if the signature was checked.
    """

    certificate: Certificate
    file: bytes
    name: str
    checks: Mapping[str, Check]

    @property
    def signer(self) -> Mapping[str, str] | None:
        """The holder (from the verifier's own list, "" if unnamed) and the fingerprint of the trusted key that signed."""
        check = self.checks.get("signature")
        return check.facts if check is not None and check.outcome is Outcome.HOLDS else None

    @property
    def done(self) -> bool:
        """True if the bytes are destroyed and the signature of a trusted key confirms this."""
        return self.certificate.compacted and self.signer is not None

    @property
    def issuer(self) -> str:
        """The issuer, as far as it is known."""
        if not self.certificate.signatures:
            return "unknown: the certificate is not signed, anybody could have written it"
        if self.signer is None:
            return "unknown: pass the issuer's public key to check the signature"
        return f"{self.signer['holder'] or 'the holder of the trusted key'} (signature checked)"

    @property
    def erasures(self) -> list[dict[str, object]]:
        """The events that removed samples."""
        return [event for event in self.certificate.events if event["kind"] == "remove"]

    @property
    def summary(self) -> str:
        """A summary in one or two sentences."""
        c, days = self.certificate, sorted({str(e["time"])[:10] for e in self.erasures})
        date = f" on {days[0]}" if len(days) == 1 else f" between {days[0]} and {days[-1]}" if days else ""
        gone = (
            "Their bytes are destroyed in all files of the store."
            if c.compacted
            else "Their bytes were NOT yet destroyed in the files of the store when this was issued."
        )
        start = "" if self.signer is not None else "Issuer not verified. The certificate says: "
        return f"{start}{counted(c.erased, 'sample')} {'was' if c.erased == 1 else 'were'} erased{date}. {gone}"

    @property
    def facts(self) -> dict[str, str]:
        """The main facts, by their names."""
        c = self.certificate
        out = {"Issued by": self.issuer, "Issued on": when(c.time)}
        for r in c.requests:
            reason = f"; {r['reason']}" if r["reason"] else ""
            out.setdefault("In answer to", "")
            request = f"request {r['id']}, received on {r['received'][:10]}, due on {r['due']}{reason}"
            out["In answer to"] += ("; " if out["In answer to"] else "") + request
        if not c.requests:
            out["In answer to"] = "no request that the certificate names"
        if "receipt" in self.checks:
            about = self.checks["receipt"].facts
            whose = f"{listed(about['subjects'])}: " if about["subjects"] else ""
            out["About"] = f"{whose}{counted(len(about['ids']), 'sample')} ({listed(about['ids'])})"
        else:
            out["About"] = "not told here: see the receipt that was written with the erasure"
        out["Left"] = f"{counted(c.samples, 'sample')}, from which alone the classifier has been computed since"
        return out

    @property
    def not_covered(self) -> list[str]:
        """Limits: facts that the certificate does not state."""
        c = self.certificate
        older = [*c.scope.get("snapshots", []), *c.scope.get("checkpoints", [])]
        out = ["Backups and copies of the store that were made by other means."]
        out.append(
            f"Files of the classifier from before the erasure, which may still contain it: {listed(older)}."
            if older
            else "Copies of the classifier that were handed out earlier. The store knows of none that is still there."
        )
        out.append(
            "The network that computes the numbers from pictures or texts: training it on the same data is not undone here."
        )
        out.append("The same content under another name: nothing here recognizes it.")
        choices = [name for name, choice in c.scope.get("choices", {}).items() if choice["state"] == "kept"]
        if choices:
            out.append(f"Settings chosen before the erasure and kept: {listed(sorted(choices))}.")
        return out

    @property
    def commands(self) -> list[str]:
        """Commands that repeat the checks."""
        parts = " --store STORE" + (" --receipt RECEIPT" if "receipt" in self.checks else "")
        out = [f"torchlssvm verify {self.name}{parts} --public-key ISSUER.pub"]
        if "time stamp" in self.checks:
            out.append(f"openssl ts -verify -data {self.name} -in {self.name}.tsr -CAfile AUTHORITY.pem")
        return out

    @property
    def fingerprints(self) -> dict[str, str]:
        """The hashes that identify the certificate, its keys and the journal."""
        hints = [s.keyid for s in self.certificate.signatures if s.keyid]
        name = "key named in the file (not checked)"
        if self.signer is not None:
            hints, name = [self.signer["key"]], "key that signed"
        keys = {name + (f" {k + 1}" if len(hints) > 1 else ""): key for k, key in enumerate(hints)}
        return {
            "this certificate (file)": hashlib.sha256(self.file).hexdigest(),
            **keys,
            "journal of the store": self.certificate.chain,
        }


def certificate_page(found: CertificateFacts) -> str:
    """Write the page."""
    return render("certificate.html.j2", found=found, shown=SHOWN_ERASURES)


def certificate_lines(found: CertificateFacts) -> list[str]:
    """Write the contents of the page as lines for a terminal."""
    parts: dict[str, Mapping[str, object]] = {
        "": found.facts,
        "what was checked": found.checks,
        "fingerprints (SHA-256)": found.fingerprints,
    }
    lines = ["certificate of erasure", found.summary]
    for title, pairs in parts.items():
        lines += [f"{title}:"] if title else []
        lines += [f"  {name}: {value}" for name, value in pairs.items()]
    lines += ["not covered:", *(f"  {line}" for line in found.not_covered)]
    return [*lines, "check it again:", *(f"  {line}" for line in found.commands)]
