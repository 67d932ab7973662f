"""The timeline of a page: times survive the packing, and a reader can see, zoom, filter and read it out by keyboard."""

import base64
import json
import re
import subprocess
import sys
import zlib
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from browser import chromium, opened, require, wait_until
from commandline import SMALL
from traces import plan_of, trace_of

from simdist import scenario
from simdist.errors import TraceError
from simdist.plan import AllReduce, Backward, Buffer, Delay, Forward, Load, Optimize, Plan, Wait
from simdist.plan.group import Group
from simdist.report.page.document import theme_css
from simdist.report.page.packing import DID_NOT_RUN, pack, rows_of_streams
from simdist.report.page.sections.timelines import timeline_assets, timeline_section
from simdist.runs import building
from simdist.traces.trace import Trace
from simdist.traces.waiting import host_waits, step_end_s

FORWARD = Forward(("x",), ("loss",))
STEP = (
    Delay("host"),
    FORWARD,
    Backward(("loss",), "grad"),
    AllReduce("grad", Group(2)),
    Wait("grad"),
    Optimize(("param",), ("grad",)),
)
PLAN = plan_of(STEP, STEP, world_size=2)
TRACE = trace_of(
    PLAN,
    [
        (0, 0, [0, 2]),  # rank 1 is delayed by 2 s
        ([0, 2], [0, 2], [1, 3]),
        ([1, 3], [1, 3], [3, 5]),
        ([3, 5], 5, 6),  # rank 0 waits for rank 1
        (6, 6, 6),
        (6, 6, 7),
        (7, 7, 7),
        (7, 7, 8),
        (8, 8, 10),
        (10, 10, 11),
        (11, 11, 11),
        (11, 11, 12),
    ],
)
BLUE, SKY, GREEN, VERMILLION = (0, 114, 178), (86, 180, 233), (0, 158, 115), (213, 94, 0)
GREY, WHITE, BLACK = (222, 222, 222), (255, 255, 255), (0, 0, 0)


# --- Packing


