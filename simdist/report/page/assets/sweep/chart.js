/* The chart: a quantity over a field, drawn as SVG, so that colours follow the style sheet. */

function startChart(frame) {
  const SVG = "http://www.w3.org/2000/svg";
  const MARKS = ["M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0", "M-4-4H4V4H-4Z", "M0-5L5 4H-5Z", "M0-5.5L5.5 0L0 5.5L-5.5 0Z",
    "M-4-4L4 4M-4 4L4-4", "M-5 0H5M0-5V5"];
  const DASHES = ["", "7 3", "2 3", "9 3 2 3", "4 4", "12 4"];
  const MOST_INTERVALS = 150; /* of a sample; more hide the dots */
  const NEAR_PX = 40;
  const [metricSelect, xSelect] = [find("metric"), find("x")];
  const atSelects = axes.map((_, place) => find(`at-${place}`));
  const hidden = new Set();
  let dots = []; /* what is drawn: { row, line, x, y } in pixels, line by line from left to right */
  let cursor = null;

  /* Speed-ups of the baseline are the line at 1. */
  const isMark = (line) => metric().key === "speedup" && data.baseLines.includes(line);

  const metric = () => data.metrics.find((each) => each.key === metricSelect.value);
  const field = () => axes[Number(xSelect.value)];

  /* ---------------------------------------------------------------- rows */

  /* Return the rows of each line that the chart shows, from left to right. */
  function chosenRows() {
    const x = field();
    const wanted = data.grid
      ? axes.map((axis, place) => [axis, Number(atSelects[place].value)]).filter(([axis]) => axis !== x)
      : [];
    const found = lines.map(() => []);
    for (let row = 0; row < nRows; row += 1) {
      const code = codeOf(x, row);
      if (code === null || valueOf(metric(), row) === null) continue;
      if (wanted.every(([axis, at]) => codeOf(axis, row) === at)) found[rows.line[row]].push(row);
    }
    for (const each of found) each.sort((a, b) => codeOf(x, a) - codeOf(x, b));
    return found;
  }

  /* ---------------------------------------------------------------- scales */

  const isLog = (x) => x.log && x.numbers !== null;
  const place = (x, code) => (x.numbers === null ? code : isLog(x) ? Math.log10(x.numbers[code]) : x.numbers[code]);

  function scale(low, high, from, to) {
    const width = high - low || 1;
    const middle = high === low ? 0.5 : 0;
    return (value) => from + (to - from) * ((value - low) / width + middle);
  }

  function ticks(low, high, count) {
    const by = roundStep((high - low || 1) / count);
    const found = [];
    for (let at = Math.ceil(low / by - 1e-9); at * by <= high + 1e-9 * by; at += 1) found.push(at * by);
    return found.map((each) => Number(each.toPrecision(12)));
  }

  /* Ticks are values as they are written, with their units, or else bare numbers in the unit of the axis. */
  const hasTexts = (x) => x.numbers === null || data.grid;

  /* Return the ticks of the horizontal axis: value in its scale, and text. */
  function xTicks(x, count) {
    if (hasTexts(x)) return x.texts.map((text, code) => [place(x, code), text]);
    const [low, high] = [x.numbers[0], x.numbers[x.numbers.length - 1]];
    if (!isLog(x)) return ticks(low, high, count).map((value) => [value, String(value)]);
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
      for (const times of [1, 2, 5]) found.push(times * 10 ** power);
    }
    return found.filter((value) => value >= low && value <= high)
      .map((value) => [Math.log10(value), String(Number(value.toPrecision(6)))]);
  }

  /* Return the ends of the vertical axis and the ratio to its unit. */
  function yRange(shown) {
    let [low, high] = [Infinity, -Infinity];
    for (const row of shown.flat()) {
      const ends = intervalsShown(shown) ? intervalOf(metric(), row) : null;
      const value = valueOf(metric(), row);
      low = Math.min(low, ends?.[0] ?? value);
      high = Math.max(high, ends?.[1] ?? value);
    }
    if (low > high) [low, high] = [0, 1];
    if (metric().key === "speedup") [low, high] = [Math.min(low, 1), Math.max(high, 1)];
    else if (metric().unit !== "part") low = 0;
    const room = 0.06 * (high - low || high || 1);
    return [low && low - room, metric().unit === "part" ? Math.min(high + room, 1) : high + room];
  }

  const intervalsShown = (shown) => data.grid || Math.max(...shown.map((each) => each.length)) <= MOST_INTERVALS;

  const yUnit = (high) => {
    if (metric().unit === "share" || metric().unit === "part") return ["%", 100];
    if (metric().unit === "factor") return ["", 1];
    const [unit, size] = unitFor(high / 2, TIME_UNITS); /* of which the axis has two or more */
    return [unit, Math.round(1 / size)];
  };

  /* ---------------------------------------------------------------- picture */

  function svg(name, attributes, ...children) {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  }

  function draw() {
    const width = Math.max(280, frame.clientWidth);
    const height = width < 560 ? 320 : 420;
    const box = { left: 56, right: width - 16, top: 30, bottom: height - 46 };
    const found = chosenRows();
    const shown = found.map((each, line) => (hidden.has(line) || isMark(line) ? [] : each));
    const x = field();
    const [low, high] = yRange(shown);
    const first = place(x, 0);
    const last = place(x, x.texts.length - 1);
    const inset = data.grid || x.numbers === null ? 24 : 8;
    const xOf = scale(first, last, box.left + inset, box.right - inset);
    const yOf = scale(low, high, box.bottom, box.top);
    const spread = x.numbers === null && !data.grid ? 0.3 * (xOf(1) - xOf(0)) : 0;
    dots = shown.flatMap((each, line) => each.map((row) => ({
      row,
      line,
      x: xOf(place(x, codeOf(x, row))) + spread * wobble(row),
      y: yOf(valueOf(metric(), row)),
    })));
    const picture = svg("svg", { class: "chart", width, height, "aria-hidden": "true" },
      ...grid(x, xOf, yOf, low, high, box),
      ...lines.flatMap((_, line) => lineOf(line, shown, yOf, x)),
      svg("g", { id: "sweep-cursor" }));
    if (dots.length === 0) picture.append(svg("text", { x: box.left + 16, y: box.top + 24 }, "no row has this"));
    frame.replaceChildren(picture);
    choose(dots.find((dot) => dot.row === cursor?.row) ?? null);
    table(found, x);
    frame.dataset.ready = `${metric().key} ${x.name}`;
  }

  /* Spread dots of the same value, each always to the same place. */
  const wobble = (row) => ((row * 0.618034) % 1) - 0.5;

  function grid(x, xOf, yOf, low, high, box) {
    const parts = [];
    const [unit, size] = yUnit(high);
    for (const value of ticks(low * size, high * size, 6)) {
      const at = yOf(value / size);
      parts.push(svg("line", { class: "grid", x1: box.left, x2: box.right, y1: at, y2: at }));
      parts.push(svg("text", { class: "axis", x: box.left - 8, y: at + 4, "text-anchor": "end" }, String(value)));
    }
    let taken = -Infinity;
    for (const [value, text] of xTicks(x, 6)) {
      const at = xOf(value);
      parts.push(svg("line", { class: "grid", x1: at, x2: at, y1: box.bottom, y2: box.bottom + 5 }));
      const short = text.length > 16 ? `${text.slice(0, 15)}…` : text;
      const half = 3.6 * short.length;
      if (at - half < taken + 6) continue;
      taken = at + half;
      const anchor = at - half < 0 ? "start" : at + half > box.right + 16 ? "end" : "middle";
      parts.push(svg("text", { class: "axis", x: at, y: box.bottom + 20, "text-anchor": anchor }, short));
    }
    if (metric().key === "speedup") {
      parts.push(svg("line", { class: "mark", x1: box.left, x2: box.right, y1: yOf(1), y2: yOf(1) }));
    }
    const title = titleOf(metric()) + (unit ? ` (${unit})` : "");
    parts.push(svg("text", { class: "axis", x: 0, y: 14 }, title));
    const name = (hasTexts(x) ? x.name : x.title) + (isLog(x) ? ", logarithmic" : "");
    parts.push(svg("text", { class: "axis", x: box.right, y: box.bottom + 40, "text-anchor": "end" }, name));
    return parts;
  }

  function lineOf(line, shown, yOf, x) {
    const own = dots.filter((dot) => dot.line === line);
    if (own.length === 0) return [];
    const name = `line-${line % COLOURS}`;
    const at = (value) => value.toFixed(1);
    const parts = [];
    if (intervalsShown(shown)) {
      const bars = own.map((dot) => [dot, intervalOf(metric(), dot.row)]).filter(([, ends]) => ends);
      const path = bars.map(([dot, [low, high]]) => `M${at(dot.x)} ${at(yOf(low))}V${at(yOf(high))}`).join("");
      parts.push(svg("path", { class: `sweep-interval ${name}`, d: path }));
    }
    if (!data.grid) {
      const path = own.map((dot) => `M${at(dot.x)} ${at(dot.y)}h0`).join("");
      const size = own.length > 2000 ? 3 : own.length > 300 ? 5 : 8;
      return [...parts, svg("path", { class: `sweep-dots ${name}`, d: path, "stroke-width": size })];
    }
    if (x.numbers !== null) {
      const path = own.map((dot, number) => `${number ? "L" : "M"}${at(dot.x)} ${at(dot.y)}`).join("");
      parts.push(svg("path", { class: `sweep-line ${name}`, d: path, "stroke-dasharray": DASHES[line % COLOURS] }));
    }
    const mark = MARKS[(line + Math.floor(line / COLOURS)) % MARKS.length];
    const path = own.map((dot) => svg("path", { d: mark, transform: `translate(${at(dot.x)} ${at(dot.y)})` }));
    return [...parts, svg("g", { class: `sweep-marks ${name}` }, ...path)];
  }

  /* ---------------------------------------------------------------- table */

  function table(found, x) {
    const element = find("chart-table").querySelector("table");
    if (!data.grid) {
      const body = lines.map((line, number) => [line, found[number].length.toLocaleString("en"), ...spread(found[number])]);
      const caption = `${capital(titleOf(metric()))}, over all points`;
      fill(element, caption, ["schedule", "points", "least", "median", "most"], body);
      return;
    }
    const rowAt = found.map((each) => new Map(each.map((row) => [codeOf(x, row), row]).reverse()));
    const cell = (number, code) => (rowAt[number].has(code) ? writtenRow(metric(), rowAt[number].get(code)) : MISSING);
    const body = x.texts.map((text, code) => [text, ...lines.map((_, number) => cell(number, code))]);
    const at = axes.flatMap((axis, each) => (axis === x ? [] : [`${axis.name} ${axis.texts[atSelects[each].value]}`]));
    const caption = `${capital(titleOf(metric()))}, by ${x.name}${at.length ? `, at ${at.join(", ")}` : ""}`;
    fill(element, caption, [x.name, ...lines], body);
  }

  /* Return the least, the median and the greatest value of rows. */
  function spread(own) {
    const values = own.map((row) => valueOf(metric(), row)).sort((a, b) => a - b);
    if (values.length === 0) return [MISSING, MISSING, MISSING];
    const half = values.length / 2;
    const median = (values[Math.ceil(half) - 1] + values[Math.floor(half)]) / 2;
    return [values[0], median, values[values.length - 1]].map((value) => written(metric(), value, null));
  }

  /* ---------------------------------------------------------------- reading out */

  function choose(dot) {
    cursor = dot;
    const ring = find("cursor");
    ring.replaceChildren();
    if (!dot) return;
    ring.append(svg("circle", { class: "sweep-ring", cx: dot.x, cy: dot.y, r: 8 }));
    const shown = data.grid ? [field()] : axes;
    const where = shown.map((axis) => `${axis.name} ${textOf(axis, dot.row)}`).join(", ");
    const text = `${data.labels[rows.label[dot.row]]}, ${where}: ${titleOf(metric())} ${writtenRow(metric(), dot.row)}`;
    find("readout").textContent = `${text} (point ${rows.point[dot.row]})`;
  }

  function nearest(x, y) {
    let [best, least] = [null, NEAR_PX ** 2];
    for (const dot of dots) {
      const far = (dot.x - x) ** 2 + (dot.y - y) ** 2;
      if (far < least) [best, least] = [dot, far];
    }
    return best;
  }

  function along(by) {
    const own = dots.filter((dot) => dot.line === cursor.line);
    return own[Math.max(0, Math.min(own.length - 1, own.indexOf(cursor) + by))];
  }

  function across(by) {
    const present = [...new Set(dots.map((dot) => dot.line))];
    const line = present[(present.indexOf(cursor.line) + by + present.length) % present.length];
    const own = dots.filter((dot) => dot.line === line);
    return own.reduce((best, dot) => (Math.abs(dot.x - cursor.x) < Math.abs(best.x - cursor.x) ? dot : best));
  }

  const MOVES = {
    ArrowLeft: () => along(-1),
    ArrowRight: () => along(1),
    ArrowUp: () => across(-1),
    ArrowDown: () => across(1),
    Home: () => along(-Infinity),
    End: () => along(Infinity),
  };

  frame.addEventListener("keydown", (event) => {
    const move = event.ctrlKey || event.altKey || event.metaKey ? undefined : MOVES[event.key];
    if (!move || dots.length === 0) return;
    event.preventDefault();
    choose(cursor ? move() : dots[0]);
  });

  frame.addEventListener("pointermove", (event) => {
    const box = frame.firstElementChild.getBoundingClientRect();
    const dot = nearest(event.clientX - box.left, event.clientY - box.top);
    if (dot && dot !== cursor) choose(dot);
  });

  /* ---------------------------------------------------------------- controls */

  function showControls() {
    atSelects.forEach((select, each) => {
      if (select) select.parentElement.hidden = axes[each] === field();
    });
    [...find("legend").children].forEach((label, line) => {
      label.hidden = isMark(line);
    });
  }

  function legend() {
    lines.forEach((line, number) => {
      const box = make("input", { type: "checkbox", autocomplete: "off" });
      box.checked = true;
      box.addEventListener("change", () => {
        if (box.checked) hidden.delete(number);
        else hidden.add(number);
        draw();
      });
      const mark = MARKS[(number + Math.floor(number / COLOURS)) % MARKS.length];
      const shape = data.grid ? svg("path", { d: mark }) : svg("circle", { r: 4 });
      const sign = svg("svg", { width: 16, height: 16, viewBox: "-8 -8 16 16", "aria-hidden": "true" },
        svg("g", { class: `sweep-marks line-${number % COLOURS}` }, shape));
      find("legend").append(make("label", {}, box, sign, line));
    });
  }

  const show = () => {
    showControls();
    draw();
  };
  legend();
  for (const select of [metricSelect, xSelect, ...atSelects]) select?.addEventListener("change", show);
  let widthPx = 0;
  new ResizeObserver(() => {
    if (frame.clientWidth !== widthPx) draw();
    widthPx = frame.clientWidth;
  }).observe(frame);
  show();
}

if (find("chart")) startChart(find("chart"));
