// Charts as inline SVG: the stacked area of outcomes, sparklines, strips of heat. Coordinates are pixels; a cursor
// follows the pointer.

import { at, box, keyed, set, svg } from "./dom.js";
import { count, duration, host, plural } from "./format.js";
import { ago, onRedraw, history, redraw, span, view } from "./state.js";

// Causes of misses as docs/concepts.md names them, in the order of the bands. Each has a colour of its own.
const CAUSES = [
  "queue", "prefill interference", "decode interference", "preemption", "transfer", "infeasible", "failed", "client",
  "gateway", "not reported", "refused",
];
const MAX_NAMED = 6; // causes with a band each, the largest; the others share one
export const colour = (cause) => `hue ${CAUSES.includes(cause) ? cause.replaceAll(" ", "-") : "other"}`;
const rank = (cause) => (CAUSES.indexOf(cause) + 1 || CAUSES.length + 1);
const [LEFT, TOP, BOTTOM] = [36, 10, 22];
const ALARMING = ["lost", "gave up"];
const OF_REQUESTS = ["placed again", "moved"]; // the others concern a server

const line = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

// The least round number that holds `value`
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 0.1)));
  return [1, 1.5, 2, 3, 4, 6, 8, 10].map((step) => step * power).find((step) => step >= value);
}

// ---------------------------------------------------------------------------- outcomes

const chart = at("outcomes-chart");
const parts = {
  grid: svg("g", { class: "grid" }), bands: svg("g"), offered: svg("path", { class: "offered" }),
  flags: svg("g", { class: "flags" }), cursor: svg("line", { class: "cursor" }),
};
chart.append(...Object.values(parts));

function tiersShown(data) {
  return view.tier ? [view.tier] : data.tiers.map((tier) => tier.name);
}

// The bands: [class, name, causes]; causes is null for requests on time
function bandsOf(tiers) {
  const { starts, size } = span();
  const totals = [...new Set(tiers.flatMap((tier) => history.causes(tier)))].map((cause) => {
    const all = tiers.map((tier) => history.sum("tiers", tier, `cause ${cause}`, starts[0], starts.length * size) ?? 0);
    return [cause, all.reduce((a, b) => a + b, 0)];
  });
  const causes = totals.filter(([, n]) => n).sort(([, a], [, b]) => b - a).map(([cause]) => cause);
  const own = causes.slice(0, causes.length === MAX_NAMED + 1 ? MAX_NAMED + 1 : MAX_NAMED).sort((a, b) => rank(a) - rank(b));
  const others = causes.filter((cause) => !own.includes(cause));
  const rest = others.length ? [["hue other", `other (${others.join(", ")})`, others]] : [];
  return [["kept", "on time", null], ...own.map((cause) => [colour(cause), cause, [cause]]), ...rest];
}

// For each group of slices: requests/s offered, and in each band
function ratesByGroup(data, stacked) {
  const { starts, size, seconds } = span();
  const tiers = tiersShown(data);
  const begun = history.now - history.up / seconds - 1; // the server's start
  return starts.filter((start) => start >= begun).map((start) => {
    const over = Math.max(1, Math.min(start + size, history.now) - start) * seconds;
    const all = (column) => tiers.reduce((sum, t) => sum + (history.sum("tiers", t, column, start, size) ?? 0), 0);
    const bands = stacked.map(([, , causes]) =>
      (causes?.map((cause) => `cause ${cause}`) ?? ["met"]).reduce((sum, column) => sum + all(column), 0) / over);
    return { start, size, offered: all("offered") / over, bands };
  });
}