def unpacked(trace: Trace) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ready_s, start_s and end_s as a page has them, by the description in `packing`."""
    packed = pack(trace)
    shape = (trace.plan.n_instances, trace.plan.world_size)
    planes = np.frombuffer(zlib.decompress(base64.b64decode(packed.data)), np.uint8).reshape(3, 4, -1)
    gap, wait, took = (plane.T.copy().view("<u4").reshape(shape).astype(np.int64) for plane in planes)
    unfolded = [np.where(each % 2, -(each + 1) // 2, each // 2) for each in (gap, wait, took)]
    times = np.full((3, *shape), np.nan)
    at = 0
    for rows in rows_of_streams(trace.plan).values():
        now = np.zeros(trace.plan.world_size)
        for row in rows:
            ran = took[at] != DID_NOT_RUN
            lengths = [now, *(each[at] for each in unfolded)]
            instants = np.cumsum(lengths, axis=0)[1:]
            times[:, row, ran] = instants[:, ran]
            now = np.where(ran, instants[2], now)
            at += 1
    return tuple(times * packed.tick_s)


def simulated() -> Trace:
    return building.simulate(scenario.loads(SMALL))


def with_noise(trace: Trace) -> Trace:
    later_s = np.cumsum(np.random.default_rng(0).exponential(1e-4, trace.ready_s.shape), axis=0)
    return Trace(trace.plan, trace.ready_s + later_s, trace.start_s + later_s, trace.end_s + later_s, source="noisy")


@pytest.mark.parametrize("scale", [1e-7, 1.0, 3e5])
def test_times_in_a_page_are_right_to_a_hundred_millionth_of_the_makespan(scale):
    noisy = with_noise(simulated())
    trace = Trace(noisy.plan, *(scale * each for each in (noisy.ready_s, noisy.start_s, noisy.end_s)), source="scaled")
    ready_s, start_s, end_s = unpacked(trace)
    expected_s = trace.ready_s.copy()
    expected_s[host_waits(trace).rows] = host_waits(trace).begin_s
    for found, right in [(ready_s, expected_s), (start_s, trace.start_s), (end_s, trace.end_s)]:
        np.testing.assert_allclose(found, right, rtol=0, atol=1e-8 * trace.makespan_s)


def test_what_did_not_run_is_told_apart_from_what_took_no_time():
    times = [array.copy() for array in (TRACE.ready_s, TRACE.start_s, TRACE.end_s)]
    for array in times:
        array[[1, 2, 7], [0, 1, 0]] = np.nan
    times[2][9, 1] = np.nan  # begun, never done
    _, start_s, end_s = unpacked(Trace(PLAN, *times, source="by hand"))
    missing = np.isnan(times[2])
    assert (np.isnan(end_s) == missing).all()
    np.testing.assert_allclose(start_s[~missing], TRACE.start_s[~missing], atol=1e-7)


def test_operations_that_begin_before_the_one_before_ended_keep_their_times():
    plan = plan_of((FORWARD, FORWARD), world_size=1)
    trace = trace_of(plan, [(-0.25, 0, 2), (1.5, 1.5, 1.75)])
    ready_s, start_s, end_s = unpacked(trace)
    assert (ready_s.ravel().tolist(), start_s.ravel().tolist()) == ([-0.25, 1.5], [0, 1.5])
    np.testing.assert_allclose(end_s.ravel(), [2, 1.75])


def test_trace_of_no_length_can_be_shown():
    trace = trace_of(plan_of((FORWARD,), world_size=2), [(0, 0, 0)])
    assert pack(trace).tick_s == 1e-9
    assert not unpacked(trace)[2].any()


def test_half_characters_in_names_can_be_written():
    section = timeline_section({"simulated": replace(TRACE, plan=replace(PLAN, name="\ud800"))}, element_id="t")
    assert "Timeline of ?: 2 ranks" in section.encode().decode()


def test_equal_traces_give_equal_bytes():
    first, second = (timeline_section({"simulated": simulated()}, element_id="t") for _ in range(2))
    assert first == second
    assert timeline_assets() == timeline_assets()


def test_names_cannot_end_the_script_they_stand_in():
    name = '</script><b title="x">&'
    section = timeline_section({"simulated": replace(TRACE, plan=replace(PLAN, name=name))}, element_id="t")
    assert name not in section
    [record] = re.findall(r'<script type="application/json">(.*?)</script>', section)
    assert json.loads(record)["name"] == name


def test_only_one_trace_or_two_of_one_plan_are_shown():
    with pytest.raises(TraceError, match=r"^0 traces for a timeline; it shows one, or two of the same plan$"):
        timeline_section({}, element_id="t")
    other = trace_of(plan_of((FORWARD,), world_size=2), [(0, 0, 1)])
    with pytest.raises(TraceError, match="traces of different plans"):
        timeline_section({"simulated": TRACE, "measured": other}, element_id="t")


# --- In a browser


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


def page_text(section: str, head: str = "") -> str:
    css, script = timeline_assets()
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width">'
        f"<title>Timeline</title><style>{head}{css}</style></head><body>{section}<script>{script}</script></body></html>"
    )


class Reader:
    """Somebody who reads a timeline, and a window into its state."""

    def __init__(self, page):
        self.page = page
        self.canvas = page.locator(".timeline-overlay")
        wait_until(page, "document.querySelector('.timeline').timeline?.firstPaintMs")

    def state(self, expression="timeline"):
        """Return the state, or a part of it, once everything is painted."""
        return self.page.evaluate(
            """async (expression) => {
                const root = document.querySelector(".timeline");
                do await new Promise(requestAnimationFrame); while (!root.timeline.isIdle);
                return new Function("timeline", `return ${expression}`)(root.timeline);
            }""",
            expression,
        )

    @contextmanager
    def repainting(self):
        """Wait until what happens in the block has been painted."""
        before = self.state("timeline.nFrames")
        yield
        wait_until(self.page, f"document.querySelector('.timeline').timeline.nFrames > {before}")

    def view(self):
        view = self.state("timeline.view")
        return view["beginS"], view["endS"]

    def place(self, rank, stream, seconds, trace=0):
        """Return where a moment of a lane is on the canvas, in CSS pixels."""
        place = self.state(f"timeline.placeOf({rank}, '{stream}', {seconds}, {trace})")
        return place and (place["x"], place["y"])

    def point(self, rank, stream, seconds, trace=0):
        """Move the mouse there."""
        x, y = self.place(rank, stream, seconds, trace)
        box = self.canvas.bounding_box()
        self.page.mouse.move(box["x"] + x, box["y"] + y)

    def hover(self, rank, stream, seconds, trace=0):
        """Move the mouse there; return the operation it is on."""
        self.point(rank, stream, seconds, trace)
        return self.state("timeline.hover")

    def click(self, rank, stream, seconds, trace=0):
        """Press and let go of the mouse there."""
        self.point(rank, stream, seconds, trace)
        self.page.mouse.down()
        self.page.mouse.up()

    def tip(self):
        return self.page.locator(".timeline-tip").inner_text()

    def press(self, *keys):
        for key in keys:
            self.canvas.press(key)

    def status(self):
        return self.page.locator(".timeline-status").inner_text()

    def pixels(self, x, y, width, height):
        """Return red, green and blue of a part of the canvas, `[height, width, 3]`."""
        found = self.page.evaluate(
            """([x, y, width, height]) => {
                const copy = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
                copy.drawImage(document.querySelector(".timeline-base"), -x, -y);
                return [...copy.getImageData(0, 0, width, height).data];
            }""",
            [x, y, width, height],
        )
        return np.reshape(found, (height, width, 4))[:, :, :3]

    def colours(self, rank, stream, seconds, trace=0):
        """Return the colours of a square of 5 x 5 pixels around a moment of a lane, most frequent first."""
        x, y = self.place(rank, stream, seconds, trace)
        found = self.pixels(round(x) - 2, round(y) - 2, 5, 5).reshape(-1, 3)
        pixels, counts = np.unique(found, axis=0, return_counts=True)
        return [tuple(pixel) for pixel in pixels[np.argsort(-counts, kind="stable")].tolist()]


@pytest.fixture
def read(browser, tmp_path):
    """Open timelines; at the end no page must have asked for anything but its file, nor complained."""
    with ExitStack() as stack:

        def show(traces, *, head="", ranks_per_node=None, steps=None, **settings):
            stack.close()
            section = timeline_section(traces, element_id="t", ranks_per_node=ranks_per_node, steps=steps)
            path = tmp_path / "timeline.html"
            path.write_text(page_text(section, head), encoding="utf-8")
            return Reader(stack.enter_context(opened(browser, path, **settings)).page)

        yield show


def test_spans_have_the_colours_of_the_legend_where_they_ran(read):
    reader = read({"simulated": TRACE})
    assert reader.colours(0, "compute", 2.9) == [BLUE]
    assert reader.colours(0, "compute", 0.93) == [SKY]
    assert reader.colours(0, "compute", 5.5) == [WHITE]  # idle
    assert reader.colours(0, "comm", 5.93) == [GREEN]
    assert reader.colours(0, "comm", 1.0) == [WHITE]
    assert reader.colours(1, "comm", 4.0) == [WHITE]  # the last does not wait
    assert reader.colours(0, "host", 5.8) == [GREY]
    assert set(reader.colours(1, "host", 1.9)) == {VERMILLION, BLACK}
    pale, ink = reader.colours(0, "comm", 4.9)
    assert sum(pale) > sum(ink) > 0


def test_dark_is_what_the_reader_prefers_or_the_page_chose(read):
    reader = read({"simulated": TRACE}, color_scheme="dark")
    assert reader.colours(0, "compute", 2.9) == [SKY]
    [dark] = reader.colours(0, "compute", 5.5)
    assert max(dark) < 40
    for scheme, backward in [("light", BLUE), ("dark", SKY)]:
        with reader.repainting():
            reader.page.emulate_media(color_scheme=scheme)
        assert reader.colours(0, "compute", 2.9) == [backward]
    with reader.repainting():
        reader.page.evaluate("document.documentElement.dataset.theme = 'light'")
    assert (reader.colours(0, "compute", 2.9), reader.colours(0, "compute", 5.5)) == ([BLUE], [WHITE])


def test_page_sets_the_colours_of_states(read):
    reader = read({"simulated": TRACE}, head=":root { --compute: #123456; --bg: #fffdf0; }")
    assert reader.colours(0, "compute", 2.9) == [(0x12, 0x34, 0x56)]
    assert reader.colours(0, "compute", 5.5) == [(0xFF, 0xFD, 0xF0)]


@pytest.mark.parametrize("head", ["", theme_css()], ids=["alone", "in the page"])
def test_text_stands_out(read, head):
    reader = read({"simulated": TRACE}, head=head)
    channels = """(name) => {
        const reader = document.createElement("canvas").getContext("2d");
        const probe = document.querySelector(".timeline").appendChild(document.createElement("i"));
        probe.style.color = `var(--timeline-${name})`;
        reader.fillStyle = getComputedStyle(probe).color;
        reader.fillRect(0, 0, 1, 1);
        return [...reader.getImageData(0, 0, 1, 1).data].slice(0, 3);
    }"""
    for scheme in ("light", "dark"):
        reader.page.emulate_media(color_scheme=scheme)
        luminance = {
            name: luminance_of(reader.page.evaluate(channels, name)) for name in ("fg", "muted", "bg", "surface")
        }
        for ink in ("fg", "muted"):
            for ground in ("bg", "surface"):
                low, high = sorted([luminance[ink], luminance[ground]])
                assert (high + 0.05) / (low + 0.05) >= 4.5, (scheme, ink, ground)


def luminance_of(channels: list[int]) -> float:
    """Return the relative luminance of WCAG 2.2."""
    shares = np.array(channels) / 255
    linear = np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def test_pointer_tells_the_operation_its_times_and_whom_it_waited_for(read):
    reader = read({"simulated": TRACE})
    found = reader.hover(0, "comm", 5.5)
    assert (found["step"], found["rank"], found["stream"]) == (0, 0, "comm")
    assert (found["readyS"], found["startS"], found["endS"]) == pytest.approx((3, 5, 6), abs=1e-7)
    lines = reader.tip().split("\n")
    assert lines[:2] == ["all_reduce(grad, mean over group of 2)", "step 0, rank 0, comm, simulated"]
    assert [*zip(lines[2::2], lines[3::2], strict=True)] == [
        ("ready", "3 s"),
        ("waited", "2 s for rank 1"),
        ("began", "5 s"),
        ("took", "1 s"),
        ("ended", "6 s"),
        ("buffer", "4 kB"),
    ]
    assert reader.hover(0, "comm", 4.0)["text"] == "all_reduce(grad, mean over group of 2)"  # while it waits
    assert reader.hover(0, "comm", 2.0) is None
    assert reader.tip().split("\n") == ["idle", "rank 0, comm, simulated"]
    blocked = reader.hover(1, "host", 4.0)
    assert (blocked["text"], blocked["readyS"], blocked["endS"]) == ("wait(grad)", pytest.approx(2), pytest.approx(6))
    assert "waited\n4 s" in reader.tip()


def test_keys_go_from_operation_to_operation_and_read_them_out(read):
    reader = read({"simulated": TRACE})
    reader.press("Shift+ArrowRight")
    assert reader.state("timeline.focus")["stream"] == "host"
    reader.press("Shift+ArrowDown", "Shift+ArrowDown", "Shift+ArrowLeft", "Shift+ArrowLeft")
    expected = (
        "all_reduce(grad, mean over group of 2) step 0 rank 0 (comm, simulated): ready 3 s, waited 2 s for rank 1, "
        "began 5 s, took 1 s, ended 6 s, buffer 4 kB."
    )
    assert reader.status() == "This is the first operation of the lane."
    reader.press("Shift+ArrowRight", "Shift+ArrowLeft")
    assert reader.status() == expected
    assert reader.tip().startswith("all_reduce(grad")
    reader.press("Shift+ArrowDown", "Shift+ArrowDown")
    focus = reader.state("timeline.focus")
    assert (focus["rank"], focus["text"]) == (1, "backward(loss -> grad)")
    reader.press("Enter")
    assert reader.view() == pytest.approx((1, 7))  # as much before and after as it took
    reader.press("Escape")
    assert reader.state("timeline.focus") is None


def test_keys_zoom_and_move(read):
    reader = read({"simulated": TRACE})
    assert reader.view() == pytest.approx((0, 12))
    reader.press("+")
    assert reader.view() == pytest.approx((3, 9))
    reader.press("ArrowRight")
    assert reader.view() == pytest.approx((3.9, 9.9))
    reader.press("ArrowLeft", "-")
    assert reader.view() == pytest.approx((0, 12))
    reader.press("+", "+", "Home")
    assert reader.view() == pytest.approx((0, 12))
    reader.press("+", "0", "ArrowLeft", "-")
    assert reader.view() == pytest.approx((0, 12))  # never leaves the run
    assert reader.status() == "simulated: 0 s to 12 s; all 2 ranks; host, compute, comm."
    reader.press(*["+"] * 24)
    begin_s, end_s = reader.view()
    assert end_s - begin_s == pytest.approx(20e-7)  # 20 ticks of 100 ns
    assert begin_s <= 6 <= end_s


def test_mouse_zooms_where_it_is_and_drags(read):
    reader = read({"simulated": TRACE})
    x, _ = reader.place(0, "compute", 3)
    reader.point(0, "compute", 3)
    reader.page.keyboard.down("Control")
    reader.page.mouse.wheel(0, -300)
    reader.page.keyboard.up("Control")
    begin_s, end_s = reader.view()
    assert end_s - begin_s == pytest.approx(12 / np.e, rel=1e-3)
    assert reader.place(0, "compute", 3)[0] == pytest.approx(x, abs=0.5)
    reader.page.mouse.down()
    box = reader.canvas.bounding_box()
    reader.page.mouse.move(box["x"] + x + 100, box["y"] + 60, steps=3)
    reader.page.mouse.up()
    assert reader.place(0, "compute", 3)[0] == pytest.approx(x + 100, abs=1)
    assert reader.view()[1] - reader.view()[0] == pytest.approx(end_s - begin_s)
    reader.page.keyboard.down("Shift")
    reader.page.mouse.wheel(0, 100)
    reader.page.keyboard.up("Shift")
    assert reader.place(0, "compute", 3)[0] == pytest.approx(x, abs=1)


def test_wheel_alone_leaves_the_view_and_scrolls(read):
    reader = read({"simulated": wide_trace(64)})
    before = reader.view()
    reader.point(0, "compute", 1)
    reader.page.mouse.wheel(0, 200)
    wait_until(reader.page, "document.querySelector('.timeline').timeline.scrollTop === 200")
    assert reader.view() == before


def test_click_puts_the_keyboard_where_the_mouse_is(read):
    reader = read({"simulated": TRACE})
    reader.click(1, "compute", 4)
    reader.press("Shift+ArrowRight")
    assert reader.status().startswith("optimize(param with grad) step 0 rank 1 (compute, simulated)")


def test_buttons_zoom(read):
    reader = read({"simulated": TRACE})
    reader.page.get_by_role("button", name="zoom in").click()
    assert reader.view() == pytest.approx((3, 9))
    reader.page.get_by_role("button", name="zoom out").click()
    assert reader.view() == pytest.approx((0, 12))
    reader.page.get_by_role("button", name="zoom in").click()
    reader.page.get_by_role("button", name="Fit").click()
    assert reader.view() == pytest.approx((0, 12))


def test_step_is_gone_to(read):
    reader = read({"simulated": TRACE})
    reader.press("g")
    reader.page.keyboard.type("1")
    reader.page.keyboard.press("Enter")
    assert reader.view() == pytest.approx((6.85, 12))
    assert reader.status().startswith("Step 1, simulated: 6.85 s to 12 s")


def test_steps_end_as_in_the_analysis(read):
    loading = plan_of((FORWARD, Load("x")), (FORWARD, Backward(("loss",), "grad")), world_size=2)
    late_load = trace_of(loading, [(0, 0, 1), (0, 0, 9), (1, 1, [2, 3]), ([2, 3], [2, 3], 4)])
    for trace in (simulated(), late_load):
        reader = read({"simulated": trace})
        steps, ranks = ([*range(n)] for n in (trace.plan.n_steps, trace.plan.world_size))
        found = reader.state(f"{steps}.map((step) => {ranks}.map((rank) => timeline.stepEndS(step, rank)))")
        np.testing.assert_allclose(found, step_end_s(trace), atol=1e-8 * trace.makespan_s)


def test_ranks_are_filtered_by_number_and_by_node(read):
    reader = read({"simulated": simulated()}, ranks_per_node=4)
    ranks, nodes = reader.page.get_by_role("textbox", name="Ranks"), reader.page.get_by_role("textbox", name="Nodes")
    ranks.fill("0, 3,5-6")
    assert reader.state("timeline.ranks") == [0, 3, 5, 6]
    assert reader.place(1, "compute", 0.1) is None
    nodes.fill("1")
    assert reader.state("timeline.ranks") == [5, 6]
    ranks.fill("")
    assert reader.state("timeline.ranks") == [4, 5, 6, 7]
    assert reader.status().endswith("4 of 8 ranks; host, compute, comm.")


PROBLEMS = {
    "8": "rank 8: there are 0 to 7",
    "5-3": 'rank "5-3": the range ends before it begins',
    "all": 'rank "all": write numbers and ranges, such as 0,3,8-11',
}


def test_ranks_that_are_none_change_nothing_and_the_reader_is_told(read):
    reader = read({"simulated": simulated()})
    field = reader.page.get_by_role("textbox", name="Ranks")
    for text, problem in PROBLEMS.items():
        field.fill("2")
        field.fill(text)
        assert reader.state("timeline.ranks") == [2]
        assert reader.page.get_by_role("alert").inner_text() == problem
        assert field.get_attribute("aria-invalid") == "true"
        field.fill("4")
        assert reader.page.get_by_role("alert").count() == 0
        assert field.get_attribute("aria-invalid") == "false"


def test_streams_are_filtered(read):
    reader = read({"simulated": TRACE})
    reader.page.get_by_role("checkbox", name="host").uncheck()
    assert reader.state("timeline.streams") == ["compute", "comm"]
    assert reader.place(0, "host", 1) is None
    assert reader.colours(1, "compute", 4.5) == [BLUE]
    for stream in ("compute", "comm"):
        reader.page.get_by_role("checkbox", name=stream).uncheck()
    assert reader.status().endswith("no stream.")


def test_simulation_and_measurement_are_shown_on_one_axis(read):
    slower = Trace(PLAN, *(2 * each for each in (TRACE.ready_s, TRACE.start_s, TRACE.end_s)), source="by hand")
    reader = read({"simulated": TRACE, "measured": slower})
    assert reader.view() == pytest.approx((0, 24))
    above, below = (reader.place(1, "compute", 5, trace) for trace in (0, 1))
    assert (above[0], above[1] < below[1]) == (below[0], True)
    assert reader.hover(1, "compute", 4.5, 0)["text"] == "backward(loss -> grad)"
    assert reader.hover(1, "compute", 4.5, 1)["text"] == "forward(x -> loss)"
    assert "rank 1, compute, measured" in reader.tip()
    reader.page.get_by_role("combobox", name="Show").select_option("measured")
    assert reader.state("timeline.shown") == ["measured"]
    assert reader.place(1, "compute", 5, 0) is None
    assert reader.colours(0, "compute", 5.9, 1) == [BLUE]
    assert reader.hover(0, "compute", 4.5, 1)["endS"] == pytest.approx(6)


def test_what_did_not_run_is_neither_drawn_nor_gone_to(read):
    times = [array.copy() for array in (TRACE.ready_s, TRACE.start_s, TRACE.end_s)]
    for array in times:
        array[2, 0] = np.nan  # the first backward of rank 0
    reader = read({"measured": Trace(PLAN, *times, source="by hand")})
    assert reader.colours(0, "compute", 2.9) == [WHITE]
    assert reader.colours(1, "compute", 4.5) == [BLUE]
    reader.click(0, "compute", 0.5)
    reader.press("Shift+ArrowRight")
    assert reader.state("timeline.focus")["text"] == "optimize(param with grad)"


def test_operation_that_began_too_early_is_cut_but_tells_its_times(read):
    plan = plan_of((FORWARD, Backward(("loss",), "grad"), FORWARD), world_size=1)
    reader = read({"measured": trace_of(plan, [(0, 0, 4), (2, 2, 6), (1, 1, 5)])})
    assert reader.colours(0, "compute", 3.9) == [SKY]
    assert reader.colours(0, "compute", 4.9) == reader.colours(0, "compute", 5.9) == [BLUE]
    assert reader.hover(0, "compute", 4.5)["startS"] == pytest.approx(2)


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_shares_are_drawn_where_a_pixel_holds_many_operations(read, share):
    n_steps = 20_000
    plan = Plan.from_steps(
        "alternating", world_size=1, buffers=(Buffer("loss", 1, initialized=True), Buffer("grad", 1)),
        steps=[(Backward(("loss",), "grad"),)] * n_steps,
    )  # fmt: skip
    start_s = np.arange(n_steps, dtype=float)[:, None]
    reader = read({"simulated": Trace(plan, start_s, start_s, start_s + share, source="by hand")})
    x, y = reader.place(0, "compute", n_steps / 4)
    height = reader.state("timeline.laneHeight")
    red = reader.pixels(round(x), round(y) - height // 2 - 1, 400, height + 2)[:, :, 0]
    coloured = (1 - red / 255).sum(axis=0)
    assert coloured.mean() == pytest.approx(share * (height - 1), abs=0.2)  # the last row parts it from the next lane
    assert np.ptp(coloured) < 0.8  # no column stands out


def wide_trace(n_ranks: int) -> Trace:
    plan = plan_of(
        (Load("x"), FORWARD, Backward(("loss",), "grad"), AllReduce("grad", Group(n_ranks))), world_size=n_ranks
    )
    late = np.linspace(0, 1, n_ranks)
    return trace_of(plan, [(0, 0, 0.5), (0.5, 0.5, 1 + late), (1 + late, 1 + late, 2 + late), (2 + late, 3, 4)])


def test_many_ranks_scroll_and_the_keyboard_brings_them_into_sight(read):
    reader = read({"simulated": wide_trace(256)})
    height = reader.canvas.bounding_box()["height"]
    assert reader.place(255, "comm", 1)[1] > height
    reader.press("PageDown")
    page = reader.state("timeline.scrollTop")
    assert 0.5 * height < page <= height
    reader.press("Shift+ArrowRight")
    focus = reader.state("timeline.focus")
    _, y = reader.place(focus["rank"], focus["stream"], focus["startS"])
    assert 0 < y < height
    reader.press("PageUp", "PageUp")
    wait_until(reader.page, "document.querySelector('.timeline').timeline.scrollTop === 0")
    reader.press("Shift+ArrowRight")
    wait_until(reader.page, "document.querySelector('.timeline').timeline.scrollTop > 0")
    _, y = reader.place(focus["rank"], focus["stream"], focus["startS"])
    assert 0 < y < height
    reader.page.get_by_role("textbox", name="Ranks").fill("255")
    assert reader.hover(255, "comm", 3.5)["rank"] == 255
    assert reader.state("timeline.scrollTop") == 0


def test_narrow_window_shows_all_without_scrolling_sideways(read):
    reader = read({"simulated": TRACE, "measured": TRACE}, viewport={"width": 400, "height": 800})
    assert reader.page.evaluate("document.documentElement.scrollWidth") <= 400
    reader.point(1, "compute", 11.9, 1)
    tip = reader.page.locator(".timeline-tip").bounding_box()
    assert tip["x"] >= 0
    assert tip["x"] + tip["width"] <= 400


def test_all_controls_are_reached_by_the_tab_key(read):
    reader = read({"simulated": TRACE, "measured": TRACE}, ranks_per_node=1)
    reached = []
    for _ in range(14):
        reader.page.keyboard.press("Tab")
        reached.append(
            reader.page.evaluate(
                """() => {
                    const { dataset, tagName, textContent } = document.activeElement;
                    const text = tagName === "CANVAS" ? "canvas" : textContent;
                    return dataset.action ?? dataset.control ?? dataset.stream ?? text;
                }"""
            )
        )
    assert reached == [
        *("in", "out", "fit", "step", "Go", "ranks", "nodes", "host", "compute", "comm", "shown", "height", "canvas"),
        "Keys and mouse",
    ]
    assert reader.canvas.get_attribute("role") == "application"
    assert reader.canvas.get_attribute("aria-label") == "Timeline of by hand: 2 ranks, 2 steps"


def test_focus_can_be_seen(read):
    reader = read({"simulated": TRACE})
    reader.press("+")
    assert reader.canvas.evaluate("(canvas) => getComputedStyle(canvas).outlineStyle") == "solid"


def test_browser_that_cannot_unpack_says_so(browser, tmp_path):
    path = tmp_path / "timeline.html"
    path.write_text(page_text(timeline_section({"simulated": TRACE}, element_id="t")), encoding="utf-8")
    context = browser.new_context()
    try:
        page = context.new_page()
        page.add_init_script("delete globalThis.DecompressionStream")
        page.goto(path.as_uri())
        page.get_by_text("The timeline cannot be shown: this browser cannot unpack it").wait_for()
    finally:
        context.close()


def test_timeline_that_is_hidden_at_first_is_painted_when_it_is_shown(browser, tmp_path):
    path = tmp_path / "timeline.html"
    section = timeline_section({"simulated": TRACE}, element_id="t")
    path.write_text(page_text(f'<div id="away" hidden>{section}</div>'), encoding="utf-8")
    with opened(browser, path) as watched:
        watched.page.wait_for_load_state()
        assert watched.page.evaluate("document.querySelector('.timeline').timeline") is None
        watched.page.evaluate("document.getElementById('away').hidden = false")
        assert Reader(watched.page).colours(0, "compute", 2.9) == [BLUE]


def test_a_million_spans_are_drawn_and_told_right(read):
    n_ranks, n_steps = 8, 31_250
    ops = (FORWARD, Backward(("loss",), "grad"), AllReduce("grad", Group(n_ranks)), Wait("grad"))
    buffers = (Buffer("x", 1, initialized=True), Buffer("loss", 1), Buffer("grad", 1))
    plan = Plan.from_steps("long", world_size=n_ranks, buffers=buffers, steps=[ops] * n_steps)
    rng = np.random.default_rng(0)
    compute_s = rng.uniform(1e-3, 2e-3, (n_steps, 2, n_ranks))
    ready_s = compute_s.sum(axis=1)
    last_s = ready_s.max(axis=1, keepdims=True)
    begin_s = np.concatenate([[0], np.cumsum(last_s[:-1, 0] + 1e-3)])[:, None]
    forward_s, transfer_s = begin_s + compute_s[:, 0], np.broadcast_to(begin_s + last_s, ready_s.shape)
    start_s = np.stack([np.broadcast_to(begin_s, ready_s.shape), forward_s, transfer_s, transfer_s + 1e-3], axis=1)
    end_s = np.stack([forward_s, begin_s + ready_s, transfer_s + 1e-3, transfer_s + 1e-3], axis=1)
    all_ready_s = start_s.copy()
    all_ready_s[:, 2] = begin_s + ready_s
    trace = Trace(plan, *(each.reshape(-1, n_ranks) for each in (all_ready_s, start_s, end_s)), source="by hand")
    assert trace.ready_s.size == 1_000_000
    reader = read({"simulated": trace})
    assert reader.colours(3, "host", 50) == [GREY]
    reader.page.get_by_role("spinbutton", name="Step").fill("20000")
    reader.page.get_by_role("button", name="Go").click()
    row = 4 * 20_000 + 1
    found = reader.hover(5, "compute", (trace.start_s[row, 5] + trace.end_s[row, 5]) / 2)
    assert (found["text"], found["step"], found["rank"]) == ("backward(loss -> grad)", 20_000, 5)
    assert [found["startS"], found["endS"]] == pytest.approx(
        [trace.start_s[row, 5], trace.end_s[row, 5]], abs=1e-8 * trace.makespan_s
    )
    waiting = reader.hover(5, "comm", trace.start_s[row + 1, 5] + 5e-4)
    assert waiting["lastRanks"] == [int(np.argmax(ready_s[20_000]))]


# --- Some steps only


def test_view_is_fitted_to_the_steps_that_are_shown(read):
    reader = read({"simulated": TRACE}, steps=range(1, 2))
    assert reader.view() == pytest.approx((7, 12))  # the first step ends at 7 s on both ranks
    assert reader.status() == "simulated: 7 s to 12 s; all 2 ranks; host, compute, comm."
    found = reader.hover(1, "compute", 7.5)
    assert (found["text"], found["step"]) == ("forward(x -> loss)", 1)
    reader.press("+", "Home", "ArrowLeft")
    assert reader.view() == pytest.approx((7, 12))
    assert reader.canvas.get_attribute("aria-label") == "Timeline of by hand: 2 ranks, steps 1 to 1"


def test_step_begins_where_the_step_before_ended_although_that_is_not_shown(read):
    trace = simulated()
    reader = read({"simulated": trace}, steps=range(3, 5))
    ends_s = step_end_s(trace)
    assert reader.view() == pytest.approx((ends_s[2].min(), ends_s[4].max()), rel=1e-6)
    found = reader.state("[0, 1, 2, 3, 4, 5, 6, 7].map((rank) => timeline.stepEndS(2, rank))")
    np.testing.assert_allclose(found, ends_s[2], atol=1e-8 * trace.makespan_s)
    assert reader.state("timeline.stepsInView") == [3, 4]


def test_field_of_a_step_takes_only_those_that_are_shown(read):
    reader = read({"simulated": simulated()}, steps=range(3, 5))
    field = reader.page.get_by_role("spinbutton", name="Step")
    assert [field.get_attribute(name) for name in ("min", "max", "value")] == ["3", "4", "3"]
    before = reader.view()
    field.fill("0")
    reader.page.get_by_role("button", name="Go").click()
    assert reader.view() == before
    field.fill("4")
    reader.page.get_by_role("button", name="Go").click()
    assert reader.status().startswith("Step 4, simulated: ")
    assert reader.view()[0] > before[0]


HELD_UP = """{
    const read = Response.prototype.arrayBuffer;
    const gate = new Promise((open) => { globalThis.letGo = open; });
    Response.prototype.arrayBuffer = async function () {
        await gate;
        return read.call(this);
    };
}"""


def test_timeline_that_is_being_read_says_so_and_keeps_its_room(browser, tmp_path):
    path = tmp_path / "timeline.html"
    path.write_text(page_text(timeline_section({"simulated": simulated()}, element_id="t")), encoding="utf-8")
    context = browser.new_context()
    try:
        page = context.new_page()
        page.add_init_script(HELD_UP)
        page.goto(path.as_uri())
        frame, legend = page.locator(".timeline-frame"), page.locator(".timeline-legend")
        assert frame.get_attribute("aria-busy") == "true"
        shown = frame.evaluate("(frame) => getComputedStyle(frame, '::after').content")
        assert shown == '"The timeline is being read."'
        before = legend.bounding_box()
        page.evaluate("letGo()")
        wait_until(page, "document.querySelector('.timeline').timeline?.firstPaintMs")
        assert frame.get_attribute("aria-busy") is None
        assert legend.bounding_box() == before
    finally:
        context.close()


@pytest.mark.full
def test_benchmark_tells_machines_what_it_measured():
    require()
    benchmark = Path(__file__).resolve().parents[3] / "benchmarks" / "report.py"
    done = subprocess.run([sys.executable, benchmark, "--quick", "--json"], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert [row["spans"] for row in found["pages"]] == [960, 960, 1920]
    assert all(0 < row["frame_median_ms"] <= row["frame_95_ms"] for row in found["pages"])
    assert [target["what"] for target in found["targets"]] == ["open ms", "median frame ms", "95 % frame ms"]
