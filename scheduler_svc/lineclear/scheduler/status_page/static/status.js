"use strict";
// The status page: reads the stream of steps with fetch, because EventSource cannot send a token in a header.

const COLUMNS = 160;
const KEPT = 2048;
const HISTORY_SECONDS = 600;
const POLL_SECONDS = 2;
const get = (id) => document.getElementById(id);
const live = { steps: [], state: null, skipped: 0, rates: [], figures: [] };
let view = live; // what is drawn: all that was received, or a copy of it while paused
let chosen = null;
let token = sessionStorage.getItem("lineclear-token") || "";
let isDrawn = true;

function say(text, className) {
  get("connection").textContent = text;
  get("connection").className = className || "";
}

async function watch() {
  const headers = token ? { Authorization: "Bearer " + token } : {};
  const response = await fetch("/status/steps?history=" + COLUMNS, { headers, cache: "no-store" });
  if (response.status === 401) return askForToken(token ? "This token is not valid." : "");
  if (!response.ok) throw new Error((await response.text()).trim());
  get("login").hidden = true;
  get("view").hidden = false;
  say("live", "live");
  Object.assign(live, { steps: [], rates: [], figures: [] }); // it may be another server, whose numbers begin anew
  const asking = setInterval(() => ask(headers), 1000 * POLL_SECONDS);
  try {
    ask(headers);
    return await follow(response);
  } finally {
    clearInterval(asking);
  }
}

// Adds the figures of GetStats to the history.
async function ask(headers) {
  const response = await fetch("/status/stats", { headers, cache: "no-store" }).catch(() => null);
  if (!response || !response.ok) return;
  const stats = await response.json();
  if (live.figures.length && live.figures.at(-1).uptime >= stats.uptime) return; // answers overtook each other
  live.figures.push(stats);
  while (live.figures[0].uptime < stats.uptime - HISTORY_SECONDS) live.figures.shift();
  if (view === live) drawFigures();
}

async function follow(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return "the stream ended";
    text += value;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      if (event.startsWith("event:end")) return "the server stopped";
      if (event.startsWith("data:")) take(JSON.parse(event.slice(5)));
    }
  }
}

function askForToken(problem) {
  token = "";
  sessionStorage.removeItem("lineclear-token");
  get("view").hidden = true;
  get("login").hidden = false;
  get("login-problem").textContent = problem;
  say("a token is required", "down");
  return null;
}

