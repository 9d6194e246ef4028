// Looks at the board with a real browser and prints what it saw, as JSON. test_browser.py says what it should be.
// node look.cjs URL CHROMIUM look|keys|silence [FOLDER for screenshots]

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
    if (request.url().endsWith("/board.json")) seen.asked += 1;
  });
  page.on("dialog", (dialog) => {
    seen.dialogs += 1;
    dialog.dismiss();
  });
  await page.goto(url);
  return { context, page, seen };
}

const board = (page) => page.waitForSelector("#board:not([hidden])", { timeout: ANSWERED });
const status = (page, words) =>
  page.waitForFunction((part) => document.getElementById("status").textContent.includes(part), words, {
    timeout: ANSWERED,
  });
const figure = (page, list, name) =>
  page.evaluate(([list, name]) => {
    const found = [...document.querySelectorAll(`#${list} dt`)].find((dt) => dt.textContent === name);
    return found?.nextElementSibling.textContent;
  }, [list, name]);
const across = (page) => page.evaluate(() => document.documentElement.scrollWidth);

// What has the focus, one Tab after another, up to the button that sends a request.
async function tabbed(page) {
  const names = [];
  for (let i = 0; i < 30 && names.at(-1) !== "send-button"; i += 1) {
    await page.keyboard.press("Tab");
    names.push(await page.evaluate(() => document.activeElement.id));
  }
  return names;
}

// What the page makes of an answer in which every word is markup.
async function withMarkup(page) {
  const markup = `<img src=x onerror="alert(1)"><script>alert(2)</script>`;
  const marked = (value) => {
    if (typeof value === "string") return value + markup;
    if (Array.isArray(value)) return value.map(marked);
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([name, inner]) => [name, marked(inner)]));
  };
  await page.route("**/board.json", async (route) => {
    const reply = await route.fetch();
    await route.fulfill({ response: reply, json: marked(await reply.json()) });
  });
  await status(page, markup);
  const found = await page.evaluate((markup) => ({
    elements: document.querySelectorAll("img, script:not([src]), iframe").length,
    shown: document.body.innerText.split(markup).length - 1,
  }), markup);
  return { ...found, wide: await across(page) };
}

async function look(browser, width, height, colorScheme) {
  const { context, page, seen } = await open(browser, { viewport: { width, height }, colorScheme });
  await board(page);
  const tabs = await tabbed(page);
  await page.fill("#ttft", "5000");
  await page.fill("#tpot", "500");
  await page.selectOption("#tier", { index: 1 });
  await page.fill("#max-tokens", "8");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.getElementById("verdict").textContent.startsWith("SLO"), null, {
    timeout: ANSWERED,
  });
  await page.waitForFunction(() => document.querySelectorAll("#misses td.id").length > 0, null, { timeout: ANSWERED });
  const met = {
    verdict: await page.textContent("#verdict"), text: await page.textContent("#text"),
    tokens: await figure(page, "times", "Tokens"), first: await figure(page, "times", "First token"),
    each: await figure(page, "times", "Per token"), targets: await page.textContent("#targets tbody"),
  };
  const shown = await page.evaluate(() => ({
    tiers: [...document.querySelectorAll("#tiers tbody td:first-child span")].map((cell) => cell.textContent),
    requests: document.querySelectorAll("#requests td.id").length,
    whys: [...document.querySelectorAll("#requests tbody tr")].map((row) => row.cells[3]?.textContent ?? ""),
    ground: getComputedStyle(document.body).backgroundColor,
    moving: document.getAnimations().length,
  }));
  const wide = await across(page);
  if (folder) await page.screenshot({ path: `${folder}/${width}-${colorScheme}.png`, fullPage: true });
  await page.fill("#ttft", "0.001");
  await page.click("#send-button");
  await page.waitForFunction(() => document.getElementById("verdict").textContent.includes("SLO missed"), null, {
    timeout: ANSWERED,
  });
  const missed = await page.textContent("#verdict");
  const offered = await figure(page, "figures", "Offered");
  const markup = await withMarkup(page);
  await context.close();
  return { width, colorScheme, ...seen, tabs, met, missed, shown, wide, offered, markup };
}

async function keys(browser) {
  const { context, page, seen } = await open(browser, {});
  await page.waitForSelector("#key-form:not([hidden])");
  const before = { board: await page.isVisible("#board"), status: await page.textContent("#status") };
  await page.fill("#key", "sk-nobody");
  await page.keyboard.press("Enter");
  await status(page, "does not know");
  await page.fill("#key", "sk-a");
  await page.keyboard.press("Enter");
  await board(page);
  const own = { status: await page.textContent("#status"), replicas: await page.isVisible("#replicas") };
  await page.reload();
  await board(page);
  await page.click("#send-button");
  await page.waitForFunction(() => document.getElementById("text").textContent !== "", null, { timeout: ANSWERED });
  const stored = await page.evaluate(() => [sessionStorage.length, localStorage.length, document.cookie]);
  await page.click("#key-forget");
  await status(page, "asks for an API key");
  const after = { board: await page.isVisible("#board"), stored: await page.evaluate(() => sessionStorage.length) };
  await context.close();
  return { ...seen, before, own, stored, after };
}

async function silence(browser) {
  const { context, page, seen } = await open(browser, {});
  await board(page);
  await page.route("**/board.json", (route) => route.abort());
  await status(page, "has not answered");
  const stale = await page.evaluate(() => document.getElementById("board").className);
  await page.unroute("**/board.json");
  await status(page, "Serving");
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
  await status(page, "Serving");
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
    found.push(await { keys, silence }[what](browser));
  }
  await browser.close();
  console.log(JSON.stringify(found));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
