"""The local lock service over HTTP: the contract, the operators' page, and planned faults.

The law of this module: HTTP comes in, the service answers, HTTP goes out; nothing about leases is
decided here. Nobody who is not let in gets further than a 401, nothing is read without a bound, and
no answer carries a traceback.

The page is for people at this machine. From loopback, under a loopback name (so that no web site
can reach it by a name of its own) and through no proxy, it is open and shows every project; from
elsewhere it asks for a service key, as the password of HTTP Basic. Whoever shows a key, from wherever,
sees and releases the locks and plans the faults of that key's project alone. Where a request comes
from is what its connection says; no header is believed. What changes state wants a form of this
page's own origin and its token. The contract is for programs: what tells an origin, as only a browser
does, is refused there. And a web site can point a name of its own at loopback, and then be asked from
its own origin, where a GET tells none: from loopback, a key that everybody knows is good under a
loopback name only, whatever else the request says; a site's script can write a proxy's headers, too.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, urlsplit
from uuid import uuid4

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from ..contract import (
    LOCK_SERVICE_UNAVAILABLE,
    Operation,
    Reply,
    Request,
    encode_error,
    is_loopback,
)
from ..errors import ConfigurationError, InvalidRequest
from ..models import check_key
from . import page as pages
from .address import DEFAULT_KEY
from .faults import Fault, Faults, Plan
from .openapi import document

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.types import Receive, Scope, Send

    from .service import LockService

__all__ = ["create_app"]

MAX_BODY: Final = 4_096
"""Bytes; the contract's largest body has about thirty."""
_TOO_LARGE: Final = f"a body has at most {MAX_BODY} bytes"
MAX_STREAMS: Final = 50
STALLED: Final = 30.0
"""Seconds after which a page that takes nothing of its stream gives its place to another."""
MAX_PLANS: Final = 100
"""Faults not used up yet: of each project, and for every project."""
_REFRESH: Final = 5.0
"""Seconds after which the page is sent anew even if nothing changed: its timeline moves."""
_REST: Final = 9
"""Open pages take no more of the server's time than one part in ten, however many locks there are."""
_PROXIED: Final = ("forwarded", "x-forwarded-", "x-real-ip", "via")
"""How the headers begin that only a proxy adds: the request may have come from anywhere."""
_PUBLIC_KEY: Final = Reply(
    403,
    encode_error("everybody knows this key: use localhost or 127.0.0.1, or set a key of your own"),
)
_ALLOWED: Final = {True: "DELETE, PATCH, POST", False: "DELETE, GET"}

logger = logging.getLogger("volcano_locks.server")


def create_app(
    service: LockService,
    *,
    faults: Faults | None = None,
    stopping: asyncio.Event | None = None,
    poll: float = 0.5,
) -> Starlette:
    """The ASGI application around a service.

    ``faults``: None for a service that breaks nothing and has no admin route. ``stopping``: set, it
    ends the open event streams. ``poll``: seconds between two looks at the store for the page.
    """
    server = _Server(service, faults, stopping or asyncio.Event(), poll)
    routes = [
        Route("/", server.page, methods=["GET"]),
        Route("/events", server.events, methods=["GET"]),
        Route("/force-release", server.ask_force_release, methods=["GET"]),
        Route("/force-release", server.force_release, methods=["POST"]),
        Route("/openapi.json", server.openapi, methods=["GET"]),
        Route("/healthz", server.health, methods=["GET"]),
    ]
    if faults is not None:
        routes.append(Route("/_faults", server.faults, methods=["GET", "POST", "DELETE"]))
    app = _Application(routes=routes)
    # The contract's routes are matched by the contract, so that 404, 405 and 400 are its own.
    app.locks = _Locks(server)
    app.router.redirect_slashes = False
    app.router.default = app.locks
    return app


