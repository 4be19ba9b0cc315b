"""What a server says about itself, and emptying its prefix cache."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import httpx

from baton.bench.load.target import Target
from baton.bench.sse import ServerError, api_base, explain, headers, served_model

#: vLLM's, SGLang's
RESETS = ("/reset_prefix_cache", "/flush_cache")


def ask_server(target: Target) -> dict[str, Any]:
    """URL, model, and what else the server tells: longest context, fingerprint, version, commit.

    Raises:
        ServerError: no server answers, or it serves no model.
    """
    return asyncio.run(_ask(target))


async def _ask(target: Target) -> dict[str, Any]:
    base = api_base(target.base_url)
    async with _client(target) as client:
        served = await served_model(client, base, target.model)
        about = {
            "url": target.base_url,
            "model": served.name,
            "max_model_len": served.max_model_len,
            "fingerprint": served.fingerprint,
            **await _version(client, base),
        }
    return {name: value for name, value in about.items() if value is not None}


async def _version(client: httpx.AsyncClient, base: str) -> dict[str, Any]:
    try:
        answer = (await client.get(f"{base.removesuffix('/v1')}/version")).json()
        return {name: str(answer[name]) for name in ("version", "commit") if name in answer}
    except (httpx.HTTPError, ValueError, TypeError):
        return {}  # many servers have no such page


def reset_cache(target: Target) -> str:
    """Empty the server's prefix cache; says how, or that the server offers no way. Prompts of
    another seed are new to it all the same."""
    return asyncio.run(_reset(target))


async def _reset(target: Target) -> str:
    root = api_base(target.base_url).removesuffix("/v1")
    async with _client(target) as client:
        for path in RESETS:
            try:
                if (await client.post(f"{root}{path}")).is_success:
                    return f"POST {path}"
            except httpx.HTTPError as error:
                raise ServerError(f"POST {root}{path}: {explain(error)}") from None
    return "not offered by the server"


def _client(target: Target) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        timeout=httpx.Timeout(60.0, connect=10.0),
        headers=headers(target.api_key),
        # as the load itself: no proxy, certificates that the system trusts
        trust_env=False,
        verify=ssl.create_default_context(),
    )
