// Looks at the board with a real browser and prints what it saw, as JSON. test_browser.py says what it should be.
// node look.cjs URL CHROMIUM look|words|keyboard|keys|silence [FOLDER for screenshots]

const { chromium } = require("playwright-core");

const [url, executablePath, what, folder] = process.argv.slice(2);
const ANSWERED = 20_000; // ms

// A page, and what a page must not do: complain, ask other hosts, open dialogs.
async function open(browser, options) {
  const context = await browser.newContext({ reducedMotion: "reduce", ...options });
  const page = await context.newPage();
  const seen = { console: [], foreign: [], dialogs: 0, asked: 0 };
  page.on("console", (message) => seen.console.push(`${message.type()}: ${message.text()}`));
  page.on("pageerror", (error) => seen.console.push(`uncaught: ${error.message}`));
  page.on("request", (request) => {
    if (new URL(request.url()).origin !== new URL(url).origin) seen.foreign.push(request.url());
    if (request.url().includes("board.json")) seen.asked += 1;
  });
  page.on("dialog", (dialog) => {
    seen.dialogs += 1;
    dialog.dismiss();
  });
  await page.goto(url);
  return { context, page, seen };
}

const board = (page) => page.waitForSelector("#board:not([hidden])", { timeout: ANSWERED });
const says = (page, id, words) =>
  page.waitForFunction(([id, part]) => document.querySelector(id)?.textContent.includes(part), [id, words], {
    timeout: ANSWERED,
  });
const size = (page) => page.evaluate(() => [document.documentElement.scrollWidth, document.documentElement.scrollHeight]);
const focused = (page) => page.evaluate(() => document.activeElement.id || document.activeElement.className);

// What the page makes of an answer in which every word is markup.
async function withMarkup(page) {
  const markup = `<img src=x onerror="alert(1)"><script>alert(2)</script>`;
  const marked = (value, name = "") => {
    if (name === "request_columns" || name === "paths") return value;
    if (typeof value === "string") return value + markup;
    if (Array.isArray(value)) return value.map((inner) => marked(inner));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, marked(inner, key)]));
  };
  await page.route("**/board.json*", async (route) => {
    const reply = await route.fetch();
    await route.fulfill({ response: reply, json: marked(await reply.json()) });
  });
  await says(page, "#facts", markup);
  const found = await page.evaluate((markup) => ({
    elements: document.querySelectorAll("main img, aside img, script:not([src]), iframe").length,
    shown: document.body.textContent.split(markup).length - 1,
  }), markup);
  return { ...found, wide: (await size(page))[0] };
}

async function look(browser, width, height, colorScheme) {
  const { context, page, seen } = await open(browser, { viewport: { width, height }, colorScheme });
  await board(page);
  await page.waitForSelector("#timeline .row", { timeout: ANSWERED });
  const [wide, tall] = await size(page);
  const shown = await page.evaluate(() => ({
    tiers: [...document.querySelectorAll(".card .name")].map((name) => name.textContent),
    requests: document.querySelectorAll("#timeline .row").length,
    lanes: document.querySelectorAll(".lane").length,
    causes: [...document.querySelectorAll(".group .cause")].map((cause) => cause.textContent),
    facts: document.getElementById("facts").textContent,
    ground: getComputedStyle(document.body).backgroundColor,
    moving: document.getAnimations().length,
  }));
  if (folder) await page.screenshot({ path: `${folder}/${width}-${colorScheme}.png` });
  await page.click("#timeline .row");
  await page.waitForSelector("#request .verdict", { timeout: ANSWERED });
  const panel = await page.evaluate(() => ({
    verdict: document.querySelector("#request .verdict").textContent,
    phases: document.querySelectorAll(".waterfall rect").length, events: document.querySelectorAll(".events li").length,
  }));
  await page.keyboard.press("Escape");
  await page.click("#try");
  await page.fill("#ttft", "5000");
  await page.fill("#tpot", "500");
  await page.selectOption("#tier", { label: await page.evaluate(() => document.getElementById("tier").options[1].label) });
  await page.fill("#max-tokens", "8");
  await page.click("#send-both");
  await page.waitForFunction(() => document.querySelectorAll(".run").length === 2 &&
    [...document.querySelectorAll(".run .verdict")].every((said) => /SLO/.test(said.textContent)), null, { timeout: ANSWERED });
  const runs = await page.evaluate(() => [...document.querySelectorAll(".run")].map((run) => ({
    verdict: run.querySelector(".verdict").textContent, text: run.querySelector("pre").textContent,
    facts: [...run.querySelectorAll("dd")].map((fact) => fact.textContent),
  })));
  if (folder) await page.screenshot({ path: `${folder}/${width}-${colorScheme}-try.png` });
  await page.keyboard.press("Escape");
  const markup = await withMarkup(page);
  await context.close();
  return { width, height, colorScheme, ...seen, wide, tall, shown, panel, runs, markup };
}

