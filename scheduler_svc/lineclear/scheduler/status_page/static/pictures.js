"use strict";
// Canvas drawings of the status page, from data and the colours of the style sheet.

const KINDS = ["prefill", "prefill", "decode", "recompute"]; // by the numbers of RowKind in steps.proto, and colours
const COLOURS = ["fore", "dim", "prefill", "decode", "recompute", "cached", "preempted", "idle", "free", "shared", "used",
  "earlier", "new"];
let palette = {};

// Reads the colours before a drawing. To read them for each cell took three times as long as to draw the cells.
function readPalette() {
  const style = getComputedStyle(document.documentElement);
  palette = Object.fromEntries(COLOURS.map((name) => [name, style.getPropertyValue("--" + name).trim()]));
}

function colour(name) {
  return palette[name];
}

function prepared(canvas, height) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth || canvas.parentElement.clientWidth || 600;
  canvas.style.height = height + "px";
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "11px system-ui, sans-serif";
  return { pen, width, height };
}

function legend(element, entries) {
  element.replaceChildren(...entries.flatMap(([name, text]) => {
    const box = document.createElement("i");
    box.style.background = `var(--${name})`;
    return [box, document.createTextNode(text)];
  }));
}

// A line of [seconds, value], the newest at the right, over `span` seconds.
function drawLine(canvas, points, span) {
  const { pen, width, height } = prepared(canvas, 44);
  const most = Math.max(1e-9, ...points.map(([, value]) => value));
  pen.strokeStyle = colour("decode");
  pen.lineWidth = 1.5;
  pen.beginPath();
  for (const [at, value] of points) {
    pen.lineTo(width * (1 - (points.at(-1)[0] - at) / span), height - 2 - (height - 4) * (value / most));
  }
  pen.stroke();
}

// Rows are slots, columns are steps. Returns the geometry, for clicks.
function drawTimeline(canvas, steps, chosen, columns) {
  const shown = steps.slice(-columns);
  // After max_batch_size is lowered, a request may still have a slot beyond it.
  const slots = Math.max(1, ...shown.flatMap((step) => [step.num_slots, ...step.rows.slot.map((slot) => slot + 1)]));
  const cell = Math.max(3, Math.min(16, Math.floor(320 / slots)));
  const label = 30;
  const { pen, width } = prepared(canvas, slots * cell + 4);
  const step = Math.max(2, Math.min(16, (width - label) / columns));
  pen.fillStyle = colour("idle");
  pen.fillRect(label, 2, step * columns, slots * cell);
  const left = label + (columns - shown.length) * step;
  const slotOf = new Map();
  const gap = cell > 5 ? 1 : 0;
  shown.forEach((record, column) => {
    const x = left + column * step;
    const rows = record.rows;
    rows.slot.forEach((slot, row) => {
      slotOf.set(rows.request[row], slot);
      const y = 2 + slot * cell;
      pen.fillStyle = colour(KINDS[rows.kind[row]]);
      pen.fillRect(x, y, step - (step > 4 ? 1 : 0), cell - gap);
      // The first row after the cached prefix shows that the rest of the prompt was not computed.
      if (rows.cached_tokens[row] > 0 && rows.start[row] === rows.cached_tokens[row]) {
        pen.fillStyle = colour("cached");
        pen.fillRect(x, y, step - (step > 4 ? 1 : 0), Math.max(2, (cell - gap) / 2));
      }
    });
    for (const request of record.preempted) {
      const slot = slotOf.get(request);
      if (slot === undefined) continue;
      pen.fillStyle = colour("preempted");
      pen.fillRect(x, 2 + slot * cell, step - (step > 4 ? 1 : 0), cell - gap);
    }
    if (record.number === chosen) {
      pen.strokeStyle = colour("fore");
      pen.lineWidth = 1.5;
      pen.strokeRect(x - 0.5, 1, step, slots * cell + 2);
    }
  });
  pen.fillStyle = colour("dim");
  const every = Math.ceil(12 / cell);
  for (let slot = 0; slot < slots; slot += every) pen.fillText(String(slot), 4, 2 + slot * cell + Math.min(cell, 11));
  return { at: (x) => shown[Math.floor((x - left) / step)] };
}

function drawBlocks(canvas, codes) {
  const width = canvas.clientWidth || 600;
  const cell = Math.max(3, Math.min(12, Math.floor(Math.sqrt((width * 130) / Math.max(1, codes.length)))));
  const columns = Math.max(1, Math.floor((width - 4) / cell));
  const rows = Math.ceil(codes.length / columns);
  const { pen } = prepared(canvas, rows * cell + 4);
  const colours = [colour("free"), colour("cached"), colour("used"), colour("shared")];
  for (let block = 0; block < codes.length; block++) {
    pen.fillStyle = colours[Math.min(3, codes[block])];
    pen.fillRect(2 + (block % columns) * cell, 2 + Math.floor(block / columns) * cell, cell - 1, cell - 1);
  }
}

// Cells of a row of the mask: keys of earlier steps, keys of this step, and queries; several to a cell if there are many.
function maskBlock(rows, row, most) {
  const start = rows.start[row], count = rows.num_tokens[row];
  const fresh = Math.min(count, Math.max(1, Math.floor(most / 2)));
  const old = Math.min(start, Math.max(1, most - fresh));
  return { row, start, count, old, fresh, cached: Math.min(rows.cached_tokens[row], start) };
}

// The block-diagonal mask of one packed step: a query attends to the keys of its own request up to its position.
function drawMask(canvas, rows) {
  if (rows.slot.length === 0) return;
  const most = Math.max(2, Math.floor(120 / rows.slot.length));
  const blocks = rows.slot.map((_, row) => maskBlock(rows, row, most));
  const totalKeys = blocks.reduce((sum, block) => sum + block.old + block.fresh, 0);
  const totalQueries = blocks.reduce((sum, block) => sum + block.fresh, 0);
  const left = 64, top = 18;
  const cellY = Math.max(1.5, Math.min(20, 296 / totalQueries));
  const { pen, width } = prepared(canvas, top + totalQueries * cellY + 6);
  const cellX = (width - left - 6) / totalKeys;
  const box = (x, y, name) => {
    pen.fillStyle = name;
    pen.fillRect(x, y, Math.max(0.8, cellX - (cellX > 4 ? 1 : 0)), Math.max(0.8, cellY - (cellY > 4 ? 1 : 0)));
  };
  const colours = { idle: colour("idle"), cached: colour("cached"), earlier: colour("earlier"), fresh: colour("new") };
  pen.fillStyle = colours.idle;
  pen.fillRect(left, top, totalKeys * cellX, totalQueries * cellY);
  let x = left, y = top;
  for (const block of blocks) {
    for (let query = 0; query < block.fresh; query++) {
      for (let key = 0; key < block.old; key++) {
        const position = (key * block.start) / block.old;
        box(x + key * cellX, y + query * cellY, position < block.cached ? colours.cached : colours.earlier);
      }
      for (let key = 0; key <= query; key++) box(x + (block.old + key) * cellX, y + query * cellY, colours.fresh);
    }
    const tall = block.fresh * cellY;
    if (tall >= 9 || blocks.length < 30) {
      pen.fillStyle = colour("dim");
      pen.fillText("#" + rows.request[block.row], 4, y + Math.min(tall, 11));
    }
    x += (block.old + block.fresh) * cellX;
    y += tall;
  }
  pen.fillStyle = colour("dim");
  pen.fillText("keys →", left, 12);
  pen.fillText("queries ↓", 4, 12);
}
