// Asks /board.json every second while the tab is seen, and shows what it says.

import { NONE, Table, ago, count, counted, duration, element, figures, percent, slo, wholeSeconds } from "./format.js";
import { sending } from "./send.js";

const EVERY = 1000; // ms
const PATIENCE = 5000; // ms until a server that says nothing counts as one that does not answer
const FIRST_ROWS = matchMedia("(max-width: 760px)").matches ? 6 : 20;
const STORED = "rubato-board-key";

const at = (id) => document.getElementById(id);
const number = (label) => ({ label, kind: "number" });

const tiers = new Table(at("tiers"), [
  { label: "Tier", kind: "wide" }, { label: "Attainment, last minutes" }, { label: "Attainment, since start" },
  number("Longest pause, last minutes"), number("Offered"), number("Finished"), number("In flight"),
  { label: "Misses by cause" },
], "No request has been offered yet.");
const replicas = new Table(at("replicas"), [
  { label: "Replica", kind: "wide" }, { label: "State" }, number("Running"), number("Waiting"), number("Batch now"),
  { label: "KV used" }, number("Step time"), number("Known as of"),
], "No replica is left.");
const requests = new Table(at("requests"), [
  { label: "Request", kind: "id wide" }, { label: "Tier" }, { label: "Where" }, { label: "Why", kind: "wide" },
  number("Output"), number("Age"), number("Next token due"),
], "Nothing is in flight.");
const misses = new Table(at("misses"), [
  { label: "Request", kind: "id wide" }, { label: "Tier" }, { label: "Cause" },
  { label: "Measured, and asked for", kind: "wide" }, { label: "Outcome" }, number("Ended"),
], "No request has missed its SLO.");

let key = "";
try {
  key = sessionStorage.getItem(STORED) ?? "";
} catch { /* a browser that stores nothing: the key lasts until the page is left */ }
let shown = null;
let answered = performance.now(); // when the server did so last
let timer = 0;
let asking = null;
const all = { requests: false, misses: false };

function remember(given) {
  key = given;
  try {
    if (key) sessionStorage.setItem(STORED, key);
    else sessionStorage.removeItem(STORED);
  } catch { /* as above */ }
}

const headers = () => (key ? { authorization: `Bearer ${key}` } : {});

// ---------------------------------------------------------------------------- asking

async function ask() {
  clearTimeout(timer);
  asking?.abort();
  if (document.hidden) return;
  const mine = (asking = new AbortController());
  const late = setTimeout(() => mine.abort(), PATIENCE);
  try {
    const reply = await fetch("/board.json", { headers: headers(), signal: mine.signal, cache: "no-store" });
    if (reply.status === 401) askForKey();
    else if (!reply.ok) throw new Error(`status ${reply.status}`);
    else show(await reply.json());
  } catch {
    if (mine === asking && !document.hidden) silent();
  } finally {
    clearTimeout(late);
  }
  if (mine === asking && !document.hidden) timer = setTimeout(ask, EVERY);
}

function say(text, kind = "") {
  const status = at("status");
  if (status.textContent !== text) status.textContent = text;
  status.className = kind;
}

function silent() {
  const since = Math.round((performance.now() - answered) / 1000);
  const old = shown ? " What is shown is from then." : "";
  say(`The server has not answered for ${since} s.${old}`, "missed");
  at("board").classList.add("stale");
}

function askForKey() {
  answered = performance.now();
  shown = null;
  at("board").hidden = true;
  at("key-form").hidden = at("key-fields").hidden = false;
  at("key-forget").hidden = !key;
  say(key ? "The server does not know this key." : "This server asks for an API key.", key ? "missed" : "");
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  remember(at("key").value.trim());
  at("key").value = "";
  ask();
});
at("key-forget").addEventListener("click", () => {
  remember("");
  ask();
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) say("Paused while this tab is hidden.");
  answered = performance.now();
  ask();
});

// ---------------------------------------------------------------------------- showing

