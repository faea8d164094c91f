"""Server process of `sandbox.sandbox`, which isolates and runs untrusted programs.

  sandbox.Sandbox --socket--> server           imports numpy and scipy once, then only forks
                                `- supervisor   pid 1 of fresh namespaces; pipes, limits, verdict
                                     `- program  drops all privileges, then runs untrusted code

The server never reads untrusted data: it passes each call's socket to a fork. The supervisor builds
an empty root (read-only system and Python, small private /box and /tmp). When the program ends or
exceeds a limit, the supervisor kills all remaining processes: as pid 1 it is out of the program's
reach, and nothing outlives it. The program's process drops its privileges and sets its limits
before it reads any untrusted line. All of this uses only the standard library and system calls.

`helper` starts it; programs never import it. Source: man pages namespaces(7), landlock(7),
seccomp(2), pivot_root(2), getrlimit(2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import contextlib
import ctypes
import dataclasses
import fcntl
import gc
import json
import linecache
import math
import os
import platform
import random
import resource
import select
import signal
import socket
import stat
import struct
import sys
import tempfile
import time
import traceback
import types
from typing import Any

NOBODY = 65534  # User and group of programs.
WATCH_SECONDS = 0.05  # Interval at which the supervisor sums the resources of all processes.
SETUP_SECONDS = 60.0  # Timeout of the set-up.
# Modules imported before every function call; missing ones are skipped.
PRELOADED = ("numpy", "scipy.optimize")
NO_MEMORY = b"memory"  # Not JSON: sent instead of a result after a MemoryError.
ENVIRONMENT = {
  "HOME": "/box/work", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1",
  "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "NUMEXPR_NUM_THREADS": "1",
  "NUMBA_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0",
}  # fmt: skip
# Not /dev/zero: shared pages of it that were unmapped belong to no process, but stay allocated.
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives")

# linux/sched.h
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x20000, 0x2000000, 0x4000000
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 2**27, 2**28, 2**29, 2**30
NAMESPACES = (
  CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
)
# linux/mount.h
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
# linux/prctl.h
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER = 4, 22, 24, 36
PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, PR_SET_THP_DISABLE = 38, 1, 41
PR_SET_VMA, PR_FUTEX_HASH = 0x53564D41, 78  # Names of mappings; hash table of futexes.
# linux/landlock.h: rights by version of the interface (bits), and the rights that apply to files.
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
LANDLOCK_RIGHTS = {1: 2**13 - 1, 2: 2**14 - 1, 3: 2**15 - 1, 5: 2**16 - 1}
LANDLOCK_READ = 0b1101  # Execute, read a file, read a directory.
LANDLOCK_OF_FILES = 0b1100000000000111  # Execute, write, read, truncate, ioctl.
# linux/filter.h, linux/seccomp.h
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, DENY, KILL = 0x7FFF0000, 0x00050000, 0x80000000
EPERM, ENOSYS = 1, 38
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# System calls that programs do not need, by number on x86_64 and aarch64 (-1: does not exist).
DENIED = {
  "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
  "kcmp": (312, 272), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
  "process_madvise": (440, 440), "migrate_pages": (256, 238), "move_pages": (279, 239),
  "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
  "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
  "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
  "mount_setattr": (442, 442), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
  "unshare": (272, 97), "setns": (308, 268), "socket": (41, 198), "keyctl": (250, 219),
  # Messages in flight count toward no process's memory, and pipes among them have no writer that
  # could die.
  "socketpair": (53, 199),
  # Kernel memory of rule sets, filters, polls, memory policies and attributes counts toward no
  # process and has no limit: Landlock rule sets took 105 MiB in 3 s.
  "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445),
  "landlock_restrict_self": (446, 446), "seccomp": (317, 277),
  "epoll_create": (213, -1), "epoll_create1": (291, 20),
  "mbind": (237, 235), "set_mempolicy": (238, 237), "set_mempolicy_home_node": (450, 450),
  "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
  # Without namespaces these reach other processes of the same user.
  "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setaffinity": (203, 122),
  "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
  "flock": (73, 32),  # Would lock files that others read.
  # Limited resources of the machine or the user.
  "io_setup": (206, 0), "inotify_init": (253, -1), "inotify_init1": (294, 26),
  "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280),
  "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
  "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "fanotify_init": (300, 262),
  # Memory that would outlive the process or evade the supervisor's sums.
  "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
  "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
  "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
  "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142),
  "swapon": (167, 224), "swapoff": (168, 225), "sethostname": (170, 161),
  "setdomainname": (171, 162), "acct": (163, 89), "quotactl": (179, 60),
  "quotactl_fd": (443, 443), "syslog": (103, 116), "clock_settime": (227, 112),
  "settimeofday": (164, 170), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
  "personality": (135, 92), "vhangup": (153, 58), "iopl": (172, -1), "ioperm": (173, -1),
  "modify_ldt": (154, -1),
}  # fmt: skip
CLONE, CLONE3, PRLIMIT, PRCTL = (56, 220), 435, (302, 261), (157, 167)
MMAP, SIGACTION = (9, 222), (13, 134)
FCNTL = (72, 25)
SHARED, ANONYMOUS = 1, 32  # linux/mman.h
# linux/fcntl.h: locks of ranges (unlimited in number), leases, directory notifications, and larger
# pipes.
DENIED_FCNTL = {
  "F_SETLK": 6, "F_SETLKW": 7, "F_OFD_SETLK": 37, "F_OFD_SETLKW": 38, "F_SETLEASE": 1024,
  "F_NOTIFY": 1026, "F_SETPIPE_SZ": 1031,
}  # fmt: skip
# Upper bounds on kernel memory per open descriptor (a full pipe) and per mapping, in bytes.
BYTES_OF_DESCRIPTOR, BYTES_OF_MAPPING = 2**16, 256
MAX_MAPPINGS = 65_530  # Default bound per process, vm.max_map_count.
COUNTED_MAPPINGS = 8192  # A process with more is assumed to have `MAX_MAPPINGS`.

_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """Isolation layers available on this machine, determined by trial when the server starts.

  Attributes:
    namespaces: "root" (created with the server's privileges), "user" (inside a user namespace), or
      "" if unavailable.
    nests: whether the program gets a separate user namespace, so that only its processes count
      toward the process limit.
    watches: whether the supervisor sees all processes of a program and sums their resources.
    landlock: version of the kernel's interface; 0 if unavailable.
    seccomp: whether system calls are filtered.
    denied: (layer, reason) for each missing layer.
    readable: absolute paths that programs may read.
  """

  namespaces: str = ""
  nests: bool = False
  watches: bool = False
  landlock: int = 0
  seccomp: bool = False
  denied: tuple[tuple[str, str], ...] = ()
  readable: tuple[str, ...] = ()


def kernel(name: str, *arguments: Any) -> int:
  """Calls a function of the C library.

  Raises:
    OSError: if the call fails; names the call and the reason.
  """
  converted = [
    ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments
  ]
  result = getattr(_LIBC, name)(*converted)
  if result < 0:
    number = ctypes.get_errno()
    raise OSError(number, f"{name}{arguments}: {os.strerror(number)}")
  return result


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
  kernel("mount", source.encode(), target.encode(), kind.encode(), flags, data.encode())


def make_read_only(path: str, *, flags: int) -> None:
  """Sets flags (MOUNT_ATTR_...) on the mount at `path` and on all mounts below it."""
  attributes = struct.pack("QQQQ", flags, 0, 0, 0)
  kernel(
    "syscall", MOUNT_SETATTR, AT_FDCWD, path.encode(), AT_RECURSIVE, attributes, len(attributes)
  )


# --- the server


def main(control: socket.socket, settings: Mapping[str, Any]) -> None:
  """Reports the plan, imports what programs need, then forks for each call until EOF."""
  os.umask(0o022)  # The unprivileged user must be able to read files that root creates.
  signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Reaps supervisors automatically.
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # A program may send it to its supervisor.
  # A supervisor's parent ends at once, so the server becomes its parent.
  kernel("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
  plan = find_plan(tuple(settings["readable"]))
  wait_for_supervisors()
  control.send(json.dumps(dataclasses.asdict(plan)).encode())
  sys.path.extend(path for path in settings["packages"] if path not in sys.path)
  for name in (*PRELOADED, *settings["preloaded"]):
    with contextlib.suppress(BlockingIOError):
      if not control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
        return  # Closed already: skip the other imports.
    with contextlib.suppress(ImportError):
      __import__(name)
  gc.collect()
  gc.freeze()  # Keeps these pages shared with forks for longer.
  while True:
    message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    if not message:
      break
    # If the process limit prevents a fork, the caller sees its socket close.
    with socket.socket(fileno=descriptors[0]) as caller, contextlib.suppress(OSError):
      if os.fork() == 0:
        control.close()
        in_child(enter, plan, caller)
  wait_for_supervisors()


def wait_for_supervisors() -> None:
  """Waits until the last child has ended; because SIGCHLD is ignored, no status is returned."""
  with contextlib.suppress(ChildProcessError):
    os.waitpid(-1, 0)


def in_child(work: Callable[..., None], *arguments: Any) -> None:
  """Runs `work`, then ends the process in any case."""
  code = 70
  try:
    work(*arguments)
    code = 0
  except BaseException:
    traceback.print_exc()
  finally:
    os._exit(code)


def enter(plan: Plan, caller: socket.socket) -> None:
  """Enters fresh namespaces, and forks the supervisor as pid 1 there."""
  signal.signal(signal.SIGCHLD, signal.SIG_DFL)
  try:
    enter_namespaces(plan.namespaces)
    if not plan.namespaces:
      supervise(plan, caller)
    elif os.fork() == 0:
      in_child(supervise, plan, caller)
  except BaseException as error:
    answer(caller, {"error": f"{type(error).__name__}: {error}"}, [])


def enter_namespaces(kind: str) -> None:
  """Enters new namespaces; the next fork is pid 1. `kind` is as in `Plan.namespaces`."""
  if not kind:
    return
  user, group = os.geteuid(), os.getegid()
  kernel("unshare", NAMESPACES | (CLONE_NEWUSER if kind == "user" else 0))
  if kind == "user":
    for name, text in (
      ("setgroups", "deny"),
      ("uid_map", f"{NOBODY} {user} 1"),
      ("gid_map", f"{NOBODY} {group} 1"),
    ):
      with open(f"/proc/self/{name}", "w") as file:
        file.write(text)
  # Mounts made here are not visible outside.
  mount("none", "/", "none", MS_REC | MS_PRIVATE)


def find_plan(readable: tuple[str, ...]) -> Plan:
  """Tries every isolation layer in a child process, the strongest first."""
  denied = []
  plan = Plan(readable=readable)

  def works(name: str, candidate: Plan) -> bool:
    ours, theirs = socket.socketpair()
    with ours:
      if os.fork() == 0:
        ours.close()
        in_child(enter, candidate, theirs)
      theirs.close()
      source = b"def probe(): return 1"
      request = {
        "function": "probe", "arguments": {}, "blobs": [len(source)], "files": [], "outputs": [],
        "limits": dict(
          wall_seconds=30.0, cpu_seconds=30.0, memory_bytes=2**31, file_bytes=2**20,
          output_bytes=2**16, num_processes=8, num_files=16,
        ),
      }  # fmt: skip
      with contextlib.suppress(OSError):
        send(ours, request, [source])
      reply = receive(ours)
      with contextlib.suppress(OSError):
        ours.recv(1)  # Returns nothing; waits until the supervisor has ended.
    if reply is None:
      denied.append((name, "the probe was killed"))
    elif "error" in reply[0]:
      denied.append((name, reply[0]["error"]))
    elif reply[0]["status"] != "ok":
      denied.append((name, reply[1][1].decode(errors="replace")[-400:]))
    else:
      return True
    return False

  for kind in ("root", "user") if os.geteuid() == 0 else ("user",):
    if works(f"namespaces ({kind})", dataclasses.replace(plan, namespaces=kind)):
      plan = dataclasses.replace(plan, namespaces=kind)
      break
  if plan.namespaces:
    for field in ("nests", "watches"):
      candidate = dataclasses.replace(plan, **{field: True})
      plan = candidate if works(field, candidate) else plan
  else:
    plan = dataclasses.replace(plan, watches=True)
  version = _LIBC.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
  candidate = dataclasses.replace(plan, landlock=max(version, 0))
  if version < 1:
    denied.append(("landlock", os.strerror(ctypes.get_errno())))
  elif works("landlock", candidate):
    plan = candidate
  candidate = dataclasses.replace(plan, seccomp=True)
  if platform.machine() not in ARCHITECTURES:
    denied.append(("seccomp", f"no table of system calls for {platform.machine()}"))
  elif works("seccomp", candidate):
    plan = candidate
  return dataclasses.replace(plan, denied=tuple(denied))


# --- messages: a length, JSON, blobs


def send(channel: socket.socket, header: Mapping[str, Any], blobs: Sequence[bytes]) -> None:
  """Sends a message; `header["blobs"]` has the lengths of the blobs."""
  text = json.dumps(header).encode()
  channel.sendall(struct.pack("Q", len(text)) + text)
  for blob in blobs:
    channel.sendall(blob)


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[bytes]] | None:
  """Returns a message, or None if the other side closed the connection."""

  def exactly(size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
      part = channel.recv(min(size - len(parts), 2**20))
      if not part:
        raise EOFError
      parts += part
    return bytes(parts)

  try:
    header = json.loads(exactly(struct.unpack("Q", exactly(8))[0]))
    return header, [exactly(size) for size in header.get("blobs", ())]
  except (EOFError, ConnectionError):
    return None


def answer(caller: socket.socket, header: dict[str, Any], blobs: list[bytes]) -> None:
  with contextlib.suppress(OSError):  # The caller may have closed the connection.
    send(caller, {**header, "blobs": [len(blob) for blob in blobs]}, blobs)


# --- the supervisor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Box:
  """Directories and descriptors of a program.

  Attributes:
    root: directory that becomes its "/"; "" without a separate root.
    work, temporary: its working directory and /tmp, as paths of the supervisor.
    inside: its working directory, as a path of the program.
    place: descriptor of its working directory, because a running program may replace the path.
    stdin: descriptor of its standard input.
    processes: proc file system with its processes only, or the host's; "" if there is none.
  """

  root: str
  work: str
  temporary: str
  inside: str
  place: int
  stdin: int
  processes: str


def supervise(plan: Plan, caller: socket.socket) -> None:
  """Reads a request, runs the program, and sends its outcome."""
  message = receive(caller)
  if message is None:
    return
  request, blobs = message
  stage = ""
  try:
    if not plan.namespaces:
      kernel("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
      stage = tempfile.mkdtemp(prefix="sandbox-")
    box = make_box(plan, request, blobs, stage)
    outcome, parts = watch(plan, caller, request, blobs, box)
    if outcome:
      for name, content in read_outputs(box.place, request).items():
        outcome["files"].append(name)
        parts.append(content)
      answer(caller, outcome, parts)
  except BaseException as error:
    answer(caller, {"error": f"{type(error).__name__}: {error}"}, [])
  finally:
    kill_all(plan)
    if stage:
      remove_tree(stage)


def make_box(plan: Plan, request: Mapping[str, Any], blobs: list[bytes], stage: str) -> Box:
  """Builds the program's root (or a bare directory without namespaces), and creates its files.

  Args:
    plan: plan of the server.
    request: request of the caller.
    blobs: source (if there is one), standard input, then the contents of the files.
    stage: an empty directory on the host, used without namespaces.
  """
  processes = "/proc"
  box = stage
  root = ""
  if plan.namespaces:
    # Any directory without needed contents works, because no other process sees this mount.
    stage = next(
      path for path in ("/sys", "/mnt", "/srv", "/media", "/opt")
      if os.path.isdir(path) and not any((r + "/").startswith(path + "/") for r in plan.readable)
    )  # fmt: skip
    mount("tmpfs", stage, "tmpfs", MS_NOSUID | MS_NODEV, "size=64k,mode=755")
    root, processes = f"{stage}/root", f"{stage}/proc"
    os.mkdir(root)
    os.mkdir(processes)
    if plan.watches:
      mount("proc", processes, "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount("tmpfs", root, "tmpfs", MS_NOSUID, "size=1m,mode=755")
    box = f"{root}/box"
    for path in ("/box", "/tmp", "/dev", "/etc"):
      os.mkdir(root + path)
    size = 4 * request["limits"]["file_bytes"] + 2 * sum(map(len, blobs)) + 2**20
    most_files = 4096 + 2 * len(blobs)
    mount("tmpfs", box, "tmpfs", MS_NOSUID | MS_NODEV, f"size={size},nr_inodes={most_files}")
  os.chmod(box, 0o755)
  work, temporary = f"{box}/work", f"{box}/tmp"
  for path in (work, temporary):
    os.mkdir(path, 0o700)
  if root:
    mount(temporary, f"{root}/tmp", "none", MS_BIND)
    fill_root(root, plan.readable)
  contents = list(blobs)
  if "function" in request:
    contents.pop(0)
  # Standard input is an unlinked file, so that nothing blocks and no writer is needed.
  with open(f"{box}/stdin", "w+b") as file:
    file.write(contents.pop(0) if contents else b"")
    file.flush()
    stdin = os.open(f"{box}/stdin", os.O_RDONLY | os.O_CLOEXEC)
  os.unlink(f"{box}/stdin")
  owner = NOBODY if os.geteuid() == 0 else -1
  for name, content in zip(request["files"], contents):
    path = work
    *folders, last = name.split("/")
    for folder in folders:
      path = f"{path}/{folder}"
      if not os.path.isdir(path):
        os.mkdir(path, 0o755)
        os.chown(path, owner, owner)
    with open(f"{path}/{last}", "xb") as file:
      file.write(content)
    os.chmod(f"{path}/{last}", 0o755)
    os.chown(f"{path}/{last}", owner, owner)
  for path in (work, temporary):
    os.chown(path, owner, owner)
  return Box(
    root=root,
    work=work,
    temporary=temporary,
    inside="/box/work" if root else work,
    place=os.open(work, os.O_RDONLY | os.O_DIRECTORY),
    stdin=stdin,
    processes=processes if plan.watches else "",
  )


def fill_root(root: str, readable: Sequence[str]) -> None:
  """Mounts system and Python in a new root, read-only, at their usual paths."""
  for path in readable:
    target = root + path
    if path in SYSTEM and os.path.islink(path):
      os.makedirs(os.path.dirname(target), exist_ok=True)
      os.symlink(os.readlink(path), target)
      continue
    if os.path.isdir(path):
      os.makedirs(target, exist_ok=True)
    else:
      os.makedirs(os.path.dirname(target), exist_ok=True)
      os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    mount(path, target, "none", MS_BIND | MS_REC)
    flags = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID
    make_read_only(target, flags=flags if path in DEVICES else flags | MOUNT_ATTR_NODEV)
  os.symlink("/tmp", f"{root}/dev/shm")
  with open(f"{root}/etc/passwd", "w") as file:
    file.write(f"nobody:x:{NOBODY}:{NOBODY}:nobody:/box/work:/bin/sh\n")
  with open(f"{root}/etc/group", "w") as file:
    file.write(f"nogroup:x:{NOBODY}:\n")
  os.chmod(f"{root}/etc/passwd", 0o644)
  os.chmod(f"{root}/etc/group", 0o644)
  # Only this mount: /box and /tmp stay writable.
  mount("none", root, "none", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID)


def watch(
  plan: Plan, caller: socket.socket, request: Mapping[str, Any], blobs: list[bytes], box: Box
) -> tuple[dict[str, Any], list[bytes]]:
  """Runs the program until it ends or exceeds a limit.

  Returns:
    (fields of the outcome, [standard output, standard error, result]); both empty if the caller
    closed the connection.
  """
  limits = request["limits"]
  setup, stdout, stderr, result = pipes = [os.pipe() for _ in range(4)]
  program = os.fork()
  if program == 0:
    in_child(become_program, plan, request, blobs, box, [pipe[1] for pipe in pipes])
  for pipe in pipes:
    os.close(pipe[1])
  os.close(box.stdin)
  most = {
    setup[0]: 2**16, stdout[0]: limits["output_bytes"], stderr[0]: limits["output_bytes"],
    result[0]: limits["file_bytes"],
  }  # fmt: skip
  got = {descriptor: bytearray() for descriptor in most}
  ended = os.pidfd_open(program)
  poll = select.poll()
  for descriptor in (*most, ended, caller.fileno()):
    poll.register(descriptor, select.POLLIN)
  status = ""
  begin = last_look = time.monotonic()
  is_set_up = False

  def read(descriptor: int) -> bool:
    """Reads available data; returns False at the end of the pipe or above its limit."""
    nonlocal status
    part = os.read(descriptor, 2**16)
    got[descriptor] += part
    if len(got[descriptor]) > most[descriptor]:
      status = status or "output"
      del got[descriptor][most[descriptor] :]
      return False
    return bool(part)

  while not status:
    left = begin + (limits["wall_seconds"] if is_set_up else SETUP_SECONDS) - time.monotonic()
    if left <= 0:
      status = "timeout"
      break
    wait = min(left, WATCH_SECONDS) if box.processes else left
    events = [descriptor for descriptor, _ in poll.poll(math.ceil(1000 * wait))]
    if caller.fileno() in events:
      return {}, []  # Callers send nothing more, so the socket was closed.
    if box.processes and time.monotonic() - last_look >= WATCH_SECONDS:
      status = beyond_limits(plan, limits, box.processes)
      last_look = time.monotonic()
    for descriptor in events:
      if descriptor in most and not read(descriptor):
        poll.unregister(descriptor)
        if descriptor == setup[0]:
          is_set_up = True
          begin = time.monotonic()
    if ended in events:
      break
  wall_seconds = time.monotonic() - begin
  code = kill_all(plan, program)
  assert code is not None
  for descriptor in most:
    # All writers are dead, but a pipe that is still in flight to a socket never reaches its end.
    os.set_blocking(descriptor, False)
    with contextlib.suppress(BlockingIOError):
      while read(descriptor):
        pass
  used = resource.getrusage(resource.RUSAGE_CHILDREN)
  cpu_seconds = used.ru_utime + used.ru_stime
  if b"ready" not in got[setup[0]]:
    text = bytes(got[setup[0]]).decode(errors="replace")
    return {"error": text or f"set-up ended with {code}"}, []
  by_signal = -code if code < 0 else 0
  if not status:
    if by_signal == signal.SIGXCPU or cpu_seconds > limits["cpu_seconds"]:
      status = "cpu"
    elif by_signal == signal.SIGXFSZ:
      status = "output"
    elif bytes(got[result[0]]) == NO_MEMORY:
      status = "memory"
    elif by_signal:
      status = "killed"
    else:
      status = "ok" if code == 0 else "failed"
  outcome = {
    "status": status, "exit_code": None if code < 0 else code, "wall_seconds": wall_seconds,
    "cpu_seconds": cpu_seconds, "files": [],
  }  # fmt: skip
  return outcome, [bytes(got[pipe[0]]) for pipe in (stdout, stderr, result)]


def beyond_limits(plan: Plan, limits: Mapping[str, Any], processes: str) -> str:
  """Returns a status if the program's processes together exceed a limit, else ""."""
  tick, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
  waited = resource.getrusage(resource.RUSAGE_CHILDREN)
  cpu_seconds = waited.ru_utime + waited.ru_stime
  num_tasks = 0
  of_kernel = 0  # Bytes held by the kernel for all processes; may be large with few resident pages.
  resident = {}  # Resident bytes of each process, by the id of a live task.
  for pid in list_processes(plan, processes):
    with contextlib.suppress(OSError):  # The process has ended.
      fields = read_stat(processes, pid)
      cpu_seconds += sum(map(int, fields[11:15])) / tick
      num_tasks += int(fields[17])
      if fields[0] == b"Z" and int(fields[17]) > 1:
        # The main thread has ended, and no longer reports the memory of the others.
        for task in map(int, os.listdir(f"{processes}/{pid}/task")):
          if (fields := read_stat(processes, task))[0] != b"Z":
            pid = task
            break
      resident[pid] = int(fields[21]) * page
      with open(f"{processes}/{pid}/status", "rb") as file:
        of_kernel += sum(int(line.split()[1]) * 1024 for line in file if line[:6] == b"VmPTE:")
      of_kernel += BYTES_OF_MAPPING * count_mappings(f"{processes}/{pid}/maps")
      of_kernel += BYTES_OF_DESCRIPTOR * count_descriptors(f"{processes}/{pid}/task", limits)
  if cpu_seconds > limits["cpu_seconds"]:
    return "cpu"
  # The kernel does not enforce this for some users, such as root. Factor 2: the sum is no snapshot.
  if num_tasks > 2 * limits["num_processes"]:
    return "killed"
  if sum(resident.values()) + of_kernel <= limits["memory_bytes"]:
    return ""
  # Forks share pages; dividing them among processes is slow, so it is done only now.
  memory_bytes = of_kernel
  for pid, num_bytes in resident.items():
    try:
      with open(f"{processes}/{pid}/smaps_rollup", "rb") as file:
        lines = [line.split() for line in file]
      memory_bytes += sum(int(line[1]) * 1024 for line in lines if line[0] == b"Pss:")
    except PermissionError:  # The process made itself unreadable.
      memory_bytes += num_bytes
    except OSError:  # The process has ended.
      pass
  return "memory" if memory_bytes > limits["memory_bytes"] else ""


def count_mappings(path: str) -> int:
  """Returns a process's number of mappings; `MAX_MAPPINGS` if it is unreadable or large."""
  count = 0
  try:
    with open(path, "rb", buffering=0) as file:
      while part := file.read(2**16):
        count += part.count(b"\n")
        if count > COUNTED_MAPPINGS:
          return MAX_MAPPINGS
  except PermissionError:
    return MAX_MAPPINGS
  return count


def count_descriptors(tasks: str, limits: Mapping[str, Any]) -> int:
  """Returns the number of open files of a process; tasks may have separate tables, so all count."""
  count = 0
  for task in os.listdir(tasks):
    try:
      count += len(os.listdir(f"{tasks}/{task}/fd"))
    except PermissionError:
      count += limits["num_files"]
  return count


def read_stat(processes: str, pid: int) -> list[bytes]:
  """Returns the fields of a process's or task's stat file, from the state on."""
  with open(f"{processes}/{pid}/stat", "rb") as file:
    return file.read().rpartition(b")")[2].split()


def list_processes(plan: Plan, processes: str) -> list[int]:
  """Returns the descendants of this process."""
  everyone = [int(name) for name in os.listdir(processes) if name.isdigit()]
  if plan.namespaces:
    return [pid for pid in everyone if pid != 1]
  parents = {}
  for pid in everyone:
    with contextlib.suppress(OSError):
      parents[pid] = int(read_stat(processes, pid)[1])
  below = [os.getpid()]
  for pid in below:  # The list grows during iteration.
    below += [child for child, parent in parents.items() if parent == pid]
  return below[1:]


def kill_all(plan: Plan, program: int = 0) -> int | None:
  """Kills all descendants of this process and waits for them; returns the exit code of `program`.

  A negative code is the signal that ended it.
  """
  code = None
  while True:
    with contextlib.suppress(ProcessLookupError):
      if plan.namespaces:
        assert os.getpid() == 1, "elsewhere, -1 would be everyone on this machine"
        os.kill(-1, signal.SIGKILL)  # Everything in this pid namespace except pid 1, this process.
      else:
        for pid in list_processes(plan, "/proc"):
          os.kill(pid, signal.SIGKILL)
    try:
      # Without a pid namespace, reading /proc may have missed a child: repeat.
      pid, status = os.waitpid(-1, 0 if plan.namespaces else os.WNOHANG)
    except ChildProcessError:
      return code
    if not pid:
      time.sleep(0.001)
    if pid == program:
      code = os.waitstatus_to_exitcode(status)


def read_outputs(work: int, request: Mapping[str, Any]) -> dict[str, bytes]:
  """Returns the requested output files; follows no links, and skips irregular files."""
  found = {}
  most = request["limits"]["file_bytes"]
  for name in request["outputs"]:
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
      place = work
      *folders, last = name.split("/")
      for folder in folders:
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
        stack.callback(os.close, place)
      # Without O_NONBLOCK, opening a named pipe would wait for a writer.
      file = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=place)
      stack.callback(os.close, file)
      about = os.fstat(file)
      if stat.S_ISREG(about.st_mode) and about.st_size <= most:
        with os.fdopen(os.dup(file), "rb") as reader:
          content = reader.read(most + 1)
        if len(content) <= most:
          found[name] = content
  return found


