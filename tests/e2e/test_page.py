"""The page at `/`, in a real browser, against a real server: what it shows is what the API answers to the same body."""

import hashlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from playwright.sync_api import Browser, Page, Response
from prometheus_client.parser import text_string_to_metric_families

from tests.browser import browser, needs_browser
from tests.e2e.test_natural_endpoint import JSON, NPZ, SAFETENSORS, WRITE, Tensors, drawn
from tests.served import ServerProcess, serving

pytestmark = needs_browser
ATTENTION = "**/v1/attention?*"
PHONE = {"width": 390, "height": 844}
# No red, green or blue of a masked cell is above this, and some of every other cell's is (colours.js).
DARK = 94


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One browser for all tests here."""
    with browser() as opened:
        yield opened


@pytest.fixture
def open_page(chromium: Browser) -> Iterator[Callable[..., Page]]:
    """Opens the page of a server. No test may see an error in it, a breach of its policy, or a request to another."""
    faults: list[str] = []
    contexts = []

    def open_(server: ServerProcess, *, path: str = "/", **options: Any) -> Page:
        contexts.append(chromium.new_context(**{"viewport": {"width": 1280, "height": 900}, **options}))
        page = contexts[-1].new_page()
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda said: faults.append(said.text) if "Content Security Policy" in said.text else None)
        page.on("request", lambda request: faults.append(request.url) if not is_ours(request.url) else None)

        def is_ours(url: str) -> bool:
            return url.startswith((server.url + "/", "blob:" + server.url))

        page.goto(server.url + path)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert faults == []


@pytest.fixture
def page(open_page: Callable[..., Page], lone_server: ServerProcess) -> Page:
    """The page of the example layer's server, which knows its model."""
    page = open_page(lone_server)
    page.wait_for_selector("#run:enabled")
    return page


def asked(page: Page, act: Callable[[], Any]) -> Response:
    """The API's answer to what `act` makes the page ask, once it is drawn."""
    with page.expect_response(ATTENTION) as caught:
        act()
    drawn_for(page, caught.value)
    return caught.value


def drawn_for(page: Page, response: Response) -> None:
    """Waits until the page shows that answer, or that refusal."""
    says(page, "answer", response.headers["x-request-id"])


def says(page: Page, id_: str, text: str) -> None:
    """Waits until that element says so, among other things."""
    page.wait_for_function("([id, text]) => document.getElementById(id).textContent.includes(text)", arg=[id_, text])


def run(page: Page) -> Response:
    """The answer to what stands in the form."""
    return asked(page, lambda: page.click("#run"))


def ask_too(server: ServerProcess, response: Response, body: bytes | None = None) -> dict[str, Any]:
    """What the API answers to the same request from elsewhere."""
    sent = response.request
    headers = {"Content-Type": sent.headers["content-type"], "Accept": JSON}
    content = sent.post_data_buffer if body is None else body
    answer = httpx.post(sent.url, content=content, headers=headers)
    assert answer.status_code == 200, answer.text
    read: dict[str, Any] = answer.json()
    return read


def same(got: Any, want: Any) -> bool:
    """Within the rounding of float32; the tensors have the same shape."""
    one, other = np.array(got), np.array(want)
    return one.shape == other.shape and bool(np.abs(one - other).max() <= 1e-6 * np.abs(other).max())


def shown_value(page: Page) -> float:
    """The number that is read out."""
    return float(page.inner_text("#readout").rpartition(": ")[2])


def read_all(page: Page, grid: str) -> np.ndarray:
    """Every value of a map, read with the keyboard."""
    page.focus(grid)
    num_rows, num_columns = (int(page.get_attribute(grid, f"aria-{name}count") or 0) for name in ("row", "col"))
    for _ in range(num_rows):
        page.keyboard.press("ArrowUp")
    values = np.empty((num_rows, num_columns))
    for row in range(num_rows):
        page.keyboard.press("Home")
        for column in range(num_columns):
            values[row, column] = shown_value(page)
            page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowDown")
    return values


def hover(page: Page, grid: str, row: int, column: int) -> str:
    """What is read out when the mouse is in the middle of a cell."""
    page.locator(grid).scroll_into_view_if_needed()
    box = page.locator(grid).bounding_box()
    num_rows, num_columns = (int(page.get_attribute(grid, f"aria-{name}count") or 0) for name in ("row", "col"))
    assert box is not None
    page.mouse.move(
        box["x"] + box["width"] * (column + 0.5) / num_columns, box["y"] + box["height"] * (row + 0.5) / num_rows
    )
    return page.inner_text("#readout")


def dark_cells(page: Page, grid: str) -> list[list[bool]]:
    """Of each cell of a map, by the pixels that are drawn, whether all of it is dark."""
    cells: list[list[bool]] = page.evaluate(
        """([grid, dark]) => {
          const [canvas, map] = [document.querySelector(`${grid} canvas`), document.querySelector(grid)];
          const [rows, columns] = [map.ariaRowCount, map.ariaColCount].map(Number);
          const [width, height] = [canvas.width / columns, canvas.height / rows];
          const context = canvas.getContext("2d");
          const isDark = (row, column) => context.getImageData(column * width, row * height, width, height)
            .data.every((part, index) => index % 4 === 3 || part <= dark);
          const ofRow = (_, row) => Array.from({length: columns}, (_, column) => isDark(row, column));
          return Array.from({length: rows}, ofRow);
        }""",
        [grid, DARK],
    )
    return cells


