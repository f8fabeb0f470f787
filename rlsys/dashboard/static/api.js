/** Asks the server: `rlsys/dashboard/responses.py` says what for, and what comes back. */

/** The error of a server that did not answer as it should. `address` is what was asked for, `status` 0 if nobody answered. */
function refusal(address, status, message) {
  return Object.assign(new Error(message), { address, status });
}

/**
 * The answer of `/api/<name>`. `params`: name -> value, or a list of them; null and undefined are left out. Throws a `refusal`, and AbortError once
 * `signal` is aborted.
 */
export async function get(name, params, signal) {
  const address = `api/${name}${queryOf(params ?? {})}`;
  let response;
  try {
    response = await fetch(address, { signal, headers: { accept: "application/json" } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw refusal(address, 0, "nobody answers: is `rlsys dashboard` still running?");
  }
  if (!response.ok) throw refusal(address, response.status, await explain(response));
  return response.json();
}

async function explain(response) {
  const isJson = (response.headers.get("content-type") ?? "").includes("json");
  const said = isJson ? (await response.json()).error : null;
  if (response.status === 401)
    return said ?? "open the address with its token, as `rlsys dashboard` printed it";
  return said ?? `the server answered ${response.status} ${response.statusText}`;
}

function isGone(run) {
  return get("run", { run }).then(
    () => false,
    ({ status }) => status === 404,
  );
}

function queryOf(params) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined) query.append(name, one);
    }
  }
  return query.size ? `?${query}` : "";
}

/**
 * Of several questions only the newest may be answered on the page: `const isNewest = newest(); const answer = await get(…); if (isNewest())
 * draw(answer);` with `newest = numbered()`.
 */
export function numbered() {
  let num = 0;
  return () => {
    num += 1;
    const mine = num;
    return () => mine === num;
  };
}

const RETRY_MS = 2000;

/**
 * Listen to what a run writes, or with `run` null to the list of runs. `onChange()` is called when there is something new, also after the connection
 * was lost and found again; `onState("live" | "lost" | "gone")` when that changes: `gone` if the server is there and has no such run any more.
 * Returns what ends it. A page that nobody sees does not listen.
 */
export function stream(run, onChange, onState) {
  const address = `api/stream${queryOf({ run })}`;
  let source = null;
  let timer = null;
  let wasLost = false;

  function open() {
    source = new EventSource(address);
    source.onopen = () => {
      onState("live");
      if (wasLost) onChange();
      wasLost = false;
    };
    source.addEventListener("change", () => onChange());
    source.onerror = () => {
      wasLost = true;
      if (source.readyState === EventSource.CLOSED) retry();
      else onState("lost"); // and it tries again by itself
    };
  }
  async function retry() {
    timer = setTimeout(open, RETRY_MS);
    onState(run !== null && (await isGone(run)) ? "gone" : "lost");
  }
  function close() {
    clearTimeout(timer);
    source?.close();
    source = null;
  }
  function onVisibility() {
    close();
    if (document.hidden) wasLost = true;
    else open();
  }
  document.addEventListener("visibilitychange", onVisibility);
  if (!document.hidden) open();
  return () => {
    document.removeEventListener("visibilitychange", onVisibility);
    close();
  };
}
