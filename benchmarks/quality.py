"""Quality of schemes and methods on one model: quantise, evaluate, one row a configuration, KL first.

    python benchmarks/quality.py MODEL --calibration FILE --text FILE [--protocol …] CONFIG…

CONFIG is `scheme:method:group[:scale-rule]`, for example `W4A16:gptq:64` or `W4A16:rtn:channel:mse`, or a JSON mapping
of recipe keys, for example `{"scheme": "SPARSE50", "method": "wanda", "pattern": "2:4"}`. Rows are printed as they come
and written as JSON with `--json FILE`. The calibration text must be another text than the one evaluated on.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click

import compress_llm
from compress_llm.compress_cli.runs.recipe import Recipe, from_dict

OTHER_KEYS = ("input_scale_rule", "sparsity", "pattern", "sparse_layout", "allocate", "refit")


@dataclass
class Row:
    """One configuration's outcome."""

    scheme: str
    method: str
    group: str
    settings: str
    bits_per_weight: float
    kl: float | None
    kl_stderr: float | None
    perplexity: float | None
    base_perplexity: float | None
    top1_agreement: float | None
    seconds: float

    def line(self) -> str:
        """As a row of a Markdown table."""
        kl = "-" if self.kl is None else f"{self.kl:.4f} ± {self.kl_stderr or 0:.4f}"
        top = "-" if self.top1_agreement is None else f"{100 * self.top1_agreement:.1f} %"
        cells = [f"{self.scheme} {self.group}", ", ".join(filter(None, (self.method, self.settings)))]
        cells += [f"{self.bits_per_weight:.3f}", kl, f"{self.perplexity or 0:.3f}", top, f"{self.seconds:.0f}"]
        return f"| {' | '.join(cells)} |"


def recipe_of(config: str, calibration: str, samples: int, length: int) -> Recipe:
    """The recipe that a CONFIG names."""
    if config.startswith("{"):
        given = from_dict({"dataset": calibration, **json.loads(config)}, "CONFIG")
        return replace(given, num_samples=samples, seq_len=length)
    scheme, method, group, *rule = config.split(":")
    size = int(group) if group.isdecimal() else group or None
    return Recipe(
        scheme=scheme,
        method=method,
        group_size=size,
        scale_rule=rule[0] if rule else None,
        dataset=None if method in ("rtn", "hqq") and rule[:1] != ["local-hessian"] else calibration,
        num_samples=samples,
        seq_len=length,
    )


def settings_of(recipe: Recipe) -> str:
    """What a row says of a recipe beside its scheme, method and group."""
    others = [f"{name} {value}" for name in OTHER_KEYS if (value := getattr(recipe, name))]
    return ", ".join(filter(None, [recipe.scale_rule, *others]))


@click.command()
@click.argument("model")
@click.argument("configs", nargs=-1, required=True)
@click.option("--calibration", required=True)
@click.option("--text", required=True)
@click.option("--protocol", default="plain", show_default=True)
@click.option("--window", type=int)
@click.option("--limit", type=int, default=20, show_default=True)
@click.option("--kl-limit", type=int, help="Windows that KL is taken over.  [default: --limit]")
@click.option("--num-samples", default=64, show_default=True)
@click.option("--seq-len", default=512, show_default=True)
@click.option("--device", default="auto", show_default=True)
@click.option("--dtype", default="float32", show_default=True, help="What is evaluated and calibrated in.")
@click.option("--options", default="{}", help="Settings of the methods as JSON, such as {'gptq': {'damp': 0.1}}.")
@click.option("--json", "json_file", type=click.Path(path_type=Path))
def main(
    model: str,
    configs: tuple[str, ...],
    calibration: str,
    text: str,
    protocol: str,
    window: int | None,
    limit: int,
    kl_limit: int | None,
    num_samples: int,
    seq_len: int,
    device: str,
    dtype: str,
    options: str,
    json_file: Path | None,
) -> None:
    """Quantise MODEL under every CONFIG and measure it."""
    root = Path(tempfile.mkdtemp())
    rows: list[Row] = []
    click.echo("| scheme | method | bits | KL | perplexity | same top 1 | s |\n|---|---|---|---|---|---|---|")
    for config in configs:
        recipe = recipe_of(config, calibration, num_samples, seq_len)
        recipe = replace(recipe, dtype=dtype, options={**recipe.options, **json.loads(options)})
        begun = time.monotonic()
        report = compress_llm.quantize(model, root / "out", recipe, device=device, overwrite=True)
        seconds = time.monotonic() - begun
        settings = {"dataset": text, "protocol": protocol, "window": window, "device": device, "dtype": dtype}
        result = compress_llm.evaluate(str(root / "out"), reference=model, limit=limit, **settings)
        few = result
        if kl_limit is not None:
            few = compress_llm.evaluate(str(root / "out"), reference=model, limit=kl_limit, **settings)
        rows.append(
            Row(
                recipe.scheme,
                ",".join(recipe.methods),
                str(recipe.group_size or "default"),
                settings_of(recipe),
                report.totals["bits_per_weight"],
                few.kl,
                few.kl_stderr,
                result.perplexity,
                result.reference.perplexity,
                result.top1_agreement,
                seconds,
            )
        )
        click.echo(rows[-1].line())
        if json_file is not None:
            json_file.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    click.echo(f"base perplexity {rows[0].base_perplexity:.3f}")
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
