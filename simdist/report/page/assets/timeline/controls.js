// Controls of the reader: buttons, fields, mouse and keys.

const BUTTON_ZOOM = 2;
const KEY_PAN = 0.15; // of what is in view
const WHEEL_LINE = 16; // CSS pixels of a line, for wheels that count lines

function attachControls(timeline) {
  attachButtons(timeline);
  attachFields(timeline);
  attachPointer(timeline);
  attachWheel(timeline);
  attachKeys(timeline);
}

const middleS = ({ view }) => (view.beginS + view.endS) / 2;

function zoomBy(timeline, factor, atS = middleS(timeline)) {
  changeView(timeline, zoomed(timeline.view, timeline.limits, factor, atS));
}

function panBy(timeline, byS) {
  changeView(timeline, panned(timeline.view, timeline.limits, byS));
}

const fit = (timeline) => changeView(timeline, whole(timeline.limits));

function attachButtons(timeline) {
  const actions = {
    in: () => zoomBy(timeline, BUTTON_ZOOM),
    out: () => zoomBy(timeline, 1 / BUTTON_ZOOM),
    fit: () => fit(timeline),
  };
  for (const button of timeline.root.querySelectorAll("button[data-action]")) {
    button.addEventListener("click", () => {
      actions[button.dataset.action]();
      say(timeline, viewSentence(timeline));
    });
  }
}

function attachFields(timeline) {
  const { control } = timeline.parts;
  control("step-form").addEventListener("submit", (event) => {
    event.preventDefault();
    goToStep(timeline, Number(control("step").value));
  });
  for (const name of ["ranks", "nodes"]) control(name)?.addEventListener("input", () => chooseRanks(timeline));
  for (const box of timeline.root.querySelectorAll("input[data-stream]")) {
    box.addEventListener("change", () => chooseStreams(timeline));
  }
  control("shown")?.addEventListener("change", (event) => {
    const chosen = timeline.traces.findIndex(({ name }) => name === event.target.value);
    choose(timeline, { shown: chosen < 0 ? timeline.traces.map((_, number) => number) : [chosen] });
  });
  control("height").addEventListener("input", (event) => choose(timeline, { laneHeight: Number(event.target.value) }));
}

function goToStep(timeline, step) {
  changeView(timeline, viewOfStep(step, timeline, timeline.choice, timeline.limits));
  say(timeline, `Step ${step}, ${viewSentence(timeline)}`);
}

/** Take the ranks that the fields name; leave things as they are and say why where they name none. */
function chooseRanks(timeline) {
  const { control, problem } = timeline.parts;
  const fields = [control("ranks"), control("nodes")];
  try {
    choose(timeline, { ranks: ranksOf(timeline.plan, ...fields.map((field) => field?.value ?? "")) });
    problem.hidden = true;
  } catch (error) {
    problem.textContent = error.message;
    problem.hidden = false;
  }
  for (const field of fields) field?.setAttribute("aria-invalid", String(!problem.hidden && field.value.trim() !== ""));
}

function chooseStreams(timeline) {
  const isChecked = (name) => timeline.root.querySelector(`input[data-stream="${name}"]`).checked;
  const streams = timeline.plan.streams.flatMap(({ name }, number) => (isChecked(name) ? [number] : []));
  choose(timeline, { streams });
}

function attachPointer(timeline) {
  const { overlay } = timeline.parts;
  let held = null;
  overlay.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || event.offsetX < timeline.size.gutter) return;
    held = { x: event.offsetX, y: event.offsetY, view: timeline.view, top: timeline.scrollTop, isMoved: false };
    overlay.setPointerCapture(event.pointerId);
  });
  overlay.addEventListener("pointermove", (event) => {
    if (held) drag(timeline, held, event);
    else changeHover(timeline, hoverAt(timeline, event.offsetX, event.offsetY));
  });
  const letGo = (event) => {
    if (held && !held.isMoved) focusAt(timeline, hoverAt(timeline, event.offsetX, event.offsetY));
    held = null;
    overlay.classList.remove("dragged");
  };
  overlay.addEventListener("pointerup", letGo);
  overlay.addEventListener("pointercancel", () => (held = null));
  overlay.addEventListener("pointerleave", () => changeHover(timeline, null));
  overlay.addEventListener("dblclick", (event) => zoomBy(timeline, BUTTON_ZOOM, momentAt(timeline, event.offsetX)));
}

