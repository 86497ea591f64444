// Servers, faults and logs: how the run ended, what was changed while it went, what was dropped and why, what it said.

import { ask, isReport } from "../api.js";
import { fill, h, note, select, table } from "../dom.js";
import { adjust, move, place } from "../place.js";
import { curvesOf } from "./curves.js";
import { plain, reasonsView } from "./samples.js";

const LEVELS = ["INFO", "WARNING", "ERROR"];

export async function logPage(view, state) {
  const { params } = place();
  const run = params.get("run");
  const name = params.get("log") ?? "log.txt";
  const [facts, said, curves] = await Promise.all([ask("facts", { run }), ask("log", { run, name }), curvesOf(run)]);
  const { info, changes } = facts;
  let level = params.get("level") ?? "INFO";
  let words = params.get("find") ?? "";
  const body = h("div", { class: "log" });
  const show = () => {
    const least = LEVELS.indexOf(level);
    const fits = (one) => (least === 0 || LEVELS.indexOf(one.level === "CRITICAL" ? "ERROR" : one.level) >= least) && `${one.who} ${one.text}`.toLowerCase().includes(words.toLowerCase());
    const entries = said.entries.filter(fits);
    fill(body, entries.length ? entries.map((one) => h("div", { class: `entry ${one.level.toLowerCase()}` }, h("span", { class: "quiet" }, one.time.slice(5), " "), one.level && one.level !== "INFO" && h("b", {}, `${one.level} `), h("span", { class: "quiet" }, one.who.replace(/^tandem\./, ""), " "), h("span", { class: "words" }, one.text))) : note("Nothing."));
  };
  const faults = Object.entries(curves.values).filter(([key]) => /^(samples\/failed|episodes\/dropped|skipped|faults|fleet|servers|rewards?\/failed)/.test(key));
  const total = faults.map(([key, column]) => [key, column.reduce((sum, value) => sum + (value ?? 0), 0), column.findLastIndex((value) => value > 0)]).filter(([, sum]) => sum > 0);
  const lost = Object.entries(curves.lost ?? {});
  const find = h("input", { type: "search", class: "filter", placeholder: "words …   ( / )", value: words, "aria-label": "words", on: { input: (event) => ((words = event.target.value), adjust({ find: words }), show()) } });
  view(
    info.error && h("section", { class: "failure" }, h("h2", {}, "the run failed"), h("pre", { class: "said" }, info.error)),
    info.resumed?.length > 0 && h("section", {}, h("h2", {}, "it went on"), table(["at", "was", "after step", "changed"], info.resumed.map((one) => [one.at, one.was, h("td", { class: "number" }, one.from ?? one.steps), (one.changed ?? []).join("; ") || "nothing"]))),
    lost.length > 0 && h("section", { class: "failure" }, h("h2", {}, "no numbers any more"), table(["metric", "since step"], lost.map(([key, step]) => [key, h("td", { class: "number" }, step)]))),
    changes.length > 0 && h("section", {}, h("h2", {}, "changed while it went"), table(["before step", "what", "value"], changes.map((one) => [h("td", { class: "number" }, one.step), plain(one.action ?? one.kind ?? ""), plain(one.value ?? one)]))),
    h("div", { class: "halves" },
      h("section", {}, h("h2", {}, "dropped prompts"), await reasonsView(run, state)),
      h("section", {}, h("h2", {}, "faults in the metrics"), total.length ? table(["metric", "sum", "last in step"], total.map(([key, sum, at]) => [key, h("td", { class: "number" }, sum.toPrecision(4) / 1), h("td", { class: "number" }, curves.step[at])])) : note("None.")),
    ),
    h("div", { class: "tools" }, h("h2", {}, "log"), said.logs.length > 1 && select(said.logs.map((one) => [one, one]), name, (value) => move({ log: value }), { "aria-label": "log" }), select(LEVELS.map((one) => [one, one === "INFO" ? "all" : one.toLowerCase()]), level, (value) => ((level = value), adjust({ level }), show()), { "aria-label": "least level" }), find, said.cut && h("span", { class: "quiet" }, "the end of it")),
    said.logs.length ? body : note("There is no log."),
  );
  show();
  body.scrollTop = body.scrollHeight;
  state.changed = (changed) => changed.has(run) && !isReport && state.again();
}
