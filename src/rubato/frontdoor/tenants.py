"""Authentication: an API key identifies its tenant.

Only SHA-256 digests of keys are kept. Without configured tenants every request is of the tenant `default`, which may do
anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from hmac import compare_digest
from uuid import uuid4

from rubato.config.schema import Config, ConfigError
from rubato.core.did_you_mean import nearest
from rubato.frontdoor.errors import ApiError, invalid
from rubato.frontdoor.slo_fields import Tier, Tiers


@dataclass(frozen=True, slots=True)
class Quota:
    """Bounds what a tenant may use, None = no bound; tokens are those of prompt and output together."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_in_flight: int | None = None


@dataclass(frozen=True, slots=True)
class Tenant:
    """Describes a tenant.

    Args:
        digests: SHA-256 of its keys.
        tiers: names that it may use, None = all.
        admin: whether it sees all requests.
    """

    name: str
    digests: tuple[bytes, ...] = ()
    tiers: tuple[str, ...] | None = None
    quota: Quota = Quota()
    admin: bool = False


ANYONE = Tenant("default", admin=True)


class Tenants:
    """Knows all tenants of a server. Raises ValueError when two share a key, or one names an unknown tier."""

    def __init__(self, tenants: Sequence[Tenant], tiers: Tiers) -> None:
        self.configured = bool(tenants)
        self._by_name = {tenant.name: tenant for tenant in tenants}
        self._digests = [(digest, tenant) for tenant in tenants for digest in tenant.digests]
        owners: dict[bytes, str] = {}
        for digest, tenant in self._digests:
            if digest in owners:
                raise ValueError(f"tenants {owners[digest]!r} and {tenant.name!r} have a key in common")
            owners[digest] = tenant.name
        self.quotas = {tenant.name: tenant.quota for tenant in tenants if tenant.quota != Quota()}
        self._tiers = {tenant.name: tiers.restrict_to(tenant.tiers) for tenant in tenants}
        self.all_tiers = tiers
        # The same in every process with this configuration; unknown to tenants, who know only their own keys.
        self._secret = blake2b(b"".join(digest for digest, _ in self._digests)).digest()

    def authenticate(self, headers: Mapping[str, str]) -> Tenant:
        """Returns the tenant of the key in `Authorization: Bearer KEY`, or in `x-api-key`, which Anthropic's clients
        send. Raises ApiError 401."""
        if not self.configured:
            return ANYONE
        scheme, _, key = headers.get("authorization", f"Bearer {headers.get('x-api-key', '')}").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorized("You did not give an API key: send it as `Authorization: Bearer KEY`.")
        digest = sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        owner = None
        for known, tenant in self._digests:  # all of them, so that the time reveals nothing
            if compare_digest(known, digest):
                owner = tenant
        if owner is None:
            raise _unauthorized("The API key is not known to this server.")
        return owner

    def tenant_of_name(self, name: str) -> Tenant:
        """Returns the tenant of this name. Raises ApiError 400 for an unknown one."""
        if name not in self._by_name:
            raise invalid("x-rubato-tenant", f"no tenant has this name{nearest(name[:64], self._by_name)}")
        return self._by_name[name]

    def tiers(self, tenant: Tenant) -> Tiers:
        return self._tiers.get(tenant.name, self.all_tiers)

    def salt(self, tenant: Tenant, stated: str = "") -> str:
        """Returns vLLM's `cache_salt` for a tenant, from what its client stated: cached prefixes stay its own."""
        return self._mac("salt", tenant.name, stated)

    def new_response_id(self, tenant: Tenant) -> str:
        """Returns a new id for `/v1/responses` that proves the response to be this tenant's."""
        token = uuid4().hex
        return f"resp_{token}{self._mac('response', tenant.name, token)}"

    def owns_response(self, tenant: Tenant, id: str) -> bool:
        """Returns whether a response of this id was made for this tenant."""
        token = id.removeprefix("resp_")[:32]
        return compare_digest(id.encode(), f"resp_{token}{self._mac('response', tenant.name, token)}".encode())

    def _mac(self, *parts: str) -> str:
        text = "\0".join(parts).encode("utf-8", "surrogatepass")
        return blake2b(text, key=self._secret, digest_size=16).hexdigest()


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers=(("www-authenticate", "Bearer"),))


def tiers_of(config: Config) -> Tiers:
    return Tiers([Tier(name, tier.slo, tier.on_decline) for name, tier in config.tiers.items()], config.default_tier)


def tenants_of(config: Config) -> list[Tenant]:
    """Returns the tenants with their keys' digests. Raises ConfigError for a file or a variable without keys."""
    tenants = []
    for name, tenant in config.tenants.items():
        try:
            digests = tenant.digests()
        except ConfigError as error:
            raise ConfigError(f"tenants.{name}.{error}") from None
        quota = Quota(tenant.requests_per_minute, tenant.tokens_per_minute, tenant.max_in_flight)
        tenants.append(Tenant(name, digests, tenant.tiers, quota, tenant.admin))
    return tenants
