"""What the compiler says of its own time in this process."""

from __future__ import annotations


def compiler_seconds() -> dict[str, float]:
    """Seconds by the names of torch's own clocks, all graphs together; some contain others."""
    from torch._dynamo.utils import compilation_time_metrics

    return {name: float(sum(times)) for name, times in compilation_time_metrics.items()}
