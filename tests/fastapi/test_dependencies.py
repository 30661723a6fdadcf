"""Leadership, require_leader and leader_health, as a client of the application sees them."""

# Without postponed annotations: FastAPI could not see the local names in them.

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import anyio
import pytest
import trio.testing
from fastapi import APIRouter, Depends, FastAPI, Request, WebSocket
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from tests.core.fake import FakeService
from tests.fastapi.conftest import Journal
from volcano_locks import AsyncHold, AsyncLockClient, ConfigurationError, LockClient
from volcano_locks.fastapi import (
    Leadership,
    leader_health,
    leader_lifespan,
    require_leader,
)
from volcano_locks.testing import ManualClock

LONG = 60


@pytest.fixture(autouse=True)
def locks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LockClient]:
    url = f"local:{tmp_path / 'locks.db'}"
    monkeypatch.setenv("VOLCANO_API_URL", url)
    with LockClient(api_url=url) as client:
        yield client


class Worker:
    """A singleton for one test, and the moment at which it leads."""

    def __init__(self) -> None:
        self.leads = threading.Event()

    async def __call__(self, lease: AsyncHold) -> None:
        self.leads.set()
        await anyio.sleep_forever()


def routes(router: Any, key: str | None = None) -> None:
    Leads = Annotated[Leadership, Depends(Leadership.of(key) if key else Leadership)]
    required = require_leader.of(key) if key else require_leader

    @router.get("/who")
    async def who(leadership: Leads) -> dict[str, Any]:
        lease = leadership.lease
        return {
            "key": leadership.key,
            "is_leader": leadership.is_leader,
            "fencing_token": lease and lease.fencing_token,
            "overdue": leadership.overdue,
        }

    @router.post("/flush")
    async def flush(lease: Annotated[AsyncHold, Depends(required)]) -> int:
        lease.check()
        return lease.fencing_token

    @router.websocket("/live")
    async def live(socket: WebSocket, leadership: Leads) -> None:
        await socket.accept()
        await socket.send_json(leadership.is_leader)
        await socket.close()


def application(worker: Worker) -> FastAPI:
    app = FastAPI(lifespan=leader_lifespan(worker, key="job"))
    routes(app)
    app.add_api_route("/healthz", leader_health)
    return app


def test_where_the_leader_runs_requests_get_its_live_lease() -> None:
    worker = Worker()
    with TestClient(application(worker)) as client:
        assert worker.leads.wait(LONG)
        answer = client.get("/who").json()
        assert answer["is_leader"] is True
        assert answer["key"] == "job"
        assert client.post("/flush").json() == answer["fencing_token"] > 0
        assert client.get("/healthz").json() == {"status": "ok", "locks": {"job": "leading"}}
        with client.websocket_connect("/live") as socket:
            assert socket.receive_json() is True


def test_a_standby_says_so_refuses_leader_only_requests_and_is_healthy(locks: LockClient) -> None:
    with locks.hold("job"), TestClient(application(Worker())) as client:
        assert client.get("/who").json() == {
            "key": "job",
            "is_leader": False,
            "fencing_token": None,
            "overdue": 0.0,
        }
        refused = client.post("/flush")
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        healthy = client.get("/healthz")
        assert healthy.status_code == 200
        assert healthy.json() == {"status": "ok", "locks": {"job": "standby"}}


def test_requests_to_a_mounted_application_find_the_outer_one_s_leader() -> None:
    worker, inner = Worker(), FastAPI()
    routes(inner)
    app = application(worker)
    app.mount("/api", inner)
    with TestClient(app) as client:
        assert worker.leads.wait(LONG)
        assert client.get("/api/who").json()["is_leader"] is True


def test_a_router_s_lifespan_works_too() -> None:
    worker = Worker()
    router = APIRouter(lifespan=leader_lifespan(worker, key="job"))
    routes(router)
    app = FastAPI()
    app.include_router(router)
    with TestClient(app) as client:
        assert worker.leads.wait(LONG)
        assert client.get("/who").json()["is_leader"] is True


@pytest.mark.parametrize("path", ["/sub/who", "/sub/healthz"])
def test_a_mounted_application_s_own_lifespan_never_ran_and_its_dependencies_say_so(
    path: str,
) -> None:
    app = FastAPI()
    app.mount("/sub", application(Worker()))
    with TestClient(app) as client, pytest.raises(ConfigurationError, match="mounted"):
        client.get(path)


def test_with_several_singletons_a_key_tells_which(locks: LockClient) -> None:
    one, two = Worker(), Worker()
    with locks.hold("two"):
        app = FastAPI(
            lifespan=leader_lifespan(one, key="one", lifespan=leader_lifespan(two, key="two"))
        )
        first, second, lost, vague = APIRouter(), APIRouter(), APIRouter(), APIRouter()
        routes(first, "one")
        routes(second, "two")
        routes(lost, "three")
        routes(vague)
        app.include_router(first, prefix="/1")
        app.include_router(second, prefix="/2")
        app.include_router(lost, prefix="/3")
        app.include_router(vague, prefix="/4")
        app.add_api_route("/healthz", leader_health)
        with TestClient(app) as client:
            assert one.leads.wait(LONG)
            assert client.get("/1/who").json()["is_leader"] is True
            assert client.get("/2/who").json()["is_leader"] is False
            assert client.post("/1/flush").status_code == 200
            assert client.post("/2/flush").status_code == 503
            assert client.get("/healthz").json()["locks"] == {"one": "leading", "two": "standby"}
            with pytest.raises(ConfigurationError, match="'three': one, two"):
                client.get("/3/who")
            with pytest.raises(ConfigurationError, match="which lock"):
                client.get("/4/who")


def test_the_same_names_serve_starlette() -> None:
    worker = Worker()

    async def who(request: Request) -> JSONResponse:
        return JSONResponse(require_leader(request) is Leadership(request).lease)

    app = Starlette(
        routes=[Route("/who", who), Route("/healthz", leader_health)],
        lifespan=leader_lifespan(worker, key="job"),
    )
    with TestClient(app) as client:
        assert worker.leads.wait(LONG)
        assert client.get("/who").json() is True
        assert client.get("/healthz").status_code == 200


@pytest.mark.anyio
@pytest.mark.parametrize(
    "anyio_backend", [("trio", {"clock": trio.testing.MockClock(autojump_threshold=0)})]
)
async def test_only_a_leader_that_is_overdue_is_unhealthy(
    anyio_backend: Any,
    client: AsyncLockClient,
    service: FakeService,
    clock: ManualClock,
    journal: Journal,
    caplog: pytest.LogCaptureFixture,
) -> None:
    let_go = anyio.Event()

    async def singleton(lease: AsyncHold) -> None:
        journal.note("starts")
        with anyio.CancelScope(shield=True):  # as a thread that nobody can stop
            await let_go.wait()

    async with leader_lifespan(singleton, key="job", client=client)(None) as state:
        request = Request({"type": "http", "state": state})
        await journal.until("starts")
        assert (await leader_health(request)).status_code == 200
        service.take_over("job")
        await clock.aadvance(12)
        assert Leadership(request).is_leader is False, "from the moment of the loss"
        assert (await leader_health(request)).status_code == 200, "it may wind down"
        await anyio.sleep(2.5)
        assert Leadership(request).overdue == pytest.approx(2.5, abs=0.1)
        unhealthy = await leader_health(request)
        assert unhealthy.status_code == 503
        assert b'"overdue"' in bytes(unhealthy.body)
        assert "still runs 2 s after its lease was lost" in caplog.text
        let_go.set()
        await clock.aadvance(1)
        assert (await leader_health(request)).status_code == 200
