"""The erasure service: roles, bad input, an erasure from request to certificate, and kill -9 with a real HTTP client."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from torchlssvm import LSSVMHead, verify
from torchlssvm.audit import Certificate, new_key
from torchlssvm.errors import StoreBusyError
from torchlssvm.events import Add
from torchlssvm.store import SampleStore, new_suppression_key

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")
from fastapi.testclient import TestClient  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
TOKENS = {role: f"{role}-token-0123456789" for role in ("reader", "writer", "officer")}
ROWS = [[3.0, 0.0, 0.1], [0.0, 3.0, 0.2], [2.9, 0.1, 0.0], [0.2, 3.1, 0.1]]
SAMPLES = {
    "ids": ["visit-1", "visit-2", "visit-3", "visit-4"],
    "x": ROWS,
    "labels": ["home", "shop", "home", 1],
    "subjects": ["customer-07", "customer-07", "customer-21", "customer-21"],
}


def bearer(role: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {TOKENS[role]}"}


@pytest.fixture
def recipe(load_recipe: Any) -> Any:
    return load_recipe("erasure_service")


def test_how_it_starts(
    tmp_path: Path,
    recipe: Any,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(recipe.uvicorn, "run", lambda *_, **__: None)
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    arguments = [str(options["store"]), "--outbox", str(options["outbox"]), "--readonly", "--port", "8123"]

    def said(*given: str, code: int | None) -> str:
        if code is None:
            recipe.main(given)
        else:
            with pytest.raises(SystemExit) as ended:
                recipe.main(given)
            assert ended.value.code == code
        return capsys.readouterr().err

    for role in TOKENS:
        monkeypatch.delenv(f"ERASURE_{role.upper()}_TOKEN", raising=False)
    assert "ERASURE_WRITER_TOKEN" in said(*arguments, code=2)
    for role, token in TOKENS.items():
        monkeypatch.setenv(f"ERASURE_{role.upper()}_TOKEN", token)
    assert "no store at" in said(str(tmp_path / "nowhere"), *arguments[1:], code=1)
    line = said(*arguments, code=None)
    assert str(options["store"]) in line
    assert "http://127.0.0.1:8123" in line
    assert "--fingerprint" not in line
    SampleStore(tmp_path / "bound", head=LSSVMHead(3, 2, grid=8.0), fingerprint="network-1").close()
    bound = [str(tmp_path / "bound"), *arguments[1:3]]
    assert "--fingerprint" in said(*bound, code=None)
    monkeypatch.setenv("ERASURE_READER_TOKEN", "short")
    assert "16 characters" in said(*arguments, code=1)


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("TORCHLSSVM_SUPPRESSION_KEY", str(new_suppression_key(tmp_path / "list.key")))
    new_key(tmp_path / "key.pem")
    with SampleStore(tmp_path / "store", head=LSSVMHead(3, 2, grid=8.0)) as store:
        store.name_classes(["home", "shop"])
    return {
        "store": tmp_path / "store",
        "outbox": tmp_path / "outbox",
        "key": tmp_path / "key.pem",
        "suppression_list": tmp_path / "erased.list",
    }


def make_app(recipe: Any, options: dict[str, Any], **more: Any) -> Any:
    service = recipe.Service(**options)
    app = recipe.create_app(service, TOKENS, **more)
    app.state.service = service
    return app


@pytest.fixture
def client(recipe: Any, options: dict[str, Any]) -> Iterator[TestClient]:
    with TestClient(make_app(recipe, options)) as client:
        yield client


def test_features_of_a_network_need_its_fingerprint(recipe: Any, options: dict[str, Any], tmp_path: Path) -> None:
    options["store"] = tmp_path / "bound"
    SampleStore(options["store"], head=LSSVMHead(3, 2, grid=8.0), fingerprint="network-1").close()
    body = {"ids": ["a"], "x": [[1, 2, 3]], "labels": [0], "subjects": ["u"]}
    for fingerprint, status in ((None, 422), ("network-1", 200)):
        with TestClient(make_app(recipe, options | {"fingerprint": fingerprint})) as client:
            answer = client.post("/samples", json=body, headers={"Authorization": f"Bearer {TOKENS['writer']}"})
            assert answer.status_code == status
            assert status == 200 or "--fingerprint" in answer.json()["detail"]


def test_a_service_that_cannot_start_releases_the_store(recipe: Any, options: dict[str, Any], tmp_path: Path) -> None:
    options["store"] = tmp_path / "bound"
    SampleStore(options["store"], head=LSSVMHead(3, 2, grid=8.0), fingerprint="network-1").close()
    with pytest.raises(ValueError, match="network-2"):
        recipe.Service(**options, fingerprint="network-2")
    recipe.Service(**options, fingerprint="network-1").close()
    recipe.Service(**options, fingerprint="network-1").close()


def finished(client: Any, request: str, seconds: float = 60.0) -> dict[str, Any]:
    """The state of a request once it is answered."""
    end = time.monotonic() + seconds
    while True:
        found = client.get(f"/erasures/{request}", headers=bearer("officer")).json()
        if found["state"] == "answered" or time.monotonic() > end:
            assert found["state"] == "answered", found
            return found
        time.sleep(0.02)


def erase(client: Any, subject: str) -> str:
    answer = client.post("/erasures", json={"subject": subject}, headers=bearer("officer"))
    assert answer.status_code == 202, answer.text
    return answer.json()["request"]


def certificate_of(client: Any, request: str) -> Certificate:
    text = client.get(f"/erasures/{request}/certificate", headers=bearer("officer")).text
    return Certificate.from_json(text)


# -- roles -------------------------------------------------------------------------------------------------------------

CALLS = [
    ("POST", "/classify", {"reader", "writer", "officer"}),
    ("GET", "/metrics", {"reader", "writer", "officer"}),
    ("POST", "/samples", {"writer"}),
    ("PATCH", "/samples", {"writer"}),
    ("POST", "/erasures", {"officer"}),
    ("GET", "/erasures/R-1", {"officer"}),
    ("GET", "/erasures/R-1/receipt", {"officer"}),
]


@pytest.mark.parametrize(("method", "path", "allowed"), CALLS)
def test_each_role_does_its_own_work(client: TestClient, method: str, path: str, allowed: set[str]) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer é".encode()}):
        assert client.request(method, path, headers=headers).status_code == 401
    for role in TOKENS:
        status = client.request(method, path, headers=bearer(role)).status_code
        assert (status == 403) == (role not in allowed), role
        assert status != 401


@pytest.mark.parametrize(
    "tokens",
    [{}, {**TOKENS, "officer": "short"}, {**TOKENS, "officer": TOKENS["reader"]}, {"reader": TOKENS["reader"]}],
)
def test_tokens_are_long_and_different(recipe: Any, tokens: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="token"):
        recipe.create_app(None, tokens)


# -- a life ------------------------------------------------------------------------------------------------------------


def test_learn_classify_relabel_erase_certify(client: TestClient, options: dict[str, Any]) -> None:
    assert (
        client.post("/classify", json={"x": ROWS}, headers=bearer("reader")).status_code == 409
    )  # nothing learned yet
    learned = client.post("/samples", json=SAMPLES, headers=bearer("writer"))
    assert learned.json() == {"learned": 4, "held_before": 0}
    assert client.post("/samples", json=SAMPLES, headers=bearer("writer")).json() == {"learned": 0, "held_before": 4}
    found = client.post("/classify", json={"x": ROWS}, headers=bearer("reader")).json()
    assert found["classes"] == ["home", "shop", "home", "shop"]
    assert len(found["scores"][0]) == 2

    change = {"ids": ["visit-3"], "labels": ["shop"]}
    assert client.patch("/samples", json=change, headers=bearer("writer")).json() == {"relabelled": 1}
    request = erase(client, "customer-07")
    assert finished(client, request)["problem"] is None
    receipt = client.get(f"/erasures/{request}/receipt", headers=bearer("officer")).json()
    assert receipt["events"][0]["ids"] == ["visit-1", "visit-2"]

    store = client.app.state.service.store
    assert store.find(subject="customer-07") == []
    never = LSSVMHead(3, 2, grid=8.0).add(torch.tensor(ROWS[2:]), torch.tensor([1, 1]))
    assert store.head.digest() == never.digest()
    certificate = certificate_of(client, request)
    assert verify(certificate, store=store, public_key=f"{options['key']}.pub")

    erased = {name: values[:2] for name, values in SAMPLES.items()}
    back = client.post("/samples", json=erased, headers=bearer("writer"))
    assert back.status_code == 409
    assert back.json()["erased"] == ["visit-1", "visit-2"]
    assert "--" not in back.json()["detail"]  # a client has no command line
    assert store.find(subject="customer-07") == []
    assert client.post("/erasures", json={"subject": "customer-07"}, headers=bearer("officer")).status_code == 404
    metrics = client.get("/metrics", headers=bearer("reader")).text
    assert "store_samples 2.0" in metrics
    assert "erasures_total 1.0" in metrics
    assert "erasure_requests_open 0.0" in metrics
    assert client.get("/health").json()["status"] == "ok"


def test_texts(recipe: Any, options: dict[str, Any]) -> None:
    def counts(texts: list[Any]) -> torch.Tensor:
        return torch.tensor([[text.count(word) for word in ("sofa", "till", "the")] for text in texts]).double()

    with TestClient(make_app(recipe, options, featurize=counts)) as client:
        texts = ["the sofa", "the till", "a sofa sofa", "till till"]
        assert client.post("/samples", json={**SAMPLES, "x": texts}, headers=bearer("writer")).status_code == 200
        found = client.post("/classify", json={"x": ["my sofa"]}, headers=bearer("reader")).json()
        assert found["classes"] == ["home"]


# -- bad input ---------------------------------------------------------------------------------------------------------

BAD_ROWS = [
    "[]", "[[]]", "[[1, 2]]", "[[NaN, 1, 2]]", "[[1e999, 1, 2]]", "[[1, 2, 3], [1, 2]]", '[["a", 1, 2]]', "[1, 2, 3]",
    "[[true, 1, 2]]", "[[[1], 2, 3]]", "{}", "NaN", "null", "[null]", "[[1" + "0" * 400 + ", 1, 2]]",
    "[[1" + "0" * 5000 + ", 1, 2]]", "[" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("rows", BAD_ROWS, ids=lambda rows: rows[:24])
def test_bad_rows_are_refused(client: TestClient, rows: str) -> None:
    client.post("/samples", json=SAMPLES, headers=bearer("writer"))
    answer = client.post("/classify", content=f'{{"x": {rows}}}', headers=bearer("reader"))
    assert answer.status_code in (400, 422)
    assert answer.json()["detail"]
    one = f'{{"ids": ["n"], "labels": [0], "subjects": ["s"], "x": {rows}}}'
    assert client.post("/samples", content=one, headers=bearer("writer")).status_code in (400, 422)
    assert len(client.app.state.service.store) == 4


BAD_SAMPLES = [
    ({"labels": ["home", "shop", "home", "barn"]}, 422, "barn"),
    ({"labels": [0, 1, 0, 2]}, 422, "2"),
    ({"labels": [0, 1, 0]}, 422, "length"),
    ({"ids": ["a", "a", "b", "c"]}, 422, "twice"),
    ({"ids": []}, 422, "empty"),
    ({"subjects": [None] * 4}, 422, "subjects"),
    ({"x": [[100.0, 0, 0]] * 4}, 422, "100"),
    ({"ids": ["v\u0000", "b", "c", "d"]}, 422, "NUL"),
    ({"more": 1}, 422, "more"),
]


@pytest.mark.parametrize(("change", "status", "fact"), BAD_SAMPLES)
def test_bad_samples_are_refused(client: TestClient, change: dict[str, Any], status: int, fact: str) -> None:
    answer = client.post("/samples", json=SAMPLES | change, headers=bearer("writer"))
    assert answer.status_code == status
    assert fact in json.dumps(answer.json())
    assert len(client.app.state.service.store) == 0


def test_wrong_corrections_are_refused(client: TestClient) -> None:
    client.post("/samples", json=SAMPLES, headers=bearer("writer"))
    unknown = client.patch("/samples", json={"ids": ["visit-9"], "labels": [0]}, headers=bearer("writer"))
    assert unknown.status_code == 404
    assert "visit-9" in unknown.json()["detail"]
    other = client.post("/samples", json=SAMPLES | {"labels": [1, 1, 1, 1]}, headers=bearer("writer"))
    assert other.status_code == 422
    assert "visit-1" in other.json()["detail"]
    nobody = client.post("/erasures", json={"subject": "nobody"}, headers=bearer("officer"))
    assert nobody.status_code == 404
    named = {"subject": "customer-07", "reason": "customer-07 wrote to us"}
    assert client.post("/erasures", json=named, headers=bearer("officer")).status_code == 422
    for path in ("/erasures/R-0", "/erasures/..%2f..%2fkey/certificate", "/erasures/R-0/key"):
        assert client.get(path, headers=bearer("officer")).status_code == 404


# -- many at once, and failures ----------------------------------------------------------------------------------------


def learn_one(client: Any, k: int) -> int:
    sample = {"ids": [f"s{k}"], "x": [[k % 2 * 3.0, 1.0, k / 100]], "labels": [k % 2], "subjects": [f"person-{k % 7}"]}
    return client.post("/samples", json=sample, headers=bearer("writer")).status_code


def test_learning_and_erasing_at_the_same_time(client: TestClient) -> None:
    for k in range(14):
        assert learn_one(client, k) == 200

    def ask(k: int) -> Any:
        return client.post("/erasures", json={"subject": f"person-{k % 3}"}, headers=bearer("officer"))

    with ThreadPoolExecutor(8) as pool:
        learning = [pool.submit(learn_one, client, k) for k in range(14, 70)]
        asked = [pool.submit(ask, k) for k in range(6)]  # each person twice
    answers = [future.result() for future in asked]
    assert {answer.status_code for answer in answers} <= {202, 404}  # 404: the first request of the person is finished
    requests = {answer.json()["request"] for answer in answers if answer.status_code == 202}
    assert len(requests) == 3
    for request in requests:
        finished(client, request)
    assert {future.result() for future in learning} <= {200, 409}
    store = client.app.state.service.store
    assert not {"person-0", "person-1", "person-2"} & set(store.subjects())
    assert store.recompute()[1] == store.head.digest()


def test_one_writer_and_a_reader_that_follows(client: TestClient, recipe: Any, options: dict[str, Any]) -> None:
    with pytest.raises(StoreBusyError), TestClient(make_app(recipe, options)):
        pass
    with TestClient(make_app(recipe, options | {"readonly": True})) as reader:
        assert reader.post("/samples", json=SAMPLES, headers=bearer("writer")).status_code == 405
        client.post("/samples", json=SAMPLES, headers=bearer("writer"))
        written = client.get("/health").json()["position"]
        end = time.monotonic() + 30
        while reader.get("/health").json()["position"] < written and time.monotonic() < end:
            time.sleep(0.02)
        assert reader.post("/classify", json={"x": ROWS[:1]}, headers=bearer("reader")).json()["classes"] == ["home"]


@pytest.mark.parametrize("step", ["erase", "certify", "finish_erasures"])
def test_an_unexpected_error_shows_in_health_and_in_the_log(
    client: TestClient, recipe: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    person = SAMPLES["subjects"][2]

    def fail(*_: Any) -> None:
        raise KeyError(person)

    monkeypatch.setattr(recipe, "SECONDS_BETWEEN_TRIES", 0.05)
    client.post("/samples", json=SAMPLES, headers=bearer("writer"))
    with monkeypatch.context() as broken:
        broken.setattr(client.app.state.service, step, fail)
        request = erase(client, person)
        client.post("/samples", json=SAMPLES, headers=bearer("writer"))  # after the attempt, which was queued before
        assert client.get("/health").json()["status"] == "failing"
    assert "KeyError" in caplog.text
    assert person not in caplog.text
    client.app.state.service.thread.submit(client.app.state.service.catch_up)
    finished(client, request)
    assert client.get("/health").json()["status"] == "ok"


def test_a_request_whose_samples_others_have_erased_is_answered(recipe: Any, options: dict[str, Any]) -> None:
    with SampleStore(options["store"]) as store:
        store.apply(Add(SAMPLES["ids"], torch.tensor(ROWS), [0, 1, 0, 1], SAMPLES["subjects"]))
        request = store.requests.open("customer-07", operator=recipe.OPERATOR).id
        store.erase("customer-07")
    with TestClient(make_app(recipe, options)) as client:
        assert "without this request" in finished(client, request)["answer"]
        assert client.get("/health").json()["status"] == "ok"
        assert client.get(f"/erasures/{request}/certificate", headers=bearer("officer")).status_code == 404
    assert not [file for file in options["store"].iterdir() if b"customer-07" in file.read_bytes()]


def test_requests_of_others_are_left_alone(recipe: Any, options: dict[str, Any]) -> None:
    with SampleStore(options["store"]) as store:
        store.apply(Add(SAMPLES["ids"], torch.tensor(ROWS), [0, 1, 0, 1], SAMPLES["subjects"]))
        request = store.requests.open("customer-07", operator="dpo")
    with TestClient(make_app(recipe, options)) as client:
        assert client.app.state.service.store.requests.get(request.id).state == "received"
        assert client.get(f"/erasures/{request.id}", headers=bearer("officer")).status_code == 404


# -- a real process ----------------------------------------------------------------------------------------------------


class Process:
    """The service as a process, on a free port."""

    def __init__(self, options: dict[str, Any]):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        service = str(ROOT / "recipes" / "erasure_service.py")
        command = [sys.executable, service, str(options["store"]), "--port", str(port)]
        for name in ("outbox", "key", "suppression_list"):
            command += [f"--{name.replace('_', '-')}", str(options[name])]
        tokens = {f"ERASURE_{role.upper()}_TOKEN": token for role, token in TOKENS.items()}
        self.process = subprocess.Popen(command, env={**os.environ, **tokens, "PYTHONPATH": str(ROOT)})
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        end = time.monotonic() + 120
        while True:
            try:
                self.client.get("/health")
                return
            except httpx.TransportError:
                assert self.process.poll() is None, "the service ended"
                assert time.monotonic() < end, "the service does not answer"
                time.sleep(0.05)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.client.close()


@pytest.fixture
def filled(options: dict[str, Any]) -> dict[str, Any]:
    n = 4000
    with SampleStore(options["store"]) as store:
        x, y = torch.randn(n, 3).clamp(-6, 6), torch.arange(n) % 2
        store.apply(Add(range(n), x, y, [f"person-{k // 100}" for k in range(n)]))
    return options


@pytest.mark.slow
def test_killed_at_any_moment_after_acknowledgement(filled: dict[str, Any]) -> None:
    states = []
    for k, delay in enumerate([0.0, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08]):
        running = Process(filled)
        try:
            request = erase(running.client, f"person-{k}")
            time.sleep(delay)
            running.kill()
            with SampleStore(filled["store"], readonly=True) as reader:
                states.append(reader.requests.get(request).state)
            running = Process(filled)
            check_erased(running, filled, request, f"person-{k}")
        finally:
            running.kill()
    print("killed in the states", states)
    assert set(states) - {"answered"}


def check_erased(running: Process, options: dict[str, Any], request: str, subject: str) -> None:
    """The request is answered, the certificate holds, and the subject can neither be found nor come back."""
    finished(running.client, request)
    certificate = certificate_of(running.client, request)
    with SampleStore(options["store"], readonly=True) as store:
        assert verify(certificate, store=store, public_key=f"{options['key']}.pub")
        assert store.find(subject=subject) == []
    sample = {"ids": ["new"], "x": [[1.0, 1.0, 1.0]], "labels": [0], "subjects": [subject]}
    assert running.client.post("/samples", json=sample, headers=bearer("writer")).status_code == 409


def test_an_erasure_that_fails_is_repeated(
    client: TestClient, recipe: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "SECONDS_BETWEEN_TRIES", 0.05)
    client.post("/samples", json=SAMPLES, headers=bearer("writer"))
    options["outbox"].rename(options["outbox"].with_name("unmounted"))
    request = erase(client, "customer-21")
    end = time.monotonic() + 30
    while client.get("/health").json()["status"] == "ok" and time.monotonic() < end:
        time.sleep(0.02)
    found = client.get(f"/erasures/{request}", headers=bearer("officer")).json()
    assert "outbox" in found["problem"]
    assert client.get(f"/erasures/{request}/certificate", headers=bearer("officer")).status_code == 409
    options["outbox"].with_name("unmounted").rename(options["outbox"])
    assert finished(client, request)["problem"] is None
    assert client.get("/health").json()["status"] == "ok"


@pytest.mark.slow
def test_sigterm_lets_the_service_finish_its_erasures(filled: dict[str, Any]) -> None:
    running = Process(filled)
    try:
        requests = [erase(running.client, f"person-{k}") for k in range(5)]
        running.process.send_signal(signal.SIGTERM)
        running.process.wait(60)
    finally:
        running.kill()
    with SampleStore(filled["store"], readonly=True) as store:
        assert {store.requests.get(request).state for request in requests} == {"answered"}
        assert len(store) == 3500
    assert all((filled["outbox"] / f"{request}.certificate.json").exists() for request in requests)


@pytest.mark.slow
def test_killed_between_acknowledgement_and_compaction(filled: dict[str, Any]) -> None:
    running = Process(filled)
    try:
        with SampleStore(filled["store"], readonly=True) as reader, reader.view():
            assert len(reader) == 4000  # this view keeps the service from finishing the compaction
            request = erase(running.client, "person-3")
            time.sleep(1.0)
            running.kill()
        with SampleStore(filled["store"], readonly=True) as reader:
            assert reader.requests.get(request).skipped[-2:] == ["compacted", "certified"]
        running = Process(filled)
        check_erased(running, filled, request, "person-3")
    finally:
        running.kill()


@pytest.mark.slow
@pytest.mark.skipif(os.getloadavg()[0] > 1, reason="a measurement: it needs cores that nobody else uses")
def test_predictions_stay_fast_while_people_are_erased(load_recipe: Any) -> None:
    benchmark = load_recipe("benchmarks.erasure_service")
    found = benchmark.main([])
    assert found["erasures"] >= 10
    assert found["ratio"] <= benchmark.ASKED
