// The live page: asks the API every few seconds, with the token of who looks, and shows the answers.
const $ = (id) => document.getElementById(id);
const SHOWN_METRICS = 8;
const EVERY_MS = 2000, SURE_MS = 4000;
const api = { token: "", user: null };
const shown = { selected: null, overview: null, wanted: 0 };

// ---- asking ---------------------------------------------------------------------------------------------------------
class Refused extends Error {}

async function ask(method, path) {
  const answer = await fetch(path, { method, headers: { Authorization: `Bearer ${api.token}` }, cache: "no-store", credentials: "omit" });
  const body = await answer.json();
  if (answer.status === 401) throw new Refused(body.error);
  if (!answer.ok) throw new Error(body.error);
  return body;
}

function keepToken(token) {
  api.token = token;
  // For this tab only, and never in a cookie: no other page can have the browser send it.
  if (token) sessionStorage.setItem("token", token); else sessionStorage.removeItem("token");
}

function askWho(why) {
  keepToken("");
  $("content").hidden = $("leave").hidden = true;
  $("sign-in").hidden = false;
  $("who").textContent = "";
  if (why) $("sign-in-why").textContent = why;
  $("token").focus();
}

$("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  keepToken($("token").value.trim());
  $("token").value = "";
  refresh();
});
$("leave").onclick = () => { location.hash = ""; askWho("You are signed out."); };

// ---- elements -------------------------------------------------------------------------------------------------------
function make(name, text, attributes = {}) {
  const element = document.createElement(name);
  if (text !== undefined && text !== null) element.textContent = text;
  for (const [key, value] of Object.entries(attributes)) element[key] = value;
  return element;
}

// Rows stay the elements that they are, so that nothing moves under a pointer: only what has changed is written.
function table(id, columns, rows, cellsOf, keyOf) {
  const element = $(id);
  if (!element.tHead) {
    const head = element.createTHead().insertRow();
    for (const column of columns) head.append(make("th", column, { scope: "col" }));
    element.append(make("tbody"));
    element.rowsByKey = new Map();
  }
  const known = element.rowsByKey, body = element.tBodies[0], keys = new Set(rows.map((row) => String(keyOf(row))));
  for (const [key, row] of known) if (!keys.has(key)) { row.remove(); known.delete(key); }
  rows.forEach((row, index) => {
    const key = String(keyOf(row)), cells = cellsOf(row), text = JSON.stringify(cells.map((cell) => cell?.key ?? cell));
    let line = known.get(key);
    if (!line) { line = make("tr"); known.set(key, line); }
    if (line.said !== text) {
      line.said = text;
      line.replaceChildren(...cells.map((cell, i) => {
        const box = make(i === 0 ? "th" : "td");
        if (i === 0) box.scope = "row";
        if (cell?.build) cell.build(box); else box.textContent = cell ?? "";
        return box;
      }));
    }
    if (body.children[index] !== line) body.insertBefore(line, body.children[index] ?? null);
  });
}

const when = (time) => (time ? new Date(time * 1000).toLocaleString([], { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hour12: false }) : "");
const hours = (seconds) => (seconds / 3600).toLocaleString([], { maximumFractionDigits: 1 });

// ---- the queue ------------------------------------------------------------------------------------------------------
const may = (job) => api.user && (api.user.admin || api.user.user === job.owner);
const ACTIONS = { submitted: ["hold", "cancel"], held: ["release", "cancel"], admitted: ["cancel"], running: ["cancel"] };

function jobCells(job) {
  const acts = may(job) ? ACTIONS[job.state] ?? [] : [];
  const state = job.outcome ?? job.state;
  return [
    { key: [job.name, job.id, places.has(job.pipeline_id)], build: (box) => {
      const button = make("button", `${job.name} (${job.id})`, { className: "link", onclick: () => select(job.id) });
      if (places.has(job.pipeline_id)) { box.className = "job"; box.style.setProperty("--c", `var(--job${places.get(job.pipeline_id) % 8})`); }
      box.append(button);
    } },
    `${job.team} / ${job.owner}`,
    { key: state, build: (box) => box.append(make("span", state, { className: `state ${state}` })) },
    job.gpus, job.priority, when(job.since),
    { key: [job.step, job.steps], build: (box) => {
      if (!job.steps) return;
      box.append(make("progress", undefined, { max: job.steps, value: job.step }), `${job.step}/${job.steps}`);
    } },
    job.reason,
    { key: [job.id, ...acts], build: (box) => {
      box.className = "actions";
      for (const verb of acts) box.append(action(job, verb));
    } },
  ];
}

