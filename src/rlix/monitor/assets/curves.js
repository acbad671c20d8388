// The jobs' metrics as curves.
const SVG = "http://www.w3.org/2000/svg";
function node(parent, name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

function smooth(values) {
  const half = Math.floor(Math.min(9, values.length / 8) / 2);
  return values.map((value, i) => {
    if (value === null) return null;
    const near = values.slice(Math.max(0, i - half), i + half + 1).filter((v) => v !== null);
    return near.reduce((a, b) => a + b, 0) / near.length;
  });
}

const short = (value) => (value === 0 ? "0" : Math.abs(value) >= 1e4 || Math.abs(value) < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(4))));

function chart(box, key, axis) {
  const width = Math.max(280, box.clientWidth), height = 240, left = 46, bottom = 24, top = 8;
  box.replaceChildren();
  const svg = node(box, "svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${key} of each job` });
  const lines = curved().map((job, index) => ({ index, name: job.name, xs: job[axis], ys: job.metrics[key] ?? [] }))
    .filter((line) => line.ys.some((y) => y !== null))
    // An evaluation is not part of every step: its points are joined over the steps between.
    .map((line) => (key.startsWith("eval/") ? { ...line, xs: line.xs.filter((_, i) => line.ys[i] !== null), ys: line.ys.filter((v) => v !== null) } : line));
  const ys = lines.flatMap((line) => line.ys.filter((y) => y !== null)), xs = lines.flatMap((line) => line.xs);
  if (!ys.length) return node(svg, "text", { x: left, y: height / 2 }, "nothing recorded");
  let low = Math.min(...ys), high = Math.max(...ys);
  if (low >= 0 && high <= 1) { low = 0; high = 1; } else if (low > 0 && low < high / 2) low = 0;
  if (low === high) { low -= 0.5; high += 0.5; }
  const right = Math.max(...xs, 1e-6), first = axis === "step" ? Math.min(...xs) : 0;
  const x = (v) => left + (v - first) / Math.max(1e-9, right - first) * (width - left - 6);
  const y = (v) => top + (high - v) / (high - low) * (height - top - bottom);
  const dy = niceStep(high - low, 5), dx = Math.max(axis === "step" ? 1 : 0, niceStep(right - first, width / 90, axis === "time"));
  for (let v = Math.ceil(low / dy) * dy; v <= high + dy / 1e6; v += dy) {
    node(svg, "line", { class: "grid", x1: left, x2: width - 6, y1: y(v), y2: y(v) });
    node(svg, "text", { x: left - 7, y: y(v) + 4, "text-anchor": "end" }, short(Number(v.toPrecision(10))));
  }
  for (let v = Math.ceil(first / dx) * dx; v <= right + dx / 1e6; v += dx) {
    node(svg, "text", { x: x(v), y: height - 5, "text-anchor": "middle" }, axis === "time" ? clock(v, dx) : v);
  }
  const path = (line, values) => {
    let pen = "M", out = "";
    values.forEach((v, i) => {
      if (v === null) { pen = "M"; return; }
      out += `${pen}${x(line.xs[i]).toFixed(1)},${y(v).toFixed(1)}`;
      pen = "L";
    });
    return out;
  };
  for (const line of lines) {
    const stroke = `var(--job${line.index % 8})`;
    node(svg, "path", { d: path(line, line.ys), fill: "none", stroke, "stroke-width": 1, opacity: 0.35 });
    node(svg, "path", { d: path(line, smooth(line.ys)), fill: "none", stroke, "stroke-width": 2.2, "stroke-linejoin": "round" });
  }
  const cursor = node(svg, "line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" });
  svg.onpointermove = (event) => {
    const frame = svg.getBoundingClientRect();
    const at = first + ((event.clientX - frame.left) * width / frame.width - left) / (width - left - 6) * (right - first);
    const texts = lines.map((line) => {
      let best = 0;
      line.xs.forEach((v, i) => { if (Math.abs(v - at) < Math.abs(line.xs[best] - at)) best = i; });
      return `${line.name}: ${line.ys[best] === null ? "–" : short(line.ys[best])}`;
    });
    cursor.setAttribute("x1", clamp(x(at), left, width - 6));
    cursor.setAttribute("x2", clamp(x(at), left, width - 6));
    cursor.setAttribute("visibility", "visible");
    showTip(event, `${axis === "step" ? `step ${Math.round(clamp(at, first, right))}` : clock(clamp(at, 0, right))}\n${texts.join("\n")}`);
  };
  svg.onpointerleave = () => { cursor.setAttribute("visibility", "hidden"); hideTip(); };
}

const curved = () => data.curves ?? [...data.jobs, ...data.runs];
const charts = [...document.querySelectorAll(".charts .card")].map((card) => {
  const metric = card.querySelector(".metric"), axis = card.querySelector(".axis"), box = card.querySelector(".chart");
  const wanted = metric.dataset.default;
  let before = null;
  const fill = () => {
    const keys = [...new Set([wanted, ...curved().flatMap((job) => Object.keys(job.metrics))])].sort();
    if (keys.join() === before) return;
    before = keys.join();
    const chosen = keys.includes(metric.value) ? metric.value : wanted;
    metric.replaceChildren();
    for (const key of keys) metric.add(new Option({ exact: "exact match", kl: "KL" }[key] ?? words(key), key, false, key === chosen));
  };
  const redraw = () => { fill(); chart(box, metric.value, axis.value); };
  metric.onchange = axis.onchange = redraw;
  return redraw;
});
