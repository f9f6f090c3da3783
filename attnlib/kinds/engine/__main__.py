"""An engine's process: a JSON line a case in, a JSON line out.

python -m attnlib.kinds.engine SETUP.json     (started by `measure`, not by hand)
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from .batching import Batching
from .serve import Offline, Steps

DRIVERS: dict[str, Any] = {"steps": Steps, "offline": Offline, "batching": Batching}


def main(path: Path) -> None:
    """Serve until stdin ends; what goes wrong is raised, and ends the process."""
    setup = json.loads(path.read_text())
    # SGLang prints: what it says goes to stderr, and answers where stdout was.
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        engine = DRIVERS[setup["driver"]](setup)
        answers.write('{"ready": true}\n')
        for line in sys.stdin:
            answers.write(json.dumps(engine.measure(json.loads(line))) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
