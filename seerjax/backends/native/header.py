"""Checks XLA's FFI header, which ships with jaxlib, against the known records."""

from __future__ import annotations

import pathlib
import re

import jax

# The fields of XLA's records, in order; `ffi` uses their word offsets. A record that is not part of
# another one may have further fields at its end.
_OUTER = {
  "XLA_FFI_CallFrame": "struct_size extension_start api ctx stage args rets",
  "XLA_FFI_Buffer": "struct_size extension_start dtype data rank dims",
  "XLA_FFI_Metadata": "struct_size api_version traits",
}
_INNER = {
  "XLA_FFI_Args": "struct_size extension_start size types args",
  "XLA_FFI_Rets": "struct_size extension_start size types rets",
  "XLA_FFI_Api_Version": "struct_size extension_start major_version minor_version",
}
# Records of the thread pool; "*" is a field of any name.
POOL = {
  "XLA_FFI_ThreadPool_Schedule_Args": "struct_size extension_start ctx task data",
  "XLA_FFI_Error_Destroy_Args": "struct_size extension_start error",
  "XLA_FFI_Api": "struct_size extension_start api_version internal_api XLA_FFI_Error_Create *"
  " XLA_FFI_Error_Destroy * * * * * * * * XLA_FFI_ThreadPool_Schedule",
}
_HEADER = pathlib.Path("xla/ffi/api/c_api.h")


def text() -> str:
  """Returns the text of the header."""
  return (pathlib.Path(jax.ffi.include_dir()) / _HEADER).read_text()


def differing_record(header: str, records: dict[str, str] = _OUTER | _INNER) -> str | None:
  """Returns the name of a record with unexpected fields in XLA's header, None if all are known."""
  header = re.sub(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\)", r"\1", header)
  for name, fields in records.items():
    found = re.search(rf"struct {name} \{{(.*?)\n\}};", header, re.DOTALL)
    if found is None:
      return name
    body = re.sub(r"//[^\n]*", "", found.group(1))
    got, known = re.findall(r"(\w+);", body), fields.split()
    is_known = len(got) >= len(known) and all(k in ("*", g) for g, k in zip(got, known))
    if not is_known or (name in _INNER and len(got) > len(known)):
      return name
  return None
