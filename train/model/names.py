"""A parameter's plain name: without what torch.compile, DDP and activation checkpointing put into it."""

WRAPPERS = frozenset({"_orig_mod", "module", "_checkpoint_wrapped_module"})


def plain_name(name: str) -> str:
    """`module.layers.0._checkpoint_wrapped_module.mlp.up.weight` is `layers.0.mlp.up.weight`."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
