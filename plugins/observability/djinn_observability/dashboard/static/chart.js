"use strict";
// Stacked areas and lines over time as SVG. Texts are set as text, never as markup.
const SVG = "http://www.w3.org/2000/svg";
const COLUMNS = 240; // in the width of a chart

function drawn(name, attributes, text) {
  const found = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  if (text !== undefined) found.textContent = text;
  return found;
}

// series: [{name, css}], each a column of the points; rows: [[seconds, values...]]; format: number -> text.
class Chart {
  constructor(title, series, format, stacked) {
    this.title = title;
    this.series = series;
    this.format = format;
    this.stacked = stacked;
    this.rows = [];
    this.shapes = []; // by series: what stands in the page
    this.cursor = null;
    this.element = document.createElement("figure");
    const caption = document.createElement("figcaption");
    caption.textContent = title;
    this.svg = drawn("svg", { viewBox: "0 0 480 150", preserveAspectRatio: "none", tabindex: "0", role: "img" });
    this.plot = drawn("g", {});
    this.marks = drawn("g", {});
    this.follow = (seconds) => this.at(seconds); // replaced where several charts follow each other
    this.line = drawn("line", { y1: 0, y2: 150, class: "cursor", visibility: "hidden" });
    this.svg.append(this.plot, this.marks, this.line);
    this.top = document.createElement("span");
    this.top.className = "top";
    const frame = document.createElement("div");
    frame.className = "frame";
    frame.append(this.top, this.svg);
    const span = document.createElement("div");
    span.className = "span";
    this.from = document.createElement("span");
    this.to = document.createElement("span");
    this.to.textContent = "now";
    span.append(this.from, this.to);
    this.legend = document.createElement("ul");
    this.legend.className = "legend";
    this.values = series.map((one) => {
      const item = document.createElement("li");
      const swatch = document.createElement("span");
      swatch.className = `swatch ${one.css}`;
      swatch.setAttribute("aria-hidden", "true");
      const value = document.createElement("b");
      item.append(swatch, document.createTextNode(`${one.name} `), value);
      this.legend.append(item);
      return value;
    });
    this.said = document.createElement("p");
    this.said.className = "said empty";
    this.element.append(caption, frame, span, this.legend, this.said);
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.svg.addEventListener("pointermove", (event) => {
      const box = this.svg.getBoundingClientRect();
      if (this.rows.length > 1) this.follow(this.first + ((event.clientX - box.left) / box.width) * this.length);
    });
    this.svg.addEventListener("pointerleave", () => this.follow(null));
    this.svg.addEventListener("blur", () => this.follow(null));
  }

