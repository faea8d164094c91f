"""numba as a front end: Python to LLVM's language; what is made of it is `objects`' affair.

numba optimises every function, and makes machine code of it, together with all that it calls, as if
each were to be called from Python. Of handlers that is nine tenths of the work, and none of it is
used: a function is a part of handlers alone. Here it stays as numba lowered it, and a handler's
functions are put together once. numba's processor, types and rules are those of `numba.njit`.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import inspect
from typing import Any

import llvmlite.binding as llvm
from numba.core import codegen, registry
from numba.core.runtime.nrt import rtsys


class _Library(codegen.AOTCodeLibrary):
  """One function's module, as it was lowered, and the libraries of those that it calls."""

  def _optimize_functions(self, ll_module: Any) -> None:
    ll_module.data_layout = self._codegen._data_layout

  def add_linking_library(self, library: Any) -> None:
    # numba's counting of references: a handler owns no object.
    if library is not rtsys.library:
      super().add_linking_library(library)

  def finalize(self) -> None:
    self._finalized = True

  def get_pointer_to_function(self, name: str) -> int:
    """None: Python cannot call it."""
    return 0


class _Codegen(codegen.AOTCPUCodegen):
  _library_class = _Library

  def set_env(self, env_name: str, env: Any) -> None:
    """Globals of Python, which no handler reads."""


class _Target(registry.CPUTarget):
  """numba's target, whose context differs in what becomes of a module alone."""

  @property
  def usual(self) -> Any:
    return registry.cpu_target.target_context

  @functools.cached_property
  def _toplevel_target_context(self) -> Any:
    return self.usual.subtarget(_internal_codegen=_Codegen("seerjax"))

  @property
  def _toplevel_typing_context(self) -> Any:
    return registry.cpu_target.typing_context


class Function(registry.CPUDispatcher):
  """A function that numba compiles for handlers and for others of its kind."""

  targetdescr = _Target("cpu")

  def add_overload(self, cres: Any) -> None:
    super().add_overload(cres)
    if not self.targetoptions.get("forceinline"):
      # One copy a handler: loops that are inlined wherever they are called cost most of the time.
      cres.library.get_function(cres.fndesc.llvm_func_name).add_function_attribute("noinline")


# A division by zero is IEEE's, as in NumPy; nothing is made for Python to call.
_OPTIONS: dict[str, Any] = dict(
  nopython=True,
  error_model="numpy",
  boundscheck=False,
  no_cpython_wrapper=True,
  no_cfunc_wrapper=True,
)


def jit(python: Callable[..., Any]) -> Any:
  """Compiles what handlers are made of, once a handler: calls of it stay calls."""
  # The function itself, not what may check its annotations.
  return Function(inspect.unwrap(python), targetoptions=dict(_OPTIONS))


def inlined(python: Callable[..., Any]) -> Any:
  """As `jit`, of what loops call an element, whose vectors a call would forbid, and of a line."""
  options = dict(_OPTIONS, forceinline=True)
  return Function(inspect.unwrap(python), targetoptions=options)


def module_of(function: Function, signature: Any) -> llvm.ModuleRef:
  """Returns a function and all that it calls as one module, whose one symbol is the function.

  Args:
    function: to compile.
    signature: of numba.
  """
  # Loads numba's rules, which are shared, and sets up the runtime that it keeps: first, for itself.
  function.targetdescr.usual.refresh()
  function.compile(signature)
  result = function.overloads[tuple(signature.args)]
  libraries: dict[Any, None] = {}

  def add(library: Any) -> None:
    if library not in libraries:
      libraries[library] = None
      for called in library._linking_libraries:
        add(called)

  add(result.library)
  layout = function.targetctx.target_data
  module = llvm.parse_assembly(
    f'target triple = "{llvm.get_process_triple()}"\ntarget datalayout = "{layout}"'
  )
  for library in libraries:
    module.link_in(library._final_module, preserve=True)
  for part in module.functions:
    if not part.is_declaration and part.name != result.fndesc.llvm_func_name:
      part.linkage = llvm.Linkage.internal
  module.verify()
  return module


def entry_of(module: llvm.ModuleRef) -> llvm.ValueRef:
  """Returns the one function of a module of `module_of` that others may see."""
  defined = [f for f in module.functions if not f.is_declaration]
  (entry,) = [f for f in defined if f.linkage == llvm.Linkage.external]
  return entry
