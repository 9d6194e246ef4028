// Sends a chat request with an SLO, and shows its tokens, their times and the verdict.

import { Table, count, duration, element, figures } from "./format.js";

const MOST_BARS = 96; // tokens whose times are drawn

const at = (id) => document.getElementById(id);
const targets = new Table(at("targets"), [
  { label: "As the server measured it" }, { label: "Asked for", kind: "number" }, { label: "Measured", kind: "number" },
], "");

// headers: of each request; model: its name; sent: called when a request is on its way, and when it has ended
export function sending({ headers, model, sent }) {
  let stopping = null;
  at("stop").addEventListener("click", () => stopping?.abort());
  at("send-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    if (stopping) return;
    stopping = new AbortController();
    at("send-button").disabled = true;
    at("stop").disabled = false;
    const run = new Run(asked(model()));
    const reply = run.stream(headers(), stopping.signal);
    setTimeout(sent, 50);
    try {
      await reply;
    } catch (error) {
      run.failed(stopping.signal.aborted ? "Stopped." : `No answer: ${error.message}`);
    }
    stopping = null;
    at("send-button").disabled = false;
    at("stop").disabled = true;
    sent();
  });
}

function asked(model) {
  const slo = {};
  for (const name of ["ttft", "tpot", "e2e"]) {
    if (at(name).value) slo[`${name}_ms`] = Number(at(name).value);
  }
  return {
    model, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true },
    messages: [{ role: "user", content: at("prompt").value }], max_tokens: Number(at("max-tokens").value),
    ...(at("tier").value ? { service_tier: at("tier").value } : {}), ...(Object.keys(slo).length ? { slo } : {}),
  };
}

class Run {
  constructor(body) {
    this.body = body;
    this.tokens = 0;
    this.first = null; // ms from sending to the first token
    this.last = 0;
    this.gaps = []; // ms for each token after the first
    this.begun = performance.now();
    at("answer").hidden = false;
    at("text").textContent = "";
    at("targets").hidden = at("gaps").hidden = true;
    at("gap-bars").replaceChildren();
    this.say("Sent; waits for its first token.");
    this.showTimes();
  }

  async stream(headers, signal) {
    const reply = await fetch("/v1/chat/completions", {
      method: "POST", body: JSON.stringify(this.body), signal,
      headers: { ...headers, "content-type": "application/json" },
    });
    if (!reply.ok) return this.failed(await refusal(reply));
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
    if (!this.judged) this.failed("The stream ended without a verdict.");
    return undefined;
  }

  take(event) {
    if (!event.startsWith("data: ") || event === "data: [DONE]") return;
    const chunk = JSON.parse(event.slice(6));
    if (chunk.error) {
      this.judged = true;
      this.failed(chunk.error.message);
      return;
    }
    const text = chunk.choices?.[0]?.delta?.content ?? "";
    if (text) at("text").append(text);
    this.count(chunk.usage?.completion_tokens ?? this.tokens + (text ? 1 : 0));
    if (chunk.rubato) this.judge(chunk.rubato);
  }

  // tokens: how many have come so far
  count(tokens) {
    const came = tokens - this.tokens;
    if (came <= 0) return;
    const now = performance.now() - this.begun;
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
    figures(at("times"), [
      ["First token", duration(this.first)], ["Per token", duration(mean)],
      ["Slowest token", duration(this.gaps.length ? Math.max(...this.gaps) : null)],
      ["Tokens", count(this.tokens)], ["In all", duration(this.tokens ? this.last : null)],
    ]);
    if (this.gaps.length) this.drawGaps();
  }

  drawGaps() {
    const last = this.gaps.slice(-MOST_BARS);
    const bound = this.body.slo?.tpot_ms;
    const most = Math.max(...last, bound ?? 0) * 1.05;
    at("gaps").hidden = false;
    const which = last.length < this.gaps.length ? `the last ${last.length} tokens` : "each token after the first";
    const dashed = bound ? ", the dashed line the TPOT asked for" : "";
    at("gaps-about").textContent =
      `Time of ${which}, as this browser saw it. Full height is ${duration(most)}${dashed}.`;
    const bars = last.map((gap) => {
      const drawn = element("i");
      drawn.style.height = `${(gap / most) * 100}%`;
      drawn.title = duration(gap);
      return drawn;
    });
    if (bound) {
      const line = element("b");
      line.style.bottom = `${(bound / most) * 100}%`;
      bars.push(line);
    }
    at("gap-bars").replaceChildren(...bars);
  }

  judge(verdict) {
    this.judged = true;
    const { met, targets: bounds } = verdict;
    const spare = verdict.margin_ms === null ? "" :
      verdict.margin_ms < 0 ? `, late by ${duration(-verdict.margin_ms)} at the tightest token` :
        `, ${duration(verdict.margin_ms)} to spare at the tightest token`;
    const promised = ["ttft_ms", "tpot_ms", "e2e_ms"].some((name) => bounds[name] !== null);
    const how = !promised ? "Completed; no SLO was asked for." :
      met ? `SLO met${spare}.` : met === null ? "Completed; TTFT and TPOT were not measured." : `SLO missed${spare}. Cause: ${verdict.cause ?? "unknown"}.`;
    const served = verdict.served === "best_effort" && promised ? " Served as best effort." : "";
    const loosened = this.clamped ? ` Less was promised than asked for: ${this.clamped}.` : "";
    this.say(`${how}${served}${loosened} Tier ${verdict.tier}.`, !promised || met === null ? "" : met ? "met" : "missed");
    at("targets").hidden = false;
    targets.show([["TTFT", "ttft_ms"], ["TPOT, mean", "tpot_ms"], ["End to end", "e2e_ms"]].map(([name, field]) => [
      name, [
        { text: name }, { text: bounds[field] === null ? "no bound" : duration(bounds[field]) },
        { text: duration(verdict[field]) },
      ],
    ]));
  }

  failed(why) {
    this.say(why, "missed");
  }

  say(text, kind = "") {
    at("verdict").textContent = text;
    at("verdict").className = kind;
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
