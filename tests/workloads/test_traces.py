"""Workloads from traces: every layout, rescaling, tiers, and what is wrong with a file."""

import gzip
import json

import pytest

from rubato.core.event_log import EventLogWriter, encode
from rubato.core.events import Finished, Offered, Verdict
from rubato.core.request import SLO
from rubato.workloads import request_kinds, traces
from rubato.workloads.arrivals import Poisson, Replay
from rubato.workloads.resample import multiplied
from rubato.workloads.trace_layouts import Columns
from rubato.workloads.traces import Trace, TraceError, TraceOptions, TraceRequest
from tests.kit import request

KINDS = [request_kinds.chat(SLO(ttft=1.0), share=3.0), request_kinds.code(SLO(tpot=0.1), tier="editor", share=1.0)]
SKIP = TraceOptions(skip_malformed=True)
OFFERS = [TraceRequest(0.0, 50, 10), TraceRequest(1.5, 200, 1), TraceRequest(4.0, 30, 7)]


def file(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("own.csv", "at,prompt_tokens,output_tokens\n10,50,10\n11.5,200,1\n14,30,7\n"),
        ("own.jsonl", '{"at":0,"prompt_tokens":50,"output_tokens":10}\n\n{"at":1.5,"prompt_tokens":200,'
         '"output_tokens":0}\n{"at":4,"prompt_tokens":30,"output_tokens":7}\n'),
        ("azure.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,50,10\n"
         "2023-11-16 18:15:48.1805900,200,1\n2023-11-16 18:15:50.6805900,30,7\n"),
        ("seconds.csv.gz", "t_s,input_tokens,output_tokens\r\n0.0,50,10\r\n1.5,200,1\r\n4.0,30,7\r\n"),
        ("burstgpt.csv", "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\r\n"
         "7,ModelA,50,10,60,API\r\n8.5,ModelB,200,1,201,API\r\n9,ModelA,870,0,870,API\r\n"
         "11,ModelA,30,7,37,Conversation log\r\n\r\n"),
        ("sessions.csv", "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens\n"
         "7,k1,2.1,ModelA,50,10,60\n8.5,k1,3.9,ModelA,200,1,201\n11,k2,1,ModelA,30,7,37\n"),
        ("mooncake.jsonl", '{"timestamp": 4000, "input_length": 30, "output_length": 7, "hash_ids": [0]}\n'
         '{"timestamp": 0, "input_length": 50, "output_length": 10, "hash_ids": [0]}\n'
         '{"timestamp": 1500, "input_length": 200, "output_length": 1, "hash_ids": [2]}\n'),
    ],
)  # fmt: skip
def test_every_layout_gives_the_same_offers(tmp_path, name, text):
    read = traces.read(file(tmp_path, name, text)).offers
    assert [(o.prompt, o.output, o.tier) for o in read] == [(o.prompt, o.output, o.tier) for o in OFFERS]
    assert [o.at for o in read] == pytest.approx([o.at for o in OFFERS], abs=1e-6)


@pytest.mark.parametrize(
    "text",
    ["at,prompt_tokens,output_tokens\n0,50,10\n1.5,200,1\n", '[{"at":0,"prompt_tokens":50,"output_tokens":10}]',
     '{"at":0,"prompt_tokens":50,"output_tokens":10}\n{"at":1.5,"prompt_tokens":200,"output_tokens":1}'],
)  # fmt: skip
@pytest.mark.parametrize("name", ["t.txt", "t.gz"])
def test_byte_order_mark_and_crlf_change_nothing(tmp_path, name, text):
    marked = traces.read(file(tmp_path, f"marked-{name}", "\ufeff" + text.replace("\n", "\r\n")))
    assert marked.offers == traces.read(file(tmp_path, name, text)).offers


def test_failed_requests_of_burstgpt_are_left_out_and_counted(tmp_path):
    text = "Timestamp,Request tokens,Response tokens\n5,9,0\n7,50,10\n8,0,0\n9,30,7\n"
    trace = traces.read(file(tmp_path, "b.csv", text))
    assert [(o.at, o.prompt) for o in trace.offers] == [(0.0, 50), (2.0, 30)]
    assert trace.notes == {"failed": "2 failed requests (Response tokens 0) are left out"}


