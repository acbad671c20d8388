// The per-device timeline and the strip below it.
const timeline = document.getElementById("timeline");
const overview = document.getElementById("overview");
const colourBy = document.getElementById("color-by");
const LEFT = data.left ?? 34, AXIS = 22;
const view = { start: 0, end: 0 };
let end, lanes, LANE, GAP, stacked;

// What is drawn of `data`; to be called again when that has changed.
function load() {
  const count = data.devices.length;
  end = Math.max(data.end, 1e-3);
  LANE = count > 32 ? 10 : count > 16 ? 16 : 32;
  GAP = count > 32 ? 3 : 6;
  stacked = null;
  lanes = new Map(data.devices.map((device, index) => [device.id, { index, spans: [], shared: false }]));
  for (const [device, job, phase, kind, from, to, step, share = 1] of data.spans) {
    const lane = lanes.get(device);
    lane.spans.push({ job, phase: data.phases[phase], kind, from, to, step, share });
    lane.shared ||= share < 1;
  }
}
load();
view.end = end;

function setView(start, stop) {
  const width = clamp(stop - start, Math.min(end, 0.05), end);
  view.start = clamp(start, 0, end - width);
  view.end = view.start + width;
  requestAnimationFrame(draw);
}
const zoom = (factor, at = (view.start + view.end) / 2) =>
  setView(at - (at - view.start) * factor, at + (view.end - at) * factor);

function paint(span) {
  if (SWITCHING.has(span.kind)) return [css("--switch"), 1];
  if (span.job < 0) return [css("--held"), 1];
  if (colourBy.value === "phase") return [colour(data.phases.indexOf(span.phase)), 1];
  return [colour(span.job), strength(span.phase)];
}

// Spans of one lane are sorted by start and (devices being exclusive) nearly by end: search, then step back a little.
function firstVisible(spans) {
  let low = 0, high = spans.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans[middle].to < view.start) low = middle + 1; else high = middle;
  }
  return Math.max(0, low - (data.overlap ?? 4));
}

const scale = (width) => (time) => LEFT + (time - view.start) / (view.end - view.start) * (width - LEFT);

function draw() {
  if (timeline.clientWidth <= LEFT) return; // it is not shown
  const height = data.devices.length * (LANE + GAP) + AXIS;
  const [context, width] = fit(timeline, height);
  const x = scale(width);
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  const step = niceStep(view.end - view.start, width / 110, true);
  context.textAlign = "center";
  for (let time = Math.ceil(view.start / step) * step; time <= view.end; time += step) {
    context.fillStyle = css("--line");
    context.fillRect(x(time), 0, 1, height - AXIS + 3);
    context.fillStyle = css("--dim");
    if (x(time) < width - 18) context.fillText(stamp(time, step), x(time), height - AXIS / 2 + 2);
  }
  for (const [device, lane] of lanes) {
    const y = lane.index * (LANE + GAP);
    context.globalAlpha = 1;
    context.fillStyle = css("--dim");
    context.textAlign = "left";
    context.fillText(data.devices[lane.index].label ?? `${device}`, 8, y + LANE / 2);
    context.globalAlpha = 0.75;
    context.fillStyle = css("--lane");
    context.fillRect(LEFT, y, width - LEFT, LANE);
    const first = firstVisible(lane.spans);
    let last = first;
    while (last < lane.spans.length && lane.spans[last].from <= view.end) last++;
    const visible = lane.spans.slice(first, last);
    if (lane.shared || visible.length > (width - LEFT) / 3) drawDense(context, visible, y, width);
    else drawSpans(context, visible, x, y, width);
  }
  context.globalAlpha = 1;
  drawEvents(context, x, width, height - AXIS);
  drawOverview();
}

function drawSpans(context, spans, x, y, width) {
  for (const span of spans) {
    const left = Math.max(LEFT, x(span.from)), right = Math.min(width, x(span.to)), wide = right - left;
    if (wide < 0) continue;
    const [fill, alpha] = paint(span);
    context.globalAlpha = alpha;
    context.fillStyle = fill;
    context.fillRect(left, y, Math.max(wide > 3 ? wide - 0.6 : wide, 0.4), LANE);
    if (wide > 58 && LANE > 20 && !SWITCHING.has(span.kind)) label(context, span, left, y, wide, alpha);
  }
}

