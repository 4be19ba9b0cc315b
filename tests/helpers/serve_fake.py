"""`python serve_fake.py '{"server": {...}, "script": {...}, "start_delay": 0}'`: a whole server."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from baton.config.options import EngineOptions
from baton.core.errors import ModelError
from baton.server.app import serve
from baton.server.options import ServerOptions
from helpers.fake_engine import FakeEngine, Script

if __name__ == "__main__":
    given = json.loads(sys.argv[1])

    async def start(options: EngineOptions) -> FakeEngine:
        await asyncio.sleep(given.get("start_delay", 0))
        if given.get("broken"):
            raise ModelError(file="model.safetensors", problem="truncated")
        return FakeEngine(script=Script(**given.get("script", {})))

    sys.exit(serve(ServerOptions(**given.get("server", {})), EngineOptions.of("fake"), start))