function drawOutcomes(data) {
  const { clientWidth: width, clientHeight: height } = chart;
  if (!width || !height) return;
  const stacked = bandsOf(tiersShown(data));
  const groups = ratesByGroup(data, stacked);
  const most = nice(Math.max(0.2, ...groups.map((g) => Math.max(g.offered, g.bands.reduce((a, b) => a + b, 0)))));
  const all = span().starts.length;
  const x = (i) => LEFT + ((width - LEFT - 8) * (all - groups.length + i)) / (all - 1);
  const y = (value) => TOP + (height - TOP - BOTTOM) * (1 - value / most);
  set(chart, { viewBox: `0 0 ${width} ${height}` });
  drawGrid(width, height, most, y);
  let below = groups.map(() => 0);
  const areas = stacked.map(([kind, name], band) => {
    const above = below.map((value, i) => value + groups[i].bands[band]);
    const upper = above.map((value, i) => [x(i), y(value)]);
    const lower = below.map((value, i) => [x(i), y(value)]).reverse();
    const empty = above.every((value, i) => value === below[i]);
    below = above;
    return { name, kind, d: empty ? "" : `${line(upper)}${line(lower).replace("M", "L")}Z` };
  });
  keyed(parts.bands, areas, ({ name }) => name, () => svg("path"), (node, { kind, d }) => {
    set(node, { class: `band ${kind}`, d });
  });
  set(parts.offered, { d: line(groups.map((g, i) => [x(i), y(g.offered)])) });
  drawFlags(data, width, height);
  const pointed = groups.findIndex((g) => g.start === view.moment);
  const cx = pointed < 0 ? -10 : x(pointed);
  set(parts.cursor, { x1: cx, x2: cx, y1: TOP, y2: height - BOTTOM });
  drawLegend(data, stacked, groups[pointed] ?? null, groups.at(-1) ?? null);
}

function drawGrid(width, height, most, y) {
  const { starts, size, seconds: slice } = span();
  const seconds = starts.length * size * slice;
  const rows = [0, 0.5, 1].map((share) => ({ key: `y${share}`, share }));
  const times = (width < 500 ? [1, 0.6, 0.2, 0] : [1, 0.8, 0.6, 0.4, 0.2, 0]).map((share) => ({ key: `x${share}`, share }));
  const make = () => svg("g", {}, svg("line"), svg("text"));
  keyed(parts.grid, [...rows, ...times], ({ key }) => key, make, (node, item) => {
    const [rule, label] = node.children;
    if (item.key.startsWith("y")) {
      const at_ = y(item.share * most);
      set(rule, { x1: LEFT, x2: width - 8, y1: at_, y2: at_ });
      set(label, { x: LEFT - 8, y: at_ + 4, "text-anchor": "end", text: count(item.share * most) });
    } else {
      const at_ = LEFT + (width - LEFT - 8) * (1 - item.share);
      set(rule, { x1: at_, x2: at_, y1: height - BOTTOM, y2: height - BOTTOM + 4 });
      const words = item.share ? `−${Math.round((item.share * seconds) / 60)} min` : "now";
      const anchor = { 0: "end", 1: "start" }[item.share] ?? "middle";
      set(label, { x: at_, y: height - 5, "text-anchor": anchor, text: words });
    }
  });
}

// A replica's name; its id if it is gone
export function replicaName(data, id) {
  const found = data.replicas?.find((replica) => replica.id === id);
  return found ? host(found) : id;
}

function drawFlags(data, width, height) {
  const { starts, size, seconds } = span();
  const all = (starts.length - 1) * size * seconds;
  let free = -Infinity; // where the next label may begin
  const flags = data.flags.filter((flag) => flag.ago_ms / 1000 < all).map((flag) => {
    const x = LEFT + (width - LEFT - 8) * (1 - flag.ago_ms / 1000 / all);
    const text = flagText(data, flag);
    const right = x + 6 + text.length * 6 > width - 8;
    const begins = right ? x - 6 - text.length * 6 : x;
    const fits = begins > free && !OF_REQUESTS.includes(flag.kind);
    if (fits) free = begins + text.length * 6 + 18;
    return { ...flag, x, right, text: fits ? text : "" };
  });
  const key = (flag) => `${flag.kind} ${flag.replica} ${Math.round((history.up * 1000 - flag.ago_ms) / 2000)}`;
  const make = () => svg("g", {}, svg("line"), svg("circle", { r: 3 }), svg("text"));
  keyed(parts.flags, flags, key, make, (node, flag) => {
    const [rule, dot, label] = node.children;
    set(node, { class: ALARMING.includes(flag.kind) ? "alarming" : "" });
    set(rule, { x1: flag.x, x2: flag.x, y1: flag.text ? TOP : height - BOTTOM - 8, y2: height - BOTTOM });
    set(dot, { cx: flag.x, cy: height - BOTTOM });
    const [x, anchor] = flag.right ? [flag.x - 6, "end"] : [flag.x + 6, "start"];
    set(label, { x, y: TOP + 10, "text-anchor": anchor, text: flag.text });
  });
}

