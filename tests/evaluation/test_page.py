"""report.html in a real browser, where there is one."""

import asyncio
import json
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from contextlib import asynccontextmanager, closing

import aiohttp
import pytest

from nemo_ext.evaluation import page
from nemo_ext.evaluation.store import Key, Sample, Score, Store

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
FACTS = {
    "kind": "generate",
    "metric": "avg@2",
    "wanted": 40,
    "failed": 1,
    "unscored": 1,
    "weight": 1.0,
    "verifier": "v",
    "reasoning_tokens": None,
    "sensitivity": None,
    **{name: {} for name in ("reasons", "metrics", "prompts", "domains")},
}


def in_browser(test: Callable[..., None]) -> Callable[..., None]:
    """Runs in the nightly jobs, since GitHub's runners have a browser."""
    return pytest.mark.deep(pytest.mark.skipif(BROWSER is None, reason="needs Chromium")(test))


def results(*names, **more):
    def one(place):
        figures = {
            "accuracy": 0.3 + 0.1 * place,
            "interval": [0.2, 0.6],
            "n": 20 + place,
            "samples": 40,
            "truncated": 0.1,
        }
        modes = {"on": figures | {"tokens": 900.0}, "off": figures | {"tokens": 30.0}}
        return FACTS | figures | {"tokens": 900.0, "higher_is_better": True, "modes": modes} | more

    return {
        "model": f"tiny {HOSTILE}",
        "suite": ["quick"],
        "benchmarks": {name: one(place) for place, name in enumerate(names)},
        "mean": None,
        "missing": {"absent": "no data"},
    }


def fill(store, names, problems, *, answer=lambda number: f"answer {number}"):
    """Two samples per problem and mode; every third is right, one failed, one has no score, two are truncated."""
    number = 0
    for name in names:
        for problem in range(problems):
            asked = f"{name}-{problem}"
            store.add_prompt(asked, {"messages": [{"role": "user", "content": f"What is {problem}?"}]})
            for mode in ("on", "off"):
                for sample in range(2):
                    key = Key(name, f"p{problem}", "default", mode, sample)
                    said = {
                        "answer": answer(number),
                        "reasoning": f"thought {number}",
                        "completion_tokens": number % 97,
                    }
                    said["finish_reason"] = "length" if number in (5, 9) else "stop"
                    if number == 2:
                        said = {"problem": "HTTP 500: down"}
                    store.add(Sample(key=key, asked=asked, **said))
                    if number != 2:
                        value = None if number == 4 else float(number % 3 == 0)
                        why = "judge down" if number == 4 else "" if value else "not the same"
                        store.add_scores([Score(key=key, asked=asked, digest="v", score=value, why=why)])
                    number += 1
    return number


class Tab:
    """A page in a browser, controlled through the DevTools protocol."""

    def __init__(self, socket):
        self.socket, self.number, self.seen = socket, 0, []

    async def call(self, method, **parameters):
        self.number += 1
        await self.socket.send_json({"id": self.number, "method": method, "params": parameters})
        while True:
            message = await self.socket.receive_json(timeout=60)
            if message.get("id") == self.number:
                assert "error" not in message, message
                return message["result"]
            self.seen.append(message)

    async def happened(self, method):
        while not any(message.get("method") == method for message in self.seen):
            self.seen.append(await self.socket.receive_json(timeout=60))

    async def js(self, expression):
        found = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, expression, attempts=1200):
        for _ in range(attempts):
            if await self.js(expression):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"never true: {expression}; {await self.js('document.body.innerText.slice(0, 2000)')}")

    async def press(self, key):
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=key if len(key) == 1 else "")
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def choose(self, name, label):
        await self.js(
            f"(() => {{ const s = document.getElementById('f-{name}');"
            f"s.value = [...s.options].find((o) => o.text === {json.dumps(label)}).value;"
            "s.dispatchEvent(new Event('change')); })()"
        )

    async def search(self, text):
        await self.js(
            f"(() => {{ const s = document.getElementById('f-text'); s.value = {json.dumps(text)};"
            "s.dispatchEvent(new Event('input')); })()"
        )

    async def count(self):
        return await self.js("document.getElementById('count').textContent")

    async def detail(self):
        return await self.js("document.getElementById('detail').innerText")

    async def column(self, number):
        return await self.js(
            f"[...document.querySelectorAll('#list .row')].map((row) => row.children[{number}].textContent)"
        )


@asynccontextmanager
async def opened(path, profile):
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run",
               "--window-size=1400,1000", f"--user-data-dir={profile}", "about:blank"]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        address = next(found[1] for line in process.stderr if (found := re.search(r"ws://([^/]+)/", line)))
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{address}/json/list") as answer:
                targets = json.loads(await answer.text())
            url = next(each["webSocketDebuggerUrl"] for each in targets if each["type"] == "page")
            async with session.ws_connect(url, max_msg_size=0) as socket:
                tab = Tab(socket)
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await tab.call(f"{domain}.enable")
                await tab.call("Page.navigate", url=path.as_uri())
                await tab.happened("Page.loadEventFired")
                await tab.until("document.documentElement.dataset.ready === '1'")
                yield tab
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def written(tmp_path, names=("sums", "words"), problems=10, **options):
    with closing(Store(tmp_path / "store")) as store:
        fill(store, names, problems, **options)
        return page.write(results(*names), store, tmp_path)


