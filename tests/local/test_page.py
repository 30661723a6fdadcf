"""The operators' page, first as HTTP and then in a real Chromium."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import pytest
from starlette.applications import Starlette

from tests.contract.served import KEY, PATIENCE, served
from volcano_locks import LockClient, Policy
from volcano_locks._http import httpx
from volcano_locks.contract import Operation, Request
from volcano_locks.local import page as pages
from volcano_locks.local import server as server_module
from volcano_locks.local.faults import Faults
from volcano_locks.local.server import create_app
from volcano_locks.local.service import Credential, LockService
from volcano_locks.local.store import Store
from volcano_locks.models import Secret

# -- as HTTP -----------------------------------------------------------------------------------------


@pytest.fixture
def service() -> LockService:
    keys = [
        Credential(Secret(KEY), "shop"),
        Credential(Secret("sk-bank"), "bank"),
        Credential(Secret("sk-powerless"), "shop", False),
    ]
    # In the middle of a minute, where its clock stands: no quota of a test begins anew.
    return LockService(Store(None), credentials=keys, clock=lambda: 1_800_000_030_000)


@pytest.fixture
def app(service: LockService) -> Starlette:
    return create_app(service, faults=Faults())


def take(service: LockService, key: str = "rollup", project: str = "shop") -> Secret:
    token = Secret(str(uuid.uuid4()))
    service.perform(Request(Operation.ACQUIRE, key, str(uuid.uuid4()), token, 30), project)
    return token


def ask(app: Starlette, method: str, path: str, *, client: str = "127.0.0.1", **rest: Any):
    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app, client=(client, 1))
        base = "http://localhost:8787"
        async with httpx.AsyncClient(transport=transport, base_url=base) as http:
            return await http.request(method, path, **rest)

    return asyncio.run(main())


def basic(password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"me:{password}".encode()).decode()}


@pytest.mark.parametrize("path", ["/", "/force-release?project=shop&key=rollup", "/_faults"])
def test_from_elsewhere_the_page_needs_the_key_as_password(app: Starlette, path: str):
    assert ask(app, "GET", path).status_code == 200
    for headers in ({}, basic("sk-wrong"), {"Authorization": "Basic %%%"}):
        refused = ask(app, "GET", path, client="10.0.0.7", headers=headers)
        assert refused.status_code == 401
        assert refused.headers["WWW-Authenticate"].startswith("Basic")
    assert ask(app, "GET", path, client="10.0.0.7", headers=basic(KEY)).status_code == 200


@pytest.mark.parametrize("client", ["127.0.0.1", "10.0.0.7"])
@pytest.mark.parametrize("key", ["sk-powerless", "ak-anon"])
def test_a_key_that_may_not_manage_locks_is_403_on_the_page(app: Starlette, client: str, key: str):
    refused = ask(app, "GET", "/", client=client, headers=basic(key))
    assert refused.status_code == 403
    assert "locks.manage" in refused.text or "anon key" in refused.text


@pytest.mark.parametrize("client", ["127.0.0.1", "10.0.0.7"])
def test_a_key_shows_the_locks_of_its_own_project_alone(
    app: Starlette, service: LockService, client: str
):
    take(service, "rollup", "shop")
    take(service, "payroll", "bank")
    text = ask(app, "GET", "/", client=client, headers=basic("sk-bank")).text
    assert "payroll" in text
    assert "rollup" not in text
    assert "shop" not in text, "nor its quota"


def test_who_is_at_this_machine_and_shows_no_key_sees_every_project(
    app: Starlette, service: LockService
):
    take(service, "rollup", "shop")
    take(service, "payroll", "bank")
    text = ask(app, "GET", "/").text
    assert "payroll" in text
    assert "rollup" in text


def test_a_key_cannot_force_release_what_another_project_holds(
    app: Starlette, service: LockService
):
    take(service)
    there = {"client": "10.0.0.7", "headers": basic("sk-bank")}
    question = ask(app, "GET", "/force-release?project=shop&key=rollup", **there)
    assert question.status_code == 403
    assert "rollup" not in question.text
    unknown = ask(app, "GET", "/force-release?project=shop&key=none", **there)
    assert unknown.text == question.text, "what exists elsewhere is not told"
    # Even with the form's token, as somebody who is let in as another could pass it on.
    fields = form_of(app)
    assert post(app, fields, **basic("sk-bank")).status_code == 403
    assert is_held(service)
    assert post(app, fields, **basic(KEY)).status_code == 303
    assert not is_held(service)


def test_the_event_stream_of_a_key_tells_of_its_own_project_alone():
    bank = {"Authorization": "Bearer sk-bank"}
    with served("--project", "bank=sk-bank") as server:

        def take_over(http: httpx.Client, name: str, key: str) -> None:
            ids = {n: str(uuid.uuid4()) for n in ("X-Volcano-Request-Id", "X-Volcano-Lock-Token")}
            who = {**ids, "Authorization": f"Bearer {key}"}
            acquire = http.post(
                f"/locks/{name}/lease", content=b'{"ttl_seconds": 600}', headers=who
            )
            assert acquire.status_code == 201

        with (
            httpx.Client(base_url=server.url, trust_env=False, timeout=PATIENCE) as http,
            http.stream("GET", "/events", headers=bank) as stream,
        ):
            lines = stream.iter_lines()
            assert next(lines) == "event: view"
            take_over(http, "rollup", KEY)
            take_over(http, "payroll", "sk-bank")
            seen = []
            for line in lines:
                seen.append(line)
                if "payroll has a new holder" in line:
                    break
    assert "rollup" not in "".join(seen)


@pytest.mark.parametrize(
    "header", ["Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "Via"]
)
def test_what_came_through_a_proxy_is_not_at_this_machine(app: Starlette, header: str):
    assert ask(app, "GET", "/", headers={header: "127.0.0.1"}).status_code == 401
    assert ask(app, "GET", "/", headers={header: "x", **basic(KEY)}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "10.0.0.1", "[", ""])
def test_a_web_site_that_points_its_name_at_loopback_gets_nothing(app: Starlette, host: str):
    assert ask(app, "GET", "/", headers={"Host": host}).status_code == 401


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8787", "[::1]:8787"])
def test_loopback_has_its_usual_names(app: Starlette, host: str):
    assert ask(app, "GET", "/", headers={"Host": host}).status_code == 200


def form_of(app: Starlette, key: str = "rollup") -> dict[str, str]:
    text = ask(app, "GET", f"/force-release?project=shop&key={key}").text
    return dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', text))


def is_held(service: LockService, key: str = "rollup") -> bool:
    request = Request(Operation.GET, key, str(uuid.uuid4()))
    return b'"held": true' in service.perform(request, "shop").body


def post(app: Starlette, fields: dict[str, str], **headers: str) -> httpx.Response:
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    return ask(
        app, "POST", "/force-release", content=urlencode(fields), headers={**kind, **headers}
    )


def test_force_release_says_what_it_breaks_and_then_does_it(app: Starlette, service: LockService):
    take(service)
    question = ask(app, "GET", "/force-release?project=shop&key=rollup").text
    assert "breaks mutual exclusion" in question
    assert is_held(service), "asking does nothing"
    done = post(app, form_of(app))
    assert (done.status_code, done.headers["location"]) == (303, "./")
    assert not is_held(service)


def test_no_other_site_can_force_release(app: Starlette, service: LockService):
    take(service)
    fields = form_of(app)
    forged = [
        ({**fields, "csrf": ""}, {}),
        ({**fields, "csrf": "0" * 64}, {}),
        ({"project": "shop", "key": "rollup"}, {}),
        ({**fields, "csrf": form_of(app, "another")["csrf"]}, {}),
        (fields, {"Origin": "https://evil.example"}),
        (fields, {"Origin": "null"}),
        (fields, {"Sec-Fetch-Site": "cross-site"}),
        (fields, {"Sec-Fetch-Site": "same-site"}),
    ]
    for sent, headers in forged:
        assert post(app, sent, **headers).status_code == 403, (sent, headers)
    assert (
        ask(
            app, "POST", "/_faults", json={"fault": "503"}, headers={"Origin": "https://x"}
        ).status_code
        == 403
    )
    assert is_held(service)
    right = {"Origin": "http://localhost:8787", "Sec-Fetch-Site": "same-origin"}
    assert post(app, fields, **right).status_code == 303


def test_what_came_from_outside_is_escaped():
    service = LockService(Store(None))
    take(service, "a.b", project='<script>alert(1)</script>"')
    app = create_app(service)
    for path in ("/", "/force-release?project=%3Cscript%3E&key=%22%3E%3Cscript%3E"):
        text = ask(app, "GET", path).text
        assert "<script>" not in text.replace('<script nonce="', "")
        assert "&lt;script&gt;" in text


def test_two_links_never_have_one_id(service: LockService):
    take(service, "b-c", "a")
    take(service, "c", "a-b")
    ids = re.findall(r' id="([^"]+)"', ask(create_app(service), "GET", "/").text)
    assert len(ids) == len(set(ids))


def test_no_token_and_no_key_is_on_the_page(app: Starlette, service: LockService):
    token = take(service)
    text = ask(app, "GET", "/").text
    assert token.reveal() not in text
    assert KEY not in text


def test_the_browser_is_told_to_trust_nothing_else(app: Starlette):
    headers = ask(app, "GET", "/").headers
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_the_timeline_and_the_quota_are_drawn_from_the_rows(service: LockService):
    for _ in range(3):
        token = take(service)
        service.perform(Request(Operation.RELEASE, "rollup", str(uuid.uuid4()), token), "shop")
    take(service)
    take(service)
    view = pages.View(service.clock(), 600, *service.store.read())
    html = pages.live(view)
    assert html.count('class="past"') == 3
    assert html.count("<title>rollup: token") == 4
    assert re.search(r'<td class="number">4</td>\s*<td class="number">1</td>', html), (
        "terms, refused"
    )
    assert "8 of 600" in html


def test_pages_that_are_open_at_once_cost_what_one_does(
    service: LockService, monkeypatch: pytest.MonkeyPatch
):
    """Fifty pages, each drawn on its own, left three hundred locks no server."""
    looks, read = itertools.count(), service.store.read
    monkeypatch.setattr(service.store, "read", lambda since: (next(looks), read(since))[1])
    server = create_app(service, poll=3_600).locks.server

    async def main() -> None:
        async def first(only: str | None) -> bytes:
            async with contextlib.aclosing(server.stream(only)) as events:
                return await anext(events)

        events = await asyncio.gather(*(first(only) for only in ["shop", "bank"] * 20))
        assert len(set(events)) == 2, "what one project sees is not what another does"

    take(service)
    asyncio.run(main())
    assert next(looks) <= 4, "one for the first of a project, one for all who came meanwhile"


def test_a_page_is_not_shown_what_was_seen_before_it_was_opened(service: LockService):
    """It took back a force release that the page itself had just shown."""
    server = create_app(service, poll=3_600).locks.server

    async def main() -> None:
        async with contextlib.aclosing(server.stream(None)) as older:
            assert b"No lock has been taken yet" in await anext(older)
            take(service)
            async with contextlib.aclosing(server.stream(None)) as newer:
                assert b"rollup" in await anext(newer)

    asyncio.run(main())


def test_drawing_the_page_takes_a_tenth_of_the_servers_time_at_most(
    app: Any, monkeypatch: pytest.MonkeyPatch
):
    instants = iter([100.0, 103.0])
    monkeypatch.setattr(server_module, "time", SimpleNamespace(monotonic=lambda: next(instants)))
    assert app.locks.server._look(None, None).until == 103 + 9 * 3


# -- in Chromium -------------------------------------------------------------------------------------

chromium = pytest.mark.needs("chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = next(
        found
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (found := shutil.which(name))
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox"], timeout=PATIENCE * 1_000
        )
        yield browser
        browser.close()


@pytest.fixture
def new_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Makes a page in a context of its own."""
    with contextlib.ExitStack() as ends:

        def make(**options: Any) -> Any:
            context = browser.new_context(**options)
            ends.callback(context.close)
            context.set_default_timeout(PATIENCE * 1_000)
            return context.new_page()

        yield make


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served() as server:
        yield server.url


