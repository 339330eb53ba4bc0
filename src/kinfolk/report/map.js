// The map of all samples, with a tooltip at the sample under the pointer or chosen by the arrow keys.
(() => {
  const samples = page.read("points");
  if (!samples) return;
  const touch = matchMedia("(pointer: coarse)").matches;
  const { x, y, labels } = samples;
  const [plot, legend] = ["plot-map", "legend"].map((id) => document.getElementById(id));
  const stage = plot.parentElement;
  const [ring, tip] = [stage.querySelector(".ring"), stage.querySelector(".tip")];
  let highlighted = null; // a class
  let shown = -1;
  let [tapped, since] = [-1, 0];

  function hide() { tip.hidden = ring.hidden = true; }
  function show(k) {
    shown = k;
    const [tile, label, note, key] = tip.children;
    page.showImage(tile, samples, k);
    label.textContent = page.labelOf(samples, k) ?? "";
    note.textContent = touch && page.choose && page.isAnchor(k) ? "tap again for its kin" : "";
    key.textContent = samples.keys[k];
    tip.hidden = ring.hidden = false;
    const { xaxis, yaxis } = plot._fullLayout;
    const left = plot.offsetLeft + xaxis._offset + xaxis.d2p(x[k]);
    const top = plot.offsetTop + yaxis._offset + yaxis.d2p(y[k]);
    ring.style.left = left + "px";
    ring.style.top = top + "px";
    const offset = left + 18 + tip.offsetWidth > stage.clientWidth ? left - 18 - tip.offsetWidth : left + 18;
    tip.style.left = Math.max(4, Math.min(offset, stage.clientWidth - tip.offsetWidth - 4)) + "px";
    tip.style.top = Math.max(4, Math.min(top - tip.offsetHeight / 2, stage.clientHeight - tip.offsetHeight - 4)) + "px";
  }
  const choose = (k) => { if (page.choose) page.choose(k); };

  function listen() {
    plot.on("plotly_hover", (event) => show(event.points[0].pointNumber));
    plot.on("plotly_click", (event) => {
      const k = event.points[0].pointNumber;
      const now = performance.now();
      show(k);
      // A finger cannot hover: its first tap shows, its second chooses. Plotly reports each tap twice, at once.
      if (!touch || (k === tapped && now > since + 300)) choose(k);
      if (k !== tapped) [tapped, since] = [k, now];
    });
    plot.on("plotly_unhover", hide);
    plot.on("plotly_relayouting", hide);
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (event.key === "Escape") hide();
      if (!step && event.key !== "Enter") return;
      event.preventDefault(); // Enter must not press what the choice moves the focus to
      if (!step) return shown < 0 ? undefined : choose(shown);
      let next = shown;
      do next = (next + step + x.length) % x.length;
      while (highlighted !== null && labels[next] !== highlighted);
      show(next);
    });
  }

  // Named one by one: newer versions of plotly add a button that uploads the chart.
  const BUTTONS = [["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "resetScale2d"], ["toImage"]];
  const colourOf = (label) => page.classColour(label, samples.classes.length);
  let listening = false;
  function draw() {
    hide();
    const opacity = x.map((_, k) => (highlighted !== null && labels[k] !== highlighted ? 0.08 : 0.82));
    const marker = { size: x.length > 2000 ? 5 : 7, line: { width: 0 }, color: labels ? labels.map(colourOf) : colourOf(null), opacity };
    const blank = { visible: false, fixedrange: false };
    const layout = page.themed({
      margin: { l: 8, r: 8, t: 8, b: 8 }, hovermode: "closest", hoverdistance: 24, showlegend: false, uirevision: "map",
      dragmode: touch ? false : "pan", xaxis: blank, yaxis: blank,
    });
    const config = { ...page.CONFIG, displayModeBar: touch ? false : "hover", scrollZoom: false, modeBarButtons: BUTTONS };
    Plotly.react(plot, [{ type: "scatter", mode: "markers", x, y, hoverinfo: "none", marker }], layout, config);
    if (!listening) listen();
    listening = true;
  }

  function drawLegend() {
    if (!labels) return;
    const present = new Set(labels);
    const entries = samples.classes.map((name, label) => [label, name]).filter(([label]) => present.has(label));
    if (present.has(-1)) entries.push([-1, "unlabelled"]);
    legend.hidden = entries.length < 2;
    legend.replaceChildren(...entries.map(([label, name]) => {
      const button = page.make("button");
      const dot = page.make("i");
      const text = page.make("span", "", name);
      dot.style.background = colourOf(label);
      text.dir = "auto";
      button.type = "button";
      button.title = name;
      button.setAttribute("aria-pressed", String(highlighted === label));
      button.append(dot, text);
      button.addEventListener("click", () => {
        highlighted = highlighted === label ? null : label;
        for (const other of legend.children) other.setAttribute("aria-pressed", String(other === button && highlighted !== null));
        draw();
      });
      return button;
    }));
  }
  page.onDraw(() => { drawLegend(); draw(); });
})();
