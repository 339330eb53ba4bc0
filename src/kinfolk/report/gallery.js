// Anchors and their kin: filtered, shown in parts, with arrow keys for navigation.
(() => {
  const shown = page.read("gallery");
  if (!shown) return;
  const samples = shown.samples || page.read("points");
  const FIRST = 8;
  const PART = 24;
  const [find, ofLabel, from, wrong] = ["find", "of-label", "from", "wrong"].map((id) => document.getElementById(id));
  const [chosen, cards, more, count] = ["chosen", "cards", "more", "count"].map((id) => document.getElementById(id));
  const { make } = page;
  const placeOf = new Map(shown.anchors.map((sample, at) => [sample, at]));
  const words = samples.keys.map((key, i) => [key, page.labelOf(samples, i) ?? "", samples.texts ? samples.texts[i] : ""].join("\n").toLowerCase());
  if (samples.texts) document.getElementById("main").classList.add("texts");
  const known = (i) => samples.labels !== null && samples.labels[i] >= 0;
  // true, false, or null where a label is missing
  const right = (i, anchor) => (known(i) && known(anchor) ? samples.labels[i] === samples.labels[anchor] : null);

  function sample(i, note, anchor) {
    const figure = make("figure", "sample");
    const label = page.labelOf(samples, i);
    const isRight = anchor === undefined ? null : right(i, anchor);
    const opens = placeOf.has(i) && anchor !== undefined;
    const tile = make(opens ? "button" : "span", samples.tile ? "tile" : "plain");
    const parts = [samples.keys[i], label, note, isRight === null ? null : isRight ? "right" : "wrong"].filter((word) => word);
    figure.title = parts.join(" · ").replaceAll("\n", " · ");
    tile.setAttribute("aria-label", parts.join(", ").replaceAll("\n", ", ") + (opens ? "; show its kin" : ""));
    if (samples.tile) page.showImage(tile, samples, i);
    if (opens) {
      tile.type = "button";
      tile.tabIndex = -1;
      tile.addEventListener("click", () => page.choose(i));
      if (!samples.tile) tile.textContent = "show its kin";
    } else {
      tile.setAttribute("role", "img");
    }
    if (samples.tile) figure.append(tile); else figure.classList.add("bare");
    if (note) figure.append(make("span", "num", note));
    if (label !== null) {
      const name = make("b", "", (isRight === null ? "" : isRight ? "✓ " : "✗ ") + label);
      name.dir = "auto";
      figure.append(name);
    }
    if (samples.texts) {
      const text = make("q", "", samples.texts[i]);
      text.dir = "auto";
      figure.append(text);
    }
    figure.append(make("bdi", "", samples.keys[i]));
    if (!samples.tile && opens) figure.append(tile);
    if (isRight !== null) figure.classList.add(isRight ? "right" : "wrong");
    if (page.decorate) page.decorate(figure, i, anchor);
    return figure;
  }

  function card(at) {
    const anchor = shown.anchors[at];
    const article = make("article", "card");
    const kin = make("div", "row");
    const least = from.value === "" ? -1 : Number(from.value);
    for (const [rank, i] of shown.kin[at].entries()) {
      const similarity = shown.similarity[at][rank];
      if (similarity >= least) kin.append(sample(i, similarity.toFixed(3), anchor));
    }
    if (!shown.kin[at].length) kin.append(make("p", "soft", "nothing is flagged"));
    const notes = [];
    if (shown.thresholds) notes.push(`above\u00a0${shown.thresholds[at].toFixed(3)}`);
    if (shown.flagged) notes.push(`${shown.flagged[at]}\u00a0flagged`);
    if (shown.flagged && shown.right && shown.flagged[at]) notes.push(`${shown.right[at]}\u00a0right`);
    article.append(sample(anchor, notes.join("\n")), kin);
    article.setAttribute("aria-label", `${samples.keys[anchor]}: ${notes.join(", ")}`);
    return article;
  }

  // ---- which anchors
  let passing = [];
  function filter() {
    const word = find.value.trim().toLowerCase();
    const least = from.value === "" ? -1 : Number(from.value);
    const label = ofLabel && ofLabel.value !== "" ? Number(ofLabel.value) : null;
    const matches = words.map((text) => text.includes(word));
    passing = shown.anchors.map((_, at) => at).filter((at) => {
      const anchor = shown.anchors[at];
      const kin = shown.kin[at].filter((_, rank) => shown.similarity[at][rank] >= least);
      return (matches[anchor] || kin.some((i) => matches[i])) && (label === null || samples.labels[anchor] === label)
        && (least <= -1 || kin.length > 0) && (!wrong || !wrong.checked || kin.some((i) => right(i, anchor) === false));
    });
    cards.replaceChildren();
    grow();
    const number = passing.length.toLocaleString("en");
    count.textContent = passing.length ? `${number} of ${shown.anchors.length.toLocaleString("en")}` : "none; loosen the filter";
  }
  function grow() {
    const first = cards.childElementCount;
    cards.append(...passing.slice(first, first ? first + PART : FIRST).map(card));
    more.hidden = cards.childElementCount >= passing.length;
    settle();
  }

  // ---- keyboard: one stop for Tab, arrows from there
  const buttons = () => [...document.querySelectorAll("#chosen button.tile, #chosen button.plain, #cards button.tile, #cards button.plain")];
  function settle(current) {
    const all = buttons();
    const stop = current || all.find((button) => button.tabIndex === 0) || all[0];
    for (const button of all) button.tabIndex = button === stop ? 0 : -1;
  }
  document.getElementById("gallery").addEventListener("keydown", (event) => {
    const row = event.target.closest("#gallery .row");
    if (!row || !event.key.startsWith("Arrow")) return;
    const all = buttons();
    const rows = [...document.querySelectorAll("#gallery .row:has(button)")];
    const inRow = [...row.querySelectorAll("button")];
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const down = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const other = down && rows[rows.indexOf(row) + down];
    const column = inRow.indexOf(event.target);
    const next = step ? all[all.indexOf(event.target) + step] : other && [...other.querySelectorAll("button")][Math.min(column, other.querySelectorAll("button").length - 1)];
    event.preventDefault();
    if (!next) return;
    settle(next);
    next.focus();
  });

  // ---- one anchor by itself
  page.isAnchor = (sampleNumber) => placeOf.has(sampleNumber);
  page.choose = (sampleNumber) => {
    const at = placeOf.get(sampleNumber);
    if (at === undefined) return;
    const heading = make("h3", "", "Chosen anchor");
    const close = make("button", "close", "Close");
    close.type = "button";
    close.addEventListener("click", () => { chosen.replaceChildren(); settle(); find.focus(); });
    const head = make("div", "head");
    head.append(heading, close);
    chosen.replaceChildren(head, card(at));
    const first = chosen.querySelector("button.tile, button.plain");
    settle(first);
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    chosen.scrollIntoView({ behavior: still ? "instant" : "smooth", block: "nearest" });
    (first || close).focus({ preventScroll: true });
  };

  if (ofLabel) {
    const present = [...new Set(shown.anchors.map((i) => samples.labels[i]))].filter((label) => label >= 0).sort((a, b) => a - b);
    for (const label of present) {
      const option = make("option", "", samples.classes[label]);
      option.value = String(label);
      ofLabel.append(option);
    }
  }
  for (const control of [find, ofLabel, from, wrong]) if (control) control.addEventListener("input", filter);
  more.addEventListener("click", grow);
  filter();
  page.sample = sample;
})();