@pytest.fixture
def locks(url: str) -> Iterator[LockClient]:
    with LockClient(KEY, url, policy=Policy(timeout=PATIENCE)) as client:
        yield client


@pytest.fixture
def key() -> str:
    return f"job.{uuid.uuid4()}"


@pytest.fixture
def page(new_page: Callable[..., Any], url: str) -> Iterator[Any]:
    """A page that complains of whatever a browser complains of."""
    page = new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "request",
        lambda request: None if request.url.startswith(url) else complaints.append(request.url),
    )
    yield page
    page.context.close()
    assert complaints == []


def refresh(page: Any, locks: LockClient) -> None:
    """Until another drawing of the page took the place of the one that is there."""
    page.evaluate("document.querySelector('#live').firstElementChild.id = 'before'")
    locks.get("any")
    page.locator("#before").wait_for(state="detached")


def focused(page: Any) -> str:
    return str(page.evaluate("document.activeElement.id"))


@chromium
def test_the_page_follows_the_locks_live(page: Any, url: str, locks: LockClient, key: str):
    page.goto(url)
    page.get_by_text("Live.").wait_for()
    lease = locks.acquire(key, ttl=600)
    assert lease is not None
    row = page.get_by_role("row").filter(has_text=key).first
    row.get_by_text(str(lease.fencing_token)).wait_for()
    row.get_by_text("held", exact=True).wait_for()
    assert page.locator(f"svg title:text-is('{key}')").count() == 0
    locks.release(lease)
    row.get_by_text("free", exact=True).wait_for()
    newer = locks.acquire(key, ttl=600)
    assert newer is not None
    words = f"{key} has a new holder, token {newer.fencing_token}"
    news = page.get_by_role("status").filter(has_text=words)
    news.wait_for(state="attached")


