// What the other scripts of the page share. The page joins the files of this folder into one script.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const root = getComputedStyle(document.documentElement);
const css = (name) => root.getPropertyValue(name).trim();
const colour = (index) => css(`--job${index % 8}`);
const SWITCHING = new Set(["load", "offload", "sync"]);
const STRENGTH = { rollout: 0.5, initialization: 0.22, actor_training: 1, critic_training: 0.9 };
const strength = (phase) => STRENGTH[phase] ?? 0.75;
const words = (name) => name.replaceAll("_", " ");
const tip = document.getElementById("tip");
const clamp = (x, low, high) => Math.min(high, Math.max(low, x));

for (const element of document.querySelectorAll(".job")) {
  element.style.setProperty("--c", `var(--job${element.dataset.job % 8})`);
}

function clock(seconds, step = 1) {
  const digits = step < 1 ? Math.min(3, Math.ceil(-Math.log10(step))) : 0;
  if (seconds < 60) return `${seconds.toFixed(digits)} s`;
  const rest = (seconds % 60).toFixed(digits);
  const padded = Number(rest) < 10 ? `0${rest}` : rest;
  if (seconds < 3600) return `${Math.floor(seconds / 60)}:${padded}`;
  return `${Math.floor(seconds / 3600)}:${String(Math.floor(seconds / 60) % 60).padStart(2, "0")}:${padded}`;
}

// A time of the timeline: since the first job started or, where `data` says when that was, of the day.
function stamp(seconds, step) {
  if (data.origin === undefined) return clock(seconds, step);
  const day = new Date((data.origin + seconds) * 1000);
  return day.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", ...(step < 60 ? { second: "2-digit" } : {}), hour12: false });
}

function niceStep(range, count, time) {
  const raw = range / Math.max(1, count);
  if (time && raw > 5) return [10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400].find((s) => s >= raw) ?? 86400;
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
}

function showTip(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${clamp(event.clientX + 14, 4, innerWidth - box.width - 4)}px`;
  tip.style.top = `${event.clientY + box.height + 24 > innerHeight ? event.clientY - box.height - 10 : event.clientY + 16}px`;
}
const hideTip = () => { tip.hidden = true; };

function fit(canvas, height) {
  const ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return [context, width, height];
}
