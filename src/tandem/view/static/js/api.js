// Questions to the server; in a report the answers stand in the page itself.

const STORE = "tandem-token";
const LONGEST_WAIT_MS = 8000;
const held = document.getElementById("answers");
const answers = held === null ? null : JSON.parse(held.textContent);

export const isReport = answers !== null;

// The same text as the report's writer makes of a question: keys in order, no spaces.
function key(name, body) {
  const sorted = Object.fromEntries(Object.keys(body).sort().map((one) => [one, body[one]]));
  return JSON.stringify([name, sorted]);
}

export function keep(storage, name, value) {
  try {
    if (value !== undefined) storage().setItem(name, value);
    return storage().getItem(name);
  } catch {
    return null; // a page from a file may have no storage
  }
}

export function token(value) {
  return keep(() => sessionStorage, STORE, value);
}

function headers() {
  const given = token();
  return given ? { Authorization: `Bearer ${given}` } : {};
}

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function ask(name, body = {}) {
  if (isReport) {
    const found = answers.answers[key(name, body)];
    if (found === undefined) throw new Refused(404, "This is not in the report; `tandem view` shows it.");
    return found;
  }
  const response = await fetch(`/api/${name}`, {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers() },
    body: JSON.stringify(body),
  });
  const said = await response.json().catch(() => ({}));
  if (!response.ok) throw new Refused(response.status, said.error?.message ?? `the server answers ${response.status}`);
  return said;
}

export const reportWritten = isReport ? answers.written : "";

// Server-sent events, read by hand: an EventSource could not send the token.
export async function listen(changed, state) {
  if (isReport) return;
  for (let wait = 500; ; wait = Math.min(2 * wait, LONGEST_WAIT_MS)) {
    try {
      const response = await fetch("/api/events", { headers: headers() });
      if (!response.ok) throw new Refused(response.status, "");
      state("live");
      wait = 500;
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let rest = ""; ; ) {
        const { value, done } = await reader.read();
        if (done) break;
        const events = (rest + value).split("\n\n");
        rest = events.pop();
        const names = events.flatMap((event) => JSON.parse(event.replace(/^data: /, "")));
        if (names.length) changed(new Set(names));
      }
    } catch (error) {
      if (error.status === 401) return state("token");
    }
    state("away");
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}
