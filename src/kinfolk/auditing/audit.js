// Sections that only the audit has: groups of duplicates, doubtful labels, outliers and hubs.
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
  for (const [id, rows] of [["mislabel-cards", shown.mislabels], ["outlier-cards", shown.outliers]]) {
    const place = document.getElementById(id);
    if (place) place.append(...rows.map(([i, note]) => page.sample(i, note)));
  }
  const hubs = document.getElementById("hub-cards");
  if (hubs) hubs.append(...shown.hubs.map(([i, number, times]) => page.sample(i, `${number} anchors, ${times}×`)));
})();
