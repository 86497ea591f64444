// An answer token by token, coloured by a chosen quantity; the exact values under the mouse.

import { ask } from "../api.js";
import { fill, figure, h, note, select, table } from "../dom.js";
import { adjust, go, link, place } from "../place.js";

const NAMES = {
  gap: "log-probability gap, trainer − engine", kl: "distance to the reference, log p − log p_ref", advantages: "advantage", entropy: "entropy",
  versions: "version of the weights", rollout_logprobs: "log-probability, engine", proximal_logprobs: "log-probability, trainer",
  reference_logprobs: "log-probability, reference", teacher_logprobs: "log-probability, teacher", token_rewards: "reward of the token",
  values: "value before the token", returns: "return", correction: "weight of the correction", loss_weights: "weight in the loss",
  expired: "expired", dropped: "weight 0 by a rule", step_end: "end of a judged step", step_right: "the step is right",
};
const FIRST = ["gap", "rollout_logprobs", "advantages"];

// A colour for a value: blue below zero, orange above; of quantities with one sign only, stronger is farther from zero.
function scale(values) {
  const known = values.filter((value) => value !== null);
  const low = Math.min(...known);
  const high = Math.max(...known);
  const most = Math.max(Math.abs(low), Math.abs(high)) || 1;
  const whole = known.every(Number.isInteger) && high - low < 12;
  const colour = (value) => {
    if (value === null || value === undefined) return "transparent";
    if (whole && high > low) return `hsl(${(200 + 137.5 * (value - low)) % 360} 70% 50% / 0.35)`;
    return `hsl(${value < 0 ? 212 : 24} 85% 52% / ${(0.06 + 0.5 * Math.min(1, Math.abs(value) / most)).toFixed(3)})`;
  };
  return { low, high, colour };
}

export async function tokensPage(view, state) {
  const { params } = place();
  const [run, step, line] = [params.get("run"), Number(params.get("step")), Number(params.get("line"))];
  const first = Number(params.get("first") ?? 0);
  const said = await ask("tokens", { run, step, line, first });
  const back = link("samples", { run, step, group: params.get("group") });
  state.keys = { Escape: () => go("samples", { run, step, group: params.get("group") }) };
  const head = h("div", { class: "tools" }, h("a", { href: back }, `‹ step ${step}, group ${params.get("group")}`));
  if (!said.trajectories.length) return view(head, note("Of this sample no tokens are recorded."));
  const columns = Object.keys(NAMES).filter((name) => said.trajectories[0].columns[name]);
  let chosen = params.get("by") ?? FIRST.find((name) => columns.includes(name)) ?? columns[0];
  const tip = h("div", { class: "tip", role: "status" });
  const strips = h("div", {});
  const legend = h("span", { class: "legend" });
  const paint = () => {
    adjust({ by: chosen });
    const all = said.trajectories.flatMap((one) => (one.columns[chosen] ?? []).filter((_, at) => one.trained[at]));
    const { low, high, colour } = scale(all.length ? all : [0]);
    const samples = [low, low / 2, 0, high / 2, high].filter((value, at, list) => list.indexOf(value) === at).sort((a, b) => a - b);
    fill(legend, samples.map((value) => h("span", { class: "swatch", style: { background: colour(value) } }, figure(value, 3))));
    strips.querySelectorAll(".token.trained").forEach((element) => {
      const one = said.trajectories[element.dataset.trajectory];
      element.style.background = colour(one.columns[chosen]?.[element.dataset.at]);
    });
  };
  let under = null;
  const tell = (element) => {
    if (!element) return;
    under?.classList.remove("under");
    under = element;
    under.classList.add("under");
    const one = said.trajectories[element.dataset.trajectory];
    const at = Number(element.dataset.at);
    const rows = columns.map((name) => [h("span", { class: name === chosen ? "chosen" : "quiet" }, NAMES[name]), h("td", { class: "number" }, figure(one.columns[name][at], 5))]);
    const state = one.trained[at] ? "" : " · not trained";
    fill(tip, h("b", {}, JSON.stringify(one.pieces[at])), h("span", { class: "quiet" }, ` token ${first + at}, id ${one.ids[at]}${state}`), one.trained[at] ? table([], rows) : null);
    tip.classList.add("there");
    const box = element.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${box.bottom + tip.offsetHeight + 8 < innerHeight ? box.bottom + 4 : box.top - tip.offsetHeight - 4}px`;
  };
  fill(strips, said.trajectories.map((one, number) => strip(one, number, said.trajectories.length)));
  const trained = () => [...strips.querySelectorAll(".token.trained")];
  const stride = (by) => () => {
    const all = trained();
    tell(all[Math.max(0, Math.min(all.length - 1, all.indexOf(under) + by))]);
    under?.scrollIntoView({ block: "nearest" });
  };
  Object.assign(state.keys, { ArrowRight: stride(1), ArrowLeft: stride(-1) });
  strips.addEventListener("mouseover", (event) => tell(event.target.closest?.(".token")));
  strips.addEventListener("mouseout", () => tip.classList.remove("there"));
  const picker = select(columns.map((name) => [name, NAMES[name]]), chosen, (name) => ((chosen = name), paint()));
  state.keys.q = () => ((chosen = columns[(columns.indexOf(chosen) + 1) % columns.length]), (picker.value = chosen), paint());
  const context = h("button", { on: { click: () => strips.classList.toggle("without-context") } }, "context");
  const more = said.trajectories[0];
  const next = more.first + more.ids.length < more.length && h("a", { href: link("tokens", { run, step, group: params.get("group"), line, first: more.first + more.ids.length, by: chosen }) }, "next tokens ›");
  const times = said.times.length > 0 && h("details", {}, h("summary", {}, `${said.times.length} request${said.times.length === 1 ? "" : "s"} to the engine`), table(["in the queue, s", "first token after, s", "end after, s"], said.times.map((row) => row.map((value) => h("td", { class: "number" }, figure(value, 3))))));
  view(head, h("div", { class: "tools" }, h("label", { title: "next quantity ( q )" }, "colour by ", picker), legend, context, next, h("span", { class: "quiet" }, "hover a token for its values")), said.note && note(said.note), strips, times, tip);
  paint();
}

function strip(one, number, count) {
  const box = h("div", { class: "strip" });
  const trained = one.trained.reduce((sum, value) => sum + value, 0);
  const title = h("div", { class: "quiet" }, count > 1 ? `trajectory ${number + 1} of ${count}, ` : "", `${one.length} tokens, ${trained} trained`);
  one.pieces.forEach((piece, at) => {
    const words = piece.replaceAll("\n", "↵\n");
    box.append(h("span", { class: one.trained[at] ? "token trained" : "token", "data-trajectory": number, "data-at": at }, words || "∅"));
  });
  return [title, box];
}