function flagText(data, flag) {
  const times = OF_REQUESTS.includes(flag.kind) ? `${plural(flag.count, "request")} ` : "";
  return `${flag.replica ? `${replicaName(data, flag.replica)} ` : "router "}${times}${flag.kind}`;
}

function drawLegend(data, stacked, pointed, last) {
  const shown = pointed ?? last;
  const when = pointed ? `${duration(1000 * ago(pointed.start + pointed.size))} ago` : "now";
  set(at("outcomes-when"), { text: when });
  const bands = stacked.map(([kind, name], i) => [kind, name, shown?.bands[i] ?? 0]);
  const values = [["offered", "offered", shown?.offered ?? 0], ...bands];
  const make = () => box("li", box("i"), box("span"), box("b"));
  keyed(at("outcomes-legend"), values, ([, name]) => name, make, (node, [kind, name, value]) => {
    set(node.children[0], { class: `key ${kind}` });
    set(node.children[1], { text: name });
    set(node.children[2], { text: count(value) });
    set(node, { class: value ? "" : "zero" });
  });
  const flags = pointed === null ? [] : data.flags.filter((flag) => {
    const slice = history.now - flag.ago_ms / 1000 / history.slice_seconds;
    return Math.abs(slice - pointed.start - pointed.size / 2) <= Math.max(1, pointed.size);
  });
  set(at("outcomes-flags"), { text: flags.map((flag) => flagText(data, flag)).join(", ") });
}

// Set the moment to the slice under the pointer, on any chart
export function trackPointer(node, left = 0, right = 0) {
  const move = (event) => {
    const box = node.getBoundingClientRect();
    const share = (event.clientX - box.left - left) / (box.width - left - right);
    const { starts } = span();
    point(starts[Math.max(0, Math.min(starts.length - 1, Math.round(share * (starts.length - 1))))]);
  };
  node.addEventListener("pointermove", move);
  node.addEventListener("pointerdown", move);
  node.addEventListener("pointerleave", () => point(null));
}

export function point(slice) {
  if (view.moment === slice) return;
  view.moment = slice;
  redraw();
}

trackPointer(chart, LEFT, 8);
chart.addEventListener("keydown", (event) => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const { starts } = span();
  const here = view.moment === null ? starts.length : starts.indexOf(view.moment);
  point(starts[Math.max(0, Math.min(starts.length - 1, here + step))]);
});
chart.addEventListener("blur", () => point(null));
new ResizeObserver(redraw).observe(chart);
onRedraw(drawOutcomes);

// ---------------------------------------------------------------------------- small ones

const stretchedSvg = (kind, width, height) =>
  svg("svg", { class: kind, viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });

// values: of each group, null for a gap; from, to: the scale; rule: a dashed line
export function sparkline(values, { from, to, rule = null, width = 120, height = 32 }) {
  const x = (i) => (width * i) / Math.max(1, values.length - 1);
  const y = (value) => 2 + (height - 4) * (1 - (value - from) / (to - from || 1));
  const picture = stretchedSvg("spark", width, height);
  if (rule !== null) picture.append(svg("line", { class: "rule", x1: 0, x2: width, y1: y(rule), y2: y(rule) }));
  const runs = [[]];
  values.forEach((value, i) => (value === null ? runs.push([]) : runs.at(-1).push([x(i), y(value)])));
  for (const run of runs.filter((points) => points.length)) {
    const [first, final] = [run[0], run.at(-1)];
    if (run.length === 1) first[0] -= 1;
    picture.append(svg("path", { class: "fill", d: `${line([...run, [final[0], height], [first[0], height]])}Z` }));
    picture.append(svg("path", { class: "stroke", d: line(run.length === 1 ? [first, [first[0] + 2, first[1]]] : run) }));
  }
  const pointed = span().starts.indexOf(view.moment);
  if (pointed >= 0) picture.append(svg("line", { class: "cursor", x1: x(pointed), x2: x(pointed), y1: 0, y2: height }));
  return picture;
}

// values: 0 to 1 of each group, null where nothing is known
export function heat(values, kinds) {
  const picture = stretchedSvg("heat", values.length, 1);
  values.forEach((value, i) => {
    const strength = (0.18 + 0.82 * value).toFixed(2);
    if (value) picture.append(svg("rect", { x: i, width: 1.02, height: 1, class: kinds[i], "fill-opacity": strength }));
  });
  return picture;
}
