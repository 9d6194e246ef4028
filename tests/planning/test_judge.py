"""`rubato judge` finds what `rubato capacity` finds, and names what cannot be judged."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rubato.cli.main import main
from rubato.core.plan import Shape
from rubato.core.request import SLO
from rubato.fleet.cluster_options import PolicyChoice
from rubato.planning import capacity
from rubato.planning.capacity import CapacityQuestion
from rubato.planning.judge import loads
from rubato.planning.judge.loads import LoadOptions, LoadSource, with_ttft
from rubato.planning.judge.search import AS_STATED, EACH, FIRST, SECOND, search
from rubato.planning.request_source import FileSource
from rubato.simulation.run_spec import RunSpec, packaged_hardware
from rubato.simulation.simulate import simulate
from rubato.workloads import Arrival, OfferedStage, Workload, read, workload_file
from tests.docs.pages import commands

PROFILE = "smollm2-135m-cpu"
CHAT, CODE = SLO(ttft=0.5, tpot=0.1), SLO(tpot=0.08)
WORDS = ["--profile", PROFILE, "--workers", "1", "--no-progress"]


def arrivals(count: int = 24) -> tuple[Arrival, ...]:
    """One a second, two of three of them chats."""
    return tuple(
        Arrival(f"q{i}", float(i), "code" if i % 3 == 2 else "chat", "", 60 + 40 * (i % 5), 8 + 4 * (i % 4))
        for i in range(count)
    )


def load(**changes: Any) -> Workload:
    made = Workload("mine", 0, 1.0, 24.0, {"chat": CHAT, "code": CHAT}, arrivals(), True)
    return replace(made, **changes)


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """A folder of loads: of files by name, or one of a workload."""

    def made(workload: Workload | None = None, **files: str) -> Path:
        place = tmp_path / "loads"
        place.mkdir()
        if workload is not None:
            workload_file.write(workload, place / "mine.jsonl")
        for name, text in files.items():
            (place / name.replace("_", ".")).write_text(text)
        return place

    return made


def judged(folder: Path, *words: str) -> dict[str, Any]:
    out = folder.parent / "out.json"
    given = ["judge", str(folder), *WORDS, *words, "--json", str(out)]
    assert main(given) == 0
    data: dict[str, Any] = json.loads(out.read_bytes())
    return data


def test_the_table_says_what_rubato_capacity_finds(
    folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    place = folder(load())
    data = judged(place, "--policy", "vllm", "--seeds", "1,2")
    machine = packaged_hardware(PROFILE)
    specs = tuple(RunSpec(machine, PolicyChoice(name)) for name in ("edf", "vllm"))
    source = FileSource(str(place / "mine.jsonl"))
    outcome = capacity.run(CapacityQuestion(source, specs, (1, 2), (0.9, 0.95)), workers=1)
    rows = {row["policy"]: row for row in data["loads"][0]["policies"]}
    for found in outcome.capacities():
        own = rows[found.policy]["capacity"][FIRST if found.target == 0.9 else SECOND]
        assert [own["rate"][key] for key in ("value", "low", "high")] == [
            found.fleet.value, found.fleet.low, found.fleet.high,
        ]  # fmt: skip
        if found.policy == "vllm":
            assert (own["against_edf"]["value"], own["against_edf"]["high"]) == (found.ratio.value, found.ratio.high)
            assert own["best_other"] == "edf"
            assert own["against_best_other"] == own["against_edf"]
    text = capsys.readouterr().out
    for found in outcome.capacities():
        assert any(
            line.startswith(f"| {found.policy}") and f" {capacity.number(found.fleet)} " in line
            for line in text.splitlines()
        )
    order = [row["capacity"][FIRST]["rate"]["value"] for row in data["loads"][0]["policies"]]
    assert order == sorted(order, reverse=True)
    assert AS_STATED not in rows["vllm"]["capacity"]
    assert "no TTFT bound: no request states a TPOT alone" in text
    assert "one seed has no interval" not in text


def test_each_tier_is_asked_of_the_worst_and_prompts_get_a_bound(tmp_path: Path) -> None:
    workload_file.write(load(tiers={"chat": CHAT, "code": CODE}), tmp_path / "mine.jsonl")
    plain = LoadSource(FileSource(str(tmp_path / "mine.jsonl")))
    spec = RunSpec(packaged_hardware(PROFILE), PolicyChoice("vllm"))
    found = search("mine", replace(plain, ttft=0.4), spec, 0)
    assert found["capacity"][FIRST] != found["capacity"][AS_STATED]
    assert found["capacity"][AS_STATED] == search("mine", plain, spec, 0)["capacity"][FIRST]
    bounded = with_ttft(read(tmp_path / "mine.jsonl"), 0.4)
    assert bounded.tiers == {"chat": CHAT, "code": SLO(0.4, 0.08)}

    def worst(rate: float) -> float:
        records = simulate(bounded.rescaled(rate), spec, 0).records
        each = [[r.verdict.met for r in records if r.tier == tier] for tier in ("chat", "code")]
        return min(sum(own) / len(own) for own in each)

    assert worst(found["capacity"][EACH] / 1.011) >= 0.9 > worst(found["capacity"][EACH] * 1.011)
    assert {(rate, least) for rate, _, least in found["tried"]} == {(r, worst(r)) for r, *_ in found["tried"]}


def test_the_bound_is_the_loosest_ttft_and_for_those_that_state_a_tpot_alone(folder: Callable[..., Path]) -> None:
    """Neither an e2e nor best effort is bounded, nor a stage that goes on without a prompt."""
    machine, whole, free = packaged_hardware(PROFILE), SLO(tpot=0.1, e2e=9.0), SLO()
    parts = (OfferedStage(80, 5, CODE), OfferedStage(0, 5, CODE), OfferedStage(30, 5, SLO(ttft=0.7)))
    tiers = {"chat": CHAT, "code": CODE, "whole": whole, "free": free}
    more = [replace(one, tier=tier) for one, tier in zip(arrivals(7)[4:], ("whole", "free", "chat"), strict=True)]
    more[-1] = replace(more[-1], parts=parts)
    place = folder(load(tiers=tiers, arrivals=(*arrivals(4), *more)))
    (place / "mine.yaml").write_text("tiers: {chat: {ttft_ms: 300}}\nkinds: [{app: chat}]\n")
    with pytest.raises(ValueError, match="requests of tier 'chat' have an SLO for each stage"):
        loads.read(place, LoadOptions(PROFILE, lambda name: machine, (0,)))
    (place / "mine.yaml").write_text("tiers: {code: {tpot_ms: 90}}\nkinds: [{app: code}]\n")
    (found,) = loads.read(place, LoadOptions(PROFILE, lambda name: machine, (0,)))
    assert found.source.ttft == 0.7
    assert found.own.tiers == {"chat": CHAT, "code": SLO(0.7, 0.09), "whole": whole, "free": free}
    bounded = SLO(0.7, CODE.tpot)
    assert [part.slo for part in found.own.arrivals[-1].parts] == [bounded, CODE, SLO(ttft=0.7)]
    assert "chat (1 requests), code (1 requests)" in found.bound


TRACE = "t_s,input_tokens,output_tokens\n" + "".join(f"{2 * i},{80 + i},6\n" for i in range(31))
TURNS = "".join(
    f'{{"session_id": "s", "timestamp": {2000 * i}, "input_length": {80 + i}, "output_length": 6}}\n' for i in range(31)
)
KINDS = """
tiers: {chat: {ttft_ms: 300, tpot_ms: 100}}
kinds: [{app: chat}]
"""


def test_a_trace_is_judged_in_multiples_of_its_rate(folder: Callable[..., Path]) -> None:
    data = judged(
        folder(day_csv=TRACE, day_yaml=KINDS),
        "--policy",
        "edf",
        "--policy",
        "adaserve",
        "--seeds",
        "0",
        "--count",
        "20",
    )
    (own,) = data["loads"]
    assert (own["requests"], own["seconds"], own["tiers"]) == (20, 38.0, {"chat": 20})
    assert own["slos"] == "SLOs of day.yaml"
    (row,) = own["policies"]
    first = row["capacity"][FIRST]
    assert first["times_own"]["value"] == pytest.approx(first["rate"]["value"] / 0.5)
    assert first["best_other"] is None
    notes = " ".join(own["notes"])
    assert "adaserve is left out, as it cannot run" in notes
    assert "one seed has no interval" in notes
    assert {"versions", "cpu"} <= data.keys()
    assert own["kinds"]["file"] == "day.yaml"


def test_a_trace_that_states_slos_has_them_in_steps_of_its_profile(folder: Callable[..., Path]) -> None:
    """And a TTFT of ten prefills of its longest prompt, for it states none."""
    rows = "".join(f"{2 * i},{('coding,1.5', 'chat,-90')[i % 2]},{80 + i},6\n" for i in range(20))
    machine = packaged_hardware(PROFILE)
    place = folder(day_csv="t_s,category,slo_ratio,input_tokens,output_tokens\n" + rows)
    (own,) = loads.read(place, LoadOptions(PROFILE, lambda name: machine, (1,)))
    alone, ttft = machine.model.step_time(Shape().plus(1, 92)), 10 * machine.prefill(99)
    assert own.own.tiers == {"coding": SLO(ttft, 1.5 * alone), "chat": SLO(ttft, 0.09)}
    assert "10 times the prefill of 99 tokens alone" in own.bound
    assert own.notes == (f"its slo_ratio is in steps of a decode alone at 92 tokens, {1e3 * alone:.3g} ms",)
    (other,) = loads.read(place, LoadOptions(PROFILE, lambda name: machine, (1,), ttft=3.0))
    assert other.source.ttft == 3.0


def test_requests_that_no_fleet_attains_are_counted_and_named(folder: Callable[..., Path]) -> None:
    hopeless = load(tiers={"chat": CHAT, "code": SLO(ttft=0.001)})
    (own,) = judged(folder(hopeless), "--policy", "edf", "--seeds", "0")["loads"]
    assert own["infeasible"] == {"code": 8}
    assert own["policies"][0]["capacity"][FIRST]["rate"] is None
    assert any("8 of 24 requests (8 of code) cannot be attained even alone: q2 (tier code)" in n for n in own["notes"])
    assert any(n.startswith("'90 % of each tier' of all policies and seeds is beyond any fleet") for n in own["notes"])


def test_a_load_too_small_for_a_policy_has_no_limit_and_comes_first(
    folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """All prompts at once are there in time, but not in steps of 16 tokens."""
    loose = load(tiers={"chat": SLO(ttft=2.0), "code": SLO(ttft=2.0)})
    (own,) = judged(folder(loose), "--policy", "sarathi:budget=16", "--seeds", "0")["loads"]
    best, other = own["policies"]
    assert [best["policy"], other["policy"]] == ["edf", "sarathi:budget=16"]
    assert other["capacity"][FIRST]["rate"]["value"] > 1.0
    assert best["capacity"][FIRST]["rate"] is None
    assert other["capacity"][FIRST]["best_other"] == "edf"
    assert other["capacity"][FIRST]["against_best_other"] is None
    assert best["own_rate"]["all"]["value"] == 1.0
    assert any(f"{FIRST!r} of edf under seed 0 is attained at every rate tried" in n for n in own["notes"])
    assert "| edf               | no limit" in capsys.readouterr().out


def test_a_load_that_every_policy_holds_at_any_rate_is_reported_as_such(
    folder: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    loose, report = load(tiers={"chat": SLO(e2e=1e6), "code": SLO(e2e=1e6)}), tmp_path / "judged.html"
    words = ["--profile", PROFILE, "--workers", "1", "--policy", "vllm", "--seeds", "0", "--report", str(report)]
    assert main(["judge", str(folder(loose)), *words]) == 0
    page = report.read_text(encoding="utf-8")
    assert "No policy holds the largest rate on mine.jsonl: see the notes." in page
    assert "no rate to show: see the notes" in page
    outline, *progress = capsys.readouterr().err.splitlines()
    assert outline.startswith("rubato judge: 1 load with 24 requests, policies vllm and edf, seeds 0; a job finds")
    assert progress[:1] == ["judge: 0 of 2 jobs"]


@pytest.mark.parametrize(
    ("files", "words", "says"),
    [
        ({}, "", "loads holds no loads: put workload files or traces there (docs/workloads.md has their formats)\n"),
        ({"a_txt": "hello\n" * 2}, "", "a.txt has the fields hello: a trace has others (docs/workloads.md); or name"),
        ({"a_txt": "hello\n" * 2}, "", "output=NAME; it is no workload file either\n"),
        (
            {"a_jsonl": TURNS},
            "--seeds=1",
            "go on from others: no stretch of time can be cut out of it; seed 0 takes it",
        ),
        ({"a_csv": TRACE, "b_yaml": KINDS}, "", "b.yaml is beside no load"),
        ({"a_csv": TRACE}, "--profile=", "a.csv names no hardware profile: give --profile"),
        ({"a_csv": TRACE}, "--count=1", "a.csv: offers all at once: it has no rate to change"),
        ({"a_csv": TRACE}, "--count=2", "requests: offer more requests, or take the tier out"),
        ({"a_csv": TRACE}, "--seeds=1,1", "--seeds 1,1: give at least one, and each once"),
        ({"a_csv": TRACE}, "--policy=vllm --policy=vllm", "policy vllm is given twice"),
        ({"a_csv": TRACE}, "--policy=vlm --seeds=0 --duration=0", "--duration 0: give seconds above 0"),
        ({"a_csv": TRACE}, "--set=lengths=orcle", "unknown length predictor 'orcle': did you mean 'oracle'?"),
        ({"a_csv": TRACE}, "--ttft=0", "--ttft 0.0: give seconds above 0"),
        ({"a_jsonl": '{"format": "rubato-workload/2", "name": "x"}'}, "", "a.jsonl, line 1: tiers is missing"),
    ],
)
def test_what_cannot_be_judged_is_one_sentence_that_names_it(
    files: dict[str, str], words: str, says: str, folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    place = folder(**files)
    assert main(["judge", str(place), *WORDS, *words.split()]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error


def test_the_pages_command_runs_in_a_folder_of_ones_own(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    [words] = [words for words in commands("compare.md") if words[0] == "judge"]
    place = folder(load())
    monkeypatch.chdir(place.parent)
    assert main([*words, "--profile", PROFILE, "--seeds", "0", "--workers", "1", "--no-progress"]) == 0