// More spans than pixels: each column shows the shares of its time instead, the idle share on top.
function drawDense(context, spans, y, width) {
  const column = 8, bins = Math.ceil((width - LEFT) / column), bin = (view.end - view.start) / bins;
  const shares = new Map();
  for (const span of spans) {
    const look = paint(span).join("/");
    if (!shares.has(look)) shares.set(look, { job: SWITCHING.has(span.kind) ? Infinity : span.job, sums: new Float64Array(bins) });
    const sums = shares.get(look).sums, from = span.from - view.start, to = span.to - view.start;
    for (let b = Math.max(0, Math.floor(from / bin)); b < bins && b * bin < to; b++) {
      sums[b] += span.share * Math.max(0, Math.min(to, (b + 1) * bin) - Math.max(from, b * bin)) / bin;
    }
  }
  const base = new Float64Array(bins);
  for (const [look, { sums }] of [...shares].sort((a, b) => a[1].job - b[1].job || (a[0] < b[0] ? -1 : 1))) {
    const [fill, alpha] = look.split("/");
    context.fillStyle = fill;
    context.globalAlpha = Number(alpha);
    for (let b = 0; b < bins; b++) {
      const tall = Math.min(sums[b], 1 - base[b]) * LANE;
      context.fillRect(LEFT + b * column, y + LANE * (1 - base[b]) - tall, column, tall);
      base[b] = Math.min(1, base[b] + sums[b]);
    }
  }
}

function label(context, span, left, y, wide, alpha) {
  const text = words(span.phase);
  context.save();
  context.beginPath();
  context.rect(left, y, wide - 4, LANE);
  context.clip();
  context.globalAlpha = 1;
  context.fillStyle = alpha > 0.6 || colourBy.value === "phase" ? css("--card") : css("--text");
  context.fillText(wide > 130 && span.step !== null ? `${text} · ${span.step}` : text, left + 6, y + LANE / 2);
  context.restore();
}

function drawEvents(context, x, width, height) {
  data.jobs.forEach((job, index) => {
    for (const event of job.events) {
      if (event.name === "started" || event.time < view.start || event.time > view.end) continue;
      context.fillStyle = colour(index);
      for (let y = 0; y < height; y += 6) context.fillRect(Math.min(x(event.time), width - 1.5), y + 3 * (index % 2), 1.5, 3);
    }
  });
}

// ---- the strip below: busy devices over the whole run, stacked by job -----------------------------------------------
function stack(bins) {
  const sums = data.jobs.map(() => new Float64Array(bins));
  const bin = end / bins;
  for (const [, job, , kind, from, to, , share = 1] of data.spans) {
    if (SWITCHING.has(kind) || job < 0) continue;
    for (let b = Math.max(0, Math.floor(from / bin)); b < bins && b * bin < to; b++) {
      sums[job][b] += share * Math.max(0, Math.min(to, (b + 1) * bin) - Math.max(from, b * bin)) / bin;
    }
  }
  return sums;
}

function drawOverview() {
  const [context, width, height] = fit(overview, 56);
  const inner = width - LEFT, bins = Math.max(1, Math.floor(inner / 4));
  if (!stacked || stacked.bins !== bins) stacked = { bins, sums: stack(bins) };
  context.fillStyle = css("--lane");
  context.fillRect(LEFT, 0, inner, height);
  for (let b = 0; b < bins; b++) {
    let base = height;
    stacked.sums.forEach((sums, job) => {
      const tall = sums[b] / Math.max(1, data.devices.length) * height;
      context.fillStyle = colour(job);
      context.globalAlpha = 0.75;
      context.fillRect(LEFT + b * inner / bins, base - tall, inner / bins, tall);
      base -= tall;
    });
  }
  context.globalAlpha = 1;
  const from = LEFT + view.start / end * inner, to = LEFT + view.end / end * inner;
  context.fillStyle = css("--bg");
  context.globalAlpha = 0.72;
  context.fillRect(LEFT, 0, from - LEFT, height);
  context.fillRect(to, 0, width - to, height);
  context.globalAlpha = 1;
  context.strokeStyle = css("--dim");
  context.strokeRect(from + 0.5, 0.5, Math.max(2, to - from - 1), height - 1);
}

const timeAt = (canvas, event, full) => {
  const box = canvas.getBoundingClientRect();
  const share = (event.clientX - box.left - LEFT) / (box.width - LEFT);
  return full ? share * end : view.start + share * (view.end - view.start);
};

