// The samples of a step by group, a group's answers side by side, and a search over all steps.

import { ask, isReport } from "../api.js";
import { fill, figure, h, note, select, table } from "../dom.js";
import { go, link, move, place } from "../place.js";

export const PAGE = 100;
const WHOLE_STEP = 1000;
const ORDERS = [["reward", "best reward first"], ["advantage", "largest advantage first"], ["tokens", "longest first"], ["group", "by group"], ["step", "newest first"]];
const FILTER_HELP =
  'Such as: truncated reward > 0 · failed: timeout · not right tokens >= 200 · source: gsm8k · "words in the text". ' +
  "Flags: truncated, dropped, trained, failed, right, wrong, greedy. Figures: reward, advantage, accuracy, tokens, step, group, sample. Texts: failed, dropped, source, stop.";
const FOLD_CHARACTERS = 4000;

// Red for the worst, green for the best of what is shown.
export function shade(value, low, high) {
  if (value === null || value === undefined) return "var(--line)";
  const share = high > low ? (value - low) / (high - low) : 0.5;
  return `hsl(${Math.round(8 + 125 * share)} 62% var(--shade))`;
}

function extent(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  return [Math.min(...known), Math.max(...known)];
}

export async function samplesPage(view, state) {
  const { params } = place();
  const run = params.get("run");
  const steps = await ask("steps", { run });
  if (!steps.length) {
    view(note("No samples are recorded (yet). A run records some of each step unless tracking.trajectories_per_step is 0."));
    state.changed = (changed) => changed.has(run) && state.again();
    return;
  }
  const wanted = params.get("step");
  const step = wanted === "all" ? -1 : wanted === null ? steps.at(-1) : Number(wanted);
  const group = params.get("group");
  const filter = params.get("filter") ?? "";
  const tools = [stepTools(steps, step, run, state), !isReport && filterTools(filter, step)];
  if (group !== null) return groupView(view, state, { run, step, group: Number(group), tools });
  const order = params.get("order") ?? (step < 0 ? "step" : "group");
  const offset = Number(params.get("offset") ?? 0);
  const limit = step < 0 ? PAGE : WHOLE_STEP;
  const said = await ask("samples", { run, step, filter, order, offset, limit });
  const sort = h("div", { class: "tools" }, !isReport && h("label", {}, "order ", select(ORDERS, order, (value) => move({ order: value, offset: null }))), h("span", { class: "quiet" }, count(said, step)));
  const body = step < 0 || filter ? sampleTable(run, said.rows) : groupList(run, step, said.rows);
  view(...tools, sort, said.rows.length ? body : note("No sample fits."), pager(said, offset, limit), h("div", { class: "reasons" }));
  if (step < 0 && said.pending) setTimeout(() => state.isHere() && state.again(), 1500);
  state.changed = (changed) => changed.has(run) && wanted === null && state.again();
}

function count(said, step) {
  const where = step < 0 ? "of all steps" : `of step ${step}`;
  const stopped = said.stopped_at === null ? "" : `, searched down to step ${said.stopped_at} in the time that there is; name a step to search before it: step < ${said.stopped_at}`;
  const pending = said.pending ? `; ${said.pending} steps are still being read` : "";
  return `${said.fit} samples ${where}${stopped}${pending}`;
}

function stepTools(steps, step, run, state) {
  const at = steps.indexOf(step);
  const to = (place) => place >= 0 && place < steps.length && move({ step: steps[place], group: null, offset: null });
  const near = () => (step < 0 ? steps.length - 1 : steps.findLastIndex((one) => one <= step));
  state.keys = { j: () => to(at < 0 ? near() : at + 1), k: () => to(at < 0 ? near() : at - 1), a: () => move({ step: "all", group: null }) };
  const slider = h("input", { type: "range", class: "steps", min: 0, max: steps.length - 1, value: at < 0 ? near() : at, "aria-label": "step", on: { change: (event) => to(Number(event.target.value)) } });
  return h(
    "div", { class: "tools" },
    h("button", { title: "the step before ( k )", on: { click: state.keys.k } }, "‹"), slider,
    h("button", { title: "the next step ( j )", on: { click: state.keys.j } }, "›"),
    h("b", {}, step < 0 ? "all steps" : `step ${step}`), h("span", { class: "quiet" }, `${steps.length} recorded, ${steps[0]} to ${steps.at(-1)}`),
    !isReport && h("button", { title: "all steps ( a )", on: { click: state.keys.a } }, "all steps"),
    h("a", { href: link("samples", { run }) }, "newest"),
  );
}

