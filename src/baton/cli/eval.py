"""`baton eval ...`: how well a model retrieves, and what a lossy feature costs."""

from __future__ import annotations

import dataclasses
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from baton.cli.show import WIDTH, errors, examples, out
from baton.config.cli import (
    engine_options,
    engine_parameters,
    parameters,
    section_of,
    with_parameters,
)
from baton.core.errors import ConfigError

if TYPE_CHECKING:
    from baton.evals.document import Document

GATE = 3  #: exit code when a loss exceeds its bound
PANEL = "Evaluation"


@dataclasses.dataclass(frozen=True)
class EvalFlags:
    """What is asked; the text says more about tasks."""

    tasks: Annotated[str, "task names, or all, ruler, across"] = "all"
    lengths: Annotated[str, "context lengths, as 4K,32K,512K"] = "4K"
    contexts: Annotated[int, "contexts of each task and length"] = 4
    queries: Annotated[int, "queries about each context, fewer where it is short"] = 16
    exam_seed: Annotated[int, "another seed: other contexts"] = 0
    form: Annotated[
        Literal["auto", "marks", "words"], "marks: the reference models' own; words: text"
    ] = "auto"
    alphabet: Annotated[int, "symbols in use in a context, with --form marks"] = 128
    page: Annotated[int, "tokens of a page, for facts that straddle its end"] = 64
    block: Annotated[int, "likewise of a sparse block"] = 128
    chunk: Annotated[int, "likewise of a prefill chunk"] = 8192
    segments: Annotated[int, "equal parts of a context that facts are spread over"] = 8
    text: Annotated[
        tuple[str, ...], "text file to measure perplexity on, or library: Python's sources"
    ] = ("library",)
    text_tokens: Annotated[int, "tokens read of each text; 0: no perplexity"] = 16384
    write: Annotated[
        bool, "write answers step by step, to examine decode; else they are judged in prefill"
    ] = False
    served_model: Annotated[str | None, "model name at a URL, if not its first one"] = None


