"""Whose faults they are: a key plans them for its own project, this machine for all of them."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import anyio
import pytest
from starlette.applications import Starlette

from tests.contract.served import KEY
from volcano_locks._http import httpx
from volcano_locks.local.faults import Faults
from volcano_locks.local.server import MAX_PLANS, create_app
from volcano_locks.local.service import Credential, LockService
from volcano_locks.local.store import Store
from volcano_locks.models import Secret

SHOP, BANK = KEY, "sk-bank"


def application(*, checks_keys: bool = True) -> Starlette:
    keys = [Credential(Secret(SHOP), "shop"), Credential(Secret(BANK), "bank")]
    faults = Faults()
    service = LockService(
        Store(None),
        credentials=keys if checks_keys else None,
        clock=faults.shifted(lambda: 1_800_000_000_000),
    )
    return create_app(service, faults=faults)


@pytest.fixture
def app() -> Starlette:
    return application()


def http(app: Starlette) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost:8787")


async def asked(
    client: httpx.AsyncClient, method: str, path: str, key: str | None, **rest: Any
) -> httpx.Response:
    headers = {"X-Volcano-Request-Id": str(uuid.uuid4()), **rest.pop("headers", {})}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    return await client.request(method, path, headers=headers, **rest)


def ask(app: Starlette, method: str, path: str, key: str | None, **rest: Any) -> httpx.Response:
    async def main() -> httpx.Response:
        async with http(app) as client:
            return await asked(client, method, path, key, **rest)

    return asyncio.run(main())


def plan(app: Starlette, key: str | None, fault: str = "html-502", **fields: object) -> int:
    return ask(app, "POST", "/_faults", key, json={"fault": fault, **fields}).status_code


def look(app: Starlette, key: str | None) -> int:
    return ask(app, "GET", "/locks/job", key).status_code


def pending(app: Starlette, key: str | None) -> int:
    return len(ask(app, "GET", "/_faults", key).json()["pending"])


def test_what_a_key_plans_meets_the_requests_of_its_own_project_alone(app: Starlette):
    assert plan(app, BANK) == 200
    assert look(app, SHOP) == 200
    assert look(app, None) == 401, "nor of nobody"
    assert look(app, BANK) == 502
    assert look(app, BANK) == 200, "and it is used up"


def test_what_is_planned_at_this_machine_without_a_key_meets_everybody(app: Starlette):
    assert plan(app, None, times=3) == 200
    assert [look(app, key) for key in (SHOP, BANK, None)] == [502] * 3
    assert look(app, SHOP) == 200


def test_without_keys_to_check_there_is_one_project(app: Starlette):
    app = application(checks_keys=False)
    assert plan(app, "sk-any", times=2) == 200
    assert look(app, "sk-other") == 502
    assert pending(app, None) == 1
    assert plan(app, "sk-any", "clock-shift", seconds=60) == 200


def test_a_key_sees_and_drops_the_plans_of_its_own_project_alone(app: Starlette):
    for key in (SHOP, BANK, None):
        plan(app, key)
    assert [pending(app, key) for key in (SHOP, BANK, None)] == [1, 1, 3]
    assert ask(app, "DELETE", "/_faults", BANK).json()["pending"] == []
    assert [pending(app, key) for key in (SHOP, BANK, None)] == [1, 0, 2]
    ask(app, "DELETE", "/_faults", None)
    assert [pending(app, key) for key in (SHOP, BANK, None)] == [0, 0, 0]


def test_a_key_thaws_the_requests_that_it_froze_and_no_others(app: Starlette):
    async def main() -> None:
        async with http(app) as client:
            for key in (SHOP, BANK):
                await asked(client, "POST", "/_faults", key, json={"fault": "freeze"})
            frozen = {
                key: asyncio.create_task(asked(client, "GET", "/locks/job", key))
                for key in (SHOP, BANK)
            }
            await anyio.wait_all_tasks_blocked()
            await asked(client, "DELETE", "/_faults", BANK)
            assert (await frozen[BANK]).status_code == 200
            await anyio.wait_all_tasks_blocked()
            assert not frozen[SHOP].done()
            await asked(client, "DELETE", "/_faults", None)
            assert (await frozen[SHOP]).status_code == 200

    asyncio.run(asyncio.wait_for(main(), 20))


def test_the_clock_is_every_projects_so_no_key_shifts_it_or_sets_it_right(app: Starlette):
    def shift() -> float:
        return ask(app, "GET", "/_faults", None).json()["clock_shift"]

    assert plan(app, BANK, "clock-shift", seconds=60) == 403
    assert shift() == 0
    assert plan(app, None, "clock-shift", seconds=60) == 200
    ask(app, "DELETE", "/_faults", BANK)
    assert shift() == 60
    body = {"ttl_seconds": 10}
    token = {"X-Volcano-Lock-Token": str(uuid.uuid4())}
    granted = ask(app, "POST", "/locks/job/lease", SHOP, json=body, headers=token).json()
    assert granted["expires_at"].startswith("2027-01-15T08:01:10")
    ask(app, "DELETE", "/_faults", None)
    assert shift() == 0


def test_so_many_plans_a_project_may_have_and_no_more(app: Starlette):
    assert [plan(app, BANK) for _ in range(MAX_PLANS)] == [200] * MAX_PLANS
    refused = ask(app, "POST", "/_faults", BANK, json={"fault": "503"})
    assert refused.status_code == 409
    assert "DELETE drops them" in refused.json()["error"]
    assert pending(app, BANK) == MAX_PLANS
    assert plan(app, SHOP) == 200, "others plan theirs"
    assert plan(app, None) == 200
    assert look(app, BANK) == 502
    assert plan(app, BANK) == 200, "a used one makes room"
