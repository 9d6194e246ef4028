"""The words in which policies say what they need and engines and hosts what they support, and the answer to a need that
is not met."""

from __future__ import annotations

from collections.abc import Set

from rubato.core.did_you_mean import nearest

# Of engines: `Engine.supports`. A host adds handoff where its plans can pass requests on, and recall where its router
# can take them back, and leaves kv_transfer out where KV cannot go to another host; step_times where it is known how
# long steps take, as of all but a server that does not tell. An engine of one's own may have words of its own.
CAPABILITIES = frozenset(
    {"chunked", "mixed", "preempt", "draft", "tree", "kv_transfer", "handoff", "recall", "step_times"}
)


def cure(missing: Set[str], drafter: str = "") -> str:
    """What to do if `missing` is not supported; for an unknown word, the one probably meant and the known ones.
    drafter: how to give one here, empty if impossible."""
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
