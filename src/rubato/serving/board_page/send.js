// "Try it": sends a chat request with an SLO, or with and without one side by side, and makes load.

import { at, box, el, keyed, set, svg } from "./dom.js";
import { count, duration, promise } from "./format.js";
import { onRedraw, view } from "./state.js";

const MAX_BARS = 96; // tokens whose times are drawn
const CHOICES = 8; // streams of one connection: a browser has six to one host, and the board and the form need three
const LOAD_TOKENS = 256; // for each stream
const RETRY_MS = 1000; // after a refused load request

let headers = () => ({});
let notifyAsked = () => {};
let sendAbort = null;

// ---------------------------------------------------------------------------- one request

function bodyOf(withSlo) {
  const stated = ["ttft", "tpot", "e2e"].filter((name) => at(name).value).map((name) => [`${name}_ms`, Number(at(name).value)]);
  const sloFields = withSlo ? { service_tier: at("tier").value, slo: Object.fromEntries(stated) } : { service_tier: "flex" };
  if (!sloFields.service_tier) delete sloFields.service_tier;
  if (!stated.length) delete sloFields.slo;
  return {
    model: view.board.model, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true },
    messages: [{ role: "user", content: at("prompt").value }], max_tokens: Number(at("max-tokens").value), ...sloFields,
  };
}

function post(body, signal) {
  const stated = { ...headers(), "content-type": "application/json" };
  return fetch(view.board.paths.chat, { method: "POST", body: JSON.stringify(body), signal, headers: stated });
}

class Run {
  constructor(title, body) {
    this.body = body;
    this.tokens = 0;
    this.first = null; // ms from sending to the first token
    this.last = 0;
    this.gaps = []; // ms for each token after the first
    this.beganAt = performance.now();
    this.status = el("p.verdict", { role: "status", text: "Waits for its first token." });
    this.times = box("dl.facts");
    this.bars = svg("svg", { class: "gaps", preserveAspectRatio: "none", "aria-hidden": "true" });
    this.text = el("pre", { tabindex: "0", role: "region", "aria-label": "Answer" });
    this.node = box("article.run", el("h3", { text: title }), this.status, this.times, this.bars, this.text);
    this.showTimes();
  }

  async stream(signal) {
    const reply = await post(this.body, signal);
    if (!reply.ok) return this.fail(await refusal(reply));
    this.clamped = reply.headers.get("x-rubato-clamped");
    const reader = reply.body.getReader();
    const decoder = new TextDecoder();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const events = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = events.pop();
      for (const event of events) this.take(event);
    }
    if (!this.hasVerdict) this.fail("The stream ended without a verdict.");
    return undefined;
  }

  take(event) {
    if (!event.startsWith("data:") || event.endsWith("[DONE]")) return;
    const chunk = JSON.parse(event.slice(5));
    if (chunk.error) {
      this.hasVerdict = true;
      this.fail(chunk.error.message);
      return;
    }
    const text = chunk.choices?.[0]?.delta?.content ?? "";
    if (text) this.text.append(text);
    this.count(chunk.usage?.completion_tokens ?? this.tokens + (text ? 1 : 0));
    if (chunk.rubato) this.judge(chunk.rubato);
  }

  // tokens: how many have come so far
  count(tokens) {
    const came = tokens - this.tokens;
    if (came <= 0) return;
    const now = performance.now() - this.beganAt;
    if (this.first === null) {
      this.first = now;
      this.say("Tokens are coming.");
    } else {
      this.gaps.push(...Array(came).fill((now - this.last) / came));
    }
    this.tokens = tokens;
    this.last = now;
    this.showTimes();
  }

  showTimes() {
    const mean = this.gaps.length ? (this.last - this.first) / this.gaps.length : null;
    const facts = [
      ["First token", duration(this.first)], ["Each token", duration(mean)], ["Tokens", count(this.tokens)],
      ["So far", duration(this.tokens ? this.last : null)],
    ];
    const make = ([name]) => box("div", el("dt", { text: name }), box("dd"));
    keyed(this.times, facts, ([name]) => name, make, (node, [, text]) => set(node.lastChild, { text }));
    const last = this.gaps.slice(-MAX_BARS);
    const most = Math.max(1, ...last, this.body.slo?.tpot_ms ?? 0);
    set(this.bars, { viewBox: `0 0 ${MAX_BARS} 1` });
    const bar = (gap, i) => svg("rect", { x: i, width: 0.7, y: 1 - gap / most, height: gap / most });
    this.bars.replaceChildren(...last.map(bar));
  }

  judge(verdict) {
    this.hasVerdict = true;
    const { met, margin_ms: margin, targets, cause, tier } = verdict;
    const promised = ["ttft_ms", "tpot_ms", "e2e_ms"].some((name) => targets[name] !== null);
    const spare = margin === null ? "" : margin < 0 ? `, late by ${duration(-margin)}` : `, ${duration(margin)} to spare`;
    const how = !promised ? "Completed; no SLO was asked for." : met ? `SLO met${spare}.` :
      met === null ? "Completed; its times were not measured." : `SLO missed${spare}. Cause: ${cause ?? "unknown"}.`;
    const served = verdict.served === "best_effort" && promised ? " Served as best effort." : "";
    const loosened = this.clamped ? ` Less was promised than asked for: ${this.clamped}.` : "";
    const state = !promised || met === null ? "" : met ? "kept" : "late";
    this.say(`${how}${served}${loosened} Tier ${tier}${promised ? `: ${promise(targets)}` : ""}.`, state);
  }

  fail(why) {
    this.say(why, "late");
  }

  say(text, kind = "") {
    set(this.status, { text, class: `verdict ${kind}` });
  }
}

