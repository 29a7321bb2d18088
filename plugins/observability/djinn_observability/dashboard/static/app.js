"use strict";
// Draws what the feed says. The token stays in this page's memory: it is in no address, cookie or storage.
const KINDS = ["weights", "caches", "optimizer", "gradients", "inputs", "activations", "other"];
const STAGES = { queue: "wait for the device", decode: "send work", execute: "compute", encode: "get results" };
const PHASES = { llm_prefill: "reading a prompt", llm_decode: "generating text", forward: "inference" };
const MARKS = { executor_died: "bad", executor_state: "bad", executor_restarted: "good", refused: "warn", session_refused: "warn", killed: "warn", session_ended: "warn", evicted: "warn", eviction: "soft", memory_refused: "bad" };
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
  seconds < 1e-3 ? `${(1e6 * seconds).toFixed(0)} µs` : seconds < 1 ? `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms` : seconds < 120 ? `${seconds.toFixed(0)} s` : seconds < 7200 ? `${(seconds / 60).toFixed(0)} min` : `${(seconds / 3600).toFixed(1)} h`;
const digits = (number) => number.toFixed(number < 10 ? 1 : 0);
const latency = ([p50, p99]) => (!p99 ? "—" : p50 < 1 && p99 >= 1 ? `${duration(p50)} / ${duration(p99)}` : p99 < 1 ? `${digits(1000 * p50)} / ${digits(1000 * p99)} ms` : `${digits(p50)} / ${digits(p99)} s`);
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
    this.rows_of = new WeakMap(); // items by the element of their row
    this.empty = made("p", "empty", empty);
    this.table = made("table");
    this.table.setAttribute("role", "table"); // rows are grids or blocks, which would hide the table from readers
    this.table.append(made("caption", "hidden", caption));
    const head = this.table.createTHead();
    const line = head.insertRow();
    head.setAttribute("role", "rowgroup");
    line.setAttribute("role", "row");
    this.order = null; // the column by which rows are sorted, and whether the largest is first
    this.items = [];
    this.heads = columns.map((column) => {
      const cell = made("th", column.css);
      cell.scope = "col";
      cell.title = column.about || "";
      cell.setAttribute("role", "columnheader");
      if (column.by) {
        const button = made("button", "sort", column.title);
        button.type = "button";
        button.addEventListener("click", () => this.sort(column));
        cell.append(button);
      } else cell.textContent = column.title;
      line.append(cell);
      return cell;
    });
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
      if (column.act) {
        text.remove();
        const button = made("button", "act", column.act);
        button.type = "button";
        button.addEventListener("click", () => column.done(this.rows_of.get(element)));
        cell.append(button);
      }
      if (bar) cell.append(bar.element);
      element.append(cell);
      return { cell, text, bar, marked: false };
    });
    return { element, cells };
  }

  sort(column) {
    const down = this.order?.column === column ? !this.order.down : true;
    this.order = { column, down };
    this.heads.forEach((head, at) => {
      if (this.columns[at] === column) head.setAttribute("aria-sort", down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    this.show(this.items);
  }

  sorted(items) {
    if (!this.order) return items;
    const { column, down } = this.order;
    const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b) : a - b);
    return [...items].sort(([, a], [, b]) => compare(column.by(a), column.by(b)) * (down ? -1 : 1));
  }

  show(given) {
    this.items = given;
    const items = this.sorted(given);
    const seen = new Set();
    let place = this.body.firstChild; // of the next row
    for (const [key, item] of items) {
      if (seen.has(key)) continue;
      seen.add(key);
      let row = this.rows.get(key);
      if (!row) this.rows.set(key, (row = this.row()));
      if (row.element === place) place = place.nextSibling;
      else this.body.insertBefore(row.element, place);
      this.rows_of.set(row.element, item);
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
      if (column.text) say(shown.text, column.text(item));
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
const told = (kinds) => (KINDS.some((kind) => kind !== "other" && kinds[kind]) ? ` (${by_kind(kinds)})` : "");
const parts_of = (kinds) => KINDS.map((kind) => [kind, kinds[kind] || 0]);

const memory_of = (one) => one.limit || one.device_memory;
const served = (one) => [["first token", one.first_token], ["per token", one.token], ["answer", one.answer]].filter(([, found]) => found[1]).map(([name, found]) => `${name} ${latency(found)}`).join("\n") || "—";
const slowest = (one) => Math.max(one.first_token[1], one.token[1], one.answer[1]);
const LATENCY = { title: "Latency, p50 / p99", css: "lines", about: "Half of the requests are faster than the first figure, 99 of 100 are faster than the second", text: served, by: slowest };
const RATES = [
  { title: "Requests/s", css: "number", about: "Generations, and other answers that a program waited for", text: (one) => rate(one.requests), by: (one) => one.requests },
  { title: "Tokens/s", css: "number", about: "Decode steps of text generation; a batch counts once", text: (one) => rate(one.tokens), by: (one) => one.tokens },
];
const BUSY = "Share of the last seconds in which it computed";

const executors = new Grid($("executors"), "Executors with their memory, load and queue", [
  { title: "Executor", css: "name", text: (one) => [one.server, one.device, one.name].filter(Boolean).join(", "), by: (one) => one.device },
  { title: "Tenant", text: (one) => one.tenant || "in reserve", by: (one) => one.tenant },
  { title: "State", text: (one) => one.state + (one.restarts ? `, restarts ${one.restarts}` : ""), mark: (one) => one.state !== "ready", by: (one) => one.state },
  { title: "Memory of sessions", css: "wide", bar: (one) => ({ parts: parts_of(one.kinds), whole: memory_of(one) }), by: (one) => one.memory,
    text: (one) => bytes(one.memory) + (memory_of(one) ? ` of ${bytes(memory_of(one))}` : "") + told(one.kinds) + (one.shared ? `, shared weights ${bytes(one.shared)}` : "") + (one.spilled ? `, moved to disk ${bytes(one.spilled)}` : "") },
  { title: "Busy", css: "number lines", about: BUSY, by: (one) => one.stages.execute,
    text: (one) => [percent(Math.min(1, one.stages.execute)), one.utilization == null ? "" : `GPU ${percent(one.utilization)}`, one.temperature == null ? "" : `${one.temperature} °C`].filter(Boolean).join("\n") },
  { title: "Waiting", css: "number", about: "Sessions that wait for the device, and the longest wait", text: (one) => (one.waiting ? `${one.waiting}, ${duration(one.longest_wait)}` : "0"), mark: (one) => one.longest_wait > 1, by: (one) => one.longest_wait },
  ...RATES,
  { title: "Network", css: "number", text: (one) => `in ${bytes(one.received)}/s, out ${bytes(one.sent)}/s`, by: (one) => one.received + one.sent },
], "No executor belongs to you yet: it starts with your first session.");

const models = new Grid($("models"), "Requests by model", [
  { title: "Model", css: "name", text: (one) => one.model || "not known", by: (one) => one.model },
  { title: "Executor", text: (one) => one.device, by: (one) => one.device },
  ...RATES,
  { title: "Answer", css: "number", about: "From the arrival of a request to its answer, without text generation: p50 / p99", text: (one) => latency(one.answer), by: (one) => one.answer[1] },
  { title: "First token", css: "number", about: "From the arrival of a prompt to the first token: p50 / p99", text: (one) => latency(one.first_token), by: (one) => one.first_token[1] },
  { title: "Per token", css: "number", about: "Between two tokens: p50 / p99", text: (one) => latency(one.token), by: (one) => one.token[1] },
], "No requests yet.");

const sessions = new Grid($("sessions"), "Sessions with their work, latency and memory", [
  { title: "Client", css: "name", text: (one) => `${one.client}, ${one.session.slice(0, 8)}`, by: (one) => one.client },
  { title: "Tenant", text: (one) => one.tenant, by: (one) => one.tenant },
  { title: "Work", text: (one) => [one.model, one.phase ? PHASES[one.phase] || words(one.phase) : ""].filter(Boolean).join(", ") || "not known", by: (one) => one.model },
  ...RATES,
  { title: "Steps/s", css: "number", about: "Steps of training and other loops; tokens are not repeated here", text: (one) => (one.tokens ? "—" : rate(one.steps)), by: (one) => one.steps },
  LATENCY,
  { title: "Busy", css: "number", about: BUSY, text: (one) => percent(one.busy), by: (one) => one.busy },
  { title: "Memory", css: "wide", bar: (one) => ({ parts: parts_of(one.kinds), whole: one.largest }), text: (one) => bytes(one.memory) + told(one.kinds), by: (one) => one.memory },
  { title: "Network", css: "number", about: "Shortest round trip", text: (one) => (one.latency ? duration(one.latency) : "—"), by: (one) => one.latency },
  { title: "Age", css: "number", text: (one) => duration(one.age), by: (one) => one.age },
  { title: "", css: "end", act: "End…", done: (one) => ask_to_end(one) },
], "No sessions.");

const events = new Grid($("events"), "Warnings and refusals, the newest first", [
  { title: "Time", css: "mono", text: (one) => clock(one.seconds) },
  { title: "Tenant", text: (one) => one.tenant },
  { title: "What", css: "wide name", text: (one) => one.text },
], "None.");

// Ending a session: a question first, whose answer is sent with the token.
let ended = null;

function ask_to_end(one) {
  ended = one;
  say($("end-what"), `End session ${one.session.slice(0, 8)} of ${one.client}? Its tensors are freed and its program gets SessionLost.`);
  say($("end-error"), "");
  $("end").showModal();
}

$("end-no").addEventListener("click", () => $("end").close());
$("end-yes").addEventListener("click", async () => {
  try {
    const response = await fetch(`/dashboard/end/${encodeURIComponent(ended.session)}`, { method: "POST", headers: { Authorization: `Bearer ${token}` }, credentials: "omit" });
    if (response.ok) $("end").close();
    else say($("end-error"), (await response.text()).trim());
  } catch {
    say($("end-error"), "The server does not answer: try again.");
  }
});

// How long requests waited for the device, of all executors since they started.
function show_queue(all) {
  const sums = new Map();
  for (const one of all) for (const [bound, count] of Object.entries(one.queue)) sums.set(bound, (sums.get(bound) || 0) + count);
  const bounds = [...sums.keys()].sort((a, b) => (a === "+Inf") - (b === "+Inf") || a - b);
  const total = [...sums.values()].reduce((a, b) => a + b, 0) || 1;
  queue.show(bounds.filter((bound) => sums.get(bound)).map((bound) => [bound, { bound, count: sums.get(bound), share: sums.get(bound) / total }]));
}

const queue = new Grid($("queue"), "How long submissions waited for the device", [
  { title: "Waited", css: "number", text: (one) => (one.bound === "+Inf" ? "over 30 s" : `up to ${one.bound < 1 ? `${1000 * one.bound} ms` : `${Number(one.bound)} s`}`) },
  { title: "Share", css: "wide", text: (one) => `${percent(one.share)}, ${one.count.toLocaleString()}`, bar: (one) => ({ parts: [["execute", one.share]], whole: 1 }) },
], "Nothing ran yet.");

const logs = new Map();

function show_logs(all) {
  for (const one of all) {
    if (!one.log.length) continue;
    let found = logs.get(one.key);
    if (!found) {
      found = made("details");
      found.append(made("summary"), made("pre"));
      $("logs").append(found);
      logs.set(one.key, found);
    }
    say(found.firstChild, `${[one.server, one.device].filter(Boolean).join(", ")}, process ${one.process}`);
    say(found.lastChild, one.log.join("\n"));
  }
  const live = new Set(all.map((one) => one.key));
  for (const [key, found] of logs) {
    if (live.has(key)) continue;
    found.remove();
    logs.delete(key);
  }
  $("no-logs").hidden = logs.size > 0;
}

// Plans: a disclosure for each session, which stays as the reader left it.
const plans = new Map();
const no_plans = made("p", "empty", "No open session has a plan. Plans choose where tensors and work go; most models on one device need none.");
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
    [new Chart("Sessions by what they do, on average", stages, rate, true), Object.keys(STAGES)],
    [new Chart("Requests, tokens and steps a second", [{ name: "requests", css: "weights" }, { name: "tokens", css: "caches" }, { name: "steps", css: "inputs" }], rate, false), ["requests", "tokens", "steps"]],
    [new Chart("Sessions", [{ name: "open", css: "execute" }, { name: "waiting for the device", css: "queue" }], (number) => String(Math.round(number)), false), ["sessions", "waiting"]],
  ];
  for (const [chart] of charts) chart.follow = (seconds) => charts.forEach(([other]) => other.at(seconds));
  $("charts").replaceChildren(...charts.map(([chart]) => chart.element));
}

let marks = [];

function show_charts() {
  const oldest = points.length ? points[0][0] : Infinity; // of the last hour there are finer points
  const shown = daily ? [...day.filter((point) => point[0] < oldest), ...points] : points;
  for (const [chart, names] of charts) {
    const columns = names.map((name) => fields.indexOf(name));
    chart.draw(shown.map((point) => [point[0], ...columns.map((column) => point[column])]), marks);
  }
}

function show_marks(all) {
  marks = all.filter((one) => MARKS[one.name] && one.seconds).map((one) => ({ seconds: one.seconds, css: MARKS[one.name], text: one.text }));
  const names = [...new Set(all.filter((one) => MARKS[one.name]).map((one) => MARKS[one.name]))];
  const about = { bad: "executor died or memory refused", good: "executor restarted", warn: "refused or ended", soft: "tensors moved out of memory" };
  $("marks").replaceChildren(...names.map((css) => {
    const item = made("li");
    item.append(made("span", `swatch mark-${css}`), document.createTextNode(about[css]));
    return item;
  }));
}

let latest = null;

function show(news) {
  latest = news;
  if (news.fields) {
    fields = news.fields;
    points = day = [];
    $("sessions").classList.toggle("watching", !news.may_end);
  }
  const more = (daily ? news.day : news.points).length > 0;
  points = points.concat(news.points).slice(-POINTS);
  day = day.concat(news.day).slice(-POINTS);
  if (paused) return;
  const live = news.live;
  say($("about"), `${news.tenant === null ? "all tenants" : `tenant ${news.tenant}`}, djinn ${live.version}, up ${duration(live.uptime)}`);
  executors.show(live.executors.map((one) => [one.key, one]));
  const all = live.executors.flatMap((executor) => executor.sessions.map((one) => ({ ...one, tenant: executor.tenant })));
  const largest = Math.max(...all.map((one) => one.memory));
  for (const one of all) one.largest = largest;
  const wanted = $("filter").value.trim().toLowerCase();
  const found = all.filter((one) => !wanted || `${one.client} ${one.session} ${one.tenant} ${one.model} ${one.phase}`.toLowerCase().includes(wanted));
  sessions.show(found.map((one) => [one.session, one]));
  sessions.empty.textContent = all.length ? "No session matches." : "No sessions.";
  models.show(live.executors.flatMap((one) => one.models.map((model) => [`${one.key} ${model.model}`, { ...model, device: [one.server, one.device].filter(Boolean).join(", ") }])));
  show_queue(live.executors);
  show_logs(live.executors);
  say($("left"), live.left_out ? `and ${live.left_out} sessions that do less` : "");
  show_plans(all);
  const newest = [...live.events].reverse();
  events.show(newest.map((one) => [`${one.seconds}/${one.tenant}/${one.text}`, one]));
  show_marks(live.events);
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
  latest = null;
  for (const grid of [executors, models, queue, sessions, events]) grid.show([]);
  show_logs([]);
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
$("filter").addEventListener("input", () => latest && show({ ...latest, fields: null, points: [], day: [] }));
$("span").addEventListener("click", () => {
  daily = !daily;
  say($("h-past"), daily ? "The past day" : "The past hour");
  say($("span"), daily ? "Show the past hour" : "Show the past day");
  show_charts();
});
$("token").focus();
