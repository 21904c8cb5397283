"""The console in a real browser: every view of a recorded run, what a live one shows, the keyboard, axe-core's findings."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.archive import create_archive, find_run
from headgate.processes.ports import free_port
from tests.harness.browser import Browser, expect, needed, tab
from tests.harness.gateways import run_gateway, serve, settings_for
from tests.harness.pictures import FORMS, Form, show, views
from tests.harness.recorded_run import STEPS, Recorded, record

pytestmark = pytest.mark.asyncio(loop_scope="module")

STRICTEST = Form(dark=True, width=390, height=800)
"""What is too wide or too pale is so here first."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    needed()
    return asyncio.run(record(tmp_path_factory.mktemp("run")))


@pytest.fixture(scope="module")
async def url(run: Recorded) -> AsyncIterator[str]:
    """The run, shown."""
    port = free_port()
    async with serve(create_archive(find_run(run.folder)), port):
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize(
    "form",
    [pytest.param(form, id=form.name, marks=[pytest.mark.long] * (form != STRICTEST)) for form in FORMS],
)
async def test_every_view_is_whole_in_every_form(
    browser: Browser, url: str, run: Recorded, form: Form
) -> None:
    """Nothing is wider than the screen, no word is cut, and axe-core finds nothing."""
    found: dict[str, list[str]] = {}
    async with tab(browser, url, dark=form.dark, width=form.width, height=form.height) as shown:
        for name, (place, heading) in views(run.trained[3], run.silent).items():
            await show(shown, place, heading)
            await expect(shown.page.get_by_role("main")).not_to_be_empty()
            found[name] = await shown.violations()
    assert {place: wrong for place, wrong in found.items() if wrong} == {}


async def test_a_cut_word_and_an_overflow_are_found(browser: Browser, url: str) -> None:
    async with tab(browser, url) as shown:
        await shown.show("health", "Health")
        await shown.settle()
        await shown.page.evaluate(
            """document.querySelector('main').insertAdjacentHTML('beforeend',
            '<p id="broken">arithmetic</p><p id="cut">a sentence</p><p id="wide">wide</p>');
            Object.assign(document.getElementById('broken').style, {width: '3ch', overflowWrap: 'anywhere'});
            Object.assign(document.getElementById('cut').style, {width: '3ch', overflow: 'hidden', whiteSpace: 'nowrap'});
            document.getElementById('wide').style.width = '9999px'"""
        )
        found = await shown.violations()
    assert {"broken: arithmetic", "cut off: a sentence"} < set(found)
    assert any("pixels too wide" in one for one in found)


async def test_the_views_show_what_was_recorded_and_offer_no_action(
    browser: Browser, url: str, run: Recorded
) -> None:
    async with tab(browser, url) as shown:
        page = shown.page
        await shown.show("run", "Run")
        await expect(page.get_by_role("main")).to_contain_text(f"Last step{STEPS}")
        await shown.show("episodes", "Episodes")
        await expect(page.get_by_text(f"{len(run.trained) + 4} episodes", exact=True)).to_be_visible()
        await page.get_by_label("Reason").select_option("agent_failed")
        await expect(page.get_by_text("2 episodes match", exact=True)).to_be_visible()
        await expect(page.get_by_text("ZeroDivisionError: division by zero")).to_be_visible()
        await expect(page.get_by_text(run.failed)).to_be_visible()
        await shown.show("staleness", "Staleness")
        await expect(page.get_by_role("table", name="The groups whose episodes run longest")).to_contain_text(
            run.open
        )
        await shown.show("health", "Health")
        await expect(page.get_by_role("row").filter(has_text="Episodes that failed")).to_contain_text("7.7%")
        await shown.show("engines", "Engines and nodes")
        await expect(page.get_by_role("main")).to_contain_text("demo-0")
        assert await page.get_by_role("button", name="Drain").count() == 0


