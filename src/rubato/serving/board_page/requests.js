// Requests in flight as a timeline: a bar for each from its arrival until now, and when its next token is due.
// Below it misses, grouped by tier and cause.

import { arrows, at, box, el, enterable, keyed, set } from "./dom.js";
import { colour, replicaName } from "./charts.js";
import { NONE, count, duration, shortId } from "./format.js";
import { openRequest } from "./panel.js";
import { choose, onRedraw, redraw, view } from "./state.js";

const MAX_ROWS = 100;
export const PHASES = { q: "queue", r: "remote", p: "prefill", d: "decode", t: "transfer" };
const timeline = at("timeline");
let shownOrder = []; // ids of rows, kept in this order under the pointer

function rowsOf(data) {
  return data.requests.map((values) => Object.fromEntries(data.request_columns.map((name, i) => [name, values[i]])));
}

const slack = (row) => row.due_in_ms ?? (row.best_effort ? 1e12 : 1e11);

function isWanted(row) {
  return (!view.tier || row.tier === view.tier) && (!view.replica || row.replica === view.replica) &&
    (!view.lateOnly || row.late) && (!view.search || row.id.includes(view.search));
}

function inOrder(rows) {
  rows.sort((a, b) => slack(a) - slack(b));
  if (timeline.matches(":hover") || timeline.contains(document.activeElement)) {
    const place = new Map(shownOrder.map((id, i) => [id, i]));
    rows.sort((a, b) => (place.get(a.id) ?? 1e9) - (place.get(b.id) ?? 1e9));
  }
  shownOrder = rows.map((row) => row.id);
  return rows.slice(0, MAX_ROWS);
}

// Milliseconds left of "now", and across the whole width
function scale(rows) {
  const ages = rows.map((row) => row.age_ms).sort((a, b) => a - b);
  const past = Math.max(1000, ages[Math.floor(0.9 * (ages.length - 1))] ?? 1000);
  const dues = rows.map((row) => row.due_in_ms).filter((due) => due > 0).sort((a, b) => a - b);
  const ahead = Math.min(past / 2, Math.max(past / 8, dues[Math.floor(0.8 * (dues.length - 1))] ?? 0));
  return { past, all: past + ahead };
}

function make(row) {
  const node = el("button.row", { type: "button", tabindex: "-1" }, box("span.tag"), box("span.id"),
    box("span.track", box("span.phases"), box("i.over"), box("i.due"), box("i.here")), box("span.where"), box("span.slack"));
  node.addEventListener("click", () => openRequest(row.id));
  return node;
}

function update(node, row, data, { past, all }) {
  const [tag, id, track, where, left] = node.children;
  const share = (ms) => 100 * Math.max(0, Math.min(1, ms / all));
  const now = share(past);
  const late = row.due_in_ms !== null && row.due_in_ms < 0;
  set(node, { class: `row ${late || row.late ? "late" : ""}`, title: row.why });
  set(tag, { text: row.tier });
  set(id, { text: shortId(row.id) });
  const begin = past - row.age_ms;
  let from = begin;
  const phases = [];
  for (let i = 0; i < row.phases.length; i += 2) {
    phases.push([row.phases[i], from, (from += row.phases[i + 1])]);
  }
  const shown = phases.filter(([, , until]) => until > 0);
  keyed(track.firstChild, shown.map((phase, i) => [i, ...phase]), ([i]) => i, () => box("i"), (bar, [, kind, a, b]) => {
    set(bar, { class: PHASES[kind], style: { left: `${share(a)}%`, width: `${Math.max(0.3, share(b) - share(a))}%` } });
  });
  const due = row.due_in_ms === null ? null : share(past + row.due_in_ms);
  const [, over, tick, here] = track.children;
  set(over, { hidden: !late, style: { left: `${due ?? 0}%`, width: `${now - (due ?? now)}%` } });
  set(tick, { hidden: due === null || due >= 100, style: { left: `${due ?? 0}%` } });
  set(here, { style: { left: `${now}%` } });
  set(where, { text: row.state === "held" ? "router" : row.replica ? replicaName(data, row.replica) : NONE });
  set(left, { text: slackText(row) });
}

function slackText({ due_in_ms: due, late, best_effort: isBestEffort }) {
  if (due !== null && due < 0) return `late ${duration(-due)}`;
  if (late) return "was late"; // an earlier token: what comes now may be in time
  if (due !== null) return `in ${duration(due)}`;
  return isBestEffort ? "best effort" : "no bound left";
}

