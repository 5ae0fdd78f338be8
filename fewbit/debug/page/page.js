// Sorting, filtering and the theme; the state is in the address after '#', so that it can be sent.
"use strict";
(function () {
  var root = document.documentElement;
  var state = new URLSearchParams(location.hash.slice(1).indexOf("=") < 0 ? "" : location.hash.slice(1));

  function remember(key, value) {
    if (value) state.set(key, value); else state.delete(key);
    history.replaceState(null, "", "#" + state.toString());
  }

  function isDark() {
    var theme = root.dataset.theme;
    return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }

  var button = document.querySelector(".theme");
  function show(theme) {
    if (theme === "dark" || theme === "light") root.dataset.theme = theme;
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", "Switch to the " + (isDark() ? "light" : "dark") + " theme");
  }
  button.hidden = false;
  button.addEventListener("click", function () {
    show(isDark() ? "light" : "dark");
    remember("theme", root.dataset.theme);
  });

  function sortKey(cell) {
    if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
    return cell.textContent.trim().toLowerCase();
  }

  function compare(a, b) {
    if (typeof a === "number" && typeof b === "number") return a - b;
    if (typeof a === "number") return -1;
    if (typeof b === "number") return 1;
    return a.localeCompare(b, undefined, { numeric: true });
  }

  function sort(table, key, direction) {
    var heads = Array.from(table.tHead.rows[0].cells);
    var column = heads.findIndex(function (th) { return th.firstChild.dataset.key === key; });
    if (column < 0) return;
    var sign = direction === "desc" ? -1 : 1;
    var rows = Array.from(table.tBodies[0].rows).map(function (row, i) {
      return { row: row, key: sortKey(row.cells[column]), at: i };
    });
    rows.sort(function (a, b) { return sign * compare(a.key, b.key) || a.at - b.at; });
    rows.forEach(function (entry) { table.tBodies[0].appendChild(entry.row); });
    heads.forEach(function (th, i) {
      if (i === column) th.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      else th.removeAttribute("aria-sort");
    });
  }

  document.querySelectorAll("table.sortable").forEach(function (table) {
    table.tHead.addEventListener("click", function (event) {
      var key = event.target.dataset.key;
      if (!key) return;
      var down = event.target.parentElement.getAttribute("aria-sort") === "ascending";
      sort(table, key, down ? "desc" : "asc");
      if (table.id === "plan-table") { remember("sort", key); remember("dir", down ? "desc" : ""); }
    });
  });

  function filter(input) {
    var words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    var rows = Array.from(document.getElementById(input.dataset.table).tBodies[0].rows);
    var shown = 0;
    rows.forEach(function (row) {
      var text = row.textContent.toLowerCase();
      row.hidden = !words.every(function (word) { return text.indexOf(word) >= 0; });
      shown += row.hidden ? 0 : 1;
    });
    input.parentElement.querySelector(".count").textContent = shown + " of " + rows.length;
  }

  var search = document.querySelector("input[type=search]");
  if (search) {
    search.addEventListener("input", function () { filter(search); remember("filter", search.value); });
    if (state.get("filter")) { search.value = state.get("filter"); filter(search); }
  }
  show(state.get("theme"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", function () { show(); });
  var plan = document.getElementById("plan-table");
  if (plan && state.get("sort")) sort(plan, state.get("sort"), state.get("dir"));
  root.dataset.ready = "yes";
})();
