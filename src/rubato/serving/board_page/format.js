// Formats numbers for people. Times are in milliseconds; null means unknown.

export const NONE = "–";
const NARROW = "\u202f"; // between a number and its unit

export function duration(ms) {
  if (ms === null || ms === undefined) return NONE;
  if (ms < 0) return `−${duration(-ms)}`;
  if (ms < 100) return `${ms < 10 ? ms.toFixed(1) : Math.round(ms)}${NARROW}ms`;
  if (ms < 1000) return `${Math.round(ms)}${NARROW}ms`;
  const s = ms / 1000;
  if (s < 100) return `${s < 10 ? s.toFixed(1) : Math.round(s)}${NARROW}s`;
  const minutes = s / 60;
  if (minutes < 100) return `${Math.round(minutes)}${NARROW}min`;
  return `${Math.round(minutes / 60)}${NARROW}h`;
}

export function percent(share) {
  return share === null || share === undefined ? NONE : `${Math.round(100 * share)}${NARROW}%`;
}

// Attainment, rounded down above 99 %: 99.97 is not 100
export function attained(share) {
  const of100 = 100 * (share ?? 0);
  return of100 <= 99 || of100 === 100 ? percent(share) : `${(Math.floor(of100 * 10) / 10).toFixed(1)}${NARROW}%`;
}

export function count(number) {
  if (number === null || number === undefined) return NONE;
  if (number >= 1e6) return `${(number / 1e6).toFixed(1)}${NARROW}M`;
  if (number >= 1e4) return `${(number / 1e3).toFixed(number < 1e5 ? 1 : 0)}${NARROW}k`;
  return number % 1 && number < 10 ? number.toFixed(1) : String(Math.round(number));
}

export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

// An SLO in words.
export function promise(slo) {
  if (!slo) return "SLO as each request states it";
  const { ttft_ms: ttft, tpot_ms: tpot, e2e_ms: e2e } = slo;
  const words = [
    ttft === null ? "" : `first token ${duration(ttft)}`,
    tpot === null ? "" : `${ttft === null ? "" : "then "}${duration(tpot)} a token`,
    e2e === null ? "" : `all in ${duration(e2e)}`,
  ].filter(Boolean).join(", ");
  return words || "best effort";
}

// A server's address, as short as people name it.
export function host({ url, id }) {
  if (url) return url.replace(/^https?:\/\//, "");
  return /^\d+$/.test(id) ? `engine ${id}` : id;
}

export const shortId = (id) => id.replace(/^(chatcmpl|cmpl|resp|msg)[-_]/, "").slice(0, 12);
