// Curves of every metric of one or several runs.

import { ask, isReport } from "../api.js";
import { colour, Curve } from "../charts.js";
import { fill, figure, h, note } from "../dom.js";
import { adjust, link, move, place } from "../place.js";
import { badge, health, progress } from "./runs.js";

const KEY = [
  "reward/mean", "accuracy", "eval/accuracy", "eval/reward", "loss", "margin", "completion_length/mean", "truncated", "entropy",
  "kl/reference", "gap/mean", "groups/without_spread", "staleness/mean", "grad_norm", "value/explained_variance", "time/step_s",
];

const held = new Map(); // run → its curves as far as they are known

export async function curvesOf(run) {
  const known = isReport ? undefined : held.get(run);
  const said = await ask("curves", { run, after: known?.at ?? 0, file: known?.file ?? "" });
  if (known && said.fresh) {
    if (said.rows) append(known, said);
    known.at = said.at;
    if (said.rows) known.lost = Object.fromEntries(Object.entries(said.lost).map(([name, step]) => [name, known.lost[name] ?? step]));
    return known;
  }
  held.set(run, said);
  return said;
}

function append(known, more) {
  const before = known.step.length;
  for (const name of Object.keys(more.values)) known.values[name] ??= new Array(before).fill(null);
  for (const [name, column] of Object.entries(known.values)) {
    column.push(...(more.values[name] ?? new Array(more.step.length).fill(null)));
  }
  known.step.push(...more.step);
  known.time.push(...more.time);
}

// [section, names]: the key figures, then the others by the first part of their name.
function sections(names, wanted) {
  const fitting = names.filter((name) => name.includes(wanted));
  const key = KEY.filter((name) => fitting.includes(name));
  const groups = new Map();
  for (const name of fitting.filter((one) => !key.includes(one))) {
    const first = name.includes("/") ? name.split("/")[0] : "other";
    groups.set(first, [...(groups.get(first) ?? []), name]);
  }
  return [...(key.length ? [["key figures", key]] : []), ...[...groups].sort(([a], [b]) => a.localeCompare(b))];
}

class Panel {
  constructor(name, page) {
    this.name = name;
    this.page = page;
    this.value = h("span", { class: "value" });
    this.canvas = h("div", { class: "canvas" });
    const about = page.about(name);
    const words = about ? `${about[1]}\n\nWhen it looks wrong: ${about[2]}`.replaceAll("`", "") : name;
    const unit = about && about[0] !== "—" ? h("span", { class: "quiet" }, ` ${about[0]}`) : null;
    this.element = h("div", { class: "panel", title: words }, h("div", { class: "title" }, h("b", {}, name), unit, this.value), this.canvas);
    new IntersectionObserver((entries, watcher) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      watcher.disconnect();
      this.draw();
    }).observe(this.element);
  }

  series() {
    return this.page.runs.map((run, place) => {
      const { step, time, values } = this.page.curves[place];
      const column = values[this.name] ?? [];
      const xs = this.page.byTime ? time : step;
      const there = xs.map((x, at) => [x, column[at]]).filter(([x, y]) => x !== null && y !== null && y !== undefined);
      return { name: run, place, x: there.map(([x]) => x), y: there.map(([, y]) => y) };
    });
  }

  draw() {
    const series = this.series();
    const { weight, zoom } = this.page;
    if (this.curve) this.curve.draw(series, weight, zoom);
    else this.curve = new Curve(this.canvas, { series, weight, zoom, zoomed: this.page.zoomed, isTime: this.page.byTime });
    this.curve.tell = (plot, smoothed) => this.tell(plot, smoothed);
    this.tell(this.curve.plot, weight > 0);
  }

  // The values under the cursor, or the last ones.
  tell(plot, smoothed) {
    const at = plot.cursor.idx;
    const stride = smoothed ? 2 : 1;
    const told = this.page.runs.map((_, place) => {
      const column = plot.data[1 + stride * place];
      const value = at === null || at === undefined ? column?.findLast((one) => one !== null && one !== undefined) : column[at];
      const lost = (at === null || at === undefined) && this.page.curves[place].lost?.[this.name];
      return h("span", {}, this.page.runs.length > 1 && h("span", { class: "dot", style: { background: colour(place) } }), " ", lost ? `no number since step ${lost}` : figure(value));
    });
    const where = at === null || at === undefined || this.page.byTime ? null : h("span", { class: "quiet" }, `step ${plot.data[0][at]} `);
    fill(this.value, where, told.map((one) => [one, " "]));
  }
}

