"""Made-up records for the explorer's tests: a study of a model, on a GPU that does not exist."""

from attnlib.core import AttnSpec, MlaSpec
from attnlib.lab import source
from attnlib.measure.calls.decode.case import DecodeCase
from attnlib.measure.calls.form import Item
from attnlib.measure.calls.mla.case import MlaCase
from attnlib.run import store, study
from attnlib.run.study import Grid, Study

FA2 = "flashinfer-fa2"
FA3 = "flashinfer-fa3"
MLA_FA2 = "flashinfer-mla-fa2"
DENSE = "flashmla-dense"
QWEN = DecodeCase(AttnSpec(16, 8, 128, 16), batch_size=16, kv_len=8192)
LATENT = MlaCase(MlaSpec(128), batch_size=16, kv_len=8192)
GPU = {"gpu": "Test GPU", "gpu_id": "0badcafe", "num_sms": 4, "compute_capability": "9.0"}
GPU |= {"l2_mib": 60.0, "power_limit_w": 700}
MACHINE = "test-gpu-0badcafe"
COPY_BYTES = 4e9
MATMUL_FLOPS = 7e11
"""Work of a ceiling of 1,000 us: 4,000 GB/s and 700 TFLOP/s."""


def publish(patch, name, *cases, backends):
    """Put a study of these cases, published from the test GPU, in place of ours."""
    made = Study(name, "?", (Grid(cases, backends),), reference_machine=MACHINE)
    patch.setattr(source, "STUDIES", {name: made})


def keep(make, study, item, us, **fields):
    """Store a record of `us` microseconds; `fields` as those of a Record."""
    times = {"run_us": (us,)} if fields.get("status", "ok") == "ok" else {}
    store.keep(
        make(
            **{
                "study": study,
                "item": item,
                "machine": GPU,
                **times,
                **fields,
            }
        )
    )


def keep_ceilings(make, study):
    """Store a copy and a matmul ceiling."""
    for name, work in (("copy", COPY_BYTES), ("matmul", MATMUL_FLOPS)):
        keep(make, study, Item(name, "graph"), 1000.0, work_per_call=work)


def timed(backend, case, release="0.6.3"):
    return Item(backend, "graph", case, release)


def go_live(patch, machine=GPU, device="cuda", ceilings=("copy", "matmul")):
    """Live mode on the test GPU; `instant_jobs` stands in for its workers."""
    patch.setattr(source, "mode", lambda: "live")
    patch.setattr(source, "DEVICE", device)
    patch.setattr(source, "CEILINGS", ceilings)
    for module in (source, study):
        patch.setattr(module, "describe", lambda device: machine)
