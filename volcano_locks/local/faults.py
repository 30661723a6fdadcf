"""What goes wrong next, on purpose: for tests and demos, off by default.

The law of this module: it plans faults and tells them, and performs none. Where a message can be
lost or an answer can wait is known by the transport or the server that asks.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Final

from ..contract import (
    LOCK_RATE_LIMITED,
    LOCK_SERVICE_UNAVAILABLE,
    Operation,
    Reply,
    encode_error,
)
from ..errors import InvalidRequest
from ..models import check_key

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Fault", "Faults", "Plan"]


class Fault(Enum):
    """The faults by the names that the admin route and ``fail_next`` take."""

    DELAY = "delay"
    """The request arrives ``seconds`` later."""
    DELAY_ANSWER = "delay-answer"
    """The request is done at once, and its answer takes ``seconds``."""
    DROP_REQUEST = "drop-request"
    """Nothing is done, and no answer comes."""
    DROP_ANSWER = "drop-answer"
    """The request is done, and no answer comes."""
    UNAVAILABLE = "503"
    """503 ``lock_service_unavailable`` (rule 11)."""
    PAUSED = "paused"
    """503 ``service_unavailable`` with ``Retry-After: 60`` (rule 11)."""
    RATE_LIMITED = "429"
    """429 ``lock_rate_limited``, with ``seconds`` as its ``Retry-After``."""
    BAD_GATEWAY = "html-502"
    """A gateway's 502 with a page of HTML."""
    FREEZE = "freeze"
    """The request hangs until ``clear()`` or for ``seconds``, and is done then."""

    @classmethod
    def named(cls, name: str) -> Fault:
        """The fault of that name; ValueError, which lists them all, if there is none."""
        try:
            return cls(name)
        except ValueError:
            known = ", ".join(fault.value for fault in cls)
            raise ValueError(f"no fault is named {name!r:.50}; there are: {known}") from None


DEFAULT_SECONDS: Final = {Fault.DELAY: 1.0, Fault.DELAY_ANSWER: 1.0, Fault.FREEZE: 3_600.0}


@dataclass(frozen=True)
class Plan:
    """A fault for the next ``times`` requests that fit; None for ``operation``, ``key`` or
    ``project``: all fit."""

    fault: Fault
    times: int = 1
    operation: Operation | None = None
    key: str | None = None
    seconds: float = 0.0
    project: str | None = None

    def fits(self, method: str, path: str, project: str | None) -> bool:
        if self.project not in (None, project):
            return False
        _, _, rest = path.partition("/locks/")
        key, _, lease = rest.partition("/")
        operation = self.operation
        if operation is not None and (
            operation.method != method or operation.on_lease is not (lease == "lease")
        ):
            return False
        return self.key is None or self.key == key

    def canned(self) -> Reply | None:
        """The answer that stands in for the service's own, if the fault is one."""
        if self.fault is Fault.UNAVAILABLE:
            return Reply(503, encode_error("a planned fault", LOCK_SERVICE_UNAVAILABLE))
        if self.fault is Fault.PAUSED:
            return Reply(503, encode_error("the project is paused", "service_unavailable"), "60")
        if self.fault is Fault.RATE_LIMITED:
            body = encode_error("a planned fault", LOCK_RATE_LIMITED)
            return Reply(429, body, f"{max(1, round(self.seconds))}")
        if self.fault is Fault.BAD_GATEWAY:
            return Reply(502, b"<html><h1>502 Bad Gateway</h1></html>")
        return None


class Faults:
    """The faults planned for one service, in the order in which they were planned. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plans: list[Plan] = []
        self._thaws: dict[Callable[[], None], str | None] = {}
        self.shift = 0
        """Milliseconds by which the service's clock is off; it is one clock for all projects."""

    def plan(
        self,
        fault: Fault | str,
        times: int = 1,
        *,
        operation: Operation | str | None = None,
        key: str | None = None,
        seconds: float | None = None,
        project: str | None = None,
    ) -> Plan:
        """Plan a fault. ValueError for one that does not exist, a senseless number or no lock's key."""
        fault = Fault.named(fault) if isinstance(fault, str) else fault
        if isinstance(operation, str):
            try:
                operation = Operation[operation.upper().replace("-", "_")]
            except KeyError:
                raise ValueError(f"no operation is named {operation!r:.50}") from None
        if key is not None:
            try:
                check_key(key)
            except InvalidRequest as error:
                raise ValueError(str(error)) from None
        if seconds is None:
            seconds = DEFAULT_SECONDS.get(fault, 0.0)
        if not 1 <= times <= 1_000_000 or not 0 <= seconds <= 86_400:
            raise ValueError("times is from 1 to 1,000,000 and seconds from 0 to 86,400")
        plan = Plan(fault, times, operation, key, seconds, project)
        with self._lock:
            self._plans.append(plan)
        return plan

    def take(self, method: str, path: str, project: str | None = None) -> Plan | None:
        """The fault that this request of ``project`` meets, if any; it is used up by that."""
        if not self._plans:
            return None
        with self._lock:
            for index, plan in enumerate(self._plans):
                if plan.fits(method, path, project):
                    if plan.times > 1:
                        self._plans[index] = replace(plan, times=plan.times - 1)
                    else:
                        del self._plans[index]
                    return plan
        return None

    def pending(self, project: str | None = None) -> list[Plan]:
        """What is planned and not used up yet: by that project, or by anybody."""
        with self._lock:
            return [plan for plan in self._plans if project in (None, plan.project)]

    def clear(self, project: str | None = None) -> None:
        """Drop what that project planned and let its frozen requests go on; None: what anybody
        planned, and set the clock right, too."""
        with self._lock:
            self._plans = [plan for plan in self._plans if project not in (None, plan.project)]
            if project is None:
                self.shift = 0
            thaws = [thaw for thaw, by in self._thaws.items() if project in (None, by)]
        for thaw in thaws:
            thaw()

    def on_thaw(self, thaw: Callable[[], None], project: str | None = None) -> Callable[[], None]:
        """Have ``thaw`` called by each ``clear()`` of what ``project`` planned, until the function
        that this returns is called."""
        with self._lock:
            self._thaws[thaw] = project

        def forget() -> None:
            with self._lock:
                del self._thaws[thaw]

        return forget

    def shifted(self, clock: Callable[[], int]) -> Callable[[], int]:
        """The clock, off by ``shift`` milliseconds."""
        return lambda: clock() + self.shift