export async function curvesPage(view, state) {
  const { params } = place();
  const runs = params.getAll("run");
  const [all, ...curves] = await Promise.all([ask("runs"), ...runs.map(curvesOf)]);
  const zoom = params.get("from") ? { min: Number(params.get("from")), max: Number(params.get("to")) } : null;
  const page = {
    runs, curves, zoom,
    weight: Number(params.get("smooth") ?? 0),
    byTime: params.get("x") === "time",
    about: (name) => curves.map((one) => one.about[name]).find(Boolean),
    zoomed: (range) => {
      page.zoom = range;
      adjust({ from: range?.min.toPrecision(8), to: range?.max.toPrecision(8) });
      redraw();
    },
  };
  const names = [...new Set(curves.flatMap((one) => Object.keys(one.values)))].sort();
  let panels = [];
  const redraw = () => panels.filter((panel) => panel.curve).forEach((panel) => panel.draw());
  const body = h("div", {});
  const show = () => {
    const closed = new Set((place().params.get("closed") ?? "").split(",").filter(Boolean));
    panels = [];
    fill(
      body,
      sections(names, place().params.get("metric") ?? "").map(([title, members]) => {
        const grid = h("div", { class: "panels" });
        const open = () => {
          const made = members.map((name) => new Panel(name, page));
          panels.push(...made);
          fill(grid, made.map((panel) => panel.element));
        };
        const toggled = (event) => {
          event.target.open ? closed.delete(title) : closed.add(title);
          adjust({ closed: [...closed].join(",") });
          if (event.target.open && !grid.children.length) open();
        };
        if (!closed.has(title)) open();
        return h("details", { open: !closed.has(title), on: { toggle: toggled } }, h("summary", {}, title, h("span", { class: "quiet" }, ` ${members.length}`)), grid);
      }),
    );
  };
  const others = all.map((run) => run.name).filter((name) => !runs.includes(name));
  const add = h("select", { "aria-label": "compare with", on: { change: (event) => move({ run: [...runs, event.target.value] }) } }, h("option", {}, "compare with …"), others.map((name) => h("option", { value: name }, name)));
  const legend = runs.map((run, number) => {
    const facts = all.find((one) => one.name === run);
    const drop = h("button", { class: "small", title: "take it out", on: { click: () => move({ run: runs.filter((one) => one !== run) }) } }, "×");
    return h("span", { class: "chip" }, h("span", { class: "dot", style: { background: colour(number) } }), h("a", { href: link("curves", { run }) }, run), facts && badge(facts), facts && progress(facts), runs.length > 1 && drop);
  });
  const slider = h("input", {
    type: "range", min: 0, max: 0.98, step: 0.02, value: page.weight, "aria-label": "smoothing",
    on: { input: (event) => ((page.weight = Number(event.target.value)), adjust({ smooth: page.weight || null }), redraw()) },
  });
  const search = h("input", {
    type: "search", class: "filter", placeholder: "metric …   ( / )", value: params.get("metric") ?? "", "aria-label": "metrics with",
    on: { input: (event) => (adjust({ metric: event.target.value }), show()) },
  });
  const axis = h("button", { on: { click: () => move({ x: page.byTime ? null : "time", from: null, to: null }) } }, page.byTime ? "over steps" : "over time");
  const back = h("button", { on: { click: () => page.zoomed(null) } }, "show all");
  view(
    h("div", { class: "tools" }, legend, others.length > 0 && add),
    h("div", { class: "tools" }, search, h("label", {}, "smooth ", slider), axis, back, h("span", { class: "quiet" }, "drag to zoom, double click to show all, hover a title for its meaning")),
    runs.map((run) => health(all.find((one) => one.name === run), runs.length > 1)),
    curves.some((one) => one.every > 1) && note("This run is long: every ", figure(curves[0].every), "th row is drawn."),
    names.length ? body : note("No step has ended yet."),
  );
  show();
  state.changed = async (changed) => {
    if (!runs.some((run) => changed.has(run))) return;
    const known = names.length;
    page.curves = await Promise.all(runs.map(curvesOf));
    new Set(page.curves.flatMap((one) => Object.keys(one.values))).size !== known ? state.again() : redraw();
  };
  const resized = () => panels.forEach((panel) => panel.curve?.resize());
  addEventListener("resize", resized);
  state.leave = () => removeEventListener("resize", resized);
}