// What cannot be taken back is asked for twice.
function action(job, verb) {
  const button = make("button", verb);
  button.dataset.verb = verb;
  button.onclick = async () => {
    if (verb === "cancel" && !button.classList.contains("sure")) {
      button.classList.add("sure");
      button.textContent = "really cancel?";
      setTimeout(() => { button.classList.remove("sure"); button.textContent = verb; }, SURE_MS);
      return;
    }
    button.disabled = true;
    try {
      await ask("POST", `/v1/jobs/${job.id}/${verb}`);
      alarm("");
    } catch (error) { alarm(error.message); }
    button.disabled = false;
    await refresh();
  };
  return button;
}

const COLUMNS = ["job", "team / owner", "state", "GPUs", "priority", "since", "step", "", ""];

function showQueue() {
  const overview = shown.overview;
  if (!overview) return;
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean), mine = $("mine").checked;
  const fits = (job) => (!mine || job.owner === api.user?.user)
    && words.every((word) => `${job.name} ${job.id} ${job.team} ${job.owner} ${job.state} ${job.reason}`.toLowerCase().includes(word));
  const jobs = overview.jobs.filter(fits);
  table("queue", COLUMNS, jobs, jobCells, (job) => job.id);
  const hidden = overview.jobs.length - jobs.length;
  const more = [overview.more_jobs ? `${overview.more_jobs} more wait behind these` : "", hidden ? `${hidden} do not fit the filter` : ""];
  $("queue-more").textContent = overview.jobs.length ? more.filter(Boolean).join("; ") : "Nothing is queued. rlix submit job.yaml queues a job.";
}
$("filter").oninput = $("mine").onchange = showQueue;

function showOverview(overview, pool) {
  shown.overview = overview;
  api.user = pool;
  $("who").textContent = `${pool.user}, team ${pool.team}${pool.admin ? ", admin" : ""}`;
  $("pool").textContent = pool.why ? "No pool now" : `${pool.devices} GPUs`;
  document.title = `RLix: ${pool.running} running, ${pool.waiting} waiting`;
  const leased = overview.leased, tiles = [
    ["GPUs under a lease", pool.devices ? `${(100 * leased / pool.devices).toFixed(0)} %` : "–", `${leased} of ${pool.devices}`],
    ["Running", pool.running, "jobs of the queue"], ["Waiting", pool.waiting, "jobs of the queue"],
    ["Beside it", overview.programs.length + overview.more_programs, "jobs and programs"],
  ];
  $("tiles").replaceChildren(...tiles.map(([label, value, remark]) => {
    const tile = make("div", undefined, { className: "tile" });
    tile.append(make("p", label, { className: "label" }), make("p", String(value), { className: "value" }), make("p", remark, { className: "remark" }));
    return tile;
  }));
  trouble([pool.why ? `No pool: ${pool.why}` : "", ...overview.trouble].filter(Boolean).join("\n"));
  showQueue();
  const waits = overview.waits.map((wait) => make("li", wait.text));
  if (overview.more_waits) waits.push(make("li", `and ${overview.more_waits} more`));
  $("waits").replaceChildren(...(waits.length ? waits : [make("li", "nobody")]));
  $("programs-card").hidden = !overview.programs.length;
  table("programs", ["program", "step", "GPUs", "does", ""], overview.programs, (program) => [
    `${program.name} (${program.pipeline_id})`, program.step ? (program.steps ? `${program.step}/${program.steps}` : program.step) : "",
    program.gpus, program.phase, Object.entries(program.metrics).slice(0, SHOWN_METRICS).map(([name, value]) => `${name} ${short(value)}`).join(", "),
  ], (program) => program.pipeline_id);
  $("programs-more").textContent = overview.more_programs ? `and ${overview.more_programs} more` : "";
  $("usage-card").hidden = !overview.usage.length;
  $("ended-card").hidden = !overview.ended.length;
  const most = Math.max(...overview.usage.map((row) => row.given_s), 1);
  table("usage", ["team", "GPU-hours", "× its share", ""], overview.usage, (row) => [
    row.team, hours(row.given_s), pool.times_share[row.team]?.toFixed(1) ?? "–",
    { key: [row.given_s, row.busy_s, row.switching_s, most], build: (box) => {
      box.className = "bar";
      const parts = { busy: row.busy_s, switching: row.switching_s, held: Math.max(0, row.given_s - row.busy_s - row.switching_s) };
      for (const [name, seconds] of Object.entries(parts)) {
        const part = make("span", undefined, { className: name });
        part.style.width = `${100 * seconds / most}%`;
        box.append(part);
      }
    } },
  ], (row) => row.team);
  table("ended", COLUMNS.slice(0, 8), overview.ended, (job) => jobCells(job).slice(0, 8), (job) => job.id);
}