def remove_tree(path: str) -> None:
  """Removes a directory that a program made difficult to remove: unreadable, or very deep."""
  waiting, num_moved = [path], 0
  while waiting:
    folder = waiting.pop()
    with contextlib.suppress(OSError):
      os.chmod(folder, 0o700)
      for entry in list(os.scandir(folder)):
        if not entry.is_dir(follow_symlinks=False):
          os.unlink(entry.path)
          continue
        os.chmod(entry.path, 0o700)
        num_moved += 1
        # Move it to the top, so that paths do not exceed the kernel's length limit.
        waiting.append(f"{path}/.{num_moved}")
        os.rename(entry.path, waiting[-1])
      if folder != path:
        os.rmdir(folder)
  with contextlib.suppress(OSError):
    os.rmdir(path)


# --- the program


def become_program(
  plan: Plan, request: Mapping[str, Any], blobs: list[bytes], box: Box, writers: list[int]
) -> None:
  """Drops privileges, reports "ready", and then runs untrusted code."""
  setup, stdout, stderr, result = writers
  try:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Makes the kernel choose this process first when the machine runs out of memory.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
      file.write("1000")
    move_descriptors([box.stdin, stdout, stderr, result, setup])
    stdout, stderr, result, setup = 1, 2, 3, 4
    if box.root:
      pivot(box.root)
    os.chdir(box.inside)
    drop_privileges(plan)
    others = 0 if plan.nests else count_tasks(os.getuid())
    # Die with the supervisor. Set after the change of user, which resets it.
    kernel("prctl", PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    kernel("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # A single byte keeps a whole huge page alive: in a pipe, or mapped alone, it evades the sums.
    with contextlib.suppress(OSError):  # Not every kernel supports huge pages.
      kernel("prctl", PR_SET_THP_DISABLE, 1, 0, 0, 0)
    if plan.landlock:
      restrict_files(
        plan.landlock,
        read=["/"] if box.root else plan.readable,
        write=["/box", "/tmp"] if box.root else [box.work, box.temporary],
        devices=DEVICES,
      )
    os.environ.clear()
    os.environ.update(ENVIRONMENT)
    os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin"
    if not box.root:
      os.environ.update({"HOME": box.work, "TMPDIR": box.temporary})
    set_limits(request["limits"], others)
    if plan.seccomp:
      filter_calls(platform.machine())
    os.write(setup, b"ready")
    os.close(setup)
  except BaseException as error:
    os.write(setup, f"{type(error).__name__}: {error}".encode())
    os._exit(70)
  if "function" in request:
    call_function(request["function"], blobs[0], request["arguments"], result)
  os.close(result)
  for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these; programs should not.
    signal.signal(number, signal.SIG_DFL)
  try:
    os.execvpe(request["command"][0], request["command"], dict(os.environ))
  except OSError as error:
    os.write(2, f"sandbox: got command {request['command'][0]!r}: {error.strerror}\n".encode())
    os._exit(127)


def move_descriptors(wanted: Sequence[int]) -> None:
  """Renumbers `wanted` to 0, 1, ...; keeps 0 to 2 open across exec, and closes all others."""
  high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 64) for descriptor in wanted]
  for place, descriptor in enumerate(high):
    os.dup2(descriptor, place, inheritable=place < 3)
  os.closerange(len(wanted), 2**20)


