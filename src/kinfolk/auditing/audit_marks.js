// Marks on samples, saved as files: a list of samples, and pairs for `kinfolk train --known-kin`.
(() => {
  const { make } = page;
  const { keys, ids } = page.read("gallery").samples;
  const samples = new Set();
  const pairs = new Map();
  document.getElementById("main").classList.add("audit");

  const quoted = (text) => `"${(/^[=+\-@\t\r\\]/.test(text) ? "\\" : "") + text.replaceAll('"', '""')}"`;
  const files = {
    "marked.csv": () => [["id", "key"], ...[...samples].map((i) => [ids[i], quoted(keys[i])])],
    "marked-pairs.csv": () => [["anchor", "kin", "anchor_key", "kin_key"],
      ...[...pairs.values()].map(([one, other]) => [ids[one], ids[other], quoted(keys[one]), quoted(keys[other])])],
  };
  const bar = make("div", "marks");
  bar.hidden = true;
  const buttons = Object.entries(files).map(([name, rows]) => {
    const button = make("button", "", `Save ${name}`);
    button.type = "button";
    button.addEventListener("click", () => {
      const link = make("a", "");
      link.href = URL.createObjectURL(new Blob([rows().map((row) => row.join(",")).join("\n") + "\n"], { type: "text/csv" }));
      link.download = name;
      link.click();
    });
    return button;
  });
  const count = make("span", "");
  bar.append(count, ...buttons);
  document.body.append(bar);

  function show() {
    bar.hidden = !samples.size;
    buttons[1].hidden = !pairs.size;
    count.textContent = `${samples.size} marked` + (pairs.size ? `, ${pairs.size} with their anchor` : "");
  }

  // A box below each sample; that of a kin marks the pair with its anchor too.
  page.decorate = (figure, i, anchor) => {
    const label = make("label", "mark", " mark");
    const box = make("input", "");
    box.type = "checkbox";
    const pair = `${anchor} ${i}`;
    box.checked = anchor === undefined ? samples.has(i) : pairs.has(pair);
    box.addEventListener("change", () => {
      if (anchor !== undefined) box.checked ? pairs.set(pair, [anchor, i]) : pairs.delete(pair);
      box.checked ? samples.add(i) : samples.delete(i);
      show();
    });
    label.prepend(box);
    figure.append(label);
  };

  for (const block of document.querySelectorAll("#verdict pre")) {
    const button = make("button", "copy", "Copy");
    button.type = "button";
    button.addEventListener("click", async () => {
      const text = block.querySelector("code").textContent;
      try {
        await navigator.clipboard.writeText(text);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(block.querySelector("code"));
        button.textContent = "Selected";
      }
    });
    block.append(button);
  }
})();
