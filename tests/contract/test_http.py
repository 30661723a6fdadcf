"""What the contract says of messages: routes, headers, bodies, limits, errors."""

from __future__ import annotations

import uuid

import pytest

from tests.contract import forms
from tests.contract.conftest import POWERLESS, TINY
from tests.contract.served import served
from volcano_locks._http import httpx

LEASE = "/locks/{}/lease"


def test_the_longest_and_oddest_legal_keys_work(http_form, token):
    for key in ("a", f"9.{'x' * 125}:", f"A._:-{uuid.uuid4()}"):
        path = LEASE.format(key)
        taken = http_form.send("POST", path, token=token, body={"ttl_seconds": 5})
        assert taken.status_code == 201, key
        assert http_form.send("DELETE", path, token=token).status_code == 204


@pytest.mark.parametrize("key", ["-a", ".a", "a b", "ä", "a" * 129, "a!", "%00", "a%0A"])
def test_an_illegal_key_is_400(http_form, key, token):
    answer = http_form.send("POST", LEASE.format(key), token=token, body={"ttl_seconds": 5})
    assert answer.status_code == 400
    assert answer.json()["error"]


@pytest.mark.parametrize(
    "body",
    [
        {"ttl_seconds": 4},
        {"ttl_seconds": 7_776_001},
        {"ttl_seconds": -5},
        {"ttl_seconds": 5.5},
        {"ttl_seconds": "10"},
        {"ttl_seconds": True},
        {"ttl_seconds": None},
        {"ttl_seconds": 10**40},
        {"ttl_seconds": 10, "owner": "me"},
        {},
        [],
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 3_000,
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["POST", "PATCH"])
def test_a_bad_body_is_400(http_form, method, body, key, token):
    assert http_form.send(method, LEASE.format(key), token=token, body=body).status_code == 400


@pytest.mark.parametrize("ttl", [5, 7_776_000])
def test_the_shortest_and_the_longest_ttl_are_legal(http_form, ttl, key, token):
    path = LEASE.format(key)
    assert http_form.send("POST", path, token=token, body={"ttl_seconds": ttl}).status_code == 201
    http_form.send("DELETE", path, token=token)


@pytest.mark.parametrize("header", ["X-Volcano-Lock-Token", "X-Volcano-Request-Id"])
@pytest.mark.parametrize("value", [None, "", "not-a-uuid", "1234"])
def test_a_missing_or_bad_id_is_400(http_form, header, value, key, token):
    answer = http_form.send(
        "POST", LEASE.format(key), token=token, body={"ttl_seconds": 5}, headers={header: value}
    )
    assert answer.status_code == 400


def test_a_refusal_repeats_no_token(http_form, key, token, other):
    path = LEASE.format(key)
    http_form.send("POST", path, token=token, body={"ttl_seconds": 10})
    refused = http_form.send("POST", path, token=other, body={"ttl_seconds": 10})
    assert refused.status_code == 409
    assert token not in refused.text
    assert other not in refused.text
    http_form.send("DELETE", path, token=token)


@pytest.mark.parametrize(
    "path", ["/locks", "/locks/a/b", "/locks/a/", "/locks/a/lease/x", "/nothing"]
)
def test_an_unknown_route_is_404(http_form, path):
    assert http_form.send("GET", path).status_code == 404


@pytest.mark.parametrize(
    ("method", "path"), [("PUT", "/locks/a"), ("POST", "/locks/a"), ("GET", "/locks/a/lease")]
)
def test_a_method_that_a_route_does_not_take_is_405(http_form, method, path, token):
    assert http_form.send(method, path, token=token, body={}).status_code == 405


def test_an_anon_key_is_refused(http_form, key):
    answer = http_form.send("GET", f"/locks/{key}", headers={"Authorization": "Bearer ak-anon"})
    assert answer.status_code == 403


@pytest.fixture
def served_form(server_url):
    form = forms.ServedForm(server_url, TINY)
    with form.client:
        yield form


@pytest.mark.parametrize("value", [None, "", "Bearer", "Bearer sk-wrong", "Basic c2s6", "sk-tiny"])
def test_a_missing_or_wrong_credential_is_401(served_form, value, key):
    answer = served_form.send("GET", f"/locks/{key}", headers={"Authorization": value})
    assert answer.status_code == 401
    assert "sk-wrong" not in answer.text


def test_a_key_without_the_permission_is_403(served_form, key):
    value = f"Bearer {POWERLESS}"
    answer = served_form.send("GET", f"/locks/{key}", headers={"Authorization": value})
    assert answer.status_code == 403


def test_a_name_in_two_projects_is_two_locks(served_form, server_url, key, token, other):
    path = LEASE.format(key)
    default = forms.ServedForm(server_url, "sk-local-development")
    with default.client:
        for form, owner in ((served_form, token), (default, other)):
            taken = form.send("POST", path, token=owner, body={"ttl_seconds": 10})
            assert taken.status_code == 201
            assert form.send("DELETE", path, token=owner).status_code == 204


def test_a_body_that_is_too_large_is_refused(served_form, key, token):
    for body in (b"x" * 5_000, b" " * 200_000):
        answer = served_form.send("POST", LEASE.format(key), token=token, body=body)
        assert answer.status_code == 413
    chunks = (b"x" * 1_000 for _ in range(10))
    assert served_form.client.post(LEASE.format(key), content=chunks).status_code == 413


def test_rule_10_the_601st_operation_of_a_minute_is_429(key):
    now = 1_800_000_000_000 // 60_000 * 60_000 + 20_000
    transport = forms.LocalTransport(None, clock=lambda: now)
    form = forms.HttpForm(httpx.Client(transport=transport, base_url="http://local"), None)
    with form.client:
        for _ in range(300):
            assert form.send("GET", f"/locks/{key}").status_code == 200
            assert form.send("DELETE", f"/locks/{key}").status_code == 204
        refused = form.send("GET", f"/locks/{key}")
        assert refused.status_code == 429
        assert refused.json()["code"] == "lock_rate_limited"
        assert refused.headers["Retry-After"] == "40"
        now += 40_000
        assert form.send("GET", f"/locks/{key}").status_code == 200


def test_rule_10_each_project_of_a_server_has_a_quota_of_its_own(key):
    options = ("--quota", "3", "--project", f"tiny={TINY}")
    with served(*options, standing_at=forms.STANDING_AT + 20_000) as server:
        tiny = forms.ServedForm(server.url, TINY)
        default = forms.ServedForm(server.url, "sk-local-development")
        with tiny.client, default.client:
            answers = [tiny.send("GET", f"/locks/{key}") for _ in range(5)]
            assert [answer.status_code for answer in answers] == [200] * 3 + [429] * 2
            assert [answer.headers["Retry-After"] for answer in answers[3:]] == ["40"] * 2
            assert default.send("GET", f"/locks/{key}").status_code == 200