function filterTools(filter, step) {
  const box = h("input", { type: "search", class: "filter wide", placeholder: 'filter: truncated reward > 0 "words" …   ( / )', value: filter, title: FILTER_HELP, "aria-label": "filter" });
  const apply = () => move({ filter: box.value, group: null, offset: null, step: step < 0 ? "all" : step });
  box.addEventListener("keydown", (event) => event.key === "Enter" && apply());
  const quick = (words) => h("button", { class: "small", on: { click: () => ((box.value = words), apply()) } }, words);
  return h("div", { class: "tools" }, box, h("button", { on: { click: apply } }, "filter"), ["truncated reward > 0", "dropped", "failed", "wrong"].map(quick), filter && h("button", { class: "small", on: { click: () => ((box.value = ""), apply()) } }, "clear"));
}

function pager(said, offset, limit) {
  if (said.fit <= limit && !offset) return null;
  const to = (value) => () => move({ offset: value || null });
  return h("div", { class: "tools" }, h("button", { disabled: offset === 0, on: { click: to(Math.max(0, offset - limit)) } }, "‹ before"), `${offset + 1} to ${offset + said.rows.length} of ${said.fit}`, h("button", { disabled: offset + limit >= said.fit, on: { click: to(offset + limit) } }, "next ›"));
}

// The user's words of a templated prompt: the end of it is what tells prompts apart.
function brief(text) {
  const turns = text.split(/<\|im_start\|>(?:user|human)\n|<\|user\|>\n?|\[INST\]|<start_of_turn>user\n/);
  return turns.at(-1).replace(/<\|[a-z_]+\|>(assistant)?|<end_of_turn>|<start_of_turn>model/g, " ").trim();
}

function sampleTable(run, rows) {
  const [low, high] = extent(rows.map((row) => row.reward));
  const lines = rows.map((row) => [
    h("td", { class: "number" }, h("a", { href: link("samples", { run, step: row.step, group: row.group }) }, `${row.step} · ${row.group}`)),
    h("td", { class: "number", style: { "border-left": `4px solid ${shade(row.reward, low, high)}` } }, figure(row.reward, 3)),
    h("td", { class: "number" }, figure(row.advantage, 3)), h("td", { class: "number" }, figure(row.tokens)), end(row),
    h("td", { class: "text" }, h("div", { class: "quiet clip" }, brief(row.prompt)), h("div", { class: "clip" }, row.completion), row.dropped && h("div", { class: "error" }, row.why)),
  ]);
  return table(["step · group", "reward", "advantage", "tokens", "end", "prompt and answer"], lines, { class: "samples" });
}

function end(row) {
  if (row.dropped) return h("span", { class: "badge failed", title: row.why }, row.dropped);
  return h("span", { class: row.stop.includes("length") ? "badge warning" : "quiet" }, row.stop === "length" ? "truncated" : row.stop);
}

function groupList(run, step, rows) {
  const groups = new Map();
  for (const row of rows) groups.set(row.group, [...(groups.get(row.group) ?? []), row]);
  const [low, high] = extent(rows.map((row) => row.reward));
  const lines = [...groups].map(([group, members]) => {
    const rewards = members.map((row) => row.reward).filter((value) => value !== null);
    const mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
    const spread = rewards.length > 1 && Math.max(...rewards) === Math.min(...rewards);
    const marks = [...members].sort((a, b) => b.reward - a.reward).map((row) => h("span", { class: "mark", title: `reward ${figure(row.reward)}`, style: { background: shade(row.reward, low, high) } }));
    const failed = members[0].failures ? members[0].failures.split("\n").length : 0;
    const open = () => go("samples", { run, step, group });
    return h(
      "tr", { class: "open", on: { click: open } },
      h("td", { class: "number" }, h("a", { href: link("samples", { run, step, group }) }, group)), h("td", {}, marks),
      h("td", { class: "number" }, figure(mean, 3)),
      h("td", { class: "text" }, h("div", { class: "clip" }, brief(members[0].prompt))),
      h("td", {}, members.map((row) => row.dropped && end(row)), members.some((row) => !row.dropped && row.stop.includes("length")) && h("span", { class: "badge warning" }, "truncated"), failed > 0 && h("span", { class: "badge failed", title: members[0].failures }, `${failed} failed`), spread && h("span", { class: "badge", title: "all recorded samples have the same reward" }, "no spread")),
    );
  });
  const head = h("thead", {}, h("tr", {}, ["group", "recorded answers", "mean reward", "prompt", "remarks"].map((name) => h("th", {}, name))));
  return h("table", { class: "groups" }, head, h("tbody", {}, lines));
}

