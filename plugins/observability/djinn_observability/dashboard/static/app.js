"use strict";
// Draws what the feed says. The token stays in this page's memory: it is in no address, cookie or storage.
const KINDS = ["weights", "caches", "optimizer", "gradients", "inputs", "activations"];
const STAGES = { queue: "waiting", decode: "reading", execute: "running", encode: "packing results" };
const POINTS = 720;
const $ = (id) => document.getElementById(id);
let token = null;
let ending = null;
let paused = false;
let fields = [];
let points = []; // of the hour
let day = [];
let daily = false; // which of them is shown
let charts = [];

// --- texts --------------------------------------------------------------------------------------------------------

function bytes(count) {
  let amount = count;
  for (const unit of ["B", "KiB", "MiB"]) {
    if (amount < 1024) return `${amount.toFixed(amount < 10 && unit !== "B" ? 1 : 0)} ${unit}`;
    amount /= 1024;
  }
  return `${amount.toFixed(1)} GiB`;
}

function rate(number) {
  return number >= 100 ? number.toFixed(0) : number >= 1 ? number.toFixed(1) : number > 0 ? number.toFixed(2) : "0";
}

const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
const duration = (seconds) =>
  seconds < 1e-3 ? `${(1e6 * seconds).toFixed(0)} µs` : seconds < 1 ? `${(1000 * seconds).toFixed(1)} ms` : seconds < 120 ? `${seconds.toFixed(0)} s` : seconds < 7200 ? `${(seconds / 60).toFixed(0)} min` : `${(seconds / 3600).toFixed(1)} h`;
const words = (name) => name.replaceAll("_", " ");
const clock = (seconds) => (seconds ? new Date(1000 * seconds).toLocaleTimeString() : "");

// --- building -----------------------------------------------------------------------------------------------------

function made(tag, css, text) {
  const found = document.createElement(tag);
  if (css) found.className = css;
  if (text !== undefined) found.textContent = text;
  return found;
}

const said = new WeakMap(); // the text of each element: to ask the page for it takes longer

function say(element, text) {
  if (said.get(element) === text) return;
  said.set(element, text);
  if (element.firstChild) element.firstChild.data = text; // the text's own node, so that no other is made
  else element.textContent = text;
}

// A table whose rows stay where they are while their texts change, so that focus and reading positions stay, too. Rows are laid out by
// themselves (style.css), so that those outside of the window cost no layout.
class Grid {
  constructor(parent, caption, columns, empty) {
    this.columns = columns;
    this.rows = new Map();
    this.empty = made("p", "empty", empty);
    this.table = made("table");
    this.table.setAttribute("role", "table"); // rows are grids or blocks, which would hide the table from readers
    this.table.append(made("caption", "hidden", caption));
    const head = this.table.createTHead();
    const line = head.insertRow();
    head.setAttribute("role", "rowgroup");
    line.setAttribute("role", "row");
    for (const column of columns) {
      const cell = made("th", column.css, column.title);
      cell.scope = "col";
      cell.setAttribute("role", "columnheader");
      line.append(cell);
    }
    this.body = this.table.createTBody();
    this.body.setAttribute("role", "rowgroup");
    const frame = made("div", "scroll");
    frame.append(this.table);
    parent.append(frame, this.empty);
    this.show([]);
  }

  row() {
    const element = made("tr");
    element.setAttribute("role", "row");
    const cells = this.columns.map((column) => {
      const cell = made("td", column.css);
      const text = made("span");
      const bar = column.bar ? new Bar() : null;
      cell.setAttribute("role", "cell");
      cell.dataset.title = column.title;
      cell.append(text);
      if (bar) cell.append(bar.element);
      element.append(cell);
      return { cell, text, bar, marked: false };
    });
    return { element, cells };
  }

  show(items) {
    const seen = new Set();
    let place = this.body.firstChild; // of the next row
    for (const [key, item] of items) {
      if (seen.has(key)) continue;
      seen.add(key);
      let row = this.rows.get(key);
      if (!row) this.rows.set(key, (row = this.row()));
      if (row.element === place) place = place.nextSibling;
      else this.body.insertBefore(row.element, place);
      this.fill(row.cells, item);
    }
    for (const [key, row] of this.rows) {
      if (!seen.has(key)) {
        row.element.remove();
        this.rows.delete(key);
      }
    }
    this.empty.hidden = items.length > 0;
    this.table.hidden = items.length === 0;
  }

  fill(cells, item) {
    this.columns.forEach((column, at) => {
      const shown = cells[at];
      say(shown.text, column.text(item));
      if (column.bar) shown.bar.draw(column.bar(item));
      if (!column.mark) return;
      const marked = column.mark(item);
      if (marked !== shown.marked) shown.cell.classList.toggle("marked", (shown.marked = marked));
    });
  }
}

