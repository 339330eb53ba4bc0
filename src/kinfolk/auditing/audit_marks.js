// Marks on samples, saved as files: a list for `kinfolk train --exclude`, and pairs for `--known-kin`.
(() => {
  const { make } = page;
  const { keys, ids, named, tile } = page.read("gallery").samples;
  const samples = new Set();
  const pairs = new Map();
  document.getElementById("main").classList.add("audit");

  // As `kinfolk.errors.escaped` writes keys: printable, and no formula of a spreadsheet.
  const code = (letter) => {
    const hex = letter.codePointAt(0).toString(16);
    return hex.length <= 2 ? `\\x${hex.padStart(2, "0")}` : hex.length <= 4 ? `\\u${hex.padStart(4, "0")}` : `\\U${hex.padStart(8, "0")}`;
  };
  const quoted = (text) => {
    const escaped = text.replaceAll("\\", "\\\\").replace(/[\p{C}\p{Zl}\p{Zp}]|(?! )\p{Zs}/gu, code);
    return `"${(/^[=+\-@＝＋－＠]/.test(escaped) ? "\\" : "") + escaped.replaceAll('"', '""')}"`;
  };
  const columns = (...of) => (named ? of.map((i) => quoted(keys[i])) : []);
  const files = {
    "marked.csv": () => [["id", ...(named ? ["key"] : [])], ...[...samples].map((i) => [ids[i], ...columns(i)])],
    "marked-pairs.csv": () => [["anchor", "kin", ...(named ? ["anchor_key", "kin_key"] : [])],
      ...[...pairs.values()].map(([one, other]) => [ids[one], ids[other], ...columns(one, other)])],
  };
  const bar = make("div", "marks");
  bar.hidden = true;
  const buttons = Object.entries(files).map(([name, rows]) => {
    const button = make("button", "pill", `Save ${name}`);
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
    const row = make("div", "under");
    row.append(label);
    if (tile) {
      const button = make("button", "link", "zoom");
      button.type = "button";
      button.setAttribute("aria-label", `zoom ${keys[i]}`);
      button.addEventListener("click", () => zoom(figure, i));
      row.append(button);
    }
    figure.append(row);
  };

  // A larger image, with all that is known of the sample.
  const dialog = make("dialog", "zoom");
  document.body.append(dialog);
  dialog.addEventListener("click", () => dialog.close());
  function zoom(figure, i) {
    const image = make("span", "tile");
    page.showImage(image, page.read("gallery").samples, i);
    const close = make("button", "pill", "Close");
    close.type = "button";
    const lines = figure.title.split(" · ").map((line) => make("p", "", line));
    for (const line of lines) line.dir = "auto";
    dialog.replaceChildren(image, ...lines, close);
    dialog.showModal();
  }

  for (const block of document.querySelectorAll("#verdict pre")) {
    const button = make("button", "pill copy", "Copy");
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
