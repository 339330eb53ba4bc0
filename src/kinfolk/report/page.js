"use strict";
(() => {
  const root = document.documentElement;
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const figures = read("figures");
  const points = read("points");
  const CLASS_COLOURS = {
    light: ["#2f6fa8", "#d1701c", "#3b8f4a", "#b8393f", "#7d5bb0", "#86604a", "#c75c9c", "#6d7278", "#9a8f12", "#1794a5"],
    dark: ["#6aa9e0", "#f0984f", "#6cc07a", "#ec7075", "#b092e2", "#c39a83", "#ee92c6", "#a9aeb5", "#d3c53c", "#46c4d6"],
  };

  // ---- theme: the system's choice until the reader makes one; `theme.js` has set it before the first paint
  const system = matchMedia("(prefers-color-scheme: dark)");
  const theme = () => root.dataset.theme;
  const value = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
  const keep = () => { try { localStorage.setItem("kinfolk-theme", theme()); } catch { /* a page from disk may have no storage */ } };

  function themed(layout) {
    const axis = (own) => ({ gridcolor: value("grid"), linecolor: value("line"), zeroline: false, automargin: true, fixedrange: true, ...own });
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      ...layout,
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: value("soft") },
      hoverlabel: { bgcolor: value("card"), bordercolor: value("line"), font: { color: value("ink"), size: 12 } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: value("soft"), activecolor: value("accent") },
      xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis),
    };
  }
  const coloured = (trace) => ({
    ...trace,
    line: { ...trace.line, color: value(trace.line.color) },
    marker: { ...trace.marker, color: value(trace.marker.color) },
  });
  const CONFIG = { displaylogo: false, responsive: true, displayModeBar: false };

  function drawCurves() {
    for (const [id, figure] of Object.entries(figures)) {
      Plotly.react("plot-" + id, figure.data.map(coloured), themed(figure.layout), CONFIG);
    }
  }

  // ---- embedding map
  let chosen = null; // index of the highlighted class
  let shown = -1; // index of the sample in the tooltip
  const plot = document.getElementById("plot-map");
  const legend = document.getElementById("legend");
  const tip = document.getElementById("tip");
  const ring = document.getElementById("ring");

  function classColour(label) {
    if (label === null || label === undefined) return value("accent");
    if (label < 0) return value("soft");
    const palette = CLASS_COLOURS[theme()];
    if (points.classes.length <= palette.length) return palette[label % palette.length];
    const lightness = (theme() === "dark" ? 68 : 44) + (label % 3) * 6 - 6;
    return `hsl(${Math.round(label * 137.508) % 360} 58% ${lightness}%)`;
  }

  function drawMap() {
    if (!points || !plot) return;
    const labels = points.labels;
    const faded = (i) => chosen !== null && labels[i] !== chosen;
    const trace = {
      type: "scatter", mode: "markers", x: points.x, y: points.y, hoverinfo: "none",
      marker: {
        size: points.x.length > 2000 ? 5 : 7, line: { width: 0 },
        color: labels ? labels.map(classColour) : classColour(null),
        opacity: points.x.map((_, i) => (faded(i) ? 0.08 : 0.82)),
      },
    };
    const blank = { visible: false, fixedrange: false };
    const touch = matchMedia("(pointer: coarse)").matches;
    const layout = themed({
      margin: { l: 8, r: 8, t: 8, b: 8 }, hovermode: "closest", hoverdistance: 24, showlegend: false, uirevision: "map",
      dragmode: touch ? false : "pan", xaxis: blank, yaxis: blank,
    });
    Plotly.react(plot, [trace], layout, {
      ...CONFIG, displayModeBar: touch ? false : "hover", scrollZoom: false,
      // Named one by one: newer versions of plotly add a button that uploads the chart.
      modeBarButtons: [["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "resetScale2d"], ["toImage"]],
    });
  }

  function drawLegend() {
    if (!points || !points.labels) return;
    const present = new Set(points.labels);
    const entries = points.classes.map((name, label) => [label, name]).filter(([label]) => present.has(label));
    if (present.has(-1)) entries.push([-1, "unlabelled"]);
    legend.hidden = entries.length < 2;
    legend.replaceChildren(...entries.map(([label, name]) => {
      const button = document.createElement("button");
      const dot = document.createElement("i");
      const text = document.createElement("span");
      dot.style.background = classColour(label);
      text.textContent = name;
      text.dir = "auto";
      button.type = "button";
      button.title = name;
      button.setAttribute("aria-pressed", String(chosen === label));
      button.append(dot, text);
      button.addEventListener("click", () => {
        chosen = chosen === label ? null : label;
        for (const other of legend.children) other.setAttribute("aria-pressed", String(other === button && chosen !== null));
        drawMap();
      });
      return button;
    }));
  }

  function showTip(i) {
    shown = i;
    const [tile, label, key] = tip.children;
    key.textContent = points.keys[i];
    label.textContent = !points.labels ? "" : points.labels[i] < 0 ? "unlabelled" : points.classes[points.labels[i]];
    tile.hidden = !points.tile;
    tile.style.display = points.tile ? "" : "none";
    tip.hidden = false;
    if (points.tile) {
      const { size, columns, rows } = points.tile;
      const shownSize = tile.clientWidth;
      tile.style.backgroundSize = `${columns * shownSize}px ${rows * shownSize}px`;
      tile.style.backgroundPosition = `${-(i % columns) * shownSize}px ${-Math.floor(i / columns) * shownSize}px`;
      tile.style.imageRendering = size <= 32 ? "pixelated" : "auto";
    }
    const { xaxis, yaxis } = plot._fullLayout;
    const x = plot.offsetLeft + xaxis._offset + xaxis.d2p(points.x[i]);
    const y = plot.offsetTop + yaxis._offset + yaxis.d2p(points.y[i]);
    const stage = tip.parentElement;
    ring.hidden = false;
    ring.style.left = x + "px";
    ring.style.top = y + "px";
    const left = x + 18 + tip.offsetWidth > stage.clientWidth ? x - 18 - tip.offsetWidth : x + 18;
    tip.style.left = Math.max(4, Math.min(left, stage.clientWidth - tip.offsetWidth - 4)) + "px";
    tip.style.top = Math.max(4, Math.min(y - tip.offsetHeight / 2, stage.clientHeight - tip.offsetHeight - 4)) + "px";
  }
  const hideTip = () => { tip.hidden = ring.hidden = true; };

  function listen() {
    if (!points || !plot) return;
    plot.on("plotly_hover", (event) => showTip(event.points[0].pointNumber));
    plot.on("plotly_click", (event) => showTip(event.points[0].pointNumber));
    plot.on("plotly_unhover", hideTip);
    plot.on("plotly_relayouting", hideTip);
    plot.addEventListener("blur", hideTip);
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (event.key === "Escape") hideTip();
      if (!step) return;
      event.preventDefault();
      let next = shown;
      do next = (next + step + points.x.length) % points.x.length;
      while (chosen !== null && points.labels[next] !== chosen);
      showTip(next);
    });
  }

  function draw() {
    if (tip) hideTip();
    drawCurves();
    drawLegend();
    drawMap();
  }

  // ---- theme switch and printing
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = theme() === "dark" ? "light" : "dark";
    keep();
    draw();
  });
  system.addEventListener("change", () => { root.dataset.theme = preferredTheme(); draw(); });

  const plots = () => document.querySelectorAll(".js-plotly-plot");
  addEventListener("beforeprint", () => {
    root.dataset.theme = "light";
    draw();
    for (const details of document.querySelectorAll("details")) details.open = true;
    for (const element of plots()) Plotly.relayout(element, { width: element === plot ? 680 : 320 });
  });
  addEventListener("afterprint", () => {
    root.dataset.theme = preferredTheme();
    for (const element of plots()) Plotly.relayout(element, { width: null, autosize: true });
    draw();
  });

  draw();
  listen();
  root.dataset.ready = "true";
})();