def pivot(root: str) -> None:
  """Makes `root` the root directory, and unmounts the old one."""
  kernel("unshare", CLONE_NEWNS)  # The supervisor keeps its own mounts, to read the outputs.
  os.chdir(root)
  kernel("syscall", {"x86_64": 155, "aarch64": 41}[platform.machine()], b".", b".")
  kernel("umount2", b".", MNT_DETACH)
  os.chdir("/")


def drop_privileges(plan: Plan) -> None:
  """Becomes the user `nobody`, without capabilities in any namespace."""
  if os.geteuid() == 0 and plan.namespaces != "user":
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    for capability in range(64):
      if _LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
        break
    os.setresuid(NOBODY, NOBODY, NOBODY)
  if plan.nests:
    kernel("unshare", CLONE_NEWUSER)
  header = struct.pack("Ii", 0x20080522, 0)  # Interface version 3, this thread.
  kernel("capset", header, bytes(24))


def set_limits(limits: Mapping[str, Any], num_others: int) -> None:
  """Sets the limits that the kernel enforces per process; the supervisor checks the sums.

  Args:
    limits: fields of `sandbox.Limits`.
    num_others: other tasks that the kernel counts for the same user.
  """
  cpu_seconds = math.ceil(limits["cpu_seconds"])
  memory = limits["memory_bytes"]
  num_processes = num_others + limits["num_processes"]
  for kind, soft, hard in (
    (resource.RLIMIT_CPU, cpu_seconds, cpu_seconds + 1),
    (resource.RLIMIT_DATA, memory, memory),
    # Libraries and read-only mappings need address space, but hardly any memory.
    (resource.RLIMIT_AS, memory + 2**30, memory + 2**30),
    (resource.RLIMIT_FSIZE, limits["file_bytes"], limits["file_bytes"]),
    (resource.RLIMIT_NOFILE, limits["num_files"], limits["num_files"]),
    (resource.RLIMIT_NPROC, num_processes, num_processes),
    (resource.RLIMIT_CORE, 1, 1),  # Unlike 0, this also disables the host's crash reporter.
    (resource.RLIMIT_MEMLOCK, 0, 0),
    (resource.RLIMIT_MSGQUEUE, 0, 0),
    (resource.RLIMIT_SIGPENDING, 1024, 1024),  # Also bounds timers, which use kernel memory.
  ):
    most = resource.getrlimit(kind)[1]
    if most != resource.RLIM_INFINITY:
      soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(kind, (soft, hard))


