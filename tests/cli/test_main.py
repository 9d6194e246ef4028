"""The command as a user types it, in process: what is printed, written and returned."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from rubato import policies
from rubato.cli.main import main
from rubato.core import event_log
from rubato.core.plan import Limits
from rubato.core.request import SLO
from rubato.measure import results
from rubato.simulation.simulate import simulate_events
from rubato.workloads import read, write
from rubato.workloads.generate import make
from rubato.workloads.request_kinds import Kind
from tests.kit import Linear, run_spec

FAST = ["--set", "latency.kind=affine", "--set", "latency.b=[0.01, 0.01]", "--set", "latency.k=[0.0004, 0.0004]"]


pytestmark = pytest.mark.usefixtures("process_as_it_was")


@pytest.fixture
def mix(tmp_path: Path) -> Path:
    path = tmp_path / "mix.jsonl"
    assert (
        main(["workload", "-o", str(path), "--rate", "2", "--duration", "20", "--seed", "3", "--chat", "500,60"]) == 0
    )
    return path


def simulated(mix: Path, capsysbinary: pytest.CaptureFixture[bytes], *words: str) -> dict[str, object]:
    capsysbinary.readouterr()
    assert main(["simulate", "--workload", str(mix), *FAST, "--json", "-", *words]) == 0
    return json.loads(capsysbinary.readouterr().out)  # type: ignore[no-any-return]


def test_workload_then_simulate(mix: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    made = read(mix)
    assert made.tiers["chat"].tpot == 0.06
    data = simulated(mix, capsysbinary, "--policy", "edf")
    (run,) = data["runs"]  # type: ignore[misc]
    assert run["policy"] == "edf"
    assert sum(row["offered"] for row in run["tiers"] if row["tier"] != "all") == len(made.arrivals)
    assert run["settings"]["simulated"] is True


def test_the_same_words_give_the_same_numbers(mix: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    words = (
        "--policy",
        "sarathi",
        "--set",
        "budget=64",
        "--noise",
        "0.2",
        "--replicas",
        "2",
        "--router",
        "round_robin",
    )
    assert simulated(mix, capsysbinary, *words) == simulated(mix, capsysbinary, *words)


def test_a_scenario_becomes_a_file_and_is_simulated(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    path = tmp_path / "chat.jsonl"
    words = [
        "--scenario",
        "slos-serve-chatbot",
        "--rate",
        "3",
        "--count",
        "40",
        "--seed",
        "1",
        "--prefill-ms",
        "12,0.1",
    ]
    assert main(["workload", *words, "-o", str(path)]) == 0
    out = capsysbinary.readouterr().out.decode()
    assert f"{path}: 40 requests" in out
    assert "requests cut to 2048 tokens" in out
    made = read(path)
    assert made.slo(made.arrivals[0]).ttft == pytest.approx(5 * (0.012 + 1e-4 * made.arrivals[0].prompt_tokens))
    assert not any(a.messages for a in made.arrivals)
    (run,) = simulated(path, capsysbinary, "--policy", "sarathi")["runs"]  # type: ignore[misc]
    assert run["workload"]["requests"] == 40


def test_a_trace_gives_a_scenario_its_times(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("t_s,input_tokens,output_tokens\n0,5,5\n1,5,5\n4,5,5\n")
    path = tmp_path / "w.jsonl"
    words = ["workload", "-o", str(path), "--scenario", "polyserve-lmsys", "--trace", str(tmp_path / "t.csv")]
    assert main([*words, "--count", "3"]) == 0
    assert [a.at for a in read(path).arrivals] == [0.0, 1.0, 4.0]
    assert main([*words, "--count", "3", "--rate", "1"]) == 0
    assert [a.at for a in read(path).arrivals] == [0.0, 0.5, 2.0]


def test_a_traces_blocks_are_found_in_the_simulated_cache(tmp_path: Path) -> None:
    row = '{"timestamp": %d, "input_length": 1024, "output_length": 3, "hash_ids": [0, %d]}'
    (tmp_path / "m.jsonl").write_text("\n".join(row % (60_000 * i, i + 1) for i in range(2)))
    made, records = tmp_path / "w.jsonl", tmp_path / "r.jsonl"
    assert main(["workload", "--trace", str(tmp_path / "m.jsonl"), "--no-texts", "-o", str(made)]) == 0
    ttft = {}
    for cache in ("true", "false"):
        words = ["--workload", str(made), "--records", str(records), "--set", f"prefix_cache={cache}"]
        assert main(["simulate", *words, *FAST]) == 0
        ttft[cache] = [json.loads(line)["verdict"]["ttft"] for line in records.read_text().splitlines()]
    assert ttft["true"][1] < 0.7 * ttft["true"][0]
    assert ttft["false"] == pytest.approx([ttft["true"][0]] * 2)


def test_arrivals_in_words_texts_and_slo_scale(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    words = ["workload", "-o", str(path), "--rate", "5", "--count", "30", "--arrivals", "gamma:cv=3"]
    assert main([*words, "--no-texts", "--slo-scale", "2"]) == 0
    made = read(path)
    assert not any(a.messages for a in made.arrivals)
    assert made.notes["arrivals"] == "gamma:cv=3"
    assert made.tiers["chat"].ttft == 4.0
    assert main(["workload", "-o", str(path), "--scenario", "polyserve-lmsys", "--count", "5", "--texts"]) == 0
    assert all(a.messages for a in read(path).arrivals)


def test_a_closed_loop_is_made_and_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, records, out = tmp_path / "w.jsonl", tmp_path / "r.jsonl", tmp_path / "out.json"
    assert main(["workload", "-o", str(made), "--count", "12", "--concurrency", "3"]) == 0
    assert "12 requests in a closed loop of 3" in capsys.readouterr().out
    assert {a.at for a in read(made).arrivals} == {0.0}
    assert main(["simulate", "--workload", str(made), *FAST, "--records", str(records), "--json", str(out)]) == 0
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    ends = sorted(row["at"] + row["verdict"]["e2e"] for row in rows)
    assert sorted(row["at"] for row in rows) == pytest.approx([0.0] * 3 + ends[:9])
    (run,) = json.loads(out.read_text())["runs"]
    assert run["workload"]["duration"] == pytest.approx(ends[-1])
    assert run["tiers"][-1]["attained_rps"] == pytest.approx(run["tiers"][-1]["met"] / ends[-1])
    words = ["simulate", "--workload", str(made), *FAST]
    assert main([*words, "--rate", "2"]) == 2
    assert "is a closed loop of 3 requests: their ends set its rate" in capsys.readouterr().err
    assert main([*words, "--concurrency", "1", "--records", str(records)]) == 0
    alone = [json.loads(line) for line in records.read_text().splitlines()]
    assert all(a["times"][-1] == b["at"] for a, b in pairwise(alone))


def test_scenarios_are_listed_with_their_mean_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workload", "--list"]) == 0
    rows = {line.split()[0]: line.split()[1:3] for line in capsys.readouterr().out.splitlines()}
    assert rows["slos-serve-chatbot"] == ["763", "266"]
    assert rows["polyserve-uniform-4096-1024"] == ["4097", "1025"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--scenario", "slos-serve-chatbot", "-o", "x"], "give `prefill` (--prefill-ms)"),
        (["--scenario", "nobody", "-o", "x"], "no scenario 'nobody'"),
        (["--scenario", "sa-mixed", "--kinds", "f", "-o", "x"], "leave out --kinds"),
        (["--scenario", "sa-mixed", "--rate", "0", "--count", "3", "-o", "x"], "rate is 0"),
        (["--arrivals", "weekly", "-o", "x"], "arrivals 'weekly'"),
        (["--seed", "-1", "-o", "x"], "--seed -1: give 0 or more"),
        (["--count", "0", "-o", "x"], "--count 0: give 1 or more"),
        (["--trace", "t.csv", "--count", "-1", "-o", "x"], "--count -1: give 1 or more"),
        (["--duration", "0", "-o", "x"], "--duration 0.0: give seconds above 0"),
        (["--trace", "t.csv", "--duration", "0", "-o", "x"], "--duration 0.0: give seconds above 0"),
        (["--duration", "nan", "-o", "x"], "--duration nan: give seconds above 0"),
        (["--concurrency", "4", "-o", "x"], "say how many by --count"),
        (["--concurrency", "0", "--count", "4", "-o", "x"], "concurrency is 0: give 1 or more"),
        (["--rate", "2"], "name the file to write: -o FILE"),
    ],
)
def test_workloads_that_cannot_be_made(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workload", *words]) == 2
    assert says in capsys.readouterr().err


def test_a_higher_rate_attains_no_more(mix: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    def attained(rate: str) -> float:
        (run,) = simulated(mix, capsysbinary, "--policy", "vllm", "--rate", rate)["runs"]  # type: ignore[misc]
        return float(next(row["attainment"] for row in run["tiers"] if row["tier"] == "all"))

    rates = [attained(rate) for rate in ("0.5", "8", "40")]
    assert rates[0] == 1.0
    assert rates[0] >= rates[1] > rates[2]


@pytest.mark.parametrize(
    "words", [["--set", "latency=roofline"], ["--set", "lengths=oracle"], ["--set", "slo_rule=mean"]]
)
def test_simulation_obeys_the_configuration(
    mix: Path, words: list[str], capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    capsysbinary.readouterr()
    assert main(["simulate", "--workload", str(mix), "--json", "-", *words]) == 0
    (run,) = json.loads(capsysbinary.readouterr().out)["runs"]
    assert run["slo_rule"] == ("mean" if "slo_rule=mean" in words else "deadline")


def test_simulation_says_what_is_a_guess(mix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def noted(path: Path, *words: str) -> str:
        capsys.readouterr()
        assert main(["simulate", "--workload", str(path), *words]) == 0
        return capsys.readouterr().err

    said = noted(mix)
    assert "a guess, not your machine's: step times (affine without k, b: give --profile NAME" in said
    assert "KV capacity (65536 tokens: give --kv-tokens N)" in said
    assert "is made for" not in said
    assert "step times" not in noted(mix, *FAST)
    assert noted(mix, *FAST, "--set", "engine.kv_blocks=999") == ""
    meant = tmp_path / "meant.jsonl"
    write(replace(read(mix), profile="opt-13b-a100"), meant)
    assert "the workload is made for --profile opt-13b-a100" in noted(meant)
    assert noted(mix, "--profile", "llama-3.1-8b-h200") == ""


def test_simulate_without_options_shows_two_policies_that_differ(
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    assert main(["simulate", "--json", "-"]) == 0
    output = capsysbinary.readouterr()
    assert b"a guess" not in output.err
    assert b"rubato simulate --profile opt-13b-2xa100-40g@vllm-2024 --scenario" in output.err
    attained = {
        name: next(row["attainment"] for row in rows if row["tier"] == "all")
        for name, rows in json.loads(output.out)["policies"].items()
    }
    assert list(attained) == ["rubato", "vllm"]
    assert 0.95 > attained["rubato"] > attained["vllm"] + 0.1


def test_a_profile_is_a_replica_that_the_engine_settings_change(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """`simulate` takes --profile and a policy as `sweep` does; engine.max_model_len lifts what the profile takes."""
    trace = tmp_path / "long.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 60000, "output_length": 2}\n' * 2)
    words = ["simulate", "--profile", "llama-3.1-8b-h200", "--trace", str(trace), "--no-texts", "--json", "-"]
    policy = "sarathi:budget=512@random:seed=3"
    for more, outcome in (([], "refused"), (["--set", "engine.max_model_len=65536"], "completed")):
        assert main([*words, "--policy", policy, *more]) == 0
        (run,) = json.loads(capsysbinary.readouterr().out)["runs"]
        assert (run["settings"]["policy"], run["settings"]["settings"]) == ("sarathi", {"budget": 512})
        assert run["settings"]["router"] == "random"
        assert run["requests"]["outcome"] == [outcome] * 2
    assert main([*words, "--steps", str(trace)]) == 2


def test_simulate_on_the_steps_of_a_log(mix: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    """A latency model fitted to a log whose steps took 10 ms + 1 ms a token predicts a lone request's TTFT."""
    made = read(mix)
    limits = Limits(64, 2048, 8192, 4096, 16)
    with event_log.EventLogWriter(tmp_path / "log") as log:
        for policy, settings in (("sarathi", {"budget": 96}), ("vllm", {})):
            for event in simulate_events(
                list(made.requests()), {}, run_spec(Linear(), limits, policy, settings=settings)
            ):
                log(event)
    records = tmp_path / "records.jsonl"
    words = ["--workload", str(mix), "--steps", str(tmp_path / "log"), "--policy", "vllm", "--records", str(records)]
    assert main(["simulate", *words, "--rate", "0.01"]) == 0
    first = json.loads(records.read_text().splitlines()[0])
    assert first["verdict"]["ttft"] == pytest.approx(0.01 + 0.001 * made.arrivals[0].prompt_tokens, rel=0.1)


