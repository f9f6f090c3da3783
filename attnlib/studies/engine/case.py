"""A model's decode steps inside SGLang: the case of published records. Nothing measures it now.

| driver | a step is |
|---|---|
| `steps` | one of SGLang's runner of one batch, synchronous |
| `offline` | one of SGLang's `Engine`, which schedules ahead: a mean over `output_len` steps |

| timer | what it timed |
|---|---|
| `host` | a whole step; of the driver `steps` one at a time, the host's time included |
| `ahead` | the GPU from step to step, while the host ran ahead of it |
| `profiler` | the kernels of one step |

A record's backend is an arm: SGLang with one variable of our plugin (`engines.sglang`).
"""

from dataclasses import dataclass
from typing import ClassVar, Self

from ...core.call_text import CallText, Lens
from ...measure.calls.form import NamedCase, later


@dataclass(frozen=True)
class EngineCase(NamedCase):
    """`output_len` decode steps of `model` for requests that hold tokens already.

    `kv_len` is the longest request's, the others' follow from `lengths`
    (`measure.calls.lengths`). A `tp` above 1 splits the model over as many GPUs of one machine; a
    `dp` above 1 makes groups of them, each of which attends for requests of its own. `context` is
    the longest request that SGLang was started for (`--context-length`); 0: the driver's own.
    """

    kind: ClassVar = "engine"
    words: ClassVar = (
        "mode",
        "model",
        "tp",
        "dp",
        "lens",
        "seed",
        "context",
    )
    own_words: ClassVar = ("driver", "output_len")
    keeps_samples: ClassVar = True
    model: str
    batch_size: int
    kv_len: int
    output_len: int = 64
    driver: str = "steps"
    tp: int = 1
    lengths: str = "fixed"
    seed: int = 0
    dp: int = later(1)
    context: int = later(0)

    @property
    def said(self) -> CallText:
        """What its text says."""
        return CallText(
            mode=self.kind,
            own=(("driver", self.driver), ("output_len", self.output_len)),
            model=self.model,
            tp=self.tp if self.tp > 1 else None,
            dp=self.dp if self.dp > 1 else None,
            lens=Lens(self.batch_size, self.kv_len, self.lengths),
            seed=self.seed or None,
            context=self.context or None,
        )

    @classmethod
    def from_said(cls, said: CallText) -> Self:
        """Inverse of `said`."""
        return cls(
            model=said.required("model"),
            **said.required("lens").fields,
            output_len=said.required("output_len"),
            driver=said.required("driver"),
            tp=said.tp or 1,
            seed=said.seed or 0,
            dp=said.dp or 1,
            context=said.context or 0,
        )
