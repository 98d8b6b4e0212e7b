"""Certificates judged by programs that others wrote: DSSE, in-toto, JSON schema, openssl ts."""

from __future__ import annotations

import base64
import inspect
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from torchlssvm import FixedPoint, LSSVMHead, VerificationError, audit, schema
from torchlssvm.audit.certificate import PREDICATE_TYPE
from torchlssvm.audit.documents import SCHEMAS
from torchlssvm.audit.time_stamp import time_stamp_request
from torchlssvm.cli import main
from torchlssvm.events import Add, Remove
from torchlssvm.store import SampleStore

pytest.importorskip("cryptography", reason="signatures need torchlssvm[audit]")
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of a request, signed by two keys, and its store."""
    folder = tmp_path_factory.mktemp("foreign")
    for name in ("issuer.pem", "next.pem", "stranger.pem"):
        audit.new_key(folder / name)
    x, y = torch.randn(9, 4, generator=torch.Generator().manual_seed(0)), torch.arange(9) % 3
    with SampleStore(
        folder / "store", head=LSSVMHead(4, 3, grid=FixedPoint(8.0), scale="std", normalize="l2")
    ) as store:
        store.apply(Add(list("abcdefghi"), x, y, [f"customer {i // 3}" for i in range(9)]))
        (folder / "old.pt").write_bytes(b"older than the erasure")
        store.register_checkpoint(folder / "old.pt")
        store.requests.open("customer 1", request_id="R-1", reason="Art. 17 – “erasure”")
        done = store.apply(Remove(subject="customer 1"), request="R-1")
        store.write_receipt([done.event_id], folder / "R.receipt.json")
        store.compact()
        certificate = audit.sign(store.certificate(["R-1", done.event_id], folder / "issuer.pem"), folder / "next.pem")
        certificate.save(folder / "R.json")
    return folder


@pytest.fixture
def altered(place: Path, tmp_path: Path) -> Path:
    """The same envelope, with one letter of its payload changed and the signatures kept."""
    envelope = json.loads((place / "R.json").read_text())
    payload = base64.b64decode(envelope["payload"]).replace(b'"samples":6', b'"samples":7')
    envelope["payload"] = base64.b64encode(payload).decode()
    (tmp_path / "altered.json").write_text(json.dumps(envelope))
    return tmp_path / "altered.json"


def statement(file: Path) -> dict[str, Any]:
    return json.loads(base64.b64decode(json.loads(file.read_text())["payload"]))


# -- Python ------------------------------------------------------------------------------------------------------------


def test_the_example_of_the_documentation_with_securesystemslib(
    place: Path, altered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("securesystemslib", reason="needs securesystemslib: pip install -e '.[dev]'")
    from securesystemslib.exceptions import VerificationError as Unverified

    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "certificate.md").read_text(), re.S)
    [example] = [block for block in blocks if "securesystemslib" in block]
    monkeypatch.chdir(place)
    exec(example, {})
    for name in ("issuer", "next"):  # whichever signature the example takes, both hold
        exec(
            example.replace("issuer.pem.pub", f"{name}.pem.pub").replace(
                "next(iter(envelope.signatures))", repr(key_of(place, name))
            ),
            {},
        )
    with pytest.raises(Unverified):
        exec(example.replace("issuer.pem.pub", "stranger.pem.pub"), {})
    with pytest.raises(Unverified):
        exec(example.replace("R.json", str(altered)), {})


def key_of(place: Path, name: str) -> str:
    return audit.key_id(audit.public_key(place / f"{name}.pem.pub"))


def test_the_statement_parses_with_in_toto(place: Path) -> None:
    pytest.importorskip("in_toto_attestation", reason="needs in-toto-attestation: pip install -e '.[dev]'")
    from google.protobuf import json_format
    from in_toto_attestation.v1.statement import Statement
    from in_toto_attestation.v1.statement_pb2 import Statement as Message

    found = Statement.copy_from_pb(json_format.ParseDict(statement(place / "R.json"), Message()))
    found.validate()
    certificate = audit.Certificate.load(place / "R.json")
    assert dict(found.pb.subject[0].digest) == {"sha256": certificate.chain}
    assert found.pb.predicate_type == PREDICATE_TYPE
    assert found.pb.predicate["samples"] == certificate.samples == 6


def keywords(rules: dict[str, Any]) -> set[str]:
    parts = [part for name in ("properties", "$defs") for part in rules.get(name, {}).values()] + rules.get("anyOf", [])
    parts += [rules.get(name, True) for name in ("items", "additionalProperties", "propertyNames")]
    return set(rules).union(*(keywords(part) for part in parts if isinstance(part, dict)))


def test_the_validator_knows_every_keyword_of_the_schemas() -> None:
    used = set().union(*(keywords(json.loads(file.read_text())) for file in SCHEMAS.glob("*.json")))
    known = set(re.findall(r'"([$a-zA-Z]+)"', inspect.getsource(schema)))
    assert "required" in used
    assert used - known <= {"$schema", "$id", "title", "description"}


def test_the_statement_fits_its_schema(place: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema: pip install -e '.[dev]'")
    schema = json.loads((SCHEMAS / "certificate.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    judge = jsonschema.Draft202012Validator(schema)
    good = statement(place / "R.json")
    judge.validate(good)
    for change in (
        {"predicateType": "urn:other"},
        {"more": 1},
        {"subject": []},
        {"predicate": good["predicate"] | {"digest": "0" * 64}},
        {"predicate": {k: v for k, v in good["predicate"].items() if k != "events"}},
        {"predicate": good["predicate"] | {"samples": -1}},
        {"predicate": good["predicate"] | {"commitment": "x"}},
        {"predicate": good["predicate"] | {"requests": [{"id": "R-1"}]}},
    ):
        assert not judge.is_valid(good | change), change
        payload = json.dumps(good | change, sort_keys=True, separators=(",", ":")).encode()
        envelope = {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": "application/vnd.in-toto+json",
            "signatures": [],
        }
        with pytest.raises(VerificationError, match="not a certificate"):
            audit.Certificate.from_dict(envelope)


# -- time stamps -------------------------------------------------------------------------------------------------------

AUTHORITY = """
[tsa]
default_tsa = here
[here]
serial = {folder}/serial
signer_digest = {hash}
default_policy = 1.2.3.4
digests = sha256
accuracy = secs:1
ess_cert_id_chain = yes
ess_cert_id_alg = sha256
"""


def openssl(*arguments: Any, code: int = 0) -> str:
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def make_authority(folder: Path, kind: str, use: str = "critical,timeStamping") -> None:
    """A root, and an authority for time stamps that it has issued, by openssl."""
    new_key = ["-newkey", "rsa:2048"] if kind == "rsa" else ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    openssl("req", "-x509", *new_key, "-nodes", "-keyout", folder / "root.key", "-out", folder / "root.pem", "-subj", "/CN=Root",
            "-days", 30, "-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign")  # fmt: skip
    openssl("req", *new_key, "-nodes", "-keyout", folder / "tsa.key", "-out", folder / "tsa.csr", "-subj", "/CN=Stamps")
    (folder / "tsa.ext").write_text(
        f"basicConstraints=CA:FALSE\nkeyUsage=critical,digitalSignature\nextendedKeyUsage={use}\n"
    )
    openssl("x509", "-req", "-in", folder / "tsa.csr", "-CA", folder / "root.pem", "-CAkey", folder / "root.key", "-set_serial", 2,
            "-days", 30, "-extfile", folder / "tsa.ext", "-out", folder / "tsa.pem")  # fmt: skip
    (folder / "serial").write_text("01")
    (folder / "tsa.cnf").write_text(AUTHORITY.format(folder=folder, hash="sha256" if kind == "rsa" else "sha512"))


def stamp(folder: Path, query: Path, out: Path) -> None:
    openssl("ts", "-reply", "-config", folder / "tsa.cnf", "-queryfile", query, "-inkey", folder / "tsa.key", "-signer",
            folder / "tsa.pem", "-out", out)  # fmt: skip


@pytest.fixture(scope="module", params=["rsa", "ec"])
def authority(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("needs the command openssl")
    folder = tmp_path_factory.mktemp("authority")
    make_authority(folder, request.param)
    return folder


def test_a_time_stamp_beside_the_certificate(
    place: Path, authority: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The request out, the response in, judged by openssl and by verify."""
    cert = tmp_path / "R.json"
    cert.write_bytes((place / "R.json").read_bytes())
    assert main(["certificate", "stamp", str(cert), "--query", str(tmp_path / "R.tsq")]) == 0
    assert "sha256" in openssl("ts", "-query", "-in", tmp_path / "R.tsq", "-text").lower()
    stamp(authority, tmp_path / "R.tsq", tmp_path / "response")
    root = str(authority / "root.pem")
    assert main(["certificate", "stamp", str(cert), "--response", str(tmp_path / "response"), "--authority", root]) == 0
    beside = tmp_path / "R.json.tsr"
    assert "Verification: OK" in openssl("ts", "-verify", "-data", cert, "-in", beside, "-CAfile", root)
    capsys.readouterr()
    verify = ["verify", str(cert), "--public-key", str(place / "issuer.pem.pub"), "--time-stamp", str(beside)]
    assert main([*verify, "--authority", root]) == 0
    assert "CN=Stamps" in capsys.readouterr().out
    assert main(verify) == 0
    assert "NOT checked" in capsys.readouterr().out
    shown = ["certificate", "show", *verify[1:], "--authority", root]
    assert main(shown) == 0
    assert "openssl ts -verify" in capsys.readouterr().out
    # another certificate's stamp, and authorities that are not this one
    other = tmp_path / "other.json"
    replace(audit.Certificate.load(cert), signatures=()).save(other)
    assert main(["verify", str(other), "--allow-unsigned", "--time-stamp", str(beside)]) == 3
    assert "other bytes" in capsys.readouterr().err
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    make_authority(stranger, "ec")
    assert main([*verify, "--authority", str(stranger / "root.pem")]) == 3
    assert "not from an authority that you trust" in capsys.readouterr().err


