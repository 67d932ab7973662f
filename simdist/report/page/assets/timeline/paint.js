// Paint what is in view: lanes pixel by pixel, upon them marks and text.

const AXIS_HEIGHT = 42; // CSS pixels: a line for times, one for steps
const LEAST_HATCHED = 7; // CSS pixels of a lane that hatching is to be seen in
const LEAST_LETTERED = 12; // CSS pixels of a lane that a line of text fits into
const LEAST_NAMED = 10; // CSS pixels of a lane whose stream is named
const LEAST_STEP = 12; // CSS pixels between the ends of steps that are marked
const PURE = 0.995; // of a column, from where it counts as wholly in one style

/** Paint the base canvas. */
function paintBase(timeline) {
  const { base } = timeline.parts;
  const context = base.getContext("2d", { alpha: false });
  context.setTransform(1, 0, 0, 1, 0, 0);
  context.fillStyle = cssOf(timeline.colours.background);
  context.fillRect(0, 0, base.width, base.height);
  const labels = paintLanes(timeline, context);
  context.setTransform(timeline.size.ratio, 0, 0, timeline.size.ratio, 0, 0);
  context.font = `11px ${timeline.colours.font}`;
  context.textBaseline = "middle";
  paintBands(timeline, context);
  paintLabels(timeline, context, labels);
  paintGutter(timeline, context);
  paintAxis(timeline, context);
}

/** Paint the spans; return the texts that have room in them. */
function paintLanes(timeline, context) {
  const { plan, traces, layout, view, size } = timeline;
  const left = Math.round(size.gutter * size.ratio);
  const top = Math.round(AXIS_HEIGHT * size.ratio);
  const [width, height] = [context.canvas.width - left, context.canvas.height - top];
  if (width <= 0 || height <= 0) return [];
  const image = context.createImageData(width, height);
  const canvas = { pixels: new Uint32Array(image.data.buffer), width, height };
  canvas.pixels.fill(pixelOf(timeline.colours.background));
  const brushes = brushesOf(timeline);
  const shares = newShares(plan.styles.length, width);
  const labels = [];
  for (const number of lanesInView(timeline)) {
    const lane = laneOf(layout, number);
    measureLane(shares, plan.streams[lane.stream], traces[lane.trace], lane.stream, lane.rank, view);
    const from = Math.round((lane.top - timeline.scrollTop) * size.ratio);
    const to = Math.round((lane.top + layout.laneHeight - timeline.scrollTop) * size.ratio);
    paintLane(canvas, brushes, shares, from, layout.laneHeight > 4 ? to - 1 : to);
    if (layout.laneHeight >= LEAST_LETTERED) {
      for (const label of shares.labels) labels.push({ ...label, lane });
    }
  }
  context.putImageData(image, left, top);
  return labels;
}

function lanesInView({ layout, scrollTop, size }) {
  const [first, last] = bandsBetween(layout, scrollTop, scrollTop + size.height - AXIS_HEIGHT);
  const nLanes = Math.max(0, last - first + 1) * layout.nLanesOfBand;
  return Array.from({ length: nLanes }, (_, i) => first * layout.nLanesOfBand + i);
}

/** Return what lanes are painted with. Hatching stands still against the spans when they are moved. */
function brushesOf({ colours, layout, size, view }) {
  const hatched = layout.laneHeight >= LEAST_HATCHED;
  const pixelsPerS = ((size.width - size.gutter) * size.ratio) / (view.endS - view.beginS);
  const tiles = colours.ofStyles.map((style) =>
    tileOf(hatched ? style : { face: style.mean, hatch: "" }, size.ratio),
  );
  const side = tiles[0]?.side ?? 1;
  return {
    tiles: tiles.map(({ tile }) => tile),
    side,
    phase: Math.round((view.beginS * pixelsPerS) % side) + side,
    means: colours.ofStyles.map((style) => style.mean),
    flat: colours.ofStyles.map((style) => pixelOf(style.mean)),
    background: colours.background,
    edge: pixelOf(colours.background),
  };
}

/** Paint a lane between two rows of pixels. */
function paintLane(canvas, brushes, { ofStyles, edges, width }, from, to) {
  const nStyles = brushes.tiles.length;
  const present = [];
  for (let column = 0; column < width; column++) {
    present.length = 0;
    for (let style = 0; style < nStyles; style++) {
      if (ofStyles[style * width + column] > 0) present.push(style);
    }
    if (edges[column]) paintFlat(canvas, brushes.edge, column, from, to);
    else if (present.length === 1 && ofStyles[present[0] * width + column] >= PURE) {
      paintTiled(canvas, brushes, present[0], column, from, to);
    } else if (present.length) paintStack(canvas, brushes, present, ofStyles, column, from, to);
  }
}

function paintFlat({ pixels, width, height }, pixel, column, from, to) {
  const last = Math.min(to, height);
  for (let y = Math.max(from, 0); y < last; y++) pixels[y * width + column] = pixel;
}

function paintTiled({ pixels, width, height }, { tiles, side, phase }, style, column, from, to) {
  const tile = tiles[style];
  const x = (column + phase) % side;
  const last = Math.min(to, height);
  for (let y = Math.max(from, 0); y < last; y++) pixels[y * width + column] = tile[((y - from) % side) * side + x];
}

