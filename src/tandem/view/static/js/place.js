// The place in the page is the hash of its address: #samples?run=addition/grpo&step=3. A link to it leads back to it.

export function place() {
  const [page, query] = location.hash.slice(1).split("?");
  return { page: page || "runs", params: new URLSearchParams(query ?? "") };
}

export function link(page, params = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "") query.append(name, one);
    }
  }
  const text = query.toString().replaceAll("%2F", "/");
  return `#${page}${text ? `?${text}` : ""}`;
}

export function go(page, params) {
  location.hash = link(page, params);
}

// The same page with some parameters changed, without a new entry in the history of the browser.
export function adjust(changes) {
  const { page, params } = place();
  for (const [name, value] of Object.entries(changes)) {
    value === null || value === undefined || value === "" ? params.delete(name) : params.set(name, value);
  }
  const text = params.toString().replaceAll("%2F", "/");
  history.replaceState(null, "", `#${page}${text ? `?${text}` : ""}`);
}

// The same page with some parameters changed, as a new place.
export function move(changes) {
  const { page, params } = place();
  const all = {};
  for (const name of params.keys()) all[name] = params.getAll(name);
  go(page, { ...all, ...changes });
}
