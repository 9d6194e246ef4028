// Words for numbers, and elements for words. Whatever comes from the server goes in as text, never as markup.

export const NONE = "–";

// no-break spaces: a number and its unit stay on one line
export function duration(ms) {
  if (ms === null || ms === undefined) return NONE;
  const size = Math.abs(ms);
  if (size > 0 && size < 0.1) return `${ms.toFixed(3)}\u00a0ms`;
  if (size < 10) return `${ms.toFixed(1)}\u00a0ms`;
  if (size < 1000) return `${Math.round(ms)}\u00a0ms`;
  if (size < 10_000) return `${(ms / 1000).toFixed(2)}\u00a0s`;
  if (size < 60_000) return `${(ms / 1000).toFixed(1)}\u00a0s`;
  return inSeconds(Math.round(ms / 1000));
}

function inSeconds(seconds) {
  const size = Math.abs(seconds);
  const sign = seconds < 0 ? "-" : "";
  if (size < 60) return `${seconds}\u00a0s`;
  if (size < 3600) return `${sign}${Math.floor(size / 60)}\u00a0min ${size % 60}\u00a0s`;
  return `${sign}${Math.floor(size / 3600)}\u00a0h ${Math.floor((size % 3600) / 60)}\u00a0min`;
}

export const wholeSeconds = (ms) => inSeconds(Math.round(ms / 1000));

export const ago = (ms) => (ms < 1000 ? "just now" : `${wholeSeconds(ms)} ago`);

export const count = (n) => (n === null || n === undefined ? NONE : n.toLocaleString("en"));

export const counted = (n, what) => `${count(n)} ${what}${n === 1 ? "" : "s"}`;

// 99.96 % is not 100 %
export function percent(share) {
  if (share === null || share === undefined) return NONE;
  return share === 1 ? "100\u00a0%" : `${(Math.floor(share * 1000) / 10).toFixed(1)}\u00a0%`;
}

export function slo(times) {
  if (!times) return "";
  const names = [["TTFT", times.ttft_ms], ["TPOT", times.tpot_ms], ["e2e", times.e2e_ms], ["pause", times.max_pause_ms]];
  const stated = names.filter(([, ms]) => (ms ?? null) !== null).map(([name, ms]) => `${name} ${duration(ms)}`);
  return stated.length ? stated.join(", ") : "best effort";
}

export function element(name, text = "", kind = "") {
  const made = document.createElement(name);
  if (text !== "") made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

// parts: [share of the whole, kind]; about: the same in words
function bar(parts, about) {
  const made = element("div", "", "bar");
  made.setAttribute("role", "img");
  made.setAttribute("aria-label", about);
  for (const [share, kind] of parts) {
    const part = element("i", "", kind);
    part.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
    made.append(part);
  }
  return made;
}

// A cell is {text, note, kind, title, bar, about}; columns are {label, kind}. Rows keep their elements as long as they
// are there, and cells that say the same are left alone: what is selected stays so.
export class Table {
  constructor(table, columns, none) {
    this.columns = columns;
    this.none = none;
    this.rows = new Map();
    table.setAttribute("role", "table"); // a table still where its rows are laid out as blocks
    const head = table.createTHead();
    head.setAttribute("role", "rowgroup");
    const line = head.insertRow();
    line.setAttribute("role", "row");
    for (const { label, kind } of columns) {
      const cell = element("th", label, kind);
      cell.scope = "col";
      cell.setAttribute("role", "columnheader");
      line.append(cell);
    }
    this.body = table.createTBody();
    this.body.setAttribute("role", "rowgroup");
  }

  // items: [key, cells]
  show(items) {
    const filled = items.length ? items : [["", null]];
    const there = new Set(filled.map(([key]) => key));
    for (const [key, row] of this.rows) {
      if (!there.has(key)) {
        row.line.remove();
        this.rows.delete(key);
      }
    }
    filled.forEach(([key, cells], at) => {
      let row = this.rows.get(key);
      if (!row) {
        row = { line: element("tr"), said: [] };
        row.line.setAttribute("role", "row");
        this.rows.set(key, row);
      }
      this.fill(row, cells);
      if (this.body.rows[at] !== row.line) this.body.insertBefore(row.line, this.body.rows[at] ?? null);
    });
  }

  fill(row, cells) {
    if (cells === null) {
      if (row.line.cells.length) return;
      const cell = element("td", this.none, "none");
      cell.colSpan = this.columns.length;
      cell.setAttribute("role", "cell");
      row.line.append(cell);
      return;
    }
    cells.forEach((said, at) => {
      const whole = JSON.stringify(said);
      if (row.said[at] === whole) return;
      row.said[at] = whole;
      const { label, kind = "" } = this.columns[at];
      const cell = row.line.cells[at] ?? row.line.insertCell();
      cell.className = kind;
      cell.dataset.label = label;
      cell.setAttribute("role", "cell");
      const text = element("span", said.text, said.kind ?? "");
      if (said.title) text.title = said.title;
      cell.replaceChildren(text);
      if (said.bar) cell.append(bar(said.bar, said.about));
      if (said.note) cell.append(element("small", said.note));
    });
  }
}

// items: [label, text, note, kind]
export function figures(list, items) {
  const whole = JSON.stringify(items);
  if (list.dataset.said === whole) return;
  list.dataset.said = whole;
  list.replaceChildren(...items.map(([label, text, note, kind]) => {
    const group = element("div");
    const value = element("dd", text, kind ?? "");
    if (note) value.append(element("small", note));
    group.append(element("dt", label), value);
    return group;
  }));
}