function drag(timeline, held, event) {
  const [right, down] = [event.offsetX - held.x, event.offsetY - held.y];
  if (!held.isMoved && Math.hypot(right, down) < 3) return;
  held.isMoved = true;
  timeline.parts.overlay.classList.add("dragged");
  changeHover(timeline, null);
  const { beginS, endS } = held.view;
  const byS = (-right * (endS - beginS)) / (timeline.size.width - timeline.size.gutter);
  changeView(timeline, panned(held.view, timeline.limits, byS));
  if (event.pointerType === "mouse") timeline.parts.scroll.scrollTop = held.top - down;
}

/** Ctrl + wheel zooms, Shift + wheel or a sideways wheel moves in time, and the wheel alone scrolls as everywhere. */
function attachWheel(timeline) {
  timeline.parts.overlay.addEventListener(
    "wheel",
    (event) => {
      const line = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? WHEEL_LINE : 1;
      const [x, y] = [event.deltaX * line, event.deltaY * line];
      const at = Math.max(event.offsetX, timeline.size.gutter);
      if (event.ctrlKey) zoomBy(timeline, Math.exp(-y / 300), momentAt(timeline, at));
      else if (event.shiftKey || Math.abs(x) > Math.abs(y)) {
        const perPixelS = (timeline.view.endS - timeline.view.beginS) / (timeline.size.width - timeline.size.gutter);
        panBy(timeline, (x || y) * perPixelS);
      } else return;
      event.preventDefault();
      changeHover(timeline, hoverAt(timeline, event.offsetX, event.offsetY));
    },
    { passive: false },
  );
}

function attachKeys(timeline) {
  timeline.parts.overlay.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const act = (event.shiftKey ? SHIFTED_KEYS[event.key] : undefined) ?? KEYS[event.key];
    if (!act) return;
    event.preventDefault();
    timeline.hover = null;
    act(timeline);
  });
}

/** Act, then say what is in view. */
const moving = (act) => (timeline) => {
  act(timeline);
  say(timeline, viewSentence(timeline));
};
const lengthS = ({ view }) => view.endS - view.beginS;
const scrollBy = (timeline, by) => (timeline.parts.scroll.scrollTop += by);
const pageOf = ({ size }) => size.height - AXIS_HEIGHT;

const KEYS = {
  "+": moving((timeline) => zoomBy(timeline, BUTTON_ZOOM)),
  "=": moving((timeline) => zoomBy(timeline, BUTTON_ZOOM)),
  "-": moving((timeline) => zoomBy(timeline, 1 / BUTTON_ZOOM)),
  "0": moving(fit),
  Home: moving(fit),
  ArrowLeft: moving((timeline) => panBy(timeline, -KEY_PAN * lengthS(timeline))),
  ArrowRight: moving((timeline) => panBy(timeline, KEY_PAN * lengthS(timeline))),
  ArrowUp: (timeline) => scrollBy(timeline, -timeline.layout.bandHeight),
  ArrowDown: (timeline) => scrollBy(timeline, timeline.layout.bandHeight),
  PageUp: (timeline) => scrollBy(timeline, -pageOf(timeline)),
  PageDown: (timeline) => scrollBy(timeline, pageOf(timeline)),
  Enter: (timeline) => zoomToFocus(timeline),
  Escape: (timeline) => changeFocus(timeline, null),
  g: (timeline) => timeline.parts.control("step").select(),
};

const SHIFTED_KEYS = {
  ArrowLeft: (timeline) => focusBeside(timeline, -1),
  ArrowRight: (timeline) => focusBeside(timeline, 1),
  ArrowUp: (timeline) => focusLane(timeline, -1),
  ArrowDown: (timeline) => focusLane(timeline, 1),
};
