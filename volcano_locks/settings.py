"""Configuration: the one place where it becomes values.

The law of this module: explicit values win over the environment, the environment over ``.env``, and
nothing is read or validated at import. An empty variable means unset. Nothing falls back to the
local service: ``VOLCANO_API_URL`` chooses it, or nothing does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import AliasChoices, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from .contract import DEFAULT_API_URL
from .errors import ConfigurationError
from .models import MAX_TTL, MIN_TTL

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["LockSettings"]


def _names(*names: str) -> AliasChoices:
    return AliasChoices(*names)


class LockSettings(BaseSettings):
    """All settings of a client, with the variable that sets each."""

    model_config = SettingsConfigDict(
        env_file=".env",
        env_file_encoding="utf-8",
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        populate_by_name=True,
        hide_input_in_errors=True,
    )

    api_url: str = Field(DEFAULT_API_URL, validation_alias=_names("VOLCANO_API_URL"))
    """The service: https://..., http:// on loopback, or ``local:`` / ``local:PATH``."""
    service_key: SecretStr | None = Field(
        None, validation_alias=_names("VOLCANO_SERVICE_KEY", "SERVICE_ROLE_KEY")
    )
    """The project's service key, ``sk-...``. ``local:`` needs none."""
    ttl: int = Field(30, ge=MIN_TTL, le=MAX_TTL, validation_alias=_names("VOLCANO_LOCKS_TTL"))
    """Seconds for which a lease is granted where the code names no TTL."""
    key_prefix: str = Field("", validation_alias=_names("VOLCANO_LOCKS_KEY_PREFIX"))
    """Put before every lock key, for several environments in one project: ``staging.``."""
    timeout: float = Field(
        5.0, gt=0, le=60, allow_inf_nan=False, validation_alias=_names("VOLCANO_LOCKS_TIMEOUT")
    )
    """Seconds for each of connecting, sending and receiving in one request."""
    allow_http: str = Field("", validation_alias=_names("VOLCANO_LOCKS_ALLOW_HTTP"))
    """Host names, separated by commas, that may be spoken to in plain http."""
    trust_env: bool = Field(True, validation_alias=_names("VOLCANO_LOCKS_TRUST_ENV"))
    """Whether HTTP_PROXY, NO_PROXY and SSL_CERT_FILE are heard. Loopback never uses a proxy."""

    @classmethod
    def load(cls, explicit: Mapping[str, Any] | None = None, /) -> LockSettings:
        """Settings from ``explicit`` (any case; None means unset) over the environment and .env.

        Raises ConfigurationError for an unknown name or a value that cannot work.
        """
        given = {
            name.lower(): value for name, value in (explicit or {}).items() if value is not None
        }
        if unknown := sorted(given.keys() - cls.model_fields.keys()):
            raise ConfigurationError(
                f"unknown setting {unknown[0]!r}; known are: {', '.join(cls.model_fields)}"
            )
        try:
            return cls(**given)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False, include_context=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "settings"
            raise ConfigurationError(f"setting {where}: {first['msg']}") from None
        except UnicodeDecodeError as error:
            raise ConfigurationError(f".env is not UTF-8: {error.reason}") from None
