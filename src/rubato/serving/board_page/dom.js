// Makes and updates elements. Text is never parsed as markup. Nodes are kept and changed where they differ, so that
// selection and focus stay.

const SVG = "http://www.w3.org/2000/svg";

export const at = (id) => document.getElementById(id);

// tag: with its classes, `span.label.soft`. props: text, style (CSS names), and attributes; null or false removes one
export function el(tag, props = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const node = document.createElement(name);
  if (classes.length) node.className = classes.join(" ");
  return fill(set(node, props), children);
}

// An element that holds others, and has no properties of its own
export const box = (tag, ...children) => el(tag, {}, ...children);

export function svg(tag, props = {}, ...children) {
  return fill(set(document.createElementNS(SVG, tag), props), children);
}

function fill(node, children) {
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function set(node, props) {
  for (const [name, value] of Object.entries(props)) {
    if (name === "text") {
      if (node.textContent !== String(value)) node.textContent = value;
    } else if (name === "style") {
      for (const [property, to] of Object.entries(value)) {
        if (node.style.getPropertyValue(property) !== String(to)) node.style.setProperty(property, to);
      }
    } else if (value === null || value === false) {
      node.removeAttribute(name);
    } else {
      const to = value === true ? "" : String(value);
      if (node.getAttribute(name) !== to) node.setAttribute(name, to);
    }
  }
  return node;
}

// One child of `parent` for each item, in their order. make(item): the child; update(child, item): called each time.
export function keyed(parent, items, keyOf, make, update) {
  const nodes = (parent.nodes ??= new Map());
  const there = new Set(items.map(keyOf));
  for (const [key, node] of nodes) {
    if (!there.has(key)) {
      node.remove();
      nodes.delete(key);
    }
  }
  items.forEach((item, index) => {
    const key = keyOf(item);
    if (!nodes.has(key)) nodes.set(key, make(item));
    const node = nodes.get(key);
    update(node, item);
    if (parent.children[index] !== node) parent.insertBefore(node, parent.children[index] ?? null);
  });
}

// Arrow keys move the focus between the children that `selector` names; only one of them is in the Tab order.
export function arrows(parent, selector, { next, back }) {
  parent.addEventListener("keydown", (event) => {
    const step = { [next]: 1, [back]: -1, Home: -Infinity, End: Infinity }[event.key];
    const nodes = [...parent.querySelectorAll(selector)];
    const here = nodes.indexOf(document.activeElement);
    if (!step || here < 0) return;
    event.preventDefault();
    nodes[Math.max(0, Math.min(nodes.length - 1, here + step))].focus();
  });
  parent.addEventListener("focusin", (event) => {
    for (const node of parent.querySelectorAll(selector)) node.tabIndex = node === event.target ? 0 : -1;
  });
}

// Of nodes between which arrows move: the first is in the Tab order where none is.
export function enterable(parent, selector) {
  const nodes = [...parent.querySelectorAll(selector)];
  if (!nodes.some((node) => node.tabIndex === 0)) nodes[0]?.setAttribute("tabindex", "0");
}
