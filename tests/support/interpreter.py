"""Triton's interpreter with less Python around each operation; what it computes is the same."""

import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

check, broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value


def reduced(reduction, given):
    """`tl.reduce` of 1-D tensors: halves combined as whole vectors, not element by element."""
    values, made = given, reduction.to_tensor
    while size := len(values[0].handle.data) // 2:
        first = (made(each.handle.data[:size], each.dtype) for each in values)
        second = (made(each.handle.data[size:], each.dtype) for each in values)
        values = reduction.combine_fn.fn(*first, *second)
    return [made(each.handle.data[0], each.dtype) for each in values]


@cache
def sizes_of(shape):
    """What a tensor says of its shape, made once per shape and not per tensor."""
    return tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))


def init_tensor(tensor, handle, of):
    tensor.handle, tensor.type, tensor.dtype = handle, of, of.scalar
    tensor.shape, tensor.numel = sizes_of(tuple(of.shape) if of.is_block() else ())


def operands(semantic, left, right, *allowed, **how):
    """Of int32 tensors of one shape, or of one and a number, there is nothing to check or cast."""
    first, second = (getattr(each, "dtype", type(each)) for each in (left, right))
    if first is tl.int32 and second is int and 0 <= right < 2**31:
        data = np.full(left.handle.data.shape, right, dtype=np.int32)
        right, second = tl.tensor(interpreter.TensorHandle(data, tl.int32), left.type), tl.int32
    if first is second is tl.int32 and left.shape is right.shape:
        return left, right
    return check(semantic, left, right, *allowed, **how)


def make_quick(patch):
    """Patch it: the language is replaced once and not per launch and device function."""
    patch.setattr(tl.tensor, "__init__", init_tensor)
    patch.setattr(tl.block_type, "to_ir", lambda block, builder: block)
    patch.setattr(TritonSemantic, "binary_op_type_checking_impl", operands)
    patch.setattr(
        TritonSemantic,
        "broadcast_impl_value",
        lambda language, left, right: (
            (left, right) if left.shape is right.shape else broadcast(language, left, right)
        ),
    )
    # Without `debug` it computes whether each sum overflows, and drops the answer.
    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    patch.setattr(interpreter.interpreter_builder, "options", options)
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    patch.setattr(interpreter, "_patch_lang", lambda _: SimpleNamespace(restore=lambda: None))
    of_scalar = cache(interpreter._get_np_dtype)

    def numpy_dtype(of):
        return np.dtype(np.uint64) if of.scalar.is_ptr() else of_scalar(of.scalar)

    patch.setattr(interpreter, "_get_np_dtype", numpy_dtype)
    patch.setattr(interpreter.ReduceOps, "generic_reduce", reduced)