def test_event_log_is_a_trace_of_what_was_offered(tmp_path):
    log = tmp_path / "events.jsonl"
    with EventLogWriter(log) as write:
        for id, at in (("a", 100.0), ("b", 101.5), ("c", 102.0), ("d", 103.0)):
            write(Offered(at, id, request(id, 50, ttft=1.0, arrival=at, tier=f"tier-{id}")))
        for id, output, prompt in (("b", 7, 60), ("a", 9, None)):
            write(Finished(104.0, id, "completed", "stop", Verdict(True, "deadline"), output, prompt=prompt))
        write(Finished(104.0, "c", "refused", "rejected-saturated", Verdict(False, "deadline")))
    trace = traces.read(log)
    assert [(o.at, o.prompt, o.output, o.tier) for o in trace.offers] == [(0, 50, 9, "tier-a"), (1.5, 60, 7, "tier-b")]
    assert trace.notes == {"failed": "2 failed requests (output_tokens 0) are left out"}  # d has not ended
    made = traces.make("day", trace, texts=False)
    assert made.tiers == {"tier-a": SLO(ttft=1.0), "tier-b": SLO(ttft=1.0)}


@pytest.mark.parametrize(
    ("at", "edit", "message"),
    [
        (99.0, lambda line: line, "line 2: time goes back"),
        (101.0, lambda line: line.replace(b"stages", b"stage"), "line 2: not an event"),
    ],
)
def test_event_log_that_cannot_be_a_trace_says_where(tmp_path, at, edit, message):
    lines = [encode(Offered(time, "a", request("a", 50, arrival=time))) for time in (100.0, at)]
    log = tmp_path / "events.jsonl"
    log.write_bytes(lines[0] + edit(lines[1]))
    with pytest.raises(TraceError, match=message):
        traces.read(log)


def test_columns_by_name_read_a_layout_of_ones_own(tmp_path):
    text = "when,in,out,who\n2024-01-02 10:00:00,50,10,chat\n2024-01-02 10:00:01.5,200,1,\n"
    how = TraceOptions(columns=Columns("when", "in", "out", "who"))
    offers = traces.read(file(tmp_path, "t.csv", text), how).offers
    assert [(o.at, o.prompt, o.output, o.tier) for o in offers] == [(0.0, 50, 10, "chat"), (1.5, 200, 1, "")]
    numbers = file(tmp_path, "n.csv", "when,in,out\n3000,50,10\n4500,200,1\n")
    how = TraceOptions(columns=Columns("when", "in", "out"), time_scale=1e-3)
    assert [o.at for o in traces.read(numbers, how).offers] == [0.0, 1.5]
    with pytest.raises(TraceError, match="has no column 'whn': did you mean 'when'"):
        traces.read(numbers, TraceOptions(columns=Columns("whn", "in", "out")))


def test_a_window_begins_at_its_first_request(tmp_path):
    path = file(tmp_path, "t.csv", "t_s,input_tokens,output_tokens\n5,1,1\n15,2,1\n17,3,1\n25,4,1\n")
    offers = traces.read(path, TraceOptions(start=10.0, seconds=10.0)).offers
    assert [(o.at, o.prompt) for o in offers] == [(0.0, 2), (2.0, 3)]
    with pytest.raises(TraceError, match="no request from 21 to inf s; its last is at 20 s"):
        traces.read(path, TraceOptions(start=21.0))


ROW = '{{"timestamp": {}, "input_length": 9, "output_length": 4}}\n'


@pytest.mark.parametrize(
    ("times", "says"),
    [
        ((0, 0.25, 0.5), "timestamp is read as milliseconds, but it has fractions: if it is seconds, give"),
        ((0, 0, 1, 1), "but that is 3,000 requests/s"),
        ((0, 2, 5), "but that is 400 requests/s"),  # of 0.4/s, in seconds
        ((0, 25, 500), None),
        ((0, 0), None),
    ],
)  # fmt: skip
def test_milliseconds_that_look_like_seconds_are_noted(tmp_path, times, says):
    path = file(tmp_path, "m.jsonl", "".join(ROW.format(time) for time in times))
    note = traces.read(path).notes.get("times")
    assert note is None if says is None else says in note
    assert traces.make("m", traces.read(path), texts=False).notes.get("times") == note
    scaled = traces.read(path, TraceOptions(time_scale=1000.0))
    assert [o.at for o in scaled.offers] == [float(time) for time in times]
    assert not scaled.notes


