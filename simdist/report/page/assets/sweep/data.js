/* The data of the page, in columns, and how its numbers are written: as the tables of the page write them. */

const data = JSON.parse(document.getElementById("sweep-data").textContent);
const { rows, fields, lines } = data;
const axes = fields.filter((field) => field.axis);
const nRows = rows.point.length;
const MISSING = "-";
const COLOURS = 6;
const STATES = ["compute", "comm", "wait", "io", "host"];

const find = (name) => document.getElementById(`sweep-${name}`);

/* Return an element with text or other elements in it; nothing is ever read as HTML. */
function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function factor(value, half = 0) {
  const wide = half > 1e-6 * value ? half : 0; /* the data have six digits */
  const digits = wide > 0 && wide < 0.01 ? 3 : 2;
  return value.toFixed(digits) + (wide ? ` ± ${wide.toFixed(digits)}` : "");
}

function share(value) {
  return `${value >= 0.0995 ? (100 * value).toFixed(0) : numbersAsWritten(100 * value, 2)} %`;
}

/* Return by how much the second takes longer, a share, so that it is never 0 where there is a lead. */
function leadPercent(gain) {
  const percent = 100 * gain;
  if (percent < 0.001) return "+<0.001 %";
  return `+${percent >= 1 ? percent.toFixed(1) : numbersAsWritten(percent, 2)} %`;
}

/* Return a quantity of a row, or null. */
function valueOf(metric, row) {
  if (metric.unit !== "share") return rows[metric.key][row];
  return rows.step[row] === null ? null : rows[metric.key][row] / rows.step[row];
}

/* Return the ends of the interval of a row, or null. */
function intervalOf(metric, row) {
  const [low, high] = [rows[`${metric.key}Low`]?.[row], rows[`${metric.key}High`]?.[row]];
  return low === undefined || low === null ? null : [low, high];
}

/* As `simdist results` does: wide intervals have ends, as they are not the same to both sides. */
const WIDE = 0.5;

function written(metric, value, interval) {
  if (value === null || value === undefined) return MISSING;
  if (metric.unit === "share") return share(value);
  if (metric.unit === "part") return `${(100 * value).toFixed(1)} %`;
  const width = interval ? interval[1] - interval[0] : 0;
  if (width > WIDE * value) {
    const text = metric.unit === "factor" ? (each) => factor(each, 0) : secondsText;
    return `${text(value)} (${text(interval[0])}-${text(interval[1])})`;
  }
  const half = width / 2;
  if (metric.unit === "factor") return factor(value, half);
  return secondsText(value) + (half > 1e-6 * value ? ` ± ${secondsText(half, 2)}` : "");
}

const writtenRow = (metric, row) => written(metric, valueOf(metric, row), intervalOf(metric, row));

const codeOf = (field, row) => field.codes[rows.point[row]];
const textOf = (field, row) => field.texts[codeOf(field, row)] ?? MISSING;
const titleOf = (metric) => (metric.key === "speedup" ? `speed-up over ${data.baseline}` : metric.name);
const capital = (text) => text[0].toUpperCase() + text.slice(1);

/* Put a new head and new lines into a table; the first cell of a line names it. */
function fill(table, caption, header, body, words = []) {
  table.querySelector("caption span").textContent = caption;
  const kind = (column) => (column === 0 || words.includes(header[column]) ? "word" : "number");
  const head = header.map((name, column) => make("th", { scope: "col", class: kind(column) }, name));
  table.tHead.replaceChildren(make("tr", {}, ...head));
  table.tBodies[0].replaceChildren(...body.map((cells) => bodyLine(cells, kind)));
  table.parentElement.setAttribute("aria-label", caption);
}

function bodyLine(cells, kind) {
  const made = cells.map((cell, column) =>
    column ? make("td", { class: kind(column) }, cell) : make("th", { scope: "row", class: "word" }, cell));
  return make("tr", {}, ...made);
}
