"use strict";
// The timeline of a trace's page. Rows have spans in order that do not overlap, so what is in sight is found by
// halving, and spans narrower than a pixel are drawn once for each pixel: 100,000 spans stay quick.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const figure = document.getElementById("timeline");
  const canvas = figure.querySelector("canvas"), output = figure.querySelector("output");
  const pen = canvas.getContext("2d");
  const LABELS = 96, AXIS = 22, BAND = 20, HIGH = 24, GAP = 3, TRACK_GAP = 10;

  const rows = data.rows.map((row) => {
    let at = 0;
    const begin = row.gap.map((gap, place) => (at += gap, [at, at += row.time[place]][0]));
    return {...row, begin, end: begin.map((start, place) => start + row.time[place])};
  });
  const passes = data.passes.map(([name, begin, time]) => ({name, begin, end: begin + time}));
  const last = Math.max(1, ...rows.map((row) => row.end[row.end.length - 1] || 0), ...passes.map((one) => one.end));
  let from = 0, to = last, width = 0, height = 0, hit = null, colours = [];

  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const readColours = () => {
    colours = data.kinds.map(([, colour]) => colour.startsWith("var(") ? style(colour.slice(4, -1)) : colour);
  };
  const place = (time) => LABELS + (time - from) / (to - from) * (width - LABELS);
  const timeAt = (x) => from + (x - LABELS) / (width - LABELS) * (to - from);
  const words = (ns) => ns >= 1e9 ? `${(ns / 1e9).toPrecision(4)} s` : ns >= 1e6 ? `${(ns / 1e6).toPrecision(4)} ms`
    : ns >= 1e3 ? `${(ns / 1e3).toPrecision(4)} us` : `${Math.round(ns)} ns`;

  // The number of the first span of a row that ends after a time.
  const firstAfter = (row, time) => {
    let low = 0, high = row.end.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (row.end[middle] <= time) low = middle + 1; else high = middle;
    }
    return low;
  };

  const layout = () => {
    let y = AXIS + BAND + TRACK_GAP;
    for (const row of rows) {
      if (row.track) y += TRACK_GAP;
      row.top = y;
      y += HIGH + GAP;
    }
    return y + TRACK_GAP;
  };

  const pale = (colour) => {
    const found = /^#(..)(..)(..)$/.exec(colour.length === 4 ? colour.replace(/[^#]/g, "$&$&") : colour);
    if (!found) return false;
    const [red, green, blue] = found.slice(1).map((part) => parseInt(part, 16));
    return red * 0.3 + green * 0.59 + blue * 0.11 > 150;
  };

  const label = (text, left, right, middle, colour) => {
    left = Math.max(left, LABELS);
    right = Math.min(right, width);
    if (right - left < 8 + 6.2 * text.length) return;
    pen.fillStyle = pale(colour) ? "#16191c" : "#ffffff";
    pen.textAlign = "center";
    pen.fillText(text, (left + right) / 2, middle);
  };

  const drawRow = (row) => {
    let drawn = -1;
    for (let at = firstAfter(row, from); at < row.begin.length && row.begin[at] < to; at++) {
      const left = Math.max(LABELS, place(row.begin[at])), right = Math.min(width, place(row.end[at]));
      if (right - left < 1) {
        if (Math.floor(left) === drawn) continue;
        drawn = Math.floor(left);
      }
      const colour = colours[row.kind[at]];
      pen.fillStyle = colour;
      pen.fillRect(left, row.top, Math.max(1, right - left - (right - left > 4 ? 0.5 : 0)), HIGH);
      if (right - left > 20) label(data.names[row.name[at]], left, right, row.top + HIGH / 2, colour);
    }
  };

  const drawAxis = () => {
    const raw = (to - from) / Math.max(2, (width - LABELS) / 110);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= raw);
    const [unit, name] = step >= 1e9 ? [1e9, "s"] : step >= 1e6 ? [1e6, "ms"] : step >= 1e3 ? [1e3, "us"] : [1, "ns"];
    const digits = Math.max(0, -Math.floor(Math.log10(step / unit) + 1e-9));
    pen.textAlign = "center";
    for (let number = Math.ceil(from / step); number * step <= to; number++) {
      const x = place(number * step);
      pen.fillStyle = style("--track");
      pen.fillRect(x, AXIS, 1, height - AXIS);
      pen.fillStyle = style("--dim");
      if (x < width - 30) pen.fillText(`${(number * step / unit).toFixed(digits)} ${name}`, x, AXIS / 2);
    }
  };

  const drawPasses = () => {
    let drawn = -1;
    for (const one of passes) {
      if (one.end <= from || one.begin >= to) continue;
      const left = Math.max(LABELS, place(one.begin)), right = Math.min(width, place(one.end));
      if (right - left < 1 && Math.floor(left) === drawn) continue;
      drawn = Math.floor(left);
      pen.fillStyle = style("--line");
      pen.fillRect(left, AXIS, Math.max(1, right - left - 1), BAND);
      if (right - left > 8 + 6.2 * one.name.length) {
        pen.fillStyle = style("--text");
        pen.textAlign = "center";
        pen.fillText(one.name, (left + right) / 2, AXIS + BAND / 2);
      }
    }
  };

  const draw = () => {
    pen.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.fillStyle = style("--back");
    pen.fillRect(0, 0, width, height);
    drawAxis();
    drawPasses();
    rows.forEach(drawRow);
    pen.fillStyle = style("--back");
    pen.fillRect(0, AXIS, LABELS, height);
    pen.fillStyle = style("--text");
    pen.textAlign = "left";
    pen.fillText("passes", 4, AXIS + BAND / 2);
    for (const row of rows) if (row.track) pen.fillText(row.track, 4, row.top + HIGH / 2);
    if (hit) {
      pen.strokeStyle = style("--text");
      pen.lineWidth = 2;
      const left = Math.max(LABELS, place(hit.begin)), right = Math.min(width, place(hit.end));
      if (right > left) pen.strokeRect(left, hit.top, Math.max(2, right - left), hit.high);
    }
  };
  let asked = false;
  const redraw = () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; draw(); });
  };

  const show = (begin, end) => {
    const least = Math.min(last, 100), long = Math.min(last, Math.max(least, end - begin));
    from = Math.min(Math.max(0, begin), last - long);
    to = from + long;
    redraw();
  };
  const zoom = (factor, about) => show(about - (about - from) * factor, about + (to - about) * factor);
  const move = (share) => show(from + share * (to - from), to + share * (to - from));
  const step = (side) => {
    const middle = (from + to) / 2;
    const found = side > 0 ? passes.find((one) => (one.begin + one.end) / 2 > middle + 1)
      : [...passes].reverse().find((one) => (one.begin + one.end) / 2 < middle - 1);
    if (found) show(found.begin - (found.end - found.begin) * 0.02, found.end + (found.end - found.begin) * 0.02);
  };
  const acts = {
    in: () => zoom(0.6, (from + to) / 2), out: () => zoom(1 / 0.6, (from + to) / 2),
    whole: () => show(0, last), before: () => step(-1), after: () => step(1),
  };

  const inside = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left - canvas.clientLeft, event.clientY - box.top - canvas.clientTop];
  };
  const under = (event) => {
    const [x, y] = inside(event);
    if (x < LABELS) return null;
    const time = timeAt(x), slack = (to - from) / (width - LABELS) * 2;
    if (y >= AXIS && y < AXIS + BAND) {
      const one = passes.find((found) => found.begin <= time && time < found.end);
      return one && {...one, top: AXIS, high: BAND, text: `${one.name} tokens: ${words(one.end - one.begin)}`};
    }
    const row = rows.find((found) => y >= found.top && y < found.top + HIGH);
    if (!row) return null;
    // The span under the pointer, or the nearest one: many are narrower than it.
    const next = firstAfter(row, time);
    const far = (place) => place < 0 || place >= row.end.length ? Infinity
      : Math.max(0, row.begin[place] - time, time - row.end[place]);
    const at = far(next - 1) < far(next) ? next - 1 : next;
    if (far(at) > slack) return null;
    const long = row.time[at], work = data.works[row.work[at]];
    const rates = work && long ? `, ${(work[0] / long).toPrecision(3)} GB/s, ${(work[1] / long).toPrecision(3)} GFLOP/s` : "";
    const text = `${data.names[row.name[at]]}, ${data.kinds[row.kind[at]][0]}: ${words(long)} at ${words(row.begin[at])}`;
    return {begin: row.begin[at], end: row.end[at], top: row.top, high: HIGH, text: text + rates};
  };
  const point = (event) => {
    hit = under(event) || null;
    output.textContent = hit ? hit.text : "";
    redraw();
  };

  const touches = new Map();
  let apart = 0;
  const distance = () => { const [one, other] = [...touches.values()]; return Math.abs(one - other); };
  canvas.addEventListener("pointerdown", (event) => {
    touches.set(event.pointerId, event.clientX);
    if (touches.size === 2) apart = distance();
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = touches.get(event.pointerId);
    if (before === undefined) { point(event); return; }
    touches.set(event.pointerId, event.clientX);
    if (touches.size === 2) {
      const now = distance();
      if (apart > 4 && now > 4) zoom(apart / now, (from + to) / 2);
      apart = now;
    } else {
      move((before - event.clientX) / (width - LABELS));
    }
  });
  for (const name of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(name, (event) => { touches.delete(event.pointerId); point(event); });
  }
  canvas.addEventListener("dblclick", (event) => {
    const found = under(event);
    if (found) show(found.begin - (found.end - found.begin) * 0.1, found.end + (found.end - found.begin) * 0.1);
  });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      move((event.deltaX || event.deltaY) / (width - LABELS));
    } else {
      zoom(Math.exp(Math.sign(event.deltaY) * Math.min(0.5, Math.abs(event.deltaY) / 400)),
        timeAt(inside(event)[0]));
    }
  }, {passive: false});
  const KEYS = {
    "+": acts.in, "=": acts.in, w: acts.in, "-": acts.out, s: acts.out, 0: acts.whole, Home: acts.whole,
    ArrowLeft: () => move(-0.2), a: () => move(-0.2), ArrowRight: () => move(0.2), d: () => move(0.2),
    n: acts.after, p: acts.before,
  };
  canvas.addEventListener("keydown", (event) => {
    const act = KEYS[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });
  for (const button of figure.querySelectorAll("button")) button.addEventListener("click", acts[button.dataset.act]);

  const fit = () => {
    height = layout();
    canvas.style.height = `${height}px`;
    width = canvas.clientWidth;
    canvas.width = Math.round(width * devicePixelRatio);
    canvas.height = Math.round(height * devicePixelRatio);
    redraw();
  };
  const theme = () => { readColours(); redraw(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", theme);
  new ResizeObserver(fit).observe(figure);
  theme();
  fit();
})();
