"""The process of an engine: one JSON line per case in, one JSON line out.

python -m attnlib.kinds.engine SETUP.json     (started by `measure`, not by hand)
"""

import json
import os
import sys
from pathlib import Path

from .serve import Offline, Steps


def main(path: Path) -> None:
    """Serve until stdin ends; an exception ends the process."""
    setup = json.loads(path.read_text())
    # SGLang prints: its output goes to stderr, our answers to where stdout was.
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        engine = Steps(setup) if setup["driver"] == "steps" else Offline(setup)
        answers.write('{"ready": true}\n')
        for line in sys.stdin:
            answers.write(json.dumps(engine.measure(json.loads(line))) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
