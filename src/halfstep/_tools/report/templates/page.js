(() => {
"use strict";
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const island = id => { const e = document.getElementById(id); return e && JSON.parse(e.textContent); };
const box = element => element.getBoundingClientRect();
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

/* the tooltip */
const make = (parent, name) => {
  const element = document.createElement("div");
  element.className = name;
  element.hidden = true;
  parent.append(element);
  return element;
};
const put = (element, sizes) => {
  for (const [side, pixels] of Object.entries(sizes)) element.style[side] = pixels + "px";
  element.hidden = false;
};
const tip = make(document.body, "tip");
tip.setAttribute("role", "status");
const show = (title, text, x, y) => {
  const head = document.createElement("b");
  head.textContent = title;
  tip.replaceChildren(head, "\n" + text);
  put(tip, {});
  const { width, height } = box(tip);
  const beside = (at, size, room) => clamp(at + 16 + size > room ? at - 16 - size : at + 16, 4, room);
  put(tip, { left: Math.min(beside(x, width, innerWidth), innerWidth - width - 4), top: beside(y, height, innerHeight) });
};
const text = value => typeof value === "string" ? value.replace("nan", "NaN")
  : String(Number.isInteger(value) ? value : +value.toPrecision(4));
const power = (value, e = Math.log2(value)) => e && Number.isInteger(e) ? "2^" + e : text(value);

const count = value => value.toLocaleString("en");

/* Move a position by pointer and arrow keys; `at` shows it, `from` returns that of an event. */
const explore = (element, { from, at, hide, keys }) => {
  let place = null;
  const go = next => { place = next; if (next) at(next); };
  const leave = () => { tip.hidden = true; place = null; hide(); };
  element.addEventListener("pointermove", event => { const next = from(event); next ? go(next) : leave(); });
  element.addEventListener("pointerleave", leave);
  element.addEventListener("blur", leave);
  element.addEventListener("keydown", event => {
    if (event.key === "Escape") return leave();
    const next = keys(event.key, place, event.shiftKey ? 10 : 1);
    if (next) { event.preventDefault(); go(next); }
  });
};

/* native tooltips would cover this one */
const takeTitles = (selector, root) => all(selector, root).map(title => {
  title.remove();
  return title.textContent;
});

const curveData = island("curve-data");
for (const element of all(".curves")) {
  const plots = all(".plot", element);
  const { first, last, tracks } = curveData;
  let low = first, high = last;  /* the range that is shown */
  const steps = [...new Set(tracks.flatMap(track => track.step))].sort((a, b) => a - b);
  const cross = make(element, "cross");
  const nearest = step => {
    let left = 0, right = steps.length - 1;
    while (right - left > 1) { const mid = (left + right) >> 1; steps[mid] < step ? left = mid : right = mid; }
    return step - steps[left] <= steps[right] - step ? left : right;
  };
  const describe = (track, step) => {
    const i = track.step.indexOf(step);
    if (i < 0) return [];
    const lines = Object.keys(curveData.titles).filter(key => track[key][i] !== null)
      .map(key => curveData.titles[key].toLowerCase() + " " + (key === "scale" ? power : text)(track[key][i]));
    if (track.reason[i]) lines.push("skipped: " + track.reason[i]);
    return track.name ? [track.name + ": " + lines.join(", ")] : lines;
  };
  takeTitles(".odd title, .mark title", element);
  const stepAt = x => {
    const { left, width } = box(plots[0]);
    return low + clamp((x - left) / width, 0, 1) * (high - low);
  };
  const marks = all(".odd[x], .mark[x]", element).map(mark => [mark, first + parseFloat(mark.getAttribute("x")) / 100 * (last - first)]);
  const axis = element.querySelector(".x-axis"), label = axis.lastElementChild, reset = element.querySelector(".reset");
  const zoom = (from, to) => {
    [low, high] = [from, to];
    const percent = step => 100 * (step - low) / (high - low) + "%", units = 1000 / (last - first);
    for (const plot of all(".zoom", element)) plot.setAttribute("viewBox", [(low - first) * units, 0, (high - low) * units, 1000].join(" "));
    for (const [mark, step] of marks) {
      mark.setAttribute("x", percent(step));
      mark.style.display = step < low || step > high ? "none" : "";
    }
    const about = Math.max(1, (high - low) / 5), power = 10 ** Math.floor(Math.log10(about));
    const apart = [1, 2, 5, 10].map(factor => factor * power).find(distance => distance >= about * .999);
    const ticks = [];
    for (let at = Math.ceil(low / apart) * apart; at <= high; at += apart) {
      const tick = label.cloneNode();
      tick.setAttribute("x", percent(at));
      tick.setAttribute("y", 15);
      tick.textContent = count(at);
      ticks.push(tick);
    }
    axis.replaceChildren(...ticks, label);
    reset.hidden = low === first && high === last;
  };
  reset.addEventListener("click", () => zoom(first, last));
  const dragged = make(element, "dragged");
  let start = null;
  element.addEventListener("pointerdown", event => {
    const { left, right } = box(plots[0]);
    if (event.button || event.target === reset || event.clientX < left || event.clientX > right) return;
    start = event.clientX;
    event.preventDefault();
    element.focus({ preventScroll: true });
  });
  element.addEventListener("pointermove", event => {
    if (start === null) return;
    const outer = box(element), { left, right, top } = box(plots[0]), to = clamp(event.clientX, left, right);
    put(dragged, { left: Math.min(start, to) - outer.left, top: top - outer.top, width: Math.abs(to - start), height: box(plots.at(-1)).bottom - top });
  });
  addEventListener("pointerup", event => {
    if (start === null) return;
    const [from, to] = [stepAt(start), stepAt(event.clientX)].sort((a, b) => a - b);
    const isDrag = Math.abs(event.clientX - start) > 8;
    start = null;
    dragged.hidden = true;
    if (isDrag && to - from >= 1) zoom(from, to);
  });
  explore(element, {
    from: event => {
      const { left, right } = box(plots[0]), x = event.clientX;
      if (x < left - 8 || x > right + 8) return null;
      return { index: nearest(stepAt(x)), y: event.clientY };
    },
    at: ({ index, y }) => {
      const step = steps[index], outer = box(element), { left, top, width } = box(plots[0]);
      if (step < low || step > high) zoom(first, last);
      const x = left + width * (step - low) / (high - low);
      put(cross, { left: x - outer.left, top: top - outer.top, height: box(plots.at(-1)).bottom - top });
      show("step " + count(step), tracks.flatMap(track => describe(track, step)).join("\n"), x, y ?? top);
    },
    hide: () => { cross.hidden = true; },
    keys: (key, place, by) => {
      const now = place ? place.index : -1;
      const to = { ArrowRight: now + by, ArrowLeft: now < 0 ? steps.length - 1 : now - by, Home: 0, End: steps.length - 1 }[key];
      return to === undefined ? null : { index: clamp(to, 0, steps.length - 1) };
    },
  });
}

/* heat maps: the values are read from the pixels */
const heatData = island("heat-data");
const pixels = image => {
  if (!image.data) {
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.drawImage(image, 0, 0);
    image.data = context.getImageData(0, 0, canvas.width, canvas.height).data;
  }
  return image.data;
};
const valueAt = (image, map, column, row) => {
  const data = pixels(image), i = 4 * (row * image.naturalWidth + column);
  if (!data[i + 3]) return "no value";
  const level = map.colours.indexOf((data[i] << 16 | data[i + 1] << 8 | data[i + 2]).toString(16).padStart(6, "0"));
  return level < 0 ? "NaN or inf" : map.labels[level];
};
for (const element of all(".heat")) {
  const images = all("img", element), names = takeTitles(".rows title", element), { columns, maps } = heatData;
  const height = +element.dataset.row;
  const cells = images.map(() => make(element, "cell"));
  explore(element, {
    from: event => {
      for (const [map, image] of images.entries()) {
        const { left, top, width } = box(image), { clientX: x, clientY: y } = event;
        const column = Math.floor((x - left) / width * columns.length), row = Math.floor((y - top) / height);
        if (columns[column] && names[row] !== undefined) return { map, column, row, x, y };
      }
      return null;
    },
    at: ({ map, column, row, x, y }) => {
      const outer = box(element);
      const corners = images.map((image, i) => {
        const inner = box(image), width = inner.width / columns.length;
        const left = inner.left + column * width, top = inner.top + row * height;
        put(cells[i], { left: left - outer.left - 1, top: top - outer.top - 1, width: Math.max(4, width + 2), height: height + 2 });
        return [left + width, top + height];
      });
      const [from, to] = columns[column], [name, ...worst] = names[row].split("\n");
      const lines = [from === to ? "step " + count(from) : "steps " + count(from) + " to " + count(to),
        ...images.map((image, i) => maps[i].title + ": " + valueAt(image, maps[i], column, row))];
      if (worst.length) lines.push("", "whole run: " + worst.join("; "));
      show(name, lines.join("\n"), x ?? corners[map][0], y ?? corners[map][1]);
    },
    hide: () => { for (const cell of cells) cell.hidden = true; },
    keys: (key, place, by) => {
      const move = { ArrowRight: [by, 0], ArrowLeft: [-by, 0], ArrowDown: [0, by], ArrowUp: [0, -by], Home: [-1e9, 0], End: [1e9, 0] }[key];
      if (!move) return null;
      const { map, column, row } = place || { map: 0, column: -move[0], row: -move[1] };
      return { map, column: clamp(column + move[0], 0, columns.length - 1), row: clamp(row + move[1], 0, names.length - 1) };
    },
  });
}

/* Tab, filter and sort live in the hash, #tab=output&filter=head, so that a link shows the same. */
const state = new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
const keep = (name, value) => {
  value ? state.set(name, value) : state.delete(name);
  history.replaceState(null, "", "#" + state);
};
const kept = (selector, name) => {
  for (const input of all(selector)) {
    if (input.type === "checkbox") input.checked = state.has(name);
    else if (state.has(name)) input.checked = input.value === state.get(name);
    input.addEventListener("change", () => keep(name, input.checked ? input.value : ""));
  }
};
kept(".tab", "tab");
kept("#only [name=kind]", "kind");
kept("#more", "columns");

/* tables: sorting by click and key, and a filter by name */
const key = cell => {
  const [said, unit] = cell.textContent.trim().replace(/[<,]/g, "").split(" ");
  const number = Number(said.replace("inf", "Infinity"));
  return said === "" || Number.isNaN(number) ? null : number * ({ ms: 1e-3, min: 60, h: 3600 }[unit] ?? 1);
};
const compare = (a, b, isText) => isText ? a.localeCompare(b, "en", { numeric: true }) : a - b;
for (const [number, head] of all("tr.sort").entries()) {
  const body = head.closest("table").tBodies[0], cells = [...head.cells], name = "sort" + number;
  const sort = (column, isDown) => {
    const isText = cells[column].matches(".t, .name");
    for (const other of cells) if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
    cells[column].setAttribute("aria-sort", isDown ? "descending" : "ascending");
    const rows = [...body.rows].map(row => [isText ? row.cells[column].textContent : key(row.cells[column]), row]);
    rows.sort(([a], [b]) => (a === null) - (b === null) || a !== null && compare(a, b, isText) * (isDown ? -1 : 1));
    body.append(...rows.map(([, row]) => row));
  };
  for (const [column, cell] of cells.entries()) {
    if ("nosort" in cell.dataset) continue;
    const button = document.createElement("button");
    button.type = "button";
    button.append(...cell.childNodes);
    if (cell.hasAttribute("aria-label")) button.setAttribute("aria-label", cell.getAttribute("aria-label"));
    cell.append(button);
    cell.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => {
      const now = cell.getAttribute("aria-sort");
      const isDown = now === "none" ? !cell.matches(".t, .name") : now === "ascending";
      sort(column, isDown);
      keep(name, column + (isDown ? "down" : "up"));
    });
  }
  const [, column, way] = (state.get(name) ?? "").match(/^(\d+)(up|down)$/) ?? [];
  if (cells[column]?.hasAttribute("aria-sort")) sort(+column, way === "down");
}
const search = document.querySelector("#only input[type=search]");
if (search) {
  const table = document.querySelector(".layers"), rows = [...table.tBodies[0].rows];
  const filter = () => {
    for (const row of rows) row.hidden = !row.cells[0].textContent.toLowerCase().includes(search.value.toLowerCase());
  };
  search.hidden = false;
  search.value = state.get("filter") ?? "";
  filter();
  search.addEventListener("input", () => { filter(); keep("filter", search.value); });
  /* a link to a row shows it even if the filter or the kind hides it */
  addEventListener("hashchange", () => {
    const row = document.getElementById(location.hash.slice(1));
    if (!row?.matches(".layers tr") || row.checkVisibility()) return;
    search.value = "";
    state.delete("filter");
    filter();
    document.querySelector("#only [name=kind]").checked = true;
    state.delete("kind");
    row.scrollIntoView({ block: "center" });
  });
  const copy = document.getElementById("csv");
  copy.hidden = false;
  copy.addEventListener("click", async () => {
    const shown = [...table.rows].filter(row => row.cells[0].checkVisibility());
    const text = cell => (cell.getAttribute("title") || cell.querySelector("button")?.firstChild.textContent || cell.textContent).trim();
    const lines = shown.map(row => [...row.cells].filter((_, i) => i !== 1)
      .map(cell => '"' + text(cell).replace(/"/g, '""') + '"').join(","));
    try { await navigator.clipboard.writeText(lines.join("\n") + "\n"); copy.textContent = "Copied"; }
    catch { copy.textContent = "The browser does not allow it"; }
  });
}
})();
