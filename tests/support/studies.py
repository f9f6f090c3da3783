"""Small studies of a CPU, and a release's folder as `pip install --target` leaves it."""

from attnlib.core import AttnSpec
from attnlib.run.study import Grid, Study

SPEC = AttnSpec(4, 2, 16, 4)
QUICK_START = "import atexit, gc; gc.set_threshold(100_000); atexit.register(gc.freeze)\n"
"""First in `sitecustomize` of a child: no third of torch's import goes to seeking garbage."""
INSTANT = f"""{QUICK_START}
from attnlib.measure.calls import cases
from attnlib.measure import machine

class Instant:
    def measure(self, item):
        asked_of(item.case.spec)
        return {{"status": "ok", "run_us": (9.0,), "oracle_error": 0.0, "oracle_budget": 1.0}}

asked_of = lambda spec: None
cases.subject_class = lambda case: lambda bench: Instant()
machine.describe_versions = lambda names: {{}}
"""
"""More of it where processes are tested, not what they measure: no worker imports torch. What comes
after may set `asked_of`. `test_study` and `test_widgets` measure in real workers."""
CPU = {"gpu": "", "gpu_id": "cpu", "cpu": "test64", "cores": 2}


def study_of(*grids, **fields):
    fields = {"name": "demo", "question": "?", "device": "cpu", "ceilings": (), **fields}
    return Study(**fields, grids=grids)


def grid_of(*cases, **fields):
    return Grid(
        cases,
        **{
            "backends": ("sdpa",),
            "timers": ("host",),
            **fields,
        },
    )


def hand_made(folder, name, version):
    """`folder`, which now holds a distribution's metadata."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(metadata_of(name, version))
    return folder


def metadata_of(name, version):
    return f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