def count_tasks(user: int) -> int:
  """Returns the user's tasks in other processes, which the kernel counts toward the same limit."""
  count = 0
  if os.path.isdir("/proc/self"):
    for name in os.listdir("/proc"):
      with contextlib.suppress(OSError):
        if name.isdigit() and int(name) != os.getpid() and os.stat(f"/proc/{name}").st_uid == user:
          count += len(os.listdir(f"/proc/{name}/task"))
  return count


def restrict_files(
  version: int, *, read: Sequence[str], write: Sequence[str], devices: Sequence[str]
) -> None:
  """Makes the kernel deny access to all paths that are not below one of these (Landlock)."""
  handled = max(rights for since, rights in LANDLOCK_RIGHTS.items() if since <= version)
  ruleset = struct.pack("Q", handled)
  if version >= 4:
    ruleset += struct.pack("Q", 3)  # Deny binding and connecting TCP ports.
  if version >= 6:
    ruleset += struct.pack("Q", 3)  # Deny abstract sockets and signals of outside processes.
  descriptor = kernel("syscall", LANDLOCK_CREATE, ruleset, len(ruleset), 0)
  rules = [(path, LANDLOCK_READ) for path in read]
  rules += [(path, handled) for path in write]
  rules += [(path, LANDLOCK_OF_FILES) for path in devices]
  for path, rights in rules:
    try:
      place = os.open(path, os.O_PATH)
    except OSError:  # Missing, or not accessible.
      continue
    rights &= handled if os.path.isdir(path) else handled & LANDLOCK_OF_FILES
    kernel("syscall", LANDLOCK_ADD, descriptor, 1, struct.pack("=Qi", rights, place), 0)
    os.close(place)
  kernel("syscall", LANDLOCK_RESTRICT, descriptor, 0)
  os.close(descriptor)


