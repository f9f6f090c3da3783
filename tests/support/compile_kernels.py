"""Compiles every kernel of core for Hopper, with its own launcher's arguments, where no GPU is.

A script, since Triton's interpreter, in which the tests call kernels on a CPU, takes what the
compiler does not. Prints a line per kernel.
"""

import torch
import triton
from support.metadata_cases import BUILDERS, SCHEDULES, Shape, kv_arguments
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attnlib.core import PlanShape, build_step_schedules
from attnlib.core.fa2 import kernel as fa2
from attnlib.core.fa2.words import WORD, PlanLayout
from attnlib.core.metadata import launch

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {torch.int32: "*i32", torch.int64: "*i64"}


class Compiler:
    """Stands where a launcher has its kernel: compiles a launch in place of making it."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return self.compile

    def compile(self, *values, **options):
        types = {}
        constants = {}
        for place, (parameter, value) in enumerate(zip(self.kernel.params, values, strict=True)):
            fixed = parameter.is_constexpr or value is None
            types[parameter.name] = (
                "constexpr" if fixed else POINTERS.get(getattr(value, "dtype", None), "i32")
            )
            if fixed:
                constants[place,] = value
        source = ASTSource(self.kernel, types, constants, {})
        print(self.kernel.__name__, len(triton.compile(source, HOPPER, options).asm["cubin"]))


def plan_call(page_size, by_table=False, requests=12):
    shape = PlanShape(
        32,
        8,
        128,
        2,
        max_batch_size=requests,
        max_seq_len=4096,
        num_sms=132,
        q_len=3,
    )
    words = torch.zeros(PlanLayout.of(shape).int_bytes // WORD, dtype=torch.int32)
    paged = kv_arguments(Shape(requests, 4096, page_size or 1))
    del paged["max_pages"]
    if not page_size:
        paged = {"seq_lens": paged["seq_lens"]}
    if by_table:
        del paged["req_pool_indices"]
        paged["block_table"] = paged.pop("req_to_token")
    paged["overflow"] = torch.zeros(2, dtype=torch.int32)
    return paged | {"words": words, "shape": shape, "page_size": page_size}


if __name__ == "__main__":
    launch.require_launchable = lambda device: None
    launch.programs_at_once = lambda device: 264
    for builder in BUILDERS.values():
        builder.launcher.kernel = Compiler(builder.launcher.kernel)
        builder.ours(**builder.arguments(builder.small))
    build_step_schedules(**SCHEDULES.arguments(Shape(4, 64, 1)) | {"cu_seqlens_q": None})
    fa2.LAUNCHER.kernel = Compiler(fa2.LAUNCHER.kernel)
    for call in ((0,), (16,), (16, True), (16, True, fa2.FEW + 1)):
        fa2.build_fa2_plan(**plan_call(*call))
