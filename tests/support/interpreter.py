"""Triton's interpreter with less Python around each operation; what it computes is the same."""

import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

check_operands = TritonSemantic.binary_op_type_checking_impl
broadcast_unlike = TritonSemantic.broadcast_impl_value
ONE = tl.tuple([])
INTEGERS = {tl.int1, tl.int32, tl.int64}
blocks = {}


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


def block_of(block, element):
    """A block's type with other elements, made once."""
    key = (element.name, *block.shape)
    if key not in blocks:
        blocks[key] = tl.block_type(element, block.shape)
    return blocks[key]


def constant(value, like):
    shape = tuple(like.type.shape) if like.type.is_block() else 1
    handle = interpreter.TensorHandle(np.full(shape, value, dtype=np.int32), tl.int32)
    return tl.tensor(handle, like.type)


def operands(semantic, left, right, *allowed, **how):
    """Of integers of one dtype, or int32 and a number, there is nothing to check or cast."""
    first, second = (getattr(each, "dtype", type(each)) for each in (left, right))
    if first is second and first in INTEGERS:
        return broadcast(semantic, left, right)
    if first is tl.int32 and second is int and 0 <= right < 2**31:
        return left, constant(right, left)
    if first is int and second is tl.int32 and 0 <= left < 2**31:
        return constant(left, right), right
    return check_operands(semantic, left, right, *allowed, **how)


def broadcast(semantic, left, right):
    left_shape, right_shape = (getattr(each.type, "shape", ONE).values for each in (left, right))
    if left_shape == right_shape:
        return left, right
    return broadcast_unlike(semantic, left, right)


def make_quick(patch):
    """Patch it: the language is replaced once and not per launch and device function."""
    patch.setattr(tl.tensor, "__init__", init_tensor)
    patch.setattr(tl.block_type, "with_element_ty", block_of)
    patch.setattr(tl.block_type, "to_ir", lambda block, builder: block)
    patch.setattr(TritonSemantic, "binary_op_type_checking_impl", operands)
    patch.setattr(TritonSemantic, "broadcast_impl_value", broadcast)
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
