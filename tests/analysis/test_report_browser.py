"""The report page in a real headless Chromium (`make test-slow`; on Debian: apt-get install chromium).

Without Chromium these tests fail, they are not skipped. MDN_SCREENSHOTS=DIR keeps the pictures.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from browser import open_page
from mdn.analysis.eigenvalues import pair_eigenvalues
from mdn.cli import main
from report_case import make_runs

pytestmark = pytest.mark.slow
NAMES = ("alpha", "beta", "mu", "eta", "direct")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    out = folder / "page.html"
    assert main(["report", str(make_runs(folder)), "--out", str(out)]) == 0
    with open_page(out) as opened:
        opened.resize(1200, 900)
        yield opened


def set_sliders(page, gates):
    for name, value in zip(NAMES, gates):
        slider = f"document.getElementById('{name}')"
        page.evaluate(f"{slider}.value = {value}; {slider}.dispatchEvent(new Event('input'))")
    return [float(page.evaluate(f"document.getElementById('{name}').value")) for name in NAMES]


def drawn_eigenvalues(page):
    """Where the two filled circles are on the screen, in units of the drawn unit circle."""
    centres = page.evaluate("""[".disc > circle", "#eigenvalue-1 circle", "#eigenvalue-2 circle"].map((name) => {
        const box = document.querySelector(name).getBoundingClientRect();
        return [box.x + box.width / 2, box.y + box.height / 2, box.width];
    })""")
    (x0, y0, width), *rest = centres
    radius = (width - 1) / 2  # the box of a circle includes half its line on either side, less than a pixel
    return sorted(((x - x0) / radius, (y0 - y) / radius) for x, y, _ in rest)


def keep(page, name):
    folder = os.environ.get("MDN_SCREENSHOTS")
    if folder:
        page.screenshot(Path(folder) / f"{name}.png")


def test_the_page_loads_without_errors_and_without_any_request(page):
    requests = [event["request"]["url"] for event in page.events("Network.requestWillBeSent")]
    assert [url for url in requests if not url.startswith("data:")] == [requests[0]]
    assert requests[0].startswith("file://")
    assert page.events("Runtime.exceptionThrown") == []
    assert [entry for entry in page.events("Log.entryAdded") if entry["entry"]["level"] == "error"] == []
    assert page.evaluate("document.images[0].naturalWidth") > 100


@pytest.mark.parametrize(
    "gates", [(0.9, 0.3, 0.8, 1.0, 0), (0.99, 0.5, 0.97, 1.5, 0.1), (0.9, 1, 0.1, 2, 0), (0.5, 0.2, 0, 1, 1.5)]
)
def test_sliders_move_the_eigenvalues_to_where_the_closed_form_says(page, gates):
    expected = sorted((value.real, value.imag) for value in pair_eigenvalues(*set_sliders(page, gates)))
    np.testing.assert_allclose(drawn_eigenvalues(page), expected, atol=0.012)
    text = page.evaluate("document.getElementById('modulus-text').textContent")
    assert float(text) == pytest.approx(max(np.hypot(*value) for value in expected), abs=1e-4)


def test_the_keyboard_alone_moves_a_slider_and_the_eigenvalues(page):
    set_sliders(page, (0.9, 0.3, 0.8, 1.0, 0))
    before = drawn_eigenvalues(page)
    page.evaluate("document.getElementById('alpha').focus()")
    page.press("Tab")
    assert page.evaluate("document.activeElement.id") == "beta"
    page.press("ArrowRight", times=40)
    assert float(page.evaluate("document.getElementById('beta').value")) == pytest.approx(0.34)
    expected = sorted((value.real, value.imag) for value in pair_eigenvalues(0.9, 0.34, 0.8, 1.0))
    np.testing.assert_allclose(drawn_eigenvalues(page), expected, atol=0.012)
    assert drawn_eigenvalues(page) != before
    outline = page.evaluate("getComputedStyle(document.getElementById('beta')).outlineStyle")
    assert outline == "solid"


def test_every_control_is_reached_by_tabbing(page):
    page.evaluate("document.activeElement.blur(); window.scrollTo(0, 0); document.body.focus()")
    reached = []
    for _ in range(40):
        page.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
    assert {"theme", *NAMES, "oscillating", "edge of the guarantee"} <= set(reached)


def test_the_response_shows_the_impulse_response_of_the_closed_form(page):
    set_sliders(page, (0.9, 0.3, 0.8, 1.0, 0))
    drawn = page.evaluate("document.getElementById('response-same').getAttribute('d')")
    heights = [float(point.split()[1]) for point in drawn[1:].split("L")]
    top = float(page.evaluate("document.getElementById('response-top').textContent"))
    zero = float(page.evaluate("document.getElementById('response-zero').getAttribute('y')")) - 4
    found = (zero - np.array(heights)) / (zero - 20) * top
    # The state after the write is (beta eta, -eta); each later step is the 2 x 2 block itself.
    block = np.array([[0.9 - 0.9 * 0.3, -0.3 * 0.8], [0.9, 0.8]])
    state, expected = np.array([0.3, -1.0]), [0.0]
    for _ in range(40):
        expected.append(state[0])
        state = block @ state
    np.testing.assert_allclose(found, expected, atol=0.01)


def test_it_opens_with_gates_that_the_layer_can_produce_and_a_verdict_that_says_so(page):
    page.evaluate("document.querySelector('button[data-gates]').click()")
    alpha, beta, mu, *_ = (float(page.evaluate(f"document.getElementById('{name}').value")) for name in NAMES)
    assert alpha + beta <= 1
    assert mu >= np.exp(-2)
    assert page.evaluate("document.getElementById('layer-text').textContent").startswith("can produce these gates")


@pytest.mark.parametrize(
    ("gates", "words"),
    [
        ((0.9, 0.3, 0.8, 1, 0), "cannot produce"),
        ((0.5, 0.4, 0.1, 1, 0), "only without its clamp"),
        ((0.5, 0.4, 0, 1, 0), "without momentum"),
        ((0.5, 0.3, 0.8, 1, 0.1), "with quasi-hyperbolic momentum"),
        ((0.5, 0.3, 0.8, 1, 0.3), "cannot produce"),
        ((0.1, 0.1, 0.8, 2, 1.2), "leaves the right half plane"),
        ((0.85, 0.133, 0.95, 1.5, 0.21), "with Nesterov's momentum; inside its bounds every step stays"),
        ((0.5, 0.06, 0.15, 1, 0.4), "with Nesterov's momentum; inside its bounds the right half plane needs"),
    ],
)
def test_the_verdict_says_what_the_layer_cannot_produce(page, gates, words):
    set_sliders(page, gates)
    assert words in page.evaluate("document.getElementById('layer-text').textContent")


def contrast(page, selector):
    """WCAG's ratio between the colours of an element's text and of the page's ground."""
    text = f"getComputedStyle(document.querySelector({selector!r})).color"
    colours = page.evaluate(f"[{text}, getComputedStyle(document.body).backgroundColor]")
    light = []
    for colour in colours:
        channels = np.array([float(word) for word in colour[4:-1].split(",")[:3]]) / 255
        linear = np.where(channels <= 0.03928, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
        light.append(float(linear @ [0.2126, 0.7152, 0.0722]))
    return (max(light) + 0.05) / (min(light) + 0.05), light[1]


def test_light_and_dark_follow_the_system_and_the_button_and_stay_readable(page):
    grounds = {}
    for scheme in ("light", "dark"):
        page.colours(scheme)
        for selector in ("h1", "p.quiet", "nav a", "td"):
            ratio, grounds[scheme] = contrast(page, selector)
            assert ratio >= 4.5, (scheme, selector)
        page.evaluate("window.scrollTo(0, 0)")
        keep(page, scheme)
    assert grounds["light"] > 0.8
    assert grounds["dark"] < 0.1
    page.evaluate("document.getElementById('theme').click()")
    assert contrast(page, "h1")[1] > 0.8
    page.evaluate("delete document.documentElement.dataset.theme")
    page.colours("light")


def test_a_phone_shows_it_without_scrolling_sideways(page):
    page.resize(390, 844, mobile=True)
    try:
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.evaluate("document.getElementById('alpha').getBoundingClientRect().width") > 250
        assert page.evaluate("parseFloat(getComputedStyle(document.body).fontSize)") >= 16
        page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 100)))")
        hint = page.evaluate("""[...document.querySelectorAll('.scroll')].map((area) => [
            area.scrollWidth > area.clientWidth + 1, getComputedStyle(area, '::before').content])""")
        assert any(wide for wide, _ in hint)
        assert all(("scroll sideways" in words) == wide for wide, words in hint)
        labels = "[...document.querySelectorAll('.chart svg text')]"
        heights = page.evaluate(f"{labels}.map((label) => label.getBoundingClientRect().height)")
        assert min(height for height in heights if height) >= 10  # pixels; hidden drawings have none
        page.evaluate("window.scrollTo(0, 0)")
        keep(page, "phone")
        page.evaluate("document.querySelector('.disc').scrollIntoView()")
        keep(page, "phone-disc")
    finally:
        page.resize(1200, 900)
