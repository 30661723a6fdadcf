"""Bytes to values and back, with all the oddities that answers have."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from volcano_locks.contract import (
    Malformed,
    Operation,
    Reply,
    Request,
    check_request,
    decode_code,
    decode_grant,
    decode_request,
    decode_state,
    encode_error,
    encode_grant,
    encode_state,
    format_instant,
    parse_instant,
    parse_retry_after,
)
from volcano_locks.errors import LeaseLost, StaleFence, VolcanoLocksError
from volcano_locks.models import LockState, Secret

UTC = timezone.utc
NOW = datetime(2026, 7, 20, 14, 0, 0, tzinfo=UTC)
TOKEN = "11111111-1111-4111-8111-111111111111"
REQUEST_ID = "22222222-2222-4222-8222-222222222222"


@pytest.mark.parametrize(  # H4
    ("header", "seconds"),
    [
        ("2", 2.0),
        ("1.5", 1.5),
        ("Mon, 20 Jul 2026 14:00:30 GMT", 30.0),
        ("Mon, 20 Jul 2026 13:00:00 GMT", 0.0),
        ("-1", 0.0),
        ("nan", None),
        ("inf", None),
        ("9" * 5_000, None),
        ("1e400", None),
        ("soon", None),
        ("", None),
        (None, None),
        ("Mon, 99 Jul 2026 14:00:30 GMT", None),
    ],
)
def test_retry_after_is_finite_and_at_least_zero_or_ignored(
    header: str | None, seconds: float | None
) -> None:
    assert parse_retry_after(header, NOW) == seconds


@given(st.text(max_size=120))
def test_no_retry_after_crashes(header: str) -> None:
    seconds = parse_retry_after(header, NOW)
    assert seconds is None or seconds >= 0


@pytest.mark.parametrize(  # H7
    ("text", "instant"),
    [
        ("2026-07-20T14:00:10Z", datetime(2026, 7, 20, 14, 0, 10, tzinfo=UTC)),
        ("2026-07-20T14:00:10.5Z", datetime(2026, 7, 20, 14, 0, 10, 500_000, tzinfo=UTC)),
        ("2026-07-20T14:00:10.123456789Z", datetime(2026, 7, 20, 14, 0, 10, 123_456, tzinfo=UTC)),
        ("2026-07-20T14:00:10", datetime(2026, 7, 20, 14, 0, 10, tzinfo=UTC)),
        ("2026-07-20T16:00:10+02:00", datetime(2026, 7, 20, 14, 0, 10, tzinfo=UTC)),
        ("2026-13-20T14:00:10Z", None),
        ("0001-01-01T00:00:00+14:00", None),
        ("tomorrow", None),
        (None, None),
        (17, None),
    ],
)
def test_instants_are_aware_utc_or_ignored(text: object, instant: datetime | None) -> None:
    parsed = parse_instant(text)
    assert parsed == instant
    assert parsed is None or parsed.tzinfo is UTC


@given(st.binary(max_size=200))
def test_no_body_crashes_the_client(body: bytes) -> None:
    reply = Reply(200, body)
    decode_grant(reply)
    decode_state(reply)
    decode_code(reply)


@given(st.text(max_size=8), st.text(max_size=200), st.binary(max_size=100))
def test_no_request_crashes_the_service(method: str, path: str, body: bytes) -> None:
    headers = {"x-volcano-request-id": REQUEST_ID, "X-VOLCANO-LOCK-TOKEN": TOKEN}
    decode_request(method, path, headers, body)


def test_a_deep_body_is_no_crash() -> None:
    assert decode_grant(Reply(201, b"[" * 100_000)) is None


@pytest.mark.parametrize("token", [0, 1, 2**53 + 1, 2**63 - 1])
def test_fencing_tokens_stay_exact_to_64_bits_as_numbers_and_as_strings(token: int) -> None:  # F8
    number = decode_grant(Reply(201, encode_grant(NOW, token)))
    text = decode_grant(Reply(201, json.dumps({"fencing_token": str(token)}).encode()))
    assert number is not None
    assert text is not None
    assert number.fencing_token == text.fencing_token == token


@pytest.mark.parametrize("token", [2**63, -1, 1.0, True, "-1", "1e3", None, [], "9" * 30])
def test_what_is_no_fencing_token_is_none(token: object) -> None:
    grant = decode_grant(Reply(201, json.dumps({"fencing_token": token}).encode()))
    assert grant is not None
    assert grant.fencing_token is None


def test_unknown_fields_of_an_answer_are_ignored() -> None:
    body = b'{"expires_at": "2026-07-20T14:00:10Z", "fencing_token": 5, "region": "eu"}'
    assert decode_grant(Reply(201, body)) is not None


@pytest.mark.parametrize("operation", list(Operation))
def test_every_request_survives_the_wire(operation: Operation) -> None:
    request = Request(
        operation,
        "a:b.c_d-e",
        REQUEST_ID,
        Secret(TOKEN) if operation.on_lease else None,
        30 if operation.has_ttl else None,
    )
    assert (
        decode_request(operation.method, request.path, request.headers, request.content) == request
    )
    assert check_request(request) == request


@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize("flaw", ["key", "request id", "token", "no token", "ttl", "no ttl"])
def test_a_request_is_checked_alike_with_and_without_its_message(
    operation: Operation, flaw: str
) -> None:
    token = {"token": Secret("mine"), "no token": None}.get(flaw, Secret(TOKEN.upper()))
    ttl = {"ttl": 4, "no ttl": None}.get(flaw, 30)
    request = Request(
        operation,
        "-job" if flaw == "key" else "job",
        "r" if flaw == "request id" else REQUEST_ID.upper(),
        token if operation.on_lease else None,
        ttl if operation.has_ttl else None,
    )
    found = check_request(request)
    asked = decode_request(operation.method, request.path, request.headers, request.content)
    assert type(found) is type(asked)
    if isinstance(found, Malformed) and isinstance(asked, Malformed):
        assert found.status == asked.status
        assert "mine" not in found.message
    else:
        assert found == asked


@pytest.mark.parametrize(
    ("method", "path", "body", "drop", "status"),
    [
        ("POST", "/locks/job/lease", b'{"ttl_seconds": 4}', "", 400),
        ("POST", "/locks/job/lease", b'{"ttl_seconds": 5.0}', "", 400),
        ("POST", "/locks/job/lease", b'{"ttl_seconds": true}', "", 400),
        ("POST", "/locks/job/lease", b'{"ttl_seconds": 30, "x": 1}', "", 400),
        ("POST", "/locks/job/lease", b"", "", 400),
        ("POST", "/locks/job/lease", b"[]", "", 400),
        ("POST", "/locks/bad key/lease", b'{"ttl_seconds": 30}', "", 400),
        ("POST", "/locks/job/lease", b'{"ttl_seconds": 30}', "X-Volcano-Lock-Token", 400),
        ("GET", "/locks/job", b"", "X-Volcano-Request-Id", 400),
        ("PUT", "/locks/job", b"", "", 405),
        ("GET", "/locks/job/lease", b"", "", 405),
        ("GET", "/locks", b"", "", 404),
        ("GET", "/locks/a/b/lease", b"", "", 404),
    ],
)
def test_bad_requests_are_refused_with_words(
    method: str, path: str, body: bytes, drop: str, status: int
) -> None:
    headers = {"X-Volcano-Request-Id": REQUEST_ID, "X-Volcano-Lock-Token": TOKEN}
    headers.pop(drop, None)
    refused = decode_request(method, path, headers, body)
    assert isinstance(refused, Malformed)
    assert refused.status == status
    assert refused.message
    assert TOKEN not in refused.message


def test_states_and_errors_survive_the_wire() -> None:
    for state in (LockState(False), LockState(True, NOW, 7)):
        assert decode_state(Reply(200, encode_state(state))) == state
    assert encode_state(LockState(False)) == b'{"held": false}'
    assert decode_code(Reply(409, encode_error("held", "lock_held"))) == "lock_held"
    assert decode_code(Reply(502, b"<html>")) is None


def test_instants_are_written_with_z() -> None:
    assert format_instant(NOW) == "2026-07-20T14:00:00Z"
    assert format_instant(NOW + timedelta(milliseconds=5)) == "2026-07-20T14:00:00.005000Z"


def test_errors_survive_pickling_with_all_they_carry() -> None:
    import pickle

    for error in (
        LeaseLost("job", "gone", fencing_token=5, status=409, code="x", request_id=REQUEST_ID),
        StaleFence("job", offered=1, stored=2),
        VolcanoLocksError("plain"),
    ):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert str(copy) == str(error)
        assert vars(copy) == vars(error)


def test_a_secret_is_neither_shown_nor_pickled() -> None:
    import pickle

    secret = Secret("s3cret")
    assert "s3cret" not in f"{secret!r} {secret} {[secret]}"
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(secret)
