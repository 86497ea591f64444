// Elements are made by hand and filled by textContent only: nothing that a model wrote is ever read as HTML.

const UNSEEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028\u2029\u202a-\u202e\u2060-\u2069\ufeff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

// What steers a terminal, turns the direction of writing or is half a character is shown as its number.
export function shown(text) {
  return String(text).replace(UNSEEN, (letter) => "\\u" + letter.charCodeAt(0).toString(16).padStart(4, "0"));
}

const SVG = "http://www.w3.org/2000/svg";
const IN_SVG = new Set(["svg", "g", "path", "rect", "line", "text", "title", "marker"]);

// h("a", { class: "x", href: "#runs", on: { click: f }, style: { width: "3px" } }, "text", child, [more])
export function h(tag, attributes = {}, ...children) {
  const element = IN_SVG.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else if (name === "value" || name === "checked" || name === "disabled" || name === "selected") element[name] = value;
    else if (name === "href" && !String(value).startsWith("#")) throw new Error("links lead to this page only");
    else element.setAttribute(name, value === true ? "" : shown(value));
  }
  add(element, children);
  return element;
}

function add(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : shown(child));
  }
}

export function fill(element, ...children) {
  element.replaceChildren();
  add(element, children);
  return element;
}

export function figure(value, digits = 4) {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return String(value);
  if (Math.abs(value) < 1e-3 && value !== 0) return Number(value.toPrecision(Math.min(3, digits))).toExponential();
  const text = value.toPrecision(digits);
  return text.includes("e") ? Number(text).toExponential() : String(Number(text));
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 120) return `${figure(seconds, 3)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${figure(seconds / 3600, 3)} h` : `${figure(seconds / 86400, 3)} d`;
}

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (count >= 1024 && place < units.length - 1) [count, place] = [count / 1024, place + 1];
  return `${figure(count, 3)} ${units[place]}`;
}

export function select(choices, chosen, changed, attributes = {}) {
  const options = choices.map(([value, label]) => h("option", { value, selected: value === chosen }, label));
  return h("select", { ...attributes, on: { change: (event) => changed(event.target.value) } }, options);
}

export function table(heads, rows, attributes = {}) {
  const cells = (row) => row.map((cell) => (cell instanceof Node && cell.tagName === "TD" ? cell : h("td", {}, cell)));
  const head = h("thead", {}, h("tr", {}, heads.map((name) => (name instanceof Node ? name : h(name === "" ? "td" : "th", {}, name)))));
  return h("table", attributes, head, h("tbody", {}, rows.map((row) => h("tr", {}, cells(row)))));
}

export function note(...words) {
  return h("p", { class: "note" }, ...words);
}