def filter_calls(
  machine: str,
  denied_calls: Mapping[str, tuple[int, int]] = DENIED,
  kept_signals: Sequence[int] = (signal.SIGCHLD,),
  kept_options: Sequence[int] = (PR_SET_THP_DISABLE, PR_SET_SECCOMP, PR_SET_VMA, PR_FUTEX_HASH),
  denied_fcntl: Mapping[str, int] = DENIED_FCNTL,
) -> None:
  """Makes the kernel deny system calls to this process and its descendants (seccomp).

  Needs PR_SET_NO_NEW_PRIVS, or privileges.

  Args:
    machine: machine name as in `platform`.
    denied_calls: numbers of denied calls, as in `DENIED`.
    kept_signals: signals with handlers that may be read, but not changed: CPU time of children is
      lost if SIGCHLD is ignored.
    kept_options: options of prctl(2) that must not be set again.
    denied_fcntl: denied commands of fcntl(2).
  """
  place = {"x86_64": 0, "aarch64": 1}[machine]
  denied = [numbers[place] for numbers in denied_calls.values() if numbers[place] >= 0]
  refuse = (RETURN, 0, 0, DENY | EPERM)
  number, architecture, first_argument = (LOAD, 0, 0, 0), (LOAD, 0, 0, 4), (LOAD, 0, 0, 16)
  second_low, second_high, fourth_argument = (LOAD, 0, 0, 24), (LOAD, 0, 0, 28), (LOAD, 0, 0, 40)
  new_namespaces = (NAMESPACES | CLONE_NEWUSER | 0x80) & 0xFFFFFFFF  # 0x80: time namespace.
  # (operation, instructions to skip if true, to skip if false, value)
  program = [
    architecture,
    (JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]),
    (RETURN, 0, 0, KILL),
    number,
    (JUMP_AT_LEAST, 0, 1, 0x40000000),  # Calls of the x32 ABI have other numbers.
    (RETURN, 0, 0, DENY | ENOSYS),
    (JUMP_EQUAL, 0, 1, CLONE3),  # Its flags are in memory; on ENOSYS the C library uses clone.
    (RETURN, 0, 0, DENY | ENOSYS),
    (JUMP_EQUAL, 0, 4, CLONE[place]),
    first_argument,
    (JUMP_BITS, 0, 1, new_namespaces),
    refuse,
    number,
    (JUMP_EQUAL, 0, 4, PRLIMIT[place]),
    first_argument,
    (JUMP_EQUAL, 1, 0, 0),  # Only the caller's own limits.
    refuse,
    number,
    (JUMP_EQUAL, 0, 5, MMAP[place]),  # Shared anonymous pages would evade the sums.
    fourth_argument,
    (JUMP_BITS, 0, 2, ANONYMOUS),
    (JUMP_BITS, 0, 1, SHARED),
    refuse,
    number,
  ]
  for kept in kept_signals:
    program += [
      (JUMP_EQUAL, 0, 8, SIGACTION[place]),
      first_argument,
      (JUMP_EQUAL, 0, 5, int(kept)),
      second_low,
      (JUMP_EQUAL, 0, 1, 0),  # No new action: the handler is only read.
      second_high,
      (JUMP_EQUAL, 1, 0, 0),
      refuse,
      number,
    ]
  for kept in kept_options:
    program += [
      (JUMP_EQUAL, 0, 4, PRCTL[place]),
      first_argument,
      (JUMP_EQUAL, 0, 1, int(kept)),
      refuse,
      number,
    ]
  for command in denied_fcntl.values():
    program += [
      (JUMP_EQUAL, 0, 4, FCNTL[place]),
      second_low,
      (JUMP_EQUAL, 0, 1, command),
      refuse,
      number,
    ]
  for call in denied:
    program += [(JUMP_EQUAL, 0, 1, call), refuse]
  program.append((RETURN, 0, 0, ALLOW))
  code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
  header = ctypes.create_string_buffer(
    struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
  )
  kernel("prctl", PR_SET_SECCOMP, 2, ctypes.addressof(header), 0, 0)


