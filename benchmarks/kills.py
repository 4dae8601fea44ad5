"""Kills `compress quantize` at random moments, resumes it, and compares the bytes with an uninterrupted run.

    python benchmarks/kills.py [--kills 50] [--method gptq] [--model DIR]

Every kill is SIGKILL. A run that is killed is resumed, and may be killed again; when it ends, its output must equal the
uninterrupted one but for run.json, and nothing else may be left beside it.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click


def contents(directory: Path) -> dict[str, bytes]:
    """Every file of an output but run.json."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != "run.json")
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


@click.command()
@click.option("--kills", default=50, show_default=True)
@click.option("--method", default="rtn", show_default=True)
@click.option("--scheme", default="W4A16", show_default=True)
@click.option("--model", help="Directory of the model.  [default: the embedded one]")
@click.option("--num-samples", default=8, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(kills: int, method: str, scheme: str, model: str | None, num_samples: int, seed: int) -> None:
    """Print how often the run was killed and where it stood; exit 1 on any difference."""
    root = Path(tempfile.mkdtemp())
    chance = random.Random(seed)
    command = [sys.executable, "-m", "compress_llm", "quantize", *([model] if model else []), "--method", method]
    command += ["--scheme", scheme, "--num-samples", str(num_samples), "--quiet"]
    begun = time.monotonic()
    subprocess.run([*command, "-o", str(root / "whole")], check=True, stdout=subprocess.DEVNULL)
    whole, seconds = contents(root / "whole"), time.monotonic() - begun
    out, killed, outputs = root / "out", 0, 0
    while killed < kills:
        process = subprocess.Popen([*command, "-o", str(out), "--resume"], stdout=subprocess.DEVNULL)
        try:
            process.wait(timeout=chance.uniform(0, 1.1 * seconds))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            killed += 1
            if not out.exists():
                continue
        if process.returncode not in (0, -signal.SIGKILL):
            sys.exit(f"a resumed run ended with {process.returncode}")
        if contents(out) != whole:
            sys.exit("a resumed run gave other bytes")
        subprocess.run(
            [*command, "-o", str(out), "--resume", "--overwrite", "--dry-run"], check=True, capture_output=True
        )
        outputs += 1
        shutil.rmtree(out)
    if not out.exists():
        subprocess.run([*command, "-o", str(out), "--resume"], check=True, stdout=subprocess.DEVNULL)
        outputs += contents(out) == whole
    left = sorted(path.name for path in root.iterdir())
    click.echo(f"{scheme} {method}: {killed} kills, {outputs} outputs, all byte-identical; left: {', '.join(left)}")
    shutil.rmtree(root)
    sys.exit(0 if left == ["out", "whole"] else 1)


if __name__ == "__main__":
    main()
