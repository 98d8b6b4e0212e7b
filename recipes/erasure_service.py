"""Serve one store over HTTP: classify, learn, relabel, erase by subject, and fetch the certificate.

    export ERASURE_READER_TOKEN=... ERASURE_WRITER_TOKEN=... ERASURE_OFFICER_TOKEN=...   # openssl rand -hex 24
    python recipes/erasure_service.py STORE --outbox OUTBOX --key key.pem --suppression-list erased.list --port 8000
    python recipes/erasure_service.py STORE --outbox OUTBOX --readonly --port 8001       # as many of these as you like

One thread works with the store. Predictions come from a copy of the head, which that thread replaces after each change, so
predictions never wait for a change. A process with ``--readonly`` follows the store and only answers predictions.

The service writes a request for erasure to the store, on disk, before it acknowledges the request. It then erases the samples,
writes the receipt, compacts the store, writes the certificate and closes the request. If the service crashes, it completes the
missing steps at the next start.
"""

import argparse
import asyncio
import copy
import fcntl
import hmac
import logging
import os
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, ConfigDict

from torchlssvm.errors import NotFittedError, RemovalError, StoreBusyError, StoreDiskError, StoreError, SuppressedError
from torchlssvm.events import Add, Relabel
from torchlssvm.store import ErasureRequest, SampleStore
from torchlssvm.wording import counted

log = logging.getLogger("erasure_service")

ROLES = ("reader", "writer", "officer")
OPERATOR = "erasure service"  # marks the requests of this service; those from the command line are left alone
SECONDS_BETWEEN_TRIES = 5.0  # after which an erasure that failed is tried again
SECONDS_BETWEEN_LOOKS = 0.2  # after which a process that only reads looks for changes
STATUS_OF_ERROR = {
    SuppressedError: 409,
    NotFittedError: 409,
    RemovalError: 404,
    StoreBusyError: 503,
    StoreDiskError: 507,
    StoreError: 500,
    ValueError: 422,
}


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Unclassified(Body):
    """Rows of features, or other inputs that ``featurize`` accepts, such as texts."""

    x: list[Any]


class NewLabels(Body):
    """Samples by their ids, with names or numbers of classes."""

    ids: list[str]
    labels: list[str | int]


class Samples(NewLabels, Unclassified):
    """Samples to learn, each with the subject that it belongs to."""

    subjects: list[str]


class Person(Body):
    """The subject to erase. The reason is kept after the erasure, so it must not name the subject."""

    subject: str
    reason: str = "Art. 17 GDPR"


@dataclass(frozen=True)
class Published:
    """The state of the store from which the service answers."""

    head: Any
    classes: list[str]
    position: int
    requests: dict[str, ErasureRequest]