def dark_from(page: Page, grid: str) -> list[int]:
    """Of each row of a map how many cells are not dark, all of them first."""
    rows = dark_cells(page, grid)
    assert all(row == sorted(row) for row in rows)
    return [row.count(False) for row in rows]


def colours(page: Page, grid: str, row: int, column: int) -> int:
    """How many colours a cell of a map is drawn in."""
    count: int = page.evaluate(
        """([grid, row, column]) => {
          const [canvas, map] = [document.querySelector(`${grid} canvas`), document.querySelector(grid)];
          const [width, height] = [canvas.width / map.ariaColCount, canvas.height / map.ariaRowCount];
          const {data} = canvas.getContext("2d").getImageData(column * width, row * height, width, height);
          return new Set(new Uint32Array(data.buffer)).size;
        }""",
        [grid, row, column],
    )
    return count


def drop(page: Page, name: str, body: bytes) -> None:
    """Drops a file on the page."""
    lines = "([name, bytes]) => { const dropped = new DataTransfer();"
    lines += "dropped.items.add(new File([Uint8Array.from(bytes)], name)); return dropped; }"
    page.dispatch_event("#drop", "drop", {"dataTransfer": page.evaluate_handle(lines, [name, list(body)])})


def choose(page: Page, name: str, body: bytes) -> None:
    """Chooses a file."""
    page.set_input_files("#file", {"name": name, "mimeType": "", "buffer": body})


def tab_to(page: Page, id_: str) -> None:
    """Presses Tab until that has the focus, which has to be seen."""
    for _ in range(80):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == id_:
            break
    style, width = page.evaluate(
        "(style => [style.outlineStyle, parseFloat(style.outlineWidth)])(getComputedStyle(document.activeElement))"
    )
    assert page.evaluate("document.activeElement.id") == id_
    assert style == "solid"
    assert width >= 2


class TestFiles:
    def test_headers(self, lone_server: ServerProcess) -> None:
        """The page may load from this server alone, is not kept without asking, and each file says its type."""
        types = {"/": "text/html", "/assets/main.js": "javascript", "/assets/style.css": "text/css"}
        for path, media_type in types.items():
            answer = lone_server.client.get(path)
            assert answer.status_code == 200
            assert media_type in answer.headers["content-type"]
            assert answer.headers["cache-control"] == "no-cache"
            assert answer.headers["x-content-type-options"] == "nosniff"
            policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
            assert policy["default-src"] == "'self'"
            assert set(policy.values()) == {"'self'", "'none'"}

    def test_policy_is_in_force(self, chromium: Browser, lone_server: ServerProcess) -> None:
        """A style in the markup, which nobody may add, is not applied."""
        with chromium.new_page() as page:
            page.goto(lone_server.url)
            page.evaluate("() => document.body.setAttribute('style', 'color: rgb(1, 2, 3)')")
            assert page.evaluate("() => getComputedStyle(document.body).color") != "rgb(1, 2, 3)"

    def test_is_no_part_of_the_api(self, lone_server: ServerProcess) -> None:
        """OpenAPI describes neither the page nor its files."""
        paths = lone_server.client.get("/openapi.json").json()["paths"]
        assert not [path for path in paths if path == "/" or path.startswith("/assets")]


class TestServed:
    def test_models(self, open_page: Callable[..., Page], server: ServerProcess) -> None:
        """Each version of each model is there with its sizes, precision, device and limits."""
        page = open_page(server)
        page.wait_for_selector("#models article")
        cards = page.locator("#models article")
        models = server.client.get("/v1/models").json()["models"]
        assert cards.count() == len(models)
        for card, model in zip(cards.all(), models, strict=True):
            card.locator("summary").click()
            said = card.inner_text()
            layer = model["layer"]
            for text in (
                f"{model['name']}, version {model['version']}",
                f"{layer['num_heads']} of {layer['head_size']}",
                f"{layer['query_size']}, {layer['key_size']}, {layer['value_size']}",
                *(model["precision"], model["device"], str(model["limits"]["max_body_bytes"])),
            ):
                assert text in said

    def test_links(self, page: Page, lone_server: ServerProcess) -> None:
        """To what else there is to read."""
        links = [link.get_attribute("href") for link in page.get_by_role("navigation").get_by_role("link").all()]
        assert links == ["docs", "openapi.json", "metrics"]
        assert {lone_server.client.get(f"/{link}").status_code for link in links} == {200}

    def test_a_server_that_starts_is_waited_for(self, open_page: Callable[..., Page], server: ServerProcess) -> None:
        """While it refuses, the page says so in its words; then it goes on by itself."""
        page = open_page(server, path="/assets/style.css")
        refused = {"error": "models are being loaded", "code": "not_ready", "request_id": "r1"}
        page.clock.install()
        page.route("**/v1/models", lambda route: route.fulfill(status=503, json=refused), times=1)
        page.goto(server.url + "/")
        page.wait_for_selector("#refusal-code")
        assert page.inner_text("#refusal strong") == refused["error"]
        assert page.inner_text("#refusal-code") == refused["code"]
        assert page.is_disabled("#run")
        page.clock.fast_forward(2000)
        page.wait_for_selector("#run:enabled")
        assert page.inner_text("#refusal") == ""


