"""The constants that no formula gives: efficiencies and overlaps, fitted on published speeds.

`python -m bench.planning --fit` fits them on runs published before a date; docs/planning.md shows the error of every
row, older and newer. No constant belongs to a model, a system or a row.
"""

import functools
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field

FILE = Path(__file__).with_name("constants.yaml")


class Generation(BaseModel):
    """How close a generation of GPUs comes to what it can do."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bf16: float = Field(gt=0)
    """Speed of a large bf16 product in training, as a share of the fastest product measured alone."""
    fp8: float = Field(gt=0)
    """The same in fp8 with one scale per tensor."""
    mxfp8: float = Field(gt=0)
    """The same in fp8 with one scale per block of 32."""
    nvfp4: float = Field(gt=0)
    """The same in fp4."""
    attention: float = Field(gt=0)
    """Speed of fused attention, causal FLOP, as a share of the fastest bf16 product."""


class Constants(BaseModel):
    """Constants of the model of time."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ampere: Generation
    hopper: Generation
    blackwell: Generation
    other: Generation
    """Used for GPUs of no known generation."""
    measured: Generation = Generation(bf16=1, fp8=1, mxfp8=1, nvfp4=1, attention=0.5)
    """Used for a machine whose products were measured."""
    half_tokens: float = Field(gt=0)
    """Tokens of a product at which it runs at half of its speed."""
    elementwise_passes: float = Field(gt=0)
    """Times that the forward pass of a block reads or writes its activations outside of products."""
    block_seconds: float = Field(ge=0)
    """Time of a block's forward pass that does not shrink with its size: launches of kernels."""
    expert_passes: float = Field(gt=0)
    """Times that routing reads or writes the tokens sent to experts."""
    tensor_exposed: float = Field(ge=0)
    """Share of tensor parallelism's exchanges that no computation hides."""
    context_exposed: float = Field(ge=0)
    """The same for context parallelism."""
    expert_exposed: float = Field(ge=0)
    """The same for expert parallelism."""
    stage_exposed: float = Field(ge=0)
    """The same for what pipeline stages send each other."""
    gradient_exposed: float = Field(ge=0)
    """The same for gradients and weights that are exchanged once a step."""
    shard_slowdown: float = Field(ge=0)
    """Part of the time of gathering and scattering sharded weights that is added to the computation beside it."""
    bubble: float = Field(gt=0)
    """Length of the pipeline's bubble, as a share of the formula's."""
    link_share: float = Field(gt=0)
    """Share of a link's bandwidth that collectives reach within a domain."""
    network_share: float = Field(gt=0)
    """Share of the network's bandwidth that collectives reach between domains."""
    hop_seconds: float = Field(ge=0)
    """Time of one hop of a ring."""
    optimizer_passes: float = Field(gt=0)
    """Time of an optimizer step, as a multiple of reading and writing its 28 bytes per parameter."""
    step_seconds: float = Field(ge=0)
    """Time of a step that depends on nothing."""

    def of(self, generation: str) -> Generation:
        """The constants of a generation."""
        return getattr(self, generation)


@functools.cache
def read_constants() -> Constants:
    """The fitted constants."""
    return Constants.model_validate(yaml.safe_load(FILE.read_text("utf-8")))
