"""Architectures that the table does not have: is what looks like a linear one?

Names and shapes are all that headers tell, and they lie about GPT-2, whose weights are stored the other way round. The
skeleton that transformers builds from the config knows.
"""

from __future__ import annotations

from ...formats.errors import InputError
from .plan import Plan


def check_modules(plan: Plan, trust_remote_code: bool) -> None:
    """Raise InputError for a linear of an unknown architecture that is none in the model, or has another shape there.

    Does nothing for the architectures of the table, and so imports no model for them.
    """
    if plan.architecture.known:
        return
    from torch import nn

    from ...kernels.names import names_of
    from ...kernels.skeleton import empty_model, read_config

    config = read_config(plan.checkpoint.directory, trust_remote_code=trust_remote_code)
    dtype = plan.checkpoint.tensors[plan.quantized[0].source].dtype
    model = empty_model(config, dtype, trust_remote_code=trust_remote_code)
    for layer in plan.quantized:
        path = names_of(model).path(layer.source)
        module = None if path is None else model.get_submodule(path.rpartition(".")[0])
        if not isinstance(module, nn.Linear):
            kind = "no module" if module is None else f"a {type(module).__name__}"
            raise InputError(layer.name, f"is {kind} in this architecture and no linear", "leave it out with --ignore")
        shape = (module.out_features, module.in_features)
        if shape != layer.shape:
            cause = f"is {list(layer.shape)} where config.json asks for {list(shape)}"
            raise InputError(layer.name, cause, "correct config.json, or the checkpoint")
