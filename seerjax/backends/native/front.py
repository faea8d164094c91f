"""numba as a front end: lowers Python to LLVM IR, which `objects` compiles.

numba optimises every function and compiles it, with all its callees, as if each were to be called
from Python. For handlers that is nine tenths of the work, and none of it is used, since a function
is only ever part of a handler. Here a function stays as numba lowered it, and a handler's functions
are linked once. numba's processor, types and rules are those of `numba.njit`.
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
  """One function's module as lowered, and the libraries of its callees."""

  def _optimize_functions(self, ll_module: Any) -> None:
    ll_module.data_layout = self._codegen._data_layout

  def add_linking_library(self, library: Any) -> None:
    # Skips numba's reference counting: a handler owns no object.
    if library is not rtsys.library:
      super().add_linking_library(library)

  def finalize(self) -> None:
    self._finalized = True

  def get_pointer_to_function(self, name: str) -> int:
    """Returns 0: Python cannot call the function."""
    return 0


class _Codegen(codegen.AOTCPUCodegen):
  _library_class = _Library

  def set_env(self, env_name: str, env: Any) -> None:
    """Ignores the environment of Python globals, which no handler reads."""


class _Target(registry.CPUTarget):
  """numba's target with a context that only differs in the processing of modules."""

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
  """A function that numba compiles for handlers and for other such functions."""

  targetdescr = _Target("cpu")

  def add_overload(self, cres: Any) -> None:
    super().add_overload(cres)
    if not self.targetoptions.get("forceinline"):
      # One copy per handler: inlining loops at every call would take most of the compile time.
      cres.library.get_function(cres.fndesc.llvm_func_name).add_function_attribute("noinline")


# Division by zero follows IEEE, as in NumPy; no wrappers for calls from Python are made.
_OPTIONS: dict[str, Any] = dict(
  nopython=True,
  error_model="numpy",
  boundscheck=False,
  no_cpython_wrapper=True,
  no_cfunc_wrapper=True,
)


def jit(python: Callable[..., Any]) -> Any:
  """Compiles a function for use in handlers, once per handler; calls of it are not inlined."""
  # The function itself, without wrappers that check its annotations.
  return Function(inspect.unwrap(python), targetoptions=dict(_OPTIONS))


def inlined(python: Callable[..., Any]) -> Any:
  """Like `jit`, but always inlined: for short functions in loops, which calls keep scalar."""
  options = dict(_OPTIONS, forceinline=True)
  return Function(inspect.unwrap(python), targetoptions=options)


def module_of(function: Function, signature: Any) -> llvm.ModuleRef:
  """Returns a function and all its callees as one module that exports only the function."""
  # Must come first: it loads numba's shared rules and sets up its runtime.
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
  """Returns the exported function of a module from `module_of`."""
  defined = [f for f in module.functions if not f.is_declaration]
  (entry,) = [f for f in defined if f.linkage == llvm.Linkage.external]
  return entry
