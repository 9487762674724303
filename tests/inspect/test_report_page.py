"""The page of a step in a browser: every view draws, search finds, a click shows the line, and nothing is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import wholestep as ws
from browser import Browser, chromium
from simulate.sharded_steps import fully_sharded
from steps_to_show import gpt_step, large_step
from wholestep.simulate import pipeline

VIEWS = ("summary", "timeline", "memory", "graph", "passes", "modules")
PIXELS = """
const canvas = document.querySelector("#view canvas"), {width, height} = canvas;
const copy = Object.assign(document.createElement("canvas"), {width, height});
const context = copy.getContext("2d", {willReadFrequently: true});
context.drawImage(canvas, 0, 0);
const seen = new Set(), data = context.getImageData(0, 0, width, height).data;
for (let i = 0; i < data.length; i += 4 * 97) seen.add(data[i] << 16 | data[i + 1] << 8 | data[i + 2]);
return seen.size;
"""
"""How many colours a canvas has."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def gpt(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Path:
    step = gpt_step(passes=["merge_common_subexpressions"])
    spans = {node.name: (float(i), i + 0.8) for i, node in enumerate(step.last.gm.graph.nodes) if i > 100}
    return step.report(tmp_path_factory.mktemp("pages") / "gpt.html", profile=spans)


