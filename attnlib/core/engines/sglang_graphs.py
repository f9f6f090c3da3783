"""Arms of the SGLang plugin that are captured in CUDA graphs, side by side in one process."""

from typing import Any

from .arms import STATE
from .sglang import use
from .sglang_hooks import pin_decode


class GraphSets:
    """CUDA graphs of one model under several arms of schedule and decode, in one process.

    `model` is SGLang's ModelRunner; its graphs were captured under the arms that are set now. All
    sets share one memory pool, as SGLang's graphs of several batch sizes do: replay one at a time.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._at_start = dict(vars(model.attn_backend))
        self._sets = {self._key(): (model.graph_runner, self._at_start)}

    def use(self, **arms: str) -> None:
        """As `sglang.use`; captures the graphs of arms that have none yet."""
        use(**arms)
        backend = self.model.attn_backend
        key = self._key()
        if key not in self._sets:
            vars(backend).update(self._at_start, decode_cuda_graph_metadata={})
            if "decode" in STATE.arms:
                pin_decode(None, backend, self.model)
            runner = type(self.model.graph_runner)(self.model)
            self._sets[key] = (runner, dict(vars(backend)))
        self.model.graph_runner, attributes = self._sets[key]
        vars(backend).update(attributes)

    def _key(self) -> tuple[str | None, str | None]:
        return STATE.arms.get("schedule"), STATE.arms.get("decode")
