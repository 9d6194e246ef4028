// Asks /board.json every second while the tab is seen, and has it drawn. The header, keys and shortcuts are here.

import { at, set } from "./dom.js";
import { attained, duration, plural } from "./format.js";
import { PAGE_AT, tooMany, urgency } from "./promises.js";
import "./charts.js";
import "./fleet.js";
import "./requests.js";
import { authorized, close, isOpen, open, openRequest, refresh } from "./panel.js";
import { sending, stopLoad } from "./send.js";
import { draws, history, redraw, view } from "./state.js";

const EVERY_MS = 1000;
const PATIENCE_MS = 5000; // until a server that says nothing counts as one that does not answer
const STORED = "rubato-board-key";
const THEMES = ["light", "dark"];

let key = stored(() => sessionStorage.getItem(STORED)) ?? "";
let answered = performance.now(); // when the server did so last
let timer = 0;
let asking = null;
let paused = false;

// A browser that stores nothing: what is chosen lasts until the page is left
function stored(use) {
  try {
    return use();
  } catch {
    return null;
  }
}

function remember(given) {
  key = given;
  stored(() => (key ? sessionStorage.setItem(STORED, key) : sessionStorage.removeItem(STORED)));
  history.clear();
}

const headers = () => (key ? { authorization: `Bearer ${key}` } : {});

// ---------------------------------------------------------------------------- asking

async function ask() {
  clearTimeout(timer);
  asking?.abort();
  if (document.hidden || paused) return;
  const mine = (asking = new AbortController());
  const late = setTimeout(() => mine.abort(), PATIENCE_MS);
  try {
    const how = { headers: headers(), signal: mine.signal, cache: "no-store" };
    const reply = await fetch(`board.json?since=${history.since}`, how);
    if (reply.status === 401) askForKey();
    else if (!reply.ok) throw new Error(`status ${reply.status}`);
    else show(await reply.json());
  } catch (error) {
    if (mine === asking && !document.hidden) silent(error);
  } finally {
    clearTimeout(late);
  }
  if (mine === asking && !document.hidden && !paused) timer = setTimeout(ask, EVERY_MS);
}

function say(text, kind = "") {
  set(at("status"), { text, class: `pill ${kind}` });
}

function silent(error) {
  const since = Math.round((performance.now() - answered) / 1000);
  say(`The server has not answered for ${since} s.${view.told ? " This is how it was." : ""}`, "bad");
  at("board").classList.add("stale");
  if (!(error instanceof TypeError) && error.name !== "AbortError") console.error(error); // one of ours
}

function askForKey() {
  answered = performance.now();
  view.told = null;
  stopLoad();
  close();
  at("board").hidden = at("tools").hidden = at("facts").hidden = true;
  at("key-form").hidden = false;
  say(key ? "The server does not know this key." : "This server asks for an API key.", key ? "bad" : "quiet");
}

function show(told) {
  answered = performance.now();
  if (at("key-form").contains(document.activeElement)) at("top").focus();
  at("key-form").hidden = true;
  at("board").hidden = at("tools").hidden = at("facts").hidden = false;
  at("key-forget").hidden = !told.keys;
  at("board").classList.remove("stale");
  history.take(told);
  view.told = told;
  redraw();
  refresh();
}

// ---------------------------------------------------------------------------- the header

// The one thing that an operator is to know
function standing({ state, tiers, replicas, total, objective }) {
  if (state === "dead") return ["Gave up: no server is left", "bad"];
  if (state === "draining") return ["Draining: takes no new request", "warn"];
  const lost = (replicas ?? []).filter((replica) => replica.state === "lost").length;
  if (lost) return [`${lost} of ${plural(replicas.length, "server")} lost`, "bad"];
  const figures = tiers.filter((tier) => !tier.best_effort).map((tier) => [tier.name, tier.windows["300"]]);
  const burning = figures.filter(([, one]) => ["warn", "bad"].includes(urgency(one, objective)));
  if (burning.length) {
    const [name, { attainment, burn }] = burning.sort(([, a], [, b]) => b.burn - a.burn)[0];
    return [`${name} at ${attained(attainment)}: ${tooMany({ burn })}`, burn >= PAGE_AT ? "bad" : "warn"];
  }
  if (!total.offered) return ["No request yet", "quiet"];
  return ["Keeping promises", "fine"];
}

draws((told) => {
  const routed = told.router && told.router !== told.policy ? ` · router ${told.router}` : "";
  const who = told.keys ? ` · ${told.tenant}${told.admin ? ", admin" : ": your requests"}` : "";
  const up = duration(1000 * told.serving_seconds);
  set(at("facts"), { text: `${told.model} · policy ${told.policy}${routed} · ${told.version} · up ${up}${who}` });
  say(...standing(told));
  for (const button of at("windows").children) {
    const chosen = button.dataset.window === view.window;
    set(button, { "aria-checked": String(chosen), tabindex: chosen ? 0 : -1 });
  }
  document.title = `Rubato: ${at("status").textContent}`;
});

at("windows").addEventListener("click", ({ target }) => {
  if (!target.dataset.window) return;
  view.window = target.dataset.window;
  redraw();
});
at("windows").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const buttons = [...at("windows").children];
  const next = buttons[buttons.indexOf(document.activeElement) + (step ?? 0)];
  if (!step || !next) return;
  next.click();
  next.focus();
});

function pause() {
  paused = !paused;
  set(at("pause"), { "aria-pressed": String(paused) });
  if (paused) say("Paused", "quiet");
  answered = performance.now();
  ask();
}

function theme() {
  const preferred = THEMES[Number(matchMedia("(prefers-color-scheme: dark)").matches)];
  const next = THEMES[1 - THEMES.indexOf(document.documentElement.dataset.theme ?? preferred)];
  document.documentElement.dataset.theme = next;
  stored(() => localStorage.setItem("rubato-board-theme", next));
}

const chosen = stored(() => localStorage.getItem("rubato-board-theme"));
if (THEMES.includes(chosen)) document.documentElement.dataset.theme = chosen;

at("pause").addEventListener("click", pause);
at("theme").addEventListener("click", theme);
at("try").addEventListener("click", () => {
  open("send", "Try it");
  at("prompt").focus();
});

// The list is filtered while one types; Enter opens the request of that id, which may have ended
at("search").addEventListener("input", ({ target }) => {
  view.search = target.value.trim();
  redraw();
});
at("search").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !view.search) return;
  const found = view.told?.requests.filter((row) => row[0].includes(view.search)) ?? [];
  openRequest(found.length === 1 ? found[0][0] : view.search);
});

// ---------------------------------------------------------------------------- keys

const typing = (node) => node.matches?.("input, textarea, select");

document.addEventListener("keydown", (event) => {
  const command = event.metaKey || event.ctrlKey;
  if ((event.key === "k" && command) || (event.key === "/" && !typing(event.target))) {
    event.preventDefault();
    at("search").focus();
    at("search").select();
  } else if (event.key === "Escape" && isOpen()) {
    close();
  } else if (event.key === "Escape") {
    Object.assign(view, { tier: null, replica: null, lateOnly: false, search: "", moment: null });
    at("search").value = "";
    redraw();
  } else if (!command && !event.altKey && !typing(event.target) && view.told) {
    ({ p: pause, t: theme })[event.key]?.();
  }
});

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
  if (document.hidden) say("Paused while this tab is hidden.", "quiet");
  answered = performance.now();
  ask();
});

authorized(headers);
sending(headers, ask);
ask();