class TestExample:
    def test_shows_what_the_api_answers(self, page: Page, lone_server: ServerProcess) -> None:
        """Every weight of every head and the output, of both entries; and the heads differ."""
        response = run(page)
        answer = response.json()
        again = ask_too(lone_server, response)
        assert same(answer["weights"], again["weights"])
        assert same(answer["output"], again["output"])
        assert np.shape(answer["weights"]) == (2, 5, 4, 6)
        page.select_option("#entry", "1")
        for head in (0, 4):
            np.testing.assert_array_equal(read_all(page, f"#weights-{head}"), answer["weights"][1][head])
        assert np.abs(np.subtract(answer["weights"][1][0], answer["weights"][1][4])).max() > 0.05
        page.select_option("#entry", "0")
        np.testing.assert_array_equal(read_all(page, "#weights-2"), answer["weights"][0][2])
        for row, feature in ((0, 0), (3, 99), (2, 50)):
            hover(page, "#output-map", row, feature)
            assert shown_value(page) == answer["output"][0][row][feature]

    def test_is_the_same_for_the_same_seed(self, page: Page) -> None:
        """Another seed gives other tensors."""
        bodies = [run(page).request.post_data for _ in range(2)]
        page.fill("#seed", "7")
        other = asked(page, lambda: page.press("#seed", "Tab")).request.post_data
        assert bodies[0] == bodies[1] != other

    def test_of_a_layer_of_unlike_sizes(self, open_page: Callable[..., Page], server: ServerProcess) -> None:
        """It fits the model that is chosen, which cannot attend to itself."""
        page = open_page(server)
        page.wait_for_selector("#run:enabled")
        response = asked(page, lambda: page.select_option("#model", label="odd, version 1"))
        body = json.loads(response.request.post_data or "")
        shapes = {name: np.shape(body[name]) for name in ("queries", "keys", "values")}
        assert shapes == {"queries": (2, 4, 11), "keys": (2, 6, 13), "values": (2, 6, 17)}
        assert np.shape(response.json()["weights"]) == (2, 3, 4, 6)
        assert page.is_disabled("input[value=self]")
        assert page.is_visible("#no-self")

    def test_self_attention(self, page: Page) -> None:
        """Sends queries alone, and there are as many keys as queries."""
        response = asked(page, lambda: page.check("input[value=self]"))
        assert set(json.loads(response.request.post_data or "")) == {"queries", "valid_lens"}
        assert page.get_attribute("#weights-0", "aria-colcount") == "4"
        assert dark_from(page, "#weights-0") == [3] * 4

    def test_timing(self, page: Page) -> None:
        """The stages of the Server-Timing header, with their times."""
        sent = run(page).headers["server-timing"]
        names, times = (page.locator(f"#timing {tag}").all_inner_texts() for tag in ("dt", "dd"))
        assert names == ["decode", "queue", "compute", "encode"]
        parts = [part.strip().split(";dur=") for part in sent.split(",")]
        assert list(zip(names, times, strict=True)) == [(name, f"{float(ms):g} ms") for name, ms in parts]


class TestLengths:
    def test_by_keyboard(self, page: Page, lone_server: ServerProcess) -> None:
        """An arrow key asks again with one key more, and the masked columns are dark, in words and in pixels."""
        run(page)
        assert dark_from(page, "#weights-0") == [3] * 4
        assert "Keys 3 to 5 are masked." in (page.get_attribute("#weights-0", "aria-label") or "")
        page.focus("#length-0")
        response = asked(page, lambda: page.keyboard.press("ArrowRight"))
        assert json.loads(response.request.post_data or "")["valid_lens"] == [4, 2]
        assert {tuple(dark_from(page, f"#weights-{head}")) for head in range(5)} == {(4,) * 4}
        assert colours(page, "#weights-0", 0, 3) == 1 < colours(page, "#weights-0", 0, 4)  # hatched
        assert page.inner_text("#weights-note") == "Keys 4 to 5 are masked."
        assert page.get_attribute("#length-0", "aria-valuetext") == "4 of 6 keys"
        assert "masked: 0" in hover(page, "#weights-1", 2, 4)
        weights = ask_too(lone_server, response)["weights"]
        assert same(read_all(page, "#weights-1"), weights[0][1])

    def test_by_mouse(self, page: Page) -> None:
        """Dragged to its end no key is masked; at its start, a length of 0, none either, and all count alike."""
        run(page)
        box = page.locator("#length-1").bounding_box()
        assert box is not None
        middle = box["y"] + box["height"] / 2
        page.mouse.move(box["x"] + box["width"] * 2 / 6, middle)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] - 2, middle, steps=5)
        page.select_option("#entry", "1")
        says(page, "weights-note", "No key is masked.")
        assert dark_from(page, "#weights-3") == [6] * 4
        page.mouse.move(box["x"] + 1, middle, steps=5)
        page.mouse.up()
        says(page, "weights-note", "length of 0")
        assert dark_from(page, "#weights-3") == [6] * 4
        np.testing.assert_allclose(read_all(page, "#weights-3"), 1 / 6, rtol=1e-6)

    def test_where_a_slider_stops_counts(self, page: Page) -> None:
        """However fast it moves, the last length is asked for and shown, and no request waits beside another."""
        run(page)
        page.evaluate(
            """() => {
              const ask = window.fetch;
              [window.running, window.most] = [0, 0];
              window.fetch = async (url, ...others) => {
                if (!String(url).includes("attention")) return ask(url, ...others);
                window.most = Math.max(window.most, ++window.running);
                await new Promise((resolve) => setTimeout(resolve, 50));
                return ask(url, ...others).finally(() => window.running--);
              };
            }"""
        )
        page.focus("#length-0")
        for key in ("End", "ArrowLeft", "Home", "ArrowRight", "ArrowRight", "End", "ArrowLeft"):
            page.keyboard.press(key)
        says(page, "weights-note", "Key 5 is masked.")
        assert page.evaluate("window.most") == 1