def test_records_agree_with_the_table(mix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records, out = tmp_path / "r.jsonl", tmp_path / "out.json"
    words = ["--workload", str(mix), *FAST, "--rate", "12", "--records", str(records), "--json", str(out)]
    assert main(["simulate", *words]) == 0
    met = sum(json.loads(line)["verdict"]["met"] for line in records.read_text().splitlines())
    (rows,) = [run["tiers"] for run in json.loads(out.read_text())["runs"]]
    assert met == next(row["met"] for row in rows if row["tier"] == "all")
    assert "attained [95 %]" in capsys.readouterr().out
    assert json.loads(out.read_text())["format"] == results.FORMAT


MIX = """
tiers: {fast: {ttft_ms: 400, tpot_ms: 60}, free: {}}
kinds: [{app: chat, tier: fast, share: 3}, {app: code, tier: free, prompt: 150, output: 20}]
"""


def test_kinds_seeds_and_goodput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mix.yaml").write_text(MIX)
    out, records = tmp_path / "out.json", tmp_path / "records.jsonl"
    words = ["--kinds", str(tmp_path / "mix.yaml"), "--rate", "6", "--duration", "20", "--seeds", "1,5,9"]
    words += ["--goodput", "ttft:300", "e2el:9000", "--json", str(out), "--records", str(records)]
    assert main(["simulate", *words, *FAST]) == 0
    data = json.loads(out.read_text())
    assert [run["workload"]["seed"] for run in data["runs"]] == [1, 5, 9]
    assert {run["workload"]["tiers"]["fast"]["ttft"] for run in data["runs"]} == {0.4}
    (rows,) = data["policies"].values()
    total = next(row for row in rows if row["tier"] == "all")
    assert total["offered"] == sum(run["workload"]["requests"] for run in data["runs"]) > 300
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    good = sum(r["verdict"]["ttft"] <= 0.3 and r["verdict"]["e2e"] <= 9.0 for r in lines)
    assert total["good"] == good
    assert f"within ttft:300 e2el:9000: {good} of {total['offered']}" in capsys.readouterr().out


def test_rounds_count_seeds_or_repeat_a_file(mix: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    data = simulated(mix, capsysbinary, "--rounds", "2")
    one, two = data["runs"]  # type: ignore[misc]
    assert one["workload"]["fingerprint"] == two["workload"]["fingerprint"]
    assert main(["simulate", *FAST, "--duration", "20", "--rounds", "2", "--seed", "4", "--json", "-"]) == 0
    runs = json.loads(capsysbinary.readouterr().out)["runs"]
    assert [run["workload"]["seed"] for run in runs] == [4, 5]


def test_a_trace_then_simulate(tmp_path: Path) -> None:
    path, out = tmp_path / "t.csv", tmp_path / "out.json"
    path.write_text("at,prompt_tokens,output_tokens,tier\n0,80,9,chat\n2,300,1,code\n6,40,5,chat\n")
    assert main(["simulate", "--trace", str(path), "--rate", "1", *FAST, "--json", str(out)]) == 0
    requests = json.loads(out.read_text())["runs"][0]["requests"]
    assert requests["at"] == [0.0, pytest.approx(2 / 3), pytest.approx(2.0)]
    assert (requests["output"], requests["tier"]) == ([9, 1, 5], ["chat", "code", "chat"])


def test_compare_two_simulations(mix: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    files = [str(tmp_path / f"{policy}.json") for policy in ("edf", "vllm")]
    for path, policy in zip(files, ("edf", "vllm"), strict=True):
        assert main(["simulate", "--workload", str(mix), *FAST, "--rate", "9", "--policy", policy, "--json", path]) == 0
    capsysbinary.readouterr()
    assert main(["compare", *files, "--json", "-"]) == 0
    captured = capsysbinary.readouterr()
    report = json.loads(captured.out)
    assert (report["a"], report["b"], report["paired"]) == ("edf", "vllm", True)
    met = [next(r for r in json.loads(Path(f).read_text())["runs"][0]["tiers"] if r["tier"] == "all") for f in files]
    assert report["tiers"]["all"]["attained"]["met_a"] == met[0]["met"]
    assert report["tiers"]["all"]["attained"]["met_b"] == met[1]["met"]
    assert b"edf against vllm" in captured.err


def test_simulation_shares_between_tenants_and_says_what_it_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = [Kind("chat", SLO(), prompt=(50, 50), output=(20, 20), tenant=tenant, share=share)
             for tenant, share in (("flood", 0.9), ("quiet", 0.1))]  # fmt: skip
    path = tmp_path / "load.jsonl"
    write(make("two", kinds, 40.0, duration=10.0, texts=False), path)
    (tmp_path / "tenants.yaml").write_text(
        "tenants: {flood: {keys: [a]}, quiet: {keys: [b]}}\nfair_share: {window: 4}\n"
    )
    means = []
    for words in ([], ["--config", str(tmp_path / "tenants.yaml")]):
        out = tmp_path / "out.json"
        few = ["--policy", "vllm", "--set", "engine.max_num_seqs=4", *FAST]
        assert main(["simulate", "--workload", str(path), "--json", str(out), *few, *words]) == 0
        columns = json.loads(out.read_text())["runs"][0]["requests"]
        quiet = {a.id for a in read(path).arrivals if a.tenant == "quiet"}
        waits = [ttft for id, ttft in zip(columns["id"], columns["ttft"], strict=True) if id in quiet]
        means.append(sum(waits) / len(waits))
    assert means[1] < means[0] / 2
    assert "limits are not simulated" in capsys.readouterr().err


def test_fit_then_simulate_with_what_it_says(
    mix: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    limits = Limits(64, 2048, 8192, 4096, 16)
    with event_log.EventLogWriter(tmp_path / "log") as log:
        for policy, settings in (("sarathi", {"budget": 96}), ("vllm", {})):
            for event in simulate_events(
                list(read(mix).requests()), {}, run_spec(Linear(), limits, policy, settings=settings)
            ):
                log(event)
    capsysbinary.readouterr()
    assert main(["fit", str(tmp_path / "log")]) == 0
    (tmp_path / "config.yaml").write_bytes(capsysbinary.readouterr().out)
    assert main(["fit", str(tmp_path / "log"), "--json", "-"]) == 0
    found = json.loads(capsysbinary.readouterr().out)
    assert found["held_out"]["p95"] < 0.05
    assert found["latency"]["kind"] == "affine"
    words = ["--workload", str(mix), "--config", str(tmp_path / "config.yaml"), "--rate", "0.01", "--policy", "vllm"]
    assert main(["simulate", *words, "--json", "-"]) == 0
    first = json.loads(capsysbinary.readouterr().out)["runs"][0]["requests"]["ttft"][0]
    assert first == pytest.approx(0.01 + 0.001 * read(mix).arrivals[0].prompt_tokens, rel=0.1)


def test_policies_are_listed_one_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == policies.names()
    kinds = {line.split()[0]: line.split()[1] for line in lines}
    assert (kinds["edf"], kinds["least_loaded"], kinds["polyserve"]) == ("scheduler", "router", "both")
    assert all(line.endswith(".") and len(line) < 150 for line in lines)


OWN = """from dataclasses import dataclass
@dataclass
class Scheduler:
    \"\"\"few: so many.\"\"\"
    needs = frozenset()
    few: int = 3
    odd: frozenset = frozenset()
    def observe(self, events): ...
    def plan(self, view): ...
"""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("edf", ["Earliest deadline first", "\nFor tiers with TTFTs and TPOTs", "docs/policies/edf.md",
                 "Source: ours; EDF",
                 "Scheduler (--policy edf:SETTING=VALUE)", "    decode_lead=3.0\n        tokens that",
                 "docs/which-policy.md"]),
        ("polyserve", ["Scheduler (--policy polyserve:", "Router (--policy polyserve@polyserve:",
                       "needs of the engine: recall, step_times", "    tiers=[0.02, 0.03, 0.05, 0.1]",
                       "    prefix_affinity=false"]),
        ("least_loaded", ["Router (--policy POLICY@least_loaded:SETTING=VALUE), needs of the engine: nothing"]),
        ("own.py", ["No docstring.", "Source: not stated", "Scheduler (--policy own.py:SETTING=VALUE)",
                    "    few=3\n        so many\n    odd=frozenset()", "    few: so many."]),
        ("own_package.own", ["Scheduler (--policy own_package.own:SETTING=VALUE)", "    few=3"]),
    ],
)  # fmt: skip
def test_a_policy_is_shown_in_full(
    name: str, says: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", sys.path[:])
    assert main(["policies", name]) == 0
    text = capsys.readouterr().out
    assert [words for words in says if words not in text] == []


@pytest.mark.parametrize("words", [["policies"], ["policies", "edf"], ["workload", "--list"], ["profile", "--list"]])
def test_a_reader_that_leaves_ends_a_command_without_a_word(
    words: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as output:  # its end flushes what is left, as the interpreter does
        monkeypatch.setattr("sys.stdout", output)
        assert main(words) == 128 + signal.SIGPIPE
    assert capfd.readouterr().err == ""


def test_a_broken_pipe_of_a_commands_own_is_an_error(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks() -> str:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("rubato.policies.describe", breaks)
    with open(os.devnull, "w") as output:
        monkeypatch.setattr("sys.stdout", output)
        assert main(["policies"]) == 2
    assert "rubato policies: [Errno 32] Broken pipe" in capfd.readouterr().err


ON_RAY = ["serve", "model", "--port", "0", "--engine", "vllm"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["simulate", "--policy", "efd"], "did you mean 'edf'"),
        (["policies", "efd"], "unknown policy 'efd': did you mean 'edf'"),
        (["policies", "zzz"], "unknown policy 'zzz': known are adaserve, ascendra, "),
        (["policies", "zzz.py"], "there is no policy file 'zzz.py'"),
        (["simulate", "--set", "fairnes=1"], "did you mean 'fairness'"),
        (["simulate", "--workload", "nowhere.jsonl"], "--workload nowhere.jsonl cannot be opened: no such file"),
        (["simulate", "--rate", "0"], "give a positive number"),
        (["simulate", "--steps", "nowhere"], "nowhere"),
        (["simulate", "--goodput", "ttfb:3"], "'ttfb:3': write NAME:MILLISECONDS"),
        (["simulate", "--kinds", "nowhere.yaml"], "nowhere.yaml"),
        (["simulate", "--trace", "nowhere.csv"], "simulate: --trace nowhere.csv cannot be opened: no such"),
        (["simulate", "--rounds", "0"], "--rounds 0: give 1 or more"),
        (["simulate", "--workload", "w", "--kinds", "k"], "--workload says everything"),
        (["simulate", "--workload", "w", "--seeds", "1"], "use --rounds to repeat it"),
        (["compare", "nowhere.json", "nowhere.json"], "nowhere.json"),
        (["fit", "nowhere.jsonl"], "rubato fit: nowhere.jsonl cannot be opened: no such file"),
        (["bench", "http://127.0.0.1:9", "--header", "x"], "write it as NAME=VALUE"),
        (["simulate", "--set", "lengths=nope"], "known are conditional_mean, gaussian, oracle, quantile, running_mean"),
        (["simulate", "--set", "engine.block_siz=5"], "did you mean 'block_size'"),
        (["simulate", "--policy", "idle.policy"], "policy 'idle.policy'"),
        (
            ["simulate", "--policy", "faulty.policy"],
            "policy 'faulty.policy', replica 'r0', t=",
        ),
        (["serve", "--set", "engine.kind=tourch"], "did you mean 'torch'"),
        (
            ["serve", "--tensor-parallel-size", "2"],
            "--tensor-parallel-size: engine 'torch' runs a replica on one device",
        ),
        (["serve", "--port", "0", "--engine", "vllm"], "engine 'vllm' needs a Hugging Face name or a folder"),
        ([*ON_RAY, "--set", "engine.args=[--port=1]"], "engine.args: leave --port out: Rubato chooses it"),
        ([*ON_RAY, "--set", "engine.arg=[]"], "engine.arg: unknown setting: did you mean 'args'?"),
        (
            [*ON_RAY, "--tensor-parallel-size", "0"],
            "engine.tensor_parallel_size: Input should be greater than or equal to 1, got 0",
        ),
        ([*ON_RAY, "--set", "engine.plugin={stand_asid: true}"], "did you mean 'stand_aside'"),
        ([*ON_RAY, "--set", "engine.plugin={link: {}}"], "engine.plugin: link follows from the rest"),
        ([*ON_RAY, "--set", "fleet=local"], "engine 'vllm' runs in Ray actors, not 'local': set it to ray"),
        ([*ON_RAY, "--set", "latency.kind=roofline"], "inside vLLM the model is affine"),
        (["bench", "http://127.0.0.1:9", "--no-progress"], "http://127.0.0.1:9"),
    ],
)
def test_what_is_impossible_is_one_sentence_and_status_2(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, does in (("idle", "return Plan()"), ("faulty", "raise KeyError(view.id)")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "policy.py").write_text(
            "from dataclasses import dataclass\n"
            "from typing import ClassVar\n"
            "from rubato.core.plan import Plan\n"
            "@dataclass\n"
            "class Scheduler:\n"
            "    needs: ClassVar[frozenset[str]] = frozenset()\n"
            "    def observe(self, events): ...\n"
            f"    def plan(self, view): {does}\n"
        )
    monkeypatch.chdir(tmp_path)  # where a user's own policies are found
    monkeypatch.setattr("sys.path", sys.path[:])
    assert main(words) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error


def test_a_policy_of_ones_own(mix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file, one dataclass: shortest prompt first."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    (tmp_path / "mine" / "shortest.py").write_text(
        "from dataclasses import dataclass\n"
        "from typing import ClassVar\n"
        "from rubato.policy_kit.batch_builder import BatchBuilder, admit_in_order, run_in_order\n"
        "SOURCE = 'mine'\n"
        "@dataclass\n"
        "class Scheduler:\n"
        "    needs: ClassVar[frozenset[str]] = frozenset({'chunked'})\n"
        "    budget: int = 512\n"
        "    def observe(self, events): ...\n"
        "    def plan(self, view):\n"
        "        builder = BatchBuilder(view, self.budget)\n"
        "        run_in_order(builder, view.running)\n"
        "        admit_in_order(builder, sorted(view.waiting, key=lambda s: s.pending))\n"
        "        return builder.plan()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    out = tmp_path / "out.json"
    words = ["--workload", str(mix), *FAST, "--policy", "mine.shortest", "--set", "budget=256", "--json", str(out)]
    assert main(["simulate", *words]) == 0
    assert json.loads(out.read_text())["runs"][0]["settings"]["settings"] == {"budget": 256}


def test_every_command_says_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["capacity"], ["plan"], ["serve"]):
        with pytest.raises(SystemExit) as end:
            main([*words, "--help"])
        assert end.value.code == 0
        assert "usage: rubato" in capsys.readouterr().out
