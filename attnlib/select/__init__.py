"""Which backend a library picks for an attention call, and why, rule by rule.

`facts` says what a rule may ask, `rules` what a row is, `libraries` reads the tables of each
library's releases, data/rules/*.yaml, and `explain` walks them.
"""

from .explain import Choice, explain
from .facts import GPUS, MODES, Call
from .libraries import LIBRARIES

__all__ = ["GPUS", "LIBRARIES", "MODES", "Call", "Choice", "explain"]