function drawRequests(data) {
  const all = rowsOf(data).filter(isWanted);
  const rows = inOrder(all);
  const { in_flight: total, held, waiting, running } = data.queue;
  const some = data.requests.length < total ? `, the ${data.requests.length} due soonest shown` : "";
  const about = `${count(total)}: ${count(running)} running, ${count(waiting)} waiting, ${count(held)} held${some}`;
  set(at("requests-about"), { text: total ? about : "" });
  set(at("late-only"), { "aria-pressed": String(view.lateOnly) });
  const fitted = scale(rows);
  keyed(timeline, rows, (row) => row.id, make, (node, row) => update(node, row, data, fitted));
  enterable(timeline, ".row");
  set(timeline, { "data-none": rows.length ? null : total ? "None of these is in flight." : "Nothing is in flight." });
  drawFilters(data);
}

function drawFilters(data) {
  const items = [["tier", view.tier], ["replica", view.replica]].filter(([, value]) => value);
  const chip = ([name]) => {
    const node = el("button.chip", { type: "button" });
    node.addEventListener("click", () => choose(name, view[name]));
    return node;
  };
  keyed(at("filters"), items, ([name]) => name, chip, (node, [name, value]) => {
    set(node, { text: `${name === "replica" ? replicaName(data, value) : value} ×`, "aria-label": `No longer only ${value}` });
  });
}

// ---------------------------------------------------------------------------- misses

const UNREPORTED = "not reported";

// Why no cause is known, for all groups
function whyUnknown({ misses, replicas }) {
  if (!misses.some((group) => group.cause === UNREPORTED)) return "";
  const counted = replicas?.filter((replica) => replica.link === "counted") ?? [];
  if (counted.length && counted.length === replicas.length) {
    return "Not reported: these servers have no plug-in, so they do not say how they spent the time.";
  }
  return "Not reported: a server without the plug-in, or without its link, does not say how it spent the time.";
}

// How late the latest miss was, and when; where no cause is known, the times that the gateway measured
function exampleOf({ cause, latest }) {
  const ago = `, ${duration(latest.age_ms)} ago`;
  if (!(latest.margin_ms < 0)) return `${latest.reason || latest.outcome}${ago}`;
  const late = `late by ${duration(-latest.margin_ms)}`;
  if (cause !== UNREPORTED || latest.ttft_ms === null) return `${late}${ago}`;
  const pace = latest.tpot_ms === null ? "" : `, then ${duration(latest.tpot_ms)} each`;
  return `${late}: first token ${duration(latest.ttft_ms)}${pace}`;
}

function drawMisses(data) {
  const groups = data.misses.filter((group) => !view.tier || group.tier === view.tier);
  const most = Math.max(1, ...groups.map((group) => group.recent));
  const recent = groups.reduce((all, group) => all + group.recent, 0);
  set(at("misses-about"), { text: groups.length ? `${count(recent)} in 15 min${data.admin ? "" : ", of yours"}` : "" });
  const why = whyUnknown({ misses: groups, replicas: data.replicas });
  set(at("misses-why"), { text: why, hidden: !why });
  const build = () => {
    const node = el("button.group", { type: "button", tabindex: "-1" },
      box("span.tag"), box("span.cause"), box("span.bar", box("i")), box("b"), box("small"));
    node.addEventListener("click", () => openRequest(node.dataset.id, node.group));
    return node;
  };
  keyed(at("groups"), groups, (group) => `${group.tier}\n${group.cause}`, build, (node, group) => {
    node.group = group;
    const { latest } = group;
    set(node, { "data-id": latest.id });
    const [tag, cause, bar, number, example] = node.children;
    set(tag, { text: group.tier });
    set(cause, { text: group.cause });
    set(bar.firstChild, { class: colour(group.cause), style: { width: `${(100 * group.recent) / most}%` } });
    set(number, { text: count(group.recent), title: `${count(group.count)} since the start` });
    set(example, { text: `${shortId(latest.id)} ${exampleOf(group)}` });
  });
  enterable(at("groups"), ".group");
  set(at("groups"), { "data-none": groups.length ? null : "No request has missed its SLO." });
}

arrows(timeline, ".row", { next: "ArrowDown", back: "ArrowUp" });
arrows(at("groups"), ".group", { next: "ArrowDown", back: "ArrowUp" });
at("late-only").addEventListener("click", () => {
  view.lateOnly = !view.lateOnly;
  redraw();
});
at("requests-more").addEventListener("click", ({ currentTarget }) => {
  const tall = at("board").classList.toggle("tall");
  set(currentTarget, { "aria-expanded": String(tall), text: tall ? "Collapse" : "Expand" });
  redraw();
});
onRedraw(drawRequests);
onRedraw(drawMisses);
