"""The papers' workloads by name, from the figures that they print. What they do not print is ours, and says so.

Lengths of SLOs-Serve (Table 4): log-normals whose mean and deviation are the table's after the cut at its P99 (ours;
`lengths.log_normal`). Of PolyServe (Table 1): its percentiles, straight lines between them (ours). Of AdaServe:
log-normals (ours) of the mean, deviation and P99 in the request streams its authors publish. Of Ascendra and SA's
code, which print none: log-normals, assumed (ours); `scale` makes prompts longer or shorter, to see what rests on that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from rubato.core.did_you_mean import nearest
from rubato.core.request import SLO
from rubato.workloads import sessions
from rubato.workloads.arrivals import ArrivalProcess, AtOnce, Bursts, Gamma, Piecewise, Poisson
from rubato.workloads.generate import Prefill
from rubato.workloads.generate import make as drawn
from rubato.workloads.lengths import Lengths, Normal, Percentiles, Uniform, fixed, log_normal, log_normal_p90, mean, of
from rubato.workloads.request_kinds import FollowUp, Kind, MixChange, within
from rubato.workloads.sessions import Sessions
from rubato.workloads.workload import Workload, check_rate


@dataclass(frozen=True)
class Scenario:
    """A mix of requests that a paper measured with.

    Args:
        kinds: the mix it begins with.
        changes: returns what the mix becomes later, from the expected requests and seconds of the run.
        profile: the hardware profile of the paper's model, with the host term of vLLM in 2024, when papers measured; ""
            where it has several.
        about: one line, with its source.
    """

    about: str
    kinds: tuple[Kind, ...]
    arrivals: ArrivalProcess
    profile: str = ""
    changes: Callable[[int, float], tuple[MixChange, ...]] = lambda count, seconds: ()
    max_model_len: int | None = None
    sessions: Sessions | None = None  # alone, or as many of them as there are requests of each kind
    slo_scales: tuple[float, ...] = (1.0,)  # times are so many times as long, of one request after the other


# --------------------------------------------------------------------------- SLOs-Serve (paper §6, Tables 1-4)

TIGHT, LOOSE = 3.0, 5.0  # times the zero-load prefill
TIGHT_TPOT, LOOSE_TPOT = SLO(tpot=0.05), SLO(tpot=0.1)
# Stand-ins for the Azure traces' arrivals (`--trace` takes the real ones): gaps of the chat trace have a CV of
# 1.09; the code trace comes in bursts, and these have its CV, 13, and its counts in windows of 0.1 to 60 s
# (docs/workloads.md).
CHAT_ARRIVALS, CODE_ARRIVALS = Gamma(1.1), Bursts(6.0, 130.0)
# Nearer to the code trace: bursts of unequal rates, in which some requests come almost together. What admission gains
# on bursts hangs on both, so SLOs-Serve's figures of capacity have it.
CODE_STAND_IN = Bursts(3.0, 150.0, spread=1.0, hold=20.0, together=1.4, apart=0.007)


def _slos_serve() -> dict[str, Scenario]:
    opt, context = "opt-13b-2xa100-40g@vllm-2024", 2048
    chat = Kind("chat", LOOSE_TPOT, log_normal(763, 424, 1591), log_normal(266, 160, 619), ttft_slowdown=LOOSE)
    code = Kind("code", TIGHT_TPOT, log_normal(847, 617, 2010), log_normal(26, 47, 232), ttft_slowdown=LOOSE)
    report = Kind("summary", LOOSE_TPOT, log_normal(1333, 444, 1946), log_normal(202, 234, 1508), ttft_slowdown=TIGHT)
    prompt, output = log_normal(690, 356, 2131), log_normal(116, 66, 363)
    tools = Kind(  # 2.7 +- 1.1 pairs of prefill and decode, the last of them the answer; tools take no time (ours)
        "tools", TIGHT_TPOT, prompt, output, ttft_slowdown=TIGHT, ends="</tool_call>", rounds=Normal(1.7, 1.1, most=8),
        then=(FollowUp(output, prompt, LOOSE_TPOT, ttft_slowdown=TIGHT),),
    )  # fmt: skip
    reasoning = Kind(
        "reasoning", TIGHT_TPOT, log_normal(127, 83, 421), log_normal(4693, 1442, 7297), ttft_slowdown=TIGHT,
        ends="</think>", then=(FollowUp(log_normal(803, 280, 1650), slo=LOOSE_TPOT),),
    )  # fmt: skip
    of_opt: dict[str, tuple[str, tuple[Kind, ...], ArrivalProcess]] = {
        "chatbot": ("ChatBot: TTFT 5x, TPOT 100 ms", (chat,), CHAT_ARRIVALS),
        "coder": ("Coder: TTFT 5x, TPOT 50 ms", (code,), CODE_ARRIVALS),
        "summarizer": ("Summarizer: TTFT 3x, TPOT 100 ms", (report,), CHAT_ARRIVALS),
        "mixed": ("Mixed: the three above, a third each (ours)", (chat, code, report), CHAT_ARRIVALS),
    }
    return {
        **{
            f"slos-serve-{name}": Scenario(f"SLOs-Serve {about}", kinds, arrivals, opt, max_model_len=context)
            for name, (about, kinds, arrivals) in of_opt.items()
        },
        "slos-serve-toolllm": Scenario(
            "SLOs-Serve ToolLLM: rounds at TTFT 3x, TPOT 50 ms, the last at 100 ms",
            (tools,), CODE_ARRIVALS, "llama-2-7b-a100-40g@vllm-2024",
        ),
        "slos-serve-reasoning": Scenario(
            "SLOs-Serve Reasoning: TTFT 3x, thinking at 50 ms, response at 100 ms",
            (reasoning,), CHAT_ARRIVALS, "qwen2.5-1.5b-a100-40g@vllm-2024",
        ),
    }  # fmt: skip


# --------------------------------------------------------------------------- PolyServe (paper §5, Table 1)

TTFTS = (0.3, 0.5, 1.0)
TPOTS = (0.02, 0.03, 0.05, 0.1)
SHARES = (0.1, 0.2, 0.3, 0.4)
QUANTILES = (0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
H200 = "llama-3.1-8b-h200@vllm-2024"
TABLE: Mapping[str, tuple[Lengths, Lengths]] = {
    "uniform-4096-1024": (Uniform(1, 8192), Uniform(1, 2048)),
    "uniform-512-512": (Uniform(1, 1024), Uniform(1, 1024)),
    **{
        name: (Percentiles(QUANTILES, prompt), Percentiles(QUANTILES, output))
        for name, prompt, output in (
            ("mooncake-conversation", (2320, 6923, 15400, 27571, 39583, 85401), (159, 350, 472, 597, 698, 1136)),
            ("mooncake-synthetic", (277, 11587, 23286, 38737, 49009, 66458), (10, 68, 250, 390, 522, 768)),
            ("mooncake-toolagent", (3228, 6346, 7468, 16818, 26175, 61824), (12, 30, 355, 506, 600, 890)),
            ("lmsys", (12, 28, 82, 301, 430, 750), (39, 140, 338, 512, 519, 853)),
            ("sharegpt", (16, 36, 158, 818, 1613, 3421), (131, 280, 445, 682, 846, 1001)),
            ("splitwise", (396, 1019, 1186, 2735, 4083, 4142), (85, 130, 395, 425, 451, 601)),
        )
    },
}


def tpot_tiers(prompt: Lengths, output: Lengths, shares: Sequence[float] = SHARES) -> tuple[Kind, ...]:
    """PolyServe's promises: four TPOT tiers, TTFT one of three, evenly among those that an idle replica can meet."""
    return tuple(
        Kind("chat", SLO(tpot=tpot), prompt, output, f"tpot-{1e3 * tpot:g}ms", share, ttfts=TTFTS)
        for tpot, share in zip(TPOTS, shares, strict=True)
    )