// How what happened is worded: an answer that has a tier beyond its budget, one whose requests bring their SLOs, one of
// best effort, and misses of which servers without the plug-in report no cause.
async function words(browser) {
  const { context, page, seen } = await open(browser, { viewport: { width: 1400, height: 900 } });
  await page.route("**/board.json*", async (route) => {
    const reply = await route.fetch();
    const told = await reply.json();
    const [tier, miss] = [told.tiers.at(-1), told.misses[0]];
    const none = { ttft_ms: null, tpot_ms: null, e2e_ms: null };
    const late = { met: 88, missed: 12, late: 0, attainment: 0.88, burn: 1.2, budget_left: -0.2 };
    const windows = Object.fromEntries(Object.entries(tier.windows).map(([name, one]) => [name, { ...one, ...late }]));
    const one = (name, more) => ({ ...tier, name, slo: none, windows, ...more });
    told.tiers = [one("late", { slo: { ...none, ttft_ms: 5 } }), one("own", { best_effort: false }), one("none", { best_effort: true })];
    const latest = { ...miss.latest, margin_ms: -250, ttft_ms: 300, tpot_ms: 20 };
    told.misses = ["late", "own"].map((tier) => ({ ...miss, tier, cause: "not reported", latest }));
    told.replicas = told.replicas.map((replica) => ({ ...replica, link: "counted", url: "http://gpu-4:8000" }));
    const now = told.history.first;
    const causes = Object.fromEntries(["queue", "prefill interference", "decode interference", "preemption", "infeasible",
      "gateway", "client", "failed"].map((cause, i) => [cause, [80 - 10 * i]]));
    told.history.tiers = { late: { offered: [400], met: [0], tokens: [0], causes } };
    await route.fulfill({ response: reply, json: { ...told, history: { ...told.history, first: now } } });
  });
  await says(page, "#status", "allowed misses");
  const found = await page.evaluate(() => ({
    status: document.getElementById("status").textContent,
    cards: [...document.querySelectorAll(".card")].map((card) => [".flag", ".slo", ".figure small", ".budget .value"].map(
      (part) => card.querySelector(part)?.textContent ?? null)),
    title: document.querySelector(".card .flag").title,
    legend: [...document.querySelectorAll("#outcomes-legend li span")].map((name) => name.textContent),
    why: document.getElementById("misses-why").textContent,
    example: document.querySelector(".group small").textContent,
  }));
  await page.click("#timeline .row");
  await page.waitForSelector(".events li", { timeout: ANSWERED });
  found.events = await page.evaluate(() => [...document.querySelectorAll(".events li")].map((event) => event.textContent));
  await context.close();
  return { ...seen, ...found };
}

// Adds a step of load and takes it away again.
async function withLoad(page) {
  const streams = (count) => page.waitForFunction((count) =>
    [...document.querySelectorAll("#timeline .tag")].filter((tag) => tag.textContent === "flex").length === count, count,
  { timeout: ANSWERED });
  await page.click("#try");
  await page.focus("#load-streams");
  await page.keyboard.press("ArrowRight");
  await streams(8);
  const said = await page.textContent("#load-said");
  await page.keyboard.press("Home");
  await streams(0);
  return [said, await page.textContent("#load-said")];
}