@pytest.mark.parametrize(
    ("times", "is_noted"),
    [
        ((0, 400, 1100), True),  # of 2 requests/s
        ((1764460800000, 1764460800020, 1764460800050), True),  # since 1970; 0.04 requests/s
        ((1764460800, 1764464400, 1764468000), False),  # an hourly job's
        ((0, 3600.5, 7200), False),
        ((0, 30, 90), False),  # as BurstGPT begins
    ],
)  # fmt: skip
@pytest.mark.parametrize("columns", [None, Columns("at", "prompt_tokens", "output_tokens")])
def test_seconds_that_look_like_milliseconds_are_noted(tmp_path, columns, times, is_noted):
    rows = "".join(f"{time},9,4\n" for time in times)
    path = file(tmp_path, "own.csv", "at,prompt_tokens,output_tokens\n" + rows)
    note = traces.read(path, TraceOptions(columns=columns)).notes.get("times", "")
    assert note.endswith("if it is milliseconds, give --time-scale 0.001") == is_noted
    assert ("at is read as seconds, but that is 0.0" in note) == is_noted
    assert not traces.read(path, TraceOptions(columns=columns, time_scale=1e-3)).notes


def test_dates_are_in_no_doubt(tmp_path):
    rows = "".join(f"2023-11-16 {hour}:00:00,9,4\n" for hour in (10, 12, 20))
    path = file(tmp_path, "azure.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    assert not traces.read(path).notes


def test_a_part_of_a_trace(tmp_path):
    path = file(tmp_path, "own.csv", "at,prompt_tokens,output_tokens,tier\n5,50,10,chat\n6,20,1,editor\n9,30,7,\n")
    assert [o.tier for o in traces.read(path).offers] == ["chat", "editor", ""]
    assert len(traces.read(path, TraceOptions(seconds=4.0)).offers) == 2
    assert len(traces.read(path, TraceOptions(count=1)).offers) == 1
    assert traces.read(path).times == Replay((0.0, 1.0, 4.0))


EMISSION = """[
 {"emission_time_ms": 500.0, "input_length": 40, "output_length": 8, "prompt": "Finish this.", "slo_ratio": 1.2},
 {"emission_time_ms": 0, "input_length": 30, "output_length": 8, "prompt": "Hello!", "slo_ratio": -50},
 {"emission_time_ms": 2500.0, "input_length": 20, "output_length": 8, "prompt": "Sum up.", "slo_ratio": -150.0}
]"""
LENGTHS = """t_s,category,slo_ratio,input_tokens,output_tokens
0.0,chat,-50.0,30,8
0.5,coding,1.2,40,8
2.5,summarization,-150.0,20,8
"""


@pytest.mark.parametrize(("name", "text"), [("e.json", EMISSION), ("e.json.gz", EMISSION), ("l.csv", LENGTHS)])
def test_adaserves_files_bring_their_own_promises(tmp_path, name, text):
    trace = traces.read(file(tmp_path, name, text))
    load = traces.make("t", trace, unloaded=0.03, texts=False)
    assert [(a.at, a.prompt_tokens, load.slo(a)) for a in load.arrivals] == [
        (0.0, 30, SLO(tpot=0.05)), (0.5, 40, SLO(tpot=1.2 * 0.03)), (2.5, 20, SLO(tpot=0.15)),
    ]  # fmt: skip
    named = ["chat", "coding", "summarization"] if name == "l.csv" else ["tpot-50ms", "tpot-1.2x", "tpot-150ms"]
    assert list(load.tiers) == named
    assert not any(a.messages for a in load.arrivals)
    with pytest.raises(ValueError, match="multiple of the unloaded time per token"):
        traces.make("t", trace, texts=False)


def test_a_traces_own_texts_are_kept(tmp_path):
    load = traces.make("t", traces.read(file(tmp_path, "e.json", EMISSION)), unloaded=0.03)
    assert [a.messages[0][1] for a in load.arrivals] == ["Hello!", "Finish this.", "Sum up."]


def test_mooncakes_blocks_are_kept(tmp_path):
    rows = [
        {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 900, "input_length": 512, "output_length": 0, "hash_ids": [0]},
    ]
    trace = traces.read(file(tmp_path, "m.jsonl", "\n".join(json.dumps(row) for row in rows)))
    assert [o.blocks for o in trace.offers] == [(0, 1), (0,)]
    load = traces.make("m", trace, texts=False)
    one, two = (request.stages[0].token_ids for request in load.requests())
    assert (len(one), len(two)) == (700, 512)
    assert one[:512] == two
    assert load.notes["empty"] == "1 requests without output tokens were given one"
    assert load.tiers == {"default": SLO()}


def test_bailians_chats_become_sessions_and_its_blocks_are_found(tmp_path):
    ids = list(range(80))
    rows = [  # chat, parent, time, prompt tokens, ids of blocks of 16
        (7, -1, 61.0, 700, ids[:44]), (9, 7, 63.5, 1030, ids[:65]), (4, 2, 64.0, 20, [3, 5]), (8, 9, 70.0, 9, [1]),
    ]  # fmt: skip
    names = ("chat_id", "parent_chat_id", "timestamp", "input_length", "hash_ids")
    rows = [dict(zip(names, row, strict=True), type="text", turn=1, output_length=5) for row in rows]
    load = traces.make("b", traces.read(file(tmp_path, "b.jsonl", "\n".join(map(json.dumps, rows)))), texts=False)
    assert [(a.id, a.at, a.after, a.gap, a.session) for a in load.arrivals] == [
        ("b-0", 0.0, "", 0.0, "7"), ("b-1", 2.5, "b-0", 0.0, "7"), ("b-2", 3.0, "", 0.0, "4"),
        ("b-3", 9.0, "b-1", 0.0, "7"),
    ]  # fmt: skip
    one, two = load.arrivals[0].blocks, load.arrivals[1].blocks
    assert (len(one), len(two)) == (2, 3)
    assert one[0] == two[0]  # 512 tokens alike, then 188 of 512
    assert len({*one, *two}) == 4
    with pytest.raises(ValueError, match="no other arrivals fit them"):
        traces.make("b", traces.read(tmp_path / "b.jsonl"), texts=False, arrivals=Poisson())
    with pytest.raises(ValueError, match="turns that go on from others: give 1"):
        multiplied(traces.read(tmp_path / "b.jsonl").offers, 2.0)


def test_aiperfs_turns_add_to_what_was_there(tmp_path):
    rows = [
        {"session_id": "x", "input_length": 600, "output_length": 40},
        {"session_id": "y", "timestamp": 1500, "input_length": 10, "output_length": 1},
        {"session_id": "x", "delay": 250, "input_length": 150, "output_length": 20},
        {"session_id": "x", "delay": 2000, "input_length": 400, "output_length": 5},
    ]
    load = traces.make("a", traces.read(file(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows)))), texts=False)
    assert [(a.session, a.at, a.after, a.gap, a.prompt_tokens) for a in load.arrivals] == [
        ("x", 0.0, "", 0.0, 600), ("x", 0.25, "a-0", 0.25, 790), ("y", 1.5, "", 0.0, 10), ("x", 2.25, "a-1", 2.0, 1210),
    ]  # fmt: skip
    first, second, other, third = (a.blocks for a in load.arrivals)
    assert (len(first), third[:2], len(third)) == (2, first, 3)
    assert second == first
    assert not {*other} & {*third}


