// Maps of points: one of all samples, and the small ones of several epochs side by side, in which the same sample is marked everywhere.
(() => {
  const samples = page.read("points");
  if (!samples) return;
  const touch = matchMedia("(pointer: coarse)").matches;

  // A plot inside a `.stage` with its ring and, where it has one, its tooltip. `at(k)` is the sample of point k.
  function pointMap(plot, { x, y, at, words, passes, size, onShow, onHide }) {
    const stage = plot.parentElement;
    const ring = stage.querySelector(".ring");
    const tip = stage.querySelector(".tip");
    let shown = -1;
    let [tapped, since] = [-1, 0];

    function mark(k) {
      const { xaxis, yaxis } = plot._fullLayout;
      const left = plot.offsetLeft + xaxis._offset + xaxis.d2p(x[k]);
      const top = plot.offsetTop + yaxis._offset + yaxis.d2p(y[k]);
      ring.hidden = false;
      ring.style.left = left + "px";
      ring.style.top = top + "px";
      return [left, top];
    }
    function unmark() { tip.hidden = ring.hidden = true; }
    function hide() { unmark(); if (onHide) onHide(); }
    function show(k) {
      shown = k;
      const [tile, label, note, key] = tip.children;
      page.showImage(tile, samples, at(k));
      label.textContent = page.labelOf(samples, at(k)) ?? "";
      const hint = touch && page.choose && page.isAnchor(at(k)) ? "tap again for its kin" : "";
      note.textContent = [words ? words(k) : "", hint].filter((word) => word).join(" · ");
      key.textContent = samples.keys[at(k)];
      tip.hidden = false;
      const [left, top] = mark(k);
      const offset = left + 18 + tip.offsetWidth > stage.clientWidth ? left - 18 - tip.offsetWidth : left + 18;
      tip.style.left = Math.max(4, Math.min(offset, stage.clientWidth - tip.offsetWidth - 4)) + "px";
      tip.style.top = Math.max(4, Math.min(top - tip.offsetHeight / 2, stage.clientHeight - tip.offsetHeight - 4)) + "px";
      if (onShow) onShow(k);
    }

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
        while (passes && !passes(next));
        show(next);
      });
    }
    const choose = (k) => { if (page.choose) page.choose(at(k)); };

    let listening = false;
    function draw(colours, opacity, more) {
      unmark();
      const trace = { type: "scatter", mode: "markers", x, y, hoverinfo: "none", marker: { size, line: { width: 0 }, color: colours, opacity } };
      const blank = { visible: false, fixedrange: !more };
      const layout = page.themed({
        margin: { l: 8, r: 8, t: 8, b: 8 }, hovermode: "closest", hoverdistance: 24, showlegend: false, uirevision: "map",
        dragmode: more && !touch ? "pan" : false, xaxis: blank, yaxis: blank,
      });
      Plotly.react(plot, [trace], layout, { ...page.CONFIG, ...more });
      if (!listening) listen();
      listening = true;
    }
    return { draw, mark, unmark };
  }

  // ---- the map of all samples
  let chosen = null; // the highlighted class
  const legend = document.getElementById("legend");
  const all = pointMap(document.getElementById("plot-map"), {
    x: samples.x, y: samples.y, at: (k) => k, size: samples.x.length > 2000 ? 5 : 7,
    passes: (k) => chosen === null || samples.labels[k] === chosen,
  });
  // Named one by one: newer versions of plotly add a button that uploads the chart.
  const BUTTONS = [["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "resetScale2d"], ["toImage"]];
  const colourOf = (label) => page.classColour(label, samples.classes.length);

  function drawAll() {
    const { labels } = samples;
    const opacity = samples.x.map((_, k) => (chosen !== null && labels[k] !== chosen ? 0.08 : 0.82));
    const more = { displayModeBar: touch ? false : "hover", scrollZoom: false, modeBarButtons: BUTTONS };
    all.draw(labels ? labels.map(colourOf) : colourOf(null), opacity, more);
  }

  function drawLegend() {
    if (!samples.labels) return;
    const present = new Set(samples.labels);
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
      button.setAttribute("aria-pressed", String(chosen === label));
      button.append(dot, text);
      button.addEventListener("click", () => {
        chosen = chosen === label ? null : label;
        for (const other of legend.children) other.setAttribute("aria-pressed", String(other === button && chosen !== null));
        drawAll();
      });
      return button;
    }));
  }
  page.onDraw(() => { drawLegend(); drawAll(); });

  // ---- the small maps of several epochs
  const stages = page.read("stages");
  if (!stages) return;
  const by = document.getElementById("colour-by");
  const small = stages.maps.map(({ epoch, x, y, pseudo }, number) => {
    const others = (act) => { for (const [other, map] of small.entries()) if (other !== number) act(map); };
    const words = (k) => (!pseudo ? "" : pseudo[k] < 0 ? "no pseudo-label" : `cluster ${pseudo[k]}`);
    return {
      pseudo,
      ...pointMap(document.getElementById(`plot-stage-${epoch}`), {
        x, y, words, at: (k) => stages.place[k], size: 5,
        onShow: (k) => others((map) => map.mark(k)),
        onHide: () => others((map) => map.unmark()),
      }),
    };
  });
  function drawSmall() {
    const byPseudo = stages.clusters > 0 && (!by || by.value === "pseudo");
    const byLabel = samples.labels ? stages.place.map((i) => colourOf(samples.labels[i])) : colourOf(null);
    for (const { pseudo, draw } of small) {
      const labels = pseudo || stages.place.map(() => -1);
      if (byPseudo) draw(labels.map((label) => page.classColour(label, stages.clusters)), labels.map((label) => (label < 0 ? 0.55 : 0.85)));
      else draw(byLabel, 0.85);
    }
  }
  if (by) by.addEventListener("change", drawSmall);
  page.onDraw(drawSmall);
})();
