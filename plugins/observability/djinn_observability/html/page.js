// Draws the picture of a page again whenever a box is opened or closed. Does what geometry.py and svg.py do; keep them alike.
"use strict";

const CHARACTER = 7.6, SMALL = 6.1, LEAST = 110, LINE = 17, CHIP = 18, PAD = 14, GAP = 26, BESIDE = 22, BEND = 16, BAR = 5;
const WIRE = "#8a8f98";

const safe = (words) =>
  words.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
const chipsOf = (box, open) => (open ? box.ownChips : box.chips);
const chipWidth = (chip) => chip.length * SMALL + 12;
const titleOf = (box, open) => (box.inner.length ? (open ? "\u25be " : "\u25b8 ") : "") + box.title;
const headHeight = (box, open) => 8 + LINE + LINE - 2 + (chipsOf(box, open).length ? CHIP + 3 : 0) + BAR + 5;
const headWidth = (box, open) =>
  Math.max(
    LEAST,
    titleOf(box, open).length * CHARACTER + 20,
    box.detail.length * SMALL + 20,
    chipsOf(box, open).reduce((sum, chip) => sum + chipWidth(chip) + 4, 16),
  );

function span(row, widths, boxes) {
  const edges = [];
  let x = 0;
  for (const cell of row) {
    edges.push([x, x + widths[cell]]);
    x += widths[cell] + BESIDE;
  }
  const solid = edges.filter((_, i) => row[i] < boxes);
  const counted = solid.length ? solid : edges;
  const middle = (counted[0][0] + counted[counted.length - 1][1]) / 2;
  return [middle, x - BESIDE - middle];
}

function place(box) {
  if (!box.open || !box.inner.length)
    return { box, x: 0, y: 0, width: headWidth(box, false), height: headHeight(box, false), open: false, inner: [], wires: [] };
  const inner = box.inner.map(place);
  const widths = {};
  for (const row of box.rows) for (const cell of row) widths[cell] = cell < inner.length ? inner[cell].width : BEND;
  const spans = box.rows.map((row) => span(row, widths, inner.length));
  const reach = Math.max(...spans.map((s) => Math.max(s[0], s[1])));
  const middle = Math.max(reach, headWidth(box, true) / 2 - PAD) + PAD;
  let top = headHeight(box, true) + (box.rows[0].includes(inner.length) ? 2 : PAD / 2);
  const points = {};
  box.rows.forEach((row, r) => {
    const height = Math.max(0, ...row.filter((c) => c < inner.length).map((c) => inner[c].height));
    let x = middle - spans[r][0];
    for (const cell of row) {
      points[cell] = [x + widths[cell] / 2, top, top + height];
      if (cell < inner.length) {
        inner[cell].x = x;
        inner[cell].y = top;
      }
      x += widths[cell] + BESIDE;
    }
    top += height + GAP;
  });
  const last = box.rows[box.rows.length - 1];
  const height = top - GAP + (last.includes(inner.length + 1) ? 0 : PAD);
  const wires = box.wires.map((wire) => {
    const way = [];
    wire.forEach((cell, i) => {
      const [x, upper, lower] = points[cell];
      if (i > 0) way.push([x, upper]);
      if (i === wire.length - 1) return;
      if (cell < inner.length) way.push([x, inner[cell].y + inner[cell].height]);
      way.push([x, lower]);
    });
    return way;
  });
  return { box, x: 0, y: 0, width: 2 * middle, height, open: true, inner, wires };
}

function path(points) {
  let [x, y] = points[0];
  let d = `M${x},${y}`;
  points.slice(1).forEach(([toX, toY]) => {
    const half = (y + toY) / 2;
    d += x === toX ? ` L${toX},${toY}` : ` C${x},${half} ${toX},${half} ${toX},${toY}`;
    [x, y] = [toX, toY];
  });
  return d;
}

function frame(shift, placed, fill, line, opacity, dashed) {
  return `<rect x="${shift}" y="${-shift}" width="${placed.width}" height="${placed.height}" rx="6" fill="${fill}" ` +
    `stroke="${line}" fill-opacity="${opacity}"${dashed ? ' stroke-dasharray="4 3"' : ""}/>`;
}

