"""Plain names of parameters, without the parts that torch.compile, DDP and activation checkpointing add."""

WRAPPERS = frozenset({"_orig_mod", "module", "_checkpoint_wrapped_module"})


def plain_name(name: str) -> str:
    """The plain name: `module.layers.0._checkpoint_wrapped_module.mlp.up.weight` gives `layers.0.mlp.up.weight`."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