@chromium
def test_a_lock_is_force_released_by_keyboard_alone(
    page: Any, url: str, locks: LockClient, key: str
):
    assert locks.acquire(key, ttl=600) is not None
    page.goto(url)
    page.get_by_text("Live.").wait_for()
    link = f"release-local/{key}"
    for _ in range(60):
        page.keyboard.press("Tab")
        if focused(page) == link:
            break
    refresh(page, locks)
    assert focused(page) == link, "focus survives an update"
    page.keyboard.press("Enter")
    page.get_by_text("This breaks mutual exclusion.").wait_for()
    button = page.get_by_role("button", name=f"Force release {key}")
    button.wait_for()
    assert locks.get(key).held
    page.keyboard.press("Tab")
    assert button.evaluate("button => button === document.activeElement")
    page.keyboard.press("Enter")
    page.get_by_text("Live.").wait_for()
    assert not locks.get(key).held


@chromium
def test_a_refresh_keeps_what_has_the_focus_and_how_far_is_scrolled(
    page: Any, url: str, locks: LockClient, key: str
):
    assert locks.acquire(key, ttl=600) is not None
    page.set_viewport_size({"width": 400, "height": 700})
    page.goto(url)
    page.get_by_text("Live.").wait_for()
    page.locator("summary").click()
    scrolled = "[...document.querySelectorAll('.scroll')].map(item => item.scrollLeft)"
    page.evaluate("document.querySelectorAll('.scroll').forEach(item => item.scrollLeft = 20)")
    before = page.evaluate(scrolled)
    assert before[:2] == [20, 20]
    for place in ("terms-summary", "locks", "timeline"):
        page.evaluate("id => document.getElementById(id).focus({ preventScroll: true })", place)
        refresh(page, locks)
        assert focused(page) == place
        assert page.evaluate(scrolled) == before


