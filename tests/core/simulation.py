"""A world for the flows, in one thread: a service, a network with faults, and a clock.

The service is written from the contract alone and shares no code with the local lock service. Each
request meets one ``Fault``; everything else is arithmetic on ``World.now``.
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from volcano_locks._core.effects import Answer, Effect, Flow, NoAnswer, Send, Sleep, Woke
from volcano_locks._core.flows import Rules
from volcano_locks._core.policy import Policy, Quota
from volcano_locks.contract import Operation, Reply, Request
from volcano_locks.models import Secret

EPOCH = datetime(2026, 1, 1, tzinfo=timezone.utc)


class Counting:
    """Ids in sequence and a fixed chance: entropy that a test knows."""

    def __init__(self, chance: float = 0.5) -> None:
        self.chance = chance
        self.count = itertools.count(1)

    def uuid(self) -> str:
        return f"00000000-0000-4000-8000-{next(self.count):012d}"

    def fraction(self) -> float:
        return self.chance


@dataclass(frozen=True)
class Fault:
    """What happens to one request. Seconds; ``status`` answers in the service's place.

    ``lost_request``: it never arrives. ``lost_answer``: it is processed and nobody hears of it.
    ``pause``: the whole process stands still for so long before it sees the answer.
    """

    there: float = 0.01
    back: float = 0.01
    lost_request: bool = False
    lost_answer: bool = False
    status: int | None = None
    retry_after: str | None = None
    pause: float = 0.0
    body: bytes | None = None


FINE = Fault()


@dataclass
class Service:
    """One lock by the contract: rules 1 to 7 and 9."""

    owner: str | None = None
    expires_at: float = -1e9
    began_at: float = 0.0
    fencing_token: int = 4503599627370496
    log: list[tuple[float, Operation, str, int]] = field(default_factory=list)

    def handle(self, request: Request, now: float) -> Reply:
        reply = self._handle(request, now)
        token = request.token.reveal() if request.token else ""
        self.log.append((now, request.operation, token, reply.status))
        return reply

    def _handle(self, request: Request, now: float) -> Reply:
        token = request.token.reveal() if request.token else None
        if self.owner is not None and now >= self.expires_at + 1.0:
            self.owner = None
        live = self.owner is not None and now < self.expires_at
        ours = self.owner == token
        if request.operation is Operation.ACQUIRE:
            if self.owner is None:
                self.owner, self.began_at = token, now
                self.fencing_token += 1
                return self._grant(201, now, request.ttl)
            if ours and live:
                return self._grant(201, now, request.ttl)
            return _error(409, "lock_ownership_lost" if ours else "lock_held")
        if request.operation is Operation.RENEW:
            if ours and now < self.expires_at - 1.0:
                return self._grant(200, now, request.ttl)
            return _error(409, "lock_ownership_lost")
        if request.operation is Operation.RELEASE:
            if self.owner is None or ours:
                self.owner = None
                return Reply(204)
            return _error(409, "lock_ownership_lost")
        if request.operation is Operation.GET:
            if self.owner is None:
                return Reply(200, b'{"held": false}')
            return Reply(200, json.dumps({"held": True, **self._body()}).encode())
        self.owner = None
        return Reply(204)

    def _grant(self, status: int, now: float, ttl: int | None) -> Reply:
        assert ttl is not None
        self.expires_at = min(now + ttl, self.began_at + 7_776_000)
        return Reply(status, json.dumps(self._body()).encode())

    def _body(self) -> dict[str, Any]:
        instant = EPOCH + timedelta(seconds=self.expires_at)
        return {
            "expires_at": instant.isoformat().replace("+00:00", "Z"),
            "fencing_token": self.fencing_token,
        }


def _error(status: int, code: str) -> Reply:
    return Reply(status, json.dumps({"error": code, "code": code}).encode())


class World:
    """Runs one flow against a service, with a fault for each request."""

    def __init__(self, faults: Iterable[Fault] = (), service: Service | None = None) -> None:
        self.now = 1_000.0
        self.steps = 0
        self.faults = iter(faults)
        self.service = service or Service()
        self.sent: list[tuple[float, Request, float]] = []
        self._arrivals: list[tuple[float, int, Request, list[Reply]]] = []
        self._number = itertools.count()
        self.each_event: Callable[[], None] = lambda: None
        self.tamper: Callable[[Answer], Answer] = lambda answer: answer

    def run(self, flow: Flow[Any], until: float = float("inf")) -> Any:
        """The flow's result, or None if time is up before it ends."""
        return self.go_on(flow, next(flow), until)

    def go_on(self, flow: Flow[Any], effect: Effect, until: float = float("inf")) -> Any:
        try:
            while self.now < until:
                if isinstance(effect, Send):
                    effect = flow.send(self.tamper(self._send(effect)))
                else:
                    effect = flow.send(self._sleep(effect, until))
                self.each_event()
        except StopIteration as done:
            self.each_event()
            return done.value
        flow.close()
        return None

    def _sleep(self, effect: Sleep, until: float) -> Woke:
        self.steps += 1
        assert self.steps < 20_000, "the flow spins"
        self._pass(max(self.now, min(effect.until, until)))
        return Woke(self.now)

    def _send(self, effect: Send) -> Answer:
        self.steps += 1
        assert self.steps < 20_000, "the flow spins"
        assert effect.timeout > 0, "a request that cannot be answered"
        fault = next(self.faults, FINE)
        sent_at = self.now
        self.sent.append((sent_at, effect.request, effect.timeout))
        slot: list[Reply] = []
        arrives = sent_at + fault.there
        if not fault.lost_request and fault.status is None:
            entry = (arrives, next(self._number), effect.request, slot)
            heapq.heappush(self._arrivals, entry)
        answered = arrives + fault.back
        silent = fault.lost_request or fault.lost_answer or answered > sent_at + effect.timeout
        seen = (sent_at + effect.timeout if silent else answered) + fault.pause
        self._pass(seen)
        result: Reply | NoAnswer
        if silent:
            result = NoAnswer(TimeoutError("no answer"), sent=True)
        elif fault.status is not None:
            result = Reply(fault.status, fault.body or b"<html>", fault.retry_after)
        else:
            result = slot[0]
            if fault.body is not None:
                result = Reply(result.status, fault.body)
        return Answer(sent_at, self.now, EPOCH + timedelta(seconds=sent_at), result)

    def _pass(self, target: float) -> None:
        """Move on, with every request processed at the instant at which it arrives."""
        while self._arrivals and self._arrivals[0][0] <= target:
            arrives, _, request, slot = heapq.heappop(self._arrivals)
            self.now = max(self.now, arrives)
            slot.append(self.service.handle(request, arrives))
            self.each_event()
        self.now = target
        self.each_event()


def make_rules(policy: Policy | None = None, entropy: Any = None) -> Rules:
    policy = policy or Policy()
    return Rules(policy, entropy or Counting(), Quota(policy))


def acquire_request(rules: Rules, ttl: int = 5, key: str = "job") -> Request:
    entropy = rules.entropy
    return Request(Operation.ACQUIRE, key, entropy.uuid(), Secret(entropy.uuid()), ttl)
