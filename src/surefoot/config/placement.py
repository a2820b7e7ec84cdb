"""`placement`: where the models run. `local` is one process; everything else is Ray's."""

from __future__ import annotations

from .base import Positive, Section


class ParallelConfig(Section):
    """How each trained model is split over the processes of its pool (FSDP2)."""

    replicate: Positive = 1
    """HSDP: how many whole copies the shares make together. Gradients are summed over them; weights are gathered
    within one only."""
    sequence: Positive = 1
    """Ulysses sequence parallelism: so many processes share each packed row's tokens. For long rows."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer on the CPU, and bring each layer to the GPU while it computes."""
