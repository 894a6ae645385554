"use strict";
// Draws the figures of a report (launch/report/page.py) from the values in the page. No request leaves the page.
const RUNS = JSON.parse(document.getElementById("values").textContent);
// Okabe and Ito's colours, which people with any colour vision tell apart; dashes are the second cue.
const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#B8A800"];
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const SYMBOLS = ["circle", "diamond", "square", "triangle-up", "cross", "x", "star", "triangle-down"];
const AXES = {step: "optimizer steps", tokens: "tokens", hours: "hours since the first start"};
const KINDS = {
  step: "steps that were kept", data_wait: "waiting for data", checkpoint_stall: "stalled by checkpoints",
  evaluation: "evaluation", profile: "profiling", start: "starting", compile: "compiling", lost_work: "lost work",
  down: "down between attempts",
};
const isLoss = (name) => /^(average_)?(validation_)?loss(\/|$)/.test(name) || name === "held_out_loss";
// title, unit, which values, factor
const PANELS = [
  ["Loss", "nats per token", isLoss, 1],
  ["Gradient norm", "before clipping", (name) => name === "grad_norm", 1],
  ["Learning rate", "", (name) => name === "lr", 1],
  ["Speed", "tokens per second", (name) => name === "tokens_per_second", 1],
  ["Model FLOPs utilization", "% of datasheet peak", (name) => name === "mfu", 100],
  ["Speed as a share of the measured peak", "%", (name) => ["share_of_measured_peak", "share_of_peak"].includes(name), 100],
  ["Memory", "GiB, rank with the most", (name) => name === "memory_gib", 1],
  ["Perplexity", "", (name) => name.includes("perplexity"), 1],
  ["Bits per byte", "bits", (name) => name.includes("bits_per_byte"), 1],
  ["Tasks", "", (name) => name.startsWith("task/"), 1],
  ["Device power", "W, all devices", (name) => name === "device_power_watts", 1],
  ["Device temperature", "°C, hottest", (name) => name === "device_temperature_celsius", 1],
];
const control = (id) => document.getElementById(id);
const plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;");  // plotly reads some tags
const dark = () => matchMedia("(prefers-color-scheme: dark)").matches && !printing;
const shown = () => RUNS.map((run, index) => [run, index]).filter(([, index]) => control(`run-${index}`).checked);
let printing = false;

function smooth(values, weight) {
  let mean = null;
  return values.map((value) => {
    if (value === null) return null;
    mean = mean === null ? value : weight * mean + (1 - weight) * value;
    return mean;
  });
}

function label(run, name, all) {
  const words = plain(name.replaceAll("_", " "));
  return RUNS.length === 1 ? words : all ? `${plain(run.name)}: ${words}` : plain(run.name);
}

function curves([title, unit, wanted, factor]) {
  const axis = control("axis").value, weight = Number(control("smoothing").value), traces = [];
  for (const [run, index] of shown()) {
    const parts = [[run.steps, false], [run.evaluations, true]];
    const names = parts.flatMap(([columns]) => Object.keys(columns).filter(wanted));
    names.forEach((name, series) => {
      const [columns, marked] = parts.find(([each]) => name in each);
      const y = columns[name].map((value) => value === null ? null : factor * value), x = columns[axis] || columns.step;
      const style = RUNS.length === 1 ? series : index, second = RUNS.length === 1 ? index : series;
      const line = {color: COLOURS[style % COLOURS.length], width: 2,
        dash: DASHES[(RUNS.length === 1 ? style : second + index) % DASHES.length]};
      const trace = {x, y, name: label(run, name, names.length > 1), legendgroup: `${index}-${name}`, line,
        mode: marked ? "lines+markers" : "lines", marker: {symbol: SYMBOLS[style % SYMBOLS.length], size: 7},
        connectgaps: marked, hovertemplate: "%{x:,.6~g}: %{y:.5~g}"};
      if (weight > 0 && !marked) {
        traces.push({...trace, opacity: 0.25, showlegend: false, hoverinfo: "skip", line: {...line, width: 1}});
        traces.push({...trace, y: smooth(y, weight)});
      } else traces.push(trace);
    });
    if (title === "Loss") traces.push(...badSteps(run, index, axis));
  }
  return [traces, {xaxis: {title: {text: AXES[axis]}}, yaxis: {title: {text: unit}, type: control("scale").value}}];
}

