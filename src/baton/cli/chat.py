"""`baton chat MODEL`: a conversation in the terminal, with a model here or behind a URL."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from baton.cli.sampling import SamplingFlags
from baton.cli.show import errors, examples, out
from baton.config.cli import (
    engine_options,
    engine_parameters,
    parameters,
    section_of,
    with_parameters,
)
from baton.config.options import EngineOptions
from baton.core import env
from baton.core.errors import BatonError, ConfigError, RequestError

if TYPE_CHECKING:
    from baton.engine.async_engine import AsyncEngine

Message = dict[str, str]
HELP = "/exit ends, /clear forgets the conversation, Ctrl-C stops an answer"


class Partner(Protocol):
    """Whoever answers."""

    async def start(self) -> str:
        """Get ready; returns the name to show."""

    def reply(self, messages: list[Message], flags: SamplingFlags) -> AsyncIterator[str]:
        """Pieces of the answer as they come."""

    async def stop(self) -> None:
        """Free what `start` took."""


class LocalPartner:
    """A model in an engine of our own."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._engine: AsyncEngine | None = None

    async def start(self) -> str:
        """Start the engine process and wait until it is ready."""
        from baton.engine.async_engine import AsyncEngine

        self._engine = await AsyncEngine.start(self._options)
        if self._engine.tokenizer is None:
            raise ConfigError("chat needs a tokenizer: drop --skip-tokenizer-init")
        return self._options.model.model

    async def reply(self, messages: list[Message], flags: SamplingFlags) -> AsyncIterator[str]:
        """Stream an answer; leaving early aborts it."""
        engine = self._engine
        assert engine is not None, "start() comes first"
        assert engine.tokenizer is not None, "start() checked it"
        prompt = engine.tokenizer.chat(list(messages))
        stream = await engine.submit(prompt, flags.params())
        try:
            async for output in stream:
                yield output.completions[0].text
        finally:
            await stream.cancel()

    async def stop(self) -> None:
        """End the engine process."""
        if self._engine is not None:
            await self._engine.stop()


class RemotePartner:
    """A running OpenAI-compatible server."""

    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        import httpx

        from baton.bench import sse

        self._base = sse.api_base(url)
        self._model = model
        timeout = httpx.Timeout(600.0, connect=10.0)
        self._client = httpx.AsyncClient(timeout=timeout, headers=sse.headers(api_key))

    async def start(self) -> str:
        """Ask the server what it serves unless a model was named."""
        from baton.bench import sse

        if self._model is None:
            self._model = (await sse.served_model(self._client, self._base)).name
        return f"{self._model} at {self._base}"

    async def reply(self, messages: list[Message], flags: SamplingFlags) -> AsyncIterator[str]:
        """Stream an answer from /chat/completions."""
        import httpx

        from baton.bench import sse

        body = {"model": self._model, "messages": messages, "stream": True, **flags.body()}
        try:
            async with self._client.stream(
                "POST", f"{self._base}/chat/completions", json=body
            ) as response:
                await sse.check(response)
                async for event in sse.events(response):
                    for choice in event.get("choices") or ():
                        yield choice.get("delta", {}).get("content") or ""
        except httpx.HTTPError as error:
            raise sse.ServerError(f"{self._base}: {sse.explain(error)}") from None
        except UnicodeEncodeError:
            raise RequestError("the message is not valid Unicode") from None

    async def stop(self) -> None:
        """Close the connection."""
        await self._client.aclose()


def register(app: typer.Typer) -> None:
    """Add the command."""
    command = with_parameters(_chat, parameters(SamplingFlags, "Sampling"), engine_parameters())
    app.command(
        "chat",
        epilog=examples(
            "baton chat smollm2-135m",
            "baton chat ./model --system 'Answer in one sentence.' --temperature 0.7",
            "baton chat --url http://127.0.0.1:8000",
        ),
    )(command)


def _chat(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="As in `serve`; with --url, a served name."),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option("--url", "--base-url", help="Talk to a running server instead."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Key of that server (also BATON_API_KEY).")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    **values: Any,
) -> None:
    """Talk with a model, here or behind a URL.

    /exit ends, /clear starts over, Ctrl-C stops an answer.
    """
    flags = section_of(SamplingFlags, values)
    flags.params()
    partner: Partner
    if url is not None:
        partner = RemotePartner(url, model, api_key or env.API_KEY.get() or None)
    elif model is not None:
        partner = LocalPartner(engine_options(model, values))
    else:
        raise ConfigError("chat needs a MODEL or --url")
    start = [{"role": "system", "content": system}] if system else []
    # one runner for all turns: between turns Ctrl-C reaches input() as usual
    with asyncio.Runner() as runner:
        try:
            errors.print(f"{runner.run(partner.start())}  ({HELP})", style="dim")
            _converse(runner, partner, flags, start)
        finally:
            runner.run(partner.stop())


def _converse(
    runner: asyncio.Runner, partner: Partner, flags: SamplingFlags, start: list[Message]
) -> None:
    messages = list(start)
    while True:
        text = _ask()
        if text is None or text in {"/exit", "/quit"}:
            return
        if text == "/clear":
            messages = list(start)
        elif text.startswith("/"):
            errors.print(HELP, style="dim")
        elif text:
            question = {"role": "user", "content": text}
            answer = _answer(runner, partner, [*messages, question], flags)
            if answer:
                messages += [question, {"role": "assistant", "content": answer}]


def _ask() -> str | None:
    try:
        return (out.input("[bold]> [/bold]") if sys.stdin.isatty() else input()).strip()
    except (EOFError, KeyboardInterrupt):
        return None


def _answer(
    runner: asyncio.Runner, partner: Partner, messages: list[Message], flags: SamplingFlags
) -> str:
    """Print an answer as it comes; what came of it, also when it was stopped or broke off."""
    pieces: list[str] = []

    async def stream() -> None:
        async for piece in partner.reply(messages, flags):
            pieces.append(piece)
            print(piece, end="", flush=True)

    try:
        runner.run(stream())
    except KeyboardInterrupt:
        errors.print(" (stopped)", style="dim")
    except BatonError as error:
        errors.print(str(error), style="red", markup=False)
    print()
    return "".join(pieces)
