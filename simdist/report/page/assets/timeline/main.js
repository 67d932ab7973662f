// The state of a timeline, the ways to change it, and the start.

const TALLEST = 576; // CSS pixels of the frame; taller ones scroll
const LANE_HEIGHTS = { few: 12, many: 6, most: 14 }; // CSS pixels that a lane has at first: at least, and at most
const FEW_BANDS = 16;

/** Change the time in view. */
function changeView(timeline, view) {
  timeline.view = view;
  if (timeline.hover) timeline.hover = hoverAt(timeline, timeline.hover.x, timeline.hover.y);
  schedule(timeline);
}

/** Change what the pointer is on. */
function changeHover(timeline, hover) {
  if (!hover && !timeline.hover) return;
  timeline.hover = hover;
  schedule(timeline, { isBaseStale: false });
}

/** Change what is shown: ranks, streams, traces or the height of lanes. */
function choose(timeline, change) {
  Object.assign(timeline.choice, change);
  timeline.layout = layoutOf(timeline.choice);
  timeline.hover = null;
  if (timeline.focus && laneNumber(timeline.layout, timeline.focus.lane) < 0) timeline.focus = null;
  measure(timeline);
  say(timeline, viewSentence(timeline));
}

/** Say something in the line below, which screen readers read out. */
function say(timeline, text) {
  timeline.parts.status.textContent = text;
}

function viewSentence({ view, choice, plan, traces, layout }) {
  const exact = (view.endS - view.beginS) / 1e4;
  const streams = choice.streams.map((stream) => plan.streams[stream].name).join(", ") || "no stream";
  const n = layout.ranks.length;
  const ranks = n === plan.worldSize ? `all ${n} ranks` : `${n} of ${plan.worldSize} ranks`;
  const shown = choice.shown.map((trace) => traces[trace].name).join(" above ");
  return `${shown}: ${timeText(view.beginS, exact)} to ${timeText(view.endS, exact)}; ${ranks}; ${streams}.`;
}

/** Paint before the next frame; the base canvas only if what it shows has changed. */
function schedule(timeline, { isBaseStale = true } = {}) {
  timeline.isBaseStale ||= isBaseStale;
  if (timeline.isScheduled) return;
  timeline.isScheduled = true;
  requestAnimationFrame(() => {
    timeline.isScheduled = false;
    if (timeline.size.width > 0) paint(timeline);
  });
}

function paint(timeline) {
  const beganMs = performance.now();
  if (timeline.isBaseStale) paintBase(timeline);
  timeline.isBaseStale = false;
  paintOverlay(timeline);
  timeline.frameMs = performance.now() - beganMs;
  timeline.nFrames++;
  timeline.firstPaintMs ??= performance.now();
}

/** Return the height of the axis and all rows, and that of the frame, which scrolls if it is less. */
function heightsOf(layout) {
  const total = AXIS_HEIGHT + Math.max(layout.height, 40);
  return { total, height: Math.min(total, TALLEST) };
}

