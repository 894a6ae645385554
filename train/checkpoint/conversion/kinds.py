"""The layouts to which `keepstep checkpoint convert` writes. No torch, so that the command line answers fast."""

KINDS = {
    "dcp": "a folder of torch.distributed.checkpoint: weights and the optimizer's state",
    "deepspeed-universal": "a universal folder of DeepSpeed: fp32 weights and Adam's moments",
}
"""Summary of each layout, by its name on the command line."""
