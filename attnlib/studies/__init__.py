"""The studies: what was measured, on which machine. `attnlib measure NAME` repeats one.

Of a retired study only the records are left.

A study is a file: its question, grids and published machine, and the tables and figures made of its
records. `STUDIES` lists them by name.
"""

import importlib
import pkgutil

from ..run.study import Study

FIRST = ("fa3_decode_regression", "auto_resolution", "measurement_trust")
"""Listed before the others: a view shows the regression first."""
NOT_STUDIES = {
    "captured",
    "claims",
    "gains",
    "next_step",
    "upgrade",
    "usual_calls",
    "vllm_steps",
}


_others = {module.name for module in pkgutil.iter_modules(__path__)} - NOT_STUDIES - {*FIRST}
STUDIES: dict[str, Study] = {
    name: importlib.import_module(f"{__name__}.{name}").STUDY for name in (*FIRST, *sorted(_others))
}
"""Every study here, by name."""
PACE = STUDIES["fa3_decode_regression"]
"""Its published records say how long a sweep takes."""