function badSteps(run, index, axis) {
  const bad = run.incidents.filter((one) => ["spike", "skipped", "rolled_back"].includes(one.kind) && one.step !== null);
  const steps = run.steps.step || [], x = [], y = [], text = [];
  for (const one of bad) {
    let low = 0, high = steps.length - 1;
    while (low < high) { const middle = (low + high) >> 1; if (steps[middle] < one.step) low = middle + 1; else high = middle; }
    if (high < 0) continue;
    x.push(axis === "step" ? one.step : run.steps[axis][low]); y.push((run.steps.loss || [])[low]);
    text.push(plain(`${one.kind.replaceAll("_", " ")}: ${one.words}`));
  }
  if (!x.length) return [];
  return [{x, y, text, mode: "markers", name: RUNS.length === 1 ? "bad steps" : `${plain(run.name)}: bad steps`,
    hovertemplate: "%{text}", marker: {symbol: "x-open", size: 11, color: COLOURS[1], line: {width: 2}}}];
}

function timeShares([run]) {
  const kinds = Object.keys(KINDS).filter((kind) => kind in run.time.shares);
  const traces = kinds.map((kind, index) => ({x: run.time.hours, y: run.time.shares[kind].map((share) => 100 * share),
    name: KINDS[kind], stackgroup: "all", mode: "lines", line: {width: 1, color: COLOURS[index % COLOURS.length],
    dash: DASHES[index % DASHES.length]}, fillpattern: {shape: ["", "/", "\\", "x", "-", "|", "+", "."][index % 8]},
    hovertemplate: "%{y:.1f} %"}));
  return [traces, {xaxis: {title: {text: AXES.hours}}, yaxis: {title: {text: "% of the time"}, range: [0, 100]}, hovermode: "x unified"}];
}

function timeLine([run]) {
  const ink = dark() ? "#e8e8e8" : "#1b1b1b", traces = [];
  run.attempts.forEach((one, index) => traces.push({x: [one.from, one.to], y: ["attempts", "attempts"], mode: "lines+markers",
    line: {width: 9, color: COLOURS[index % 2 ? 5 : 0]}, marker: {size: 10, symbol: "line-ns-open", color: ink},
    showlegend: false, text: Array(2).fill(plain(`attempt ${one.number}, ${one.ranks} ranks; ${one.words}`)), hovertemplate: "%{text}"}));
  const saves = run.saves.hours || [];
  traces.push({x: saves, y: saves.map(() => "checkpoints"), mode: "markers", showlegend: false,
    marker: {symbol: "triangle-up", size: 9, color: COLOURS[2]}, hovertemplate: "step %{text}", text: run.saves.step || []});
  [...new Set(run.incidents.map((one) => one.kind))].forEach((kind, index) => {
    const here = run.incidents.filter((one) => one.kind === kind);
    traces.push({x: here.map((one) => one.hours), y: here.map(() => plain(kind.replaceAll("_", " "))), mode: "markers",
      text: here.map((one) => plain(one.words)), hovertemplate: "%{text}", showlegend: false,
      marker: {size: 9, symbol: SYMBOLS[index % SYMBOLS.length], color: COLOURS[(index + 1) % COLOURS.length]}});
  });
  return [traces, {xaxis: {title: {text: AXES.hours}}, yaxis: {type: "category", autorange: "reversed", automargin: true}}];
}

function saves([run]) {
  const columns = [["stall_seconds", "stall of the loop"], ["seconds", "background write"]];
  const traces = columns.filter(([name]) => name in run.saves).map(([name, words], index) => ({x: run.saves.step,
    y: run.saves[name], name: words, mode: "markers", marker: {symbol: SYMBOLS[index], color: COLOURS[index], size: 7},
    hovertemplate: "step %{x}: %{y:.3~g} s"}));
  return [traces, {xaxis: {title: {text: AXES.step}}, yaxis: {title: {text: "seconds"}, type: control("scale").value}}];
}

