"""Which backend a library picks for an attention call, and why, rule by rule.

`explain` walks the tables of a library's release: FlashInfer's `auto` and how engines call it,
SGLang, mini-sglang, vLLM. `facts` says what a rule may ask, `rules` what a row is, `libraries`
reads the tables, data/rules/*.yaml. Nothing here imports torch.
"""

from .explain import Choice, explain
from .facts import GPUS, MODES, Call, UnknownFactError
from .libraries import LIBRARIES
from .rules import Reason

__all__ = ["GPUS", "LIBRARIES", "MODES", "Call", "Choice", "Reason", "UnknownFactError", "explain"]
