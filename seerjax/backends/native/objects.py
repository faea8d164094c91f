"""Cache of compiled handlers on disk, so that the next process loads them instead of compiling.

numba lowers a handler to LLVM IR (`front`), LLVM compiles an object file from it, and LLVM's own
linker loads the file. (numba's own cache checks one file of several, and cannot keep a function
that another function makes.) A file's name is a digest of everything that determines its contents:
the sources of this folder and of the handler, the versions of numba and llvmlite, and the
processor. The files are next to JAX's compiled programs, or in the user's cache.
"""

from __future__ import annotations

from collections.abc import Callable
import ctypes
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import tempfile
from typing import Any

from absl import logging
import jax
import llvmlite.binding as llvm

from seerjax.backends.native import front

# Symbol of the loaded function.
_SYMBOL = "seerjax_handler"
# C wrappers of numba's function, which cannot fail: the handler, and the task that a thread
# of XLA's pool runs for it. The variable is set once the code is loaded.
_PROCESS = "seerjax_process"
_WRAPPER = """
target triple = "{triple}"
target datalayout = "{layout}"
@{process} = global i64 0
declare i32 @"{entry}"(ptr, ptr, ptr, i64, i64)
define i64 @{symbol}(ptr %frame) {{
  %value = alloca i64
  %error = alloca ptr
  %process = load i64, ptr @{process}
  %task = ptrtoint ptr @{symbol}_task to i64
  %status = call i32 @"{entry}"(ptr %value, ptr %error, ptr %frame, i64 %task, i64 %process)
  %result = load i64, ptr %value
  ret i64 %result
}}
define void @{symbol}_task(ptr %data) {{
  %value = alloca i64
  %error = alloca ptr
  %status = call i32 @"{entry}"(ptr %value, ptr %error, ptr %data, i64 0, i64 0)
  ret void
}}
"""
# LLVM engines that own the machine code; they live as long as the process.
_loaded: list[Any] = []


def address(name: str, source: str, compiled: Callable[[], llvm.ModuleRef], process: int) -> int:
  """Returns the address of a handler's machine code in this process.

  Args:
    name: name of the handler.
    source: text of the handler's source file.
    compiled: returns the module of `front.module_of`; called if there is no intact file.
    process: address of the state that all calls of this process share (`threads.process`).
  """
  path = _folder() / f"{name}-{_digest(source)}.o"
  code = _read(path)
  if code is None:
    code = _object_of(compiled())
    _write(path, code)
  engine = _engine_of("")
  engine.add_object_file(llvm.ObjectFileRef.from_data(code))
  engine.finalize_object()
  ctypes.c_int64.from_address(engine.get_global_value_address(_PROCESS)).value = process
  return engine.get_function_address(_SYMBOL)


def function_of(text: str, name: str) -> int:
  """Returns the address of a function of a module of LLVM IR, compiled for this process."""
  engine = _engine_of(text)
  engine.finalize_object()
  return engine.get_function_address(name)


def _engine_of(text: str) -> Any:
  engine = llvm.create_mcjit_compiler(llvm.parse_assembly(text), _machine())
  _loaded.append(engine)
  return engine


@functools.cache
def _digest(text: str) -> str:
  """Returns the digest in a file's name: of the sources, the compilers and the processor."""
  parts = [text, *(importlib.metadata.version(name) for name in ("numba", "llvmlite"))]
  parts += _processor()
  for source in sorted(pathlib.Path(__file__).parent.glob("*.py")):
    parts += [source.name, source.read_text()]
  return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _processor() -> tuple[str, str, str]:
  """Returns LLVM's triple, processor name and features, with numba's environment variables."""
  cpu = os.environ.get("NUMBA_CPU_NAME") or llvm.get_host_cpu_name()
  features = os.environ.get("NUMBA_CPU_FEATURES")
  if features is None:
    features = llvm.get_host_cpu_features().flatten()
  return llvm.get_default_triple(), cpu, features


def has_wide_vectors() -> bool:
  """Returns whether code is compiled for vectors of 16 floats."""
  return "+avx512f" in _processor()[2].split(",")


def has_dot_products() -> bool:
  """Returns whether code is compiled for dot products of bfloat16 in vectors of 16 floats."""
  return has_wide_vectors() and "+avx512bf16" in _processor()[2].split(",")


@functools.cache
def _machine() -> Any:
  llvm.initialize_native_target()
  llvm.initialize_native_asmprinter()
  triple, cpu, features = _processor()
  target = llvm.Target.from_triple(triple)
  return target.create_target_machine(cpu=cpu, features=features, opt=3, jit=True)


def optimise(module: llvm.ModuleRef) -> None:
  """Optimises a module in place; no flag in it allows LLVM to reorder or fuse operations."""
  options = llvm.create_pipeline_tuning_options(speed_level=3)
  options.loop_vectorization = True
  options.slp_vectorization = False
  passes = llvm.create_pass_builder(_machine(), options)
  passes.getModulePassManager().run(module, passes)


def _object_of(module: llvm.ModuleRef) -> bytes:
  entry = front.entry_of(module)
  wrapper = _WRAPPER.format(
    triple=module.triple, layout=module.data_layout, entry=entry.name, symbol=_SYMBOL,
    process=_PROCESS,
  )  # fmt: skip
  module.link_in(llvm.parse_assembly(wrapper))
  entry.linkage = llvm.Linkage.internal
  module.verify()
  optimise(module)
  return _machine().emit_object(module)


def _folder() -> pathlib.Path:
  programs = jax.config.jax_compilation_cache_dir
  if programs and "://" not in programs:
    return pathlib.Path(programs) / "native"
  cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  return pathlib.Path(cache) / "seerjax"


def _read(path: pathlib.Path) -> bytes | None:
  """Returns the code of an intact file, None otherwise."""
  try:
    content = path.read_bytes()
  except OSError:
    return None
  check, code = content[:32], content[32:]
  return code if hashlib.sha256(code).digest() == check else None


def _write(path: pathlib.Path, code: bytes) -> None:
  """Writes the code atomically, so that a dying process leaves no partial file of that name."""
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
      file.write(hashlib.sha256(code).digest() + code)
    os.replace(file.name, path)
  except OSError as error:
    logging.warning(
      "native handlers: got %s, expected a folder for compiled code; every process compiles it"
      " again: make %s writable, or set JAX_COMPILATION_CACHE_DIR.", error, path.parent,
    )  # fmt: skip