class TestReading:
    def test_hover(self, page: Page) -> None:
        """The exact value that was answered, its head, and the tokens' labels."""
        answer = run(page).json()
        page.fill("#query-labels", "the  cat sat")
        page.fill("#key-labels", "le chat s'est assis")
        assert hover(page, "#weights-3", 1, 0) == f"Head 3, query 1 cat, key 0 le: {answer['weights'][0][3][1][0]}"
        assert hover(page, "#weights-0", 3, 1).startswith("Head 0, query 3, key 1 chat: ")
        assert shown_value(page) == answer["weights"][0][0][3][1]
        assert hover(page, "#output-map", 2, 42).startswith("Output, query 2 sat, feature 42: ")
        assert shown_value(page) == answer["output"][0][2][42]

    def test_without_a_mouse(self, page: Page) -> None:
        """Tab to the button, Enter, Tab to a map, arrows: the cell is named, and where one is can be seen."""
        tab_to(page, "run")
        answer = asked(page, lambda: page.keyboard.press("Enter")).json()["weights"][0]
        tab_to(page, "weights-0")
        cell = page.get_by_role("gridcell")
        for key, (row, column) in {
            "ArrowUp": (0, 0), "ArrowDown": (1, 0), "ArrowRight": (1, 1), "End": (1, 5), "ArrowLeft": (1, 4),
        }.items():  # fmt: skip
            page.keyboard.press(key)
            label = cell.get_attribute("aria-label") or ""
            assert label.startswith(f"Head 0, query {row}, key {column}")
            assert float(label.rpartition(": ")[2]) == answer[0][row][column] == shown_value(page)
            assert page.get_attribute("#weights-0", "aria-activedescendant") == cell.get_attribute("id")
            assert cell.get_attribute("aria-colindex") == str(column + 1)
            assert page.locator("#weights-0 [role=row]").get_attribute("aria-rowindex") == str(row + 1)
        box, grid = cell.bounding_box(), page.locator("#weights-0").bounding_box()
        assert box is not None
        assert grid is not None
        assert box["x"] + box["width"] / 2 == pytest.approx(grid["x"] + grid["width"] * 4.5 / 6, abs=1)
        assert box["y"] + box["height"] / 2 == pytest.approx(grid["y"] + grid["height"] * 1.5 / 4, abs=1)
        tab_to(page, "weights-1")
        assert cell.count() == 1

    def test_everything_has_a_name(self, page: Page) -> None:
        """Every control is labelled, what is announced is, and each section is a landmark with its heading."""
        run(page)
        nameless = (
            "[...document.querySelectorAll('input, select')].filter(one => one.labels.length === 0).map(one => one.id)"
        )
        assert page.evaluate(nameless) == []
        regions = page.locator("main > section")
        assert regions.count() == 4
        for region in regions.all():
            title = page.locator(f"#{region.get_attribute('aria-labelledby')}").inner_text()
            assert page.get_by_role("region", name=title).count() == 1
        assert page.get_attribute("#status", "role") == "status"
        assert page.get_attribute("#refusal", "role") == "alert"
        assert page.get_attribute("html", "lang") == "en"


