/* The table of all rows: sorted and filtered here, and the first of what is left is shown. */

function startRows(area) {
  const SHOWN = 200;
  const table = area.querySelector("table");
  const filter = find("filter");
  const STEP = { key: "step", unit: "seconds" };
  const SPEEDUP = { key: "speedup", unit: "factor" };
  const byState = (state) => ({
    name: state,
    text: (row) => (rows[state][row] === null ? MISSING : secondsText(Math.max(0, rows[state][row]))),
    key: (row) => rows[state][row],
  });
  const columns = [
    { name: "point", text: (row) => String(rows.point[row]), key: (row) => rows.point[row] },
    ...fields.map((field) => ({
      name: field.name,
      isWords: field.numbers === null,
      text: (row) => textOf(field, row),
      key: (row) => codeOf(field, row),
    })),
    { name: "schedule", isWords: true, text: (row) => data.labels[rows.label[row]], key: (row) => rows.label[row] },
    { name: "step time", text: (row) => writtenRow(STEP, row), key: (row) => rows.step[row] },
    { name: "speed-up", text: (row) => writtenRow(SPEEDUP, row), key: (row) => rows.speedup[row] },
    ...STATES.map(byState),
  ];
  if (data.failures.length) {
    const failure = (row) => data.failures[rows.failure[row]] ?? "";
    columns.push({ name: "failed", isWords: true, isError: true, text: failure, key: (row) => failure(row) || null });
  }
  const texts = new Array(nRows); /* of rows in small letters, made when they are first looked through */
  let sorted = { column: 0, isDown: false };

  const searched = (row) => (texts[row] ??= columns.map((column) => column.text(row)).join(" ").toLowerCase());

  function chosen() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = [];
    for (let row = 0; row < nRows; row += 1) {
      if (words.every((word) => searched(row).includes(word))) found.push(row);
    }
    const { key } = columns[sorted.column];
    const sign = sorted.isDown ? -1 : 1;
    const compare = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
    return found.sort((a, b) => {
      const [one, other] = [key(a), key(b)];
      if (one === null || other === null) return (one === null) - (other === null); /* last, whichever way */
      return sign * compare(one, other);
    });
  }

  function head(column, number) {
    const kind = column.isWords || number === 0 ? "word" : "number";
    const button = make("button", { type: "button", class: "sweep-sort" }, column.name);
    button.addEventListener("click", () => {
      sorted = { column: number, isDown: sorted.column === number ? !sorted.isDown : false };
      draw();
    });
    const cell = make("th", { scope: "col", class: kind }, button);
    return cell;
  }

  const heads = columns.map(head);
  table.tHead.replaceChildren(make("tr", {}, ...heads));

  function bodyRow(row) {
    return make("tr", {}, ...columns.map((column, number) => {
      const kind = column.isWords || number === 0 ? "word" : "number";
      const text = column.isError ? make("span", { class: "sweep-error" }, column.text(row)) : column.text(row);
      return number ? make("td", { class: kind }, text) : make("th", { scope: "row", class: kind }, text);
    }));
  }

  function draw() {
    const found = chosen();
    heads.forEach((cell, number) => {
      if (number === sorted.column) cell.setAttribute("aria-sort", sorted.isDown ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
    table.tBodies[0].replaceChildren(...found.slice(0, SHOWN).map(bodyRow));
    const count = (n) => n.toLocaleString("en");
    const of = found.length < nRows ? `${count(found.length)} of ${count(nRows)} rows` : `${count(nRows)} row${nRows === 1 ? "" : "s"}`;
    find("count").textContent = found.length > SHOWN ? `The first ${SHOWN} of ${of}.` : `${of}.`;
    area.dataset.ready = `${columns[sorted.column].name} ${filter.value}`;
  }

  filter.addEventListener("input", draw);
  draw();
}

startRows(find("rows"));
