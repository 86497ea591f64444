// Where the time of a step went: which role was at which stage, and what stood idle.

import { ask } from "../api.js";
import { curvesOf } from "./curves.js";
import { duration, figure, h, note, table } from "../dom.js";
import { move, place } from "../place.js";

// metric → [role, stage]; in the order of a step. What is no part of another only.
const STAGES = [
  ["time/rows_s", "data", "read rows"], ["time/generate_s", "engine", "generate"], ["time/score_s", "rewards", "score"],
  ["time/train_s", "trainer", "train"], ["time/update_weights_s", "weights", "publish"], ["time/switch_s", "memory", "wake and sleep"],
  ["time/verify_s", "verifier", "verify"], ["time/evaluate_s", "evaluation", "evaluate"], ["time/save_s", "saver", "save"],
];
const BESIDE = [["time/judge_s", "rewards"], ["time/program_s", "programs"], ["time/tools_s", "tools"], ["time/prepare_s", "weights"], ["time/pause_s", "engine"], ["time/recompute_s", "engine"], ["time/save_background_s", "saver"], ["time/save_wait_s", "saver"], ["time/switch_optimizer_s", "memory"]];
const SHARES = [["time/engine_idle", "engine idle"], ["time/trainer_wait", "trainer waits"], ["time/overlap", "training while the engine generates"]];
const COLOURS = ["#7a5aa6", "#1f6fc0", "#9c3fb5", "#b4501a", "#1d7a44", "#7d6608", "#0f7183", "#b8305c", "#55701c"];
const MOST_BARS = 160;

export async function timelinePage(view, state) {
  const { params } = place();
  const run = params.get("run");
  const { step, values } = await curvesOf(run);
  const at = (name, row) => values[name]?.[row] ?? null;
  const rows = step.map((_, row) => row).filter((row) => at("time/step_s", row) !== null);
  state.changed = (changed) => changed.has(run) && params.get("step") === null && state.again();
  if (!rows.length) return view(note("No step has ended yet, or this kind of run records no times."));
  const there = STAGES.map((stage, number) => [...stage, COLOURS[number]]).filter(([name]) => rows.some((row) => at(name, row)));
  // Saving and evaluation are not part of time/step_s of every loop: the longer of sum and step is the whole.
  const parts = (row) => there.map(([name]) => at(name, row) ?? 0);
  const whole = (row) => Math.max(at("time/step_s", row), parts(row).reduce((a, b) => a + b, 0));
  const wanted = params.get("step") === null ? rows.at(-1) : rows.find((row) => step[row] === Number(params.get("step"))) ?? rows.at(-1);
  const ranks = await ask("timeline", { run, step: step[wanted] }).catch(() => []); // a report has those of some steps
  const place_ = rows.indexOf(wanted);
  const to = (number) => number >= 0 && number < rows.length && move({ step: step[rows[number]] });
  state.keys = { j: () => to(place_ + 1), k: () => to(place_ - 1) };
  const total = there.map(([name, role, stage, colour]) => ({ role, stage, colour, seconds: rows.reduce((sum, row) => sum + (at(name, row) ?? 0), 0) }));
  const all = rows.reduce((sum, row) => sum + whole(row), 0);
  const rest = all - total.reduce((sum, one) => sum + one.seconds, 0);
  view(
    h("div", { class: "tools" }, h("button", { title: "( k )", on: { click: state.keys.k } }, "‹"), h("b", {}, `step ${step[wanted]}`), h("button", { title: "( j )", on: { click: state.keys.j } }, "›"), h("span", { class: "quiet" }, duration(whole(wanted)))),
    ranks.length ? clock(ranks) : lanes(there, parts(wanted), whole(wanted)),
    note(ranks.length ? "Each stage where it was, from the first one of the step to the last one. Grey: the role is idle." : "This run recorded how long each stage took, not when it began: stages are laid end to end in the order of a step. Grey: the role is idle.", values["time/overlap"]?.some((share) => share > 0) ? " In asynchronous training `generate` is the wait for a batch, and the engine generates beside the training; the shares below say how much." : ""),
    h("div", { class: "tools" }, SHARES.filter(([name]) => at(name, wanted) !== null).map(([name, words]) => h("span", { class: "chip" }, `${words} `, h("b", {}, `${Math.round(100 * at(name, wanted))} %`)))),
    besides(at, wanted),
    h("h2", {}, "all steps"),
    bars(rows, there, parts, whole, step, wanted),
    h("h2", {}, "where the time of the run went"),
    table(["role", "stage", "time", "share", ""], [...total.map((one) => [one.role, one.stage, h("td", { class: "number" }, duration(one.seconds)), h("td", { class: "number" }, `${(100 * one.seconds / all).toFixed(1)} %`), share(one.seconds / all, one.colour)]), ["", "the rest", h("td", { class: "number" }, duration(rest)), h("td", { class: "number" }, `${(100 * rest / all).toFixed(1)} %`), share(rest / all, "var(--quiet)")]], { class: "times" }),
  );
}