def test_time_stamps_that_are_none(place: Path, authority: Path, tmp_path: Path) -> None:
    data = (place / "R.json").read_bytes()
    (tmp_path / "q").write_bytes(time_stamp_request(data))
    stamp(authority, tmp_path / "q", tmp_path / "r")
    good, root = (tmp_path / "r").read_bytes(), (authority / "root.pem").read_bytes()
    assert audit.TimeStamp.from_der(good).check(data, root)
    # every byte altered: either no time stamp any more, or one that does not hold; a few bytes are outside of what is signed
    # (version numbers, the unused status text) and change nothing that is believed
    believed, accepted = audit.TimeStamp.from_der(good), 0
    places = range(0, len(good), 1 if len(good) < 1000 else 7)
    for i in places:
        wrong = good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :]
        try:
            found = audit.TimeStamp.from_der(wrong)
            found.check(data, root)
        except VerificationError:
            continue
        accepted += 1
        assert (found.time, found.digest) == (believed.time, believed.digest)
    assert accepted < len(places) / 8
    for junk in (
        b"",
        b"\x30",
        good[:-1],
        good + b"\0",
        good[: len(good) // 2],
        b"\x30\x84\xff\xff\xff\xff",
        bytes(5000),
    ):
        with pytest.raises(VerificationError, match=r"not a time stamp|not granted"):
            audit.TimeStamp.from_der(junk)
    refused = tmp_path / "refused"
    (tmp_path / "q2").write_bytes(time_stamp_request(data)[:-10])
    subprocess.run(["openssl", "ts", "-reply", "-config", authority / "tsa.cnf", "-queryfile", tmp_path / "q2", "-inkey",
                    authority / "tsa.key", "-signer", authority / "tsa.pem", "-out", refused], capture_output=True)  # fmt: skip
    if refused.exists():
        with pytest.raises(VerificationError, match="did not grant"):
            audit.TimeStamp.load(refused)
