"""The parts of a configuration: what a tier, a tenant or a server behind the gateway may set.

A class's docstring explains its settings below `Args:`, from which the JSON schema and docs/configuration.md take them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SecretStr, field_validator, model_validator

from rubato.core.registry import ConfigError
from rubato.core.request import MAX_SLO_MS, MIN_SLO_MS, SLO, OnDecline
from rubato.core.server_url import server_base_url
from rubato.core.strict_settings import StrictSettings


class Named(StrictSettings):
    """Names something to choose, with settings that the chosen thing itself checks."""

    name: str = Field(min_length=1)
    settings: Mapping[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, value: Any) -> Any:
        """Turns `rubato`, `{name: rubato, fairness: 2}` and `{kind: ...}` into name and settings."""
        if isinstance(value, str):
            return {"name": value, "settings": {}}
        if not isinstance(value, Mapping) or set(value) == {"name", "settings"}:
            return value
        rest = dict(value)
        name = rest.pop("kind", None) if "kind" in rest else rest.pop("name", None)
        if name is None:
            raise ValueError("say which: `name` (or `kind`) is missing")
        return {"name": name, "settings": rest}


def _digest(value: Any) -> bytes:
    """Returns a key's SHA-256: the key itself is not kept. Raises ValueError for what no client could send."""
    if not isinstance(value, str) or not re.fullmatch(r"[!-~]+", value):
        raise ValueError("a key must be a string of visible ASCII characters without blanks")
    return sha256(value.encode()).digest()


class TierSettings(StrictSettings):
    """A tier of requests, of a server or in a file of request kinds.

    Args:
        ttft_ms: time to first token, from arrival; null = no bound.
        tpot_ms: time per output token after the first; null = no bound.
        e2e_ms: time to the last token, from arrival; null = no bound.
        max_pause_ms: longest time between two tokens, by the deadline rule, for a tier with a tpot_ms; null = no bound.
        on_decline: what becomes of a request that cannot be in time: `best_effort` (it is served late) or `refuse`
            (429).
    """

    ttft_ms: float | None = Field(default=None, ge=MIN_SLO_MS, le=MAX_SLO_MS)
    tpot_ms: float | None = Field(default=None, ge=MIN_SLO_MS, le=MAX_SLO_MS)
    e2e_ms: float | None = Field(default=None, ge=MIN_SLO_MS, le=MAX_SLO_MS)
    max_pause_ms: float | None = Field(default=None, ge=MIN_SLO_MS, le=MAX_SLO_MS)
    on_decline: OnDecline = "best_effort"

    @model_validator(mode="after")
    def _pause_of_a_pace(self) -> TierSettings:
        if self.max_pause_ms is not None and self.tpot_ms is None:
            raise ValueError("max_pause_ms bounds the pauses of a tier with a TPOT: give tpot_ms too")
        return self

    @property
    def slo(self) -> SLO:
        return SLO.from_ms(self.ttft_ms, self.tpot_ms, self.e2e_ms, self.max_pause_ms)


