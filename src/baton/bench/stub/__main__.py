"""`python -m baton.bench.stub`: a stub server until it is terminated."""

from __future__ import annotations

import argparse
import asyncio
import gc
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from baton.bench.loop import loop_factory
from baton.bench.stub.profile import Profile
from baton.bench.stub.server import start


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve; prints the URL once it listens. The exit code is 2 for a profile that is none."""
    parser = argparse.ArgumentParser(
        prog="python -m baton.bench.stub",
        description="An OpenAI-compatible server with programmed latencies and faults.",
        epilog="""example: --profile '{"ttft": {"base": 0.2}, "itl": {"base": 0.02}}'""",
    )
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--profile", default="{}", help="JSON, or a file of it; see profile.py")
    options = parser.parse_args(arguments)
    try:
        given = options.profile
        text = given if given.lstrip().startswith("{") else Path(given).read_text()
        profile = msgspec.json.decode(text, type=Profile)
    except (msgspec.MsgspecError, OSError) as error:
        print(f"stub: --profile: {error}", file=sys.stderr)
        return 2
    gc.freeze()
    gc.disable()  # answers hold no cycles, and a collection would show in every stream
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(profile, options.port))
    return 0


async def _serve(profile: Profile, port: int) -> None:
    server, url = await start(profile, port)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    print(url, flush=True)
    await stop.wait()
    server.close()


if __name__ == "__main__":
    sys.exit(main())
