"""A certificate of erasure as a page for people: one HTML file in plain words, made to be printed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from torchlssvm._version import __version__
from torchlssvm.audit.certificate import Certificate
from torchlssvm.audit.receipt import ErasureReceipt
from torchlssvm.report.page import CONTENT_SECURITY_POLICY
from torchlssvm.store.absence import SAME_CONTENT
from torchlssvm.wording import counted, listed

SHOWN_ERASURES = 6
"""Erasures that are listed one by one, so that the page stays one."""

PRINT_CSS = """
:root { color-scheme: light; --ink: #1b2330; --soft: #566070; --line: #d5dae1; --good: #14532d; --goodback: #ecfdf3;
  --warn: #7c2d12; --warnback: #fff7ed; }
* { box-sizing: border-box; overflow-wrap: anywhere; }
body { margin: 0; background: #f3f4f6; color: var(--ink); font: 15px/1.45 system-ui, -apple-system, "Segoe UI", Roboto,
  "Noto Sans", sans-serif; -webkit-text-size-adjust: 100%; }
main { max-width: 820px; margin: 24px auto; padding: 28px 36px; background: #fff; border: 1px solid var(--line); }
h1 { font-size: 1.55rem; line-height: 1.2; margin: 0 0 2px; }
h2 { font-size: 1.02rem; margin: 16px 0 4px; }
p, ul, ol { margin: 4px 0; } ul, ol { padding-left: 20px; } li { margin: 1px 0; overflow-wrap: anywhere; }
.sum { border-left: 4px solid; padding: 8px 12px; margin: 12px 0; font-size: 1.06rem; }
.sum.done { border-color: #16a34a; background: var(--goodback); color: var(--good); }
.sum.open { border-color: #ea580c; background: var(--warnback); color: var(--warn); }
.soft { color: var(--soft); }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 3px 14px 3px 0; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere; }
th { font-weight: 600; width: 25%; overflow-wrap: normal; }
code, pre { font: .84em/1.4 ui-monospace, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
pre { background: #f3f4f6; padding: 6px 9px; margin: 4px 0; white-space: pre-wrap; }
footer { color: var(--soft); font-size: .87em; margin-top: 14px; border-top: 1px solid var(--line); padding-top: 6px; }
@media (max-width: 560px) { main { margin: 0; padding: 16px; border: 0; } h1 { font-size: 1.35rem; }
  th, td { display: block; width: auto; padding-right: 0; } th { border-bottom: 0; padding-bottom: 0; }
  table.list td { border: 0; } tr { display: block; padding: 2px 0; } }
@media print { @page { size: A4; margin: 12mm 15mm; } body { background: #fff; font-size: 9pt; line-height: 1.35; }
  main { margin: 0; padding: 0; border: 0; max-width: none; } h1 { font-size: 15pt; }
  h2 { font-size: 10.5pt; margin: 9px 0 2px; } h2, table { break-after: avoid; } .sum { font-size: 10pt; margin: 7px 0; }
  th, td { padding-top: 1.5px; padding-bottom: 1.5px; }
  pre { border: 1px solid var(--line); background: #fff; } }
"""

PLAIN_WORDS = {
    ("signature", "Ed25519, holds"): "The signature is by a key that the one who made this page trusts.",
    ("signature", "none"): "The certificate is not signed.",
    ("signature", "not checked"): "The signature was not checked, for want of the issuer's key.",
    ("journal", ""): "The record of all changes of the store is complete, and nothing in it was altered.",
    ("erased", ""): "None of the erased samples is in the store under the mark that it had there.",
    (
        "rows",
        "",
    ): "All samples that are left were read again: they are those that the record of changes has, and no other.",
    ("state", "as the"): "What these samples add up to is what the certificate has committed to.",
    ("requests", ""): "The store has the request, with the same dates and reason.",
    ("compacted", "yes"): "The files of the store were rewritten after the erasure, without the erased samples.",
    (
        "compacted",
        "no",
    ): "The files of the store were NOT rewritten since the erasure: bytes of the samples may be in them.",
    ("head", "digest holds"): "The classifier in use is the one that the samples that are left give, and only they.",
    (
        "exported head",
        "digest holds",
    ): "The exported classifier is the one that the samples that are left give, and only they.",
    ("rho", ".*least by GCV"): "A setting of the classifier (rho) is the one that the samples that are left give.",
    ("rho", "to be chosen"): "A setting of the classifier (rho) is still to be chosen, from the samples that are left.",
    (
        "rho",
        ".*not made again",
    ): "A setting of the classifier (rho) was chosen from samples before some of them changed, and kept.",
    (
        "rho",
        ".*not checked",
    ): "A setting of the classifier (rho) was chosen from the samples that are left; this was not checked.",
    ("network", ""): "The network in front of the classifier is the one that the certificate names.",
}
"""Results of checks in words for readers of the page, by name of the check and pattern of the beginning of its result."""

KEPT_CHOICE = r"(?!void).*(unchanged|made before samples changed)"
"""A certificate's words for a setting that is in use as it was before the erasure."""


def in_plain_words(name: str, result: str) -> str:
    """The result of a check as a sentence; one without plain words of its own as it is."""
    for (check, start), words in PLAIN_WORDS.items():
        if check == name and re.match(start, result):
            return words
    text = result.replace(f"; {SAME_CONTENT}", "")  # the page has that among what is not covered
    return f"{name[0].upper()}{name[1:]}: {text}."


@dataclass(frozen=True)
class CertificateFacts:
    """A certificate file, and what was found about it when the page was made.

    Attributes:
        certificate, file: the certificate, and the bytes of its file.
        name: of the file.
        checks: by :func:`torchlssvm.verify` and others, in words.
        signer: name of the holder (from the verifier's own list, "" for none) and fingerprint of the trusted key that has
            signed; None where no trusted key was given.
        receipt: of the erasure, checked against the certificate, if the page may name people.
    """

    certificate: Certificate
    file: bytes
    name: str
    checks: Mapping[str, str]
    signer: tuple[str, str] | None = None
    receipt: ErasureReceipt | None = None

    @property
    def issuer(self) -> str:
        """The issuer, as far as it is known."""
        if not self.certificate.signatures:
            return "not known: the certificate is not signed, anybody could have written it"
        if self.signer is None:
            return "not known: its signature was not checked, since no trusted key was given"
        return f"{self.signer[0] or 'the holder of the trusted key'} (signature checked)"

    @property
    def erasures(self) -> list[dict[str, object]]:
        """The events that removed samples."""
        return [event for event in self.certificate.events if event["kind"] == "remove"]

    @property
    def summary(self) -> str:
        """The whole in one sentence or two."""
        c, days = self.certificate, sorted({str(e["time"])[:10] for e in self.erasures})
        when = f" on {days[0]}" if len(days) == 1 else f" between {days[0]} and {days[-1]}" if days else ""
        gone = (
            "Their bytes are destroyed in all files of the store."
            if c.compacted
            else "Their bytes were NOT yet destroyed in the files of the store when this was issued."
        )
        start = "" if self.signer is not None else "Issuer not verified. The certificate says: "
        return f"{start}{counted(c.erased, 'sample')} {'was' if c.erased == 1 else 'were'} erased{when}. {gone}"

    @property
    def facts(self) -> dict[str, str]:
        """The main facts, by their names."""
        c = self.certificate
        out = {"Issued by": self.issuer, "Issued on": time_text(c.time)}
        for r in c.requests:
            reason = f"; {r['reason']}" if r["reason"] else ""
            out.setdefault("In answer to", "")
            request = f"request {r['id']}, received on {r['received'][:10]}, to be answered by {r['due']}{reason}"
            out["In answer to"] += ("; " if out["In answer to"] else "") + request
        if not c.requests:
            out["In answer to"] = "no request that the certificate names"
        if self.receipt is not None:
            whose = f"{listed(self.receipt.subjects)}: " if self.receipt.subjects else ""
            out["About"] = f"{whose}{counted(self.receipt.samples, 'sample')} ({listed(self.receipt.ids)})"
        else:
            out["About"] = "not told here: the receipt that was written with the erasure tells it"
        out["Left"] = f"{counted(c.samples, 'sample')}, from which alone the classifier is computed since"
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
        out.append("The same content under another name: nothing here recognises it.")
        choices = [name for name, how in c.scope.get("choices", {}).items() if re.match(KEPT_CHOICE, str(how))]
        if choices:
            out.append(f"Settings chosen before the erasure and kept: {listed(sorted(choices))}.")
        return out

    @property
    def commands(self) -> list[str]:
        """Commands that check it again."""
        parts = " --store STORE" + (" --receipt RECEIPT" if self.receipt is not None else "")
        out = [f"torchlssvm verify {self.name}{parts} --public-key ISSUER.pub"]
        if "time stamp" in self.checks:
            out.append(f"openssl ts -verify -data {self.name} -in {self.name}.tsr -CAfile AUTHORITY.pem")
        return out

    @property
    def fingerprints(self) -> dict[str, str]:
        """Hashes by which to recognise the certificate, its keys and the journal."""
        hints = [s.keyid for s in self.certificate.signatures if s.keyid]
        name = "key named in the file (not checked)"
        if self.signer is not None:
            hints, name = [self.signer[1]], "key that has signed"
        keys = {name + (f" {k + 1}" if len(hints) > 1 else ""): key for k, key in enumerate(hints)}
        return {
            "this certificate (file)": hashlib.sha256(self.file).hexdigest(),
            **keys,
            "journal of the store": self.certificate.chain,
        }


def certificate_page(found: CertificateFacts) -> str:
    """Write the page."""
    c = found.certificate
    erasures = found.erasures[:SHOWN_ERASURES]
    lines = [
        [time_text(str(e["time"])), counted(int(str(e["samples"])), "sample"), f"erasure {e['event_id']}"]
        for e in erasures
    ]
    more = len(found.erasures) - len(erasures)
    checked = [in_plain_words(name, result) for name, result in found.checks.items()]
    body = f"""<h1>Certificate of erasure</h1>
<p class="soft">A sample is one record (a picture, a text, a measurement) from which a classifier has learned.</p>
<p class="sum {"done" if c.compacted and found.signer is not None else "open"}">{escape(found.summary)}</p>
{rows(found.facts.items())}
<h2>What was erased, and when</h2>
{table(lines)}{f'<p class="soft">and {counted(more, "more erasure")}</p>' if more > 0 else ""}
<h2>What was checked when this page was made</h2>
<ul>{"".join(f"<li>{escape(line)}</li>" for line in checked)}</ul>
<h2>How anybody can check it again</h2>
<ol><li>Get the issuer's public key from the issuer, not from this page, and compare its fingerprint with the one below.</li>
<li>Install torchlssvm and run:{"".join(f"<pre>{escape(line)}</pre>" for line in found.commands)}</li>
<li>Without the store, the signature can be checked by any program that reads DSSE envelopes (Ed25519).</li></ol>
<h2>What this certificate does not cover</h2>
<ul>{"".join(f"<li>{escape(line)}</li>" for line in found.not_covered)}</ul>
<h2>Fingerprints (SHA-256)</h2>
{rows([(name, value) for name, value in found.fingerprints.items()], code=True)}
<footer>Made from {escape(found.name)} by torchlssvm {escape(__version__)}; issued with {escape(c.library)}.
The file is the certificate, this page explains it.</footer>"""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_SECURITY_POLICY}">\n'
        f"<title>Certificate of erasure</title>\n<style>{PRINT_CSS}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def certificate_text(found: CertificateFacts) -> str:
    """Write the same for a terminal."""
    parts: list[tuple[str, Sequence[tuple[str, str]]]] = [
        ("", list(found.facts.items())),
        ("what was checked", list(found.checks.items())),
        ("fingerprints (SHA-256)", list(found.fingerprints.items())),
    ]  # fmt: skip
    lines = ["certificate of erasure", found.summary]
    for title, pairs in parts:
        lines += [f"{title}:"] if title else []
        lines += [f"  {name}: {value}" for name, value in pairs]
    lines += ["not covered:", *(f"  {line}" for line in found.not_covered)]
    return "\n".join([*lines, "check it again:", *(f"  {line}" for line in found.commands)])


def time_text(time: str) -> str:
    """A time of the journal, in words."""
    return f"{time[:10]} at {time[11:16]} UTC"


def rows(pairs: Iterable[tuple[str, str]], code: bool = False) -> str:
    """A table of names and values."""
    start, end = ("<code>", "</code>") if code else ("", "")
    lines = [f"<tr><th>{escape(n)}</th><td>{start}{escape(v)}{end}</td></tr>" for n, v in pairs]
    return f"<table><tbody>{''.join(lines)}</tbody></table>"


def table(lines: Sequence[Sequence[str]]) -> str:
    """A table without a heading."""
    cells = ["".join(f"<td>{escape(cell)}</td>" for cell in line) for line in lines]
    return f'<table class="list"><tbody>{"".join(f"<tr>{line}</tr>" for line in cells)}</tbody></table>'
