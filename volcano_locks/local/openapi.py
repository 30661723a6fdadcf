"""The OpenAPI document of the local lock service: the contract for machines.

The law of this module: it describes what ``contract.md`` says and the service does; schemathesis
holds the two together. Nothing here is used to serve a request.
"""

from __future__ import annotations

from typing import Any, Final

from ..contract import KEY_PATTERN, REQUEST_ID_HEADER, TOKEN_HEADER
from ..models import MAX_FENCING_TOKEN, MAX_TTL, MIN_TTL

__all__ = ["document"]

_UUID: Final = {"type": "string", "format": "uuid"}
_TTL_BODY: Final = {
    "type": "object",
    "required": ["ttl_seconds"],
    "additionalProperties": False,
    "properties": {"ttl_seconds": {"type": "integer", "minimum": MIN_TTL, "maximum": MAX_TTL}},
}
_TOKEN: Final = {"type": "integer", "format": "int64", "minimum": 0, "maximum": MAX_FENCING_TOKEN}
_INSTANT: Final = {"type": "string", "format": "date-time"}
_GRANT: Final = {
    "type": "object",
    "required": ["expires_at", "fencing_token"],
    "properties": {"expires_at": _INSTANT, "fencing_token": _TOKEN},
}
_STATE: Final = {
    "oneOf": [
        {
            "type": "object",
            "required": ["held", "expires_at", "fencing_token"],
            "properties": {
                "held": {"const": True},
                "expires_at": _INSTANT,
                "fencing_token": _TOKEN,
            },
        },
        {
            "type": "object",
            "required": ["held"],
            "additionalProperties": False,
            "properties": {"held": {"const": False}},
        },
    ]
}
_ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string"}, "code": {"type": "string"}},
}
_WORDS: Final = {
    "400": "A bad key, token, request id or TTL",
    "401": "The credential is missing or not valid",
    "403": "Not a service key, or one without locks.manage",
    "404": "No such route",
    "409": "lock_held or lock_ownership_lost",
    "413": "A body larger than any that the contract knows",
    "429": "lock_rate_limited: the project's operations of this minute are used up",
    "503": "Ownership cannot be decided: fail closed",
}


def document(url: str = "/") -> dict[str, Any]:
    """The document, as plain JSON values. ``url``: where the service is."""
    lease = [_header(REQUEST_ID_HEADER), _header(TOKEN_HEADER)]
    read = [_header(REQUEST_ID_HEADER)]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Volcano project locks, local service",
            "version": "1",
            "description": "Leases on names, with fencing tokens. A lease is judged by this "
            "service's clock; takeover waits one second after its expiry.",
        },
        "servers": [{"url": url}],
        "security": [{"serviceKey": []}],
        "paths": {
            "/locks/{key}/lease": {
                "parameters": [_key()],
                "post": _operation("acquire", "Acquire a lease", lease, "201", _GRANT, body=True),
                "patch": _operation("renew", "Renew a lease", lease, "200", _GRANT, body=True),
                "delete": _operation("release", "Release a lease", lease, "204"),
            },
            "/locks/{key}": {
                "parameters": [_key()],
                "get": _operation("get", "See whether a lock is held", read, "200", _STATE),
                "delete": _operation(
                    "forceRelease", "Drop any lease; breaks mutual exclusion", read, "204"
                ),
            },
        },
        "components": {
            "securitySchemes": {"serviceKey": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": _ERROR},
        },
    }


def _key() -> dict[str, Any]:
    schema = {"type": "string", "pattern": f"^{KEY_PATTERN}$", "maxLength": 128}
    return {"name": "key", "in": "path", "required": True, "schema": schema}


def _header(name: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": True, "schema": _UUID}


def _operation(
    name: str,
    summary: str,
    headers: list[dict[str, Any]],
    success: str,
    schema: dict[str, Any] | None = None,
    *,
    body: bool = False,
) -> dict[str, Any]:
    statuses = sorted(_WORDS.keys() - ({"409"} if len(headers) == 1 else set()))
    refusals: dict[str, Any] = {
        status: {
            "description": _WORDS[status],
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
        }
        for status in statuses
    }
    for status in ("429", "503"):
        refusals[status]["headers"] = {
            "Retry-After": {"schema": {"type": "string"}, "required": status == "429"}
        }
    done: dict[str, Any] = {"description": "Done"}
    if schema is not None:
        done["content"] = {"application/json": {"schema": schema}}
    operation: dict[str, Any] = {
        "operationId": name,
        "summary": summary,
        "parameters": headers,
        "responses": {success: done, **refusals},
    }
    if body:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _TTL_BODY}},
        }
    return operation