class TestWanted:
    def test_heads(self, page: Page, lone_server: ServerProcess) -> None:
        """Those that are left are asked for by number, and no other is shown."""
        run(page)
        for head in ("1", "2"):
            asked(page, lambda head=head: page.uncheck(f"#heads input[value='{head}']"))  # type: ignore[misc]
        response = asked(page, lambda: page.uncheck("#heads input[value='4']"))
        assert response.url.endswith("version=1&heads=0,3")
        assert page.locator("#weights figcaption").all_inner_texts() == ["Head 0", "Head 3"]
        assert same(read_all(page, "#weights-1"), ask_too(lone_server, response)["weights"][0][1])

    def test_mean(self, page: Page, lone_server: ServerProcess) -> None:
        """One map of the mean, of all heads or of some."""
        response = asked(page, lambda: page.check("input[value=mean]"))
        assert response.url.endswith("version=1&need_weights=mean")
        assert page.locator("#weights figcaption").all_inner_texts() == ["Mean of 5 heads"]
        every = lone_server.client.post(
            "/v1/attention?need_weights=true", content=response.request.post_data_buffer
        ).json()
        assert same(read_all(page, "#weights-0"), np.mean(every["weights"][0], axis=0))
        some = asked(page, lambda: page.uncheck("#heads input[value='0']"))
        assert some.url.endswith("need_weights=mean&heads=1,2,3,4")
        assert same(read_all(page, "#weights-0"), np.mean(every["weights"][0][1:], axis=0))

    def test_none(self, open_page: Callable[..., Page], server: ServerProcess) -> None:
        """Without a head no weights are asked for, and the output is there."""
        page = open_page(server)
        page.wait_for_selector("#run:enabled")
        assert page.input_value("#model") == "0"
        asked(page, lambda: page.uncheck("#heads input[value='0']"))
        response = asked(page, lambda: page.uncheck("#heads input[value='1']"))
        assert response.url.endswith("model=additive&version=1")
        assert page.inner_text("#weights-note") == "No weights were asked for."
        assert page.locator("#weights figure").count() == 0
        assert page.locator("#output-map").count() == 1


class TestFilesOfOnesOwn:
    @pytest.fixture
    def tensors(self, seeds_layer: Any) -> Tensors:
        """Three entries, 5 queries and 7 keys, with a length each."""
        return drawn(seeds_layer) | {"valid_lens": np.array([4, 1, 7], np.int32)}

    @pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["float32", "float16"])
    def test_safetensors(self, page: Page, lone_server: ServerProcess, tensors: Tensors, dtype: Any) -> None:
        """A dropped one is posted as it is; a slider changes its lengths and nothing else."""
        tensors |= {name: tensor.astype(dtype) for name, tensor in tensors.items() if name != "valid_lens"}
        body = WRITE[SAFETENSORS](tensors)
        response = asked(page, lambda: drop(page, "Some.safetensors", body))
        assert response.request.headers["content-type"] == SAFETENSORS
        assert response.json() == ask_too(lone_server, response, body)
        assert [page.input_value(f"#length-{entry}") for entry in range(3)] == ["4", "1", "7"]
        assert dark_from(page, "#weights-4") == [4] * 5
        page.focus("#length-0")
        response = asked(page, lambda: page.keyboard.press("ArrowLeft"))
        changed = WRITE[SAFETENSORS]({**tensors, "valid_lens": np.array([3, 1, 7])})
        assert response.json() == ask_too(lone_server, response, changed)
        assert dark_from(page, "#weights-4") == [3] * 5

    def test_safetensors_without_lengths(self, page: Page, lone_server: ServerProcess, tensors: Tensors) -> None:
        """Its sliders stand at all keys, and add lengths."""
        del tensors["valid_lens"]
        asked(page, lambda: drop(page, "a.safetensors", WRITE[SAFETENSORS](tensors)))
        assert dark_from(page, "#weights-0") == [7] * 5
        page.focus("#length-0")
        response = asked(page, lambda: page.keyboard.press("ArrowLeft"))
        changed = WRITE[SAFETENSORS]({**tensors, "valid_lens": np.array([6, 7, 7])})
        assert response.json() == ask_too(lone_server, response, changed)

    @pytest.mark.parametrize(("name", "codec"), [("a.json", JSON), ("a.safetensors", SAFETENSORS)], ids=["json", "st"])
    def test_packed(self, page: Page, lone_server: ServerProcess, name: str, codec: str) -> None:
        """They are posted as they are; the page says that it changes no lengths."""
        body = WRITE[codec]({"queries": np.ones((5, 100), np.float32), "query_lens": np.array([3, 2])})
        response = asked(page, lambda: drop(page, name, body))
        assert response.json() == ask_too(lone_server, response, body)
        assert page.locator(".slider").count() == 0
        assert "No sliders" in page.inner_text("#lengths-note")
        assert "not known here" in page.inner_text("#weights-note")

    def test_npz(self, page: Page, lone_server: ServerProcess, tensors: Tensors) -> None:
        """It is posted as it is."""
        body = WRITE[NPZ](tensors)
        response = asked(page, lambda: choose(page, "a.npz", body))
        assert response.request.headers["content-type"] == NPZ
        assert response.json() == ask_too(lone_server, response, body)
        assert same(read_all(page, "#weights-2"), response.json()["weights"][0][2])
        assert page.locator(".slider").count() == 0

    def test_ragged_json(self, page: Page) -> None:
        """Each entry is shown in its own size, and its slider ends at its own keys."""
        body = {"queries": [[[1] * 100] * 2, [[2] * 100] * 3], "keys": [[[1] * 100] * 5, [[0.5] * 100] * 2]}
        response = asked(page, lambda: choose(page, "a.json", json.dumps(body, indent=1).encode()))
        assert response.request.post_data == json.dumps(body, indent=1)
        for entry, rows, columns in (("0", "2", "5"), ("1", "3", "2")):
            page.select_option("#entry", entry)
            assert page.get_attribute("#weights-0", "aria-rowcount") == rows
            assert page.get_attribute("#weights-0", "aria-colcount") == columns
            assert page.get_attribute(f"#length-{entry}", "max") == columns

    def test_json_with_a_length_for_each_query(self, page: Page, tensors: Tensors) -> None:
        """The mask follows every query's own; there is no slider for that."""
        lens = [[7, 3, 0], [1, 1, 1]]
        body = {"queries": tensors["queries"][:2, :3], "keys": tensors["keys"][:2], "valid_lens": np.array(lens)}
        asked(page, lambda: choose(page, "a.json", WRITE[JSON](body)))
        assert dark_from(page, "#weights-0") == [7, 3, 7]
        assert page.locator(".slider").count() == 0
        assert "a length for every query" in page.inner_text("#lengths-note")

    def test_other_names_are_not_taken(self, page: Page) -> None:
        """The page says which it wants, and asks nothing."""
        choose(page, "a.txt", b"{}")
        says(page, "file-note", "want a name that ends in")
        assert page.inner_text("#status") == "Nothing has been asked yet."


