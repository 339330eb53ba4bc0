"use strict";
// Common to all pages: theme, figures, printing. The scripts that follow register their drawing functions with `page.onDraw`.
const page = (() => {
  const root = document.documentElement;
  const drawers = [];
  const read = (id) => {
    const element = document.getElementById("data-of-" + id);
    return element ? JSON.parse(element.textContent) : null;
  };
  const value = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
  const theme = () => root.dataset.theme;
  const CONFIG = { displaylogo: false, responsive: true, displayModeBar: false };

  // ---- elements: everything that comes from the data is set as text
  function make(tag, className, text) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  }

  // ---- samples: {keys, labels, classes, tile}, as the page's JSON holds them
  const labelOf = (samples, i) => {
    if (!samples.labels) return null;
    const label = samples.labels[i];
    return label < 0 ? "unlabelled" : samples.classes[label];
  };
  function showImage(element, samples, i) {
    element.style.display = samples.tile ? "" : "none";
    if (!samples.tile) return;
    const { size, columns, rows } = samples.tile;
    const part = (at, count) => (count > 1 ? (100 * at) / (count - 1) + "%" : "0");
    element.style.backgroundSize = `${100 * columns}% ${100 * rows}%`;
    element.style.backgroundPosition = `${part(i % columns, columns)} ${part(Math.floor(i / columns), rows)}`;
    element.style.imageRendering = size <= 32 ? "pixelated" : "auto";
  }

  // ---- colours: the system's theme until the reader chooses one; `theme.js` has set it before the first paint
  const CLASS_COLOURS = {
    light: ["#2f6fa8", "#d1701c", "#3b8f4a", "#b8393f", "#7d5bb0", "#86604a", "#c75c9c", "#6d7278", "#9a8f12", "#1794a5"],
    dark: ["#6aa9e0", "#f0984f", "#6cc07a", "#ec7075", "#b092e2", "#c39a83", "#ee92c6", "#a9aeb5", "#d3c53c", "#46c4d6"],
  };
  function classColour(label, count) {
    if (label === null || label === undefined) return value("accent");
    if (label < 0) return value("none");
    const palette = CLASS_COLOURS[theme()];
    if (count <= palette.length) return palette[label % palette.length];
    const lightness = (theme() === "dark" ? 68 : 44) + (label % 3) * 6 - 6;
    return `hsl(${Math.round(label * 137.508) % 360} 58% ${lightness}%)`;
  }

  // ---- figures
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
    error_x: trace.error_x && { ...trace.error_x, color: value(trace.error_x.color) },
  });
  const figures = read("figures") || {};
  drawers.push(() => {
    for (const [id, figure] of Object.entries(figures)) {
      Plotly.react("plot-" + id, figure.data.map(coloured), themed(figure.layout), CONFIG);
    }
  });

  // ---- tables that are wider than the page say so
  const showScrolling = () => {
    for (const table of document.querySelectorAll(".sideways")) {
      table.nextElementSibling.hidden = table.scrollWidth <= table.clientWidth;
    }
  };

  const draw = () => { for (const drawer of drawers) drawer(); };

  function start() {
    document.getElementById("theme").addEventListener("click", () => {
      root.dataset.theme = theme() === "dark" ? "light" : "dark";
      try { localStorage.setItem("kinfolk-theme", theme()); } catch { /* a page from disk may have no storage */ }
      draw();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { root.dataset.theme = preferredTheme(); draw(); });
    const plots = () => document.querySelectorAll(".js-plotly-plot");
    addEventListener("beforeprint", () => {
      root.dataset.theme = "light";
      draw();
      for (const element of plots()) Plotly.relayout(element, { width: Number(element.dataset.printed || 320) });
    });
    addEventListener("afterprint", () => {
      root.dataset.theme = preferredTheme();
      for (const element of plots()) Plotly.relayout(element, { width: null, autosize: true });
      draw();
    });
    addEventListener("resize", showScrolling);
    draw();
    showScrolling();
    root.dataset.ready = "true";
  }

  return { read, value, make, labelOf, showImage, classColour, themed, CONFIG, onDraw: (drawer) => drawers.push(drawer), start };
})();
