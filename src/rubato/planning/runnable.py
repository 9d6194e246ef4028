"""Which of several policies can run on the replicas that they are to be simulated on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rubato.core.request import Request, Sampling, Stage
from rubato.simulation.run_spec import RunSpec
from rubato.simulation.simulate import simulate_requests

PROBE = Request("probe", (Stage(1),), 0.0, sampling=Sampling(max_tokens=1))


def able(specs: Sequence[RunSpec]) -> tuple[tuple[RunSpec, ...], dict[str, str]]:
    """Those that serve one request of one token, and of the others, by label, why not: a policy that is not there, too
    few replicas, a need that they do not meet, a router that does not go with it. Raises ValueError with all reasons
    when none can."""
    reasons: dict[str, str] = {}
    for spec in specs:
        try:
            simulate_requests([PROBE], {PROBE.id: (1,)}, spec, times=False)
        except (ValueError, RuntimeError) as error:
            reasons[spec.choice.label] = str(error)
    if len(reasons) == len(specs):
        raise ValueError("no policy can run: " + "; ".join(f"{label}: {why}" for label, why in reasons.items()))
    return tuple(one for one in specs if one.choice.label not in reasons), reasons


def left_out(reasons: Mapping[str, str]) -> list[str]:
    """A note on each policy that cannot run (`able`)."""
    return [f"{label} is left out, as it cannot run: {why}" for label, why in reasons.items()]