def test_aiperfs_rows_without_a_session_are_sessions_of_their_own(tmp_path):
    rows = [{"session_id": "x"}, {}, {"session_id": None}, {"session_id": None}, {"session_id": "x"}]
    text = "\n".join(json.dumps({**row, "input_length": 600, "output_length": 5}) for row in rows)
    load = traces.make("a", traces.read(file(tmp_path, "a.jsonl", text)), texts=False)
    assert [a.prompt_tokens for a in load.arrivals] == [600, 600, 600, 600, 1205]
    assert len({a.session for a in load.arrivals}) == 4


def test_bailians_requests_have_ids_of_their_own(tmp_path):
    row = json.dumps({"chat_id": 3, "parent_chat_id": -1, "timestamp": 0.0, "input_length": 9, "output_length": 5})
    with pytest.raises(ValueError, match=r"b\.jsonl has two requests with chat_id 3"):
        traces.read(file(tmp_path, "b.jsonl", f"{row}\n{row}"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"session_id":"a","input_length":3,"output_length":3,"delay":-1}', "line 1: delay is -1: expected ms"),
        ("a,b\n1,2\n", r"has the fields a, b: a trace has others \(docs/workloads.md\); or name its columns: --col"),
        ("at,prompt_tokens,out\n1,2,3\n", r"at, prompt_tokens, out: output_tokens is missing \(docs"),
        ("at,prompt_tokens,output_tokens\n0,50,10\n1,many,3\n", "line 3: prompt_tokens is 'many': expected a whole"),
        ("at,prompt_tokens,output_tokens\n0,0,10\n", "line 2: prompt_tokens is '0': expected a whole"),
        ("at,prompt_tokens,output_tokens\n0,5,-1\n", "line 2: output_tokens is '-1'"),
        ("at,prompt_tokens,output_tokens\n0,5\n", "line 2: output_tokens is None"),
        ("at,prompt_tokens,output_tokens\n0,5,5\n1,1,024,5\n", "line 3: 4 fields, but the header names 3"),
        ("at,prompt_tokens,output_tokens\ninf,5,5\n", "line 2: at is 'inf': expected a time"),
        ("at,prompt_tokens,output_tokens\nnan,5,5\n", "line 2: at is 'nan': expected a time"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,5,5\n", "line 2: TIMESTAMP is 'yesterday'"),
        ("t_s,input_tokens,output_tokens,slo_ratio\n0,5,5,0\n", "line 2: slo_ratio is '0': expected 1.2"),
        ("t_s,input_tokens,output_tokens,slo_ratio\n0,5,5,-1e300\n", r"slo_ratio is '-1e300': .* from 0.001 to 1e\+09"),
        ('{"timestamp":0,"input_length":700,"output_length":5,"hash_ids":[1]}\n', "line 1: hash_ids .* expected 2"),
        ('{"timestamp":0,"input_length":70.5,"output_length":5}\n', "line 1: input_length is 70.5"),
        ("at,prompt_tokens,output_tokens\n", "holds no requests"),
        ('{"at": 0}\n', "has the fields at"),
        ('{"at": 0\n', "line 1: not JSON"),
        ('[{"emission_time_ms":0,"input_length":5,"output_length":5}, 7]', "entry 2: should be a JSON object, is int"),
        ('[{"emission_time_ms":0,"input_length":5,"output_length":"x"}]', "entry 1: output_length is 'x'"),
        ('[{"emission_time_ms":0,\n', "line 2: not JSON"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_trace_is_named(tmp_path, text, says):
    with pytest.raises(TraceError, match=says) as error:
        traces.read(file(tmp_path, "t", text))
    assert str(tmp_path / "t") in str(error.value)


def test_malformed_rows_may_be_left_out_and_are_counted(tmp_path):
    text = "at,prompt_tokens,output_tokens\n0,50,10\n1,many,3\n2,5,5\n3,0,1\n4,30,7\n"
    trace = traces.read(file(tmp_path, "t", text), SKIP)
    assert [o.prompt for o in trace.offers] == [50, 5, 30]
    load = traces.make("t", trace, KINDS)
    assert load.notes["skipped"].startswith("2 malformed rows left out; the first: ")
    assert load.notes["skipped"].endswith(
        "line 3: prompt_tokens is 'many': expected a whole number of tokens, 1 or more"
    )
    with pytest.raises(TraceError, match="has the fields"):
        traces.read(file(tmp_path, "u", "a,b\n1,2\n"), SKIP)
    broken = '{"at":0,"prompt_tokens":5,"output_tokens":5}\n{"at":\n'
    assert len(traces.read(file(tmp_path, "v", broken), SKIP).offers) == 1
    longer = traces.read(file(tmp_path, "w", "at,prompt_tokens,output_tokens\n0,1,024,5\n1,5,5\n"), SKIP)
    assert len(longer.offers) == 1
    assert longer.notes["skipped"].startswith("1 malformed rows left out")


def test_a_traces_times_are_kept_or_rescaled():
    made = traces.make("t", Trace("t", tuple(OFFERS)), KINDS)
    assert [a.at for a in made.arrivals] == [0.0, 1.5, 4.0]
    assert made.rate == pytest.approx(2 / 4.0)
    faster = traces.make("t", Trace("t", tuple(OFFERS)), KINDS, rate=1.0)
    assert [a.at for a in faster.arrivals] == pytest.approx([0.0, 0.75, 2.0])
    assert [a.messages for a in faster.arrivals] == [a.messages for a in made.arrivals]
    assert [a.output_tokens for a in made.arrivals] == [10, 1, 7]


def test_texts_have_the_traces_lengths():
    offers = [TraceRequest(float(i), 60 + 40 * i, 5) for i in range(40)]
    made = traces.make("t", Trace("t", tuple(offers)), KINDS, seed=4)
    off = [a.prompt_tokens - o.prompt for a, o in zip(made.arrivals, offers, strict=True)]
    assert sum(abs(o) <= 12 for o in off) >= 36
    assert len({a.messages for a in made.arrivals}) == 40


def test_arrivals_may_be_poissons_at_the_rate_asked_for():
    offers = [TraceRequest(0.0, 40, 5)] * 400
    made = traces.make("t", Trace("t", tuple(offers)), KINDS, arrivals=Poisson(), rate=5.0, seed=1)
    gaps = [b.at - a.at for a, b in zip(made.arrivals, made.arrivals[1:], strict=False)]
    assert sum(gaps) == pytest.approx(399 / 5.0)
    mean = sum(gaps) / len(gaps)
    assert sum((g - mean) ** 2 for g in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.4)  # exponential
    assert made == traces.make("t", Trace("t", tuple(offers)), KINDS, arrivals=Poisson(), rate=5.0, seed=1)
    assert (
        made.arrivals
        != traces.make("t", Trace("t", tuple(offers)), KINDS, arrivals=Poisson(), rate=5.0, seed=2).arrivals
    )


def test_tiers_are_the_traces_or_drawn_by_share():
    named = traces.make("t", Trace("t", (TraceRequest(0.0, 40, 5, "editor"), TraceRequest(1.0, 40, 5, "chat"))), KINDS)
    assert [(a.tier, a.app) for a in named.arrivals] == [("editor", "code"), ("chat", "chat")]
    drawn = traces.make("t", Trace("t", tuple([TraceRequest(float(i), 40, 5) for i in range(400)])), KINDS)
    assert sum(a.tier == "chat" for a in drawn.arrivals) == pytest.approx(300, abs=35)
    with pytest.raises(ValueError, match="tier 'edtor', which no kind is of: did you mean 'editor'"):
        traces.make("t", Trace("t", (TraceRequest(0.0, 40, 5, "edtor"),)), KINDS)


def test_slowdowns_of_kinds_go_by_the_traces_prompts():
    kind = request_kinds.chat(SLO(tpot=0.1), ttft_slowdown=3.0)
    load = traces.make("t", Trace("t", tuple(OFFERS)), [kind], prefill=lambda tokens: tokens / 64, texts=False)
    assert [load.slo(a) for a in load.arrivals] == [SLO(3 * o.prompt / 64, 0.1) for o in OFFERS]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", b"t_s,input_tokens,output_tokens\n0,\x8f\xff,5\n"),
        ("b.csv.gz", b"\x00\x8fnothing"),
        ("c.csv.gz", gzip.compress(b"t_s,input_tokens,output_tokens\n0,5,5\n" * 100, mtime=0)[:40]),
    ],
)
def test_a_file_that_is_no_text_is_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError, match=f"{name} is no CSV"):
        traces.read(tmp_path / name)