@pytest.fixture(scope="module")
def sharded(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ws.inspect.report(fully_sharded(layers=4), tmp_path_factory.mktemp("pages") / "sharded.html")


@pytest.fixture(autouse=True)
def nothing_is_asked_for_and_nothing_goes_wrong(browser: Browser) -> Iterator[None]:
    yield
    assert browser.said() == []
    assert browser.requests() == []


def draws_every_view(browser: Browser) -> None:
    for view in VIEWS:
        browser.click(f"#tab-{view}")
        assert browser.run("return document.getElementById('view').getBoundingClientRect().height") > 300
        assert len(browser.text("#view")) > 20
        if view in ("timeline", "memory"):
            browser.wait(f"return (() => {{ {PIXELS} }})() > 4")
        if view in ("graph", "modules", "memory"):
            assert browser.wait("return document.querySelectorAll('#view .row').length") > 1
        sideways = browser.run("const v = document.getElementById('view'); return v.scrollWidth - v.clientWidth")
        assert sideways <= 1, view


def finds_and_shows(browser: Browser, query: str, line: str) -> None:
    """Search for a node, choose the first one, and see the line that it came from."""
    browser.click("#tab-graph")
    browser.type("#search", query)
    browser.wait("return document.querySelectorAll('#found [role=option]').length > 0")
    browser.type("#search", "\ue007")  # Enter
    name = browser.wait("return document.querySelector('#details h2')?.textContent")
    assert query.split()[0] in name
    assert line in browser.text("#details .src.here")
    browser.type("#search", "\ue00c")  # Escape


@pytest.mark.parametrize("page", ["gpt", "sharded"])
def test_every_view_of_a_page_draws(browser: Browser, page: str, request: pytest.FixtureRequest) -> None:
    browser.open(request.getfixturevalue(page))
    draws_every_view(browser)


def test_search_finds_a_node_and_shows_its_source_line(browser: Browser, gpt: Path) -> None:
    browser.open(gpt)
    finds_and_shows(browser, "gelu mlp", "return x + self.dropout(self.mlp(self.norm2(x)))")
    shown = browser.run("return document.querySelector('#view .split > :last-child .src.here').textContent")
    assert "self.mlp(self.norm2(x))" in shown
    assert browser.run("return location.hash").startswith("#graph?node=gelu")


def test_a_click_on_a_bar_of_the_timeline_selects_its_node(browser: Browser, gpt: Path) -> None:
    browser.open(gpt, "timeline")
    browser.wait("return document.querySelector('#view canvas').width > 300")
    browser.run("""
        const canvas = document.querySelector('#view canvas'), box = canvas.getBoundingClientRect();
        canvas.setPointerCapture = () => {};
        const send = (kind, y) => canvas.dispatchEvent(new PointerEvent(kind,
            {clientX: box.left + box.width / 3, clientY: box.top + y, bubbles: true, pointerId: 1}));
        let y = 0;
        do send('pointermove', y += 5); while (canvas.style.cursor !== 'pointer' && y < box.height);
        send('pointerdown', y);
        send('pointerup', y);
    """)
    assert browser.wait("return !document.getElementById('details').hidden")
    details = browser.text("#details")
    assert "predicted" in details
    assert "tiny_gpt.py:" in details


def test_a_link_to_a_node_opens_it(browser: Browser, sharded: Path) -> None:
    step_name = browser_name(sharded)
    browser.open(sharded, f"timeline?node={step_name}")
    assert browser.text("#details h2") == step_name
    assert "Exposed for" in browser.text("#details .why")


def browser_name(page: Path) -> str:
    return ws.simulate.step(fully_sharded(layers=4)).exposed()[0].name


def test_the_memory_view_explains_the_peak_and_other_moments(browser: Browser, gpt: Path) -> None:
    browser.open(gpt, "memory")
    assert "The peak" in browser.text("#memory-said")
    browser.run("document.querySelector('#view canvas').focus()")
    browser.driver.switch_to.active_element.send_keys("\ue012")  # arrow left
    assert "of the peak" in browser.text("#memory-said")


def test_modules_sort_by_the_column_that_is_clicked(browser: Browser, gpt: Path) -> None:
    browser.open(gpt, "modules")
    for _ in range(2):
        browser.driver.find_element("xpath", "//div[@class='head']/button[contains(., 'flops')]").click()
    first = browser.run("return document.querySelector('#view .row .grow').textContent")
    assert browser.run("return document.querySelector('.head [aria-sort]').getAttribute('aria-sort')") == "ascending"
    assert first != "model"


def test_keys_change_the_view_and_open_the_search(browser: Browser, gpt: Path) -> None:
    browser.open(gpt)
    page = browser.driver.find_element("tag name", "body")
    page.send_keys("3")
    assert browser.run("return location.hash") == "#memory"
    page.send_keys("/")
    assert browser.run("return document.activeElement.id") == "search"


def test_a_narrow_window_and_dark_paper_show_everything(browser: Browser, gpt: Path) -> None:
    driver = browser.driver
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    try:
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
        metrics = {"width": 420, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.open(gpt)
        paper = browser.run("return getComputedStyle(document.body).backgroundColor")
        assert sum(int(part) for part in paper[4:-1].split(",")) < 150
        draws_every_view(browser)
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_ranks_and_pipelines_have_views_of_their_own(browser: Browser, tmp_path: Path) -> None:
    schedules = [
        pipeline.simulate(name, pipeline.Times(F=1, B=2, I=1, W=1), ranks=2, microbatches=4)
        for name in ("1F1B", "ZBVZeroBubble")
    ]
    others = [fully_sharded(layers=layers) for layers in (3, 2)]
    page = ws.inspect.report(fully_sharded(layers=3), tmp_path / "ranks.html", ranks=others, pipeline=schedules)
    browser.open(page, "ranks")
    browser.wait(f"return (() => {{ {PIXELS} }})() > 4")
    shown = browser.text("#view")
    assert "the same" in shown
    assert "collective 4 is" in shown
    browser.click("#tab-pipeline")
    browser.wait(f"return (() => {{ {PIXELS} }})() > 4")
    assert "1F1B" in browser.text("#view")
    assert "ZBVZeroBubble" in browser.text("#view")


@pytest.mark.fake_group
def test_the_page_of_one_of_two_ranks_draws(browser: Browser, tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from steps_to_show import sharded_gpt

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        graph = sharded_gpt(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
        browser.open(ws.inspect.report(graph, tmp_path / "rank.html", machine=ws.simulate.H100))
    finally:
        dist.destroy_process_group()
    draws_every_view(browser)
    finds_and_shows(browser, "all_gather_into_tensor", "self.")


@pytest.mark.long
def test_a_page_of_50_000_nodes_draws_and_stays_small(browser: Browser, tmp_path: Path) -> None:
    graph = large_step(layers=2945)
    assert graph.num_nodes > 49_900
    page = ws.inspect.report(graph, tmp_path / "large.html")
    assert page.stat().st_size < 5_000_000
    browser.open(page)
    draws_every_view(browser)
