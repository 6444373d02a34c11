"use strict";
// Draws the charts with Plotly. With one run, colours mark question kinds (or benchmarks); with several, colours mark
// runs and line styles mark kinds.

const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const FINITE = (value) => value !== null && value !== undefined;

/** Escapes text for Plotly, which parses a subset of HTML. */
function plain(text) {
  return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;");
}

/** The trailing mean over `size` values at each index; gaps are skipped. */
function smoothed(values, size) {
  if (size <= 1) return values;
  return values.map((_, at) => {
    const part = values.slice(Math.max(0, at - size + 1), at + 1).filter(FINITE);
    return part.length ? part.reduce((sum, value) => sum + value, 0) / part.length : null;
  });
}

class Charts {
  constructor(data) {
    this.data = data;
    this.several = data.runs.length > 1;
    this.group = document.getElementById("group");
    this.window = document.getElementById("window");
    this.last = 0; // number of the latest drawing; older ones stop when a newer one starts
    const again = () => this.drawAll();
    this.group.addEventListener("change", again);
    if (this.window) this.window.addEventListener("change", again);
    document.getElementById("chart-controls").addEventListener("submit", (event) => event.preventDefault());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  }

  color(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  }

  /** The colour of a line by its run, kind or name; ink if it covers everything. */
  colorOf(chart, line) {
    const ofGroup = line.group && line.group !== "all";
    const place = this.several ? line.run
      : ofGroup ? this.data.groups.indexOf(line.group)
      : line.name && !line.group ? this.names(chart).indexOf(line.name) : -1;
    return this.color(place < 0 ? "ink" : `c${place % 8}`);
  }

  names(chart) {
    return [...new Set(chart.lines.filter((line) => !line.group).map((line) => line.name))];
  }

  dash(chart, line) {
    if (!this.several) return line.faint ? "dot" : "solid";
    const place = line.group ? this.data.groups.indexOf(line.group) : this.names(chart).indexOf(line.name);
    return DASHES[Math.max(place, 0) % DASHES.length];
  }

  label(line) {
    const parts = [this.several ? this.data.runs[line.run].name : "", line.group === "all" ? "" : line.group, line.name];
    return plain(parts.filter(Boolean).join(", ")) || "all";
  }

  chosen(chart) {
    const group = this.group.value;
    return chart.lines.filter((line) => {
      if (!line.group) return true;
      if (group) return line.group === group;
      return !chart.pooled || line.group === "all";
    });
  }

  traces(chart) {
    const size = chart.axis === "step" && this.window ? Number(this.window.value) : 1;
    const lines = this.chosen(chart);
    const named = !this.several && lines.some((line) => line.name && !line.group);
    const traces = lines.map((line) => {
      const color = this.colorOf(chart, line);
      const x = line.x || this.data.runs[line.run].steps;
      const dots = line.low !== undefined || x.length === 1;
      const trace = { x, y: dots ? line.y : smoothed(line.y, size), name: this.label(line), showlegend: false };
      trace.hovertemplate = "%{y:.4~g}";
      if (chart.form === "bars") {
        trace.x = x.map((label) => plain(label).replace(/[: ]/g, "$&<br>"));
        if (chart.full_width) trace.offsetgroup = String(line.run);
        Object.assign(trace, { type: "bar", marker: { color, opacity: line.faint ? 0.4 : 1 } });
      } else {
        const width = chart.axis === "turn" ? 2.5 : 1.75;
        Object.assign(trace, { type: "scatter", mode: "lines", opacity: line.faint ? 0.55 : 1 });
        trace.line = { color, dash: this.dash(chart, line), width };
        // A value between two gaps has no line, so it needs a marker.
        if (chart.axis === "turn" || line.y.includes(null)) Object.assign(trace, { mode: "lines+markers", marker: { color, size: 4 } });
        if (chart.form === "stacked") Object.assign(trace, { stackgroup: "one", line: { color, width: 1 } });
        if (named) trace.showlegend = true;
      }
      if (line.low) {
        const up = line.high.map((high, at) => high - line.y[at]);
        const down = line.low.map((low, at) => line.y[at] - low);
        const bar = { color, thickness: 1, width: 2, type: "data", symmetric: false, array: up, arrayminus: down };
        // Intervals of several runs and kinds in one chart would overlap.
        if (chart.form === "bars") trace.error_y = { ...bar, color: this.color("ink"), thickness: 1.5, width: 4 };
        else if (!this.several || this.group.value || this.data.groups.length < 2) trace.error_y = bar;
        if (chart.form !== "bars") {
          Object.assign(trace, { mode: "lines+markers", marker: { color, size: 5 } });
        }
      }
      return trace;
    });
    const names = this.several && chart.form === "lines" ? this.names(chart).filter(Boolean) : [];
    const color = this.color("faint");
    traces.push(...names.map((name, at) => ({ // legend entries for the line styles
      x: [null], y: [null], type: "scatter", mode: "lines", name: plain(name), showlegend: true, hoverinfo: "skip",
      line: { color, width: 2, dash: DASHES[this.names(chart).indexOf(name) % DASHES.length] },
    })));
    return chart.axis === "step" ? [...traces, ...this.alarmTraces()] : traces;
  }

