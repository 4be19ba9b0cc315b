"""A stub server in a process of its own, as tests need it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import msgspec

from baton.bench.sse import ServerError
from baton.bench.stub.profile import Profile
from baton.core import env


@contextlib.contextmanager
def stub_server(profile: Profile | None = None) -> Iterator[str]:
    """Start one on a free port; yields its URL and ends it after.

    Raises:
        ServerError: it did not start.
    """
    text = msgspec.json.encode(profile or Profile()).decode()
    process = subprocess.Popen(
        [sys.executable, "-m", "baton.bench.stub", "--profile", text],
        stdout=subprocess.PIPE,
        text=True,
        env=env.child_python(),
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if not url:
            raise ServerError(f"the stub ended with {process.wait()}")
        yield url
    finally:
        process.terminate()
        process.wait()
