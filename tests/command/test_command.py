"""Options, key templates, endings and operators' commands, on the local lock service."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from volcano_locks import (
    AuthenticationFailed,
    ConfigurationError,
    InvalidRequest,
    LeaseLost,
    LockClient,
    LockHeld,
    Policy,
    StaleFence,
    command,
)
from volcano_locks.command import (
    OPTIONS,
    CommandEnded,
    KeyTemplate,
    LeaderOptions,
    force_release,
    run_leader_only,
    status,
)

from .stage import watched


@pytest.fixture
def client(tmp_path: Path) -> Iterator[LockClient]:
    with LockClient(api_url=f"local:{tmp_path / 'locks'}") as locks:
        yield locks


def answering(status: int, body: str = "", **headers: str) -> LockClient:
    """A client whose service answers everything like this."""
    transport = httpx.MockTransport(lambda _: httpx.Response(status, text=body, headers=headers))
    return LockClient("sk-test", transport=transport)


def run(client: LockClient, work: Any = lambda hold: "did it", **options: Any) -> tuple[Any, list]:
    said: list[str] = []
    value = run_leader_only(
        lambda: client, lambda: "job", LeaderOptions(**options), work, say=said.append
    )
    return value, said


# -- options -------------------------------------------------------------------------------------


def test_options_take_numbers_and_their_text() -> None:
    given = LeaderOptions(wait="2.5", if_held="fail", ttl="60", min_hold="1")  # type: ignore[arg-type]
    assert given == LeaderOptions(wait=2.5, if_held="fail", ttl=60, min_hold=1)
    assert LeaderOptions(wait="Forever").wait is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("wait", "soon"),
        ("wait", -1),
        ("wait", "nan"),
        ("wait", "inf"),
        ("wait", True),
        ("wait", b"1"),
        ("if_held", "wait"),
        ("ttl", 4),
        ("ttl", "4.5"),
        ("ttl", 7_776_001),
        ("min_hold", "-0.1"),
        ("min_hold", 86_401),
        ("min_hold", None),
    ],
)
def test_an_option_that_cannot_work_is_refused_before_anything_is_sent(
    field: str, value: object
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        LeaderOptions(**{field: value})  # type: ignore[arg-type]
    assert repr(value) in str(refused.value)
    assert refused.value.exit_code == 64


@pytest.mark.parametrize(
    ("options", "skips"),
    [
        ({}, True),
        ({"if_held": "skip"}, True),
        ({"if_held": "fail"}, False),
        ({"wait": 5}, False),
        ({"wait": 5, "if_held": "skip"}, True),
        ({"wait": None}, False),
    ],
)
def test_a_held_lock_is_skipped_unless_one_waited_for_it(
    options: dict[str, Any], skips: bool
) -> None:
    assert LeaderOptions(**options).skips is skips


def test_every_option_has_a_flag_a_name_and_words() -> None:
    assert [(option.flag, option.dest) for option in OPTIONS] == [
        ("--lock-wait", "lock_wait"),
        ("--if-held", "if_held"),
        ("--lock-ttl", "lock_ttl"),
        ("--lock-min-hold", "lock_min_hold"),
    ]
    assert all(option.help.endswith(".") for option in OPTIONS)


# -- keys ----------------------------------------------------------------------------------------


def test_a_template_is_filled_from_the_parameters() -> None:
    template = KeyTemplate("billing.{tenant}:{year}")
    assert template.fields == ("tenant", "year")
    assert template.fill({"tenant": "acme", "year": 2026, "else": 1}) == "billing.acme:2026"


@pytest.mark.parametrize("tenant", [None, "", "a b", "ä", "x" * 128, "a/b", ["a"]])
def test_a_value_that_makes_no_key_is_a_usage_error(tenant: object) -> None:
    with pytest.raises(InvalidRequest):
        KeyTemplate("billing.{tenant}").fill({"tenant": tenant})


def test_a_missing_value_is_named() -> None:
    with pytest.raises(InvalidRequest, match="needs a value for 'tenant'"):
        KeyTemplate("billing.{tenant}").fill({})


@pytest.mark.parametrize(
    "text",
    ["", "{}", "{0}", "{a.b}", "{a[0]}", "{a!r}", "{a:>3}", "{a", "a}", "a b", "-a", "{{a}}"],
)
def test_a_template_that_can_make_no_key_is_refused_at_once(text: str) -> None:
    with pytest.raises(ConfigurationError, match="billing"):
        KeyTemplate(text)


# -- endings -------------------------------------------------------------------------------------


def test_the_leader_gets_its_hold_and_gives_the_lock_back(client: LockClient) -> None:
    value, said = run(client, lambda hold: (hold.key, hold.lost, client.get("job").held))
    assert value == ("job", False, True)
    assert not said
    assert not client.get("job").held


def test_a_held_lock_is_skipped_with_words_for_standard_output(client: LockClient) -> None:
    with client.hold("job"):
        assert run(client) == (None, ["skipped: lock 'job' is held by another process"])


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        ValueError("I/O operation on closed file"),
        AttributeError("'NoneType' object has no attribute 'write'"),  # Django, started with >&-
    ],
)
def test_a_skip_that_cannot_be_printed_is_a_skip_all_the_same(
    client: LockClient, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def say(line: str) -> None:
        raise error

    with client.hold("job"):
        assert (
            run_leader_only(lambda: client, lambda: "job", LeaderOptions(), print, say=say) is None
        )
    said = "skipped: lock 'job' is held by another process (which could not be printed: "
    assert said + repr(error) in caplog.text


def test_a_body_may_give_the_lease_back_and_go_on_with_what_needs_none(
    client: LockClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(command, "_NAP", 0.01)

    def body(hold: Any) -> str:
        hold.release()
        assert not client.get("job").held
        watched()
        return "mails sent"

    assert run(client, body) == ("mails sent", [])
    assert not caplog.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"if_held": "fail"}, "not run: lock 'job' is held by another process"),
        ({"wait": 0.2}, "not run: lock 'job' was held by another process for all of 0.2 s"),
    ],
)
def test_a_held_lock_fails_with_75_if_asked_to_or_after_a_wait(
    client: LockClient, options: dict[str, Any], words: str
) -> None:
    with client.hold("job"), pytest.raises(CommandEnded) as ended:
        run(client, **options)
    assert (ended.value.exit_code, str(ended.value)) == (75, words)
    assert isinstance(ended.value.__cause__, LockHeld)


@pytest.mark.parametrize(
    ("client", "code", "words"),
    [
        (answering(503, '{"code": "lock_service_unavailable"}'), 69, "could not find out"),
        (answering(502, "<html>"), 69, "could not find out"),
        (answering(200, "<html>"), 69, "could not find out"),
        (answering(429, **{"Retry-After": "7"}), 69, "could not find out"),
        (answering(401), 77, "not run: "),
        (answering(403), 77, "not run: "),
        (answering(400), 64, "not run: "),
    ],
)
def test_each_refusal_has_its_exit_code_and_the_body_never_runs(
    client: LockClient, code: int, words: str
) -> None:
    with pytest.raises(CommandEnded, match=words) as ended:
        run(client, lambda hold: pytest.fail("the body ran"))
    assert ended.value.exit_code == code
    assert "held" not in str(ended.value)


def test_a_configuration_that_cannot_work_ends_with_78() -> None:
    with pytest.raises(CommandEnded, match="anon key") as ended:
        run_leader_only(
            lambda: LockClient("ak-test"), lambda: "job", LeaderOptions(), print, say=print
        )
    assert ended.value.exit_code == 78


def test_a_bad_key_ends_with_64_before_there_is_a_client() -> None:
    with pytest.raises(CommandEnded) as ended:
        run_leader_only(
            lambda: pytest.fail("a client was made"),
            lambda: KeyTemplate("billing.{tenant}").fill({"tenant": "a b"}),
            LeaderOptions(),
            print,
            say=print,
        )
    assert ended.value.exit_code == 64


def test_a_refused_write_ends_with_76_and_both_tokens(client: LockClient) -> None:
    def body(hold: Any) -> None:
        raise StaleFence("job", offered=5, stored=6)

    with pytest.raises(CommandEnded, match=r"stopped: stale write refused.* 5, .* 6") as ended:
        run(client, body)
    assert ended.value.exit_code == 76


def test_the_bodys_own_errors_come_through_as_they_are(client: LockClient) -> None:
    with pytest.raises(ZeroDivisionError):
        run(client, lambda hold: 1 / 0)
    assert not client.get("job").held

    def body(hold: Any) -> None:
        raise LockHeld("another")

    with pytest.raises(LockHeld, match="another"):
        run(client, body)


def test_an_unknown_outcome_in_the_body_does_not_claim_that_nothing_ran(
    client: LockClient,
) -> None:
    with pytest.raises(CommandEnded) as ended:
        run(client, lambda hold: answering(503).get("else"))
    assert ended.value.exit_code == 69
    assert "not run" not in str(ended.value)


def test_a_forced_release_is_noticed_and_ends_with_76(tmp_path: Path) -> None:
    often = Policy(first_renewal=0.05)

    def body(hold: Any) -> None:
        client.force_release("job")
        hold.wait_lost(60)

    with LockClient(api_url=f"local:{tmp_path / 'locks'}", policy=often) as client:
        with pytest.raises(CommandEnded, match="stopped: lease of 'job'") as ended:
            run(client, body)
    assert ended.value.exit_code == 76
    assert isinstance(ended.value.__cause__, LeaseLost)


# -- operators' commands -------------------------------------------------------------------------


def test_status_says_held_and_free(client: LockClient) -> None:
    said: list[str] = []
    with client.hold("job") as hold:
        status(lambda: client, ["job", "other"], say=said.append)
    assert said[0].startswith("job: held until 20")
    assert said[0].endswith(f"unless renewed, fencing token {hold.fencing_token}")
    assert said[1] == "other: free"


def test_status_ends_with_the_error_of_the_key_that_it_could_not_read() -> None:
    with pytest.raises(CommandEnded) as ended:
        status(lambda: answering(401), ["job"], say=pytest.fail)
    assert ended.value.exit_code == 77
    assert isinstance(ended.value.__cause__, AuthenticationFailed)


def test_a_forced_release_asks_first_and_names_the_fence(client: LockClient) -> None:
    said: list[str] = []
    asked: list[str] = []

    def confirm(answer: bool) -> Any:
        return lambda question: asked.append(question) or answer

    lease = client.acquire("job")
    with pytest.raises(CommandEnded, match="nothing was released") as ended:
        force_release(lambda: client, "job", confirm=confirm(False), say=said.append)
    assert ended.value.exit_code == 1
    assert client.get("job").held
    assert "fence" in asked[0]

    force_release(lambda: client, "job", confirm=confirm(True), say=said.append)
    assert not client.get("job").held
    assert "only the fence protects" in said[0]
    assert lease is not None
    with pytest.raises(LeaseLost):
        client.renew(lease)


def test_a_forced_release_of_a_bad_key_asks_nobody(client: LockClient) -> None:
    with pytest.raises(CommandEnded) as ended:
        force_release(lambda: client, "a b", confirm=pytest.fail, say=pytest.fail)
    assert ended.value.exit_code == 64


def test_the_module_imports_no_framework() -> None:
    code = (
        "import sys, volcano_locks.command;"
        "print([m for m in ('django', 'flask', 'click', 'httpx', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