function alarm(text) { $("alarm").dataset.action = text; showAlarm(); }
function trouble(text) { $("alarm").dataset.trouble = text; showAlarm(); }
function showAlarm() {
  const { action: said = "", trouble: all = "" } = $("alarm").dataset;
  $("alarm").textContent = [said, all].filter(Boolean).join("\n");
  $("alarm").hidden = !$("alarm").textContent;
}

// ---- devices over time ----------------------------------------------------------------------------------------------
const places = new Map(); // of pipelines in data.jobs: a job keeps its colour
const lines = { rows: [], lanes: "", until: 0, seconds: 0 }; // rows: {lane, job, phase, from, to, share}, in unix seconds

function place(pipeline, name) {
  if (pipeline === "others") return -1;
  if (!places.has(pipeline)) { places.set(pipeline, data.jobs.length); data.jobs.push({ name, events: [], metrics: {} }); }
  data.jobs[places.get(pipeline)].name = name;
  return places.get(pipeline);
}

async function refreshTimeline() {
  const seconds = Number($("window").value);
  if (seconds !== lines.seconds) Object.assign(lines, { rows: [], until: 0, seconds });
  const found = await ask("GET", `/v1/timeline?seconds=${seconds}&since=${lines.until}`);
  const lanes = JSON.stringify(found.lanes);
  if (lanes !== lines.lanes && lines.until) { Object.assign(lines, { rows: [], until: 0, lanes }); return refreshTimeline(); }
  lines.lanes = lanes;
  takeRows(found);
  lines.until = found.end;
  const followed = view.end >= end - 1e-6, width = view.end - view.start, whole = width >= end - 1e-6;
  const moved = data.origin === undefined ? 0 : found.end - seconds - data.origin;
  data.origin = found.end - seconds;
  data.end = seconds;
  data.devices = found.lanes.map((lane, id) => ({ id, kind: "", label: lane.label }));
  data.spans = lines.rows.map((row) => [row.lane, row.job, row.phase, "busy", Math.max(0, row.from - data.origin), row.to - data.origin, 0, row.share]);
  data.spans.sort((a, b) => a[0] - b[0] || a[4] - b[4]);
  load();
  if (whole) Object.assign(view, { start: 0, end });
  else if (followed) Object.assign(view, { start: end - width, end });
  else Object.assign(view, { start: Math.max(0, view.start - moved), end: Math.max(width, view.end - moved) });
  const groups = found.lanes.some((lane) => lane.devices > 1);
  $("timeline-note").textContent = `Who had a lease on which devices. ${groups ? "A lane is several devices; its columns show the shares of their time. " : ""}Drag to move, pinch or Ctrl+wheel to zoom, drag over the strip below to choose a range.`;
  legend();
  draw();
}