async function run() {
  for (;;) {
    let ended;
    try {
      ended = await watch();
    } catch (error) {
      ended = error.message || "no connection";
    }
    if (ended === null) return; // the form starts again
    say(ended + "; trying again", "down");
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

function take(data) {
  live.steps.push(...data.steps);
  live.steps.splice(0, Math.max(0, live.steps.length - KEPT));
  live.skipped += data.skipped;
  if (data.state) {
    live.state = data.state;
    live.rates.push([data.state.taken_at, data.state.generation_tokens]);
    while (live.rates.length > 2 && live.rates[0][0] < data.state.taken_at - 2) live.rates.shift();
    const joined = data.state.workers.length, wanted = data.state.num_workers_wanted;
    const lack = data.state.draining ? "; the server drains" : !joined ? "; no worker has joined" :
      joined < wanted ? `; ${joined} of ${wanted} workers have joined` : "";
    say("live" + lack, "live");
  }
  if (isDrawn && view === live) {
    isDrawn = false;
    requestAnimationFrame(draw);
  }
}

function table(element, head, rows, empty) {
  const cells = (tag, values) => {
    const row = document.createElement("tr");
    for (const value of values) {
      const cell = document.createElement(tag);
      if (value instanceof Node) { cell.className = "bar"; cell.append(value); } else cell.textContent = value;
      row.append(cell);
    }
    return row;
  };
  if (!rows.length) {
    const row = cells("td", [empty]);
    row.firstChild.className = "empty";
    return element.replaceChildren(row);
  }
  element.replaceChildren(cells("th", head), ...rows.map((row) => cells("td", row)));
}

function bar(value, most) {
  const progress = document.createElement("progress");
  progress.max = most;
  progress.value = value;
  progress.title = `${value} of ${most} positions`;
  return progress;
}

function seconds(value) {
  return value < 1 ? (value * 1000).toFixed(1) + " ms" : value.toFixed(2) + " s";
}

function drawTiles() {
  const recent = view.steps.slice(-50);
  const state = view.state;
  if (recent.length) {
    get("step-time").textContent = seconds(recent.reduce((sum, step) => sum + step.step_time, 0) / recent.length);
  }
  get("skipped").textContent = view.skipped;
  if (!state) return;
  const [first, last] = [view.rates[0] || [0, 0], view.rates[view.rates.length - 1] || [0, 0]];
  const passed = last[0] - first[0];
  get("tokens-per-second").textContent = passed > 0 ? Math.round((last[1] - first[1]) / passed) : 0;
  get("hit-rate").textContent = state.prefix_cache_queries ?
    Math.round((100 * state.prefix_cache_hits) / state.prefix_cache_queries) + " %" : "-";
  get("running-count").textContent = state.running.length;
  get("waiting-count").textContent = state.num_waiting;
  get("preemptions").textContent = state.preemptions;
}

function perSecond(first, last, names) {
  const count = (stats) => names.reduce((sum, name) => sum + Number(stats.counters[name]), 0);
  return last.uptime > first.uptime ? (count(last) - count(first)) / (last.uptime - first.uptime) : 0;
}

function drawFigures() {
  const figures = view.figures, last = figures.at(-1);
  if (!last) return;
  const before = figures.find((stats) => stats.uptime >= last.uptime - 10) || last;
  get("finished-per-second").textContent = perSecond(before, last, ["requests_finished"]).toFixed(1);
  get("failed-per-second").textContent =
    perSecond(before, last, ["requests_failed", "requests_expired", "requests_rejected"]).toFixed(1);
  const quantiles = (found) => (found && found.count ? `${seconds(found.p50)} / ${seconds(found.p99)}` : "-");
  get("first-token").textContent = quantiles(last.time_to_first_token_seconds);
  get("between-tokens").textContent = quantiles(last.request_mean_inter_token_latency_seconds);
  const lines = {
    "tokens/s": (stats) => stats.generation_tokens_per_second,
    "requests running": (stats) => stats.gauges.num_requests_running,
    "requests waiting": (stats) => stats.gauges.num_requests_waiting,
    "KV blocks in use, %": (stats) => 100 * stats.gauges.kv_cache_usage_ratio,
  };
  const names = Object.keys(lines), span = Math.min(HISTORY_SECONDS, Math.max(20, last.uptime - figures[0].uptime));
  canvases(get("history"), "history-", names).forEach(({ title, canvas }, index) => {
    const points = figures.map((stats) => [stats.uptime, lines[names[index]](stats)]);
    const most = Math.max(...points.map(([, value]) => value));
    title.textContent = `${names[index]}: ${Math.round(points.at(-1)[1])}, at most ${Math.round(most)}`;
    drawLine(canvas, points, span);
  });
  const rows = last.workers.map((worker) => [worker.index === undefined ? "-" : worker.index,
    worker.state.replace("_", " "), worker.device || "-", Math.max(0, worker.joins - 1),
    worker.num_requests_running, Math.round(worker.generation_tokens_per_second)]);
  table(get("workers"), ["worker", "state", "device", "restarts", "running", "tokens/s"], rows, "no worker");
}

function workers() {
  const known = new Set(view.steps.slice(-COLUMNS).map((step) => step.worker));
  for (const worker of view.state ? view.state.workers : []) known.add(worker.worker);
  return [...known].sort((a, b) => a - b);
}

// A title and a canvas for each worker, kept from one drawing to the next.
function canvases(parent, prefix, names) {
  const wanted = names.map((name) => prefix + name);
  for (const child of [...parent.children]) if (!wanted.includes(child.id)) child.remove();
  return names.map((name) => {
    let box = get(prefix + name);
    if (!box) {
      box = document.createElement("div");
      box.id = prefix + name;
      const title = document.createElement("p");
      title.className = "worker";
      box.append(title, document.createElement("canvas"));
      parent.append(box);
    }
    return { title: box.firstChild, canvas: box.lastChild };
  });
}

function drawTimelines() {
  const names = workers();
  canvases(get("timelines"), "timeline-", names).forEach(({ title, canvas }, index) => {
    const steps = view.steps.filter((step) => step.worker === names[index]);
    title.textContent = `worker ${names[index]}: ${steps.length ? "step " + steps[steps.length - 1].step : "no step yet"}`;
    const geometry = drawTimeline(canvas, steps, chosen, COLUMNS);
    canvas.onclick = (event) => {
      const step = geometry.at(event.offsetX);
      chosen = step ? step.number : null;
      draw();
    };
  });
}

function drawPools() {
  const found = view.state ? view.state.workers : [];
  canvases(get("pools"), "pool-", found.map((worker) => worker.worker)).forEach(({ title, canvas }, index) => {
    const worker = found[index];
    const free = worker.num_blocks - worker.blocks_used - worker.blocks_cached, snapshots = worker.num_state_snapshots;
    const states = snapshots ? `; recurrent states: ${worker.num_running} of ${worker.num_slots} in slots, ` +
      `${worker.state_snapshots_used} of ${snapshots} snapshots used, ${snapshots - worker.state_snapshots_used} free, ` +
      `${worker.state_snapshot_hits} hits` : "";
    title.textContent = `worker ${worker.worker} on ${worker.device}: ${worker.num_blocks} blocks of ${worker.block_size}` +
      ` positions: ${worker.blocks_used} in use (${worker.blocks_shared} shared), ${worker.blocks_cached} cached, ${free} free${states}`;
    drawBlocks(canvas, Uint8Array.from(atob(worker.block_map), (character) => character.charCodeAt(0)));
  });
}

function drawStep() {
  const shown = view.steps.find((step) => step.number === chosen) || view.steps[view.steps.length - 1];
  if (!shown) return;
  const which = shown.number === chosen ? "" : ", the newest";
  get("mask-title").textContent = `of step ${shown.step} of worker ${shown.worker}${which}`;
  const rows = shown.rows;
  drawMask(get("mask"), rows);
  const cells = rows.slot.map((slot, row) => [
    slot, "#" + rows.request[row], KINDS[rows.kind[row]],
    `${rows.start[row]} … ${rows.start[row] + rows.num_tokens[row] - 1}`, rows.num_tokens[row], rows.cached_tokens[row],
  ]);
  table(get("rows"), ["slot", "request", "row", "positions", "tokens", "cached"], cells, "no rows");
}

function drawRequests() {
  if (!view.state) return;
  const running = view.state.running.map((r) => [
    "#" + r.request, `${r.worker}/${r.slot}`, r.prompt_tokens + (r.cached_tokens ? ` (${r.cached_tokens} cached)` : ""),
    `${Math.max(0, r.position - r.prompt_tokens + 1)}/${r.max_tokens}`,
    bar(r.position, r.prompt_tokens + r.max_tokens - 1),
  ]);
  table(get("running"), ["request", "worker/slot", "prompt", "output", "progress"], running, "no request runs");
  const waiting = view.state.waiting.map((w) => ["#" + w.request, w.prompt_tokens, w.max_tokens, seconds(w.waited)]);
  table(get("queue"), ["request", "prompt", "at most", "waits"], waiting, "no request waits");
}

function draw() {
  isDrawn = true;
  readPalette();
  drawTiles();
  drawFigures();
  drawTimelines();
  drawStep();
  drawPools();
  drawRequests();
  document.body.dataset.steps = view.steps.length;
}

legend(get("step-legend"), [["prefill", "prefill"], ["decode", "decode"], ["cached", "behind a cached prefix"],
  ["recompute", "recompute"], ["preempted", "preempted"], ["idle", "idle"]]);
legend(get("mask-legend"), [["cached", "key from the prefix cache"], ["earlier", "key of an earlier step"],
  ["new", "key of this step"], ["idle", "masked: later position or other request"]]);
legend(get("block-legend"), [["used", "in use"], ["shared", "shared"], ["cached", "cached"], ["free", "free"]]);
get("login").onsubmit = (event) => {
  event.preventDefault();
  token = get("token").value.trim();
  sessionStorage.setItem("lineclear-token", token);
  get("token").value = "";
  run();
};
get("pause").onclick = () => {
  view = view === live ? { ...live, steps: [...live.steps], rates: [...live.rates], figures: [...live.figures] } : live;
  get("pause").textContent = view === live ? "Pause" : "Continue";
  draw();
};
window.onresize = draw;
matchMedia("(prefers-color-scheme: dark)").onchange = draw;
run();