async function keyboard(browser) {
  const { context, page, seen } = await open(browser, { viewport: { width: 1400, height: 900 } });
  await board(page);
  await page.waitForSelector("#timeline .row", { timeout: ANSWERED });
  const tabs = [];
  for (let i = 0; i < 30 && !tabs.includes("group"); i += 1) {
    await page.keyboard.press("Tab");
    tabs.push((await focused(page)).split(" ")[0]);
  }
  await page.focus(".card");
  await page.keyboard.press("ArrowRight");
  const second = await page.evaluate(() => document.activeElement.querySelector(".name").textContent);
  await page.keyboard.press("Enter");
  const filtered = await page.evaluate(() => [document.getElementById("outcomes-of").textContent, document.querySelectorAll(".chip").length]);
  await page.keyboard.press("Escape");
  const free = await page.evaluate(() => document.querySelectorAll(".chip").length);
  await page.focus("#outcomes-chart");
  await page.keyboard.press("ArrowLeft");
  const moment = await page.textContent("#outcomes-when");
  await page.keyboard.press("/");
  const search = await focused(page);
  const id = await page.evaluate(() => document.querySelector("#timeline .row .id").textContent);
  await page.keyboard.type(id);
  await page.keyboard.press("Enter");
  await page.waitForSelector("#request .waterfall", { timeout: ANSWERED });
  const opened = await page.textContent("#panel-title");
  await page.keyboard.press("Escape");
  const closed = [await page.isHidden("#panel"), await focused(page)];
  await page.keyboard.press("Escape");
  await page.evaluate(() => document.activeElement.blur());
  await page.keyboard.press("p");
  const paused = await page.textContent("#status");
  await page.keyboard.press("p");
  await page.keyboard.press("t");
  const theme = await page.evaluate(() => document.documentElement.dataset.theme);
  const load = await withLoad(page);
  await context.close();
  return { ...seen, tabs, second, filtered, free, moment, search, id, opened, closed, paused, theme, load };
}

async function keys(browser) {
  const { context, page, seen } = await open(browser, {});
  await page.waitForSelector("#key-form:not([hidden])");
  const before = { board: await page.isVisible("#board"), status: await page.textContent("#status") };
  await page.fill("#key", "sk-nobody");
  await page.keyboard.press("Enter");
  await says(page, "#status", "does not know");
  await page.fill("#key", "sk-a");
  await page.keyboard.press("Enter");
  await board(page);
  const own = { facts: await page.textContent("#facts"), fleet: await page.isVisible("#fleet") };
  await page.reload();
  await board(page);
  await page.click("#try");
  await page.click("#send-button");
  await page.waitForFunction(() => document.querySelector(".run pre")?.textContent, null, { timeout: ANSWERED });
  const stored = await page.evaluate(() => [sessionStorage.length, localStorage.length, document.cookie]);
  await page.keyboard.press("Escape");
  await page.click("#key-forget");
  await says(page, "#status", "asks for an API key");
  const after = { board: await page.isVisible("#board"), stored: await page.evaluate(() => sessionStorage.length) };
  await context.close();
  return { ...seen, before, own, stored, after };
}

async function silence(browser) {
  const { context, page, seen } = await open(browser, {});
  await board(page);
  await page.route("**/board.json*", (route) => route.abort());
  await says(page, "#status", "has not answered");
  const stale = await page.evaluate(() => document.getElementById("board").classList.contains("stale"));
  await page.unroute("**/board.json*");
  const answering = () => page.waitForFunction(() => !/answered|Paused/.test(document.getElementById("status").textContent));
  await answering();
  const hide = (hidden) => page.evaluate((hidden) => {
    Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
    document.dispatchEvent(new Event("visibilitychange"));
  }, hidden);
  await hide(true);
  const paused = await page.textContent("#status");
  const before = seen.asked;
  await page.waitForTimeout(2500);
  const whileHidden = seen.asked - before;
  await hide(false);
  await answering();
  await page.waitForTimeout(2500);
  const whileSeen = seen.asked - before;
  await context.close();
  return { stale, paused, whileHidden, whileSeen };
}

async function main() {
  const args = process.getuid() === 0 ? ["--no-sandbox"] : [];
  const browser = await chromium.launch({ executablePath, args });
  const found = [];
  if (what === "look") {
    for (const [width, height] of [[390, 844], [1400, 900]]) {
      for (const scheme of ["light", "dark"]) found.push(await look(browser, width, height, scheme));
    }
  } else {
    found.push(await { keyboard, keys, silence, words }[what](browser));
  }
  await browser.close();
  console.log(JSON.stringify(found));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
