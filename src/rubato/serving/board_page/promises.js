// A card for each tier, the most urgent first: how much of what it promised was kept, and how near its bounds it is.

import { arrows, at, el, enterable, keyed, set } from "./dom.js";
import { sparkline } from "./charts.js";
import { attained, count, duration, percent, plural, promise } from "./format.js";
import { choose, draws, history, span, view } from "./state.js";

export const PAGE_AT = 3.6; // a burn at which docs/alerts.yml pages
const FEW = 5; // requests judged: of fewer no alarm is made
const SMOOTH = 5; // groups of slices that a point of the line is over

// fine, warn, bad, or quiet where there is nothing to say
export function urgency(figures, objective) {
  const judged = figures.met + figures.missed;
  if (!judged) return "quiet";
  if (judged < FEW || figures.attainment >= objective) return "fine";
  return figures.burn >= PAGE_AT ? "bad" : "warn";
}

function card() {
  const meters = ["budget", "ttft", "tpot", "e2e"].map((name) => el("li", { class: name },
    el("span", { class: "label" }), el("span", { class: "bar" }, el("i", { class: "p99" }), el("i", { class: "over" }), el("i", { class: "p50" }), el("b")),
    el("span", { class: "value" })));
  return el("button", { type: "button", class: "card", tabindex: "-1" },
    el("span", { class: "name" }), el("span", { class: "flag" }), el("span", { class: "slo" }),
    el("span", { class: "figure" }, el("strong"), el("small")), el("span", { class: "trend" }),
    el("ul", {}, ...meters), el("span", { class: "now" }));
}

function fillCard(node, tier, told) {
  const figures = tier.windows[view.window];
  const [name, flag, slo, figure, trend, meters, now] = node.children;
  const state = tier.best_effort && !tier.slo?.ttft_ms && !tier.slo?.e2e_ms && !tier.slo?.tpot_ms ? "besteffort" : urgency(figures, told.objective);
  set(node, { class: `card ${state}`, "aria-pressed": String(view.tier === tier.name) });
  set(name, { text: tier.name, title: tier.name });
  set(slo, { text: promise(tier.slo) });
  set(flag, { text: { warn: `burning ${figures.burn?.toFixed(1)}×`, bad: `burning ${figures.burn?.toFixed(1)}×` }[state] ?? "" });
  if (state === "besteffort") fillBestEffort(figure, trend, tier);
  else fillPromised(figure, trend, tier, told, figures);
  const { running, waiting, late } = tier.now;
  set(now, { text: `${running} running, ${waiting} waiting${late ? `, ${late} late now` : ""}` });
  const bounds = tier.slo ?? {};
  const [budget, ttft, tpot] = meters.children;
  fillBudget(budget, state === "besteffort" ? null : figures);
  fillBullet(ttft, "TTFT", figures.ttft_ms, bounds.ttft_ms);
  fillBullet(tpot, "TPOT", figures.tpot_ms, bounds.tpot_ms);
  meters.children[3].hidden = true;
}

function fillPromised(figure, trend, tier, told, figures) {
  set(figure.children[0], { text: attained(figures.attainment) });
  const judged = figures.met + figures.missed;
  set(figure.children[1], { text: judged ? `of ${count(judged)} on time` : "nothing has ended yet" });
  const { starts, size } = span();
  const causes = history.causes(tier.name).map((cause) => `cause ${cause}`);
  const shares = starts.map((start) => {
    const over = (column) => history.sum("tiers", tier.name, column, start - (SMOOTH - 1) * size, SMOOTH * size) ?? 0;
    const met = over("met");
    const ended = met + causes.reduce((missed, cause) => missed + over(cause), 0);
    return ended ? met / ended : null;
  });
  const lowest = Math.min(0.7, ...shares.filter((share) => share !== null));
  trend.replaceChildren(sparkline(shares, { from: lowest, to: 1, rule: told.objective }));
}

function fillBestEffort(figure, trend, tier) {
  const { starts, size, seconds } = span();
  const rates = starts.map((start) => (history.sum("tiers", tier.name, "tokens", start, size) ?? 0) / size / seconds);
  const recent = rates.slice(-12);
  set(figure.children[0], { text: count(recent.reduce((a, b) => a + b, 0) / recent.length) });
  const wait = tier.now.oldest_wait_ms;
  set(figure.children[1], { text: `tokens/s${wait === null ? "" : `, oldest waits ${duration(wait)}`}` });
  trend.replaceChildren(sparkline(rates, { from: 0, to: Math.max(1, ...rates) }));
}

function fillBudget(row, figures) {
  const left = figures?.budget_left ?? null;
  row.hidden = left === null;
  const [label, bar, value] = row.children;
  set(label, { text: "budget" });
  const share = Math.max(0, Math.min(1, left ?? 0));
  set(bar.children[0], { style: { width: `${100 * share}%` } });
  set(bar.lastChild, { hidden: true });
  set(row, { class: `budget ${left < 0 ? "over" : ""}` });
  set(value, { text: left < 0 ? `overspent ${(-left).toFixed(1)}×` : `${percent(share)} left` });
}

// Median and 99th percentile against the bound, which stands at two thirds of the bar
function fillBullet(row, name, times, bound) {
  row.hidden = !times;
  if (!times) return;
  const [label, bar, value] = row.children;
  const [p50, p99] = times;
  const full = bound ? Math.max(bound * 1.5, 1e-9) : Math.max(p99 * 1.1, 1e-9);
  const at_ = (ms) => `${100 * Math.min(1, ms / full)}%`;
  set(label, { text: name });
  const [upTo, over, median, limit] = bar.children;
  set(upTo, { style: { width: at_(p99) } });
  set(over, { hidden: !bound || p99 <= bound, style: { left: at_(bound ?? 0), right: `${100 - parseFloat(at_(p99))}%` } });
  set(median, { style: { left: at_(p50) } });
  set(limit, { hidden: !bound, style: { left: at_(bound ?? 0) } });
  set(value, { text: `${duration(p50)} · ${duration(p99)}`, title: `median ${duration(p50)}, 99th percentile ${duration(p99)}${bound ? `, bound ${duration(bound)}` : ""}` });
}

const strip = at("promises");
arrows(strip, ".card", { next: "ArrowRight", back: "ArrowLeft" });
draws((told) => {
  keyed(strip, told.tiers, (tier) => tier.name, (tier) => {
    const node = card();
    node.addEventListener("click", () => choose("tier", tier.name));
    return node;
  }, (node, tier) => fillCard(node, tier, told));
  enterable(strip, ".card");
  set(at("outcomes-of"), { text: view.tier ? `of ${view.tier}` : plural(told.tiers.length, "tier") });
});
