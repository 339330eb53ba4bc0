"use strict";
(() => {
  const root = document.documentElement;
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const figures = read("figures");
  const shown = read("shown");
  const value = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
  const keep = () => { try { localStorage.setItem("kinfolk-theme", root.dataset.theme); } catch { /* a page from disk may have no storage */ } };

  function draw() {
    const axis = (own) => ({ gridcolor: value("grid"), linecolor: value("line"), zeroline: false, automargin: true, fixedrange: true, ...own });
    for (const [id, figure] of Object.entries(figures)) {
      const traces = figure.data.map((trace) => ({
        ...trace,
        line: trace.type === "bar" ? undefined : { ...trace.line, color: value(trace.line.color) },
        marker: { ...trace.marker, color: value(trace.marker.color) },
      }));
      Plotly.react("plot-" + id, traces, {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", ...figure.layout,
        font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: value("soft") },
        hoverlabel: { bgcolor: value("card"), bordercolor: value("line"), font: { color: value("ink"), size: 12 } },
        xaxis: axis(figure.layout.xaxis), yaxis: axis(figure.layout.yaxis),
      }, { displaylogo: false, responsive: true, displayModeBar: false });
    }
  }

  // ---- samples: everything that comes from the data is set as text
  const make = (tag, className, text) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const labelOf = (i) => (shown.labels ? shown.labels[i] : null);

  function sample(i, note, against) {
    const figure = make("figure", "sample");
    const label = labelOf(i);
    figure.title = [shown.names[i], label].filter((word) => word !== null).join(" · ");
    if (shown.tile) {
      const { columns, rows, size } = shown.tile;
      const tile = make("span", "tile");
      const part = (at, count) => (count > 1 ? (100 * at) / (count - 1) + "%" : "0");
      tile.style.backgroundSize = `${100 * columns}% ${100 * rows}%`;
      tile.style.backgroundPosition = `${part(i % columns, columns)} ${part(Math.floor(i / columns), rows)}`;
      tile.style.imageRendering = size <= 32 ? "pixelated" : "auto";
      tile.setAttribute("role", "img");
      tile.setAttribute("aria-label", shown.names[i]);
      figure.append(tile);
    } else {
      figure.classList.add("bare");
    }
    if (note) figure.append(make("span", "num", note));
    if (label !== null) {
      const differs = against !== undefined && labelOf(against) !== null && label !== labelOf(against);
      const name = make("b", "", (differs ? "✗ " : "") + label);
      name.dir = "auto";
      figure.append(name);
    }
    figure.append(make("bdi", "", shown.names[i]));
    if (against !== undefined && label !== null && labelOf(against) !== null) {
      const right = label === labelOf(against);
      figure.classList.add(right ? "right" : "wrong");
      if (!right) figure.append(make("span", "unseen", "another label than the anchor"));
    }
    return figure;
  }

  const cards = shown.anchors.map((anchor) => {
    const card = make("article", "card");
    const kin = make("div", "row");
    for (const [i, similarity] of anchor.kin) kin.append(sample(i, similarity.toFixed(3), anchor.sample));
    card.append(sample(anchor.sample, `above ${anchor.threshold.toFixed(3)}`), kin);
    const words = [anchor.sample, ...anchor.kin.map(([i]) => i)].flatMap((i) => [shown.names[i], labelOf(i) ?? ""]).join("\n").toLowerCase();
    return { card, words, highest: anchor.kin[0][1], wrong: kin.querySelector(".wrong") !== null };
  });
  document.getElementById("cards").append(...cards.map(({ card }) => card));

  const find = document.getElementById("find");
  const from = document.getElementById("from");
  const wrong = document.getElementById("wrong");
  function filter() {
    const word = find.value.trim().toLowerCase();
    const least = from.value === "" ? -1 : Number(from.value);
    let count = 0;
    for (const { card, words, highest, wrong: isWrong } of cards) {
      const stays = words.includes(word) && highest >= least && (!wrong || !wrong.checked || isWrong);
      card.classList.toggle("hidden", !stays);
      count += stays;
    }
    document.getElementById("count").textContent = count ? `${count} of ${cards.length}` : "none; loosen the filter";
  }
  for (const control of [find, from, wrong]) if (control) control.addEventListener("input", filter);

  const groups = document.getElementById("group-cards");
  if (groups) groups.append(...shown.groups.map((group) => {
    const card = make("article", "card wide");
    const members = make("div", "row");
    members.append(...group.samples.map((i) => sample(i)));
    const more = group.size > group.samples.length ? `, ${group.samples.length} shown` : "";
    card.append(make("h3", "", `${group.kind}, ${group.size} samples${more}`), members);
    return card;
  }));
  const hubs = document.getElementById("hub-cards");
  if (hubs) hubs.append(...shown.hubs.map(([i, number, times]) => sample(i, `${number} anchors, ${times}×`)));

  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
    keep();
    draw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { root.dataset.theme = preferredTheme(); draw(); });
  addEventListener("beforeprint", () => { root.dataset.theme = "light"; draw(); });
  addEventListener("afterprint", () => { root.dataset.theme = preferredTheme(); draw(); });

  filter();
  draw();
  root.dataset.ready = "true";
})();
