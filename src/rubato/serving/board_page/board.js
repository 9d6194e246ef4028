// Polls /board.json every second while the tab is visible and draws it; has the header, keys and shortcuts.

import { at, set } from "./dom.js";
import { attained, duration, plural } from "./format.js";
import { PAGE_BURN, burnText, urgency } from "./promises.js";
import "./charts.js";
import "./fleet.js";
import "./requests.js";
import { setHeaders, close, isOpen, open, openRequest, refresh } from "./panel.js";
import { setUpForm, stopLoad } from "./send.js";
import { onRedraw, history, redraw, view } from "./state.js";

const POLL_MS = 1000;
const TIMEOUT_MS = 5000; // until the server counts as silent
const KEY_ITEM = "rubato-board-key";
const THEMES = ["light", "dark"];

let key = withStorage(() => sessionStorage.getItem(KEY_ITEM)) ?? "";
let answeredAt = performance.now(); // of the last answer
let timer = 0;
let pendingFetch = null;
let isPaused = false;

// Use the browser's storage; without it choices last until the page is left
function withStorage(use) {
  try {
    return use();
  } catch {
    return null;
  }
}

function remember(given) {
  key = given;
  withStorage(() => (key ? sessionStorage.setItem(KEY_ITEM, key) : sessionStorage.removeItem(KEY_ITEM)));
  history.clear();
}

const headers = () => (key ? { authorization: `Bearer ${key}` } : {});

// ---------------------------------------------------------------------------- polling

async function ask() {
  clearTimeout(timer);
  pendingFetch?.abort();
  if (document.hidden || isPaused) return;
  const mine = (pendingFetch = new AbortController());
  const late = setTimeout(() => mine.abort(), TIMEOUT_MS);
  try {
    const how = { headers: headers(), signal: mine.signal, cache: "no-store" };
    const reply = await fetch(`board.json?since=${history.since}`, how);
    if (reply.status === 401) askForKey();
    else if (!reply.ok) throw new Error(`status ${reply.status}`);
    else show(await reply.json());
  } catch (error) {
    if (mine === pendingFetch && !document.hidden) showSilence(error);
  } finally {
    clearTimeout(late);
  }
  if (mine === pendingFetch && !document.hidden && !isPaused) timer = setTimeout(ask, POLL_MS);
}

function say(text, kind = "") {
  set(at("status"), { text, class: `pill ${kind}` });
}

function showSilence(error) {
  const since = Math.round((performance.now() - answeredAt) / 1000);
  say(`The server has not answered for ${since} s.${view.board ? " This is how it was." : ""}`, "bad");
  at("board").classList.add("stale");
  if (!(error instanceof TypeError) && error.name !== "AbortError") console.error(error); // one of ours
}

function askForKey() {
  answeredAt = performance.now();
  view.board = null;
  stopLoad();
  close();
  at("board").hidden = at("tools").hidden = at("facts").hidden = true;
  at("key-form").hidden = false;
  say(key ? "The server does not know this key." : "This server asks for an API key.", key ? "bad" : "quiet");
}

function show(data) {
  answeredAt = performance.now();
  if (at("key-form").contains(document.activeElement)) at("top").focus();
  at("key-form").hidden = true;
  at("board").hidden = at("tools").hidden = at("facts").hidden = false;
  at("key-forget").hidden = !data.keys;
  at("board").classList.remove("stale");
  history.take(data);
  view.board = data;
  redraw();
  refresh();
}

// ---------------------------------------------------------------------------- the header

// The status in a few words, the most important first
function statusText({ state, tiers, replicas, total, objective }) {
  if (state === "dead") return ["Gave up: no server is left", "bad"];
  if (state === "draining") return ["Draining: takes no new request", "warn"];
  const lost = (replicas ?? []).filter((replica) => replica.state === "lost").length;
  if (lost) return [`${lost} of ${plural(replicas.length, "server")} lost`, "bad"];
  const figures = tiers.filter((tier) => !tier.best_effort).map((tier) => [tier.name, tier.windows["300"]]);
  const burning = figures.filter(([, one]) => ["warn", "bad"].includes(urgency(one, objective)));
  if (burning.length) {
    const [name, { attainment, burn }] = burning.sort(([, a], [, b]) => b.burn - a.burn)[0];
    return [`${name} at ${attained(attainment)}: ${burnText({ burn })}`, burn >= PAGE_BURN ? "bad" : "warn"];
  }
  if (!total.offered) return ["No request yet", "quiet"];
  return ["Keeping promises", "fine"];
}

onRedraw((data) => {
  const routed = data.router && data.router !== data.policy ? ` · router ${data.router}` : "";
  const who = data.keys ? ` · ${data.tenant}${data.admin ? ", admin" : ": your requests"}` : "";
  const up = duration(1000 * data.serving_seconds);
  set(at("facts"), { text: `${data.model} · policy ${data.policy}${routed} · ${data.version} · up ${up}${who}` });
  say(...statusText(data));
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
  isPaused = !isPaused;
  set(at("pause"), { "aria-pressed": String(isPaused) });
  if (isPaused) say("Paused", "quiet");
  answeredAt = performance.now();
  ask();
}

function theme() {
  const preferred = THEMES[Number(matchMedia("(prefers-color-scheme: dark)").matches)];
  const next = THEMES[1 - THEMES.indexOf(document.documentElement.dataset.theme ?? preferred)];
  document.documentElement.dataset.theme = next;
  withStorage(() => localStorage.setItem("rubato-board-theme", next));
}

const storedTheme = withStorage(() => localStorage.getItem("rubato-board-theme"));
if (THEMES.includes(storedTheme)) document.documentElement.dataset.theme = storedTheme;

at("pause").addEventListener("click", pause);
at("theme").addEventListener("click", theme);
at("try").addEventListener("click", () => {
  open("send", "Try it");
  at("prompt").focus();
});

// Typing filters the list; Enter opens the request of that id, which may have ended
at("search").addEventListener("input", ({ target }) => {
  view.search = target.value.trim();
  redraw();
});
at("search").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !view.search) return;
  const found = view.board?.requests.filter((row) => row[0].includes(view.search)) ?? [];
  openRequest(found.length === 1 ? found[0][0] : view.search);
});

// ---------------------------------------------------------------------------- keys

const isTyping = (node) => node.matches?.("input, textarea, select");

document.addEventListener("keydown", (event) => {
  const command = event.metaKey || event.ctrlKey;
  if ((event.key === "k" && command) || (event.key === "/" && !isTyping(event.target))) {
    event.preventDefault();
    at("search").focus();
    at("search").select();
  } else if (event.key === "Escape" && isOpen()) {
    close();
  } else if (event.key === "Escape") {
    Object.assign(view, { tier: null, replica: null, lateOnly: false, search: "", moment: null });
    at("search").value = "";
    redraw();
  } else if (!command && !event.altKey && !isTyping(event.target) && view.board) {
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
  answeredAt = performance.now();
  ask();
});

setHeaders(headers);
setUpForm(headers, ask);
ask();
