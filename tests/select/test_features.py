"""The feature table: current, complete, and honest about what was measured."""

import pytest

from attnlib.run import store
from attnlib.select import LIBRARIES, features
from attnlib.studies import STUDIES

LINES = [*features.PATH.read_text().splitlines(), ""]


def rows_of(heading):
    """Cells of the table below a heading, without its head."""
    start = LINES.index(heading) + 2
    stop = next(i for i in range(start, len(LINES)) if not LINES[i].startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in LINES[start:stop]][2:]


def test_the_committed_table_is_current():
    assert features.PATH.read_text() == features.markdown(), "run: python -m attnlib features"


def test_every_mode_of_a_library_has_its_place():
    for library in LIBRARIES.values():
        named = " ".join(line for line in LINES if line.startswith(f"### {library.name}: "))
        assert all(mode in named for mode in library.modes)


def test_the_affected_releases_stand_out_in_one_column():
    rows = rows_of("### flashinfer: decode")
    (bad,) = [row for row in rows if row[:2] == ["bf16", "0.6.0 to 0.6.3"]]
    assert bad[2:8] == ["fa2", "fa2", "fa3", "fa2", "fa2", "fa2"]


def test_every_note_is_used_and_every_used_note_is_there():
    told = {n for n in (line.split(". ")[0] for line in LINES) if n.isdigit()}
    headings = [line for line in LINES if line.startswith("### ") and "==" not in line]
    used = {n for heading in headings for row in rows_of(heading) for n in row[-1].split(", ")}
    assert used == told


def test_what_only_blackwell_runs_is_marked_as_not_measured():
    rows = rows_of("### vllm==0.33.0: sparse_mla")
    marked = {row[0] for row in rows if row[-1] == "**not measured here**"}
    assert "FLASHINFER_MLA_SPARSE" in marked
    assert all(("sm90" in row[1]) != (row[0] in marked) for row in rows)


def timed_in(study):
    frame = store.load(study, STUDIES[study].reference_machine)
    ours = frame[frame.backend.str.startswith("flashinfer") & (frame.status == "ok")]
    family = ours.kernel_family.str.removeprefix("mla-")
    return ours.assign(timed=[*zip(family, ours.gpu.str.split().str[1], strict=True)])


@pytest.mark.usefixtures("published_records")
def test_what_the_table_calls_measured_is_on_record():
    decode, extend, latent, rivals = map(
        timed_in, ("fa3_decode_regression", "engine_modes", "sparse_mla", "xqa_rivals")
    )
    modes = {"decode": decode, **dict(list(extend.groupby("mode")))}
    modes |= {"mla": latent[latent.top_k == 0], "sparse_mla": latent[latent.top_k > 0]}
    found = {mode: dict(rows.timed.unique()) for mode, rows in modes.items()}
    # XQA is a function of FlashInfer's, no backend of its wrapper.
    found["decode"] |= {n: gpu for n, gpu in rivals.timed if n not in (*found["decode"], "xqa")}
    assert found == {mode: names for (_, mode), names in features.MEASURED.items()}
