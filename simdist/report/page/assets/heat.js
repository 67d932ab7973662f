/* The heat map of waiting, by step and rank. Its data are the JSON in #stragglers-data, a list of runs. */

(() => {
  const data = document.getElementById("stragglers-data");
  if (!data) return; /* no rank waited in any run */

  const element = (name) => document.getElementById(`heat-${name}`);
  const root = document.documentElement;
  const runs = JSON.parse(data.textContent);
  const canvas = element("canvas");
  const [view, quantity, scale] = ["view", "quantity", "scale"].map(element);

  const DECADES = 4; /* of the logarithmic scale: what is smaller has its lowest colour */
  const LEVELS = 256;
  const CELL_PX = 24; /* height of a cell, where there is room */
  const MOST_PX = 480; /* height of the map, where each rank still has a pixel then */

  let map = null; /* what is drawn: { run, seconds, columns, rows, stepsPerCell, ranksPerCell, largest } */
  let cursor = null; /* the cell that is read out: { column, row } */

  /* ---------------------------------------------------------------- data */

  const unpacked = new Map();

  /* Return a promise of the seconds of a run: columns of steps, in each the rows of ranks. */
  function secondsOf(number, name) {
    const key = `${number} ${name}`;
    if (!unpacked.has(key)) unpacked.set(key, unpack(runs[number][name]));
    return unpacked.get(key);
  }

  async function unpack(text) {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const numbers = new DataView(await new Response(stream).arrayBuffer());
    return Float32Array.from({ length: numbers.byteLength / 4 }, (_, index) => numbers.getFloat32(4 * index, true));
  }

  /* Sum steps that lie beside each other until every cell is at least a pixel wide. */
  function fitted(run, packed, widthPx) {
    const rows = rowsOf(run);
    const packedColumns = packed.length / rows;
    const factor = Math.ceil(packedColumns / Math.max(1, widthPx));
    const columns = Math.ceil(packedColumns / factor);
    const seconds = new Float64Array(columns * rows);
    packed.forEach((value, index) => {
      seconds[Math.floor(index / rows / factor) * rows + (index % rows)] += value;
    });
    const largest = seconds.reduce((most, value) => Math.max(most, value), 0);
    const stepsPerCell = run.stepsPerCell * factor;
    return { run, seconds, columns, rows, stepsPerCell, ranksPerCell: run.ranksPerCell, largest };
  }

  /* ---------------------------------------------------------------- words */

  /* Return such as `step 3` or `steps 4 to 7`. */
  function several(name, first, perCell, count) {
    const last = Math.min(first + perCell, count) - 1;
    return first === last ? `${name} ${first}` : `${name}s ${first} to ${last}`;
  }

  function cellText({ column, row }) {
    const steps = several("step", column * map.stepsPerCell, map.stepsPerCell, map.run.steps);
    const ranks = several("rank", row * map.ranksPerCell, map.ranksPerCell, map.run.ranks);
    const seconds = secondsText(map.seconds[column * map.rows + row]);
    const [who, whom] = ranks.startsWith("ranks ") ? ["they", "them"] : ["it", "it"];
    const what = quantity.value === "caused" ? `others waited for ${whom}` : `${who} waited for others`;
    return `${steps}, ${ranks}: ${what}, ${seconds}`;
  }

  function sizeText() {
    const [steps, ranks] = [map.stepsPerCell, map.ranksPerCell];
    const one = `${steps} step${steps > 1 ? "s" : ""} of ${ranks} rank${ranks > 1 ? "s" : ""}`;
    return `A cell is ${one}${steps * ranks > 1 ? ", summed" : ""}. Ranks from top to bottom, steps from left to right.`;
  }

  /* ---------------------------------------------------------------- picture */

  function rgb(property) {
    const text = getComputedStyle(root).getPropertyValue(property).trim();
    return [1, 3, 5].map((place) => parseInt(text.slice(place, place + 2), 16));
  }

  /* Return the colours from the lowest to the highest. */
  function ramp() {
    const [low, middle, high] = ["--heat-low", "--heat-middle", "--heat-high"].map(rgb);
    return Array.from({ length: LEVELS }, (_, level) => {
      const at = (2 * level) / (LEVELS - 1);
      const [from, to, share] = at < 1 ? [low, middle, at] : [middle, high, at - 1];
      return from.map((value, channel) => Math.round(value + share * (to[channel] - value)));
    });
  }

  function level(seconds) {
    if (seconds <= 0) return 0;
    const share = seconds / map.largest;
    const height = scale.value === "linear" ? share : 1 + Math.log10(share) / DECADES;
    return Math.round((LEVELS - 1) * Math.max(0, height));
  }

  /* Return a canvas with a pixel per colour: `at` says the level of each. */
  function pixels(width, height, colours, at) {
    const image = new ImageData(width, height);
    for (let place = 0; place < width * height; place += 1) {
      image.data.set([...colours[at(place % width, Math.floor(place / width))], 255], 4 * place);
    }
    const small = document.createElement("canvas");
    [small.width, small.height] = [width, height];
    small.getContext("2d").putImageData(image, 0, 0);
    return small;
  }

  const rowsOf = (run) => Math.ceil(run.ranks / run.ranksPerCell);
  const heightOf = (rows) => Math.max(rows, Math.min(MOST_PX, CELL_PX * rows));

  function showDetails() {
    for (const details of document.querySelectorAll("[data-view]")) details.hidden = details.dataset.view !== view.value;
  }

  /* Give the map the height that it will have, so that what stands below does not move when it is painted. */
  function reserve() {
    canvas.style.height = `${heightOf(rowsOf(runs[Number(view.value)]))}px`;
    element("cells").textContent = "The map is being read.";
    for (const name of ["low", "middle", "high"]) element(`scale-${name}`).textContent = "\u00a0";
    showDetails();
  }

  function paint() {
    const ratio = window.devicePixelRatio || 1;
    const heightPx = heightOf(map.rows);
    canvas.style.height = `${heightPx}px`;
    canvas.width = Math.round(canvas.clientWidth * ratio);
    canvas.height = Math.round(heightPx * ratio);
    const colours = ramp();
    const context = canvas.getContext("2d");
    context.imageSmoothingEnabled = false;
    const cells = pixels(map.columns, map.rows, colours, (column, row) => level(map.seconds[column * map.rows + row]));
    context.drawImage(cells, 0, 0, canvas.width, canvas.height);
    if (cursor) outline(context, ratio);
    paintLegend(colours);
  }

  /* Frame the cell of the cursor in two colours, of which one is seen on any ground. */
  function outline(context, ratio) {
    const [width, height] = [canvas.width / map.columns, canvas.height / map.rows];
    for (const [property, grown] of [["--fg", 2], ["--bg", 4]]) {
      const by = grown * ratio;
      context.strokeStyle = getComputedStyle(root).getPropertyValue(property).trim();
      context.lineWidth = 2 * ratio;
      context.strokeRect(cursor.column * width - by, cursor.row * height - by, width + 2 * by, height + 2 * by);
    }
  }

  function paintLegend(colours) {
    const bar = element("scale-bar");
    [bar.width, bar.height] = [LEVELS, 1];
    bar.getContext("2d").drawImage(pixels(LEVELS, 1, colours, (column) => column), 0, 0);
    const isLinear = scale.value === "linear";
    element("scale-low").textContent = isLinear ? "0 s" : `${secondsText(map.largest / 10 ** DECADES)} or less`;
    element("scale-middle").textContent = secondsText(isLinear ? map.largest / 2 : map.largest / 10 ** (DECADES / 2));
    element("scale-high").textContent = `${secondsText(map.largest)} in a cell`;
  }

  /* Write numbers at the cells along an edge: at most one in `apartPx`. */
  function label(edge, name, side, { count, perCell, cells, lengthPx, apartPx }) {
    const every = Math.max(perCell, roundStep(Math.max(1, (count * apartPx) / lengthPx)));
    const labels = [];
    for (let number = 0; number < count; number += every) {
      const text = document.createElement("span");
      text.textContent = number ? String(number) : `${name} 0`;
      text.style[side] = `${(100 * (Math.floor(number / perCell) + 0.5)) / cells}%`;
      labels.push(text);
    }
    element(edge).replaceChildren(...labels);
  }

  function labelEdges() {
    const { run, columns, rows, stepsPerCell, ranksPerCell } = map;
    const [lengthPx, heightPx] = [canvas.clientWidth, canvas.clientHeight];
    label("steps", "step", "left", { count: run.steps, perCell: stepsPerCell, cells: columns, lengthPx, apartPx: 56 });
    label("ranks", "rank", "top", { count: run.ranks, perCell: ranksPerCell, cells: rows, lengthPx: heightPx, apartPx: 18 });
  }

  /* ---------------------------------------------------------------- what the reader does */

  async function show() {
    const [chosen, name] = [view.value, quantity.value];
    showDetails();
    const packed = await secondsOf(Number(chosen), name);
    if (view.value !== chosen || quantity.value !== name) return; /* something else was chosen meanwhile */
    element("map").hidden = false;
    map = fitted(runs[Number(chosen)], packed, canvas.clientWidth);
    element("map").hidden = !map.largest;
    if (map.largest) {
      element("cells").textContent = sizeText();
      labelEdges();
      if (cursor) choose(cursor.column, cursor.row);
      else paint();
    }
    canvas.dataset.ready = `${chosen} ${name}`;
  }

  function choose(column, row) {
    const within = (value, count) => Math.max(0, Math.min(count - 1, value));
    cursor = { column: within(column, map.columns), row: within(row, map.rows) };
    element("readout").textContent = cellText(cursor);
    paint();
  }

  function chooseLargest() {
    const place = map.seconds.indexOf(map.largest);
    choose(Math.floor(place / map.rows), place % map.rows);
  }

  const MOVES = {
    ArrowLeft: () => choose(cursor.column - 1, cursor.row),
    ArrowRight: () => choose(cursor.column + 1, cursor.row),
    ArrowUp: () => choose(cursor.column, cursor.row - 1),
    ArrowDown: () => choose(cursor.column, cursor.row + 1),
    PageUp: () => choose(cursor.column - 10, cursor.row),
    PageDown: () => choose(cursor.column + 10, cursor.row),
    Home: () => choose(0, cursor.row),
    End: () => choose(map.columns - 1, cursor.row),
    m: chooseLargest,
  };

  canvas.addEventListener("keydown", (event) => {
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    const move = event.ctrlKey || event.altKey || event.metaKey ? undefined : MOVES[key];
    if (!move || !map) return;
    event.preventDefault();
    if (cursor || move === chooseLargest) move();
    else choose(0, 0);
  });

  canvas.addEventListener("pointermove", (event) => {
    if (!map) return;
    const box = canvas.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left - canvas.clientLeft) / canvas.clientWidth) * map.columns);
    const row = Math.floor(((event.clientY - box.top - canvas.clientTop) / canvas.clientHeight) * map.rows);
    if (!cursor || cursor.column !== column || cursor.row !== row) choose(column, row);
  });

  for (const select of [view, quantity, scale]) select.addEventListener("change", show);
  document.addEventListener("themechange", () => map && paint());
  reserve();
  new ResizeObserver(show).observe(element("area"));
})();