/** Stack the styles of a column from the bottom of the lane, each as high as its share; mix where they share a pixel. */
function paintStack({ pixels, width, height }, { means, flat, background }, present, ofStyles, column, from, to) {
  let y = to - 1;
  let [filled, red, green, blue] = [0, 0, 0, 0];
  const put = (pixel) => {
    if (y >= 0 && y < height && y >= from) pixels[y * width + column] = pixel;
    y--;
  };
  const mix = (channels, share) => {
    red += channels[0] * share;
    green += channels[1] * share;
    blue += channels[2] * share;
    filled += share;
  };
  for (const style of present) {
    let left = ofStyles[style * width + column] * (to - from);
    while (left > 1e-6) {
      if (filled === 0 && left >= 1) {
        put(flat[style]);
        left -= 1;
        continue;
      }
      const share = Math.min(left, 1 - filled);
      mix(means[style], share);
      left -= share;
      if (filled > 1 - 1e-6) {
        put(pixelOf([red, green, blue]));
        [filled, red, green, blue] = [0, 0, 0, 0];
      }
    }
  }
  if (filled > 0) {
    mix(background, 1 - filled);
    put(pixelOf([red, green, blue]));
  }
}

/** Return the horizontal place of a moment, in CSS pixels of the canvas. */
function xOf({ view, size }, atS) {
  return size.gutter + ((atS - view.beginS) / (view.endS - view.beginS)) * (size.width - size.gutter);
}

/** Return the moment at a horizontal place. */
function momentAt({ view, size }, x) {
  return view.beginS + ((x - size.gutter) / (size.width - size.gutter)) * (view.endS - view.beginS);
}

const yOf = ({ scrollTop }, top) => AXIS_HEIGHT + top - scrollTop;

/** Draw lines between bands, and the ends of steps where they are not too many to tell apart. */
function paintBands(timeline, context) {
  const { layout, size, colours, scrollTop } = timeline;
  const [first, last] = bandsBetween(layout, scrollTop, scrollTop + size.height - AXIS_HEIGHT);
  clipped(context, [0, AXIS_HEIGHT, size.width, size.height], () => {
    context.fillStyle = cssOf(colours.line);
    for (let band = first; layout.gap > 2 && band <= last; band++) {
      context.fillRect(0, Math.round(yOf(timeline, (band + 1) * layout.bandHeight)), size.width, 1);
    }
    clipped(context, [size.gutter, AXIS_HEIGHT, size.width, size.height], () => {
      context.fillStyle = cssOf(colours.step);
      for (let band = first; band <= last; band++) paintStepEnds(timeline, context, band);
    });
  });
}

/** Mark the ends of steps on a rank that are far enough from the mark before. */
function paintStepEnds(timeline, context, band) {
  const { layout, plan, traces, view, size } = timeline;
  const rank = layout.ranks[band];
  for (const [row, number] of layout.shown.entries()) {
    const { stepEnd, tickS } = traces[number];
    const [first, last] = stepsIn(view, traces[number], plan, rank);
    if (last - first + 1 > (size.width - size.gutter) / LEAST_STEP) continue;
    const top = yOf(timeline, topOf(layout, band, row));
    let before = -LEAST_STEP;
    for (let step = first; step <= last; step++) {
      const x = Math.round(xOf(timeline, stepEnd[step * plan.worldSize + rank] * tickS));
      if (x - before < LEAST_STEP) continue;
      context.fillRect(x - 1, top - 1, 1, layout.traceHeight + 1);
      before = x;
    }
  }
}

/** Write what spans are into those that have room. */
function paintLabels(timeline, context, labels) {
  const { layout, plan, colours, size } = timeline;
  clipped(context, [size.gutter, AXIS_HEIGHT, size.width, size.height], () => {
    for (const { lane, row, style, from, to } of labels) {
      const left = size.gutter + Math.max(0, from) / size.ratio + 4;
      const right = Math.min(size.width, size.gutter + to / size.ratio) - 4;
      const op = plan.ops[plan.streams[lane.stream].ops[row]];
      const isWait = style === op.waitStyle;
      const text = fitting(context, isWait ? [plan.styles[style].label, "wait"] : shorter(op.text), right - left);
      if (!text) continue;
      const { face, text: ink, hatch } = colours.ofStyles[style];
      const middle = yOf(timeline, lane.top + (layout.laneHeight - 1) / 2);
      if (hatch) {
        context.fillStyle = cssOf(face);
        const half = Math.min(7, layout.laneHeight / 2 - 1);
        context.fillRect(left - 2, middle - half, context.measureText(text).width + 4, 2 * half);
      }
      context.fillStyle = cssOf(ink);
      context.fillText(text, left, middle + 0.5);
    }
  });
}

/** Return a text of an operation and shorter ones, such as `all_reduce(grad.2)` and `all_reduce`. */
function shorter(text) {
  const name = text.split("(", 1)[0];
  const first = text.slice(name.length + 1).split(/[,)]/, 1)[0];
  return [text, `${name}(${first})`, name];
}

/** Return the first of some texts that is narrow enough, or an empty one. */
function fitting(context, texts, width) {
  return texts.find((text) => text.length * 4 < width && context.measureText(text).width <= width) ?? "";
}

function clipped(context, [left, top, right, bottom], paint) {
  context.save();
  context.beginPath();
  context.rect(left, top, right - left, bottom - top);
  context.clip();
  paint();
  context.restore();
}