/** Fit canvases and the scrolled height to the width of the page and to the rows. */
function measure(timeline) {
  const { frame, scroll, content, stage, base, overlay } = timeline.parts;
  const { total, height } = heightsOf(timeline.layout);
  scroll.style.height = `${height}px`;
  content.style.height = `${total}px`;
  stage.style.height = `${height}px`;
  const ratio = window.devicePixelRatio || 1;
  const width = scroll.clientWidth;
  timeline.size = { width, height, ratio, gutter: 0 };
  timeline.size.gutter = gutterColumns(timeline).width;
  for (const canvas of [base, overlay]) {
    [canvas.width, canvas.height] = [width, height].map((length) => Math.round(length * ratio));
    [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
  }
  timeline.scrollTop = scroll.scrollTop;
  frame.style.minHeight = `${height}px`;
  if (width > 0) schedule(timeline);
}

/** Read the colours again, when the theme has changed. */
function recolour(timeline) {
  timeline.colours = readColours(timeline.root, timeline.plan.styles);
  paintSwatches(timeline.root, timeline.plan.styles, timeline.colours, window.devicePixelRatio || 1);
  schedule(timeline);
}

function partsOf(root) {
  const one = (name) => root.querySelector(`.timeline-${name}`);
  const names = ["frame", "scroll", "content", "stage", "base", "overlay", "tip", "status", "problem"];
  const parts = Object.fromEntries(names.map((name) => [name, one(name)]));
  return { ...parts, control: (name) => root.querySelector(`[data-control="${name}"]`) };
}

/** Return a height of lanes at which many ranks still show much, and few are easy to read. */
function firstLaneHeight({ worldSize, traces, streams }) {
  const nBands = worldSize * traces.length;
  const least = nBands <= FEW_BANDS ? LANE_HEIGHTS.few : LANE_HEIGHTS.many;
  const room = (TALLEST - AXIS_HEIGHT) / (nBands * streams.length) - 2;
  return Math.round(Math.min(Math.max(room, least), LANE_HEIGHTS.most));
}

/** Return what is shown at first: everything. */
function firstChoice(record) {
  const { worldSize, streams, traces } = record;
  return {
    ranks: numbersOf("", worldSize, "rank"),
    streams: streams.map((_, number) => number),
    shown: traces.map((_, number) => number),
    laneHeight: firstLaneHeight(record),
  };
}

/** Give the frame the height that it will have, so that what stands below does not move when it is painted. */
function reserve(root, record) {
  const { frame, scroll } = partsOf(root);
  const { total, height } = heightsOf(layoutOf(firstChoice(record)));
  frame.style.minHeight = `${height}px`;
  scroll.style.height = `${height}px`;
  root.querySelector(".timeline-content").style.height = `${total}px`;
}

function newTimeline(root, plan, traces) {
  const choice = firstChoice(plan);
  const limits = limitsOf(traces);
  return {
    root,
    plan,
    traces,
    choice,
    limits,
    parts: partsOf(root),
    layout: layoutOf(choice),
    view: whole(limits),
    size: { width: 0, height: 0, ratio: 1, gutter: 0 },
    scrollTop: 0,
    hover: null,
    focus: null,
    nFrames: 0,
    frameMs: 0,
  };
}

/** Put what a page or a test may read on the element: `element.timeline`, a copy of the state at the time of reading. */
function expose(timeline) {
  const { root, plan, traces } = timeline;
  const opOf = (place) => (place?.lane && place.row >= 0 ? detailsOf(timeline, place.lane, place.row) : null);
  Object.defineProperty(root, "timeline", {
    get: () =>
      Object.freeze({
        view: { ...timeline.view },
        ranks: [...timeline.choice.ranks],
        streams: timeline.choice.streams.map((stream) => plan.streams[stream].name),
        shown: timeline.choice.shown.map((trace) => traces[trace].name),
        laneHeight: timeline.choice.laneHeight,
        scrollTop: timeline.scrollTop,
        stepsInView: stepsIn(timeline.view, traces[0], plan, 0),
        hover: opOf(timeline.hover),
        focus: opOf(timeline.focus),
        isIdle: !timeline.isScheduled,
        nFrames: timeline.nFrames,
        frameMs: timeline.frameMs,
        firstPaintMs: timeline.firstPaintMs,
        /** Return where an operation of a lane is on the canvas, in CSS pixels. */
        placeOf: (rank, stream, seconds, trace = 0) => {
          const lane = { rank, trace, stream: plan.streams.findIndex(({ name }) => name === stream) };
          const number = laneNumber(timeline.layout, lane);
          if (number < 0) return null;
          const top = yOf(timeline, laneOf(timeline.layout, number).top);
          return { x: xOf(timeline, seconds), y: top + timeline.layout.laneHeight / 2 };
        },
        stepEndS: (step, rank, trace = 0) => traces[trace].stepEnd[step * plan.worldSize + rank] * traces[trace].tickS,
      }),
  });
}

async function start(root) {
  try {
    const record = readRecord(root);
    reserve(root, record);
    const plan = planOf(record);
    const timeline = newTimeline(root, plan, await readTraces(root, plan));
    timeline.parts.frame.removeAttribute("aria-busy");
    timeline.parts.control("height").value = timeline.choice.laneHeight;
    expose(timeline);
    recolour(timeline);
    attachControls(timeline);
    timeline.parts.scroll.addEventListener("scroll", () => {
      timeline.scrollTop = timeline.parts.scroll.scrollTop;
      changeView(timeline, timeline.view);
    });
    new ResizeObserver(() => measure(timeline)).observe(timeline.parts.frame);
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => recolour(timeline));
    const ofTheme = { attributeFilter: ["data-theme", "class", "style"] };
    new MutationObserver(() => recolour(timeline)).observe(document.documentElement, ofTheme);
    measure(timeline);
    say(timeline, viewSentence(timeline));
  } catch (error) {
    root.querySelector(".timeline-status").textContent = `The timeline cannot be shown: ${error.message}.`;
    root.querySelector(".timeline-frame").hidden = true;
    console.error(error);
  }
}

/** Start all timelines, one after the other; those that are hidden, when they are shown. */
async function startAll() {
  const roots = [...document.querySelectorAll(".timeline")];
  for (const root of roots.filter((each) => each.getClientRects().length)) reserve(root, readRecord(root));
  for (const root of roots) {
    if (root.getClientRects().length) await start(root);
    else startWhenShown(root);
  }
}

function startWhenShown(root) {
  const observer = new ResizeObserver(() => {
    if (!root.getClientRects().length) return;
    observer.disconnect();
    start(root);
  });
  observer.observe(root);
}

if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", startAll);
else startAll();
