// A click on a heading sorts its table; a second one turns it round.
"use strict";
const value_of = (row, column) => {
  const cell = row.cells[column], text = cell.dataset.value || cell.textContent.trim(), number = parseFloat(text.replace(/[\u202f$€,]/g, ""));
  return Number.isNaN(number) ? text : number;
};
document.querySelectorAll("table.sortable thead th").forEach((head) => {
  head.tabIndex = 0;
  const sort = () => {
    const body = head.closest("table").tBodies[0], up = head.getAttribute("aria-sort") !== "ascending";
    const rows = [...body.rows].sort((a, b) => {
      const x = value_of(a, head.cellIndex), y = value_of(b, head.cellIndex);
      const order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
      return up ? order : -order;
    });
    head.parentNode.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    body.append(...rows);
  };
  head.addEventListener("click", sort);
  head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
});
