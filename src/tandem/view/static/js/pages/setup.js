// What a run was: configuration and its difference to another run's, the traced graph, environment and cost.

import { ask, isReport } from "../api.js";
import { bytes, duration, figure, fill, h, note, table } from "../dom.js";
import { move, place } from "../place.js";
import { curvesOf } from "./curves.js";
import { health } from "./runs.js";

export async function setupPage(view, state) {
  const { params } = place();
  const run = params.get("run");
  const other = params.get("other");
  const [runs, facts, config, curves] = await Promise.all([ask("runs"), ask("facts", { run }), ask("config", { run }), curvesOf(run)]);
  const names = runs.map((one) => one.name).filter((name) => name !== run);
  const against = names.length > 0 && h("select", { "aria-label": "difference to", on: { change: (event) => move({ other: event.target.value || null }) } }, h("option", { value: "" }, "difference to …"), names.map((name) => h("option", { value: name, selected: name === other }, name)));
  const graph = h("div", {});
  const draw = async () => {
    fill(graph, note("`tandem graph` reads the configuration, and executes its reward files …"));
    try {
      fill(graph, drawn((await ask("graph", { run })).mermaid));
    } catch (error) {
      fill(graph, h("p", { class: "error" }, error.message));
    }
  };
  view(
    h("div", { class: "halves" },
      h("section", {}, h("h2", {}, "environment"), environment(facts)),
      h("section", {}, h("h2", {}, "cost"), cost(facts, curves)),
    ),
    health(runs.find((one) => one.name === run)),
    !isReport && h("h2", {}, "models and stages of a step"), !isReport && h("button", { title: "executes the reward files that the run's configuration names, as a training does", on: { click: draw } }, "draw the traced graph"), graph,
    h("div", { class: "tools" }, h("h2", {}, "configuration"), !isReport && against),
    other ? await differencesView(run, other) : null,
    config.text ? h("pre", { class: "said config" }, config.text) : note("There is no config.yaml."),
  );
}

async function differencesView(run, other) {
  const found = await ask("differences", { run, other });
  if (!found.length) return note(`The configurations of ${run} and ${other} are the same.`);
  return table(["key", run, other], found.map((one) => [h("code", {}, one.key), h("code", {}, one.one), h("code", {}, one.other)]), { class: "differences" });
}