class _Application(Starlette):
    """Starlette for the page; requests of the contract pass by it, and by its search of all routes."""

    locks: _Locks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/locks/"):
            await self.locks(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


class _BadBody(Exception):
    """A body that is not there as a whole; ``status`` says why."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class _Look:
    """What all open pages of a project are shown, until the instant when one looks again."""

    began: float
    until: float
    rendered: float
    gist: object
    event: bytes
    tokens: dict[tuple[str, str], int]


class _Refusal(Exception):
    """A request for the page that goes no further than this response."""

    def __init__(self, response: Response) -> None:
        self.response = response


class _Dropped(Response):
    """An answer that breaks off: the client sees a connection that failed, as after a crash."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"1"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})


class _Locks:
    """The ASGI end of the contract's routes."""

    def __init__(self, server: _Server) -> None:
        self.server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self.server.contract(scope, receive)
        except Exception:
            # Whatever it was: ownership is not known, and nobody outside is told more than that.
            logger.exception("a request failed")
            reply = Reply(503, encode_error("internal failure", LOCK_SERVICE_UNAVAILABLE))
            response = _respond(reply)
        await response(scope, receive, send)


class _Server:
    def __init__(
        self, service: LockService, faults: Faults | None, stopping: asyncio.Event, poll: float
    ) -> None:
        self._service = service
        self._faults = faults
        self._stopping = stopping
        self._poll = poll
        self._in_memory = service.store.path is None
        self._secret = secrets.token_bytes(32)
        self._streams = 0
        self._looks: dict[str | None, _Look] = {}
        self._looking = asyncio.Lock()

    # -- the contract ----------------------------------------------------------------------------

    async def contract(self, scope: Scope, receive: Receive) -> Response:
        method, path = scope["method"], scope["path"]
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        if "origin" in headers:
            text = "a web site may not use a service key: call the service from your server"
            return _respond(Reply(403, encode_error(text)))
        client, key = scope.get("client"), headers.get("authorization", "").partition(" ")[2]
        if self._may_be_a_web_site(client[0] if client else "", headers.get("host", ""), key):
            return _respond(_PUBLIC_KEY)
        try:
            body = await _read(headers, receive)
        except _BadBody as error:
            return _respond(Reply(error.status, encode_error(str(error))))
        if self._faults is not None:
            project = self._service.authenticate(headers.get("authorization"))
            known = project if isinstance(project, str) else None
            plan = self._faults.take(method, path, known)
            if plan is not None:
                return await self._answer_badly(plan, method, path, headers, body)
        return _respond(await self._answer(method, path, headers, body), path)

    def _may_be_a_web_site(self, client: str, host: str, key: str) -> bool:
        """Whether a browser here may have been led here by a name of a web site, which knows the key."""
        public = key.strip() == DEFAULT_KEY or not self._service.checks_keys
        return public and is_loopback(client) and not _is_loopback_name(host)

    async def _answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Reply:
        if self._in_memory:
            return self._service.reply(method, path, headers, body)
        return await anyio.to_thread.run_sync(self._service.reply, method, path, headers, body)

    async def _answer_badly(
        self, plan: Plan, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> Response:
        canned = plan.canned()
        if canned is not None:
            return _respond(canned)
        if plan.fault is Fault.DROP_REQUEST:
            return _Dropped()
        if plan.fault in (Fault.DELAY, Fault.FREEZE):
            await self._hang(plan)
        reply = await self._answer(method, path, headers, body)
        if plan.fault is Fault.DROP_ANSWER:
            return _Dropped()
        if plan.fault is Fault.DELAY_ANSWER:
            await self._hang(plan)
        return _respond(reply, path)

    async def _hang(self, plan: Plan) -> None:
        assert self._faults is not None
        thawed, loop = asyncio.Event(), asyncio.get_running_loop()
        forget = self._faults.on_thaw(lambda: _set_soon(loop, thawed), plan.project)
        try:
            await _first_of(thawed.wait(), self._stopping.wait(), timeout=plan.seconds)
        finally:
            forget()

    # -- the page --------------------------------------------------------------------------------

    async def page(self, request: HttpRequest) -> Response:
        return await self._for_people(request, self._page)

    async def events(self, request: HttpRequest) -> Response:
        return await self._for_people(request, self._events)

    async def ask_force_release(self, request: HttpRequest) -> Response:
        return await self._for_people(request, self._ask_force_release)

    async def force_release(self, request: HttpRequest) -> Response:
        return await self._for_people(request, self._force_release)

    async def faults(self, request: HttpRequest) -> Response:
        return await self._for_people(request, self._plan_faults)

    async def openapi(self, request: HttpRequest) -> Response:
        return JSONResponse(document())

    async def health(self, request: HttpRequest) -> Response:
        return JSONResponse({"ok": True})

    async def _for_people(
        self,
        request: HttpRequest,
        work: Callable[[HttpRequest, str | None], Awaitable[Response]],
    ) -> Response:
        try:
            response = await work(request, self._let_in(request))
        except _Refusal as refusal:
            response = refusal.response
        except Exception:
            logger.exception("the page failed")
            response = HTMLResponse("<h1>The page failed; the server's log says why</h1>", 503)
        response.headers["Cache-Control"] = "no-store"
        response.headers["X-Content-Type-Options"] = "nosniff"
        # Not no-referrer: a browser then sends "Origin: null" with our own form, too.
        response.headers["Referrer-Policy"] = "same-origin"
        return response

    def _let_in(self, request: HttpRequest) -> str | None:
        """The project that this request may see and change; None: every project."""
        client = request.client.host if request.client is not None else ""
        host = request.headers.get("host", "")
        here = (
            is_loopback(client)
            and _is_loopback_name(host)
            and not any(name.startswith(_PROXIED) for name in request.headers)
        )
        scheme, _, value = request.headers.get("authorization", "").partition(" ")
        if here and not (value and self._service.checks_keys):
            return None
        if scheme.lower() == "basic":
            try:
                value = base64.b64decode(value, validate=True).decode().partition(":")[2]
            except ValueError:
                value = ""
        if value and self._service.checks_keys:
            if self._may_be_a_web_site(client, host, value):
                raise _Refusal(_respond(_PUBLIC_KEY))
            project = self._service.authenticate(f"Bearer {value}")
            if isinstance(project, str):
                return project
            if project.status == 403:
                raise _Refusal(_respond(project))
        challenge = {"WWW-Authenticate": 'Basic realm="volcano-locks", charset="UTF-8"'}
        text = "The page needs a service key as the password, unless it is opened on loopback."
        raise _Refusal(Response(text, 401, challenge, "text/plain"))

    async def _view(self, only: str | None) -> pages.View:
        if self._in_memory:
            return self._read_view(only)
        return await anyio.to_thread.run_sync(self._read_view, only)

    def _read_view(self, only: str | None) -> pages.View:
        now = self._service.clock()
        contents = self._service.store.read(since=now - pages.TIMELINE_MS)
        view = pages.View(now, self._service.quota, *contents)
        return view if only is None else view.of(only)

    async def _page(self, request: HttpRequest, only: str | None) -> Response:
        nonce = secrets.token_urlsafe(16)
        return _html(pages.page(await self._view(only), nonce), nonce)

    async def _events(self, request: HttpRequest, only: str | None) -> Response:
        if self._streams >= MAX_STREAMS:
            raise _Refusal(Response("Too many open pages.", 503, media_type="text/plain"))
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        # Counted here, where it was judged, with no await between: else all that come at once pass.
        # The response gives the place back, and it is called before anything can be cancelled.
        self._streams += 1
        return _EventStream(self, only)

    def stream_ended(self) -> None:
        self._streams -= 1

    async def stream(self, only: str | None) -> AsyncGenerator[bytes, None]:
        """The page's moving part, each time that it changed and every few seconds."""
        last: _Look | None = None
        opened = time.monotonic()  # an older look would take back what the page already shows
        while not self._stopping.is_set():
            async with self._looking:
                look = self._looks.get(only)
                if look is None or look.began < opened or time.monotonic() >= look.until:
                    look = await anyio.to_thread.run_sync(self._look, only, look)
                    self._looks[only] = look
            if self._stopping.is_set():
                return
            if last is None or look.rendered != last.rendered:
                yield look.event
            if last is not None and look.tokens is not last.tokens:
                for where, token in look.tokens.items():
                    if last.tokens.get(where) != token:
                        yield _event("news", f"{where[1]} has a new holder, token {token}")
            last = look
            await _first_of(self._stopping.wait(), timeout=look.until - time.monotonic())

    def _look(self, only: str | None, last: _Look | None) -> _Look:
        began = time.monotonic()
        view = self._read_view(only)
        gist, rendered = view.gist(), began
        if last is not None and last.gist == gist and began - last.rendered < _REFRESH:
            event, rendered, tokens = last.event, last.rendered, last.tokens
        else:
            event = _event("view", pages.live(view))
            tokens = {(row.project, row.key): row.record.fencing_token for row in view.held()}
        now = time.monotonic()
        until = now + max(self._poll, _REST * (now - began))
        return _Look(began, until, rendered, gist, event, tokens)

    async def _ask_force_release(self, request: HttpRequest, only: str | None) -> Response:
        project, key = request.query_params.get("project", ""), request.query_params.get("key", "")
        _check_project(project, only)
        row = next(
            (
                row
                for row in (await self._view(only)).held()
                if (row.project, row.key) == (project, key)
            ),
            None,
        )
        nonce = secrets.token_urlsafe(16)
        csrf = self._csrf(project, key)
        return _html(pages.confirmation(project, key, row, csrf, nonce), nonce)

    async def _force_release(self, request: HttpRequest, only: str | None) -> Response:
        self._same_origin(request)
        fields = await _form(request)
        project, key = fields.get("project", ""), fields.get("key", "")
        _check_project(project, only)
        if not hmac.compare_digest(
            fields.get("csrf", "").encode(), self._csrf(project, key).encode()
        ):
            raise _Refusal(Response("This form is not of this page; open it anew.", 403))
        try:
            forced = Request(Operation.FORCE_RELEASE, check_key(key), str(uuid4()))
        except InvalidRequest as error:
            raise _Refusal(Response(str(error), 400, media_type="text/plain")) from error
        reply = await anyio.to_thread.run_sync(self._service.perform, forced, project)
        if reply.status != 204:
            raise _Refusal(_respond(reply))
        logger.warning("lock %r of project %r was force-released on the page", key, project)
        return RedirectResponse("./", 303)

    async def _plan_faults(self, request: HttpRequest, only: str | None) -> Response:
        assert self._faults is not None
        if request.method == "POST":
            self._same_origin(request)
            try:
                _plan(self._faults, json.loads(await _bounded(request)), only)
            except (ValueError, TypeError, RecursionError) as error:
                return JSONResponse({"error": str(error)[:200]}, 400)
        elif request.method == "DELETE":
            self._same_origin(request)
            self._faults.clear(only)
        pending = [
            {
                "fault": plan.fault.value,
                "times": plan.times,
                "key": plan.key,
                "seconds": plan.seconds,
            }
            for plan in self._faults.pending(only)
        ]
        return JSONResponse({"pending": pending, "clock_shift": self._faults.shift / 1_000})

    def _csrf(self, project: str, key: str) -> str:
        message = f"{project}\0{key}".encode()
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()

    def _same_origin(self, request: HttpRequest) -> None:
        """Browsers say where a request comes from; what is no browser sends neither header."""
        origin, host = request.headers.get("origin"), request.headers.get("host", "")
        site = request.headers.get("sec-fetch-site", "same-origin")
        if site not in {"same-origin", "none"} or (
            origin is not None and origin.partition("://")[2] != host
        ):
            raise _Refusal(Response("Requests from other sites change nothing here.", 403))


class _EventStream(Response):
    """The open stream of a page; it has one of the server's places until it ends."""

    def __init__(self, server: _Server, only: str | None) -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self._server = server
        self._only = only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._run(receive, send)
        finally:
            self._server.stream_ended()

    async def _run(self, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        pump = asyncio.create_task(self._pump(send))
        gone = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (pump, gone):
                task.cancel()
            await asyncio.gather(pump, gone, return_exceptions=True)

    async def _pump(self, send: Send) -> None:
        async with contextlib.aclosing(self._server.stream(self._only)) as chunks:
            async for chunk in chunks:
                message = {"type": "http.response.body", "body": chunk, "more_body": True}
                # Not wait_for: before Python 3.12 it may swallow the cancellation of this task.
                with anyio.fail_after(STALLED):
                    await send(message)
        await send({"type": "http.response.body", "body": b""})


def _set_soon(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    loop.call_soon_threadsafe(event.set)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _first_of(*waits: Any, timeout: float) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _read(headers: dict[str, str], receive: Receive) -> bytes:
    length = headers.get("content-length", "0")
    if length.isdigit() and int(length[:20]) > MAX_BODY:
        raise _BadBody(413, _TOO_LARGE)
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _BadBody(400, "the connection ended before the body")
        part: bytes = message.get("body", b"")
        body += part
        if len(body) > MAX_BODY:
            raise _BadBody(413, _TOO_LARGE)
        if not message.get("more_body", False):
            return body


async def _bounded(request: HttpRequest) -> bytes:
    try:
        return await _read(dict(request.headers), request.receive)
    except _BadBody as error:
        raise _Refusal(Response(str(error), error.status, media_type="text/plain")) from None


def _check_project(project: str, only: str | None) -> None:
    if only is not None and project != only:
        raise _Refusal(Response("This key is of another project.", 403, media_type="text/plain"))


async def _form(request: HttpRequest) -> dict[str, str]:
    text = (await _bounded(request)).decode("utf-8", "replace")
    try:
        return {name: values[-1] for name, values in parse_qs(text, max_num_fields=10).items()}
    except ValueError:
        return {}


def _plan(faults: Faults, fields: Any, project: str | None) -> None:
    if not isinstance(fields, dict):
        raise ValueError('an object is expected, as {"fault": "503", "times": 2}')
    known = {"fault", "seconds"}
    if fields.get("fault") != "clock-shift":
        known |= {"times", "operation", "key"}
    if unknown := fields.keys() - known:
        raise ValueError(f"unknown field {min(map(str, unknown))!r:.60}")
    fault, seconds = fields.get("fault"), fields.get("seconds")
    if not isinstance(fault, str):
        raise ValueError("fault is missing")
    if seconds is not None and not (type(seconds) in (int, float) and abs(seconds) <= 1e9):
        raise ValueError("seconds is a number")
    if fault == "clock-shift":
        if project is not None:
            text = "the clock is that of every project: shift it at this machine, without a key"
            raise _Refusal(JSONResponse({"error": text}, 403))
        faults.shift = round((seconds or 0) * 1_000)
        return
    times, operation, key = fields.get("times", 1), fields.get("operation"), fields.get("key")
    if type(times) is not int:
        raise ValueError("times is a whole number")
    if not all(isinstance(item, str | None) for item in (operation, key)):
        raise ValueError("operation and key are texts")
    if sum(plan.project == project for plan in faults.pending()) >= MAX_PLANS:
        text = f"{MAX_PLANS} faults are planned already; DELETE drops them"
        raise _Refusal(JSONResponse({"error": text}, 409))
    faults.plan(fault, times, operation=operation, key=key, seconds=seconds, project=project)


def _respond(reply: Reply, path: str = "") -> Response:
    headers = {"Cache-Control": "no-store"}
    if reply.retry_after is not None:
        headers["Retry-After"] = reply.retry_after
    if reply.status == 405:
        # Not of the whole path: a lock may be named lease.
        headers["Allow"] = _ALLOWED[path.removeprefix("/locks/").endswith("/lease")]
    if reply.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    kind = "text/html" if reply.body.startswith(b"<") else "application/json"
    return Response(reply.body, reply.status, headers, kind if reply.body else None)


def _html(text: str, nonce: str) -> HTMLResponse:
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    )
    return HTMLResponse(text, headers={"Content-Security-Policy": policy})


def _event(name: str, text: str) -> bytes:
    lines = "".join(f"data: {line}\n" for line in text.splitlines())
    return f"event: {name}\n{lines}\n".encode()


def _is_loopback_name(host: str) -> bool:
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


def serve(
    service: LockService,
    host: str,
    port: int,
    *,
    faults: Faults | None = None,
    ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until SIGTERM or SIGINT, then end the open streams and return.

    ``ready`` is called with the URL once connections are accepted. ConfigurationError if the store or
    the address cannot be used.
    """
    import signal
    import socket

    import uvicorn

    service.store.open()
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=512)
        # asyncio does it only for sockets that name their protocol; without it an answer in two
        # pieces waits 40 ms for the client's delayed acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {host} port {port} ({error.strerror or error}): choose another with "
            "--port, or stop what uses it"
        ) from error

    stopping = asyncio.Event()

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            stopping.set()
            super().handle_exit(sig, frame)

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            shown = f"[{host}]" if ":" in host else host
            ready(f"http://{shown}:{listener.getsockname()[1]}")

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            # What has not been taken by now is a page's: the contract's answers fit into any buffer.
            # And a request that is not all there is not performed.
            for connection in list(self.server_state.connections):
                cycle = getattr(connection, "cycle", None)
                unread = cycle is not None and cycle.more_body
                if unread or connection.transport.get_write_buffer_size():
                    connection.transport.abort()
            await super().shutdown(sockets)

    config = uvicorn.Config(
        create_app(service, faults=faults, stopping=stopping),
        # Not what happens to be installed beside it: httptools bounds no headers, and drops the body
        # of a request that offers an upgrade, as each first one of Java's HttpClient does.
        http="h11",
        loop="asyncio",
        lifespan="off",
        ws="none",
        # Else FORWARDED_ALLOW_IPS in the environment lets a header say who is on loopback.
        proxy_headers=False,
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=60,
        timeout_graceful_shutdown=3,
    )
    # uvicorn raises the signal again once it is done; being told to stop is no failure.
    previous = {sig: signal.signal(sig, lambda *_: None) for sig in (signal.SIGTERM, signal.SIGINT)}
    try:
        Server(config).run(sockets=[listener])
    finally:
        for sig, handler in previous.items():
            signal.signal(sig, handler)
        listener.close()
        service.store.close()
