"""A hardware profile: what a step of one model takes on given GPUs, and how much KV they hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from rubato.core.interfaces import LatencyModel
from rubato.core.plan import Limits
from rubato.latency import components
from rubato.latency.model_dims import Dims
from rubato.latency.model_kinds import MODELS

FORMAT = "rubato-profile/1"


@dataclass(frozen=True, slots=True)
class HostTime:
    """The seconds of a step spent outside the device: of every step, and of each sequence in it.

    Args:
        source: where the figure is from.
    """

    host: float
    host_per_seq: float
    source: str


@dataclass(frozen=True, slots=True)
class Factor:
    """What a part of the kernel times is multiplied by (`components.Factors`).

    Args:
        source: where the figure is from.
    """

    value: float
    source: str


@dataclass(frozen=True)
class Profile:
    """What is known of a model on a GPU: step times and limits.

    Args:
        gpus: number of GPUs that one replica is split over (TP).
        kv_tokens: tokens of KV that fit beside the weights.
        max_model_len: longest sequence, in tokens.
        data: a latency model's `to_dict`, or kernel tables; those have a host term and factors beside them, while whole
            steps (host_term None) have the host's time in them.
        dims: of the model, where they are known.
        host_terms: by name, host terms that may stand in the place of host_term (`load("NAME@vllm-2024")`).
    """

    name: str
    about: str
    gpu: str
    gpus: int
    kv_tokens: int
    kv_bytes_per_token: int
    max_model_len: int
    data: Mapping[str, Any]
    host_term: HostTime | None
    factors: Mapping[str, Factor]
    provenance: str
    dims: Dims | None = None
    host_terms: Mapping[str, HostTime] = field(default_factory=dict)

    def with_host(self, term: str) -> Profile:
        """With the host term of that name, which its own name then says. Raises ValueError for one that is not here."""
        if term not in self.host_terms:
            known = f"has {', '.join(sorted(self.host_terms))}" if self.host_terms else "has none to choose from"
            raise ValueError(f"profile {self.name!r} has no host term {term!r}: it {known}")
        return replace(self, name=f"{self.name}@{term}", host_term=self.host_terms[term])

    def model(self) -> LatencyModel:
        """A latency model of one's own: what one replica learns no other sees. Kernel tables are shared, they are large
        and never change."""
        if self.data["model"] != "components":
            return MODELS[self.data["model"]].from_dict(self.data)
        assert self.host_term is not None
        tables = {name: value for name, value in self.data.items() if name != "model"}
        factors = components.Factors(**{name: factor.value for name, factor in self.factors.items()})
        return components.Model(components.Tables(**tables), factors, self.host_term.host, self.host_term.host_per_seq)

    def limits(
        self,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        max_model_len: int | None = None,
        block_size: int = 16,
    ) -> Limits:
        """Returns what an engine of this profile takes.

        Args:
            max_model_len: by default the model's, at most what KV holds.
        """
        length = min(self.max_model_len if max_model_len is None else max_model_len, self.kv_tokens)
        return Limits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=length,
            kv_blocks=self.kv_tokens // block_size,
            block_size=block_size,
        )

    def to_json(self) -> dict[str, Any]:
        """The contents of its file."""
        return {"format": FORMAT, **asdict(self)}


def read(path: Path) -> dict[str, Any]:
    """The contents of a profile file. Raises ValueError, naming it, for anything else."""
    try:
        data = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read as a profile ({error})") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"{path} is no profile: its `format` is not {FORMAT!r}")
    return data


def parsed(data: Mapping[str, Any], where: str) -> Profile:
    """Raises ValueError for contents that are no profile, or one without KV capacity."""
    fields = {name: value for name, value in data.items() if name != "format"}
    tokens = fields.get("kv_tokens")
    if not isinstance(tokens, int) or tokens < 1:
        raise ValueError(
            f"{where} has no KV capacity (kv_tokens is {tokens!r}): the weights leave no room, or it was not measured; "
            "give kv_tokens=..."
        )
    try:
        host, dims = fields.pop("host_term"), fields.pop("dims")
        factors = {name: Factor(**factor) for name, factor in fields.pop("factors").items()}
        hosts = {name: HostTime(**term) for name, term in fields.pop("host_terms", {}).items()}
        return Profile(
            **fields,
            factors=factors,
            host_term=HostTime(**host) if host else None,
            dims=Dims(**dims) if dims else None,
            host_terms=hosts,
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{where} is not a whole profile ({error})") from error


def positive(name: str, value: float) -> float:
    if not 0.0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}: give a finite number, 0 or more")
    return value