function share(part, colour) {
  return h("td", { class: "wide" }, h("span", { class: "share", style: { width: `${100 * part}%`, background: colour } }));
}

function lanes(there, parts, whole) {
  const roles = [...new Set(there.map(([, role]) => role))];
  const starts = parts.map((_, at) => parts.slice(0, at).reduce((a, b) => a + b, 0));
  return h("div", { class: "lanes" }, roles.map((role) => h("div", { class: "lane" }, h("span", { class: "who" }, role), h("span", { class: "track" },
    there.map(([, own, stage, colour], at) => own === role && parts[at] > 0 && h("span", { class: "span", title: `${stage}: ${figure(parts[at], 3)} s`, style: { left: `${(100 * starts[at]) / whole}%`, width: `${(100 * parts[at]) / whole}%`, background: colour } }, `${stage} ${figure(parts[at], 3)} s`))))),
    axis(whole));
}

// Spans [role, stage, begin, end] of each rank, in seconds after the first one: a lane a role, in the order in which they begin.
function clock(ranks) {
  const all = ranks.flat().sort((a, b) => a[2] - b[2]);
  const whole = Math.max(...all.map(([, , , end]) => end)) || 1;
  const [roles, stages] = [1, 0].map((other) => [...new Set(all.map((span) => span[1 - other]))]);
  const bar = ([role, stage, begin, end]) => h("span", { class: "span", title: `${role}: ${stage}, ${figure(end - begin, 3)} s, from ${figure(begin, 3)} s`, style: { left: `${(100 * begin) / whole}%`, width: `${(100 * (end - begin)) / whole}%`, background: COLOURS[stages.indexOf(stage) % COLOURS.length] } }, end - begin > whole / 25 && `${stage} ${figure(end - begin, 3)} s`);
  return h("div", { class: "lanes" }, ranks.map((spans, rank) => [ranks.length > 1 && h("div", { class: "quiet" }, `rank ${rank}`), roles.filter((role) => spans.some((span) => span[0] === role)).map((role) => {
    const own = spans.filter((span) => span[0] === role).sort((a, b) => a[2] - b[2]);
    const busy = own.reduce(([sum, until], [, , begin, end]) => [sum + Math.max(0, end - Math.max(begin, until)), Math.max(end, until)], [0, 0])[0];
    return h("div", { class: "lane" }, h("span", { class: "who" }, role), h("span", { class: "track" }, own.map(bar)), h("span", { class: "busy" }, `${Math.round((100 * busy) / whole)} %`));
  })]), axis(whole));
}

function axis(whole) {
  return h("div", { class: "lane" }, h("span", { class: "who" }), h("span", { class: "between" }, h("span", {}, "0 s"), h("span", {}, duration(whole))), h("span", { class: "busy" }));
}

function besides(at, row) {
  const known = BESIDE.filter(([name]) => at(name, row));
  if (!known.length) return null;
  return h("details", {}, h("summary", {}, "parts of these stages, and what ran beside them"), table(["role", "time", "s"], known.map(([name, role]) => [role, name, h("td", { class: "number" }, figure(at(name, row), 3))])));
}

function bars(rows, there, parts, whole, step, wanted) {
  const every = Math.ceil(rows.length / MOST_BARS);
  const shown = rows.filter((row, number) => number % every === 0 || row === wanted);
  const most = Math.max(...shown.map(whole));
  return h("div", { class: "stack" }, shown.map((row) => {
    const pieces = parts(row).map((seconds, at) => h("span", { style: { height: `${(100 * seconds) / most}%`, background: there[at][3] } }));
    const rest = whole(row) - parts(row).reduce((a, b) => a + b, 0);
    return h("button", { class: row === wanted ? "column chosen" : "column", title: `step ${step[row]}: ${duration(whole(row))}`, "aria-label": `step ${step[row]}`, on: { click: () => move({ step: step[row] }) } }, h("span", { style: { height: `${(100 * rest) / most}%`, background: "var(--line)" } }), pieces.reverse());
  }));
}
