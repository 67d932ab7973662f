/* The map of the fastest schedule: a table of coloured cells. */

function startMap(area) {
  const [acrossSelect, downSelect] = [find("map-columns"), find("map-rows")];
  const atSelects = axes.map((_, place) => find(`map-at-${place}`));
  const { best } = data;

  const mark = (line) => {
    const letter = (place) => String.fromCharCode(65 + place);
    return (line >= 26 ? letter(Math.floor(line / 26) - 1) : "") + letter(line % 26);
  };

  function cell(point) {
    if (point === undefined || best.line[point] < 0) return make("td", { class: "cell" }, MISSING);
    const line = best.line[point];
    const first = best.tied[point] ?? [line];
    const unclear = best.clear[point] === 0;
    const lead = first.length > 1 ? "" : `${unclear ? " ≈" : ""} ${leadPercent(best.gain[point])}`;
    const name = `cell won line-${line % COLOURS}${unclear ? " unclear" : ""}`;
    const title = first.map((each) => lines[each]).join(" and ");
    return make("td", { class: name, title },
      make("b", {}, first.map(mark).join(" = ")), lead + (best.partial[point] ? "*" : ""));
  }

  /* Return the points of the chosen values, by their place in the table. */
  function points(across, down) {
    const fixed = axes.map((axis, place) => [axis, Number(atSelects[place].value)])
      .filter(([axis]) => axis !== across && axis !== down);
    const found = new Map();
    best.line.forEach((_, point) => {
      if (fixed.every(([axis, at]) => axis.codes[point] === at)) {
        found.set(`${down.codes[point]} ${across.codes[point]}`, point);
      }
    });
    return found;
  }

  function draw() {
    const [across, down] = [acrossSelect, downSelect].map((select) => axes[Number(select.value)]);
    atSelects.forEach((select, place) => {
      select.parentElement.hidden = axes[place] === across || axes[place] === down;
    });
    const found = points(across, down);
    const table = area.querySelector("table");
    const others = axes.flatMap((axis, place) =>
      axis === across || axis === down ? [] : [`${axis.name} ${axis.texts[atSelects[place].value]}`]);
    const caption = `Fastest schedule by ${down.name} and ${across.name}${others.length ? `, at ${others.join(", ")}` : ""}`;
    table.querySelector("caption span").textContent = caption;
    table.parentElement.setAttribute("aria-label", caption);
    const corner = make("th", { scope: "col", class: "word" }, `${down.name} \\ ${across.name}`);
    const heads = across.texts.map((text) => make("th", { scope: "col", class: "cell" }, text));
    table.tHead.replaceChildren(make("tr", {}, corner, ...heads));
    table.tBodies[0].replaceChildren(...down.texts.map((text, row) => make("tr", {},
      make("th", { scope: "row", class: "word" }, text),
      ...across.texts.map((_, column) => cell(found.get(`${row} ${column}`))))));
    area.dataset.ready = `${across.name} ${down.name}`;
  }

  /* The other select takes what this one had, when both would show the same field. */
  function chooseField(select, other) {
    if (select.value === other.value) other.value = select.dataset.before;
    acrossSelect.dataset.before = acrossSelect.value;
    downSelect.dataset.before = downSelect.value;
    draw();
  }

  acrossSelect.dataset.before = acrossSelect.value;
  downSelect.dataset.before = downSelect.value;
  acrossSelect.addEventListener("change", () => chooseField(acrossSelect, downSelect));
  downSelect.addEventListener("change", () => chooseField(downSelect, acrossSelect));
  for (const select of atSelects) select.addEventListener("change", draw);
  draw();
}

if (find("map")) startMap(find("map"));