function pairs(rows) {
  const known = rows.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h("dl", { class: "facts" }, known.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

function environment({ info }) {
  const machine = info.machine ?? {};
  const gpus = (machine.gpus ?? []).map((gpu) => (typeof gpu === "string" ? gpu : gpu.name ?? JSON.stringify(gpu)));
  const git = info.git && `${String(info.git.commit ?? "").slice(0, 12)}${info.git.changed ? ", with changes" : ""}`;
  const versions = Object.entries(info.versions ?? {}).map(([name, version]) => `${name} ${version}`).join(", ");
  if (!Object.keys(info).length) return note("There is no run.json.");
  return pairs([
    ["command", info.command && `tandem ${info.command}`], ["processor", machine.cpu], ["cores", machine.cores], ["memory", machine.memory_gib && `${figure(machine.memory_gib, 3)} GiB`],
    ["GPUs", gpus.length ? gpus.join(", ") : "none"], ["system", machine.system], ["versions", versions], ["git", git], ["seed", info.seed],
    ["kernels", [info.kernels, info.training_kernels].filter(Boolean).join(", ")],
  ]);
}

function cost({ info, bytes: size }, { step, values }) {
  const sum = (name) => (values[name] ?? []).reduce((total, value) => total + (value ?? 0), 0);
  const last = (name) => (values[name] ?? []).findLast((value) => value !== null);
  const most = (name) => (values[name]?.length ? Math.max(...values[name].map((value) => value ?? 0)) : null);
  const seconds = info.seconds ?? sum("time/step_s");
  const devices = info.machine?.gpus?.length || info.machine?.cores;
  const lengths = values["completion_length/mean"] ?? [];
  const episodes = values["episodes/trained"] ?? [];
  const tokens = lengths.reduce((total, length, at) => total + (length ?? 0) * ((episodes[at] ?? 0) - (at ? episodes[at - 1] ?? 0 : 0)) * (values["groups/size"]?.[at] ?? 1), 0);
  return pairs([
    ["time", seconds ? duration(seconds) : null], ["steps", step.length ? step.at(-1) : 0],
    [info.machine?.gpus?.length ? "GPU hours" : "core hours", devices && seconds ? figure((devices * seconds) / 3600, 3) : null],
    ["trained tokens", tokens > 0 ? `about ${figure(Math.round(tokens))}` : null], ["prompts trained", last("episodes/trained")],
    ["peak memory", most("memory/peak_gib") ? `${figure(most("memory/peak_gib"), 3)} GiB` : null], ["folder", bytes(size)],
    ["resumed", info.resumed?.length ? `${info.resumed.length} times` : null],
  ]);
}

// `tandem graph --mermaid` as a picture: stages in order on the left, models on the right.
function drawn(mermaid) {
  const stages = [];
  const models = [];
  const needs = [];
  const weights = [];
  const fields = new Map();
  for (const line of mermaid.split("\n").map((one) => one.trim())) {
    let found;
    if ((found = line.match(/^(s\d+)\["(.*?)<br\/><i>(.*?)<\/i>(?:<br\/>(.*?))?"\]$/))) stages.push({ id: found[1], name: found[2], call: found[3], when: found[4] });
    else if ((found = line.match(/^(\S+)\(\["(.*?): (.*)"\]\)$/))) models.push({ id: found[1], form: found[3] });
    else if ((found = line.match(/^(\S+) -\.- (s\d+)$/))) needs.push([found[1], found[2]]);
    else if ((found = line.match(/^(s\d+) ==>\|.*\| (\S+)$/))) weights.push([found[1], found[2]]);
    else if ((found = line.match(/^(s\d+) -->\|"(.*)"\| s\d+$/))) fields.set(found[1], found[2]);
  }
  const row = 62;
  const height = row * stages.length + 20;
  const y = (id) => 30 + row * stages.findIndex((stage) => stage.id === id);
  const middle = new Map(models.map((model, at) => [model.id, (height * (at + 0.5)) / models.length]));
  const line = (x1, y1, x2, y2, kind) => h("line", { x1, y1, x2, y2, class: kind, "marker-end": kind === "edge" ? null : "url(#arrow)" });
  return h("svg", { class: "graph", viewBox: `0 0 900 ${height}`, role: "img", "aria-label": "stages and models" },
    h("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 8, markerHeight: 8, orient: "auto" }, h("path", { d: "M0 0 L8 4 L0 8 z" })),
    needs.map(([model, stage]) => line(430, y(stage), 620, middle.get(model), "edge")),
    weights.map(([stage, model]) => line(430, y(stage) + 6, 620, middle.get(model) + 6, "weights")),
    stages.slice(1).map((stage) => line(215, y(stage.id) - row + 22, 215, y(stage.id) - 22, "next")),
    stages.map((stage) => h("g", {}, h("rect", { x: 4, y: y(stage.id) - 22, width: 426, height: 44, rx: 7 }), h("text", { x: 18, y: y(stage.id) - 3, class: "name" }, stage.name, stage.when ? ` (${stage.when})` : ""), h("text", { x: 18, y: y(stage.id) + 14 }, stage.call), fields.has(stage.id) && h("text", { x: 226, y: y(stage.id) + 35, class: "fields" }, fields.get(stage.id)))),
    models.map((model) => h("g", {}, h("rect", { x: 620, y: middle.get(model.id) - 22, width: 270, height: 44, rx: 22, class: "model" }), h("text", { x: 640, y: middle.get(model.id) - 3, class: "name" }, model.id), h("text", { x: 640, y: middle.get(model.id) + 14 }, model.form))),
  );
}