async def test_a_log_is_filtered_and_read_again(browser: Browser, url: str, run: Recorded) -> None:
    async with tab(browser, url) as shown:
        page = shown.page
        await shown.show("files?view=logs", "Config and logs")
        end = page.get_by_role("region", name="End of the log")
        await page.get_by_label("Lines with").fill("was slow")
        await expect(end).to_have_text("WARNING engine demo-0 was slow")
        with (run.folder / "gateway.log").open("a") as log:
            log.write("a later line was slow\n")
        await page.get_by_role("button", name="Refresh").click()
        await expect(end).to_contain_text("a later line was slow")


async def test_the_keyboard_alone_reaches_every_view_and_an_episode(
    browser: Browser, url: str, run: Recorded
) -> None:
    async with tab(browser, url) as shown:
        page = shown.page
        await shown.show("run", "Run")
        for keys, heading in (
            ("g e", "Episodes"),
            ("g s", "Staleness"),
            ("g n", "Engines and nodes"),
            ("g h", "Health"),
            ("g c", "Config and logs"),
        ):
            for key in keys.split():
                await page.keyboard.press(key)
            await expect(page.get_by_role("heading", level=1, name=heading)).to_be_attached()
        await page.keyboard.press("?")
        await expect(page.get_by_role("dialog")).to_be_visible()
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("dialog")).to_have_count(0)
        await page.keyboard.press("g")
        await page.keyboard.press("e")
        await expect(page.get_by_text(run.open)).to_be_visible()
        await page.keyboard.press("/")
        await page.keyboard.type(run.trained[0])
        await page.keyboard.press("Enter")
        await expect(page.get_by_text("1 episode matches", exact=True)).to_be_visible()


async def test_a_part_of_the_time_is_chosen_by_dragging(browser: Browser, url: str) -> None:
    async with tab(browser, url) as shown:
        page = shown.page
        await shown.show("episodes", "Episodes")
        box = page.get_by_role("region", name="Episodes over time").locator(".histogram-box")
        await box.hover(position={"x": 300, "y": 20})
        await page.mouse.down()
        await box.hover(position={"x": 600, "y": 20})
        await page.mouse.up()
        await expect(page).to_have_url(re.compile("since=[0-9.]+&until=[0-9.]+"))
        await page.get_by_role("button", name="All times").click()
        await expect(page).not_to_have_url(re.compile("since="))


async def test_a_record_is_copied_as_a_command_and_as_json(browser: Browser, url: str, run: Recorded) -> None:
    async with tab(browser, url) as shown:
        page = shown.page
        await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        await shown.show(f"episodes/{run.trained[3]}", run.trained[3])
        for button, begins in (("Copy as curl", "curl "), ("Copy as JSON", "{")):
            await page.get_by_role("button", name=button).click()
            await page.wait_for_function(
                "begins => navigator.clipboard.readText().then(text => text.startsWith(begins))", arg=begins
            )
        assert run.trained[3] in await page.evaluate("navigator.clipboard.readText()")


async def test_a_live_view_follows_what_happens(browser: Browser, tiny_model: Path, tmp_path: Path) -> None:
    values = settings_for(tiny_model, tmp_path, staleness={"batch": 2, "eta": 1, "min_members": 1})
    values["admin"] = {"key": "the-key-of-the-root"}
    async with run_gateway(values) as gateway, tab(browser, gateway.url) as shown:
        page = shown.page
        shown.expect_refusals(401)  # the page's first question is without a key
        await page.goto(f"{gateway.url}/console/#/episodes")
        await page.get_by_label("Key", exact=True).fill("the-key-of-the-root")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("heading", level=1, name="Episodes")).to_be_attached()
        await expect(page.get_by_role("banner").get_by_role("status")).to_have_text("live")
        episode, headers = await gateway.open("a-task-that-begins-now", group_id="g")
        await expect(page.get_by_text("a-task-that-begins-now")).to_be_visible()
        (await gateway.chat(headers, max_tokens=4)).raise_for_status()
        await gateway.admin.reward(episode, 0.625)
        await expect(page.get_by_text("0.625")).to_be_visible()
        await page.evaluate("location.hash = '#/run'")
        await gateway.admin.post_step(7, {"loss": 0.25, "reward_mean": 0.625}, version=7, run="a run")
        await expect(page.get_by_role("main")).to_contain_text("Last step7")