function show(told) {
  answered = performance.now();
  shown = told;
  at("board").hidden = false;
  at("board").classList.remove("stale");
  at("model").textContent = told.model;
  if (!at("key-fields").hidden && at("key-form").contains(document.activeElement)) at("top").focus();
  at("key-form").hidden = !told.keys;
  at("key-fields").hidden = true;
  at("key-forget").hidden = false;
  const who = told.keys ? `, as ${told.tenant}${told.admin ? " (admin: all requests)" : " (its own requests)"}` : "";
  const states = { serving: "Serving", draining: "Draining: takes no new request", dead: "Dead: no replica is left" };
  const up = wholeSeconds(told.serving_seconds * 1000);
  say(`${states[told.state] ?? told.state}, up ${up}${who}`, told.state === "serving" ? "" : "missed");
  showSummary(told);
  tiers.show(told.tiers.map((tier) => [tier.name, tierCells(tier)]));
  at("replicas").closest("section").hidden = told.replicas === null;
  replicas.show((told.replicas ?? []).map((replica) => [replica.id, replicaCells(replica)]));
  showRequests(told);
  showSome("misses", misses, told.misses.map((miss) => [miss.id, missCells(miss, told)]));
  offerTiers(told.may_ask_for);
}

// A tenant's queue is of its own requests, all else in the summary of all.
function showSummary({ total, queue, window_seconds, admin }) {
  const own = admin ? "" : "of yours";
  const { recent } = total;
  figures(at("figures"), [
    [`Attainment, last ${window_seconds / 60} min`, percent(recent.attainment), metOf(recent)],
    ["Attainment, since start", percent(total.attainment), metOf(total)],
    ["Offered", count(total.offered)],
    ["Finished", count(total.offered - total.in_flight), unjudged(total)],
    ["In flight", count(total.in_flight)],
    ["Held at the router", count(queue.held), own],
    ["Waiting at replicas", count(queue.waiting), own],
    ["Running", count(queue.running), [queue.moving ? `and ${count(queue.moving)} moving` : "", own].join(" ").trim()],
  ]);
}

const unjudged = (counts) => (counts.unjudged ? `${count(counts.unjudged)} not judged: times not measured` : "");

const metOf = (counts) => `${count(counts.met)} met of ${count(counts.offered)} offered`;

function attainment(counts) {
  const { offered, met, missed, in_flight } = counts;
  const open = 1 - (met + missed) / offered;
  if (!offered) return { text: "–", note: "none offered" };
  const others = counts.unjudged ? `, ${count(counts.unjudged)} not judged` : "";
  const ended = `${count(met)} met, ${count(missed)} missed${others}`;
  return {
    text: percent(counts.attainment), note: `${ended} of ${count(offered)}`,
    about: `${ended}, ${count(in_flight)} in flight, of ${count(offered)} offered`,
    bar: [[met / offered, "met"], [missed / offered, "missed"], [open, "open"]],
  };
}

function tierCells(tier) {
  const causes = Object.entries(tier.causes).map(([cause, n]) => `${cause} ${count(n)}`);
  return [
    { text: tier.name, note: slo(tier.slo) },
    attainment(tier.recent), attainment(tier),
    { text: duration(tier.recent_max_pause_ms) },
    { text: count(tier.offered) }, { text: count(tier.offered - tier.in_flight) }, { text: count(tier.in_flight) },
    { text: causes.join(", ") || "none" },
  ];
}

function replicaCells(replica) {
  const { batch, kv_used_tokens: used, kv_total_tokens: total } = replica;
  const share = total ? used / total : 0;
  const kv = `${count(used)} of ${count(total)} tokens`;
  return [
    { text: replica.id, note: replica.role },
    { text: replica.state, kind: replica.state === "draining" ? "wait" : "" },
    { text: count(replica.running), note: replica.moving ? `${count(replica.moving)} moving` : "" },
    { text: count(replica.waiting) },
    {
      text: !batch ? NONE : batch.requests ? counted(batch.requests, "request") : "none",
      note: batch?.requests ? counted(batch.tokens, "token") : "",
    },
    used === null ? { text: NONE } : { text: percent(share), note: kv, bar: [[share, "used"]], about: kv },
    { text: duration(replica.step_ms), note: replica.steps === null ? "" : counted(replica.steps, "step") },
    { text: !replica.reported ? "counted, not reported" : replica.age_ms < 1 ? "now" : `${duration(replica.age_ms)} ago` },
  ];
}