class Service:
    """The store, the only thread that works with it, and the last published state."""

    def __init__(
        self,
        store: Path,
        outbox: Path,
        *,
        key: Path | None = None,
        suppression_list: Path | None = None,
        readonly: bool = False,
        fingerprint: str | None = None,
    ):
        self.outbox, self.key, self.readonly, self.fingerprint = outbox, key, readonly, fingerprint
        self.thread = ThreadPoolExecutor(1, "store")
        self.problems: dict[str, str] = {}  # by the id of a request, or by what was attempted
        self.metrics = CollectorRegistry()
        self.prediction_seconds = Histogram("classify_seconds", "Time of a prediction", registry=self.metrics)
        self.samples = Gauge("store_samples", "Samples that the classifier has learned", registry=self.metrics)
        self.open = Gauge("erasure_requests_open", "Requests that are not answered", registry=self.metrics)
        self.overdue = Gauge("erasure_requests_overdue", "Open requests whose last day is past", registry=self.metrics)
        self.erasures = Counter("erasures", "Requests erased, compacted and certified", registry=self.metrics)
        self.failures = Counter("erasure_failures", "Attempts that failed", registry=self.metrics)
        with ExitStack() as opened:
            if readonly:
                self.store = opened.enter_context(SampleStore(store, readonly=True))
                self.publish()
            else:
                opened.callback(os.close, lock_for_writing(store))
                outbox.mkdir(mode=0o700, parents=True, exist_ok=True)
                self.store = opened.enter_context(
                    SampleStore(store, suppression_list=suppression_list, fingerprint=fingerprint)
                )
                self.publish()
                self.catch_up()
                if suppression_list is not None and self.store.use_suppression_list(suppression_list):
                    raise StoreError(f"{store} holds suppressed samples: run torchlssvm suppression apply first")
            self.opened = opened.pop_all()

    def close(self) -> None:
        """Finish the waiting work, then close the store."""
        self.thread.shutdown()
        self.opened.close()

    def publish(self) -> None:
        """Replace the state from which the service answers."""
        with self.store.view():
            head, position = copy.deepcopy(self.store.head), self.store.position
            requests = {request.id: request for request in self.store.requests.all()}
            published = Published(head, self.store.classes, position, requests)
        if head.n:
            head.predict(torch.zeros(1, head.in_features))  # solves here, so that the first caller does not wait
        self.published = published
        self.samples.set(head.n)
        self.open.set(sum(request.open for request in requests.values()))
        self.overdue.set(sum(request.overdue for request in requests.values()))

    def classify(self, x: torch.Tensor) -> dict[str, Any]:
        """Classes and scores of rows (B, J)."""
        now = self.published
        labels = now.head.predict(x).tolist()
        classes = [now.classes[label] if now.classes else label for label in labels]
        return {"classes": classes, "scores": now.head(x).tolist(), "position": now.position}

    # -- changes, in the thread of the store ---------------------------------------------------------------------------

    async def change(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Run some work on the store's thread and publish the result."""
        if self.readonly:
            raise HTTPException(405, "this process only reads: ask the one that writes")

        def work_and_publish() -> Any:
            result = work(*arguments)
            self.publish()
            return result

        return await asyncio.get_running_loop().run_in_executor(self.thread, work_and_publish)

    @property
    def needs_fingerprint(self) -> bool:
        """True if the store belongs to a network and the service does not know whether clients use this network."""
        return self.fingerprint is None and self.store.fingerprint is not None

    def learn(self, given: Samples, x: torch.Tensor) -> dict[str, int]:
        """Learn the samples that are not in the store yet, so that a client can safely repeat a call."""
        if self.needs_fingerprint:
            raise ValueError(
                "this store accepts only features of its network: start the service with --fingerprint and the fingerprint "
                "of the network that computes the features. Nothing was changed."
            )
        event = Add(ids=given.ids, x=x, y=self.store.labels(given.labels), subject=given.subjects)
        new = self.store.without_held(event)
        learned = 0 if new is None else self.store.apply(new).samples
        return {"learned": learned, "held_before": len(given.ids) - learned}

    def relabel(self, given: NewLabels) -> dict[str, int]:
        """Correct labels."""
        event = Relabel(ids=given.ids, y=self.store.labels(given.labels))
        return {"relabelled": self.store.apply(event).samples}

    def open_request(self, person: Person) -> ErasureRequest:
        """Open a request, or return the open request of this subject. The request is durable when this returns."""
        for request in self.open_requests():
            if person.subject in request.named("subject"):
                return request
        if not self.store.find(subject=person.subject):
            raise RemovalError("nothing is held of this subject")
        request = self.store.requests.open(person.subject, reason=person.reason, operator=OPERATOR)
        self.thread.submit(self.catch_up)
        return request

    # -- erasures ------------------------------------------------------------------------------------------------------

    def open_requests(self) -> list[ErasureRequest]:
        """The requests of this service that are not answered."""
        return [request for request in self.store.requests.all() if request.open and request.operator == OPERATOR]

    def catch_up(self) -> None:
        """Finish open requests and take over changes of other processes. Never raises. ``/health`` shows failures."""
        self.attempt("catching up", self.follow if self.readonly else self.finish_erasures)

    def follow(self) -> None:
        """Publish if another process has changed the store."""
        if self.store.position != self.published.position:
            self.publish()

    def finish_erasures(self) -> None:
        """Complete the missing steps of all open requests: erase, then compact and certify. One compaction serves all."""
        requests = self.open_requests()
        self.problems = {request.id: self.problems[request.id] for request in requests if request.id in self.problems}
        held = [request for request in requests if request.events or self.store.requests.still_held(request)]
        erased = [request for request in held if self.attempt(request.id, self.erase, request)]
        self.follow()  # predictions no longer use the erased samples
        for request in erased:
            if self.attempt(request.id, self.certify, request):
                self.erasures.inc()
        for request in requests:
            if request not in held:
                self.attempt(request.id, self.answer_without_samples, request)
        if requests:
            self.publish()

    def attempt(self, what: str, step: Callable[..., None], *arguments: Any) -> bool:
        """Run a step. If it fails, keep the message for the officer. It is not logged, because it could name a person."""
        try:
            step(*arguments)
        except Exception as error:
            self.problems[what] = f"{type(error).__name__}: {error}"
            self.failures.inc()
            place = "".join(traceback.format_tb(error.__traceback__))
            log.error("%s: %s failed with %s, will be repeated\n%s", what, step.__name__, type(error).__name__, place)
            return False
        self.problems.pop(what, None)
        return True

    def erase(self, request: ErasureRequest) -> None:
        """Remove the samples and write the receipt."""
        self.store.erase(request=request.id, receipt=self.document(request, "receipt"))

    def certify(self, request: ErasureRequest) -> None:
        """Compact, unless that was done since the erasure, then write the certificate and close the request."""
        receipt, certificate = self.document(request, "receipt"), self.document(request, "certificate")
        done = self.store.erase(
            request=request.id, receipt=receipt, compact=True, certificate=certificate, key=self.key
        )
        if done.unfinished is not None:
            raise done.unfinished
        self.store.requests.close(request.id)

    def answer_without_samples(self, request: ErasureRequest) -> None:
        """Answer a request whose samples somebody else has erased, e.g. on the command line."""
        self.store.compact()  # destroys their bytes
        self.store.requests.close(request.id, "the samples were erased without this request")
        self.store.compact()  # replaces the name in the request

    def document(self, request: ErasureRequest, kind: str) -> Path:
        """The file of the receipt or the certificate of a request."""
        return self.outbox / f"{request.id}.{kind}.json"

    async def keep_up(self) -> None:
        """Catch up repeatedly."""
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS if self.readonly else SECONDS_BETWEEN_TRIES)
            await asyncio.get_running_loop().run_in_executor(self.thread, self.catch_up)

    # -- what the officer sees -----------------------------------------------------------------------------------------

    def find_request(self, request_id: str) -> ErasureRequest:
        """The last published state of a request, or 404 if there is no such request."""
        request = self.published.requests.get(request_id)
        if request is None or request.operator != OPERATOR:
            raise HTTPException(404, "there is no such request")
        return request

    def describe(self, request: ErasureRequest) -> dict[str, Any]:
        """A request as the officer sees it."""
        known = {"request": request.id, "state": request.state, "due": request.due, "steps": request.steps}
        return known | {"answer": request.answer, "problem": self.problems.get(request.id)}