class TestLabels:
    @pytest.mark.parametrize("num_tokens", [1, 13, 67])
    def test_stand_beside_what_they_name(self, page: Page, num_tokens: int) -> None:
        """However many there are, and also where only some have room, each begins within its row or column."""
        body = {"queries": np.random.default_rng(0).random((1, num_tokens, 100))}
        asked(page, lambda: choose(page, "a.json", WRITE[JSON](body)))
        for axis, side in (("rows", "y"), ("columns", "x")):
            grid = page.locator("#weights-0").bounding_box()
            assert grid is not None
            length = grid["height" if side == "y" else "width"]
            labels = page.locator("#weights figure").first.locator(f".{axis} span").all()
            assert 0 < len(labels) <= num_tokens
            for label in labels:
                box = label.bounding_box()
                assert box is not None
                start = int(label.inner_text()) * length / num_tokens
                assert -1 <= box[side] - grid[side] - start <= length / num_tokens

    def test_are_words(self, page: Page) -> None:
        """Those that are given stand first, and tokens without one are numbered."""
        run(page)
        page.fill("#query-labels", "the cat")
        assert page.locator("#weights figure").first.locator(".rows span").all_inner_texts() == ["the", "cat", "2", "3"]


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "body", "code"),
        [
            pytest.param("a.json", json.dumps({"queries": [[[1] * 96]]}).encode(), "invalid_shape", id="last axis"),
            pytest.param("a.json", b'{"queries": [[[', "malformed_body", id="no JSON"),
            pytest.param("a.safetensors", b"nothing", "malformed_body", id="no safetensors"),
            pytest.param("a.json", json.dumps({"<b>x</b>": 1}).encode(), "malformed_body", id="markup"),
        ],
    )
    def test_said_as_the_api_does(
        self, page: Page, lone_server: ServerProcess, name: str, body: bytes, code: str
    ) -> None:
        """Its text, code and request id; then the example runs as before."""
        run(page)
        response = asked(page, lambda: drop(page, name, body))
        said = lone_server.client.post(
            "/v1/attention", content=body, headers={"Content-Type": response.request.headers["content-type"]}
        ).json()
        assert page.inner_text("#refusal strong") == said["error"]
        assert page.inner_text("#refusal-code") == said["code"] == code
        assert page.inner_text("#refusal-request_id") == response.headers["x-request-id"]
        assert page.inner_text("#refusal-status") == str(response.status)
        assert page.is_hidden("#shown")
        asked(page, lambda: page.click("#file-clear"))
        assert page.inner_text("#refusal") == ""
        assert dark_from(page, "#weights-0") == [3] * 4

    def test_of_something_in_between(self, page: Page) -> None:
        """What is no error body of the API is shown as it came, and no answer at all is told as such."""
        page.route(ATTENTION, lambda route: route.fulfill(status=502, body="<h1>Bad gateway</h1>"), times=1)
        page.click("#run")
        page.wait_for_selector("#refusal-status")
        assert page.inner_text("#refusal strong") == "<h1>Bad gateway</h1>"
        page.route(ATTENTION, lambda route: route.abort(), times=1)
        page.click("#run")
        says(page, "refusal", "no answer: ")
        run(page)
        assert page.inner_text("#refusal") == ""

    def test_key(self, open_page: Callable[..., Page], tmp_path: Path, seeds_repository: Path) -> None:
        """Once the server wants one there is a field for it; it is sent, and neither kept nor shown."""
        (tmp_path / "keys").write_text(f"user:{hashlib.sha256(b'secret').hexdigest()}\n")
        flags = ("--models", str(seeds_repository), "--api-keys-file", str(tmp_path / "keys"))
        with serving(tmp_path / "log", *flags) as server:
            page = open_page(server)
            page.wait_for_selector("#run:enabled")
            assert page.is_hidden("#key")
            assert run(page).status == 401
            assert page.inner_text("#refusal-code") == "unauthorized"
            page.keyboard.type("secret")
            response = asked(page, lambda: page.keyboard.press("Enter"))
            assert response.status == 200
            assert response.request.headers["x-api-key"] == "secret"
            assert page.inner_text("#refusal") == ""
            line = page.inner_text("#curl")
            assert "secret" not in line
            got = curl(page, tmp_path, API_KEY="secret")
            assert got == response.json()
            assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
            page.close()


