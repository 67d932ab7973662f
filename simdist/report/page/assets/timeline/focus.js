// The operation that the keyboard, or a click, is on.

function focusAt(timeline, place) {
  changeFocus(timeline, place?.lane && place.row >= 0 ? { lane: place.lane, row: place.row } : null);
}

/** Go to the operation before or after in the lane; from nowhere, to one in the middle of the view. */
function focusBeside(timeline, direction) {
  if (!timeline.focus) return focusNear(timeline, firstLaneInSight(timeline));
  const { lane, row } = timeline.focus;
  const next = rowBeside(timeline, lane, row, direction);
  if (next >= 0) return changeFocus(timeline, { lane, row: next });
  bringIntoSight(timeline, timeline.focus);
  say(timeline, `This is the ${direction > 0 ? "last" : "first"} operation of the lane.`);
}

/** Go to the lane above or below, to the operation that runs at the same time or is nearest; skip lanes without any. */
function focusLane(timeline, direction) {
  if (!timeline.focus) return focusNear(timeline, firstLaneInSight(timeline));
  const { lane, row } = timeline.focus;
  const { beginS, endS } = detailsOf(timeline, lane, row);
  const { layout } = timeline;
  for (let at = laneNumber(layout, lane) + direction; at >= 0 && at < layout.nLanes; at += direction) {
    const next = laneOf(layout, at);
    const nearest = rowNear(timeline, next, (beginS + endS) / 2);
    if (nearest >= 0) return changeFocus(timeline, { lane: next, row: nearest });
  }
  say(timeline, "There is no further lane.");
}

function focusNear(timeline, number) {
  for (let at = number; at < timeline.layout.nLanes; at++) {
    const lane = laneOf(timeline.layout, at);
    const row = rowNear(timeline, lane, middleS(timeline));
    if (row >= 0) return changeFocus(timeline, { lane, row });
  }
}

function firstLaneInSight({ layout, scrollTop }) {
  return Math.ceil(scrollTop / layout.bandHeight) * layout.nLanesOfBand;
}

/** Set what has the focus, bring it into sight and say what it is. */
function changeFocus(timeline, focus) {
  timeline.focus = focus;
  if (focus) {
    bringIntoSight(timeline, focus);
    say(timeline, sentenceOf(timeline, detailsOf(timeline, focus.lane, focus.row)));
  } else say(timeline, viewSentence(timeline));
  schedule(timeline);
}

function bringIntoSight(timeline, { lane, row }) {
  const { layout, size, parts, view } = timeline;
  const number = laneNumber(layout, lane);
  if (number < 0) return;
  const { top } = laneOf(layout, number);
  const page = size.height - AXIS_HEIGHT;
  const bottom = top + layout.laneHeight;
  if (top < timeline.scrollTop) parts.scroll.scrollTop = top - layout.gap;
  else if (bottom > timeline.scrollTop + page) parts.scroll.scrollTop = bottom + layout.gap - page;
  const { beginS, endS } = detailsOf(timeline, lane, row);
  if (endS > view.beginS && beginS < view.endS) return;
  panBy(timeline, (beginS + endS) / 2 - middleS(timeline));
}

/** Zoom so that the operation takes a third of the width. */
function zoomToFocus(timeline) {
  if (!timeline.focus) return;
  const { beginS, endS } = detailsOf(timeline, timeline.focus.lane, timeline.focus.row);
  const longS = endS - beginS;
  changeView(timeline, within({ beginS: beginS - longS, endS: endS + longS }, timeline.limits));
}