const FIGURES = [];
function add(title, draw, wide, about) {
  const figure = document.createElement("figure"), caption = document.createElement("figcaption"), plot = document.createElement("div");
  figure.className = wide ? "wide" : "";
  caption.textContent = title;
  plot.className = "plot";
  plot.setAttribute("role", "img");
  plot.setAttribute("aria-label", about);
  figure.append(caption, plot);
  control("figures").append(figure);
  FIGURES.push([plot, draw]);
}

function has(wanted) {
  return RUNS.some((run) => [run.steps, run.evaluations].some((columns) => Object.keys(columns).some(wanted)));
}

function set_up() {
  RUNS.forEach((run, index) => {
    const box = document.createElement("input"), words = document.createElement("label");
    Object.assign(box, {type: "checkbox", checked: true, id: `run-${index}`});
    words.append(box, ` ${run.name}`);
    control("runs").append(words);
  });
  control("runs").hidden = RUNS.length === 1;
  const known = (name) => PANELS.some(([, , wanted]) => wanted(name));
  for (const panel of PANELS) {
    if (has(panel[2])) add(panel[0], () => curves(panel), panel[0] === "Loss", `${panel[0]} of the runs, ${panel[1]}`);
  }
  for (const run of RUNS) {
    const of = RUNS.length === 1 ? "" : ` of ${run.name}`;
    if (run.time.hours.length) add(`Time${of}: goodput and each loss of time`, () => timeShares([run]), true, `What the time${of} was spent on`);
    if (run.attempts.length) add(`Attempts, incidents and checkpoints${of}`, () => timeLine([run]), true, `Time line${of}`);
    if (run.saves.step) add(`Cost of checkpoints${of}`, () => saves([run]), false, `Seconds of each save${of}`);
  }
  const others = [...new Set(RUNS.flatMap((run) => [run.steps, run.evaluations].flatMap((columns) => Object.keys(columns))))]
    .filter((name) => !known(name) && !["step", "tokens", "hours", "model_flops_per_second"].includes(name));
  for (const name of others.slice(0, 12)) {
    const panel = [name, "", (each) => each === name, 1];
    add(name.replaceAll("_", " "), () => curves(panel), false, `${name} of the runs`);
  }
}

function draw() {
  const style = getComputedStyle(document.documentElement), value = (name) => style.getPropertyValue(name).trim();
  const [ink, grid] = printing ? ["#000000", "#999999"] : [value("--ink"), value("--line")];
  control("smoothed").textContent = control("smoothing").value;
  for (const [plot, make] of FIGURES) {
    const [traces, layout] = make();
    for (const name of ["xaxis", "yaxis"]) Object.assign(layout[name], {nticks: 7, gridcolor: grid, zerolinecolor: grid, linecolor: grid, automargin: true, exponentformat: "SI", minexponent: 4});
    Object.assign(layout, {paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: {color: ink, size: 13},
      margin: {l: 55, r: 15, t: 36, b: 45}, showlegend: traces.some((one) => one.showlegend !== false) && traces.length > 1,
      legend: {orientation: "h", yanchor: "bottom", y: 1.02, x: 0}, modebar: {bgcolor: "rgba(0,0,0,0)", color: ink}});
    Plotly.react(plot, traces, layout, {displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d"]});
  }
}

try {
  set_up();
  draw();
  control("controls").addEventListener("input", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("beforeprint", () => { printing = true; draw(); });
  addEventListener("afterprint", () => { printing = false; draw(); });
  control("controls").addEventListener("submit", (event) => event.preventDefault());
  document.body.dataset.figures = FIGURES.length;
} catch (error) {
  const words = document.createElement("p");
  words.id = "failure";
  words.textContent = `The figures could not be drawn: ${error}`;
  control("figures").append(words);
}