def lock_for_writing(store: Path) -> int:
    """Lock a file beside the store, so that only one process writes. The lock ends with the process, even after a crash."""
    file = os.open(f"{store.absolute()}.writer", os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise StoreBusyError(f"another service writes to {store}: start this one with --readonly") from None
    return file


def feature_rows(x: list[Any]) -> torch.Tensor:
    """Rows of numbers as a tensor (B, J). To serve texts or images, pass ``create_app`` a function that calls your network."""
    if not all(isinstance(row, list) and all(type(v) in (int, float) for v in row) for row in x):
        raise ValueError("x must be a list of rows, each a list of numbers")
    if len({len(row) for row in x}) != 1:
        raise ValueError("x must have one row or more, all of the same length")
    try:
        return torch.tensor([[float(v) for v in row] for row in x], dtype=torch.float64)
    except OverflowError as error:
        raise ValueError("x holds a number beyond the range of float64") from error


class RoleCheck:
    """A dependency that lets some roles in: 401 without a valid token, 403 for another role."""

    def __init__(self, tokens: Mapping[str, str], *allowed: str):
        self.tokens = {role: tokens.get(role, "").encode() for role in ROLES}
        self.allowed = allowed
        if min(map(len, self.tokens.values())) < 16 or len(set(self.tokens.values())) < len(ROLES):
            raise ValueError(f"give each of {', '.join(ROLES)} a token of its own with at least 16 characters")

    async def __call__(
        self, given: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]
    ) -> None:
        token = b"" if given is None else given.credentials.encode()
        role = next((role for role, known in self.tokens.items() if hmac.compare_digest(token, known)), None)
        if role is None:
            raise HTTPException(401, "a valid bearer token is needed", {"WWW-Authenticate": "Bearer"})
        if role not in self.allowed:
            raise HTTPException(403, f"this needs the token of: {', '.join(self.allowed)}")


async def refuse_body(_: Request, error: Exception) -> JSONResponse:
    """Report what is wrong with a request body, by the names of its fields. Values are not quoted: they may name a person."""
    assert isinstance(error, RequestValidationError)
    return JSONResponse({"detail": [{"where": e["loc"], "problem": e["msg"]} for e in error.errors()]}, 422)


async def refuse(_: Request, error: Exception) -> JSONResponse:
    """Answer with the library's message and the HTTP status of the first matching error class."""
    status = next(status for kind, status in STATUS_OF_ERROR.items() if isinstance(error, kind))
    if isinstance(error, SuppressedError):  # the library's message names its options, which a client does not have
        said = "some of these samples were erased on request and stay erased: leave them out. Nothing was changed."
        return JSONResponse({"detail": said, "erased": list(error.ids)}, status)
    return JSONResponse({"detail": str(error)}, status)


