// The side panel: one request with its waterfall and verdict, or the form that sends one.

import { at, el, set, svg } from "./dom.js";
import { named } from "./charts.js";
import { NONE, count, duration, promise, shortId } from "./format.js";
import { view } from "./state.js";

const panel = at("panel");
const FACTS = { waiting: "waits", running: "runs", moving: "moves" };
let shown = null; // {id, group}
let back = null; // what had the focus before
let headers = () => ({});

export const authorized = (from) => {
  headers = from;
};

export function open(which, title) {
  if (panel.hidden) back = document.activeElement;
  panel.hidden = false;
  at("request").hidden = which !== "request";
  at("send").hidden = which !== "send";
  set(at("panel-title"), { text: title });
  shown = null;
}

export function close() {
  if (panel.hidden) return;
  panel.hidden = true;
  shown = null;
  (back?.isConnected ? back : at("search")).focus();
}

// group: of misses, whose latest it is: it may be forgotten by now
export function openRequest(id, group = null) {
  open("request", shortId(id));
  shown = { id, group };
  at("request").replaceChildren(el("p", { class: "soft", text: "Asking the server…" }));
  at("panel-title").focus();
  refresh();
}

export const isOpen = () => !panel.hidden;

// Once for each answer of the board, while it is not over
export async function refresh() {
  if (!shown || shown.over || !view.told) return;
  const mine = shown;
  try {
    const reply = await fetch(view.told.paths.request + encodeURIComponent(mine.id), { headers: headers(), cache: "no-store" });
    const page = await reply.json();
    if (mine !== shown) return;
    if (!reply.ok) return forgotten(mine, page.error?.message ?? `The server answered with status ${reply.status}.`);
    mine.over = page.state === "finished";
    draw(page, mine.id);
  } catch (error) {
    if (mine === shown) forgotten(mine, `No answer: ${error.message}`);
  }
}

function forgotten(mine, why) {
  mine.over = true;
  const latest = mine.group?.latest;
  const facts = latest ? [
    ["Cause", mine.group.cause], ["Outcome", latest.reason || latest.outcome], ["First token", duration(latest.ttft_ms)],
    ["Each token", duration(latest.tpot_ms)], ["All of it", duration(latest.e2e_ms)], ["SLO", promise(latest.slo)],
  ] : [];
  at("request").replaceChildren(el("p", { class: "verdict", text: why }), factList(facts));
}

const factList = (facts) => el("dl", { class: "facts" }, ...facts.map(([name, value]) => el("div", {}, el("dt", { text: name }), el("dd", { text: value }))));

function draw(page, id) {
  const choice = page.choices.find((one) => one.id === id) ?? page.choices[0];
  const { verdict } = choice;
  const state = !verdict ? "" : verdict.met ? "kept" : verdict.met === null ? "" : "late";
  const slo = page.slo[0];
  const scrolled = panel.scrollTop;
  at("request").replaceChildren(
    el("p", { class: `verdict ${state}`, text: choice.explanation }),
    waterfall(choice, page),
    factList([
      ["Tier", page.tier], ["SLO", promise(slo)], ["Tenant", page.tenant], ["Server", choice.replicas.length ? named(view.told, choice.replicas.at(-1)) : NONE],
      ["Prompt", `${count(choice.prompt_tokens)} tokens${choice.cached_tokens ? `, ${count(choice.cached_tokens)} cached` : ""}`],
      ["Output", `${count(choice.output_tokens)} of ${count(choice.max_tokens)}`],
      ...(verdict ? [["First token", duration(verdict.ttft_ms)], ["Each token", duration(verdict.tpot_ms)], ["All of it", duration(verdict.e2e_ms)]] :
        [["Age", duration(page.age_ms)], ["Now", choice.now ? FACTS[choice.now.in] ?? choice.now.in : choice.state]]),
      ["Preempted", count(choice.preemptions)], ["Cause", verdict?.cause ?? NONE],
    ]),
    el("h3", { text: "Events" }), events(choice), el("p", { class: "soft id", text: id }),
  );
  panel.scrollTop = scrolled;
}

// A row for each phase, on one axis of time since arrival, with what was due as dashed lines
function waterfall(choice, page) {
  const [due] = choice.deadlines;
  const spent = choice.phases.reduce((all, [, ms]) => all + ms, 0);
  const dues = due ? [["first token due", due.first_token_due_ms], ["all due", due.end_due_ms], ["next token due", choice.now?.next_token_due_ms]] : [];
  const marks = dues.filter(([, ms]) => ms !== null && ms !== undefined && ms > 0);
  const full = Math.max(spent, ...marks.map(([, ms]) => Math.min(ms, 3 * spent))) * 1.05 || 1;
  const [width, row] = [420, 22];
  const height = row * choice.phases.length + 26;
  const x = (ms) => 84 + (width - 84 - 8) * Math.min(1, ms / full);
  const made = svg("svg", { class: "waterfall", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": choice.phases.map(([kind, ms]) => `${kind} ${duration(ms)}`).join(", ") });
  let from = 0;
  choice.phases.forEach(([kind, ms], i) => {
    const y = row * i;
    made.append(svg("text", { x: 0, y: y + 14, text: kind === "remote" ? "at the server" : kind }),
      svg("rect", { class: kind, x: x(from), y: y + 3, width: Math.max(1.5, x(from + ms) - x(from)), height: row - 8, rx: 2 }),
      svg("text", { class: "time", x: x(from + ms) > width - 70 ? x(from) - 4 : x(from + ms) + 5, y: y + 14, "text-anchor": x(from + ms) > width - 70 && x(from) > 140 ? "end" : "start", text: x(from + ms) > width - 70 && x(from) <= 140 ? "" : duration(ms) }));
    from += ms;
  });
  made.append(svg("line", { class: "axis", x1: 84, x2: width - 8, y1: height - 20, y2: height - 20 }),
    svg("text", { class: "time", x: 84, y: height - 6, text: "0" }),
    svg("text", { class: "time", x: width - 8, y: height - 6, "text-anchor": "end", text: duration(full) }));
  for (const [name, ms] of marks.filter(([, ms]) => ms <= full)) {
    made.append(svg("line", { class: "mark", x1: x(ms), x2: x(ms), y1: 0, y2: height - 20 }, svg("title", { text: `${name} ${duration(ms)}` })),
      svg("text", { class: "time mark", x: x(ms), y: height - 6, "text-anchor": "middle", text: x(ms) > 130 && x(ms) < width - 60 ? `${name.replace(" token", "")}` : "" }));
  }
  return made;
}

function events(choice) {
  const line = ({ event, at_ms: from, until_ms: until, ...more }) => {
    const about = Object.entries(more).filter(([, value]) => value !== "" && value !== false && value !== 0).map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`).join(", ");
    return el("li", {}, el("span", { text: duration(from) }), el("b", { text: event }), el("span", { text: [until > from ? `until ${duration(until)}` : "", about].filter(Boolean).join(", ") }));
  };
  return el("ol", { class: "events" }, ...choice.events.map(line));
}

at("panel-close").addEventListener("click", close);
