"""What this machine can do: versions, devices, the kernel each packing would run on and why not a faster one.

Everything is looked up, nothing is changed, and a missing piece is a line in the answer, never an error: this is what
people run when something else has already gone wrong.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

from ... import __version__
from .peers import PEERS, notes

DISTRIBUTION = "compress-llm"
USUAL_SHAPE = (4096, 4096)


@dataclass(frozen=True)
class Package:
    """A distribution: the installed version (None: missing), the range we need ("" for an optional one)."""

    name: str
    installed: str | None
    needed: str
    fits: bool


@dataclass(frozen=True)
class Machine:
    """Cores that this process may use, memory in bytes, and what torch sees; None where it cannot be known."""

    system: str
    processor: str
    cores: int
    memory_bytes: int | None
    torch_threads: int | None
    cpu_capability: str | None
    gpus: list[str]
    cuda: str | None


@dataclass(frozen=True)
class Kernel:
    """The implementation that runs a scheme here and why, and for each other one why it does not."""

    scheme: str
    packing: str
    picked: str
    reason: str
    others: dict[str, str]


@dataclass(frozen=True)
class Diagnosis:
    """The report of `compress doctor`. `problems` need mending, `notes` are good to know."""

    compress: str
    python: str
    packages: list[Package]
    machine: Machine
    kernels: list[Kernel]
    problems: list[str]
    notes: list[str]


def diagnose() -> Diagnosis:
    """Look at this machine and this environment."""
    packages = [*_needed(requires(DISTRIBUTION) or [] if _version(DISTRIBUTION) else []), *_optional()]
    problems = [
        f"{item.name} {f'{item.installed} does not fit' if item.installed else 'is missing'}; "
        f"run: python -m pip install '{item.name}{item.needed}'"
        for item in packages
        if not item.fits
    ]
    has_torch = find_spec("torch") is not None
    kernels, faults = _kernels() if has_torch else ([], [])
    return Diagnosis(
        compress=__version__,
        python=platform.python_version(),
        packages=packages,
        machine=_machine(has_torch),
        kernels=kernels,
        problems=problems + faults,
        notes=notes(_version) if has_torch else [],
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _needed(lines: Iterable[str]) -> Iterable[Package]:
    for requirement in map(Requirement, lines):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        installed = _version(requirement.name)
        fits = installed is not None and requirement.specifier.contains(installed, prereleases=True)
        yield Package(requirement.name, installed, str(requirement.specifier), fits)


def _optional() -> Iterable[Package]:
    for name in PEERS:
        yield Package(name, _version(name), "", fits=True)


def _machine(has_torch: bool) -> Machine:
    threads, capability, gpus, cuda = _torch_view() if has_torch else (None, None, [], None)
    affinity = getattr(os, "sched_getaffinity", None)
    return Machine(
        system=platform.platform(),
        processor=_processor(),
        cores=len(affinity(0)) if affinity else os.cpu_count() or 1,
        memory_bytes=_memory_bytes(),
        torch_threads=threads,
        cpu_capability=capability,
        gpus=gpus,
        cuda=cuda,
    )


def _torch_view() -> tuple[int, str, list[str], str | None]:
    import torch

    seen = range(torch.cuda.device_count()) if torch.cuda.is_available() else range(0)
    gpus = []
    for index in seen:
        about = torch.cuda.get_device_properties(index)
        gpus.append(f"{about.name}, sm_{about.major}{about.minor}, {about.total_memory / 1e9:.0f} GB")
    return torch.get_num_threads(), torch.backends.cpu.get_cpu_capability(), gpus, torch.version.cuda


def _processor() -> str:
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text(encoding="utf-8", errors="replace").splitlines() if listing.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    if not {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= set(getattr(os, "sysconf_names", ())):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _kernels() -> tuple[list[Kernel], list[str]]:
    """What a product with one token and a weight of usual size runs on, a row a scheme; and what keeps it unknown."""
    import torch

    from ...formats.errors import InputError
    from ...formats.scheme import SCHEMES
    from ...kernels.lowbit import packed
    from ...kernels.sparse import product
    from ...kernels.sparse_linear import fits

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows, faults = [], {}
    for name, scheme in SCHEMES.items():
        try:
            if fits(scheme):
                pick = product.pick_for(USUAL_SHAPE, 1, torch.bfloat16, device)
            else:
                pick = packed.pick_for(scheme, USUAL_SHAPE, 1, torch.bfloat16, device)
        except InputError as error:
            faults[str(error)] = None
            continue
        rows.append(Kernel(name, scheme.packing, pick.name, pick.reason, dict(pick.others)))
    return rows, list(faults)