class _Group(TyperGroup):
    """`eval MODEL` means `eval run MODEL`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """See click.Group, of which typer has a copy of its own in some versions."""
        if args and args[0] not in self.commands:
            args = ["run", *args]
        return super().resolve_command(ctx, args)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(
        cls=_Group,
        help="Judge retrieval at any length, and what a lossy feature costs.",
        no_args_is_help=True,
        epilog=examples(
            "baton eval smollm2-135m --lengths 1K,4K",
            'baton eval compare smollm2-135m --b "--dtype bfloat16"',
        ),
    )
    flags = parameters(EvalFlags, PANEL)
    group.command(
        "run",
        epilog=examples(
            "baton eval smollm2-135m --lengths 1K,4K --tasks single,multikey1",
            "baton eval ./recall-512k --lengths 32K,512K --out 512k.json --resume",
            "baton eval http://localhost:8000 --tokenizer ./model --lengths 8K --tasks across",
        ),
    )(with_parameters(_run, flags, engine_parameters()))
    group.command(
        "compare",
        epilog=examples(
            "baton eval compare before.json after.json --gate bounds.toml",
            'baton eval compare ./model --a "--dtype float32" --b "--dtype bfloat16"',
            "baton eval compare ./model http://localhost:8000 --lengths 8K,32K --html page.html",
        ),
    )(with_parameters(_compare, flags, engine_parameters()))
    app.add_typer(group, name="eval")


OutFile = Annotated[
    Path | None, typer.Option("--out", help="Also write JSON here.", rich_help_panel=PANEL)
]
HtmlFile = Annotated[
    Path | None,
    typer.Option("--html", help="Also write one HTML page here.", rich_help_panel=PANEL),
]


def _run(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|URL", help="Model as for `baton serve`, or a server.")
    ],
    out_file: OutFile = None,
    html: HtmlFile = None,
    resume: Annotated[
        bool,
        typer.Option(
            help="Go on where an evaluation with the same --out was stopped.", rich_help_panel=PANEL
        ),
    ] = False,
    **values: Any,
) -> None:
    """Ask a model about facts in long contexts: exact match by task, length and distance.

    Tasks: single, multikey1-3, multivalue, multiquery, tracking, nth, common, frequent (`ruler`);
    alias, override, chain, compare, boundary (`across` segments). Perplexity beside them; with
    --mtp, how often the MTP module guesses what the model says, by task and text.
    With --out, answers are kept as they come, in a file `.part` beside it, for --resume.
    """
    from baton.evals import page, tables

    if resume and out_file is None:
        raise ConfigError("--resume needs the --out of the evaluation that was stopped")
    _writable(out_file, html)
    if _is_url(model):
        said = [p.name for p in engine_parameters() if values[p.name] != p.default]
        if engines := [name for name in said if name != "tokenizer"]:
            raise _engine_only(model, engines)
    flags = section_of(EvalFlags, values)
    if out_file is None:
        found = _examine(model, flags, values)
    else:
        found = _kept(model, flags, values, out_file, resume)
    out.print(tables.result(found), width=min(WIDTH, out.width))
    _write(html, page.result_page(found) if html is not None else "")


def _kept(
    model: str, flags: EvalFlags, values: dict[str, Any], out_file: Path, resume: bool
) -> Document:
    """`_examine`, with answers kept beside `out_file` until the result is in it."""
    from baton.evals import document
    from baton.evals.resume import alone, part_of

    with alone(out_file):
        part = part_of(out_file, resume)
        _writable(part)
        try:
            found = _examine(model, flags, values, part=part)
        except BaseException as error:
            if part.exists() and not isinstance(error, ConfigError):
                errors.print(
                    f"stopped; the same command with --resume goes on from {part}",
                    style="yellow", markup=False, soft_wrap=True,
                )  # fmt: skip
            if isinstance(error, KeyboardInterrupt):
                raise typer.Exit(130) from None
            raise
        document.save(found, out_file)
        part.unlink(missing_ok=True)
    return found


def _compare(
    a: Annotated[str, typer.Argument(metavar="A", help="Result file, model or URL.")],
    b: Annotated[
        str | None, typer.Argument(metavar="B", help="Likewise; the model A unless given.")
    ] = None,
    flags_a: Annotated[
        str, typer.Option("--a", help="Engine flags of A alone.", rich_help_panel=PANEL)
    ] = "",
    flags_b: Annotated[
        str, typer.Option("--b", help="Engine flags of B alone.", rich_help_panel=PANEL)
    ] = "",
    gate: Annotated[
        Path | None,
        typer.Option(help="TOML of bounds; exit code 3 beyond them.", rich_help_panel=PANEL),
    ] = None,
    resolve: Annotated[
        float,
        typer.Option(
            help="Difference, as a share, for which needed queries are shown.",
            rich_help_panel=PANEL,
        ),
    ] = 0.01,
    keep: Annotated[
        Path | None,
        typer.Option(help="Folder for both results, a.json and b.json.", rich_help_panel=PANEL),
    ] = None,
    out_file: OutFile = None,
    html: HtmlFile = None,
    **values: Any,
) -> None:
    """Ask two models or configurations the same, and say what B loses against A.

    Engine flags given here hold for both sides, those in --a and --b for one.
    """
    import msgspec

    from baton.evals import compare, document, gates, page, tables

    _writable(out_file, html, folder=keep)
    bounds = None if gate is None else gates.read_gate(gate)
    flags = section_of(EvalFlags, values)
    own = _parsed(flags_a), _parsed(flags_b)  # before minutes are spent on one side
    first = _side(a, flags_a, flags, {**values, **own[0]})
    sides = first, _side(b or a, flags_b, flags, {**values, **own[1]})
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        for side, name in zip(sides, "ab", strict=True):
            document.save(side, keep / f"{name}.json")
    made = compare.compare(sides[0], sides[1], resolve)
    out.print(tables.comparison(made), width=min(WIDTH, out.width))
    breaches = [] if bounds is None else gates.check(made, bounds)
    document_of = made.as_dict() | {"breaches": [dataclasses.asdict(one) for one in breaches]}
    _write(out_file, msgspec.json.format(msgspec.json.encode(document_of).decode()))
    _write(html, page.comparison_page(made) if html is not None else "")
    for breach in breaches:
        errors.print(f"gate: {breach.text()}", style="red", markup=False, soft_wrap=True)
    if bounds is not None and not breaches:
        errors.print("gate: all bounds hold", style="green")
    raise typer.Exit(GATE if breaches else 0)


def _side(subject: str, own: str, flags: EvalFlags, values: dict[str, Any]) -> Document:
    """A result file read, or a model examined."""
    path = Path(subject)
    if path.suffix == ".json":
        if own:
            raise ConfigError(f"{subject} is a result: engine flags {own!r} cannot change it")
        from baton.evals.document import load

        return load(path)
    return _examine(subject, flags, values, own)


def _parsed(flags: str) -> dict[str, Any]:
    """Engine options said in `flags`."""
    app = typer.Typer(add_completion=False)
    app.command("flags")(with_parameters(_nothing, engine_parameters()))
    command = typer.main.get_command(app)
    try:
        context = command.make_context("flags", shlex.split(flags))
    except Exception as error:  # whatever class it has: see _Group
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        raise ConfigError(f"engine flags {flags!r}: {message}") from None
    said = [k for k in context.params if _said(context, k)]
    return {k: context.params[k] for k in said}


def _said(context: Any, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _nothing(**values: Any) -> None:
    """A command whose flags are all there is to it."""


def _writable(*files: Path | None, folder: Path | None = None) -> None:
    """Raises ConfigError for a path that could not be written to after minutes of work."""
    for path in (*files, folder):
        if path is None:
            continue
        if path.exists() and path.is_dir() != (path is folder):
            kind = "file" if path is folder else "folder"
            raise ConfigError(f"cannot write {path}: there is a {kind} of that name")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(f"cannot write {path}: no such folder, or no right to write there")


def _write(path: Path | None, text: str) -> None:
    if path is None:
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from None
    errors.print(f"written to {path}", style="dim", markup=False)


def _is_url(subject: str) -> bool:
    return subject.startswith(("http://", "https://"))


def _engine_only(url: str, names: list[str]) -> ConfigError:
    flags = ", ".join("--" + name.replace("_", "-") for name in names)
    return ConfigError(f"{flags}: {url} is a server already; give engine flags to `baton serve`")


def _examine(
    subject: str,
    flags: EvalFlags,
    values: dict[str, Any],
    own: str = "",
    part: Path | None = None,
) -> Document:
    """Ask a model or a server everything; `part` keeps what is answered already. `own`: engine
    flags of this side alone."""
    from baton.core.progress import Progress
    from baton.evals.resume import Parts
    from baton.evals.run import run
    from baton.evals.setup import about, form_of, no_perplexity, suite_of, texts_of
    from baton.evals.subject import Engine, Server

    suite = suite_of(dataclasses.asdict(flags))
    if _is_url(subject):
        if own:
            raise _engine_only(subject, list(_parsed(own)))
        from baton.evals.setup import tokenizer_at

        tokenizer = tokenizer_at(values.get("tokenizer"))
        with Progress("items") as show:
            server = Server(subject, flags.served_model, tokenizer)
            form, suite = form_of(suite, flags.form, tokenizer)
            texts = texts_of(suite, flags.text, flags.text_tokens, tokenizer)
            facts: dict[str, Any] = {"name": f"{server.model} at {subject}", "url": subject}
            parts = Parts(part, {"subject": facts, "suite": suite.settings()})
            why = no_perplexity(flags.text_tokens, tokenizer)
            return run(server, form, suite, texts, (facts, about()), show, parts, why)
    from baton.engine.llm import LLM

    options = engine_options(subject, values)
    with LLM(options) as llm, Progress("items") as show:
        form, suite = form_of(suite, flags.form, llm.tokenizer)
        texts = texts_of(suite, flags.text, flags.text_tokens, llm.tokenizer)
        facts = {
            "name": f"{subject} {own}".strip(),
            "fingerprint": llm.fingerprint.to_dict(),
            "options": dataclasses.asdict(options),
            "device": llm.config.device,
            "written": flags.write,
        }
        parts = Parts(part, {"subject": facts, "suite": suite.settings()})
        engine, why = Engine(llm, flags.write), no_perplexity(flags.text_tokens, llm.tokenizer)
        return run(engine, form, suite, texts, (facts, about()), show, parts, why)
