"use strict";
// Filters, sorting and saving. Without it the page reads the same.
(() => {
  const all = (query, inside = document) => [...inside.querySelectorAll(query)];
  const form = document.getElementById("filter");
  const findings = all(".finding");
  const names = new Map(all("#table tbody tr").map((row) => [row.dataset.site, row.dataset.name]));

  function filter() {
    const wanted = new FormData(form);
    const severities = wanted.getAll("severity");
    const rule = wanted.get("rule");
    const text = wanted.get("site").trim().toLowerCase();
    const matches = (name) => name.toLowerCase().includes(text);
    const sites = new Set([...names].filter(([, name]) => matches(name)).map(([number]) => number));
    let shown = 0;
    for (const finding of findings) {
      const numbers = finding.dataset.sites.split(" ");
      const place = numbers.some((number) => sites.has(number)) || matches(finding.querySelector(".where .site").textContent);
      const show = severities.includes(finding.dataset.severity) && (!rule || rule === finding.dataset.rule) && (!text || place);
      finding.hidden = !show;
      shown += show;
    }
    for (const part of all("[data-site]")) part.hidden = Boolean(text) && !sites.has(part.dataset.site);
    document.getElementById("status").textContent =
      `${shown} of ${findings.length} entries` + (text ? `, ${sites.size} of ${names.size} sites` : "");
  }
  if (form) {
    form.hidden = false;
    form.addEventListener("input", filter);
    form.addEventListener("submit", (event) => event.preventDefault());
    filter();
  }

  const table = document.getElementById("table");
  const headings = table ? all("thead th", table) : [];
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => sort(heading, column));
  });
  function sort(heading, column) {
    const up = heading.getAttribute("aria-sort") !== "ascending";
    for (const other of headings) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", up ? "ascending" : "descending");
    const numeric = heading.dataset.sort === "number";
    const value = (row) => (numeric ? row.cells[column].dataset.value : row.cells[column].textContent.trim());
    const compare = (a, b) => {
      const [x, y] = [value(a), value(b)];
      if (numeric && (x === "" || y === "")) return (x === "") - (y === ""); // what was not measured stays below
      const order = numeric ? x - y : x.localeCompare(y, undefined, { numeric: true });
      return up ? order : -order;
    };
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort(compare));
  }

  for (const button of all("[data-save]")) {
    button.hidden = false;
    button.addEventListener("click", () => {
      const picture = button.closest("figure").querySelector("svg").outerHTML;
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([picture], { type: "image/svg+xml" }));
      link.download = button.dataset.save;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    });
  }

  function unfold() {
    const target = document.getElementById(location.hash.slice(1));
    if (target instanceof HTMLDetailsElement) {
      target.hidden = false;
      target.open = true;
      target.scrollIntoView();
    }
  }
  addEventListener("hashchange", unfold);
  unfold();
})();
