"""Hardware profiles by name: `load("llama-3.1-8b-h200")` gives step times and KV capacity of one replica.

The packaged ones are kernel tables of NVIDIA's aiconfigurator, put together by `rubato.latency.components`, but for
`qwen2.5-7b-2xv100` (the SA paper's coefficients) and `smollm2-135m-cpu` (measured on our engine). `rubato profile`
makes more. `NAME@vllm-2024` is a profile with another of the host terms that it holds, the time of a step outside the
device in another engine.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from pathlib import Path

from rubato.core.did_you_mean import nearest
from rubato.latency.profiles.profile import Factor, HostTime, Profile, parsed, positive, read

__all__ = ["POLYSERVE_HOST_S", "Factor", "HostTime", "Profile", "load", "named", "names"]

_DATA = resources.files("rubato.latency.profiles") / "data"
POLYSERVE_HOST_S = 10.2e-3  # seconds a step: the paper's 15 ms at batch 1 less the 4.8 ms that the kernels sum to


def names() -> list[str]:
    """Of the packaged profiles."""
    return sorted(entry.name.removesuffix(".json") for entry in _DATA.iterdir() if entry.name.endswith(".json"))


def named(name: str) -> tuple[str, str]:
    """A profile's name, or the path of its file, and after `@` the name of a host term of it ("" = its own)."""
    if name.endswith(".json") or "@" not in name:
        return name, ""
    profile, _, term = name.rpartition("@")
    return profile, term


def load(
    name: str,
    *,
    host: float | None = None,
    host_per_seq: float | None = None,
    host_scale: float = 1.0,
    kv_tokens: int | None = None,
    **factors: float,
) -> Profile:
    """Loads a packaged profile by name, or one of your own by the path of its file (it ends in .json); `@HOST_TERM`
    behind either chooses one of the host terms that it holds.

    Args:
        host, host_per_seq: seconds of every step and of each sequence in it, instead of the profile's.
        host_scale: times both (0.5 and 1.5 say how much a result hangs on them).
        kv_tokens: tokens of KV that fit, instead of the profile's.
        factors: factors on kernel times by name, such as prefill_gemm=1.0, instead of the profile's.

    Raises:
        ValueError: an unknown name, host term or factor, a host setting or a factor for a profile of whole steps, and a
            profile without KV capacity.
    """
    base, host_name = named(name)
    path = Path(base) if base.endswith(".json") else Path(str(_DATA / f"{base}.json"))
    if not base.endswith(".json") and base not in names():
        raise ValueError(f"no profile {base!r}{nearest(base, names())}")
    data = read(path)
    if kv_tokens is not None:
        data["kv_tokens"] = kv_tokens
    profile = parsed(data, f"profile {name!r}")
    if base != name:
        profile = profile.with_host(host_name)
    for factor in factors:
        if factor not in profile.factors:
            raise ValueError(f"profile {name!r} has no factor {factor!r}{nearest(factor, profile.factors)}")
    own = {f: Factor(positive(f, value), "given") for f, value in factors.items()}
    term = profile.host_term
    if term is None:
        if host is not None or host_per_seq is not None or host_scale != 1.0:
            raise ValueError(f"profile {name!r} was measured whole, the host's time in it: leave out host settings")
        return profile
    has_own_host = host is not None or host_per_seq is not None
    scale = positive("host_scale", host_scale)
    step = positive("host", term.host if host is None else host)
    per = positive("host_per_seq", term.host_per_seq if host_per_seq is None else host_per_seq)
    return replace(
        profile,
        host_term=HostTime(scale * step, scale * per, "given" if has_own_host else term.source),
        factors={**profile.factors, **own},
    )
