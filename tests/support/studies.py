"""Small studies of a CPU, and a release's folder as `pip install --target` leaves it."""

from attnlib.core.spec import AttnSpec
from attnlib.run.study import Grid, Study

SPEC = AttnSpec(4, 2, 16, 4)
QUICK_START = "import atexit, gc; gc.set_threshold(100_000); atexit.register(gc.freeze)\n"
"""First in `sitecustomize` of a child: no third of torch's import goes to seeking garbage."""
CPU = {"gpu": "", "gpu_id": "cpu", "cpu": "test64", "cores": 2}


def study_of(*grids, **fields):
    fields = {"name": "demo", "question": "?", "device": "cpu", "ceilings": (), **fields}
    return Study(**fields, grids=grids)


def grid_of(*cases, **fields):
    return Grid(cases, **{"backends": ("sdpa",), "timers": ("host",), **fields})


def hand_made(folder, name, version):
    """`folder`, which now holds a distribution's metadata."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(metadata_of(name, version))
    return folder


def metadata_of(name, version):
    return f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
