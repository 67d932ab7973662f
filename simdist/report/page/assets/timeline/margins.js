// Text around the lanes: names at the left, times and steps above.

/** Name ranks, traces and streams at the left. */
function paintGutter(timeline, context) {
  const { layout, size, colours, scrollTop, plan, traces } = timeline;
  const [first, last] = bandsBetween(layout, scrollTop, scrollTop + size.height - AXIS_HEIGHT);
  const every = Math.ceil(13 / layout.bandHeight);
  const { streamsAt, tracesAt } = gutterColumns(timeline);
  clipped(context, [0, AXIS_HEIGHT, size.gutter - 2, size.height], () => {
    for (let band = first; band <= last; band++) {
      const top = topOf(layout, band);
      context.fillStyle = cssOf(colours.text);
      const isCrowded = layout.bandHeight < 24;
      const middle = isCrowded ? top + (layout.bandHeight - layout.gap) / 2 : top + 7;
      if (band % every === 0) context.fillText(`rank ${layout.ranks[band]}`, 6, yOf(timeline, middle));
      context.fillStyle = cssOf(colours.muted);
      for (const [row, number] of layout.shown.entries()) {
        const rowTop = yOf(timeline, topOf(layout, band, row));
        if (tracesAt && layout.traceHeight >= 12) context.fillText(traces[number].name, tracesAt, rowTop + 7);
        if (!streamsAt || layout.laneHeight < LEAST_NAMED) continue;
        for (const [column, stream] of layout.streams.entries()) {
          context.fillText(plan.streams[stream].name, streamsAt, rowTop + (column + 0.5) * layout.laneHeight);
        }
      }
    }
  });
}

/** Return where the columns of the gutter begin, 0 for none, and its width. */
function gutterColumns({ layout, size, plan }) {
  const ranks = 44 + 7 * String(plan.worldSize - 1).length;
  const isNarrow = size.width < 520;
  const tracesAt = layout.shown.length > 1 && !isNarrow ? ranks : 0;
  const streamsAt = isNarrow || layout.laneHeight < LEAST_NAMED ? 0 : ranks + (tracesAt ? 60 : 0);
  return { tracesAt, streamsAt, width: streamsAt ? streamsAt + 52 : tracesAt ? tracesAt + 60 : ranks };
}

/** Draw the axis: times above, steps below. */
function paintAxis(timeline, context) {
  const { size, colours, view } = timeline;
  context.fillStyle = cssOf(colours.surface);
  context.fillRect(0, 0, size.width, AXIS_HEIGHT - 2);
  const { marks, base } = axisMarks(view, size.width - size.gutter);
  context.fillStyle = cssOf(colours.muted);
  context.fillText("time", 6, 11);
  context.fillStyle = cssOf(colours.text);
  if (base) context.fillText(base, Math.min(36, size.gutter - 8 - context.measureText(base).width), 11);
  for (const { atS, text } of marks) {
    const x = xOf(timeline, atS);
    context.fillRect(Math.round(x), 0, 1, 5);
    const half = context.measureText(text).width / 2;
    if (x - half >= size.gutter - 6 && x + half <= size.width) context.fillText(text, x - half, 12);
  }
  paintStepNumbers(timeline, context);
}

/** Number the steps of the first rank that is shown, as many as have room, with lines at their ends. */
function paintStepNumbers(timeline, context) {
  const { layout, plan, traces, view, size, colours } = timeline;
  context.fillStyle = cssOf(colours.muted);
  context.fillText("step", 6, 29);
  const [rank, trace] = [layout.ranks[0], traces[layout.shown[0]]];
  if (rank === undefined || !trace) return;
  const [first, last] = stepsIn(view, trace, plan, rank);
  const endOf = (step) => (step < 0 ? 0 : trace.stepEnd[step * plan.worldSize + rank] * trace.tickS);
  const room = context.measureText(String(last)).width + 8;
  const every = roundStep(Math.max(1, (room * (last - first + 1)) / (size.width - size.gutter)));
  clipped(context, [size.gutter, 0, size.width, AXIS_HEIGHT], () => {
    let free = size.gutter;
    for (let step = Math.floor(first / every) * every; step <= last; step += every) {
      const [from, to] = [xOf(timeline, endOf(step - 1)), xOf(timeline, endOf(step))];
      if (from > free - 2 || step === first) {
        context.fillStyle = cssOf(colours.muted);
        context.fillRect(Math.round(from), 22, 1, AXIS_HEIGHT - 26);
      }
      // in the middle of its step if that is what the lines enclose, else beside the line where it begins
      const [left, right] = [Math.max(from, size.gutter), Math.min(every > 1 ? from + room : to, size.width)];
      const at = Math.max(left + 4, (left + right - room) / 2 + 4);
      if (left < free - 2 || at + room - 4 > size.width || (from < size.gutter && to < size.gutter + room)) continue;
      context.fillStyle = cssOf(colours.text);
      context.fillText(String(step), at, 29);
      free = at + room - 4;
    }
  });
}
