// The list of runs: state, progress and last figures; the ones that are ticked are compared.

import { ask } from "../api.js";
import { duration, figure, h, note, table } from "../dom.js";
import { go, link } from "../place.js";

const FIGURES = ["reward/mean", "accuracy", "eval/accuracy", "eval/reward", "loss", "truncated", "entropy", "time/step_s"];

export function badge(run) {
  const words = { elsewhere: `on ${run.host}, silent ${duration(run.silent_s)}`, unknown: "no run.json" };
  return h("span", { class: `badge ${run.status}` }, words[run.status] ?? run.status);
}

// What was told of a run's health: in which step, the sign, and the remedy. Nothing if it is well.
export function health(run, named = false) {
  if (!run?.health.length) return null;
  const lines = run.health.map((one) => [h("td", { class: "number" }, one.step), one.name, one.sign, one.remedy]);
  return h("details", { class: "health" }, h("summary", {}, named && `${run.name} `, h("span", { class: "badge warning" }, `${run.health.length} sign${run.health.length === 1 ? "" : "s"} of sickness`), h("span", { class: "quiet" }, ` ${[...new Set(run.health.map((one) => one.name))].join(", ")}`)), table(["step", "sickness", "sign", "what to do"], lines));
}

export function progress(run) {
  if (!run.total) return h("span", {}, `${run.steps}`);
  const share = Math.min(1, run.steps / run.total);
  const bar = h("span", { class: "bar" }, h("span", { style: { width: `${100 * share}%` } }));
  return h("span", { class: "progress" }, `${run.steps} / ${run.total}`, bar);
}

export async function runsPage(view) {
  const runs = await ask("runs");
  const chosen = new Set();
  const compare = h("button", { disabled: true, on: { click: () => go("curves", { run: [...chosen] }) } }, "Compare");
  const tick = (name) => (event) => {
    event.target.checked ? chosen.add(name) : chosen.delete(name);
    compare.disabled = chosen.size < 2;
    compare.textContent = chosen.size < 2 ? "Compare" : `Compare ${chosen.size} runs`;
  };
  const names = FIGURES.filter((name) => runs.some((run) => run.metrics[name] !== undefined)).slice(0, 6);
  const newest = [...runs].sort((a, b) => String(b.started ?? "").localeCompare(String(a.started ?? "")));
  const rows = newest.map((run) => [
    h("input", { type: "checkbox", "aria-label": `compare ${run.name}`, on: { change: tick(run.name) } }),
    h("td", { class: "name" }, h("a", { href: link("curves", { run: run.name }) }, run.name), run.error && h("div", { class: "error" }, run.error)),
    [badge(run), run.health.length > 0 && h("span", { class: "badge warning", title: run.health.map((one) => `step ${one.step}: ${one.name}: ${one.sign}; ${one.remedy}`).join("\n") }, `${run.health.length} ⚠`)],
    progress(run),
    ...names.map((name) => h("td", { class: "number" }, run.metrics[name] === undefined ? "" : figure(run.metrics[name]))),
    h("td", { class: "number" }, run.checkpoints.length),
    h("td", { class: "number" }, duration(run.seconds ?? (run.started ? (Date.now() - Date.parse(run.started)) / 1000 : null))),
    h("td", { class: "quiet number" }, (run.started ?? "").slice(0, 16).replace("T", " ")),
  ]);
  const right = (name) => h("th", { class: "number" }, name);
  const heads = ["", "run", "state", "steps", ...names.map(right), right("checkpoints"), right("took"), right("began")];
  view(
    h("div", { class: "tools" }, h("h1", {}, `${runs.length} run${runs.length === 1 ? "" : "s"}`), compare),
    runs.length ? table(heads, rows, { class: "runs" }) : note("There is no run here yet. It appears when one begins."),
  );
}
