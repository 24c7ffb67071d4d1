"use strict";
// Rows of the table, points of the roofline and calls of the timeline name each other; the table is sorted and filtered.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const FIRST = 20; // rows that are shown until somebody wants all
  const tip = document.getElementById("tip");
  const body = document.querySelector(".rows tbody");
  const rows = [...body.rows];
  const all = document.getElementById("all");
  const filter = document.getElementById("filter");
  const digits = (x) => Number(x.toPrecision(3)).toLocaleString("en", { maximumSignificantDigits: 3 });
  const parts = (i) => document.querySelectorAll(`[data-row="${i}"]`);
  const made = (tag, text) => Object.assign(document.createElement(tag), { textContent: text });
  const visible = () => [...body.rows].filter((row) => row.dataset.row && !row.hidden);
  const texts = rows.map((row, i) => [row.textContent, ...data.rows[i].layers, data.rows[i].problem, data.rows[i].reason]
    .join(" ").toLowerCase());
  const shares = data.rows.reduce((sum, row) => sum + row.total, 0) || 1;

  const words = (r) => [
    `${digits(r.milliseconds)} ms a call, ${r.calls} call${r.calls === 1 ? "" : "s"}, ${r.backend}`,
    r.pytorch === null ? "" : `PyTorch: ${digits(r.pytorch)} ms a call`,
    r.of_limit === null ? "" : `${Math.round(100 * r.of_limit)} % of the limit${r.bound ? " of " + r.bound : ""}`,
    r.reason,
    r.copies ? `${r.copies} operand${r.copies === 1 ? "" : "s"} copied into another layout` : "",
    r.problem,
  ].filter(Boolean);

  // ---- what is lit ----
  let current = null;

  function clear() {
    current = null;
    document.querySelectorAll(".on").forEach((e) => e.classList.remove("on"));
    document.querySelectorAll(".plot").forEach((e) => e.classList.remove("lit"));
    tip.hidden = true;
  }

  function light(i, at) {
    clear();
    const row = data.rows[i];
    if (!row) return;
    parts(i).forEach((e) => e.classList.add("on"));
    const point = [...parts(i)].find((e) => e.matches(".point") && e.getClientRects().length);
    if (point) point.closest(".plot").classList.add("lit");
    current = at && !at.matches("tr") ? at : point;
    if (!current) return;
    const title = made("b", `${row.layers[0] || ""} ${row.shown}`.trim());
    tip.replaceChildren(title, ...words(row).map((text) => made("span", text)));
    place();
  }

  function place() { // the tip above its point, or below it, and away while the plot is out of sight
    if (!current) return;
    const at = current.getBoundingClientRect();
    tip.hidden = at.bottom < 0 || at.top > innerHeight;
    if (tip.hidden) return;
    const box = tip.getBoundingClientRect();
    const left = Math.min(Math.max(8, at.left + at.width / 2 - box.width / 2), innerWidth - box.width - 8);
    const above = at.top - box.height - 8;
    tip.style.left = `${left}px`;
    tip.style.top = `${above > 8 ? above : at.bottom + 8}px`;
  }

  // ---- which rows, in which order ----
  let open = rows.length <= FIRST;

  function show() {
    const wanted = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = [...body.rows].filter((row) => row.dataset.row)
      .filter((row) => !(row.hidden = !wanted.every((word) => texts[row.dataset.row].includes(word))));
    if (!open && !wanted.length) fits.slice(FIRST).forEach((row) => (row.hidden = true));
    all.hidden = open || wanted.length > 0;
    body.querySelectorAll(".detail").forEach((row) => row.remove());
    const total = fits.reduce((sum, row) => sum + data.rows[row.dataset.row].total, 0);
    document.getElementById("found").textContent = !wanted.length ? ""
      : `${fits.length} of ${rows.length} rows, ${digits(total)} ms, ${Math.round((100 * total) / shares)} %`;
    const now = visible();
    if (now.length && !now.some((row) => row.tabIndex === 0)) now[0].tabIndex = 0;
  }

  document.querySelectorAll(".rows thead th").forEach((head, column) => {
    const button = made("button", head.textContent);
    button.type = "button";
    button.addEventListener("click", () => {
      const numbers = head.matches(".number");
      const down = head.ariaSort ? head.ariaSort === "ascending" : numbers;
      document.querySelectorAll(".rows thead th").forEach((other) => (other.ariaSort = null));
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

  // ---- one row ----
  function go(row) {
    if (!row) return;
    rows.forEach((r) => (r.tabIndex = r === row ? 0 : -1));
    row.focus();
  }

  function detail(row) { // the rest of a row, below it
    const next = row.nextElementSibling;
    row.ariaExpanded = String(!(next && next.matches(".detail")));
    if (row.ariaExpanded === "false") return next.remove();
    const cell = made("td", "");
    cell.colSpan = row.cells.length;
    const names = data.rows[row.dataset.row].layers.join(", ");
    cell.append(...(names ? [made("p", names)] : []), ...words(data.rows[row.dataset.row]).map((text) => made("p", text)));
    const below = document.createElement("tr");
    below.className = "detail";
    below.append(cell);
    row.after(below);
  }

  for (const part of document.querySelectorAll("[data-row]")) {
    part.addEventListener("pointerenter", () => light(part.dataset.row, part));
    part.addEventListener("pointerleave", () => {
      const focused = document.activeElement.closest("tr[data-row]");
      if (focused) light(focused.dataset.row); else clear();
    });
    if (!part.matches("tr")) part.addEventListener("click", () => {
      const row = rows[part.dataset.row];
      if (row.hidden) { open = true; filter.value = ""; show(); }
      go(row);
    });
  }
  for (const row of rows) {
    row.addEventListener("focus", () => light(row.dataset.row));
    row.addEventListener("blur", clear);
    row.addEventListener("click", () => { go(row); detail(row); });
    row.addEventListener("keydown", (event) => {
      const now = visible(), i = now.indexOf(row), last = now.length - 1;
      const target = { ArrowDown: Math.min(i + 1, last), ArrowUp: Math.max(i - 1, 0), Home: 0, End: last }[event.key];
      if (event.key === "Escape") row.blur();
      if (event.key === "Enter") detail(row);
      if (target === undefined) return;
      event.preventDefault();
      go(now[target]);
    });
  }
  show();
  addEventListener("scroll", place, { passive: true });
  addEventListener("resize", place);
})();