  key(event) {
    const last = this.rows.length - 1;
    const now = this.cursor === null ? last : this.cursor;
    const to = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last, Escape: null }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.follow(to === null ? null : this.rows[Math.max(0, Math.min(last, to))]?.[0] ?? null);
  }

  // Point at the row that is nearest to a moment; null: at none.
  at(seconds) {
    this.cursor = null;
    if (seconds !== null && this.rows.length > 1) {
      const after = this.rows.findIndex((row) => row[0] >= seconds);
      const place = after < 0 ? this.rows.length - 1 : after;
      this.cursor = place > 0 && seconds - this.rows[place - 1][0] < this.rows[place][0] - seconds ? place - 1 : place;
    }
    this.show();
  }

  x(seconds) {
    return ((480 * (seconds - this.first)) / this.length).toFixed(1);
  }

  draw(rows, events) {
    this.rows = rows;
    this.events = rows.length > 1 ? events.filter((one) => one.seconds >= rows[0][0]) : [];
    this.first = rows.length ? rows[0][0] : 0;
    this.length = rows.length > 1 ? rows[rows.length - 1][0] - this.first || 1 : 1;
    if (this.cursor !== null && this.cursor >= rows.length) this.cursor = null;
    const sums = rows.map((row) => this.top_of(row));
    const most = Math.max(...sums, 0) || 1;
    this.top.textContent = this.format(most);
    this.from.textContent = rows.length > 1 ? ago(rows[rows.length - 1][0] - rows[0][0]) : "";
    const x = (i) => this.x(rows[i][0]);
    const y = (value) => (148 - (146 * value) / most).toFixed(1);
    if (this.stacked) this.areas(rows, peaks(sums), x, y);
    else this.lines(rows, x, y);
    const last = this.first + this.length;
    this.marks.replaceChildren(...this.events.map((one) => {
      const at = this.x(Math.min(one.seconds, last));
      const line = drawn("line", { x1: at, x2: at, y1: 0, y2: 150, class: `mark mark-${one.css}` });
      line.append(drawn("title", {}, one.text));
      return line;
    }));
    this.show();
  }

  // One polygon for each series, on top of those before it.
  areas(rows, shown, x, y) {
    const across = shown.map(x);
    const below = shown.map(() => 0);
    let lower = across.map((at) => `${at},${y(0)}`);
    this.series.forEach((one, column) => {
      shown.forEach((i, at) => { below[at] += rows[i][column + 1]; });
      const upper = across.map((at, place) => `${at},${y(below[place])}`);
      this.shape(column, "polygon", one.css, rows.some((row) => row[column + 1]) ? [...upper, ...lower.reverse()] : []);
      lower = upper;
    });
  }

  lines(rows, x, y) {
    this.series.forEach((one, column) => {
      const shown = peaks(rows.map((row) => row[column + 1]));
      this.shape(column, "polyline", `stroke ${one.css}`, shown.map((i) => `${x(i)},${y(rows[i][column + 1])}`));
    });
  }

  shape(column, kind, css, points) {
    this.shapes[column] ||= this.plot.appendChild(drawn(kind, { class: css }));
    this.shapes[column].setAttribute("points", points.join(" "));
  }

  top_of(row) {
    const values = this.series.map((_, column) => row[column + 1]);
    return this.stacked ? values.reduce((a, b) => a + b, 0) : Math.max(...values);
  }

  show() {
    const index = this.cursor === null ? this.rows.length - 1 : this.cursor;
    const row = this.rows[index];
    const texts = this.series.map((_, column) => (row ? this.format(row[column + 1]) : ""));
    this.values.forEach((value, column) => { if (value.textContent !== texts[column]) value.textContent = texts[column]; });
    const near = this.cursor === null ? [] : this.events.filter((one) => Math.abs(one.seconds - row[0]) <= this.length / 60);
    this.said.textContent = this.rows.length === 1 ? "One sample so far: the chart begins with the next." : near.map((one) => one.text).join("; ");
    const when = this.cursor === null || !row ? "now" : ago(this.rows[this.rows.length - 1][0] - row[0]);
    this.to.textContent = when;
    const named = this.series.map((one, column) => `${one.name} ${texts[column]}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.title}, ${when}: ${named}. Arrow keys look back.`);
    this.line.setAttribute("visibility", this.cursor === null ? "hidden" : "visible");
    if (this.cursor !== null) {
      const at = this.x(row[0]);
      this.line.setAttribute("x1", at);
      this.line.setAttribute("x2", at);
    }
  }
}

// Which values are drawn: of those that would share two pixels or so, the largest; and the last one.
function peaks(values) {
  const together = Math.ceil(values.length / COLUMNS);
  const shown = [];
  for (let from = 0; from < values.length; from += together) {
    const to = Math.min(from + together, values.length);
    let best = from;
    for (let i = from; i < to; i++) if (values[i] > values[best]) best = i;
    shown.push(best);
  }
  if (shown.length && shown.at(-1) !== values.length - 1) shown.push(values.length - 1);
  return shown;
}

function ago(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min ago`;
  return `${(seconds / 3600).toFixed(1)} h ago`;
}
