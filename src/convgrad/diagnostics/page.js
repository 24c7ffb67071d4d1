"use strict";
// Rows of the table, points of the roofline and calls of the timeline name each other; the table is sorted and filtered.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const FIRST = 20; // rows that are shown until somebody wants all
  const [tip, all, filter, found] = ["tip", "all", "filter", "found"].map((id) => document.getElementById(id));
  const body = document.querySelector(".rows tbody");
  const rows = [...body.rows];
  const total = (some) => some.reduce((sum, row) => sum + data.rows[row.dataset.row].total, 0);
  const visible = () => [...body.rows].filter((row) => !row.hidden);
  let open = rows.length <= FIRST;

  function light(i) { // what belongs to a row, and the rest of it in the tip; nothing for -1
    document.querySelectorAll(".on").forEach((e) => e.classList.remove("on"));
    document.querySelectorAll(`[data-row="${i}"]`).forEach((e) => e.classList.add("on"));
    tip.hidden = !rows[i];
    if (rows[i]) tip.replaceChildren(rows[i].querySelector(".whole").cloneNode(true));
  }

  function show() { // the rows that the filter leaves, the first of them or all
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = [...body.rows].filter((row) => words.every((word) => row.textContent.toLowerCase().includes(word)));
    const few = open || words.length ? fits : fits.slice(0, FIRST);
    rows.forEach((row) => (row.hidden = !few.includes(row)));
    all.hidden = open || words.length > 0;
    found.textContent = !words.length ? ""
      : `${fits.length} of ${rows.length} rows, ${total(fits).toPrecision(3)} ms, `
        + `${Math.round((100 * total(fits)) / (total(rows) || 1))} %`;
    if (few.length && !few.some((row) => row.tabIndex === 0)) few[0].tabIndex = 0;
  }

  function go(row) {
    if (!row) return;
    rows.forEach((r) => (r.tabIndex = r === row ? 0 : -1));
    row.focus();
  }

  const heads = document.querySelectorAll(".rows thead th");
  heads.forEach((head, column) => {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: head.textContent });
    button.addEventListener("click", () => {
      const numbers = head.matches(".number");
      const down = head.ariaSort ? head.ariaSort === "ascending" : numbers;
      heads.forEach((other) => (other.ariaSort = null));
      head.ariaSort = down ? "descending" : "ascending";
      const value = (row) => (numbers ? Number(row.cells[column].dataset.value) : row.cells[column].textContent);
      const order = (a, b) => (numbers ? value(a) - value(b) : value(a).localeCompare(value(b), "en", { numeric: true }));
      body.append(...rows.slice().sort((a, b) => (down ? order(b, a) : order(a, b))));
      show();
    });
    head.replaceChildren(button);
  });
  filter.addEventListener("input", show);
  filter.closest("p").hidden = false;
  all.addEventListener("click", () => { open = true; show(); go(visible()[FIRST]); });

  for (const part of document.querySelectorAll("[data-row]")) {
    part.addEventListener("pointerenter", () => light(part.dataset.row));
    part.addEventListener("pointerleave", () => light(document.activeElement.dataset.row ?? -1));
    part.addEventListener("click", () => {
      if (rows[part.dataset.row].hidden) { open = true; filter.value = ""; show(); }
      go(rows[part.dataset.row]);
    });
  }
  for (const row of rows) {
    row.addEventListener("focus", () => light(row.dataset.row));
    row.addEventListener("blur", () => light(-1));
    row.addEventListener("keydown", (event) => {
      const now = visible(), i = now.indexOf(row), last = now.length - 1;
      const target = { ArrowDown: Math.min(i + 1, last), ArrowUp: Math.max(i - 1, 0), Home: 0, End: last }[event.key];
      if (event.key === "Escape") row.blur();
      if (target === undefined) return;
      event.preventDefault();
      go(now[target]);
    });
  }
  show();
})();
