// The side panel: one request with its waterfall and verdict, or the form that sends one.

import { replicaName } from "./charts.js";
import { at, box, el, set, svg } from "./dom.js";
import { NONE, count, duration, promise, shortId } from "./format.js";
import { view } from "./state.js";

const panel = at("panel");
const NOW = { waiting: "waits", running: "runs", moving: "moves" };
let openedRequest = null; // {id, group, over}
let focusBefore = null; // the element to return the focus to
let headers = () => ({});

export const setHeaders = (from) => {
  headers = from;
};

export function open(which, title) {
  if (panel.hidden) focusBefore = document.activeElement;
  panel.hidden = false;
  at("request").hidden = which !== "request";
  at("send").hidden = which !== "send";
  set(at("panel-title"), { text: title });
  openedRequest = null;
}

export function close() {
  if (panel.hidden) return;
  panel.hidden = true;
  openedRequest = null;
  (focusBefore?.isConnected ? focusBefore : at("search")).focus();
}

export const isOpen = () => !panel.hidden;

// group: the misses whose latest one this is, shown if the server has forgotten the request
export function openRequest(id, group = null) {
  open("request", `Request ${shortId(id)}`);
  openedRequest = { id, group, over: false };
  at("request").replaceChildren(el("p.soft", { text: "Asking the server…" }));
  at("panel-title").focus();
  refresh();
}

// Called at each update of the board, until the request has ended
export async function refresh() {
  const mine = openedRequest;
  if (!mine || mine.over || !view.board) return;
  try {
    const path = view.board.paths.request + encodeURIComponent(mine.id);
    const reply = await fetch(path, { headers: headers(), cache: "no-store" });
    const page = await reply.json();
    if (mine !== openedRequest) return;
    if (!reply.ok) return showForgotten(mine, page.error?.message ?? `The server answered with status ${reply.status}.`);
    mine.over = page.state === "finished";
    draw(page, mine.id);
  } catch (error) {
    if (mine === openedRequest) showForgotten(mine, `No answer: ${error.message}`);
  }
}

function showForgotten(mine, why) {
  mine.over = true;
  const latest = mine.group?.latest;
  const facts = latest ? [
    ["Cause", mine.group.cause], ["Outcome", latest.reason || latest.outcome], ...times(latest), ["SLO", promise(latest.slo)],
  ] : [];
  at("request").replaceChildren(el("p.verdict", { text: why }), factList(facts));
}

const times = ({ ttft_ms: ttft, tpot_ms: tpot, e2e_ms: e2e }) =>
  [["First token", duration(ttft)], ["Each token", duration(tpot)], ["All of it", duration(e2e)]];

const factList = (facts) =>
  box("dl.facts", ...facts.map(([name, value]) => box("div", el("dt", { text: name }), el("dd", { text: value }))));

const soFarOf = (cause) => (cause === "not reported" ? cause : `${cause} so far`);

function draw(page, id) {
  const choice = page.choices.find((one) => one.id === id) ?? page.choices[0];
  const { verdict, replicas, now, so_far: soFar } = choice;
  const state = verdict?.met === true ? ".kept" : verdict?.met === false || soFar ? ".late" : "";
  const cached = choice.cached_tokens ? `, ${count(choice.cached_tokens)} cached` : "";
  const scrolled = panel.scrollTop;
  at("request").replaceChildren(
    el(`p.verdict${state}`, { text: choice.explanation }),
    waterfall(choice),
    factList([
      ["Tier", page.tier], ["SLO", promise(page.slo[0])], ["Tenant", page.tenant],
      ["Server", replicas.length ? replicaName(view.board, replicas.at(-1)) : NONE],
      ["Prompt", `${count(choice.prompt_tokens)} tokens${cached}`],
      ["Output", `${count(choice.output_tokens)} of ${count(choice.max_tokens)}`],
      ...(verdict ? times(verdict) : [["Age", duration(page.age_ms)], ["Now", now ? (NOW[now.in] ?? now.in) : choice.state]]),
      ["Preempted", count(choice.preemptions)], ["Cause", verdict?.cause ?? (soFar ? soFarOf(soFar.cause) : NONE)],
    ]),
    el("h3", { text: "Events" }), box("ol.events", ...choice.events.map(eventLine)), el("p.soft.id", { text: id }),
  );
  panel.scrollTop = scrolled;
}

const OF_SERVERS = { replica: "at", from: "from" }; // fields of an event that name a server -> word

function eventLine({ event, at_ms: from, until_ms: until, ...more }) {
  const details = Object.entries(more).filter(([, value]) => value).map(([name, value]) =>
    OF_SERVERS[name] ? `${OF_SERVERS[name]} ${replicaName(view.board, value)}` : `${name.replaceAll("_", " ")} ${value}`);
  if (until > from) details.unshift(`until ${duration(until)}`);
  return box("li", el("span", { text: duration(from) }), el("b", { text: event }), el("span", { text: details.join(", ") }));
}

// ---------------------------------------------------------------------------- the waterfall

const [WIDTH, ROW, NAMES, TIME] = [420, 22, 84, 70];

// A row for each phase, on one axis of time since arrival, with what is due as dashed lines
function waterfall({ phases, deadlines: [due], now }) {
  const spent = phases.reduce((all, [, ms]) => all + ms, 0);
  const dues = [["first due", due?.first_token_due_ms], ["all due", due?.end_due_ms], ["next due", now?.next_token_due_ms]]
    .filter(([, ms]) => ms > 0 && ms < 3 * spent);
  const full = Math.max(spent, ...dues.map(([, ms]) => ms)) * 1.05 || 1;
  const x = (ms) => NAMES + ((WIDTH - NAMES - 8) * ms) / full;
  const height = ROW * phases.length + 26;
  const words = phases.map(([kind, ms]) => `${kind} ${duration(ms)}`).join(", ");
  const picture = svg("svg", { class: "waterfall", viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": words });
  let from = 0;
  phases.forEach(([kind, ms], i) => {
    const [begin, end, y] = [x(from), x((from += ms)), ROW * i];
    const [place, anchor] = end <= WIDTH - TIME ? [end + 5, "start"] : begin > NAMES + TIME ? [begin - 5, "end"] : [end - 5, "end"];
    picture.append(
      svg("text", { x: 0, y: y + 14, text: kind === "remote" ? "at the server" : kind }),
      svg("rect", { class: kind, x: begin, y: y + 3, width: Math.max(1.5, end - begin), height: ROW - 8, rx: 2 }),
      svg("text", { class: place < end && place > begin ? "time inside" : "time", x: place, y: y + 14, "text-anchor": anchor, text: duration(ms) }),
    );
  });
  const label = (where, anchor, text, kind = "time") =>
    picture.append(svg("text", { class: kind, x: where, y: height - 6, "text-anchor": anchor, text }));
  picture.append(svg("line", { class: "axis", x1: NAMES, x2: WIDTH - 8, y1: height - 20, y2: height - 20 }));
  label(NAMES, "start", "0");
  label(WIDTH - 8, "end", duration(full));
  let free = NAMES + 40;
  for (const [name, ms] of dues.sort(([, a], [, b]) => a - b)) {
    picture.append(svg("line", { class: "mark", x1: x(ms), x2: x(ms), y1: 0, y2: height - 20 }));
    if (x(ms) < free || x(ms) > WIDTH - 80) continue;
    label(x(ms), "middle", name, "time mark");
    free = x(ms) + 60;
  }
  return picture;
}

at("panel-close").addEventListener("click", close);