@chromium
def test_the_bar_of_a_lease_runs_down_on_the_opened_and_on_the_refreshed_page(
    page: Any, url: str, locks: LockClient, key: str
):
    """Also while selected text keeps the page from being drawn again."""
    assert locks.acquire(key, ttl=30) is not None
    page.route("**/events", lambda route: route.fulfill(content_type="text/event-stream", body=""))
    page.goto(url)
    assert_bar_runs_down(page, key)
    page.unroute("**/events")
    page.goto(url)
    page.get_by_text("Live.").wait_for()
    refresh(page, locks)
    page.evaluate("getSelection().selectAllChildren(document.querySelector('#live h2'))")
    assert_bar_runs_down(page, key)


def assert_bar_runs_down(page: Any, key: str) -> None:
    """One and the same bar: a page that is drawn again shows a shorter one anyway."""
    page.evaluate(
        """key => {
            const row = [...document.querySelectorAll("tr")].find(row => row.innerText.includes(key));
            window.bar = row.querySelector("svg.bar rect.held");
            window.wide = bar.getBoundingClientRect().width;
        }""",
        key,
    )
    page.wait_for_function("() => bar.getBoundingClientRect().width < wide - 1")
    assert page.evaluate("bar.isConnected")


@chromium
def test_selected_text_stays_until_it_is_let_go(page: Any, url: str, locks: LockClient, key: str):
    assert locks.acquire(key, ttl=600) is not None
    page.goto(url)
    page.get_by_text("Live.").wait_for()
    # In one step: what a locator found may be swapped before it is used.
    page.evaluate(
        "key => getSelection().selectAllChildren("
        "[...document.querySelectorAll('th code')].find(name => name.textContent === key))",
        key,
    )
    locks.get(key)
    page.get_by_text("Paused while text is selected.").wait_for()
    assert page.evaluate("getSelection().toString()") == key
    page.evaluate("getSelection().removeAllRanges()")
    refresh(page, locks)
    assert page.get_by_text("Live.").is_visible()


