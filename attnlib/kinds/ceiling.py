"""Ceilings: what the GPU reaches at best, in the same study as what is judged by it."""

from typing import Any

from ..measure import ceilings
from ..measure.timer import run_timer
from ..measure.trace import trace_kernels
from .base import Subject, timed_fields
from .item import Item


class CeilingSubject(Subject):
    """Measures an item without a case: its `backend` is a name out of `ceilings.CEILINGS`."""

    def measure(self, item: Item) -> dict[str, Any]:
        """Time one ceiling."""
        call, work = ceilings.CEILINGS[item.backend]()
        kernels = trace_kernels(call)
        return timed_fields(run_timer(item.timer)(call), kernels=kernels, work_per_call=work)
