"""A real browser, driven over its own protocol (chromedevtools.github.io/devtools-protocol): no library is needed."""

import asyncio
import base64
import itertools
import json
import shutil
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
READY = "document.documentElement?.dataset.ready ?? ''"


class Page:
    """One tab: what it shows, and what its console complains of."""

    def __init__(self, socket):
        self._socket, self._numbers, self.complaints, self.requests = socket, itertools.count(1), [], []

    async def call(self, method, **params):
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            said = json.loads((await self._socket.receive(timeout=60)).data)
            self._note(said)
            if said.get("id") == number:
                assert "error" not in said, said["error"]
                return said["result"]

    def _note(self, event):
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"].get("exception", {}).get("description")))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif event.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event.get("method") == "Page.javascriptDialogOpening":
            self.complaints.append("a dialog opened")

    async def open(self, url):
        """Opens an address anew, and waits until the page says that it is drawn."""
        await self.call("Page.navigate", url="about:blank")
        await self.call("Page.navigate", url=url)
        await self.until(READY)

    async def until(self, expression):
        async with asyncio.timeout(30):
            while not await self.value(f"Boolean({expression})"):
                await asyncio.sleep(0.02)

    async def value(self, expression):
        said = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    async def press(self, key):
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=key if len(key) == 1 else "")
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def text(self):
        return await self.value("document.querySelector('main').textContent")

    async def picture(self, file):
        Path(file).write_bytes(base64.b64decode((await self.call("Page.captureScreenshot"))["data"]))


@asynccontextmanager
async def browser(width=1400, height=860):
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as home:
        options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0")
        words = (*options, f"--window-size={width},{height}", f"--user-data-dir={home}", "about:blank")
        process = await asyncio.create_subprocess_exec(
            CHROMIUM, *words, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            port = Path(home, "DevToolsActivePort")
            async with asyncio.timeout(60):
                while not (port.is_file() and port.read_text().count("\n")):
                    await asyncio.sleep(0.05)
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port.read_text().split()[0]}") as client:
                async with client.get("/json") as answer:
                    (tab,) = [one for one in await answer.json(content_type=None) if one["type"] == "page"]
                async with client.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await page.call(f"{domain}.enable")
                    yield page
        finally:
            process.kill()
            await process.wait()