def create_app(
    service: Service, tokens: Mapping[str, str], featurize: Callable[[list[Any]], torch.Tensor] = feature_rows
) -> FastAPI:
    """Create the application, which closes the service when it ends. ``tokens`` maps roles to tokens."""
    everybody = [Depends(RoleCheck(tokens, *ROLES))]
    writer = [Depends(RoleCheck(tokens, "writer"))]
    officer = [Depends(RoleCheck(tokens, "officer"))]

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(service.keep_up())
        yield
        task.cancel()
        await asyncio.to_thread(service.close)

    app = FastAPI(title="Erasure service", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(RequestValidationError, refuse_body)
    for kind in STATUS_OF_ERROR:
        app.add_exception_handler(kind, refuse)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Report repeated failures, for example of an erasure. Needs no token."""
        return {"status": "failing" if service.problems else "ok", "position": service.published.position}

    @app.get("/metrics", dependencies=everybody)
    async def metrics() -> Response:
        """Metrics in the text format of Prometheus."""
        return Response(generate_latest(service.metrics), media_type="text/plain; version=0.0.4")

    @app.post("/classify", dependencies=everybody)
    def classify(given: Unclassified) -> dict[str, Any]:
        """Classes and scores of new samples."""
        with service.prediction_seconds.time():
            return service.classify(featurize(given.x))

    @app.post("/samples", dependencies=writer)
    async def learn(given: Samples) -> dict[str, int]:
        """Learn samples. They are durable when this returns, and later predictions use them."""
        x = await asyncio.to_thread(featurize, given.x)
        return await service.change(service.learn, given, x)

    @app.patch("/samples", dependencies=writer)
    async def relabel(given: NewLabels) -> dict[str, int]:
        """Correct labels."""
        return await service.change(service.relabel, given)

    @app.post("/erasures", status_code=202, dependencies=officer)
    async def erase(person: Person) -> dict[str, Any]:
        """Open a request for erasure. The request is durable when this returns. The service then carries it out."""
        return service.describe(await service.change(service.open_request, person))

    @app.get("/erasures/{request_id}", dependencies=officer)
    async def state(request_id: str) -> dict[str, Any]:
        """The state of a request. "answered" means erased, compacted and certified, unless ``answer`` says otherwise."""
        return service.describe(service.find_request(request_id))

    @app.get("/erasures/{request_id}/{kind}", dependencies=officer)
    async def document(request_id: str, kind: str) -> FileResponse:
        """The certificate, which you may hand out, or the receipt, which names the subject."""
        request = service.find_request(request_id)
        file = service.document(request, kind)
        if kind not in ("certificate", "receipt") or not (request.open or file.exists()):
            raise HTTPException(404, f"this request has no {kind}. {request.answer}")
        if request.open:
            raise HTTPException(409, f"the request is not finished yet: {request.state}")
        return FileResponse(file, media_type="application/json")

    return app


def main(argv: Sequence[str] | None = None) -> None:
    """Serve a store that ``torchlssvm init`` or ``SampleStore`` made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--outbox", type=Path, required=True, help="folder of certificates and receipts")
    parser.add_argument("--key", type=Path, help="private key that signs certificates")
    parser.add_argument("--suppression-list", type=Path, help="needs its key in TORCHLSSVM_SUPPRESSION_KEY")
    parser.add_argument("--fingerprint", help="of the network whose features clients send; see torchlssvm stats STORE")
    parser.add_argument("--readonly", action="store_true", help="predictions only, beside a process that writes")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all (default: %(default)s)"
    )
    parser.add_argument("--port", type=int, default=8000, help="(default: %(default)s)")
    o = parser.parse_args(argv)
    variables = {role: f"ERASURE_{role.upper()}_TOKEN" for role in ROLES}
    tokens = {role: os.environ.get(variable, "") for role, variable in variables.items()}
    missing = [variable for role, variable in variables.items() if not tokens[role]]
    if missing:
        parser.error(f"set {', '.join(missing)} in the environment, e.g. export {missing[0]}=$(openssl rand -hex 24)")
    try:
        RoleCheck(tokens)
        service = Service(
            o.store,
            o.outbox,
            key=o.key,
            suppression_list=o.suppression_list,
            readonly=o.readonly,
            fingerprint=o.fingerprint,
        )
    except (StoreError, ValueError, OSError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    now, does = service.published, "predictions only" if o.readonly else "learns and erases"
    if service.needs_fingerprint and not o.readonly:
        does = "erases, but cannot learn samples until you start it with --fingerprint"
    print(
        f"{o.store}: {counted(int(now.head.n), 'sample')}, {does}, at http://{o.host}:{o.port}",
        file=sys.stderr,
        flush=True,
    )
    sys.setswitchinterval(0.0005)  # seconds; at Python's 0.005 a compaction delays predictions ten times as long
    uvicorn.run(create_app(service, tokens), host=o.host, port=o.port, log_level="warning")


if __name__ == "__main__":
    main()
