"""A lock service under the test's control, behind an httpx transport; time is the test's."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tests.core.simulation import EPOCH, Service
from volcano_locks._http import httpx
from volcano_locks.contract import Malformed, Operation, Reply, Request, decode_request
from volcano_locks.testing import ManualClock


@dataclass(frozen=True)
class Drop:
    """No answer. ``arrives``: whether the request took effect all the same."""

    arrives: bool = False
    error: type[Exception] = httpx.ReadTimeout


@dataclass(frozen=True)
class Meanwhile:
    """Something happens after the request was sent; then the answer comes."""

    happens: Callable[[], object]


Step = int | Reply | Drop | Meanwhile


@dataclass
class FakeService(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Locks by the contract; the next answers to an operation may be scripted."""

    clock: ManualClock
    locks: dict[str, Service] = field(default_factory=lambda: defaultdict(Service))
    script: dict[Operation, deque[Step]] = field(default_factory=lambda: defaultdict(deque))
    requests: list[tuple[float, Request]] = field(default_factory=list)
    answers: list[tuple[Operation, int]] = field(default_factory=list)
    quota: int | None = None
    refused: int = 0
    closed: int = 0

    def next(self, operation: Operation, *steps: Step) -> None:
        self.script[operation].extend(steps)

    def sent(self, operation: Operation) -> list[Request]:
        return [request for _, request in self.requests if request.operation is operation]

    def now(self) -> float:
        """The service's clock: seconds since EPOCH, as the wall clock of the test shows."""
        return self.clock.now()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        reply = self._reply(request, request.read())
        headers = {"Retry-After": reply.retry_after} if reply.retry_after else {}
        return httpx.Response(reply.status, content=reply.body, headers=headers)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        return self.handle_request(request)

    def close(self) -> None:
        self.closed += 1

    async def aclose(self) -> None:
        self.closed += 1

    def _reply(self, message: httpx.Request, body: bytes) -> Reply:
        assert message.headers["authorization"].startswith("Bearer ")
        request = decode_request(message.method, message.url.path, message.headers, body)
        assert not isinstance(request, Malformed), request
        self.requests.append((self.clock.now(), request))
        steps = self.script[request.operation]
        step = steps.popleft() if steps else None
        if isinstance(step, int):
            return self._answered(request, Reply(step, b'{"error": "scripted"}'))
        if isinstance(step, Reply):
            return self._answered(request, step)
        if isinstance(step, Drop) and not step.arrives:
            raise step.error("dropped")
        reply = self._by_the_contract(request)
        if isinstance(step, Meanwhile):
            step.happens()
        if isinstance(step, Drop):
            raise step.error("dropped")
        return self._answered(request, reply)

    def _by_the_contract(self, request: Request) -> Reply:
        now = self.now()
        if self.quota is not None:
            minute = now // 60
            used = sum(1 for at, _ in self.requests if at // 60 == minute)
            if used > self.quota:
                self.refused += 1
                return Reply(429, b"{}", str(int(60 - now % 60) or 1))
        return self.locks[request.key].handle(request, now)

    def _answered(self, request: Request, reply: Reply) -> Reply:
        self.answers.append((request.operation, reply.status))
        return reply

    def take_over(self, key: str, ttl: float = 1_000) -> None:
        """Another holder has the lock now, whatever was."""
        lock = self.locks[key]
        lock.owner, lock.expires_at = "another", self.now() + ttl
        lock.fencing_token += 1

    def free(self, key: str) -> bool:
        lock = self.locks[key]
        return lock.owner is None or self.now() >= lock.expires_at + 1


def clock_for_the_service() -> ManualClock:
    """A clock whose wall reads EPOCH + now(), as the simulated service counts."""
    clock = ManualClock(EPOCH)
    clock.shift_wall(1_000.0)
    return clock


__all__ = ["Drop", "FakeService", "Meanwhile", "clock_for_the_service", "replace"]