// What was known from `found.start` on is replaced; a row that goes on there is made longer.
function takeRows(found) {
  const oldest = found.end - lines.seconds, start = found.start, going = new Map();
  lines.rows = lines.rows.filter((row) => row.from < start && row.to > oldest);
  for (const row of lines.rows) {
    row.to = Math.min(row.to, start);
    if (row.to === start) going.set(`${row.lane} ${row.job} ${row.phase} ${row.share}`, row);
  }
  const jobs = found.pipelines.map((id) => place(id, found.jobs[id] ?? id));
  const phases = found.phases.map((name) => { if (!data.phases.includes(name)) data.phases.push(name); return data.phases.indexOf(name); });
  for (const [lane, job, phase, from, to, share] of found.rows) {
    const row = { lane, job: jobs[job], phase: phases[phase], from: start + from, to: start + to, share };
    const key = `${lane} ${row.job} ${row.phase} ${share}`, before = from === 0 ? going.get(key) : undefined;
    if (before) { before.to = row.to; going.delete(key); } else lines.rows.push(row);
  }
}
$("window").onchange = () => refresh();

// ---- one job --------------------------------------------------------------------------------------------------------
function select(id) {
  shown.selected = id;
  location.hash = id ? `job=${id}` : "";
  $("job").hidden = !id;
  if (id) refreshJob().then(() => $("job").scrollIntoView({ block: "nearest" })).catch((error) => alarm(error.message));
}
$("job-close").onclick = () => select(null);

async function refreshJob() {
  const id = shown.selected;
  if (!id) return;
  const [run, past] = await Promise.all([ask("GET", `/v1/jobs/${id}/run`), ask("GET", `/v1/jobs/${id}/history`)]);
  if (shown.selected !== id) return;
  const job = run.job, first = run.time[0] ?? 0;
  $("job").hidden = false;
  $("job-name").textContent = `${job.name} (${job.id})`;
  $("job-facts").textContent = `${job.team} / ${job.owner}; ${job.outcome ?? job.state}${job.reason ? `: ${job.reason}` : ""}. ${job.run_dir}`;
  data.curves = run.step.length ? [{ name: job.name, step: run.step, time: run.time.map((t) => t - first), metrics: run.metrics }] : [];
  for (const redraw of charts) redraw();
  table("samples", ["step", "prompt", "completion", "reward"], run.samples.map((sample, index) => ({ ...sample, index })), (sample) => [
    `${sample.step}${sample.evaluation ? ", evaluation" : ""}`,
    { key: sample.prompt, build: (box) => { box.className = "text"; box.textContent = sample.prompt; } },
    { key: sample.completion, build: (box) => { box.className = "text"; box.textContent = sample.completion; } },
    sample.error || short(sample.reward),
  ], (sample) => sample.index);
  $("samples").hidden = !run.samples.length;
  table("changes", ["when", "what", "by"], past.changes.slice(-20).map((change, index) => ({ ...change, index })),
    (change) => [when(change.time), change.what, change.by], (change) => change.index);
}

// ---- again and again ------------------------------------------------------------------------------------------------
async function refresh() {
  const wanted = ++shown.wanted;
  try {
    const [overview, pool] = await Promise.all([ask("GET", "/v1/overview"), ask("GET", "/v1/pool")]);
    if (wanted !== shown.wanted) return;
    $("sign-in").hidden = true;
    $("content").hidden = $("leave").hidden = false;
    await refreshTimeline();
    showOverview(overview, pool);
    await refreshJob();
    if (shown.away) { shown.away = false; alarm(""); }
  } catch (error) {
    if (error instanceof Refused) return askWho(error.message);
    shown.away = true;
    alarm(error instanceof TypeError ? "The service does not answer; it is asked again." : error.message);
  } finally {
    if (wanted === shown.wanted) shown.timer = setTimeout(() => { if (wanted === shown.wanted && api.token && !document.hidden) refresh(); }, EVERY_MS);
  }
}
document.addEventListener("visibilitychange", () => { if (!document.hidden && api.token) refresh(); });
const redrawAll = () => { legend(); draw(); for (const redraw of charts) redraw(); };
addEventListener("resize", redrawAll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);

// A token in the address's fragment is sent to nobody; it is taken out of it at once.
const given = new URLSearchParams(location.hash.slice(1));
keepToken(given.get("token") ?? sessionStorage.getItem("token") ?? "");
if (given.has("token")) history.replaceState(null, "", location.pathname);
if (given.has("job")) shown.selected = Number(given.get("job")) || null;
if (api.token) refresh(); else askWho("");