def test_page_loads_nothing_and_has_no_external_text_in_its_html(tmp_path):
    text = written(tmp_path, answer=lambda number: HOSTILE).read_text()
    assert "<img" not in text and "owned'" not in text.partition("<style>")[2], (
        "answers are data, and the title is text"
    )
    assert re.search(r"(?i)(src|href)\s*=\s*[\"']?(https?:)?//", text) is None
    assert "default-src 'none'" in text and "unsafe" not in text


@pytest.mark.parametrize(
    ("sample", "score", "entry", "expected"),
    [
        ({"problem": "HTTP 500"}, None, {}, "failed"),
        ({}, None, {}, "unscored"),
        ({}, {"score": None}, {}, "unscored"),
        ({}, {"score": 1.0}, {}, "right"),
        ({}, {"score": 0.5}, {}, "partly right"),
        ({}, {"score": 1.0}, {"higher_is_better": False}, "wrong"),
        ({}, {"score": 0.9}, {"metric": "bits_per_byte"}, "measured"),
    ],
)
def test_verdicts(sample, score, entry, expected):
    named = {"key": Key("a", "b", "c", "d", 0), "asked": "x"}
    given = None if score is None else Score(**named, digest="v", **score)
    assert page.verdict(Sample(**named, **sample), given, {"metric": "avg@1"} | entry) == expected


def test_a_large_store_is_shown_in_part_and_the_page_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "SAMPLES", 20)
    wrote = []
    monkeypatch.setattr(page, "_data", lambda value, attribute: wrote.append(value) or b"")
    written(tmp_path)
    index = wrote[-1]
    assert 5 < len(index["sample"]) < 40
    assert index["note"].startswith(f"{len(index['sample'])} of 80 samples are in this page")


def test_long_texts_are_shortened_with_a_note(monkeypatch):
    monkeypatch.setattr(page, "TEXT", 10)
    cut = page._cut({"messages": ["a" * 9, "b" * 20 + "c" * 20]})["messages"]
    assert cut[0] == "a" * 9
    assert cut[1].startswith("bbbbb\n") and cut[1].endswith("\nccccc") and "30 characters are omitted" in cut[1]


def test_samples_of_other_requests_and_benchmarks_are_omitted(tmp_path, monkeypatch):
    wrote = []
    monkeypatch.setattr(page, "_data", lambda value, attribute: wrote.append(value) or b"")
    with closing(Store(tmp_path / "store")) as store:
        fill(store, ("sums", "other"), 2)
        page.write(results("sums"), store, tmp_path, asked={("sums", "p0", "default", "on"): "sums-0"})
    assert len(wrote[-1]["sample"]) == 2


@in_browser
def test_page_in_a_browser(tmp_path):
    async def look():
        async with opened(written(tmp_path), tmp_path / "profile") as tab:
            assert await tab.count() == "80 of 80 samples"
            assert HOSTILE in await tab.js("document.querySelector('h1').textContent")
            # sorting of tables
            names = "[...document.querySelectorAll('#first tbody tr')].map((row) => row.cells[0].textContent)"
            header = "[...document.querySelectorAll('#first th')].find((each) => each.textContent === 'problems')"
            assert await tab.js(names) == ["sums", "words"]
            await tab.js(f"{header}.querySelector('button').click()")
            assert await tab.js(f"{header}.getAttribute('aria-sort')") == "descending"
            assert await tab.js(names) == ["words", "sums"]
            await tab.js(f"{header}.querySelector('button').click()")
            assert await tab.js(f"{header}.getAttribute('aria-sort')") == "ascending"
            assert await tab.js(names) == ["sums", "words"]
            # filters
            for verdict, expected in (("right", 27), ("failed", 1), ("unscored", 1), ("wrong", 51), ("truncated ✂", 2)):
                await tab.choose("verdict", verdict)
                assert await tab.count() == f"{expected} of 80 samples"
            await tab.choose("verdict", "all verdicts")
            await tab.choose("mode", "off")
            await tab.choose("benchmark", "words")
            assert await tab.count() == "20 of 80 samples"
            assert set(await tab.column(1)) == {"words"} and set(await tab.column(4)) == {"off"}
            await tab.choose("mode", "all modes")
            await tab.choose("benchmark", "all benchmarks")
            # sorting of samples
            heads = "[...document.querySelectorAll('#head [role=columnheader]')]"
            await tab.js(f"{heads}[7].querySelector('button').click()")
            found = await tab.column(7)
            assert found == sorted(found, key=int, reverse=True) and found[0] == "79"
            assert await tab.js(f"{heads}[7].getAttribute('aria-sort')") == "descending"
            # search, details, keyboard
            await tab.search("ANSWER 77")
            await tab.until("document.getElementById('count').textContent === '1 of 80 samples'")
            await tab.until("document.getElementById('detail').innerText.includes('answer 77')")
            detail = await tab.detail()
            assert "What is 9?" in detail and "not the same" in detail
            assert "thought 77" not in detail, "reasoning is folded"
            assert "thought 77" in await tab.js("document.getElementById('detail').textContent")
            await tab.search("")
            await tab.until("document.getElementById('count').textContent === '80 of 80 samples'")
            await tab.js("document.getElementById('list').focus()")
            chosen = "document.querySelector('#list [aria-selected=true]')?.getAttribute('aria-rowindex')"
            await tab.press("Home")
            for key, expected in (("j", 3), ("ArrowDown", 4), ("k", 3), ("End", 81), ("ArrowUp", 80)):
                await tab.press(key)
                assert await tab.js(chosen) == str(expected)
            # the plot
            assert await tab.js("document.querySelectorAll('#plot .point').length") == 4
            await tab.js("document.querySelectorAll('#plot .point')[3].dispatchEvent(new Event('pointerenter'))")
            assert (
                await tab.js("document.getElementById('tip').innerText")
                == "words, off\n40.0% [20.0, 60.0], 30 tokens, 10.0% truncated"
            )
            await tab.js("document.querySelectorAll('#plot .point')[3].dispatchEvent(new Event('click'))")
            assert await tab.count() == "20 of 80 samples"
            assert_calm(tab)

    asyncio.run(look())


