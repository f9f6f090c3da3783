"""Arms of SGLang's plugin that lie in CUDA graphs, side by side in one process."""

from typing import Any

from .arms import STATE
from .sglang import use
from .sglang_hooks import pin_decode


class GraphSets:
    """CUDA graphs of one model under several arms of schedule and decode, in one process.

    Of SGLang's ModelRunner, whose graphs have been captured under the arms that are set now. They
    share one pool of memory, as its graphs of several batch sizes do: replay one at a time.
    """

    def __init__(self, model: Any) -> None:
        self.model, self._own = model, dict(vars(model.attn_backend))
        self._sets = {self._key(): (model.graph_runner, self._own)}

    def use(self, **arms: str) -> None:
        """As `sglang.use`; what no set of graphs has been captured under yet is captured."""
        use(**arms)
        backend = self.model.attn_backend
        if (key := self._key()) not in self._sets:
            vars(backend).update(self._own, decode_cuda_graph_metadata={})
            if "decode" in STATE.arms:
                pin_decode(None, backend, self.model)
            runner = type(self.model.graph_runner)(self.model)
            self._sets[key] = runner, dict(vars(backend))
        self.model.graph_runner, held = self._sets[key]
        vars(backend).update(held)

    def _key(self) -> tuple[str | None, ...]:
        return STATE.arms.get("schedule"), STATE.arms.get("decode")
