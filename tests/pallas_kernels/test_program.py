"""Parsing XLA's text of a program: launches, loops of unknown length, branches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import program
from pallas_kernels.program import Start

TEXT = """HloModule jit_f, is_scheduled=true

%fused_add (p0: f32[8], p1: f32[8]) -> f32[8] {
  %p0 = f32[8]{0} parameter(0)
  %p1 = f32[8]{0} parameter(1)
  ROOT %add = f32[8]{0} add(%p0, %p1)
}

%dynamic-slice-fusion (p0.1: bf16[8,64,64], p1.1: bf16[64,64]) -> (bf16[64,64], f32[64]) {
  %p1.1 = bf16[64,64]{1,0} parameter(1)
  %p0.1 = bf16[8,64,64]{2,1,0} parameter(0)
  %slice = bf16[1,64,64]{2,1,0} slice(%p0.1), slice={[7:8], [0:64], [0:64]}
  %bitcast = bf16[64,64]{1,0} bitcast(%slice)
  ROOT %mpmd_map = (bf16[64,64]{1,0}, f32[64]{0}) custom-call(%bitcast, %p1.1), custom_call_target="mosaic_gpu_v2"
}

%body (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %t = (s32[], f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%t), index=1
  %i = s32[] get-tuple-element(%t), index=0
  %sort = f32[8]{0} sort(%x), dimensions={0}, to_apply=%less
  ROOT %out = (s32[], f32[8]{0}) tuple(%i, %sort)
}

%condition (t.1: (s32[], f32[8])) -> pred[] {
  %t.1 = (s32[], f32[8]{0}) parameter(0)
  ROOT %p = pred[] constant(true)
}

ENTRY %main (a: f32[8], w: bf16[8,64,64], v: bf16[64,64]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %w = bf16[8,64,64]{2,1,0} parameter(1), metadata={op_name="w[\\'x\\']"}
  %v = bf16[64,64]{1,0} parameter(2)
  %fusion = f32[8]{0} fusion(%a, %a), kind=kLoop, calls=%fused_add
  %ours = (bf16[64,64]{1,0}, /*index=1*/f32[64]{0}) fusion(%w, %v), kind=kCustom, calls=%dynamic-slice-fusion
  %zero = s32[] constant(0)
  %tuple = (s32[], f32[8]{0}) tuple(%zero, %fusion)
  %known = (s32[], f32[8]{0}) while(%tuple), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"7"}}
  %unknown = (s32[], f32[8]{0}) while(%known), condition=%condition, body=%body
  %y = f32[8]{0} get-tuple-element(%unknown), index=1
  %which = pred[] copy(%zero)
  ROOT %cond = f32[8]{0} conditional(%which, %y, %y), true_computation=%fused_add, false_computation=%fused_add
}
"""  # noqa: E501


def test_launches_loops_and_branches_are_read():
  read = program.read(TEXT)
  assert read.starts == (
    Start("fusion", False, ("f32[8]", "f32[8]"), ("f32[8]",)),
    Start("ours", True, ("bf16[8,64,64]", "bf16[64,64]"), ("bf16[64,64]", "f32[64]")),
    Start("sort", False, ("f32[8]",), ("f32[8]",), 7),
    Start("sort", False, ("f32[8]",), ("f32[8]",)),
    Start("which", False, ("s32[]",), ("pred[]",)),
  )
  assert (read.num_ours, read.num_others) == (1, 10)
  assert read.unknown_loops == ("unknown",) and read.branches == ("cond",)
  assert read.num_host_reads == 2


def test_a_program_of_this_machine_is_read():
  def call(x: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: x * 2, x)

  text = jax.jit(call).lower(jnp.ones(4)).compile().as_text()
  assert text is not None
  read = program.read(text)
  assert len(read.unknown_loops) == 1 and read.num_ours == 0


def test_what_is_no_program_is_refused():
  with pytest.raises(ValueError, match="got no ENTRY in 'nothing', expected XLA's text"):
    program.read("nothing")


@pytest.mark.parametrize(
  "shape, expected",
  [("bf16[64,4096]", 64 * 4096 * 2), ("s32[]", 4), ("pred[3]", 3), ("token[]", 0)],
)
def test_bytes_of_shapes(shape: str, expected: int):
  assert program.num_bytes(shape) == expected
