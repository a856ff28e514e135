/** Client of the server's HTTP interface: one method per path, errors as sentences, live changes by server-sent events.
 * `kintsugi/page/schema.py` describes every answer.
 */

/** A request that failed; `status` is 0 where the server could not be reached. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.name = "ApiError";
    this.status = status;
  }
}

async function request(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { credentials: "same-origin", cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer. Is `kintsugi page` still running?", 0);
  }
  const text = await response.text();
  let body;
  try {
    body = text ? JSON.parse(text) : null;
  } catch {
    throw new ApiError(`The server answered ${path} with something that is not JSON.`, response.status);
  }
  if (!response.ok) throw new ApiError(body?.error ?? `The server answered with status ${response.status}.`, response.status);
  return body;
}

function query(params = {}) {
  const given = Object.entries(params).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return given.length ? `?${new URLSearchParams(given)}` : "";
}

const of = (id) => `/api/runs/${encodeURIComponent(id)}`;

export const api = {
  /** GET any path of the interface: api.get("/api/runs", { limit: 3 }, { signal }). */
  get: (path, params, { signal } = {}) => request(path + query(params), { signal }),
  post: (path, body) =>
    request(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) }),

  session: () => api.get("/api/session"),
  runs: (options) => api.get("/api/runs", {}, options),
  run: (id, options) => api.get(of(id), {}, options),
  metrics: (id, { keys, points = 1200 } = {}, options) =>
    api.get(`${of(id)}/metrics`, { keys: keys?.join(","), points }, options),
  learning: (id, options) => api.get(`${of(id)}/learning`, {}, options),
  samples: (id, filter, options) => api.get(`${of(id)}/samples`, filter, options),
  sample: (id, index, options) => api.get(`${of(id)}/samples/${index}`, {}, options),
  timeline: (id, range, options) => api.get(`${of(id)}/timeline`, range, options),
  traceUrl: (id) => `${of(id)}/trace`,
  health: (id, options) => api.get(`${of(id)}/health`, {}, options),
  incidents: (id, options) => api.get(`${of(id)}/incidents`, {}, options),
  incident: (id, incident, options) => api.get(`${of(id)}/incidents/${encodeURIComponent(incident)}`, {}, options),
  logs: (id, filter, options) => api.get(`${of(id)}/logs`, filter, options),
  serviceLevels: (id, options) => api.get(`${of(id)}/service_levels`, {}, options),
  compare: (ids, options) => api.get("/api/compare", { runs: ids.join(",") }, options),
  action: (id, name, body) => api.post(`${of(id)}/${name}`, body),
  events,
};

const EVERYTHING = ["runs", "state", "metrics", "samples", "timeline", "health", "incidents", "learning", "logs"];
const FIRST_RETRY_MS = 500;
const LONGEST_RETRY_MS = 8000;

/** Follow the changes of a run, or of all runs where `id` is null: `onChange(what, runs)`, `onIncident(incident)`,
 * `onState("live" | "waiting")`. The connection is made again with back-off as long as the page is open; after one was
 * lost, everything counts as changed. Returns { close() }.
 */
function events(id, { onChange, onIncident = () => {}, onState = () => {} }) {
  const path = id === null ? "/api/events" : `${of(id)}/events`;
  let source = null;
  let timer = null;
  let delay = FIRST_RETRY_MS;
  let lost = false;
  connect();
  return {
    close() {
      clearTimeout(timer);
      source?.close();
    },
  };

  function connect() {
    source = new EventSource(path);
    source.addEventListener("open", () => {
      delay = FIRST_RETRY_MS;
      onState("live");
      if (lost) onChange(EVERYTHING, []);
      lost = false;
    });
    source.addEventListener("change", (event) => {
      const { what, runs } = JSON.parse(event.data);
      onChange(what, runs ?? []);
    });
    source.addEventListener("incident", (event) => onIncident(JSON.parse(event.data)));
    source.addEventListener("error", () => {
      source.close();
      lost = true;
      onState("waiting");
      timer = setTimeout(connect, delay * (0.75 + Math.random() / 2));
      delay = Math.min(LONGEST_RETRY_MS, delay * 2);
    });
  }
}
