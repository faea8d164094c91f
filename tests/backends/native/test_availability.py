"""Whether native handlers run on this machine, and the error where they do not."""

import native_reference as reference
import numpy as np
import pytest

from seerjax.backends.native import availability, header

HEADER = header.text()


def test_the_first_look_finds_nothing_against_it_here():
  assert availability.reason_against() is None


def test_what_is_expected_of_the_first_product_is_the_reference_in_numpy():
  x, w = availability.first_operands()
  product = reference.product(x, w)
  exp = reference.exp(product)
  log = reference.log(reference.flush(exp + np.float32(1)))
  assert availability.digest_of(product, exp, log) == availability.EXPECTED


@pytest.mark.parametrize(
  ("old", "new", "name"),
  [
    ("  int64_t rank;\n", "", "XLA_FFI_Buffer"),
    ("XLA_FFI_Args args;\n", "int64_t more;\n  XLA_FFI_Args args;\n", "XLA_FFI_CallFrame"),
    ("struct XLA_FFI_Rets {", "struct XLA_FFI_Results {", "XLA_FFI_Rets"),
  ],
)
def test_a_record_of_another_shape_is_named(old, new, name):
  assert header.differing_record(HEADER) is None
  assert old in HEADER
  assert header.differing_record(HEADER.replace(old, new, 1)) == name
