"""A real HTTP server on a free loopback port, in a thread of the test process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai

from baton.server.app import create_app
from baton.server.options import ServerOptions
from baton.server.process import HttpServer, bind
from helpers.fake_engine import FakeEngine, Script


class Running:
    """A running server, its engine, and clients for it."""

    def __init__(self, url: str, engine: FakeEngine, loop: asyncio.AbstractEventLoop) -> None:
        self.url, self.engine, self.loop = url, engine, loop
        self.http = httpx.Client(base_url=url, timeout=20)
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Run `function` on the server's loop."""
        self.loop.call_soon_threadsafe(function, *args)

    def reset(self) -> None:
        """Forget what earlier tests did to the engine."""
        self.engine.script = Script()
        self.engine.seen.clear()
        self.engine.cancelled.clear()

    def post(self, path: str, **json: Any) -> httpx.Response:
        """POST a JSON body."""
        return self.http.post(path, json=json)

    def metric(self, name: str, **labels: str) -> float:
        """Value of one sample of /metrics."""
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(f"baton:{name}{{") and all(
                f'{k}="{v}"' in line for k, v in labels.items()
            ):
                return float(line.rsplit(" ", 1)[1])
        raise KeyError(name)


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Return when `condition()` holds; fail when it does not within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "condition not reached in time"
        time.sleep(0.01)


@contextmanager
def running(engine: FakeEngine | None = None, **options: Any) -> Iterator[Running]:
    """`with running() as server:` serves a FakeEngine."""
    engine = engine or FakeEngine()
    made = ServerOptions(port=0, served_model_name=("fake", "alias"), **options)
    bound = bind("127.0.0.1", 0)
    loop = asyncio.new_event_loop()
    http = HttpServer(create_app(engine, made), bound, made)

    async def main() -> None:
        server = asyncio.create_task(http.run())
        await asyncio.get_running_loop().create_task(stopping.wait())
        await http.close(server)

    stopping = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    server = Running(http.url, engine, loop)
    try:
        yield server
    finally:
        server.http.close()
        server.client.close()
        loop.call_soon_threadsafe(stopping.set)
        thread.join(10)
        bound.close()