function whose(row, told) {
  return { text: row.tier, note: told.keys && told.admin ? `tenant ${row.tenant}` : slo(row.slo ?? row.targets) };
}

function showRequests(told) {
  const { queue } = told;
  const some = told.requests.length < queue.in_flight;
  at("requests-about").textContent = some
    ? `Of ${count(queue.in_flight)} the ${told.requests.length} whose next token is due soonest, in order of arrival.`
    : "";
  showSome("requests", requests, told.requests.map((row) => [row.id, requestCells(row, told)]));
}

function requestCells(row, told) {
  const where = { held: "router", moving: `moving to ${row.replica}` }[row.state] ?? row.replica;
  const waited = row.waited_ms === null ? "" : `for ${duration(row.waited_ms)}`;
  const because = row.placed_because ? `the router's reason: ${row.placed_because}` : "";
  return [
    { text: row.id, title: row.id },
    whose(row, told),
    { text: where, note: [row.state, waited].filter(Boolean).join(" ") },
    { text: row.why, note: [because, row.demoted ? "served as best effort now" : ""].filter(Boolean).join("; ") },
    { text: `${count(row.output_tokens)} of ${count(row.max_tokens)}`, note: `prompt ${count(row.prompt_tokens)}` },
    { text: duration(row.age_ms) },
    dueCell(row),
  ];
}

function dueCell(row) {
  if (row.due_in_ms === null) return { text: "no SLO", note: row.late ? "a token was late" : "" };
  if (row.due_in_ms < 0) return { text: `late by ${duration(-row.due_in_ms)}`, kind: "missed" };
  const [note, kind] = row.late ? ["a token was late", "missed"] : ["", ""];
  return { text: `in ${duration(row.due_in_ms)}`, note, kind };
}

function missCells(miss, told) {
  const asked = miss.targets;
  const times = [["TTFT", "ttft_ms"], ["TPOT", "tpot_ms"], ["e2e", "e2e_ms"]]
    .map(([name, field]) => [name, miss[field], asked[field]])
    .filter(([, measured, bound]) => measured !== null && bound !== null)
    .map(([name, measured, bound]) => `${name} ${duration(measured)} (asked ${duration(bound)})`);
  const margin = (miss.margin_ms ?? 0) < 0 ? `late by ${duration(-miss.margin_ms)} at the tightest token` : "";
  return [
    { text: miss.id, title: miss.id },
    { text: miss.tier, note: told.keys && told.admin ? `tenant ${miss.tenant}` : "" },
    { text: miss.cause ?? "unknown", kind: "missed", note: miss.cause === "not reported" ? "its server does not tell" : "" },
    { text: times.join(", ") || `nothing measured (asked ${slo(asked)})`, note: margin },
    { text: miss.outcome, note: miss.reason },
    { text: ago(miss.age_ms) },
  ];
}

function showSome(name, table, rows) {
  const more = at(`${name}-more`);
  table.show(all[name] ? rows : rows.slice(0, FIRST_ROWS));
  more.hidden = rows.length <= FIRST_ROWS;
  more.textContent = all[name] ? `Show the first ${FIRST_ROWS}` : `Show all ${rows.length}`;
}

for (const name of Object.keys(all)) {
  at(`${name}-more`).addEventListener("click", () => {
    all[name] = !all[name];
    if (shown) show(shown);
  });
}

function offerTiers(names) {
  const select = at("tier");
  const whole = JSON.stringify(names);
  if (select.dataset.said === whole) return;
  select.dataset.said = whole;
  const chosen = select.value;
  const options = names.map(({ name, slo: times }) => {
    const option = element("option", `${name}: ${slo(times)}`);
    option.value = name;
    return option;
  });
  select.replaceChildren(select.options[0], ...options);
  select.value = names.some(({ name }) => name === chosen) ? chosen : "";
}

sending({ headers, model: () => shown?.model ?? "", sent: ask });
ask();