async function groupView(view, state, { run, step, group, tools }) {
  const samples = await ask("group", { run, step, group });
  if (!samples.length) return view(...tools, note(`Step ${step} has no record of group ${group}.`));
  const by = place().params.get("sort") ?? "reward";
  const value = (sample) => sample[by] ?? -Infinity;
  const sorted = [...samples].sort((a, b) => value(b) - value(a));
  const first = samples[0];
  const expected = first.answer === null || first.answer === undefined ? null : h("div", {}, h("span", { class: "quiet" }, "expected answer "), h("code", {}, plain(first.answer)));
  const failures = (first.failures ?? []).map((words) => h("div", { class: "error" }, `a sample of this group failed: ${words}`));
  const [low, high] = extent(samples.map((sample) => sample.reward));
  view(
    ...tools,
    h("div", { class: "tools" }, h("a", { href: link("samples", { run, step }) }, `‹ step ${step}`), h("h2", {}, `group ${group}`), first.source && h("span", { class: "quiet" }, first.source),
      h("label", {}, "sort by ", select([["reward", "reward"], ["advantage", "advantage"], ["accuracy", "accuracy"], ["tokens", "length"]], by, (name) => move({ sort: name })))),
    h("details", { class: "prompt", open: true }, h("summary", {}, "prompt as the model got it"), media(samples), folded(first.prompt || first.messages?.map((turn) => `${turn.role}: ${plain(turn.content)}`).join("\n") || "")),
    expected, failures,
    h("div", { class: "cards" }, sorted.map((sample) => card(run, step, sample, low, high))),
    !isReport && (await againView({ run, step, group })),
  );
  state.keys.Escape = () => go("samples", { run, step });
}

// What the weights of another step, or of another run, answered to the same prompt.
async function againView({ run, step, group }) {
  const { params } = place();
  const other = params.get("of") ?? run;
  const [runs, said] = await Promise.all([ask("runs"), ask("again", { run, step, group, other })]);
  const [otherStep, otherGroup] = (params.get("with") ?? "").split(":").map(Number);
  const choices = said.groups.filter(([at, number]) => other !== run || at !== step || number !== group).map(([at, number, samples, success]) => [`${at}:${number}`, `step ${at}: ${figure(success, 3)} over ${samples} samples`]);
  const cards = params.get("with") ? await ask("group", { run: other, step: otherStep, group: otherGroup }) : [];
  const [low, high] = extent(cards.map((sample) => sample.reward));
  return h("section", { class: "again" },
    h("div", { class: "tools" }, h("h2", {}, "the same prompt at another time"), runs.length > 1 && select(runs.map((one) => [one.name, one.name]), other, (name) => move({ of: name, with: null }), { "aria-label": "run" }),
      choices.length ? select([["", "choose a step …"], ...choices], params.get("with") ?? "", (value) => move({ with: value || null }), { "aria-label": "step of the same prompt" }) : h("span", { class: "quiet" }, "It was not recorded there."),
      said.pending > 0 && h("span", { class: "badge running" }, `${said.pending} steps are still being read`)),
    cards.length > 0 && h("div", { class: "cards" }, cards.map((sample) => card(other, otherStep, sample, low, high))));
}

// The images and sounds of a group, each once.
function media(samples) {
  const seen = new Map();
  for (const one of samples.flatMap((sample) => sample.media ?? [])) if (!seen.has(one.number) || one.url) seen.set(one.number, one);
  return [...seen.values()].map((one) => {
    if (one.missing || !String(one.url).startsWith("data:")) return h("div", { class: "error" }, one.missing ?? "a medium is missing");
    return one.kind === "image" ? h("img", { class: "medium", src: one.url, alt: `image ${one.number}` }) : h("audio", { controls: true, src: one.url });
  });
}

export function plain(value) {
  return typeof value === "string" ? value : JSON.stringify(value, null, 1);
}

export function folded(text) {
  if (text.length <= FOLD_CHARACTERS) return h("pre", { class: "said" }, text);
  const more = h("button", { class: "small", on: { click: () => more.replaceWith(text.slice === undefined ? "" : h("span", {}, text.slice(FOLD_CHARACTERS))) } }, `${text.length - FOLD_CHARACTERS} more characters`);
  return h("pre", { class: "said" }, text.slice(0, FOLD_CHARACTERS), more);
}

