"""Time of collectives, by bytes, group size and where the group lies.

A ring over n ranks moves (n - 1) / n of the bytes in n - 1 hops, and an all-reduce twice that. Ranks along `tensor` are
neighbours, then those along `context`, then the data-parallel ones, then pipeline stages. A group within a domain uses
the links. A group over several domains uses the network, of which each GPU has its own share: its ring crosses a domain
once, so neighbours in one domain add up their shares.
"""

from dataclasses import dataclass

from launch.plan.compute import ELEMENT
from launch.plan.constants import Constants
from launch.plan.machine import Machine
from launch.plan.shapes import Arrangement, ModelShape


@dataclass(frozen=True)
class Links:
    """What joins the ranks of a run, at the speed that collectives reach."""

    machine: Machine
    constants: Constants

    def ring_seconds(self, size: float, group: int, stride: int) -> float:
        """Time of an all-gather or reduce-scatter of `size` bytes in all, over ranks that are `stride` apart."""
        if group <= 1:
            return 0.0
        hops = self.constants.hop_seconds * (1.0 if group * stride <= self.machine.domain else 0.1)
        return (group - 1) / group * size / self.bandwidth(group, stride) + (group - 1) * hops

    def bandwidth(self, group: int, stride: int) -> float:
        """Bytes per second that a rank of the group sends."""
        domain = self.machine.domain
        if group * stride <= domain:
            return self.machine.link_gb_s * 1e9 * self.constants.link_share
        neighbours = max(1, min(domain // stride, group))
        network = self.machine.network_gb_s * 1e9 * self.constants.network_share * neighbours
        return min(network, self.machine.link_gb_s * 1e9 * self.constants.link_share)

    @property
    def network(self) -> float:
        """Bytes per second between two domains for one rank."""
        return self.machine.network_gb_s * 1e9 * self.constants.network_share


@dataclass(frozen=True)
class Exchanges:
    """Seconds of a micro batch's exchanges on one rank, before any of them is hidden."""

    tensor: float
    context: float
    expert: float
    stages: float


def micro_batch_exchanges(model: ModelShape, arrangement: Arrangement, links: Links) -> Exchanges:
    """What the ranks exchange in one micro batch, forward and backward.

    Tensor: a gather and a scatter of the residual stream around each sub-layer (Korthikanti et al. 2022, section
    4.2.2). Context: keys and values of the other ranks. Expert: tokens sent to experts and back."""
    tokens, tensor = arrangement.tokens_of_rank(model), arrangement.tensor
    layers = model.n_layers / arrangement.pipeline
    stream = tokens * model.d_model * ELEMENT
    passes = 3 if arrangement.recomputation == "full" else 2
    ring = links.ring_seconds(stream, tensor, 1)
    kept = 2 * model.n_kv_heads * model.head_dim / tensor * tokens * ELEMENT
    context = (arrangement.context - 1) * kept / links.bandwidth(arrangement.context, tensor)
    stages = 0.0
    if arrangement.pipeline > 1:
        stages = 2 * arrangement.virtual_stages * stream / tensor / links.network
    return Exchanges(
        tensor=passes * layers * 4 * ring,
        context=3 * layers * context if arrangement.context > 1 else 0.0,
        expert=2 * _expert_exchange(model, arrangement, links),
        stages=stages,
    )


def _expert_exchange(model: ModelShape, arrangement: Arrangement, links: Links) -> float:
    """Tokens to experts and back in a forward pass; those within a domain use the links."""
    if model.experts is None or arrangement.expert == 1:
        return 0.0
    copies = arrangement.tokens_of_rank(model) * model.experts.per_token / arrangement.tensor
    size = 2 * copies * model.d_model * ELEMENT * (arrangement.expert - 1) / arrangement.expert
    layers = model.expert_layers / arrangement.pipeline
    domain = links.machine.domain
    if arrangement.expert <= domain:
        return layers * size / links.bandwidth(arrangement.expert, 1)
    return layers * size * (1 - domain / arrangement.expert) / links.network
