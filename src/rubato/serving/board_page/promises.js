// A card for each tier, the most urgent first: its attainment, and how near its times are to their bounds.

import { arrows, at, box, el, enterable, keyed, set } from "./dom.js";
import { sparkline } from "./charts.js";
import { attained, count, duration, percent, plural, promise } from "./format.js";
import { choose, onRedraw, history, span, view } from "./state.js";

export const PAGE_BURN = 3.6; // the burn at which docs/alerts.yml pages
const MIN_JUDGED = 5; // no alarm for fewer requests
const SMOOTHED_GROUPS = 5; // groups of slices that a point of the line averages

const judgedOf = ({ met, missed, late }) => met + missed + late;

// fine, warn, bad, or quiet where there is nothing to say
export function urgency(figures, objective) {
  const judged = judgedOf(figures);
  if (!judged) return "quiet";
  if (judged < MIN_JUDGED || figures.attainment >= objective) return "fine";
  return figures.burn >= PAGE_BURN ? "bad" : "warn";
}

// The share of misses as a multiple of what the objective allows
export const burnText = ({ burn }) => `${burn.toFixed(1)}× allowed misses`;

// The same in a sentence
export function budgetText({ attainment }, objective) {
  return `Error budget: ${percent(1 - objective)} of the requests may miss their SLO. ${percent(1 - attainment)} did.`;
}

function card(tier) {
  const node = el("button.card", { type: "button", tabindex: "-1" },
    box("span.name"), box("span.flag"), box("span.slo"), box("span.figure", box("strong"), box("small")), box("span.trend"),
    box("span.meters"), box("span.now"));
  node.addEventListener("click", () => choose("tier", tier.name));
  return node;
}

const meter = () => box("span", box("span.label"),
  box("span.bar", box("i.p99"), box("i.over"), box("i.p50"), box("b")), box("span.value"));

const isPromised = (slo) => slo !== null && [slo.ttft_ms, slo.tpot_ms, slo.e2e_ms].some((bound) => bound !== null);

function fillCard(node, tier, data) {
  const figures = tier.windows[view.window];
  const [name, flag, slo, figure, trend, meters, now] = node.children;
  const hasSlo = isPromised(tier.slo) || !tier.best_effort;
  const state = hasSlo ? urgency(figures, data.objective) : "besteffort";
  set(node, { class: `card ${state}`, "aria-pressed": String(view.tier === tier.name) });
  set(name, { text: tier.name, title: tier.name });
  const isBurning = ["warn", "bad"].includes(state);
  set(flag, { text: isBurning ? burnText(figures) : "", title: isBurning ? budgetText(figures, data.objective) : null });
  const words = isPromised(tier.slo) ? promise(tier.slo) : hasSlo ? "SLO of each request" : "best effort";
  set(slo, { text: words, title: words });
  if (hasSlo) fillPromised(figure, trend, tier, data, figures);
  else fillBestEffort(figure, trend, tier);
  keyed(meters, metersOf(tier, figures, hasSlo), ([what]) => what, meter, (row, [what, ...values]) => {
    set(row.firstChild, { text: what });
    if (what === "budget") fillBudget(row, ...values, budgetText(figures, data.objective));
    else fillBullet(row, ...values);
  });
  const { running, waiting, late } = tier.now;
  set(now, { text: `${running} running, ${waiting} waiting${late ? `, ${late} late now` : ""}` });
}

// The budget and the times with a bound, at least two of them
function metersOf(tier, figures, hasSlo) {
  const times = ["ttft", "tpot", "e2e"].map((time) =>
    [time.toUpperCase(), figures[`${time}_ms`], tier.slo?.[`${time}_ms`] ?? null]);
  const [bounded, free] = [times.filter(([, , bound]) => bound !== null), times.filter(([, , bound]) => bound === null)];
  const wanted = [...bounded, ...free].slice(0, Math.max(2, bounded.length)).filter(([, known]) => known);
  return hasSlo && figures.budget_left !== null ? [["budget", figures.budget_left], ...wanted] : wanted;
}

function fillPromised(figure, trend, tier, data, figures) {
  const judged = judgedOf(figures);
  set(figure.children[0], { text: attained(figures.attainment) });
  set(figure.children[1], { text: judged ? `of ${count(judged)} on time` : "nothing to judge yet" });
  const { starts, size } = span();
  const causes = history.causes(tier.name).map((cause) => `cause ${cause}`);
  const shares = starts.map((start) => {
    const from = start - (SMOOTHED_GROUPS - 1) * size;
    const over = (column) => history.sum("tiers", tier.name, column, from, SMOOTHED_GROUPS * size) ?? 0;
    const met = over("met");
    const ended = met + causes.reduce((missed, cause) => missed + over(cause), 0);
    return ended ? met / ended : null;
  });
  const lowest = Math.min(0.7, ...shares.filter((share) => share !== null));
  trend.replaceChildren(sparkline(shares, { from: lowest, to: 1, rule: data.objective }));
}

function fillBestEffort(figure, trend, tier) {
  const { starts, size, seconds } = span();
  const rates = starts.map((start) => (history.sum("tiers", tier.name, "tokens", start, size) ?? 0) / size / seconds);
  const recent = rates.slice(-SMOOTHED_GROUPS);
  const wait = tier.now.oldest_wait_ms;
  set(figure.children[0], { text: count(recent.reduce((a, b) => a + b, 0) / recent.length) });
  set(figure.children[1], { text: `tokens/s${wait === null ? "" : `, oldest waits ${duration(wait)}`}` });
  trend.replaceChildren(sparkline(rates, { from: 0, to: Math.max(1, ...rates) }));
}

function fillBudget(row, left, words) {
  const [, bar, value] = row.children;
  const share = Math.max(0, Math.min(1, left));
  set(row, { class: left < 0 ? "budget over" : "budget", title: words });
  set(bar.firstChild, { style: { width: `${100 * share}%` } });
  set(value, { text: left < -0.05 ? `${(1 - left).toFixed(1)}× used` : left < 0 ? "used up" : `${percent(share)} left` });
}

// Median and 99th percentile against the bound, which stands at two thirds of the bar
function fillBullet(row, [p50, p99], bound) {
  const [, bar, value] = row.children;
  const [upTo, over, median, limit] = bar.children;
  const full = bound === null ? p99 * 1.1 : bound * 1.5;
  const share = (ms) => 100 * Math.min(1, ms / full);
  const isOver = bound !== null && p99 > bound;
  set(upTo, { style: { width: `${share(p99)}%` } });
  set(over, { hidden: !isOver, style: { left: `${share(bound)}%`, right: `${100 - share(p99)}%` } });
  set(median, { style: { left: `${share(p50)}%` } });
  set(limit, { hidden: bound === null, style: { left: `${share(bound)}%` } });
  const words = `median ${duration(p50)}, 99th percentile ${duration(p99)}`;
  set(value, { text: `${duration(p50)} · ${duration(p99)}`, title: bound === null ? words : `${words}, bound ${duration(bound)}` });
}

const strip = at("promises");
arrows(strip, ".card", { next: "ArrowRight", back: "ArrowLeft" });
onRedraw((data) => {
  keyed(strip, data.tiers, (tier) => tier.name, card, (node, tier) => fillCard(node, tier, data));
  enterable(strip, ".card");
  set(at("outcomes-of"), { text: view.tier ? `of ${view.tier}` : plural(data.tiers.length, "tier") });
});
