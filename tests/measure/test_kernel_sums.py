"""Sums of kernels as people paste them, in the real forms; the times are made up."""

import csv
import random
from pathlib import Path

import pytest

from attnlib.measure.kernel_sums import NSYS, TORCH, read_sums

FOLDER = Path(__file__).parent / "pasted"
TABLE = FOLDER / "key_averages.txt"
SUMMARY = FOLDER / "cuda_gpu_kern_sum.csv"


def test_rows_of_the_gpu_are_taken_from_a_table_of_torch_and_no_operator_or_range():
    sums = read_sums(TABLE)
    assert sums.source == TORCH
    found = {kernel.name: (kernel.us, kernel.launches) for kernel in sums.kernels}
    assert found == {
        "FlashAttnFwdSm90": (4800.0, 64),
        "nvjet_tst_128x8_64x12_1x2_h_bz_coopB_TNT": (1200.0, 128),
        "BatchPrefillWithPagedKVCacheKernel": (900.0, 32),
        "Memcpy HtoD": (12.5, 4),
    }
    cut = [kernel.name for kernel in sums.kernels if kernel.is_cut]
    assert cut == ["BatchPrefillWithPagedKVCacheKernel"]


def test_a_summary_of_nsight_systems_is_read_below_what_the_tool_prints_before_it():
    sums = read_sums(SUMMARY)
    assert sums.source == NSYS
    found = [(kernel.name, kernel.us, kernel.launches) for kernel in sums.kernels]
    assert found == [
        ("flash_fwd_splitkv_kernel", 2_110_000.0, 16384),
        ("GemmUniversal", 1_490_000.0, 65536),
        ("flash_fwd_splitkv_combine_kernel", 51_000.5, 16384),
    ]


def nsys_table(text, most=10**6):
    """CSV of nsys stats as the tool prints it without `--format`; longer names are cut."""
    rows = list(filter(None, csv.reader(text.splitlines()[2:])))
    for row in rows[1:]:
        row[1] = f"{int(row[1]):,}"
        if len(row[-1]) > most:
            row[-1] = row[-1][: most - 1] + "\N{HORIZONTAL ELLIPSIS}"
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * width for width in widths]
    lines = [" ** CUDA GPU Kernel Summary (cuda_gpu_kern_sum):", ""]
    for row in (rows[0], rule, *rows[1:]):
        cells = [cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        lines.append(" " + "  ".join([*cells, row[-1]]))
    return "\n".join([*lines, "", " ** CUDA GPU MemOps Summary (by Time):", ""])


def test_the_table_that_nsight_systems_prints_is_read_as_its_csv(tmp_path):
    path = tmp_path / "summary.txt"
    path.write_text(nsys_table(SUMMARY.read_text()))
    sums = read_sums(path)
    assert (sums.source, sums.kernels) == (NSYS, read_sums(SUMMARY).kernels)
    path.write_text(nsys_table(SUMMARY.read_text(), most=60))
    cut = read_sums(path).kernels
    assert [(k.name, k.is_cut) for k in cut] == [
        ("flash_fwd_splitkv_kernel", True),
        ("device_kernel", True),
        ("flash_fwd_splitkv_combine_kernel", True),
    ]
    path.write_text(nsys_table(SUMMARY.read_text()).replace("65536", "many"))
    with pytest.raises(ValueError, match="must have numbers in Instances, it has 'many'"):
        read_sums(path)


@pytest.mark.parametrize("text", ["", "nothing of the kind", "----  ----\nNom  Zeit\n", '{"a": 1}'])
def test_another_text_is_none(text, tmp_path):
    (tmp_path / "other").write_text(text)
    assert read_sums(tmp_path / "other") is None


@pytest.mark.parametrize(
    "source, old, new, words",
    [
        (TABLE, "900.000us", "nan", "must have times in Self CUDA"),
        (TABLE, "        64  ", "  sixtyfour  ", "must have numbers in # of Calls"),
        (TABLE, "   Self CUDA  ", "   Self TPU   ", "must have columns Name, Self CPU"),
        (SUMMARY, "2110000000", "2110000000e9", "must have numbers in Total Time"),
        (SUMMARY, ",65536,", ",,", "must have numbers in Instances"),
    ],
)
def test_a_wrong_field_is_one_line_that_names_it(source, old, new, words, tmp_path):
    text = source.read_text()
    assert old in text
    path = tmp_path / "spoiled.txt"
    path.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=words) as error:
        read_sums(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_table_without_the_gpu_and_one_without_end_are_refused(tmp_path):
    lines = TABLE.read_text().splitlines(keepends=True)
    of_cpu = [line for line in lines if "aten::" in line or "--" in line or "Name" in line]
    path = tmp_path / "text"
    path.write_text("".join(of_cpu))
    with pytest.raises(ValueError, match="no kernel of a GPU"):
        read_sums(path)
    path.write_text("".join(lines) + "x" * (1 << 24))
    with pytest.raises(ValueError, match="at most 16 MiB"):
        read_sums(path)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("source", [TABLE, SUMMARY])
def test_a_spoiled_text_is_read_or_refused_in_one_line(source, seed, tmp_path):
    pick = random.Random(seed)
    data = bytearray(source.read_bytes())
    for _ in range(20):
        data[pick.randrange(len(data))] = pick.randrange(256)
    path = tmp_path / "text"
    path.write_bytes(bytes(data[: pick.randrange(len(data))]))
    try:
        read_sums(path)
    except ValueError as error:
        assert str(path) in str(error)
        assert len(str(error).splitlines()) == 1