def curl(page: Page, folder: Path, **environment: str) -> Any:
    """What the line answers in a shell, with the body that the page offers beside it, if it offers one."""
    if page.is_visible("#body"):
        with page.expect_download() as caught:
            page.click("#body")
        caught.value.save_as(folder / caught.value.suggested_filename)
    line = page.inner_text("#curl")
    ended = subprocess.run(
        ["sh", "-c", line], cwd=folder, env=os.environ | environment, capture_output=True, check=True, timeout=20
    )
    return json.loads(ended.stdout)


class TestCurl:
    def test_with_the_body_in_it(self, open_page: Callable[..., Page], server: ServerProcess, tmp_path: Path) -> None:
        """The line of a small body needs no file, answers what is shown, and can be copied."""
        page = open_page(server, permissions=["clipboard-read", "clipboard-write"])
        page.wait_for_selector("#run:enabled")
        asked(page, lambda: page.check("input[value=self]"))
        response = asked(page, lambda: page.uncheck("#heads input[value='0']"))
        assert page.is_hidden("#body")
        assert curl(page, tmp_path) == response.json()
        page.click("#copy")
        says(page, "copied", "Copied.")
        assert page.evaluate("navigator.clipboard.readText()") == page.inner_text("#curl")

    @pytest.mark.parametrize("name", ["body.json", "body.safetensors", "body.npz"])
    def test_with_the_body_beside_it(self, page: Page, seeds_layer: Any, tmp_path: Path, name: str) -> None:
        """A larger body is offered as a file, and the line answers what is shown."""
        codec = {"body.json": JSON, "body.safetensors": SAFETENSORS, "body.npz": NPZ}[name]
        asked(page, lambda: choose(page, name, WRITE[codec](drawn(seeds_layer))))
        response = asked(page, lambda: page.check("input[value=mean]"))
        assert f"@{name}" in page.inner_text("#curl")
        assert curl(page, tmp_path) == response.json()

    def test_quotes(self, page: Page, tmp_path: Path) -> None:
        """What a shell would understand stays text: the refusal is the API's."""
        body = json.dumps({"it's $HOME `id`": 1}).encode()
        response = asked(page, lambda: choose(page, "a.json", body))
        assert page.is_hidden("#body")
        assert curl(page, tmp_path)["error"] == response.json()["error"]


class TestLive:
    def test_figures(self, open_page: Callable[..., Page], lone_server: ServerProcess) -> None:
        """They are the metrics', and follow them."""
        page = open_page(lone_server)
        page.wait_for_selector("#run:enabled")
        # A rate is of what comes between two looks.
        page.wait_for_function("() => Number(document.getElementById('live-answered').textContent) >= 0")
        run(page)
        # Other tests may have asked this server by the other protocol.
        routes = ("/v1/attention", "/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer")
        of_route = 'mha_requests_total{code="ok",method="POST",route="'
        answered = sum(lone_server.metric(f'{of_route}{route}"') for route in routes)
        page.wait_for_function(
            "count => document.getElementById('live-answered').textContent === count", arg=f"{answered:.0f}"
        )
        page.wait_for_function("() => parseFloat(document.getElementById('live-rate').textContent) > 0")
        assert page.inner_text("#live-median").endswith(" ms")
        assert page.inner_text("#live-in-flight") == "0"

    def test_only_while_somebody_looks(self, open_page: Callable[..., Page], lone_server: ServerProcess) -> None:
        """Every two seconds; never while the page is hidden; again once it is seen."""
        page = open_page(lone_server, path="/assets/style.css")
        page.clock.install()
        page.goto(lone_server.url + "/")
        page.wait_for_function("() => Number(document.getElementById('live-answered').textContent) >= 0")
        looks: list[str] = []
        page.on("request", lambda request: looks.append(request.url) if request.url.endswith("/metrics") else None)
        with page.expect_response("**/metrics"):
            page.clock.fast_forward(2000)
        see = "state => { Object.defineProperty(document, 'visibilityState', {value: state, configurable: true});"
        see += "document.dispatchEvent(new Event('visibilitychange')) }"
        page.evaluate(see, "hidden")
        page.clock.run_for(20_000)
        assert len(looks) == 1
        page.evaluate(see, "visible")
        with page.expect_response("**/metrics"):
            page.clock.fast_forward(2000)

    def test_reads_what_prometheus_reads(self, page: Page, server: ServerProcess) -> None:
        """Every sample with its labels and value, also those that have to be unescaped."""
        text = server.client.get("/metrics").text + 'odd{a="x\\"y\\\\z\\n,}",b=""} 1.5e+03\n'
        samples = page.evaluate("async text => (await import('/assets/metrics.js')).parseMetrics(text)", text)
        want = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        assert [(one["name"], one["labels"], one["value"]) for one in samples] == [one[:3] for one in want]

    def test_figures_of_a_window(self, page: Page) -> None:
        """Rate and median are of what came between two looks; the rest is of all."""
        route = 'route="/v1/attention"'

        def look(answered: int, below_1ms: int, below_2ms: int) -> str:
            return (
                f'mha_requests_total{{code="ok",{route}}} {answered}\n'
                f'mha_requests_total{{code="overloaded",{route}}} 3\n'
                'mha_requests_total{code="ok",route="/metrics"} 99\nmha_requests_in_flight 5\nmha_queue_requests 2\n'
                f'mha_request_seconds_bucket{{le="0.001",{route}}} {below_1ms}\n'
                f'mha_request_seconds_bucket{{le="0.002",{route}}} {below_2ms}\n'
                f'mha_request_seconds_bucket{{le="+Inf",{route}}} {below_2ms}\n'
                'mha_keys_total{kind="received"} 100\nmha_keys_total{kind="computed"} 40\n'
            )

        lines = "async ([now, before]) => { const {figures, parseMetrics} = await import('/assets/metrics.js');"
        lines += "return figures(parseMetrics(now), parseMetrics(before), 4); }"
        got = page.evaluate(lines, [look(20, 10, 20), look(8, 8, 8)])
        # 12 more: 2 below 1 ms, 10 up to 2 ms; the sixth is the fourth of those ten.
        assert got == {
            "answered": 20, "refused": 3, "inFlight": 4, "waiting": 2, "rate": 3, "medianMs": pytest.approx(1.4),
            "saved": pytest.approx(0.6),
        }  # fmt: skip