// Shares of a whole side by side; the text beside it says the same, so readers skip it.
class Bar {
  constructor() {
    this.element = drawn("svg", { viewBox: "0 0 100 8", preserveAspectRatio: "none", class: "bar", "aria-hidden": "true" });
    this.shapes = []; // by place: what stands in the page of each part
  }

  draw({ parts, whole }) {
    let from = 0;
    const total = Math.max(whole, parts.reduce((sum, part) => sum + part[1], 0)) || 1;
    parts.forEach(([css, size], at) => {
      const width = Math.round((10000 * size) / total) / 100;
      const shape = (this.shapes[at] ||= { x: 0, width: 0, element: null });
      if (shape.width !== width || (width && shape.x !== from)) {
        if (!shape.element) this.element.append((shape.element = drawn("rect", { height: 8, class: css })));
        shape.element.setAttribute("x", (shape.x = from));
        shape.element.setAttribute("width", (shape.width = width));
      }
      from += width;
    });
  }
}

const by_kind = (kinds) => KINDS.filter((kind) => kinds[kind]).map((kind) => `${kind} ${bytes(kinds[kind])}`).join(", ");
const parts_of = (kinds) => KINDS.map((kind) => [kind, kinds[kind] || 0]);

const executors = new Grid($("executors"), "Executors with their memory, load and queue", [
  { title: "Executor", css: "name", text: (one) => [one.server, one.device, one.name].filter(Boolean).join(", ") },
  { title: "Tenant", text: (one) => one.tenant || "in reserve" },
  { title: "State", text: (one) => one.state + (one.restarts ? `, restarts ${one.restarts}` : ""), mark: (one) => one.state !== "ready" },
  { title: "Memory of sessions", css: "wide", bar: (one) => ({ parts: parts_of(one.kinds), whole: one.limit || one.device_memory }),
    text: (one) => bytes(one.memory) + (one.limit || one.device_memory ? ` of ${bytes(one.limit || one.device_memory)}` : "") + (by_kind(one.kinds) ? ` (${by_kind(one.kinds)})` : "") + (one.shared ? `, shared weights ${bytes(one.shared)}` : "") + (one.spilled ? `, spilled ${bytes(one.spilled)}` : "") },
  { title: "Busy", css: "number", text: (one) => percent(one.stages.execute) },
  { title: "Waiting", css: "number", text: (one) => (one.waiting ? `${one.waiting}, ${duration(one.longest_wait)}` : "0"), mark: (one) => one.longest_wait > 1 },
  { title: "Runs/s", css: "number", text: (one) => rate(one.submissions) },
  { title: "Network", css: "number", text: (one) => `in ${bytes(one.received)}/s, out ${bytes(one.sent)}/s` },
], "No executor belongs to you yet: it starts with your first session.");

const sessions = new Grid($("sessions"), "Sessions with phase, rates, memory and network", [
  { title: "Client", css: "name", text: (one) => one.client },
  { title: "Tenant", text: (one) => one.tenant },
  { title: "Session", css: "mono", text: (one) => one.session.slice(0, 8) },
  { title: "Phase", text: (one) => words(one.phase) || "unknown" },
  { title: "Steps/s", css: "number", text: (one) => rate(one.steps) },
  { title: "Runs/s", css: "number", text: (one) => rate(one.submissions) },
  { title: "Device", css: "number", text: (one) => percent(one.busy) },
  { title: "Memory", css: "wide", bar: (one) => ({ parts: parts_of(one.kinds), whole: 0 }), text: (one) => bytes(one.memory) + (by_kind(one.kinds) ? ` (${by_kind(one.kinds)})` : "") },
  { title: "Network", css: "number", text: (one) => (one.latency ? `${duration(one.latency)} there and back` + (one.bandwidth ? `, to ${bytes(one.bandwidth)}/s` : "") : "not known") },
  { title: "Age", css: "number", text: (one) => duration(one.age) },
], "No sessions.");

const events = new Grid($("events"), "Warnings and refusals, the newest first", [
  { title: "Time", css: "mono", text: (one) => clock(one.seconds) },
  { title: "Tenant", text: (one) => one.tenant },
  { title: "What", css: "wide name", text: (one) => one.text },
], "None.");

// Plans: a disclosure for each session, which stays as the reader left it.
const plans = new Map();
const no_plans = made("p", "empty", "No program was planned in an open session.");
$("plans").append(no_plans);

function show_plans(all) {
  const seen = new Set();
  for (const one of all) {
    if (!one.decisions.length) continue;
    seen.add(one.session);
    let found = plans.get(one.session);
    if (!found) {
      found = made("details");
      found.append(made("summary"), made("ul"));
      $("plans").append(found);
      plans.set(one.session, found);
      found.open = plans.size === 1;
    }
    say(found.firstChild, `${one.client}, ${one.session.slice(0, 8)}: ${one.decisions.length} decisions`);
    const lines = one.decisions.join("\n");
    if (found.dataset.lines !== lines) {
      found.dataset.lines = lines;
      found.lastChild.replaceChildren(...one.decisions.map((line) => made("li", "", line)));
    }
  }
  for (const [key, found] of plans) {
    if (!seen.has(key)) {
      found.remove();
      plans.delete(key);
    }
  }
  no_plans.hidden = seen.size > 0;
}

