"""`compress eval-ppl`: flags to an evaluation, the table, the gate's exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from . import options
from .console import Console
from .units import size_text, time_text

if TYPE_CHECKING:
    from .runs.evaluation import Evaluation


@click.command("eval-ppl", cls=options.Command)
@click.argument("directory", metavar="[DIR]", required=False)
@click.option(
    "--protocol",
    metavar="NAME",
    default="plain",
    show_default=True,
    help="wikitext2-1024, wikitext2-2048, wikitext2-4096, hf-stride, llama.cpp-512 or plain.",
)
@options.dataset
@click.option("--window", type=int, help="Tokens a window.  [default: the protocol's]")
@click.option("--stride", type=int, help="Tokens from one window to the next.  [default: the protocol's]")
@click.option(
    "--bos",
    type=click.Choice(["none", "once", "window"]),
    help="BOS nowhere, as the tokenizer adds it to the text, or at each window.  [default: the protocol's]",
)
@click.option("--limit", type=int, metavar="N", help="Only the first N windows.")
@options.reference
@click.option("--write-baseline", type=options.Place(), metavar="FILE", help="Keep the score.")
@click.option("--check", type=options.Place(), metavar="FILE", help="Exit 1 if worse than this baseline.")
@click.option("--tolerance", type=float, help="Relative loss that passes.  [default: the baseline's, else 0.01]")
@options.device
@options.kernel
@click.option("--dtype", help="float32, bfloat16, float16 or float64.  [default: float32 on CPU, the model's on GPU]")
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the model.")
@options.reporting
def command(directory: str | None, console: Console, **flags: Any) -> None:
    """Measure the perplexity of DIR (a directory, packed or plain, or a cached Hub id; without it, the embedded model).

    With --reference MODEL also the KL divergence to it and the share of equal first choices. `embedded` names the
    embedded model.
    """
    from ..formats.errors import GateFailed
    from .runs.evaluate import evaluate

    result = evaluate(directory, track=console.track, **flags)
    for warning in result.warnings:
        console.warn(warning)
    console.result(result, lambda: _show(console, result))
    for note in result.notes:
        console.note(f"Note: {note}.")
    if result.check.passed is False:
        raise GateFailed(
            f"--check {flags['check']}", str(result.check.reason), "find what made it worse, or write a new baseline"
        )


def _show(console: Console, result: Evaluation) -> None:
    rules = result.protocol
    bos = str(rules["bos"])
    if rules["bos_token_id"] is None and bos != "none":
        bos += " (the tokenizer adds none)"
    rows = [
        ["perplexity", _with_error(result.perplexity, result.perplexity_stderr)],
        ["protocol", f"{rules['name']}: window {rules['window']}, stride {rules['stride']}, BOS {bos}"],
        ["text", f"{result.dataset['name']}, {rules['text_tokens']:,} tokens"],
        ["scored", f"{result.tokens_scored:,} tokens in {result.windows} windows"],
        ["speed", f"{result.tokens_per_second:,.0f} tokens/s, {time_text(result.seconds)} ({_where(result)})"],
        ["peak memory", size_text(result.peak_memory_bytes)],
    ]
    if result.reference.name is not None:
        rows[1:1] = [
            [f"perplexity of {result.reference.name}", _with_error(result.reference.perplexity, None)],
            ["KL to it, nats per token", _with_error(result.kl, result.kl_stderr)],
            ["equal first choices", f"{100 * (result.top1_agreement or 0.0):.2f} %"],
        ]
    if result.check.reason is not None:
        rows.append(["check", result.check.reason])
    console.table({"": "left", result.model: "left"}, rows)


def _with_error(value: float | None, stderr: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:.5g}" if stderr is None else f"{value:.5g} ± {stderr:.2g}"


def _where(result: Evaluation) -> str:
    return f"{result.device}, {result.dtype}, {result.attention or 'attention unknown'}"
