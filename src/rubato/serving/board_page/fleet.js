// A lane for each server: KV in use, how many ran and waited over the last minutes, step times, and its link.

import { arrows, at, box, el, enterable, keyed, set } from "./dom.js";
import { heat, trackPointer, sparkline } from "./charts.js";
import { NONE, count, duration, host, percent, plural } from "./format.js";
import { choose, onRedraw, history, redraw, span, view } from "./state.js";

const MAX_LANES = 8; // beyond it, replicas of one role share a lane
const open = new Set(); // roles that are unfolded
const STALE_MS = 3000;
const lanes = at("lanes");

function series(id, column) {
  const { starts, size } = span();
  return starts.map((start) => history.last("replicas", id, column, start, size));
}

const sum = (all) => all.reduce((a, b) => (b === null ? a : (a ?? 0) + b), null);
const mean = (all) => {
  const known = all.filter((value) => value !== null);
  return known.length ? sum(known) / known.length : null;
};
const across = (ids, column, fold) => {
  const rows = ids.map((id) => series(id, column));
  return rows[0].map((_, i) => fold(rows.map((row) => row[i])));
};

// The values of a lane: of one replica, or of all of a role
function laneOf(replicas, role) {
  const [one] = replicas;
  const folded = role !== undefined;
  const total = sum(replicas.map((r) => r.kv_total_tokens));
  const used = sum(replicas.map((r) => r.kv_used_tokens));
  return {
    key: folded ? `role ${role}` : one.id, id: one.id, ids: replicas.map((r) => r.url || r.id), folded, role: role ?? one.role,
    name: folded ? plural(replicas.length, "server") : host(one), title: folded ? "" : one.url || one.id,
    state: folded ? "" : stateOf(one), kv: used === null || !total ? null : used / total,
    running: sum(replicas.map((r) => r.running)), waiting: sum(replicas.map((r) => r.waiting)),
    step: mean(replicas.map((r) => r.step_ms)), kind: folded ? "folded" : one.state === "lost" ? "lost" : "",
  };
}

function stateOf(replica) {
  if (replica.state === "lost") return `lost ${duration(replica.age_ms)} ago`;
  if (replica.state === "draining") return "draining";
  if (replica.link === "counted") return "counted";
  return replica.age_ms > STALE_MS ? `silent for ${duration(replica.age_ms)}` : "";
}

function byLane(replicas) {
  if (replicas.length <= MAX_LANES) return replicas.map((one) => laneOf([one]));
  const roles = new Map();
  for (const one of replicas) roles.set(one.role, [...(roles.get(one.role) ?? []), one]);
  return [...roles].flatMap(([role, all]) => {
    const shown = all.filter((one) => open.has(role) || one.state === "lost" || one.state === "draining");
    return [laneOf(all, role), ...shown.map((one) => laneOf([one]))];
  });
}

function make(lane) {
  const node = el("button.lane", { type: "button", tabindex: "-1" },
    box("span.name", box("i.dot"), box("b"), box("small")), box("span.kv", box("span.bar", box("i.p99")), box("span")),
    box("span.load", box("span.strip"), box("span")), box("span.steps", box("span.trend"), box("span")));
  trackPointer(node.querySelector(".strip"));
  node.addEventListener("click", () => {
    if (!lane.folded) return choose("replica", lane.id);
    if (!open.delete(lane.role)) open.add(lane.role);
    redraw();
  });
  return node;
}

// The value now, or at the moment under the pointer
function valueAtMoment(lane, column, fold, now) {
  const { size } = span();
  return view.moment === null ? now : fold(lane.ids.map((id) => history.last("replicas", id, column, view.moment, size)));
}

function update(node, lane) {
  const [name, kv, load, steps] = node.children;
  const role = lane.role === "prefill and decode" ? "" : lane.role.replace(/ only$/, "");
  const chosen = view.replica === lane.id && !lane.folded;
  set(node, { class: `lane ${lane.kind}`, "aria-pressed": String(chosen), title: lane.title });
  set(name.children[1], { text: lane.name });
  set(name.children[2], { text: [role, lane.state].filter(Boolean).join(", ") });
  const share = valueAtMoment(lane, "kv", mean, lane.kv);
  set(kv.firstChild.firstChild, { style: { width: `${100 * (share ?? 0)}%` } });
  set(kv.lastChild, { text: percent(share) });
  const [running, waiting] = [across(lane.ids, "running", sum), across(lane.ids, "waiting", sum)];
  const all = running.map((ran, i) => (ran === null ? null : ran + (waiting[i] ?? 0)));
  const most = Math.max(1, ...all);
  load.firstChild.replaceChildren(heat(all.map((n) => n && n / most), waiting.map((n) => (n ? "waiting" : "running"))));
  const numbers = [valueAtMoment(lane, "running", sum, lane.running), valueAtMoment(lane, "waiting", sum, lane.waiting)];
  const isGone = lane.kind === "lost" && view.moment === null;
  set(load.lastChild, { text: isGone ? NONE : numbers.map(count).join(" + "), title: "running + waiting" });
  const times = across(lane.ids, "step_ms", mean);
  steps.firstChild.replaceChildren(sparkline(times, { from: 0, to: Math.max(1, ...times) * 1.1, width: 60, height: 20 }));
  set(steps.lastChild, { text: duration(valueAtMoment(lane, "step_ms", mean, lane.step)) });
}

arrows(lanes, ".lane", { next: "ArrowDown", back: "ArrowUp" });
onRedraw((data) => {
  at("fleet").hidden = data.replicas === null;
  at("board").classList.toggle("nofleet", data.replicas === null);
  if (data.replicas === null) return;
  const lost = data.replicas.filter((replica) => replica.state === "lost").length;
  const counted = data.replicas.filter((replica) => replica.link === "counted").length;
  const about = [count(data.replicas.length), lost && `${lost} lost`, counted && `${counted} counted, not reported`];
  set(at("fleet-about"), { text: about.filter(Boolean).join(", ") });
  set(at("fleet-title"), { text: data.replicas.some((replica) => replica.url) ? "Servers" : "Replicas" });
  keyed(lanes, byLane(data.replicas), (lane) => lane.key, make, update);
  enterable(lanes, ".lane");
});
