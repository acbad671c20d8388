function all() {
  legend();
  draw();
  for (const redraw of charts) redraw();
}
// A long run opens on a stretch in its middle in which single phases can be told apart.
const perLane = data.spans.length / Math.max(1, data.devices.length);
if (perLane > 200) setView(end / 2, end / 2 + end * timeline.clientWidth / 10 / perLane);
addEventListener("resize", all);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
all();
