"""`baton generate MODEL`: answer prompts from flags, a file or standard input, without a server."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from baton.cli.sampling import SamplingFlags
from baton.cli.serve import ModelArgument
from baton.cli.show import errors, examples, out
from baton.config.cli import (
    engine_options,
    engine_parameters,
    parameters,
    section_of,
    with_parameters,
)
from baton.core.errors import ConfigError
from baton.core.request import Output


def register(app: typer.Typer) -> None:
    """Add the command."""
    command = with_parameters(_generate, parameters(SamplingFlags, "Sampling"), engine_parameters())
    app.command(
        "generate",
        epilog=examples(
            'baton generate smollm2-135m -p "The capital of France is" --max-tokens 16',
            "baton generate smollm2-135m --chat --file questions.txt --json > answers.jsonl",
            "cat report.txt | baton generate ./model --max-tokens 200",
        ),
    )(command)


def _generate(
    model: ModelArgument,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="Prompt text (may be repeated).")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Text file with one prompt per line.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put each prompt through the model's chat template.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per prompt.")
    ] = False,
    **values: Any,
) -> None:
    """Continue prompts with a model, without a server.

    Without --prompt and --file, standard input is one prompt.
    """
    sampling = section_of(SamplingFlags, values).params()
    options = engine_options(model, values)
    prompts = _prompts(prompt or [], file)
    from baton.engine.llm import LLM

    with LLM(options) as llm:
        inputs: list[str | list[int]] = list(prompts)
        if chat:
            if llm.tokenizer is None:
                raise ConfigError("--chat needs a tokenizer")
            inputs = [llm.tokenizer.chat([{"role": "user", "content": p}]) for p in prompts]
        outputs = llm.generate(inputs, sampling, progress=_progress(len(prompts)))
    for text, output in zip(prompts, outputs, strict=True):
        _print(text, output, as_json, header=len(prompts) > 1)


def _prompts(given: list[str], file: Path | None) -> list[str]:
    prompts = list(given)
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--file {file}: {error}") from None
        prompts += [line for line in lines if line.strip()]
    elif not prompts:
        if sys.stdin.isatty():
            raise ConfigError("no prompt: use --prompt, --file or standard input")
        prompts = [sys.stdin.read()]
    if not any(text.strip() for text in prompts):
        raise ConfigError("the prompt is empty")
    return prompts


def _progress(total: int) -> Any:
    if total < 2 or not errors.is_terminal:
        return None

    def show(done: int, total: int) -> None:
        errors.print(f"{done} of {total} answered", end="\r" if done < total else "\n")

    return show


def _print(prompt: str, output: Output, as_json: bool, header: bool) -> None:
    answer = output.completions[0]
    if as_json:
        row = {
            "prompt": prompt,
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "prompt_tokens": len(output.prompt_token_ids),
            "output_tokens": len(answer.token_ids),
            "cached_tokens": output.cached_tokens,
        }
        print(json.dumps(row, ensure_ascii=False))
        return
    if header:
        out.rule(prompt[:60].replace("\n", " "), align="left")
    print(answer.text)
