"""The words for what policies need and engines and hosts support, and the advice where a need is not met."""

from __future__ import annotations

from collections.abc import Set

from rubato.core.did_you_mean import nearest

# Engines state them in `Engine.supports`. A host adds handoff where its plans can pass requests on, recall where its
# router can take them back, and step_times where the length of steps is known (only servers may hide it); it drops
# kv_transfer where KV cannot go to another host. Your own engine may add words.
CAPABILITIES = frozenset(
    {"chunked", "mixed", "preempt", "draft", "tree", "kv_transfer", "handoff", "recall", "step_times"}
)


def cure(missing: Set[str], drafter: str = "") -> str:
    """Advises what to do when `missing` is not supported; names the nearest known word for an unknown one.

    Args:
        missing: the needs that are not met.
        drafter: how to configure a drafter here; empty where that is impossible.
    """
    unknown = sorted(missing - CAPABILITIES)
    if unknown:
        known = f"known are {', '.join(sorted(CAPABILITIES))}"
        guess = nearest(unknown[0], CAPABILITIES)
        more = "" if known in guess else f" ({known})"
        return f"no engine knows the need {unknown[0]!r}{guess}{more}"
    if "draft" in missing and drafter:
        return f"give it a drafter ({drafter}), or choose another policy"
    if "kv_transfer" in missing:
        return (
            "choose a policy that moves no KV (polyserve: mode co); vLLM servers move it with the link and NIXL's "
            "connector (docs/gateway.md)"
        )
    return "choose another policy"