# Of each text that can be seen: what it says, its colour, and the colour it stands on.
_TEXTS = """() => {
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const background = (element) => {
    const colour = parts(getComputedStyle(element).backgroundColor);
    return colour.length < 4 || colour[3] === 1 ? colour.slice(0, 3)
      : element.parentElement ? background(element.parentElement) : [255, 255, 255];
  };
  const inText = [...document.querySelectorAll("body *")].filter((element) => element.checkVisibility()
    && [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim()));
  const inFields = [...document.querySelectorAll("input[type=text], input[type=number]")];
  const ofTexts = [...inText, ...inFields].map((element) =>
    [element.textContent || element.value, parts(getComputedStyle(element).color).slice(0, 3), background(element)]);
  const ofHints = inFields.map((element) =>
    [element.placeholder, parts(getComputedStyle(element, "::placeholder").color).slice(0, 3), background(element)]);
  return [...ofTexts, ...ofHints];
}"""


def luminance(colour: list[float]) -> float:
    """Relative luminance (WCAG 2.2)."""
    linear = [part / 3294.6 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in colour]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


class TestLooks:
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_contrast(self, open_page: Callable[..., Page], lone_server: ServerProcess, scheme: str) -> None:
        """Every text stands out from its background by 4.5 to 1, an answer's as well as a refusal's."""
        page = open_page(lone_server, color_scheme=scheme)
        page.wait_for_selector("#run:enabled")
        run(page)
        texts = page.evaluate(_TEXTS)
        asked(page, lambda: choose(page, "a.json", b"{}"))
        texts += page.evaluate(_TEXTS)
        assert len(texts) > 100
        for text, colour, background in texts:
            low, high = sorted((luminance(colour), luminance(background)))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (text, colour, background)
        page_background = luminance(page.evaluate(_TEXTS)[0][2])
        assert page_background < 0.05 if scheme == "dark" else page_background > 0.9

    def test_fits_a_phone(self, open_page: Callable[..., Page], lone_server: ServerProcess) -> None:
        """Nothing is wider than its screen: neither an answer, long words, a refusal, nor the limits."""
        page = open_page(lone_server, viewport=PHONE, has_touch=True)
        page.wait_for_selector("#run:enabled")
        page.locator("summary").first.click()
        answer = run(page).json()
        page.fill("#key-labels", "Donaudampfschifffahrtsgesellschaft " * 6)
        page.fill("#query-labels", "Donaudampfschifffahrtsgesellschaft " * 4)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        box = page.locator("#weights-1").bounding_box()
        assert box is not None
        assert box["width"] > PHONE["width"] / 2
        page.tap("#weights-1", position={"x": 2, "y": 2})
        assert shown_value(page) == answer["weights"][0][1][0][0]
        asked(page, lambda: choose(page, "a.json", json.dumps({"x" * 300: 1}).encode()))
        page.evaluate("document.getElementById('key-row').hidden = false")
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        wide = "[...document.querySelectorAll('body *')].filter(one => one.getBoundingClientRect().right > innerWidth)"
        assert page.evaluate(f"{wide}.map(one => one.outerHTML.slice(0, 80))") == []
