// The state of the page and of the user's choices, and the callbacks that draw it again when it changes. The history is
// kept here, in rings; the server sends only new slices.

export const view = {
  board: null, // the last answer of /board.json
  window: "300", // a key of each tier's `windows`
  tier: null, // the filter of all lists
  replica: null,
  lateOnly: false,
  search: "",
  moment: null, // the slice under the pointer
};

const drawCallbacks = [];
export const onRedraw = (draw) => drawCallbacks.push(draw);
export function redraw() {
  if (view.board) for (const draw of drawCallbacks) draw(view.board);
}

export function choose(name, value) {
  view[name] = view[name] === value ? null : value;
  redraw();
}

// The slices that the charts show: groups of `size` slices that begin at `starts`; the current slice is left out.
export function span() {
  const { slice_seconds: seconds, slices } = history;
  const wanted = view.window === "300" ? Math.round(300 / seconds) : slices;
  const size = Math.max(1, Math.round(wanted / 60));
  const last = Math.floor((history.now - 1) / size) * size;
  const starts = [];
  for (let start = last - wanted + size; start <= last; start += size) starts.push(start);
  return { starts, size, seconds };
}

export const ago = (slice) => Math.max(0, (history.now - slice) * history.slice_seconds);

class Ring {
  constructor(slices) {
    this.values = new Array(slices).fill(null);
    this.at = new Array(slices).fill(-1);
  }

  set(slice, value) {
    this.values[slice % this.at.length] = value;
    this.at[slice % this.at.length] = slice;
  }

  get(slice) {
    return this.at[slice % this.at.length] === slice ? this.values[slice % this.at.length] : null;
  }
}

class History {
  clear() {
    this.rings = new Map();
    this.now = 0;
    this.up = 0; // seconds since the server's start
    this.slices = 180;
    this.slice_seconds = 5;
  }

  get since() {
    return Math.max(0, this.now - 1);
  }

  take(data) {
    const { first, slices, slice_seconds, tiers, replicas } = data.history;
    if (data.serving_seconds < this.up) this.clear(); // another server than before
    Object.assign(this, { slices, slice_seconds, up: data.serving_seconds });
    for (const [kind, of] of Object.entries({ tiers, replicas })) {
      for (const [name, columns] of Object.entries(of)) {
        const { causes = {}, ...others } = columns;
        for (const [column, values] of Object.entries({ ...others, ...prefixed(causes) })) {
          const ring = this.ring(kind, name, column);
          values.forEach((value, index) => ring.set(first + index, value));
          this.now = Math.max(this.now, first + values.length - 1);
        }
      }
    }
  }

  ring(kind, name, column) {
    const key = JSON.stringify([kind, name, column]);
    if (!this.rings.has(key)) this.rings.set(key, new Ring(this.slices));
    return this.rings.get(key);
  }

  // The sum over a group of slices; null where none has a value
  sum(kind, name, column, start, size) {
    const ring = this.ring(kind, name, column);
    let total = null;
    for (let slice = start; slice < Math.min(start + size, this.now); slice += 1) {
      const value = ring.get(slice);
      if (value !== null) total = (total ?? 0) + value;
    }
    return total;
  }

  last(kind, name, column, start, size) {
    const ring = this.ring(kind, name, column);
    for (let slice = Math.min(start + size, this.now + 1) - 1; slice >= start; slice -= 1) {
      if (ring.get(slice) !== null) return ring.get(slice);
    }
    return null;
  }

  // The causes of a tier's misses
  causes(tier) {
    return [...this.rings.keys()].map((key) => JSON.parse(key))
      .filter(([kind, name, column]) => kind === "tiers" && name === tier && column.startsWith("cause "))
      .map(([, , column]) => column.slice(6));
  }
}

const prefixed = (causes) => Object.fromEntries(Object.entries(causes).map(([name, all]) => [`cause ${name}`, all]));

export const history = new History();
history.clear();
