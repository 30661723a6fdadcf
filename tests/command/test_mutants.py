"""Broken on purpose: what each of these would cost, seen by the same jobs that show the right thing."""

from __future__ import annotations

import signal

from .jobs import Job, run

MUTATE = "from volcano_locks import command\nfrom volcano_locks.command import _Run\n"


def outcome_of_a_signal_during_the_release(mutant: str) -> str:
    with Job(f"{MUTATE}{mutant}\nlead(lambda hold: None, releasing=told)") as job:
        job.expect("releasing")
        job.send(signal.SIGTERM)
        job.tell()
        return job.end().out


def test_a_handler_that_raises_wherever_it_strikes_tears_the_release() -> None:
    assert outcome_of_a_signal_during_the_release("").endswith("\nreleased")
    torn = outcome_of_a_signal_during_the_release("_Run._may_raise = lambda self, frame: True")
    assert "released" not in torn


def outcome_of_handlers(mutant: str) -> str:
    return run(
        f"""{MUTATE}{mutant}
before = signal.getsignal(signal.SIGTERM)
lead(lambda hold: None)
say("back" if signal.getsignal(signal.SIGTERM) is before else "lost")
"""
    ).out.splitlines()[-1]


def test_handlers_that_are_not_put_back_are_noticed() -> None:
    assert outcome_of_handlers("") == "back"
    assert outcome_of_handlers("_Run._restore = lambda self: None") == "lost"


def outcome_of_a_loss(body: str, mutant: str = "") -> str:
    nap = 1 if mutant else 600  # a loss that is told ends any nap; one that is not, none
    return run(f"NAP = {nap}\n{MUTATE}{mutant}\n{body}\nlead(body)").out


SLEEPS = """
def body(hold):
    hold.lose_soon()
    time.sleep(NAP)
    say("went on")
"""
SWALLOWS = """
def body(hold):
    for _ in range(2):
        try:
            hold.lose_soon()
            time.sleep(NAP)
        except LeaseLost:
            pass
        else:
            say("went on")
"""


def test_a_watcher_that_signals_nobody_lets_the_body_go_on() -> None:
    assert "went on" not in outcome_of_a_loss(SLEEPS)
    assert "went on" in outcome_of_a_loss(SLEEPS, "_Run._press = lambda self, unheard: None")


def test_a_loss_that_is_told_only_once_lets_a_deaf_body_go_on() -> None:
    assert "went on" not in outcome_of_a_loss(SWALLOWS)
    assert "went on" in outcome_of_a_loss(SWALLOWS, "command._AGAIN = 60")
