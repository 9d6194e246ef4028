"""Estimates which prompts' KV each replica holds, from the placements that a router sees.

Approximate, as in the routers of SGLang and llm-d: a prompt counts as cached from its placement on, and until so much
has been placed on that replica since as its KV memory holds. The index is derived state: a new one is empty, and
learns from the placements that follow.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rubato.core.events import Event, Finished, Left, Placed
from rubato.core.interfaces import SeqView, View
from rubato.core.request import PREFIX_BLOCK_TOKENS, Request


class _Prompt(NamedTuple):
    """A prompt that may be cached.

    Args:
        keys: one for each full block, each standing for everything up to its end.
        tokens: its length.
        session: (tenant, session); None without one.
    """

    keys: tuple[int, ...]
    tokens: int
    session: tuple[str, str] | None


@dataclass(slots=True)
class _Cache:
    """What is assumed to be in a replica's KV.

    Args:
        most: tokens that its KV memory holds.
        tokens: of all entries.
        entries: the tokens of each block or session, least recently placed first.
    """

    most: int = 0
    tokens: int = 0
    entries: OrderedDict[Hashable, int] = field(default_factory=OrderedDict)

    def add(self, key: Hashable, tokens: int) -> None:
        self.drop(key)
        self.entries[key] = tokens
        self.tokens += tokens

    def drop(self, key: Hashable) -> None:
        self.tokens -= self.entries.pop(key, 0)


class PrefixIndex:
    """Keeps the prompts of each replica, in blocks of `PREFIX_BLOCK_TOKENS`, and the sessions.

    The last prompt and output of a session count as cached where they were served. Tenants share nothing.
    """

    def __init__(self) -> None:
        self._caches: dict[str, _Cache] = {}
        self._sessions: dict[tuple[str, str], tuple[str, int]] = {}  # its last replica, and tokens there
        self._prompts: dict[str, _Prompt] = {}  # of requests that were held and have not ended
        self._replica_of: dict[str, str] = {}  # where each of them was placed
        # by replica, what the dispatch in the making places there
        self._coming: defaultdict[str, dict[Hashable, int]] = defaultdict(dict)

    def begin(self, held: Sequence[SeqView], fleet: Sequence[View]) -> None:
        """Begins a dispatch with these requests and replicas."""
        self._coming.clear()
        for view in fleet:
            self._caches.setdefault(view.id, _Cache()).most = view.kv_total * view.limits.block_size
        for seq in held:
            if seq.cached:  # its KV comes along, and its prompt is computed nowhere
                self._prompts.pop(seq.id, None)
                self._replica_of.pop(seq.id, None)

    def cached(self, seq: SeqView, replica: str) -> int:
        """Returns the tokens of this request that are likely in that replica's KV; never all, since the last one must
        run."""
        prompt = self._prompt(seq)
        if (cache := self._caches.get(replica)) is None:
            return 0
        there, coming, blocks = cache.entries, self._coming.get(replica, {}), 0
        for key in prompt.keys:
            if key not in there and key not in coming:
                break
            blocks += 1
        tokens = blocks * PREFIX_BLOCK_TOKENS
        if prompt.session is not None:
            last, served = self._sessions.get(prompt.session, ("", 0))
            tokens = max(tokens, served if last == replica else 0, coming.get(prompt.session, 0))
        return min(tokens, seq.length - 1)

    def expect(self, seq: SeqView, replica: str) -> None:
        """Notes a placement of the current dispatch: later requests of the same dispatch may share its KV."""
        if not seq.cached:
            prompt = self._prompt(seq)
            self._coming[replica].update(dict.fromkeys(prompt.keys, PREFIX_BLOCK_TOKENS))
            if prompt.session is not None:
                self._coming[replica][prompt.session] = prompt.tokens

    def observe(self, events: Sequence[Event]) -> None:
        """Learns from placements, whichever router made them."""
        for event in events:
            if isinstance(event, Placed):
                if event.id in self._prompts and event.replica in self._caches:
                    self._replica_of[event.id] = event.replica
                    self._add(self._prompts[event.id], event.replica, 0)
            elif isinstance(event, Finished):
                prompt, replica = self._prompts.pop(event.id, None), self._replica_of.pop(event.id, None)
                if prompt is not None and replica in self._caches and event.outcome == "completed":
                    self._add(prompt, replica, event.output)
            elif isinstance(event, Left):
                self._caches.pop(event.id, None)
                self._sessions = {name: at for name, at in self._sessions.items() if at[0] != event.id}

    def _prompt(self, seq: SeqView) -> _Prompt:
        """Returns the prompt of a request, computed once."""
        prompt = self._prompts.get(seq.id)
        if prompt is None:
            request = seq.request
            session = (request.tenant, request.session) if request.session else None
            prompt = self._prompts[seq.id] = _Prompt(block_keys(request), seq.length, session)
        return prompt

    def _add(self, prompt: _Prompt, replica: str, output: int) -> None:
        """Adds a prompt; its end is forgotten before its beginning, and a session's output before its prompt."""
        cache, session = self._caches[replica], prompt.session
        if session is not None:
            last = self._sessions.get(session)
            if last is not None and last[0] in self._caches:
                self._caches[last[0]].drop(session)
            tokens = prompt.tokens + output
            self._sessions[session] = replica, tokens
            cache.add(session, tokens - len(prompt.keys) * PREFIX_BLOCK_TOKENS)
        for key in reversed(prompt.keys):
            cache.add(key, PREFIX_BLOCK_TOKENS)
        while cache.tokens > cache.most:
            oldest = next(iter(cache.entries))
            cache.drop(oldest)
            if isinstance(oldest, tuple):
                del self._sessions[oldest]


def block_keys(request: Request) -> tuple[int, ...]:
    """Returns a key for each full block of the first prompt, shared by a tenant's prompts as far as they begin alike:
    from `Request.prefix`, or from token ids; () if neither is known."""
    if request.prefix:
        return tuple([hash((request.tenant, key)) for key in request.prefix])
    ids, keys = request.stages[0].token_ids, []
    key = hash(request.tenant)
    for end in range(PREFIX_BLOCK_TOKENS, len(ids) + 1, PREFIX_BLOCK_TOKENS):
        key = hash((key, ids[end - PREFIX_BLOCK_TOKENS : end]))
        keys.append(key)
    return tuple(keys)
