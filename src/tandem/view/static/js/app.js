// The frame: title, tabs, keys, theme, and which page the hash names.

import { ask, isReport, keep, listen, reportWritten, token } from "./api.js";
import { fill, h, note } from "./dom.js";
import { curvesPage } from "./pages/curves.js";
import { logPage } from "./pages/log.js";
import { promptsPage } from "./pages/prompts.js";
import { badge, runsPage } from "./pages/runs.js";
import { samplesPage } from "./pages/samples.js";
import { setupPage } from "./pages/setup.js";
import { timelinePage } from "./pages/timeline.js";
import { tokensPage } from "./pages/tokens.js";
import { go, link, place } from "./place.js";

const PAGES = { runs: runsPage, curves: curvesPage, samples: samplesPage, tokens: tokensPage, prompts: promptsPage, time: timelinePage, setup: setupPage, log: logPage };
const TABS = [["curves", "Curves"], ["samples", "Samples"], ["prompts", "Prompts"], ["time", "Time"], ["setup", "Setup"], ["log", "Log and faults"]];
const KEYS = [["1 … 6", "the pages of a run"], ["r", "the list of runs"], ["j  k", "next and previous step"], ["a", "samples of all steps"], ["q", "the next quantity of tokens"], ["←  →", "from token to token"], ["/", "filter"], ["Esc", "back"], ["t", "dark or light"], ["?", "these keys"]];
const THEME = "tandem-theme";

const header = h("header", { class: "top" });
const main = h("main", {});
const help = h("dialog", { class: "help" }, h("h2", {}, "Keys"), h("dl", {}, KEYS.map(([key, words]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, words)])), h("form", { method: "dialog" }, h("button", {}, "close")));
const dot = h("span", { class: "live", title: "" });
let state = {};
let turn = 0;

function theme(next) {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = keep(() => localStorage, THEME, next) ?? (dark ? "dark" : "light");
  document.documentElement.dataset.theme = next ?? now;
  return next ?? now;
}

function switchTheme() {
  theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  show();
}

async function drawHeader(page, run, mine) {
  const tabs = run ? TABS.map(([name, title], at) => h("a", { class: page === name || (page === "tokens" && name === "samples") ? "tab here" : "tab", href: link(name, { run }), title: `( ${at + 1} )` }, title)) : [];
  const facts = run ? (await ask("runs")).find((one) => one.name === run) : null;
  if (mine !== turn) return;
  fill(
    header,
    h("a", { class: "brand", href: "#runs" }, "tandem"),
    run && h("h1", { class: "run" }, run, " ", facts && badge(facts)),
    h("nav", {}, tabs),
    h("span", { class: "right" }, isReport ? h("span", { class: "quiet" }, `written ${reportWritten}`) : dot, h("button", { class: "small", title: "dark or light ( t )", on: { click: switchTheme } }, "◐"), h("button", { class: "small", title: "keys ( ? )", on: { click: () => help.showModal() } }, "?")),
  );
}

function askForToken() {
  const box = h("input", { type: "password", "aria-label": "token", autocomplete: "off" });
  const enter = (event) => {
    event.preventDefault();
    token(box.value.trim());
    location.reload();
  };
  fill(main, h("form", { class: "token-form", on: { submit: enter } }, note("This server needs its token. It is in the file that `tandem view` names in the terminal."), box, h("button", {}, "enter")));
}

async function show() {
  const mine = ++turn;
  const { page, params } = place();
  if (params.size === 0 && page.startsWith("token=")) {
    token(page.slice("token=".length));
    return go("runs");
  }
  state.leave?.();
  state = { keys: {}, again: show, isHere: () => mine === turn };
  const own = state;
  const view = (...children) => mine === turn && fill(main, children);
  document.title = [params.get("run"), page === "runs" ? "runs" : page, "Tandem"].filter(Boolean).join(" · ");
  document.documentElement.dataset.page = page;
  try {
    await drawHeader(page, params.get("run"), mine);
    await (PAGES[page] ?? runsPage)(view, own);
  } catch (error) {
    if (mine !== turn) return;
    if (error.status === undefined) console.error(error);
    if (error.status === 401) askForToken();
    else fill(main, h("p", { class: "error" }, error.message));
  }
  if (mine === turn) document.documentElement.dataset.ready = String(mine);
}

addEventListener("hashchange", show);
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.matches?.("input:not([type=checkbox]):not([type=range]), textarea, select");
  if (typing) return event.key === "Escape" && event.target.blur();
  const { page, params } = place();
  const run = params.get("run");
  const tab = TABS[Number(event.key) - 1];
  if (state.keys?.[event.key]) state.keys[event.key]();
  else if (tab && run) go(tab[0], { run });
  else if (event.key === "r") go("runs");
  else if (event.key === "Escape" && page !== "runs") history.back();
  else if (event.key === "t") switchTheme();
  else if (event.key === "?") help.showModal();
  else if (event.key === "/") document.querySelector("input[type=search]")?.focus();
  else return;
  event.preventDefault();
});

fill(document.getElementById("app"), header, main, help);
theme();
show();
listen(
  (changed) => (place().page === "runs" ? show() : state.changed?.(changed)),
  (now) => {
    dot.className = `live ${now}`;
    dot.title = { live: "live: the page follows the runs", away: "the server does not answer; trying again", token: "" }[now];
  },
);
