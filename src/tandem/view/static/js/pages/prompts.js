// The success of each prompt over time: one row a prompt, one column a few steps.

import { ask } from "../api.js";
import { figure, h, note, select } from "../dom.js";
import { go, move, place } from "../place.js";

const ORDERS = [["seen", "seen most often"], ["learnt", "learnt"], ["forgotten", "forgotten"], ["worst", "worst now"], ["best", "best now"]];
const PAGE = 100;

export async function promptsPage(view, state) {
  const { params } = place();
  const run = params.get("run");
  const order = params.get("order") ?? "seen";
  const offset = Number(params.get("offset") ?? 0);
  const said = await ask("prompts", { run, order, offset });
  const values = said.rows.flatMap((row) => Object.values(row.cells).map((cell) => cell[0]));
  const [low, high] = [Math.min(0, ...values), Math.max(1, ...values)];
  const open = ([, , step, group]) => () => go("samples", { run, step, group });
  const rows = said.rows.map((row) => {
    const cells = said.edges.map((edge, at) => {
      const cell = row.cells[at];
      if (!cell) return h("span", { class: "cell" });
      const share = (cell[0] - low) / (high - low || 1);
      const words = `step ${cell[2]}: ${figure(cell[0], 3)} over ${cell[1]} recorded samples`;
      return h("button", { class: "cell there", title: words, "aria-label": words, style: { background: `hsl(${Math.round(8 + 125 * share)} 62% var(--shade))` }, on: { click: open(cell) } });
    });
    const last = Object.entries(row.cells).at(-1)[1];
    return h("div", { class: "row" }, h("span", { class: "clip words", title: row.text }, row.text || "(empty)"), h("span", { class: "cells" }, cells), h("span", { class: "number" }, figure(last[0], 3)));
  });
  const to = (value) => () => move({ offset: value || null });
  const pager = said.count > PAGE && h("div", { class: "tools" }, h("button", { disabled: offset === 0, on: { click: to(offset - PAGE) } }, "‹ before"), `${offset + 1} to ${offset + said.rows.length} of ${said.count}`, h("button", { disabled: offset + PAGE >= said.count, on: { click: to(offset + PAGE) } }, "next ›"));
  const width = said.edges.length > 1 ? said.edges[1] - said.edges[0] : 1;
  view(
    h("div", { class: "tools" }, h("label", {}, "order ", select(ORDERS, order, (value) => move({ order: value, offset: null }))), h("span", { class: "quiet" }, `${said.count} prompts; mean accuracy (or reward) of the recorded samples, a column is ${width === 1 ? "a step" : `${width} steps`}; click a cell for its group`), said.pending > 0 && h("span", { class: "badge running" }, `${said.pending} steps are still being read`)),
    rows.length ? h("div", { class: "heat" }, h("div", { class: "row head" }, h("span", { class: "words" }), h("span", { class: "cells between" }, h("span", {}, said.edges[0]), h("span", {}, `step ${said.edges.at(-1)}`)), h("span", { class: "number" }, "now")), rows) : note(said.pending ? "The records are being read …" : "No samples are recorded."),
    pager,
  );
  if (said.pending) setTimeout(() => state.isHere() && state.again(), 1500);
}