def assert_calm(tab):
    """Nothing but the page was loaded, and there were no errors."""
    kinds = {"Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"}
    assert [each for each in tab.seen if each.get("method") in kinds] == []
    loaded = [
        each["params"]["request"]["url"] for each in tab.seen if each.get("method") == "Network.requestWillBeSent"
    ]
    assert len(loaded) <= 1


@in_browser
def test_hostile_answers_are_text(tmp_path):
    with closing(Store(tmp_path / "store")) as store:
        key, asked = Key("sums", HOSTILE, "default", "on", 0), "x"
        call = {"function": {"name": HOSTILE, "arguments": HOSTILE}}
        store.add_prompt(asked, {"messages": [{"role": HOSTILE, "content": HOSTILE}], "tools": [{"name": HOSTILE}]})
        said = {"answer": HOSTILE, "reasoning": HOSTILE, "tool_calls": [call], "finish_reason": HOSTILE}
        store.add(Sample(key=key, asked=asked, **said))
        store.add_scores([Score(key=key, asked=asked, digest="v", score=0.0, why=HOSTILE, found=HOSTILE)])
        found = results("sums", reasons={HOSTILE: 1}, domains={HOSTILE: {"accuracy": 0.5, "n": 2}})
        found["missing"] = {HOSTILE: HOSTILE}
        path = page.write(found, store, tmp_path)

    async def look():
        async with opened(path, tmp_path / "profile") as tab:
            await tab.until("document.getElementById('detail').innerText.includes('why')")
            assert (await tab.js("document.body.textContent")).count(HOSTILE) >= 10
            assert await tab.js("document.querySelectorAll('img').length") == 0
            assert await tab.js("document.title") == f"tiny {HOSTILE}"
            assert_calm(tab)
            # Even a mistake in the page itself would run nothing.
            slip = "(() => { try { document.body.innerHTML = '<b>'; return 'set' } catch { return 'refused' } })()"
            assert await tab.js(slip) == "refused"

    asyncio.run(look())


@in_browser
@pytest.mark.deep
def test_a_hundred_thousand_samples(tmp_path):
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 9))) for _ in range(5000)]
    path = written(
        tmp_path,
        [f"bench{place}" for place in range(10)],
        2500,
        answer=lambda number: f"answer number {number}: " + " ".join(draw.choices(words, k=200)),
    )

    async def look():
        async with opened(path, tmp_path / "profile") as tab:
            assert await tab.count() == "100,000 of 100,000 samples"
            assert await tab.js("document.querySelectorAll('*').length") < 1500, "only visible rows are in the page"
            await tab.js("document.getElementById('list').scrollTop = 1e9")
            await tab.until(
                "document.querySelector('#list .row:last-child').getAttribute('aria-rowindex') === '100001'"
            )
            await tab.js("document.getElementById('list').focus()")
            await tab.press("End")
            await tab.until("document.getElementById('detail').innerText.includes('What is 2499?')")
            # Longest task that blocks the page during a search of all texts: printed, as machines differ.
            await tab.js(
                "globalThis.longest = 0; new PerformanceObserver((list) => list.getEntries().forEach((each) =>"
                "{ longest = Math.max(longest, each.duration) })).observe({type: 'longtask'})"
            )
            await tab.search("answer number 99999:")
            await tab.until("document.getElementById('count').textContent === '1 of 100,000 samples'")
            await tab.until("document.getElementById('detail').innerText.includes('answer number 99999:')")
            print("longest task, ms:", await tab.js("longest"), "MB:", path.stat().st_size / 1e6)
            assert_calm(tab)

    asyncio.run(look())
