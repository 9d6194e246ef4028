"""Which models the servers of a fleet list, adapters and aliases among them, and which servers a request may go to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from rubato.core.interfaces import Router
from rubato.fleet.relay import Trip
from rubato.policy_kit.candidates import Candidates

Models = Mapping[str, Mapping[str, Any]]  # what a server lists at /v1/models, by name


class ServedModels:
    """Keeps the last list of models of each server, also of lost servers.

    Args:
        urls: of the servers, in the order in which their lists are put together.
    """

    def __init__(self, urls: Iterable[str] = ()) -> None:
        self.main = ""  # the fleet's model, which every server that serves lists
        self._lists: dict[str, Models | None] = dict.fromkeys(urls)  # None: it was not asked yet
        self._servers: dict[str, frozenset[str] | None] = {}  # by model, as worked out from these

    def set_models(self, url: str, models: Models) -> None:
        """Sets what a server lists now."""
        before = self._lists.get(url)
        if before is None or before.keys() != models.keys():
            self._servers.clear()
        self._lists[url] = models

    def forget(self, url: str) -> None:
        """Forgets a server that will not come back."""
        self._lists.pop(url, None)
        self._servers.clear()

    def entries(self) -> dict[str, Mapping[str, Any]]:
        """Returns what all servers list, each model as the first server that has it does."""
        entries: dict[str, Mapping[str, Any]] = {}
        for models in self._lists.values():
            for name, entry in (models or {}).items():
                entries.setdefault(name, entry)
        return entries

    def is_listed(self, model: str) -> bool:
        """Returns whether a request may ask for this model. Of servers that have not been asked anything is
        possible."""
        lists = [models for models in self._lists.values() if models is not None]
        return model == self.main or not lists or any(model in models for models in lists)

    def servers_of(self, model: str) -> frozenset[str] | None:
        """Returns addresses of the servers that list a model; None: any server will do."""
        if model in self._servers:
            return self._servers[model]
        lists = {url: models for url, models in self._lists.items() if models is not None}
        listing = frozenset([url for url, models in lists.items() if model in models])
        servers = None if not model or len(listing) == len(lists) else listing
        if listing:  # (unlisted names are not cached: there may be any number of them)
            self._servers[model] = servers
        return servers

    def restrict_router(self, router: Router, trips: Mapping[str, Trip], url: Callable[[str], str]) -> Router:
        """Returns a router that places each request at servers that list its model.

        Args:
            trips: of requests, by id.
            url: returns the address of a replica's server, given the replica's id.
        """

        def servers(id: str) -> frozenset[str] | None:
            trip = trips.get(id)
            return None if trip is None else self.servers_of(trip.ask.model)

        return cast(Router, Candidates(router, servers, url))
