// Sections that only the audit has: groups of duplicates, doubtful labels and hubs.
(() => {
  const shown = page.read("gallery");
  const groups = document.getElementById("group-cards");
  if (groups) groups.append(...shown.groups.map((group) => {
    const card = page.make("article", "card wide");
    const members = page.make("div", "row");
    members.append(...group.samples.map((i) => page.sample(i)));
    const more = group.size > group.samples.length ? `, ${group.samples.length} shown` : "";
    card.append(page.make("h3", "", `${group.kind}, ${group.size} samples${more}`), members);
    return card;
  }));
  const mislabels = document.getElementById("mislabel-cards");
  if (mislabels) mislabels.append(...shown.mislabels.map(([i, note]) => {
    const figure = page.sample(i);
    figure.querySelector("b").after(page.make("span", "num", note)); // after the label that it doubts
    return figure;
  }));
  const hubs = document.getElementById("hub-cards");
  if (hubs) hubs.append(...shown.hubs.map(([i, note]) => page.sample(i, note)));
})();