@chromium
def test_without_javascript_it_reads_and_works(
    new_page: Callable[..., Any], url: str, locks: LockClient, key: str
):
    assert locks.acquire(key, ttl=600) is not None
    page = new_page(java_script_enabled=False)
    page.goto(url)
    assert page.get_by_role("row").filter(has_text=key).first.is_visible()
    page.get_by_role("link", name=f"Force release of {key}").click()
    page.get_by_role("button", name=f"Force release {key}").click()
    page.get_by_role("heading", name="Locks", exact=True).wait_for()
    assert not locks.get(key).held


@chromium
def test_axe_finds_nothing_in_light_and_in_dark(
    new_page: Callable[..., Any], url: str, locks: LockClient, key: str
):
    from axe_playwright_python.sync_playwright import Axe

    locks.acquire(key, ttl=600)
    grounds = set()
    for scheme in ("light", "dark"):
        page = new_page(color_scheme=scheme, bypass_csp=True)
        for path in ("/", f"/force-release?project=local&key={key}"):
            page.goto(url + path)
            page.evaluate("document.querySelectorAll('details').forEach(item => item.open = true)")
            found = Axe().run(page)
            assert found.violations_count == 0, found.generate_report()
        grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(grounds) == 2, "dark is another colour than light"


@chromium
def test_a_narrow_window_scrolls_its_tables_and_not_itself(
    new_page: Callable[..., Any], url: str, locks: LockClient
):
    locks.acquire("x" * 60, ttl=600)
    page = new_page(viewport={"width": 360, "height": 700})
    page.goto(url)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


@chromium
def test_the_longest_key_leaves_every_column_in_an_ordinary_window(
    new_page: Callable[..., Any], url: str, locks: LockClient
):
    key = "x" * 128
    locks.acquire(key, ttl=600)
    page = new_page(viewport={"width": 1280, "height": 800})
    for path in ("/", f"/force-release?project=local&key={key}"):
        page.goto(url + path)
        page.evaluate("document.querySelectorAll('details').forEach(item => item.open = true)")
        boxes = page.locator("h1, p, th, td, a, button")
        right = "items => Math.max(...items.map(item => item.getBoundingClientRect().right))"
        assert boxes.evaluate_all(right) <= 1280
