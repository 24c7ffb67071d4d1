"use strict";
// Rows of the table and points of the roofline name each other; arrow keys go from row to row.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const rows = [...document.querySelectorAll("tr[data-row]")];
  const rest = document.getElementById("rest");
  const all = document.getElementById("all");
  const digits = (x) => Number(x.toPrecision(3)).toLocaleString("en", { maximumSignificantDigits: 3 });
  const parts = (i) => document.querySelectorAll(`[data-row="${i}"]`);
  const shown = (e) => e.getClientRects().length > 0;

  const words = (r) => [
    `${digits(r.milliseconds)} ms a call, ${r.backend}`,
    r.of_limit === null ? "" : `${Math.round(100 * r.of_limit)} % of the limit${r.bound ? " of " + r.bound : ""}`,
    r.problem,
  ];

  let current = null;

  function clear() {
    current = null;
    document.querySelectorAll(".on").forEach((e) => e.classList.remove("on"));
    document.querySelectorAll(".plot").forEach((e) => e.classList.remove("lit"));
    tip.hidden = true;
  }

  function light(i) {
    clear();
    const row = data.rows[i];
    if (!row) return;
    parts(i).forEach((e) => e.classList.add("on"));
    const point = [...parts(i)].find((e) => e.matches(".point") && shown(e));
    if (!point) return;
    point.closest(".plot").classList.add("lit");
    const title = document.createElement("b");
    title.textContent = `${row.layers[0] || ""} ${row.shown}`.trim();
    const lines = words(row).filter(Boolean).map((text) => {
      const line = document.createElement("span");
      line.textContent = text;
      return line;
    });
    tip.replaceChildren(title, ...lines);
    current = point;
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

  function open(on) {
    if (!rest) return;
    rest.hidden = !on;
    all.hidden = on;
    all.setAttribute("aria-expanded", String(on));
  }

  function go(row) {
    if (!row) return;
    if (rest && rest.contains(row)) open(true);
    rows.forEach((r) => (r.tabIndex = r === row ? 0 : -1));
    row.focus();
  }

  open(false);
  if (all) all.addEventListener("click", () => { open(true); go(rest.querySelector("tr")); });

  for (const part of document.querySelectorAll("[data-row]")) {
    part.addEventListener("pointerenter", () => light(part.dataset.row));
    part.addEventListener("pointerleave", () => {
      const focused = document.activeElement.closest("tr[data-row]");
      if (focused) light(focused.dataset.row); else clear();
    });
    if (!part.matches("tr")) part.addEventListener("click", () => go(rows[part.dataset.row]));
  }
  rows.forEach((row, i) => {
    row.addEventListener("focus", () => light(row.dataset.row));
    row.addEventListener("blur", clear);
    row.addEventListener("click", () => go(row));
    row.addEventListener("keydown", (event) => {
      const last = rest && rest.hidden ? rows.length - rest.rows.length - 1 : rows.length - 1;
      const target = { ArrowDown: Math.min(i + 1, last), ArrowUp: Math.max(i - 1, 0), Home: 0, End: last }[event.key];
      if (event.key === "Escape") row.blur();
      if (target === undefined) return;
      event.preventDefault();
      go(rows[target]);
    });
  });
  addEventListener("scroll", place, { passive: true });
  addEventListener("resize", place);
})();