class TenantSettings(StrictSettings):
    """A client with keys of its own; give at least one of keys, key_file and keys_env. Only digests of keys are kept.

    Args:
        keys: API keys, a list.
        key_file: path of a file of keys, one a line, # comments.
        keys_env: environment variable that holds keys, separated by blanks or commas.
        tiers: names of the tiers it may use; null = all.
        weight: its share of the replicas, relative to other tenants'.
        requests_per_minute: limit; null = none.
        tokens_per_minute: limit of prompt and output tokens; null = none.
        max_in_flight: choices at once; null = no bound.
        admin: may see every tenant's requests.
    """

    keys: Annotated[tuple[Annotated[bytes, BeforeValidator(_digest)], ...], Field(strict=False, repr=False)] = ()
    key_file: str | None = None
    keys_env: str | None = None
    tiers: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = None
    weight: float = Field(default=1.0, ge=1e-6, le=1e6)
    requests_per_minute: float | None = Field(default=None, gt=0)
    tokens_per_minute: float | None = Field(default=None, gt=0)
    max_in_flight: int | None = Field(default=None, ge=1)
    admin: bool = False

    @model_validator(mode="after")
    def _some_key(self) -> TenantSettings:
        if not self.keys and self.key_file is None and self.keys_env is None:
            raise ValueError("no request can be of this tenant: give keys, key_file or keys_env")
        return self

    def digests(self) -> tuple[bytes, ...]:
        """Returns the SHA-256 of every key, those in the file and the environment included. Raises ConfigError."""
        digests = list(self.keys)
        for source, words in (("key_file", self._from_file()), ("keys_env", self._from_environment())):
            try:
                digests += map(_digest, words)
            except ValueError as error:
                raise ConfigError(f"{source}: {error}") from None
        return tuple(digests)

    def _from_file(self) -> list[str]:
        if self.key_file is None:
            return []
        try:
            lines = Path(self.key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise ConfigError(f"key_file: {self.key_file} cannot be read ({why})") from None
        keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not keys:
            raise ConfigError(f"key_file: {self.key_file} holds no key: write one a line")
        return keys

    def _from_environment(self) -> list[str]:
        if self.keys_env is None:
            return []
        keys = os.environ.get(self.keys_env, "").replace(",", " ").split()
        if not keys:
            raise ConfigError(f"keys_env: the environment variable {self.keys_env} is not set, or holds no key")
        return keys


class ServerSettings(StrictSettings):
    """A server behind the gateway; a URL in place of the settings is enough.

    Args:
        url: what stands before the path of each request, such as http://10.0.0.7:8000; a /v1 at its end is left out.
        link: address of its engine core for gateways, such as tcp://10.0.0.7:5557; empty = as the server says
            (`/rubato/link`).
        key_env: environment variable that holds the key for its API; null = a client's own key is passed on, where no
            tenants are configured.
    """

    url: str
    link: str = ""
    key_env: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, value: Any) -> Any:
        """Takes `http://10.0.0.7:8000` alone as the url."""
        return {"url": value} if isinstance(value, str) else value

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        return server_base_url(url, "for a key of its API set key_env to the environment variable that holds it")

    @field_validator("link")
    @classmethod
    def _check_link(cls, link: str) -> str:
        if link and not re.fullmatch(r"tcp://[^\s@]+:\d+", link):
            raise ValueError("give the address of its engine core, such as tcp://10.0.0.7:5557")
        return link

    @property
    def key(self) -> str:
        """Returns the key of the server's API, "" without one. Raises ConfigError for a variable that is not set."""
        if self.key_env is None:
            return ""
        if not (key := os.environ.get(self.key_env, "")):
            raise ConfigError(f"servers: {self.url}: the environment variable {self.key_env} holds no key")
        return key


class FairShareSettings(StrictSettings):
    """How tenants share replicas.

    Args:
        window: requests that one replica sustains before tenants are held to their shares; null = computed from the
            tightest TPOT promised and the replica's step times.
    """

    window: int | None = Field(default=None, ge=1)


class LogSettings(StrictSettings):
    """The log on standard error.

    Args:
        format: `text` or `json`, an object a line.
        level: the least urgent that is written.
    """

    format: Literal["text", "json"] = "text"
    level: Literal["debug", "info", "warning", "error"] = "info"


class TLSSettings(StrictSettings):
    """Certificate and key of the server; uvicorn's ssl_certfile, ssl_keyfile and ssl_keyfile_password.

    Args:
        cert: path of a PEM file, the certificate.
        key: path of a PEM file, its key.
        key_password: of an encrypted key; null = it is not encrypted.
    """

    cert: str
    key: str
    key_password: SecretStr | None = None


PARTS: Mapping[str, type[StrictSettings]] = {
    "tiers": TierSettings,
    "tenants": TenantSettings,
    "servers": ServerSettings,
    "fair_share": FairShareSettings,
    "log": LogSettings,
    "tls": TLSSettings,
}