async function refusal(reply) {
  try {
    const { error } = await reply.json();
    return `${reply.status}: ${error.message}`;
  } catch {
    return `The server answered with status ${reply.status}.`;
  }
}

async function send(runs) {
  if (sendAbort || !at("send-form").reportValidity()) return;
  sendAbort = new AbortController();
  at("send-button").disabled = at("send-both").disabled = true;
  at("stop").disabled = false;
  at("runs").replaceChildren(...runs.map((run) => run.node));
  const stop = sendAbort.signal;
  setTimeout(notifyAsked, 50);
  await Promise.all(runs.map((run) => run.stream(stop).catch((error) => {
    run.fail(stop.aborted ? "Stopped." : `No answer: ${error.message}`);
  })));
  sendAbort = null;
  at("send-button").disabled = at("send-both").disabled = false;
  at("stop").disabled = true;
  notifyAsked();
}

// ---------------------------------------------------------------------------- load

const connections = []; // each an AbortController

async function keepAsking(stop) {
  while (!stop.aborted) {
    const { model, messages } = bodyOf(false);
    try {
      const reply = await post({ model, messages, max_tokens: LOAD_TOKENS, n: CHOICES, service_tier: "flex" }, stop);
      if (reply.ok) await reply.text();
      else set(at("load-said"), { text: await refusal(reply) });
      if (!reply.ok) await new Promise((done) => { setTimeout(done, RETRY_MS); });
    } catch (error) {
      if (!stop.aborted) {
        set(at("load-said"), { text: `No answer: ${error.message}` });
        await new Promise((done) => { setTimeout(done, RETRY_MS); });
      }
    }
  }
}

function setLoad(streams) {
  const wanted = streams / CHOICES;
  set(at("load-said"), { text: streams ? `${streams} streams` : "no load" });
  while (connections.length > wanted) connections.pop().abort();
  while (connections.length < wanted) {
    connections.push(new AbortController());
    keepAsking(connections.at(-1).signal);
  }
}

// ---------------------------------------------------------------------------- the form

function offerTiers({ may_ask_for: tiers }) {
  const select = at("tier");
  const all = JSON.stringify(tiers);
  if (select.dataset.said === all) return;
  select.dataset.said = all;
  const chosen = select.value;
  const options = tiers.map(({ name, slo }) => el("option", { value: name, text: `${name}: ${promise(slo)}` }));
  select.replaceChildren(select.options[0], ...options);
  select.value = tiers.some(({ name }) => name === chosen) ? chosen : "";
}

// from: headers of each request; onAsked: called when a request is on its way, and when it has ended
export function setUpForm(from, onAsked) {
  headers = from;
  notifyAsked = onAsked;
  onRedraw(offerTiers);
  at("send-form").addEventListener("submit", (event) => {
    event.preventDefault();
    send([new Run("Answer", bodyOf(true))]);
  });
  at("send-both").addEventListener("click", () => {
    send([new Run("With SLO", bodyOf(true)), new Run("Without: best effort", bodyOf(false))]);
  });
  at("stop").addEventListener("click", () => sendAbort?.abort());
  at("load-streams").addEventListener("input", ({ target }) => setLoad(Number(target.value)));
}

// Load ends where its key is forgotten
export function stopLoad() {
  at("load-streams").value = 0;
  setLoad(0);
}