const pointers = new Map();
timeline.addEventListener("pointerdown", (event) => {
  timeline.setPointerCapture(event.pointerId);
  pointers.set(event.pointerId, timeAt(timeline, event));
});
timeline.addEventListener("pointermove", (event) => {
  if (!pointers.has(event.pointerId)) return hover(event);
  hideTip();
  const before = pointers.get(event.pointerId), now = timeAt(timeline, event);
  if (pointers.size === 1) {
    setView(view.start + before - now, view.end + before - now);
  } else {
    const other = [...pointers].find(([id]) => id !== event.pointerId)[1];
    const factor = clamp(Math.abs(before - other) / Math.max(1e-9, Math.abs(now - other)), 0.5, 2);
    zoom(factor, other);
  }
  pointers.set(event.pointerId, timeAt(timeline, event));
});
for (const name of ["pointerup", "pointercancel"]) timeline.addEventListener(name, (event) => pointers.delete(event.pointerId));
timeline.addEventListener("pointerleave", hideTip);
timeline.addEventListener("dblclick", (event) => zoom(0.4, timeAt(timeline, event)));
timeline.addEventListener("wheel", (event) => {
  if (!event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  zoom(Math.exp(event.deltaY * 0.003), timeAt(timeline, event));
}, { passive: false });
timeline.addEventListener("keydown", (event) => {
  const shift = (view.end - view.start) * 0.2;
  const act = {
    ArrowLeft: () => setView(view.start - shift, view.end - shift), ArrowRight: () => setView(view.start + shift, view.end + shift),
    "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), Home: () => setView(0, end),
  }[event.key];
  if (act) { event.preventDefault(); act(); }
});
document.getElementById("zoom-in").onclick = () => zoom(0.5);
document.getElementById("zoom-out").onclick = () => zoom(2);
document.getElementById("zoom-all").onclick = () => setView(0, end);

function hover(event) {
  const time = timeAt(timeline, event);
  const row = data.devices[Math.floor((event.clientY - timeline.getBoundingClientRect().top) / (LANE + GAP))];
  if (!row || time < view.start) return hideTip();
  const slack = (view.end - view.start) / 600;
  const hits = lanes.get(row.id).spans.filter((span) => span.from - slack <= time && time <= span.to + slack);
  const name = `device ${row.label ?? row.id}${row.kind ? ` (${row.kind})` : ""} at ${stamp(time, 0.01)}`;
  if (!hits.length) return showTip(event, `${name}\nidle`);
  if (data.live) {
    const shares = hits.map((h) => `${data.jobs[h.job]?.name ?? "others"}${h.phase ? `, ${words(h.phase)}` : ""}${h.share < 1 ? `: ${(100 * h.share).toFixed(0)} %` : ""}`);
    return showTip(event, [name, ...shares].join("\n"));
  }
  const span = hits.find((s) => s.from <= time && time <= s.to) ?? hits[0];
  const kind = span.kind === "busy" ? "" : ` (${span.kind})`;
  showTip(event, `${name}\n${data.jobs[span.job].name}${span.step === null ? "" : `, ${data.counted ?? "step"} ${span.step}`}\n${words(span.phase)}${kind}, ${((span.to - span.from) * 1000).toFixed(0)} ms`);
}

let brush = null;
overview.addEventListener("pointerdown", (event) => { overview.setPointerCapture(event.pointerId); brush = timeAt(overview, event, true); });
overview.addEventListener("pointermove", (event) => {
  if (brush === null) return;
  const now = timeAt(overview, event, true);
  setView(Math.min(brush, now), Math.max(brush, now));
});
overview.addEventListener("pointerup", (event) => {
  const now = timeAt(overview, event, true), half = (view.end - view.start) / 2;
  if (Math.abs(now - brush) < end / 200) setView(now - Math.max(half, end / 40), now + Math.max(half, end / 40));
  brush = null;
});

const LEGEND = 24; // jobs
function legend() {
  const box = document.getElementById("legend");
  box.replaceChildren();
  const add = (fill, alpha, text) => {
    const item = document.createElement("span"), mark = document.createElement("i");
    mark.style.background = fill;
    mark.style.opacity = alpha;
    item.append(mark, text);
    box.append(item);
  };
  if (colourBy.value === "phase") data.phases.forEach((phase, index) => { if (phase) add(colour(index), 1, words(phase)); });
  else {
    const shown = data.live ? new Set(data.spans.map((span) => span[1])) : null;
    const jobs = data.jobs.map((job, index) => [index, job.name]).filter(([index]) => !shown || shown.has(index));
    for (const [index, name] of jobs.slice(0, LEGEND)) add(colour(index), 1, name);
    if (jobs.length > LEGEND) add("transparent", 1, `and ${jobs.length - LEGEND} more: point at a lane`);
    const shades = data.phases.filter(Boolean).sort((a, b) => strength(a) - strength(b));
    for (const phase of shades) add(css("--text"), 0.75 * strength(phase), words(phase));
  }
  if (!data.live && data.spans.some((span) => SWITCHING.has(span[3]))) add("var(--switch)", 1, "load, offload, sync");
}
colourBy.onchange = () => { legend(); draw(); };
