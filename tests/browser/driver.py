"""A dashboard on a free port and a Chromium that opens it: what the browser tests and the README's pictures share."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from playwright.sync_api import Browser, Page, Playwright

ROOT = Path(__file__).parents[2]

ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

HOW = (
    "No Chromium was found. Install one (Debian, Ubuntu: apt-get install chromium), or Playwright's own: "
    ".venv/bin/python -m playwright install --with-deps chromium"
)

SIZES = {"desktop": (1440, 900), "projector": (1280, 720), "phone": (390, 844)}

QUIET = """() => {
    const rests = document.querySelector("[data-testid=stApp]")?.dataset.testScriptState === "notRunning"
    window.quiet = rests ? window.quiet ?? performance.now() : undefined
    return rests && performance.now() - window.quiet > 400 }"""
"""Whether no script has run for 400 ms: one that was asked for a moment ago may not have begun yet."""

FIRST_LOAD = 180_000
"""Milliseconds for the model's first load, with its conversion on a slow machine."""

RUN = 400_000
"""Milliseconds for a run on a machine that others use too."""


@dataclass
class Server:
    """A running dashboard."""

    url: str
    log: Path

    def complaints(self) -> list[str]:
        """Lines of the log that are errors, warnings or tracebacks."""
        text = re.sub(r"\x1b\[[0-9;]*m", "", self.log.read_text(errors="replace"))
        return [
            line for line in text.splitlines() if re.search(r"\b(ERROR|WARNING|Warning|Traceback|Exception)\b", line)
        ]


@contextmanager
def serving(folder: Path, **environment: str) -> Iterator[Server]:
    """Start the dashboard, wait until it answers, and stop it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / "server.log"
    command = [
        sys.executable,
        "serve.py",
        "--server.port",
        str(port),
        "--server.address",
        "127.0.0.1",
    ]
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, env=os.environ | environment)
        try:
            server = Server(f"http://127.0.0.1:{port}", log)
            _wait(server, process)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait(server: Server, process: subprocess.Popen) -> None:
    for _ in range(600):
        if process.poll() is not None:
            raise RuntimeError(f"The dashboard did not start:\n{server.log.read_text()}")
        try:
            with urllib.request.urlopen(f"{server.url}/_stcore/health", timeout=1):
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("The dashboard did not answer within a minute.")


def chromium(playwright: Playwright) -> Browser | None:
    """The system's Chromium, else Playwright's own, else None."""
    system = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    own = Path(playwright.chromium.executable_path)
    if system is None and not own.exists():
        return None
    return playwright.chromium.launch(executable_path=system or str(own), args=ARGS)


@dataclass
class Tab:
    """A session in the browser, with the moves that a person makes."""

    page: Page
    server: Server
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(60_000)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._console)

    def _console(self, message) -> None:
        url = message.location.get("url", "")
        probe = "/_stcore/" in url and "404" in message.text  # Streamlit asks on sub-pages where its server is
        if message.type == "error" and not probe:
            self.errors.append(f"{message.text} {url}")

    def open(self, path: str = "/") -> Tab:
        """Go to an address and wait until the model is loaded and the page stands still."""
        self.page.goto(self.server.url + path)
        self.page.locator(".kv-legend").wait_for(timeout=FIRST_LOAD)
        return self.settle()

    def settle(self) -> Tab:
        """Wait until Streamlit has had nothing to draw for a while."""
        self.page.locator(".kv-title").wait_for()
        self.page.evaluate("window.quiet = undefined")
        self.page.wait_for_function(QUIET, timeout=RUN)
        return self

    def go(self, title: str) -> Tab:
        """Open another page by its name in the navigation."""
        if self.page.viewport_size["width"] < 640:
            self.page.goto(re.sub(r"//([^/]+)/[a-z]*", rf"//\1/{PATHS[title]}", self.page.url, count=1))
        else:
            self.page.get_by_test_id("stTopNavLinkContainer").filter(has_text=title).first.click()
        self.page.locator(".kv-title", has_text=title).wait_for()
        return self.settle()

    def press(self, name: str) -> None:
        """Click a button of the page by its label."""
        self.page.get_by_test_id("stMain").get_by_role("button", name=name).first.click()

    def run(self) -> Tab:
        """Press Run and wait for the results."""
        self.press("Run")
        return self.finish()

    def finish(self) -> Tab:
        """Wait for the results of a run."""
        self.page.get_by_test_id("kv-costs").wait_for(timeout=RUN)
        return self.settle()

    def cards(self) -> dict[str, str]:
        """Policy -> text, of the cards (a method that stands there twice counts once)."""
        read = "cards => cards.map(card => [card.dataset.policy, card.querySelector('.kv-text').innerText])"
        return dict(self.page.locator(".kv-card").evaluate_all(read))

    def words(self) -> str:
        """The experiment in one line."""
        return self.page.get_by_test_id("kv-words").inner_text()

    def raised(self) -> list[str]:
        """Tracebacks on the page."""
        return self.page.get_by_test_id("stException").all_inner_texts()

    def fits(self) -> bool:
        """Whether nothing sticks out at the side."""
        return self.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1")

    def read(self) -> Tab:
        """Let the model read the prompt, where a page asks for it."""
        button = self.page.get_by_role("button", name="Read the prompt")
        if button.count():
            button.click()
            button.wait_for(state="detached", timeout=RUN)
            self.page.get_by_test_id("stProgress").first.wait_for(state="detached", timeout=RUN)
        return self.settle()


PATHS = {
    "Compare": "",
    "Tour": "tour",
    "Values": "values",
    "Capacity": "capacity",
    "Heads": "heads",
    "Tokens": "tokens",
    "Long generation": "long",
    "Studies": "studies",
}
"""Page -> its address."""


@contextmanager
def tab(browser: Browser, server: Server, size: str = "desktop", scheme: str = "light", **options) -> Iterator[Tab]:
    """A fresh session."""
    width, height = SIZES[size]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, **options)
    try:
        yield Tab(context.new_page(), server)
    finally:
        context.close()
