"""Intrinsics that Python lacks: addresses, bits, fused multiply-add, and the denormal flags.

An address is an int64; memory is read through a typed pointer made from it. Bounds are not checked
here: shapes are checked before a call is made.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

# Any: a type checker would miss the first argument, which numba adds.
intrinsic: Any = extending.intrinsic

# Flush denormal results to zero, and treat denormal operands as zero (bits 15 and 6).
_FLUSH_X86 = 0x8040
# The same in ARM's floating-point control register (bit 24, which covers both).
_FLUSH_ARM = 1 << 24


def _pointer(element: Any) -> Any:
  pointer = types.CPointer(element)

  @intrinsic
  def at(typing_context, address):
    def codegen(context, builder, signature, arguments):
      return builder.inttoptr(arguments[0], context.get_value_type(pointer))

    return pointer(types.int64), codegen

  return at


words = _pointer(types.int64)
integers = _pointer(types.int32)
unsigned = _pointer(types.uint32)
halves = _pointer(types.uint16)
floats = _pointer(types.float32)


@intrinsic
def address_of(typing_context, pointer):
  """Returns the address that a pointer of any type holds."""

  def codegen(context, builder, signature, arguments):
    return builder.ptrtoint(arguments[0], ir.IntType(64))

  return types.int64(pointer), codegen


def stack_floats(count: int) -> Any:
  """Returns an intrinsic: the address of `count` floats on the stack of its caller."""

  @intrinsic
  def at(typing_context):
    def codegen(context, builder, signature, arguments):
      with builder.goto_entry_block():  # numba's own alloca would fill it with zeros.
        slot = builder.alloca(ir.ArrayType(ir.FloatType(), count))
      slot.align = 64  # A cache line.
      return builder.ptrtoint(slot, ir.IntType(64))

    return types.int64(), codegen

  return at


@intrinsic
def fma(typing_context, a, b, c):
  """Returns a * b + c, rounded once."""

  def codegen(context, builder, signature, arguments):
    return builder.fma(*arguments)

  return types.float32(types.float32, types.float32, types.float32), codegen


@intrinsic
def float_of(typing_context, bits):
  """Returns the float32 with these 32 bits."""
  return types.float32(types.int32), lambda _, builder, __, a: builder.bitcast(a[0], ir.FloatType())


@intrinsic
def bits_of(typing_context, value):
  """Returns the 32 bits of a float32."""
  return types.int32(types.float32), lambda _, builder, __, a: builder.bitcast(a[0], ir.IntType(32))


def is_x86(builder) -> bool:
  """Returns whether code is generated for an x86 processor; otherwise it is for ARM."""
  return builder.module.triple.startswith(("x86", "i386", "i686"))


def _read_control(builder):
  """Reads the floating-point control register: i32 on x86, i64 on ARM."""
  if is_x86(builder):
    slot = cgutils.alloca_once(builder, ir.IntType(32))
    _mxcsr(builder, "llvm.x86.sse.stmxcsr", slot)
    return builder.load(slot)
  read = ir.FunctionType(ir.IntType(64), [])
  return builder.asm(read, "mrs $0, fpcr", "=r", [], True)


def _write_control(builder, value) -> None:
  if is_x86(builder):
    slot = cgutils.alloca_once(builder, ir.IntType(32))
    builder.store(value, slot)
    _mxcsr(builder, "llvm.x86.sse.ldmxcsr", slot)
    return
  write = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
  builder.asm(write, "msr fpcr, $0", "r", [value], True)


def _mxcsr(builder, name: str, slot) -> None:
  byte = ir.IntType(8).as_pointer()
  function = ir.FunctionType(ir.VoidType(), [byte])
  builder.call(
    cgutils.get_or_insert_function(builder.module, function, name), [builder.bitcast(slot, byte)]
  )


@intrinsic
def flush_denormals(typing_context):
  """Makes this thread flush denormals, like XLA's threads; returns the old register."""

  def codegen(context, builder, signature, arguments):
    old = _read_control(builder)
    flag = _FLUSH_X86 if is_x86(builder) else _FLUSH_ARM
    _write_control(builder, builder.or_(old, ir.Constant(old.type, flag)))
    return builder.zext(old, ir.IntType(64)) if old.type.width < 64 else old

  return types.int64(), codegen


@intrinsic
def restore_denormals(typing_context, old):
  """Restores the register that `flush_denormals` returned."""

  def codegen(context, builder, signature, arguments):
    value = arguments[0]
    if is_x86(builder):
      value = builder.trunc(value, ir.IntType(32))
    _write_control(builder, value)
    return context.get_dummy_value()

  return types.void(types.int64), codegen