function card(run, step, sample, low, high) {
  const parts = Object.entries(sample.rewards ?? {}).map(([name, value]) => h("div", {}, h("span", { class: "quiet" }, `${name} `), figure(value)));
  const versions = [...new Set((sample.versions ?? []).flat().map((one) => one.version))];
  const facts = [
    ["advantage", figure(sample.advantage, 3)], ["accuracy", figure(sample.accuracy, 3)], ["tokens", figure(sample.tokens)],
    ["end", [...new Set(sample.stop_reason ?? [])].join(", ") || "–"], ["weights", versions.length ? `version ${versions.join(", ")}` : "–"],
    ["read as", sample.extracted_answer],
  ].filter(([, value]) => value !== "–" && value !== null && value !== undefined);
  const judges = Object.entries(sample.judges ?? {}).map(([name, words]) => h("details", {}, h("summary", {}, name), folded(plain(words))));
  return h(
    "article", { class: "card" },
    h("header", { style: { "border-top-color": shade(sample.reward, low, high) } }, h("b", { class: "reward" }, figure(sample.reward)), parts,
      sample.dropped && h("div", { class: "error" }, `dropped: ${sample.dropped}${sample.why ? `: ${sample.why}` : ""}`)),
    h("dl", {}, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    sample.in_loss === false && h("span", { class: "badge" }, "not in the loss"), sample.greedy && h("span", { class: "badge" }, "greedy"),
    conversation(sample), judges,
    sample.sample_id !== null && h("a", { class: "button", href: link("tokens", { run, step, group: sample.group, line: sample.line }) }, "token by token"),
  );
}

// What follows the prompt: the last answer, or all turns after the user's first where tools or several turns are.
function conversation(sample) {
  const chats = sample.conversations?.length ? sample.conversations : [sample.messages ?? []];
  if (chats.length > 1) return branches(chats.map((turns, number) => ({ turns, number })), 0);
  const first = chats[0].findIndex((turn) => turn.role === "assistant");
  return first < 0 ? folded(sample.completion ?? "") : chats[0].slice(first).map(turnView);
}

// The conversations of a session as a tree: the turns that they share once, then each branch with what it alone has.
function branches(chats, from) {
  const next = (chat, at) => JSON.stringify(chat.turns[at]);
  let at = from;
  while (chats.length > 1 && chats.every((chat) => chat.turns.length > at && next(chat, at) === next(chats[0], at))) at += 1;
  if (chats.length === 1) return chats[0].turns.slice(from).map(turnView);
  const forks = Map.groupBy(chats, (chat) => next(chat, at));
  const title = (members) => (members.length > 1 ? `conversations ${members.map(({ number }) => number + 1).join(", ")}` : `conversation ${members[0].number + 1}`);
  if (forks.size === 1) return chats[0].turns.slice(from).map(turnView); // the same from beginning to end
  return [chats[0].turns.slice(from, at).map(turnView), [...forks.values()].map((members) => h("div", { class: "branch" }, h("div", { class: "quiet" }, `${title(members)}, from turn ${at + 1} on`), branches(members, at)))];
}

function turnView(turn) {
  const calls = (turn.tool_calls ?? []).map((call) => h("details", { class: "call" }, h("summary", {}, `calls ${plain(call.function?.name ?? call.name ?? "a tool")}`), folded(plain(call.function?.arguments ?? call))));
  if (turn.role === "tool") return h("details", { class: "call" }, h("summary", {}, `tool answers${turn.name ? ` (${plain(turn.name)})` : ""}`), folded(plain(turn.content ?? "")));
  const said = turn.content === null || turn.content === undefined || turn.content === "" ? (calls.length ? null : h("span", { class: "quiet" }, "(nothing)")) : folded(plain(turn.content));
  return h("div", { class: `turn ${turn.role === "assistant" ? "assistant" : "other"}` }, turn.role !== "assistant" && h("div", { class: "quiet" }, plain(turn.role)), said, calls);
}

// Prompts that were not trained, by reason.
export async function reasonsView(run, state) {
  const { rows: reasons, pending } = await ask("reasons", { run });
  if (pending) setTimeout(() => state.isHere() && state.again(), 1500);
  if (!reasons.length) return note(pending ? `${pending} steps are still being read …` : "No dropped prompt is recorded.");
  return table(["dropped because", "recorded", "last in step"], reasons.map((one) => [h("td", {}, isReport ? one.reason : h("a", { href: link("samples", { run, step: "all", filter: `dropped: "${one.reason}"` }) }, one.reason)), h("td", { class: "number" }, one.count), h("td", { class: "number" }, one.step)]));
}