function make_charts() {
  const kinds = KINDS.map((kind) => ({ name: kind, css: kind }));
  const stages = Object.entries(STAGES).map(([css, name]) => ({ name, css }));
  charts = [
    [new Chart("Memory by kind", kinds, bytes, true), KINDS],
    [new Chart("Time of all submissions by stage", stages, percent, true), Object.keys(STAGES)],
    [new Chart("Runs and steps a second", [{ name: "runs", css: "weights" }, { name: "steps", css: "caches" }], rate, false), ["submissions", "steps"]],
    [new Chart("Sessions, and those that wait", [{ name: "sessions", css: "execute" }, { name: "waiting", css: "queue" }], (number) => String(Math.round(number)), false), ["sessions", "waiting"]],
  ];
  $("charts").replaceChildren(...charts.map(([chart]) => chart.element));
}

function show_charts() {
  for (const [chart, names] of charts) {
    const columns = names.map((name) => fields.indexOf(name));
    chart.draw((daily ? day : points).map((point) => [point[0], ...columns.map((column) => point[column])]));
  }
}

function show(news) {
  if (news.fields) {
    fields = news.fields;
    points = day = [];
  }
  const more = (daily ? news.day : news.points).length > 0;
  points = points.concat(news.points).slice(-POINTS);
  day = day.concat(news.day).slice(-POINTS);
  if (paused) return;
  const live = news.live;
  say($("about"), `${news.tenant === null ? "all tenants" : `tenant ${news.tenant}`}, djinn ${live.version}, up ${duration(live.uptime)}`);
  executors.show(live.executors.map((one) => [one.key, one]));
  const all = live.executors.flatMap((executor) => executor.sessions.map((one) => ({ ...one, tenant: executor.tenant })));
  sessions.show(all.map((one) => [one.session, one]));
  say($("left"), live.left_out ? `and ${live.left_out} sessions that do less` : "");
  show_plans(all);
  const newest = [...live.events].reverse();
  events.show(newest.map((one) => [`${one.seconds}/${one.tenant}/${one.text}`, one]));
  if (more || news.fields) show_charts();
}

// --- the feed -----------------------------------------------------------------------------------------------------

class Refused extends Error {}

async function follow(signal) {
  const response = await fetch("/dashboard/feed", { headers: { Authorization: `Bearer ${token}` }, signal, cache: "no-store", credentials: "omit" });
  if (response.status === 401) throw new Refused("This token is not good here.");
  if (!response.ok) throw new Error(`the server answered ${response.status}`);
  $("enter").hidden = true;
  $("board").hidden = $("pause").hidden = $("leave").hidden = false;
  say($("state"), "Live");
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) show(JSON.parse(part.slice(6)));
  }
}

async function stay() {
  let pause = 1;
  const { signal } = ending;
  while (!signal.aborted) {
    try {
      await follow(signal);
      pause = 1;
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Refused) {
        leave(error.message);
        return;
      }
    }
    if (signal.aborted) return;
    say($("state"), "No connection: trying again");
    await new Promise((resume) => setTimeout(resume, 1000 * pause));
    pause = Math.min(2 * pause, 10);
  }
}

function leave(reason) {
  ending?.abort();
  token = null;
  points = day = [];
  paused = false;
  say($("pause"), "Pause");
  $("pause").setAttribute("aria-pressed", "false");
  for (const grid of [executors, sessions, events]) grid.show([]);
  show_plans([]);
  $("charts").replaceChildren();
  say($("about"), "");
  say($("state"), "Signed out");
  $("board").hidden = $("pause").hidden = $("leave").hidden = true;
  $("enter").hidden = false;
  $("token").value = "";
  say($("refused"), reason);
  $("token").focus();
}

$("enter").addEventListener("submit", (event) => {
  event.preventDefault();
  token = $("token").value.trim();
  if (!/^[\x21-\x7e]+$/.test(token)) {
    leave("A token has letters, digits and signs only.");
    return;
  }
  $("token").value = "";
  say($("refused"), "");
  say($("state"), "Connecting");
  make_charts();
  ending = new AbortController();
  stay();
});
$("leave").addEventListener("click", () => leave(""));
$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  say($("pause"), paused ? "Go on" : "Pause");
  say($("state"), paused ? "Paused" : "Live");
});
$("span").addEventListener("click", () => {
  daily = !daily;
  say($("h-past"), daily ? "The past day" : "The past hour");
  say($("span"), daily ? "Show the past hour" : "Show the past day");
  show_charts();
});
$("token").focus();