  /** Alarms are markers at the bottom of every chart over steps. */
  alarmTraces() {
    return this.data.alarms.flatMap((fired, run) =>
      Object.entries(fired).map(([name, steps]) => ({
        x: steps,
        y: steps.map(() => 0.03),
        yaxis: "y2",
        type: "scatter",
        mode: "markers",
        name: plain(this.several ? `${this.data.runs[run].name}: ${name}` : name),
        marker: { symbol: "triangle-up", size: 10, color: this.color("alarm") },
        hovertemplate: "alarm",
        showlegend: false,
      })),
    );
  }

  layout(chart, traces) {
    const ink = this.color("faint");
    const axis = { gridcolor: this.color("line"), zerolinecolor: this.color("line"), linecolor: this.color("line"),
      exponentformat: "e" };
    const x = { step: { title: { text: "step", standoff: 4 } }, turn: { dtick: 1 }, category: { type: "category" } };
    const shown = traces.some((trace) => trace.showlegend);
    return {
      font: { color: ink, size: 12, family: "system-ui, sans-serif" },
      paper_bgcolor: "transparent",
      plot_bgcolor: "transparent",
      margin: { l: 44, r: 8, t: shown ? 26 : 8, b: 10 },
      hovermode: "x unified",
      hoverlabel: { bgcolor: this.color("raised"), bordercolor: this.color("line"), font: { color: this.color("ink") } },
      // On touch screens dragging must scroll the page.
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      xaxis: { ...axis, ...x[chart.axis], automargin: true },
      yaxis: { ...axis, automargin: true, rangemode: chart.axis === "turn" || chart.form !== "lines" ? "tozero" : "normal" },
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
      barmode: "group",
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { color: this.color("ink") } },
    };
  }

  /** A chart's description for screen readers: each line's first and last value. */
  spoken(chart) {
    const number = (value) => Number(value.toPrecision(3));
    const lines = this.chosen(chart).slice(0, 12).map((line) => {
      const values = line.y.filter(FINITE);
      const ends = values.length > 1 ? `${number(values[0])} to ${number(values.at(-1))}` : `${number(values[0])}`;
      return `${this.label(line)}: ${ends}`;
    });
    return `${chart.title}. ${lines.join("; ")}`;
  }

  async drawAll() {
    const mine = ++this.last;
    this.legend();
    for (const chart of this.data.charts) {
      const place = document.getElementById(`chart-${chart.id}`);
      const traces = this.traces(chart);
      place.setAttribute("aria-label", this.spoken(chart));
      const options = { displayModeBar: false, responsive: true };
      await Plotly.react(place, traces, this.layout(chart, traces), options);
      await new Promise((go) => setTimeout(go)); // keeps the page responsive between charts
      if (mine !== this.last) return;
    }
    document.documentElement.dataset.drawn = String(mine);
  }

  legend() {
    const entry = (text, color, dash) => {
      const pattern = { dash: "6 4", dot: "2 3", dashdot: "6 3 2 3", longdash: "10 4", longdashdot: "10 3 2 3" }[dash];
      const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
      for (const [key, value] of Object.entries({ width: 30, height: 10, "aria-hidden": "true" })) svg.setAttribute(key, value);
      for (const [key, value] of Object.entries({ x1: 0, x2: 30, y1: 5, y2: 5, stroke: color, "stroke-width": 3 })) {
        line.setAttribute(key, value);
      }
      if (pattern) line.setAttribute("stroke-dasharray", pattern);
      svg.append(line);
      return element("li", {}, svg, text);
    };
    const groups = this.data.groups.filter((group) => !this.group.value || group === this.group.value);
    const place = (group) => this.data.groups.indexOf(group);
    const entries = this.several
      ? this.data.runs.map((run, at) => entry(run.name, this.color(`c${at % 8}`), "solid"))
      : groups.map((group) => entry(group, this.color(`c${place(group) % 8}`), "solid"));
    if (this.several && groups.length > 1) {
      entries.push(...groups.map((group) => entry(group, this.color("faint"), DASHES[place(group) % DASHES.length])));
    }
    document.getElementById("legend").replaceChildren(...entries);
    for (const swatch of document.querySelectorAll(".swatch")) {
      if (swatch.dataset.color) swatch.style.background = this.color(`c${swatch.dataset.color % 8}`);
    }
  }
}

(async () => {
  const data = await unpacked("data");
  document.head.append(element("script", {}, await unpackedText("plotly")));
  await new Charts(data).drawAll();
})();
