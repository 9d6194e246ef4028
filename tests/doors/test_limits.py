"""What a tenant may use at most, the same at each door that checks keys: what passes, what is left, and when again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from rubato.core.clock import ARRIVAL
from rubato.engines.vllm import link
from tests.doors.doors import Door, Gateway, OwnServer, Picker, asked_of_doors, at
from tests.kit import on

TEXT = "/v1/completions"
PROMPT = "x" * 10  # as many tokens, or some fewer where they are estimated


@dataclass(frozen=True)
class Limited:
    """A tenant's quota, and what it asks: bodies, each with its status and the requests that are left to it then.

    wait: seconds until the request that was refused last may come again.
    """

    id: str
    quota: Mapping[str, int]
    asked: Sequence[tuple[Mapping[str, Any] | bytes, int, int | None]]
    wait: int | None = None
    doors: tuple[str, ...] = ("server", "gateway", "middleware")


TOKENS = {"tokens_per_minute": 100}
CASES = [
    Limited("requests", {"requests_per_minute": 2}, [({}, 200, 1), ({}, 200, 0), ({}, 429, 0)], 30),
    Limited("errors are charged", {"requests_per_minute": 6}, [
        (b"{", 400, 5), ({"slo": 5}, 400, 4), ({"user": "x" * 200_000}, 413, 3), ({}, 200, 2),
        ({"service_tier": "nothing"}, 400, 1), ({"n": 17}, 400, 0), ({}, 429, 0)]),
    Limited("no limit", {}, [(b"{", 400, None), ({}, 200, None)]),
    Limited("choices count each", {"requests_per_minute": 3}, [({"n": 3}, 200, 0), ({}, 429, 0)], 20),
    Limited("choices that do not all pass", {"requests_per_minute": 3}, [
        ({}, 200, 2), ({"n": 3}, 429, 1), ({"n": 2}, 429, 0)]),
    Limited("more choices than are ever there", {"requests_per_minute": 3}, [({"n": 5}, 200, 0), ({}, 429, 0)], 60),
    Limited("tokens", TOKENS, [({}, 200, None), ({"max_tokens": 90}, 429, None), ({"max_tokens": 70}, 200, None)]),
    Limited("tokens of all choices", TOKENS, [({}, 200, None), ({"max_tokens": 30, "n": 3}, 429, None)]),
    Limited("what is refused for its tokens was a request", {**TOKENS, "requests_per_minute": 3}, [
        ({"max_tokens": 90}, 200, 2), ({"max_tokens": 90}, 429, 1), ({"max_tokens": 90}, 429, 0)]),
    *[Limited(f"tokens by the largest limit: {more}", TOKENS, [({}, 200, None), (more, 429, None)],
              doors=("gateway", "middleware"))
      for more in ({"max_tokens": 1, "max_output_tokens": 4000}, {"max_tokens": "4000"},
                   {"max_completion_tokens": 1, "max_tokens": 4000})],
]  # fmt: skip


@asked_of_doors(CASES)
def test_tenant_beyond_its_limit_is_refused_until_there_is_room(
    door: Any, case: Limited, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(link.KEY, "a key")

    async def scenario(opened: Door) -> None:
        async def ask(body: Mapping[str, Any] | bytes = b"", name: str = "a") -> Any:
            if not isinstance(body, bytes):
                body = {"prompt": PROMPT, **body}
            return await opened.ask(TEXT, body, {"authorization": f"Bearer {name}-key"})

        offered = refused = 0
        for body, status, left in case.asked:
            answer = await ask(body)
            assert answer.status == status, answer.body[:300]
            shown = answer.headers.get("x-ratelimit-remaining-requests")
            assert shown == (None if left is None else str(left))
            if (limit := case.quota.get("requests_per_minute")) is not None:
                assert answer.headers["x-ratelimit-limit-requests"] == str(limit)
            assert answer.headers.get("x-ratelimit-limit-tokens") == (
                "100" if "tokens_per_minute" in case.quota else None
            )
            if status == 429:
                assert (answer.error["type"], answer.error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
                assert answer.headers["x-rubato-reject-reason"] == "rejected-rate-limit"
                assert int(answer.headers["retry-after"]) >= 1
            choices = body.get("n", 1) if isinstance(body, Mapping) else 1
            offered += choices * (status in (200, 429))
            refused += choices * (status == 429)
        assert opened.count("rubato_requests_offered_total", tenant="a") == offered
        assert opened.count("rubato_requests_refused_total", reason="rejected-rate-limit") == refused
        assert opened.count("rubato_requests_finished_total", outcome="refused") == refused
        if case.wait is not None:
            assert int(answer.headers["retry-after"]) == case.wait
            full = case.wait + 60 * (case.quota["requests_per_minute"] - 1) // case.quota["requests_per_minute"]
            assert answer.headers["x-ratelimit-reset-requests"] == f"{full}s"
            for seconds, status in ((case.wait - 1, 429), (1, 200)):
                await opened.clock.sleep_until(opened.clock.now() + seconds, ARRIVAL)
                assert (await ask({})).status == status
        other = await ask({}, "b")  # whose business it is not
        assert (other.status, [name for name in other.headers if name.startswith("x-ratelimit")]) == (200, [])
        assert "x-ratelimit-limit-requests" not in (await ask({}, "nobody")).headers

    at(scenario, door=door, tenants={"a": {"keys": ["a-key"], **case.quota}, "b": {"keys": ["b-key"]}})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("door", [OwnServer, Gateway, Picker], ids=lambda door: door.name)
@on(at, "door", max_in_flight=2)
async def test_full_door_refuses_with_a_time_to_come_again(opened: Door, stream: bool) -> None:
    answers = await asyncio.gather(*(opened.ask(TEXT, {"stream": stream}) for _ in range(5)))
    assert sorted(answer.status for answer in answers) == [200, 200, 429, 429, 429]
    for refused in [answer for answer in answers if answer.status == 429]:
        assert refused.headers["x-rubato-reject-reason"] == "rejected-saturated"
        assert int(refused.headers["retry-after"]) >= 1
        assert (refused.error["type"], refused.error["code"]) == ("rate_limit_error", "rejected-saturated")
    assert (await opened.ask(TEXT, {"stream": stream})).status == 200
    counts = [opened.count(f"rubato_requests_{name}_total") for name in ("offered", "finished", "refused")]
    assert counts == [6, 6, 3]
    assert opened.in_flight() == opened.places() == 0
