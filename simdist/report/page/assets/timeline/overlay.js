// The overlay, drawn at every move of the pointer: the cross-hair, the outline of an operation, and the tip beside it.

const TIP_DISTANCE = 14; // CSS pixels from the pointer

/** Find what is under the pointer: a lane, and the operation that runs there. */
function hoverAt(timeline, x, y) {
  if (x < timeline.size.gutter || y < AXIS_HEIGHT) return null;
  const number = laneAt(timeline.layout, y - AXIS_HEIGHT + timeline.scrollTop);
  const atS = momentAt(timeline, x);
  if (number < 0) return { x, y, atS, lane: null, row: -1 };
  const lane = laneOf(timeline.layout, number);
  return { x, y, atS, lane, row: rowAt(timeline, lane, atS) };
}

/** Paint the overlay canvas and show the tip. */
function paintOverlay(timeline) {
  const { overlay } = timeline.parts;
  const { hover, focus, size, colours } = timeline;
  const context = overlay.getContext("2d");
  context.setTransform(size.ratio, 0, 0, size.ratio, 0, 0);
  context.clearRect(0, 0, size.width, size.height);
  clipped(context, [size.gutter, AXIS_HEIGHT - 2, size.width, size.height], () => {
    if (focus) outline(timeline, context, focus, 2.5);
    if (hover?.lane && hover.row >= 0) outline(timeline, context, hover, 1.5);
    if (hover) {
      context.fillStyle = cssOf(colours.muted);
      context.fillRect(Math.round(hover.x), AXIS_HEIGHT - 2, 1, size.height);
    }
  });
  if (hover) paintMoment(timeline, context, hover);
  showTip(timeline);
}

/** Write the moment under the pointer on the axis. */
function paintMoment(timeline, context, { x, atS }) {
  const { size, colours, view } = timeline;
  const pixelS = (view.endS - view.beginS) / (size.width - size.gutter);
  const text = timeText(atS, 10 ** Math.floor(Math.log10(pixelS)));
  context.font = `11px ${colours.font}`;
  context.textBaseline = "middle";
  const width = context.measureText(text).width + 8;
  const left = Math.min(Math.max(x - width / 2, size.gutter), size.width - width);
  context.fillStyle = cssOf(colours.text);
  context.fillRect(left, 4, width, 16);
  context.fillStyle = cssOf(colours.background);
  context.fillText(text, left + 4, 12.5);
}

/** Draw a frame around an operation, at least some pixels wide. */
function outline(timeline, context, { lane, row }, thickness) {
  const number = laneNumber(timeline.layout, lane);
  if (number < 0) return;
  const { beginS, endS } = detailsOf(timeline, lane, row);
  const left = Math.max(xOf(timeline, beginS), timeline.size.gutter - 4);
  const right = Math.min(xOf(timeline, endS), timeline.size.width + 4);
  const top = yOf(timeline, laneOf(timeline.layout, number).top);
  context.lineWidth = thickness;
  context.strokeStyle = cssOf(timeline.colours.text);
  context.strokeRect(left - 1, top - 1, Math.max(right - left, 2) + 2, timeline.layout.laneHeight + 1);
}

/** Show the tip of what the pointer is on, else of what the keyboard is on. */
function showTip(timeline) {
  const { tip } = timeline.parts;
  const { hover, focus } = timeline;
  const shown = hover ? (hover.lane ? hover : null) : focus && isInSight(timeline, focus) ? focus : null;
  tip.hidden = !shown;
  if (!shown) return;
  tip.replaceChildren(...tipOf(timeline, shown));
  const place = hover ? { x: hover.x, y: hover.y } : placeOf(timeline, focus);
  placeTip(timeline, place);
}

function tipOf(timeline, { lane, row, x }) {
  const where = `rank ${lane.rank}, ${timeline.plan.streams[lane.stream].name}, ${timeline.traces[lane.trace].name}`;
  const parts = [];
  if (row >= 0) {
    const details = detailsOf(timeline, lane, row);
    parts.push(element("strong", details.text), element("span", `step ${details.step}, ${where}`));
    parts.push(listOf(linesOf(timeline, details)));
  } else parts.push(element("strong", "idle"), element("span", where));
  const column = x === undefined ? null : columnAt(timeline, lane, x);
  if (column && column.nOps > 1 && column.shares.length > 1) {
    const pixel = timeText(column.pixelS, column.pixelS / 100);
    const shares = column.shares.map(([label, share]) => `${label} ${percentText(share)}`).join(", ");
    parts.push(listOf([[`this pixel (${pixel})`, `${column.nOps} operations: ${shares}`]]));
  }
  return parts;
}

function element(name, text) {
  const made = document.createElement(name);
  made.textContent = text;
  return made;
}

function listOf(lines) {
  const list = document.createElement("dl");
  for (const [name, value] of lines) list.append(element("dt", name), element("dd", value));
  return list;
}

/** Tell whether an operation is in the part of the canvas that can be seen. */
function isInSight(timeline, { lane, row }) {
  const number = laneNumber(timeline.layout, lane);
  if (number < 0) return false;
  const { beginS, endS } = detailsOf(timeline, lane, row);
  const y = yOf(timeline, laneOf(timeline.layout, number).top);
  return beginS <= timeline.view.endS && endS >= timeline.view.beginS && y >= AXIS_HEIGHT - 1 && y < timeline.size.height;
}

function placeOf(timeline, { lane, row }) {
  const { beginS, endS } = detailsOf(timeline, lane, row);
  const x = (xOf(timeline, beginS) + xOf(timeline, endS)) / 2;
  const top = laneOf(timeline.layout, laneNumber(timeline.layout, lane)).top;
  const inside = Math.min(Math.max(x, timeline.size.gutter), timeline.size.width);
  return { x: inside, y: yOf(timeline, top + timeline.layout.laneHeight) };
}

/** Put the tip beside a place, on the side that has room. */
function placeTip({ parts: { tip }, size }, { x, y }) {
  const [width, height] = [tip.offsetWidth, tip.offsetHeight];
  const left = x + TIP_DISTANCE + width <= size.width ? x + TIP_DISTANCE : x - TIP_DISTANCE - width;
  tip.style.left = `${Math.max(4, Math.min(left, size.width - width - 4))}px`;
  const isBelow = y + TIP_DISTANCE + height <= size.height || y < height;
  tip.style.top = `${isBelow ? y + TIP_DISTANCE : y - TIP_DISTANCE - height}px`;
}
