"""The import of DeepSpeed for the ZeRO engines, and the one place where its configuration is made."""

import logging
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallel.analysis.formulas import REDUCE_BUCKET
from parallel.config import ParallelConfig
from parallel.errors import LaunchError

VERSION = "0.19"
"""The version whose private attributes `state.py` reads."""


def import_deepspeed(config: ParallelConfig, device: torch.device) -> Any:
    """The package `deepspeed`, set up to use the present process group. Collective.

    Raises LaunchError if the package, its version or the precision is not available."""
    # DeepSpeed uses names of collectives that torch 2.13 deprecates. Users cannot change that.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    os.environ["DS_ACCELERATOR"] = device.type
    try:
        import deepspeed
        from deepspeed.accelerator import get_accelerator
    except ImportError as error:
        raise LaunchError(
            f"parallel.engine {config.engine} needs DeepSpeed {VERSION}, which cannot be imported ({error}); "
            f"`pip install 'deepspeed=={VERSION}.*'`, or set parallel.engine to fsdp2"
        ) from error
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if not deepspeed.__version__.startswith(VERSION + "."):
        raise LaunchError(
            f"parallel.engine {config.engine} needs DeepSpeed {VERSION}, but {deepspeed.__version__} is installed; "
            f"`pip install 'deepspeed=={VERSION}.*'`, or set parallel.engine to fsdp2"
        )
    if config.precision == "fp16" and not get_accelerator().is_fp16_supported():  # pyright: ignore
        raise LaunchError(
            f"parallel.precision fp16 is not supported by DeepSpeed on this {device.type}; "
            "set parallel.precision to bf16, or parallel.engine to fsdp2"
        )
    # Only inference uses the one extension that DeepSpeed looks up here. An own table also spares the test of them all,
    # which needs a compiler and prints `ld: cannot find -laio`.
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}  # pyright: ignore
    if not deepspeed.comm.is_initialized():
        backend = dist.get_default_backend_for_device(device.type)
        deepspeed.init_distributed(backend, verbose=False, auto_mpi_discovery=False)
    return deepspeed


def deepspeed_config(config: ParallelConfig, device: torch.device) -> dict[str, Any]:
    """DeepSpeed's configuration, with its own handling of steps, batches, schedules and checkpoints off or left out."""
    zero: dict[str, Any] = {"stage": int(config.engine.removeprefix("zero"))}
    if config.engine == "zero3":
        zero |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0 if config.reshard_after_forward else 2**60,
            "stage3_max_live_parameters": 2**60,
        }
    elif device.type != "cpu":
        zero["overlap_comm"] = True  # DeepSpeed's default for stage 3 alone
    if config.cpu_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": device.type != "cpu"}
    settings: dict[str, Any] = {
        "zero_optimization": zero,
        # The loop's scale already normalizes by the global batch. These two only satisfy DeepSpeed's checks.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,  # each step sets its own bound
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**62,
    }
    if config.precision != "fp32":
        settings["communication_data_type"] = "fp32"
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if config.precision == "bf16":
        settings["bf16"] = {"enabled": True}
    if config.precision == "fp16":
        settings["fp16"] = {"enabled": True, "loss_scale": 1.0}  # static for DeepSpeed; `LossScaler` adjusts it
    return settings


def bucket_sizes(model: nn.Module) -> dict[str, int]:
    """Bucket sizes in elements. DeepSpeed allocates whole buckets, and its defaults suit billions of parameters."""

    def elements(module: nn.Module) -> int:
        return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in module.parameters())

    return {
        "reduce_bucket_size": min(REDUCE_BUCKET, elements(model)),
        "stage3_prefetch_bucket_size": elements(model.get_submodule("layers.0")),  # the next block
    }
