"""`transform_config`: which linears turn their inputs by a block Hadamard matrix before anything else.

In the vocabulary of compressed-tensors (`transform/` there). Only what is left to do at run time is written, the
transform of the inputs: that of the weights is in the codes already, and a reader that applied it would do it twice.
The matrix is Sylvester's and known from its order, so no tensor is stored for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from . import targets
from .errors import InputError
from .scheme import Scheme

KIND = "hadamard"
ONLINE, OFFLINE = "input", "weight_input"
PRECISION = "torch.float32"
_SOURCE = "quantization_config transform_config"
_UNREAD = "use a checkpoint with block Hadamard rotations of inputs only"


def build_transforms(schemes: Mapping[str, Scheme], ignored: Sequence[str]) -> dict[str, object]:
    """The `transform_config` of a model whose linears are stored under `schemes`; empty where none is rotated.

    `ignored` names the linears that stay plain. One block size for all quantised linears is one group with the target
    Linear; several are told apart by exact names and patterns.
    """
    members: dict[int | None, list[str]] = {}
    for name, scheme in schemes.items():
        members.setdefault(scheme.rotation, []).append(name)
    plain = [*members.pop(None, []), *ignored]
    if not members:
        return {}
    blocks = [block for block in members if block is not None]
    alone = len(blocks) == 1 and len(members[blocks[0]]) == len(schemes)
    named = [[targets.LINEAR]] if alone else targets.written([members[block] for block in blocks], plain)
    left_out = list(ignored) if alone else []
    return {
        "config_groups": {
            f"{KIND}_{block}": _group(block, names, left_out) for block, names in zip(blocks, named, strict=True)
        }
    }


def _group(block: int, names: Sequence[str], ignored: Sequence[str]) -> dict[str, object]:
    where = {"targets": list(names), "location": ONLINE, "inverse": False, "ignore": list(ignored)}
    return {
        "type": KIND,
        "apply": [where],
        "randomize": False,
        "requires_grad": False,
        "head_dim": block,
        "precision": PRECISION,
    }


def parse_transforms(config: object, linears: Iterable[str]) -> dict[str, int]:
    """Which of `linears` turns its inputs, and in blocks of how many.

    `config` is the mapping under `transform_config`, or nothing. Raises InputError for any other transform: another
    kind or place, a random matrix, one as large as the width, another precision, two on one linear.
    """
    found: dict[str, int] = {}
    names = list(linears)
    for key, group in _mapping(_mapping(config, "").get("config_groups"), "config_groups").items():
        content = _mapping(group, str(key))
        block = _block(content, str(key))
        for where in _list(content.get("apply"), str(key)):
            place = _mapping(where, str(key))
            if place.get("location") == OFFLINE:  # folded into the codes by whoever wrote them
                continue
            if place.get("location") != ONLINE:
                raise InputError(f"{_SOURCE} {key}", f"location '{place.get('location')}' is not read", _UNREAD)
            wanted = dict.fromkeys(_texts(place.get("targets"), str(key)), block)
            for name in targets.matched(wanted, _texts(place.get("ignore"), str(key)), names):
                if name in found:
                    raise InputError(f"{_SOURCE} {key}", f"turns the inputs of {name} a second time", _UNREAD)
                found[name] = block
    return found


def _block(group: Mapping[str, object], key: str) -> int:
    """The order of the matrix. Raises InputError for anything but Sylvester's in blocks and float32."""
    block = group.get("head_dim")
    if group.get("type") != KIND or group.get("randomize"):
        raise InputError(f"{_SOURCE} {key}", "asks for another transform than the Hadamard matrix", _UNREAD)
    if not isinstance(block, int) or block < 2 or block & (block - 1):
        raise InputError(f"{_SOURCE} {key}", f"head_dim {block!r} is no block size", _UNREAD)
    precision = str(group.get("precision") or PRECISION).removeprefix("torch.")
    if precision != PRECISION.removeprefix("torch."):
        raise InputError(f"{_SOURCE} {key}", f"computes in {precision}, which is not read", _UNREAD)
    return block


def _mapping(value: object, place: str) -> Mapping[str, object]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InputError(f"{_SOURCE} {place}".strip(), "is not a mapping", _UNREAD)
    return value


def _list(value: object, place: str) -> list[object]:
    if not isinstance(value, list):
        raise InputError(f"{_SOURCE} {place}", "lists no places to apply it", _UNREAD)
    return value


def _texts(value: object, place: str) -> list[str]:
    """A list of names; a single one may stand alone, as compressed-tensors allows."""
    found = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise InputError(f"{_SOURCE} {place}", "holds something that is no list of names", _UNREAD)
    return found