function head(placed, line) {
  const { box, open } = placed, middle = placed.width / 2;
  let y = 8 + LINE - 5;
  let out = `<text x="${middle}" y="${y}" text-anchor="middle" font-weight="${box.own ? "normal" : "bold"}" fill="#222">` +
    `${safe(titleOf(box, open))}</text>`;
  y += LINE - 2;
  out += `<text x="${middle}" y="${y}" text-anchor="middle" font-size="10.5" fill="#555">${safe(box.detail)}</text>`;
  const chips = chipsOf(box, open);
  let x = middle - chips.reduce((sum, chip) => sum + chipWidth(chip) + 4, 0) / 2 + 2;
  for (const chip of chips) {
    const width = chipWidth(chip);
    out += `<rect x="${x}" y="${y + 6}" width="${width}" height="${CHIP - 2}" rx="8" fill="white" stroke="${line}"/>` +
      `<text x="${x + width / 2}" y="${y + 18}" text-anchor="middle" font-size="10" fill="${line}">${safe(chip)}</text>`;
    x += width + 4;
  }
  const length = Math.min(placed.width - 20, 160), top = headHeight(box, open) - BAR - 4;
  const bar = (width, fill) =>
    `<rect x="${middle - length / 2}" y="${top}" width="${width}" height="${BAR}" rx="2" fill="${fill}"/>`;
  return out + bar(length, "#0000001a") + (box.share > 0 ? bar(Math.max(length * box.share, 1), line) : "");
}

function draw(placed, colours) {
  const { box } = placed, [fill, line] = colours[box.phase];
  let out = `<g transform="translate(${placed.x},${placed.y})"><g class="head${box.inner.length ? " folds" : ""}" data-box="${box.id}"`;
  out += box.inner.length ? ` role="button" tabindex="0" aria-expanded="${placed.open}">` : ">";
  out += `<title>${safe(box.tip)}</title>`;
  if (box.count > 1) out += frame(8, placed, "white", line, 0.5) + frame(4, placed, "white", line, 0.5);
  out += placed.open
    ? frame(0, placed, "white", line, 1) + frame(0, placed, fill, line, 0.28)
    : frame(0, placed, box.own ? "white" : fill, line, 1, box.own);
  out += head(placed, line) + "</g>";
  for (const wire of placed.wires)
    out += `<path d="${path(wire)}" fill="none" stroke="${WIRE}" stroke-width="1.3" marker-end="url(#arrow)" pointer-events="none"/>`;
  return out + placed.inner.map((inner) => draw(inner, colours)).join("") + "</g>";
}

function render(scene) {
  const placed = place(scene.whole), width = placed.width + 24, height = placed.height + 24;
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="-8 -12 ${width} ${height}" ` +
    `font-family="Helvetica, Arial, sans-serif" font-size="12"><defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" ` +
    `markerWidth="7" markerHeight="7" orient="auto"><path d="M0,0.5 L7.5,4 L0,7.5 z" fill="${WIRE}"/></marker></defs>` +
    draw(placed, scene.colours) + "</svg>";
}

function each(box, work) {
  work(box);
  box.inner.forEach((inner) => each(inner, work));
}

function show(scene, root) {
  const boxes = {};
  each(scene.whole, (box) => (boxes[box.id] = box));
  const first = Object.values(boxes).filter((box) => box.open);
  const picture = root.querySelector(".picture");
  const redraw = (focus) => {
    picture.innerHTML = render(scene);
    if (focus !== undefined) picture.querySelector(`[data-box="${focus}"]`)?.focus();
  };
  const toggle = (event) => {
    const found = event.target.closest(".folds");
    if (!found) return;
    event.preventDefault();
    const box = boxes[found.dataset.box];
    box.open = !box.open;
    redraw(box.id);
  };
  picture.addEventListener("click", toggle);
  picture.addEventListener("keydown", (event) => (event.key === "Enter" || event.key === " ") && toggle(event));
  const all = { open: () => true, close: (box) => box === scene.whole, first: (box) => first.includes(box) };
  for (const [name, wanted] of Object.entries(all))
    root.querySelector(`.${name}`).addEventListener("click", () => {
      each(scene.whole, (box) => (box.open = wanted(box)));
      redraw();
    });
  redraw();
}

if (typeof module !== "undefined") module.exports = { render, each };