def call_function(function: str, source: bytes, arguments: Mapping[str, Any], result: int) -> None:
  """Calls a function of the source, writes its value to `result` as JSON, and ends the process."""
  # Saved, because the program may replace them.
  write, leave, dumps = os.write, os._exit, json.dumps
  code = 1
  try:
    text = source.decode()
    linecache.cache["program.py"] = (len(text), None, text.splitlines(True), "program.py")
    # All forks inherit the same generator state; seeding makes it the same for every server.
    random.seed(0)
    if "numpy" in sys.modules:
      sys.modules["numpy"].random.seed(0)
    module = types.ModuleType("program")
    sys.modules["program"] = module
    exec(compile(text, "program.py", "exec"), module.__dict__)
    value = module.__dict__[function](**arguments)
    sent = dumps(value, allow_nan=False, default=as_plain).encode()
    sys.stdout.flush()
    while sent:
      sent = sent[write(result, sent) :]
    code = 0
  except MemoryError:
    write(2, b"MemoryError\n")
    write(result, NO_MEMORY)
  except SystemExit as error:
    code = error.code if isinstance(error.code, int) else 1
  except BaseException:
    traceback.print_exc()
  finally:
    with contextlib.suppress(BaseException):
      sys.stdout.flush()
      sys.stderr.flush()
    leave(code & 255)


def as_plain(value: Any) -> Any:
  """Returns a numpy array or scalar as lists and numbers, for JSON."""
  if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
    return value.tolist()
  raise TypeError(f"got a {type(value).__name__}, expected what JSON can hold; return lists")
