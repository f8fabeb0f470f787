/**
 * Where the page is, kept in the address after `#`, so that every state can be linked to and `back` works: `#/`, `#/compare?run=a&run=b`,
 * `#/run/<id>/<view>?step=12`.
 */

/** A place by its address: `{ view, run, query }`; `run` is null outside of a run, `query` a URLSearchParams. */
export function parse(hash) {
  const [path, query = ""] = hash.replace(/^#/, "").split("?", 2);
  const parts = path.split("/").filter(Boolean);
  const params = new URLSearchParams(query);
  if (parts[0] === "run" && parts.length >= 2)
    return { view: parts[2] ?? "overview", run: decoded(parts[1]), query: params };
  return { view: parts[0] ?? "runs", run: null, query: params };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // a broken address is a run that does not exist
  }
}

/** The address of a view, for `href`. `params`: name -> value or a list; null and undefined are left out. */
export function link(view, run, params) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params ?? {})) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "") query.append(name, one);
    }
  }
  const rest = query.size ? `?${query}` : "";
  if (run !== null && run !== undefined) return `#/run/${encodeURIComponent(run)}/${view}${rest}`;
  return view === "runs" ? `#/${rest}` : `#/${view}${rest}`;
}

/** Go to an address made by `link`. */
export function go(href) {
  location.hash = href;
}

/** Note a change of what is shown in the address without showing anything anew; `back` skips it. */
export function note(href) {
  history.replaceState(null, "", href);
}
