"""What `diagnose` can recognise, as a table."""

import pandas as pd

from .patterns import PATTERNS
from .trace_known import fixes_of


def known_patterns() -> pd.DataFrame:
    """The patterns that `attnlib.diagnose` looks for in a trace, and what to do about each.

    Returns
    -------
    pandas.DataFrame
        A row per pattern, in the order in which a diagnosis shows them: `pattern` and `fix`.

    Raises
    ------
    ValueError
        For a mistake in data/patterns.yaml.

    Examples
    --------
    >>> import attnlib
    >>> attnlib.known_patterns().pattern[0]
    'fa3 of FlashInfer decodes'
    """
    rows = []
    for pattern in PATTERNS:
        rows.append((pattern.name, pattern.fix or fixes_of(pattern.known)))
    return pd.DataFrame(rows, columns=["pattern", "fix"])