def _flip(count: int, seconds: float) -> tuple[MixChange, ...]:
    return (MixChange(tpot_tiers(*TABLE["uniform-4096-1024"], shares=SHARES[::-1]), request=max(1, count // 2)),)


def _polyserve() -> dict[str, Scenario]:
    promises = "TTFT 0.3, 0.5, 1 s, TPOT 20-100 ms"
    return {
        **{
            f"polyserve-{name}": Scenario(f"PolyServe: {name}; {promises}", tpot_tiers(*lengths), Poisson(), H200)
            for name, lengths in TABLE.items()
        },
        "polyserve-flip": Scenario(
            "PolyServe: uniform-4096-1024; half-way the shares 10/20/30/40 % of the TPOTs turn round",
            tpot_tiers(*TABLE["uniform-4096-1024"]), Poisson(), H200, _flip,
        ),
        "polyserve-flip-lengths": Scenario(
            "PolyServe's flip, and the lengths grow from uniform-512-512 (ours)",
            tpot_tiers(*TABLE["uniform-512-512"]), Poisson(), H200, _flip,
        ),
    }  # fmt: skip


# --------------------------------------------------------------------------- AdaServe (paper §6, Table 2)

MODELS = {  # profile, and unloaded seconds per token as the authors' artifact has them
    "llama70b": ("llama-3.1-70b-4xa100@vllm-2024", 0.030),
    "qwen32b": ("qwen2.5-32b-2xa100@vllm-2024", 0.028),
}


def categories(unloaded: float, shares: Sequence[float] = (0.6, 0.2, 0.2), output: int = 256) -> tuple[Kind, ...]:
    """Code at 1.2 times the unloaded time per token, chat at 50 ms, summaries at 150 ms; no TTFT."""
    prompts = (log_normal(132, 63, 308), log_normal(18, 10.3, 52), log_normal(776, 368, 1787))
    tpots = (1.2 * unloaded, 0.05, 0.15)
    return tuple(
        Kind(app, SLO(tpot=tpot), prompt, fixed(output), share=share)
        for app, tpot, prompt, share in zip(("code", "chat", "summary"), tpots, prompts, shares, strict=True)
    )


# Fig. 13 has no numbers: 1,445 requests in 360 s, chat highest at 60-90 s, code at 180-210 s, summaries at 270-300 s.
# Ours: in its peak a category has five times its usual rate of requests.
PEAKS = ((0.0, (1, 1, 1)), (60.0, (1, 5, 1)), (90.0, (1, 1, 1)), (180.0, (5, 1, 1)), (210.0, (1, 1, 1)),
         (270.0, (1, 1, 5)), (300.0, (1, 1, 1)))  # fmt: skip
PEAKS_PERIOD_S = 360.0


def _peaks(profile: str, unloaded: float) -> Scenario:
    mixes = [categories(unloaded, [float(level) for level in levels]) for _, levels in PEAKS]

    def changes(count: int, seconds: float) -> tuple[MixChange, ...]:
        again = range(2 + int(1.5 * seconds / PEAKS_PERIOD_S))  # a run of `count` may take longer than expected
        every = [
            MixChange(mix, at=n * PEAKS_PERIOD_S + start)
            for n in again
            for (start, _), mix in zip(PEAKS, mixes, strict=True)
        ]
        return tuple(every[1:])

    levels = tuple(float(sum(level)) for _, level in PEAKS)
    process = Piecewise(tuple(start for start, _ in PEAKS), levels, PEAKS_PERIOD_S)
    about = "AdaServe: peaks of chat, code, summary one after the other every 360 s (levels ours)"
    return Scenario(about, mixes[0], process, profile, changes)


def _adaserve() -> dict[str, Scenario]:
    about = "AdaServe: code, chat, summary 60/20/20 %, output 256"
    return {
        **{
            f"adaserve-{model}": Scenario(about, categories(unloaded), Gamma(1.1), profile)
            for model, (profile, unloaded) in MODELS.items()
        },
        **{f"adaserve-{model}-peaks": _peaks(*of_model) for model, of_model in MODELS.items()},
    }


# --------------------------------------------------------------------------- Ascendra, SA: lengths assumed

# Ascendra shows lengths in an image only; these are Sarathi-Serve's of openchat_sharegpt4, which give the 2.8
# requests/s that Ascendra reports for Qwen-14B by Little's law
SHAREGPT4 = (log_normal_p90(1730, 5696, 8192), log_normal_p90(415, 834, 8192))
QWEN_14B_CONTEXT, SHORTEST_ANSWER = 8192, 512  # ours: what is longer would be refused, so prompts leave that much room


def _ascendra() -> dict[str, Scenario]:
    longbench = log_normal(7000, 4000, 16000), log_normal(180, 90, 500)  # ours: 6,700 English words are 9,000 tokens
    scenarios: dict[str, Scenario] = {}
    for data, app, lengths, ttfts in (
        ("ShareGPT4", "chat", SHAREGPT4, (1.0, 1.0, 1.5)),
        ("LongBench", "summary", longbench, (2.5, 2.5, 3.0)),
    ):
        for model, ttft in zip(("mistral-7b", "llama-3.1-8b", "qwen-14b"), ttfts, strict=True):
            kind, context = Kind(app, SLO(ttft=ttft, tpot=0.15), *lengths), None
            if model == "qwen-14b":
                context = QWEN_14B_CONTEXT
                kind = within(replace(kind, prompt=replace(lengths[0], most=context - SHORTEST_ANSWER)), context)
            about = f"Ascendra: {data} (lengths assumed), TTFT {ttft:g} s, TBT 150 ms"
            name = f"ascendra-{data.lower()}-{model.partition('-')[0]}"
            scenarios[name] = Scenario(about, (kind,), Poisson(), f"{model}-a100@vllm-2024", max_model_len=context)
    return scenarios


def _sa() -> dict[str, Scenario]:
    # Chat is the data set of PolyServe's `sharegpt`, of which SA keeps what is under 2k: prompts to P95. A code request
    # of average length takes 3 s alone, the paper says: 180 tokens at 16.3 ms; its prompts and all deviations are ours.
    prompts = Percentiles(QUANTILES[:5], (16, 36, 158, 818, 1613))
    chat = Kind("chat", SLO(ttft=10.0, tpot=0.05), prompts, TABLE["sharegpt"][1])
    code = Kind("code", SLO(e2e=30.0), log_normal(150, 120, 800), log_normal(180, 120, 700))
    about = "SA: chat (TTFT 10 s, TPOT 50 ms) and code (e2e 30 s), half each, all at once (lengths assumed)"
    return {"sa-mixed": Scenario(about, (chat, code), AtOnce(), "qwen2.5-7b-2xv100", max_model_len=2048)}


# --------------------------------------------------------------------------- agents

# Lengths: Mooncake's tool & agent trace (FAST'25, Table 2) has 8,596 prompt and 182 output tokens in the mean, and 59 %
# of the former could be found in a cache. Turns: SLOs-Serve's 2.7 +- 1.1 of ToolLLM (Table 4). Ours: 1,024 tokens that
# all sessions begin with and 3,560 that each turn adds, which together give Mooncake's mean and about its 59 %; the
# deviations and the cuts. TraceLab (4,265 sessions of coding agents): of tools that took any time half took 0.3 s and a
# tenth more than 13.6 s, and half of the model's answers took 5.7 s, which is the time that a session's e2e has for
# each turn. Its own contexts, 154,000 tokens in the mean, are too long for one GPU to serve many.
AGENTS = Sessions(
    turns=Normal(2.7, 1.1, 1, 8),
    new=log_normal(3560, 3560, 12288),
    output=log_normal(182, 150, 600),
    gap=log_normal_p90(300, 13600, 60000),
    system=1024,
    seconds_per_turn=5.7,
)


def _agents() -> dict[str, Scenario]:
    about = "Agents: sessions of 2.7 turns with tools, Mooncake's lengths, TraceLab's tools; e2e of the session"
    return {"agent-sessions": Scenario(about, (), Poisson(), "llama-3.1-8b-h200", max_model_len=32768, sessions=AGENTS)}


# --------------------------------------------------------------------------- JITServe (its scripts)

# `scripts/benchmark_mixed.sh`: as many chats as requests with a deadline as tasks of several requests, times 1 to 4
# times 0.8 s, 80 ms, and 8 s for each stage. The two former are LMSYS's, as PolyServe prints it. Ours: tasks are turns
# one after the other, where theirs run some side by side, of about the lengths of one task of their trace (prompts of
# 434 to 3,228 tokens, outputs of 66 to 830); all their deviations and the cuts, theirs at 1,024 and 8,192 tokens.
RESEARCH = Sessions(
    turns=Normal(4.0, 1.0, 2, 8),
    new=log_normal(400, 300, 1500),
    output=log_normal(400, 300, 1024),
    gap=fixed(0),
    system=0,
    seconds_per_turn=8.0,
    tier="research",
)


def _jitserve() -> dict[str, Scenario]:
    lengths = TABLE["lmsys"]
    kinds = Kind("chat", SLO(ttft=0.8, tpot=0.08), *lengths), Kind("code", SLO(e2e=8.0), *lengths)
    about = "JITServe: chat, e2e (LMSYS) and tasks of 4 turns, a third each; TTFT 0.8 s, TPOT 80 ms, 8 s, times 1 to 4"
    return {
        "jitserve-mixed": Scenario(
            about, kinds, Poisson(), "llama-3.1-8b-a100@vllm-2024", max_model_len=8192, sessions=RESEARCH,
            slo_scales=(1.0, 2.0, 3.0, 4.0),
        )
    }  # fmt: skip


# --------------------------------------------------------------------------- by name


@cache
def _scenarios() -> Mapping[str, Scenario]:
    """Made when first asked for: solving for the log-normals takes a tenth of a second."""
    return {**_slos_serve(), **_polyserve(), **_adaserve(), **_ascendra(), **_sa(), **_agents(), **_jitserve()}


def names() -> list[str]:
    return list(_scenarios())


def get(name: str) -> Scenario:
    """Raises ValueError for a name there is not."""
    if name not in _scenarios():
        raise ValueError(f"no scenario {name!r}{nearest(name, _scenarios())}")
    return _scenarios()[name]


def make(
    name: str,
    rate: float,
    *,
    count: int | None = None,
    duration: float | None = None,
    seed: int = 0,
    arrivals: ArrivalProcess | None = None,
    prefill: Prefill | None = None,
    scale: float = 1.0,
    kinds: Sequence[Kind] | None = None,
    max_model_len: int | None = None,
) -> Workload:
    """Makes the scenario `name` at `rate` requests/s: `count` requests, or those of `duration` seconds; lengths, no
    texts.

    Args:
        arrivals: instead of the scenario's.
        prefill: returns the zero-load seconds of so many prompt tokens; scenarios whose TTFT is a slowdown need it.
            PolyServe's promise only TTFTs that it says can be met.
        scale: factor on the lengths of prompts.
        kinds: instead of the scenario's first mix, for other shares or SLOs.
        max_model_len: tokens of prompt and output, instead of the scenario's; 0 = no limit.

    Raises:
        ValueError: impossible arguments.
    """
    scenario = get(name)
    check_rate(rate)
    limit = scenario.max_model_len if max_model_len is None else max_model_len or None
    turns = _share_of_turns(scenario)
    if scenario.sessions is not None:
        if kinds:
            raise ValueError(f"scenario {name!r} is made of sessions: its kinds cannot be replaced")
        own = sessions.make(
            f"{name}-session" if scenario.kinds else name, scenario.sessions, rate * turns,
            count=None if count is None else round(count * turns), duration=duration, seed=seed,
            arrivals=arrivals or scenario.arrivals, scale=scale, max_model_len=limit, profile=scenario.profile,
        )  # fmt: skip
        if not scenario.kinds:
            return own

    def fitted(kind: Kind) -> Kind:
        longer = kind.scaled(scale) if scale != 1.0 else kind
        return longer if limit is None else within(longer, limit)

    expected = (count, count / rate) if count is not None else (round(rate * (duration or 0.0)), duration or 0.0)
    changes = [replace(change, kinds=tuple(map(fitted, change.kinds))) for change in scenario.changes(*expected)]
    workload = drawn(
        name, [fitted(kind) for kind in kinds or scenario.kinds], rate * (1.0 - turns),
        count=None if count is None else count - round(count * turns), duration=duration, seed=seed,
        arrivals=arrivals or scenario.arrivals, changes=changes, prefill=prefill, texts=False, max_model_len=limit,
        profile=scenario.profile,
    )  # fmt: skip
    return workload if scenario.sessions is None else _scaled_in_turn(_together(workload, own), scenario.slo_scales)


def _share_of_turns(scenario: Scenario) -> float:
    """The share of a scenario's requests that are turns of its sessions."""
    if scenario.sessions is None:
        return 0.0
    turns = scenario.sessions.means()[0]
    return turns / (turns + len(scenario.kinds))


def _together(one: Workload, other: Workload) -> Workload:
    """The requests of both, by name and notes those of the first."""
    arrivals = sorted([*one.arrivals, *other.arrivals], key=lambda a: a.at)
    notes = {**one.notes, "sessions": other.notes}
    return replace(
        one, rate=one.rate + other.rate, duration=max(one.duration, other.duration), tiers={**one.tiers, **other.tiers},
        arrivals=tuple(arrivals), notes=notes,
    )  # fmt: skip


def _scaled_in_turn(load: Workload, scales: Sequence[float]) -> Workload:
    """Times of one request after the other, and those of a session by its first turn, so many times as long."""
    scaled = [load.with_slo_scale(scale) for scale in scales]
    arrivals = tuple(
        replace(a, slo=scaled[i % len(scales)].slo(a), session_e2e=scaled[i % len(scales)].arrivals[i].session_e2e)
        for i, a in enumerate(load.arrivals)
    )
    return replace(load, arrivals=arrivals)


def described() -> list[tuple[str, float, float, str]]:
    """Each scenario's name, mean prompt and output tokens of a request of its first mix (all stages), and line."""
    return [(name, *_means(one), one.about) for name, one in _scenarios().items()]


def _means(scenario: Scenario) -> tuple[float, float]:
    prompt = output = weight = 0.0
    for kind in scenario.kinds:
        rounds = 1.0 if kind.rounds is None else mean(kind.rounds)
        own = [(rounds, kind.prompt, kind.output), *((1.0, stage.prompt, stage.output) for stage in kind.then)]
        prompt += kind.share * sum(times * mean(of(p)) for times, p, _ in own)
        output += kind.share * sum(times * mean(of(o)) for times, _, o in own)
        weight += kind.share
    if scenario.sessions is not None:
        turns, of_turn, out = scenario.sessions.means()
        prompt, output, weight = prompt + turns * of_turn, output + turns * out, weight + turns
    return prompt / weight, output / weight
