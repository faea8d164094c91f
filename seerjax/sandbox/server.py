"""The trusted half of `sandbox.sandbox` that runs untrusted programs: a program of its own.

  sandbox.Sandbox --socket--> server           imports numpy and scipy once, then only forks
                                `- supervisor   pid 1 of fresh namespaces; pipes, limits, verdict
                                     `- program  loses everything, then runs what is not trusted

The server sees no untrusted byte: it hands each call's socket to a fork. The supervisor builds an
empty root (read-only system and Python, a small private /box and /tmp), and when the program has
ended, or has to, kills all that is left: being pid 1, it is out of the program's reach, and nothing
outlives it. The program's process drops its privileges, sets its limits, and only then reads its
first line. All of this is the standard library and system calls.

Run by path, never imported by what it runs. Source: man pages namespaces(7), landlock(7),
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

NOBODY = 65534  # The user and group that programs run as.
WATCH_SECONDS = 0.05  # How often the supervisor adds up what all processes of a program use.
SETUP_SECONDS = 60.0  # An isolation that takes longer has failed.
# Modules that every call of a function finds imported already; a missing one is left out.
PRELOADED = ("numpy", "scipy.optimize")
NO_MEMORY = b"memory"  # No JSON: what a function that ran out of memory sends instead of a result.
ENVIRONMENT = {
  "HOME": "/box/work", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1",
  "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "NUMEXPR_NUM_THREADS": "1",
  "NUMBA_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0",
}  # fmt: skip
# Not /dev/zero: pages of it that are shared and let go belong to no process, and stay.
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
PR_SET_VMA, PR_FUTEX_HASH = 0x53564D41, 78  # Names of mappings; a table of waiters.
# linux/landlock.h: the rights of each version of the interface (bits), and those that files have.
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
LANDLOCK_RIGHTS = {1: 2**13 - 1, 2: 2**14 - 1, 3: 2**15 - 1, 5: 2**16 - 1}
LANDLOCK_READ = 0b1101  # Execute, read a file, read a directory.
LANDLOCK_OF_FILES = 0b1100000000000111  # Execute, write, read, truncate, ioctl.
# linux/filter.h, linux/seccomp.h
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, DENY, KILL = 0x7FFF0000, 0x00050000, 0x80000000
EPERM, ENOSYS = 1, 38
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# System calls that no program here needs, by number on x86_64 and aarch64 (-1: not there).
DENIED = {
  "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
  "kcmp": (312, 272), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
  "process_madvise": (440, 440), "migrate_pages": (256, 238), "move_pages": (279, 239),
  "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
  "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
  "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
  "mount_setattr": (442, 442), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
  "unshare": (272, 97), "setns": (308, 268), "socket": (41, 198), "keyctl": (250, 219),
  # Messages in flight count as no process's memory, and the pipes among them have no writer that
  # can die.
  "socketpair": (53, 199),
  # What is added to a set of rules, a filter, a poll or a mapping counts as no process's memory,
  # and no limit bounds it: sets of Landlock's rules took 105 MiB of the kernel's in 3 s.
  "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445),
  "landlock_restrict_self": (446, 446), "seccomp": (317, 277),
  "epoll_create": (213, -1), "epoll_create1": (291, 20),
  "mbind": (237, 235), "set_mempolicy": (238, 237), "set_mempolicy_home_node": (450, 450),
  "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
  # Without namespaces they reach other processes of the same user.
  "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setaffinity": (203, 122),
  "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
  "flock": (73, 32),  # Of a file that others read too.
  # Of these the machine, or the user, has few.
  "io_setup": (206, 0), "inotify_init": (253, -1), "inotify_init1": (294, 26),
  "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280),
  "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
  "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "fanotify_init": (300, 262),
  # Memory that outlives or escapes the sums of the supervisor.
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
# linux/fcntl.h: locks of ranges (no limit bounds their number), leases, watches of folders, and
# larger pipes.
DENIED_FCNTL = {
  "F_SETLK": 6, "F_SETLKW": 7, "F_OFD_SETLK": 37, "F_OFD_SETLKW": 38, "F_SETLEASE": 1024,
  "F_NOTIFY": 1026, "F_SETPIPE_SZ": 1031,
}  # fmt: skip
# What the kernel may hold for an open descriptor (a full pipe) and for a mapping, in bytes.
BYTES_OF_DESCRIPTOR, BYTES_OF_MAPPING = 2**16, 256
MAX_MAPPINGS = 65_530  # The kernel's usual bound in one process, vm.max_map_count.
COUNTED_MAPPINGS = 8192  # A process with more is taken to have all that it may have.

_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """What can be enforced here, found by trying it when the server starts.

  Attributes:
    namespaces: "root" (made with the server's own privileges), "user" (inside a user namespace),
      or "" if there are none.
    nests: the program gets a user namespace of its own, so that its processes are counted alone.
    watches: the supervisor sees all processes of a program, and adds up what they use.
    landlock: version of the kernel's interface; 0 if there is none.
    seccomp: whether system calls are filtered.
    denied: why a layer is missing, by its name.
    readable: what programs may read, as absolute paths.
  """

  namespaces: str = ""
  nests: bool = False
  watches: bool = False
  landlock: int = 0
  seccomp: bool = False
  denied: tuple[tuple[str, str], ...] = ()
  readable: tuple[str, ...] = ()


def kernel(name: str, *arguments: Any) -> int:
  """Calls the C library.

  Raises:
    OSError: if the call fails, with the reason and the call.
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
  """Sets flags (MOUNT_ATTR_...) on the mount at `path` and on all beneath it."""
  attributes = struct.pack("QQQQ", flags, 0, 0, 0)
  kernel(
    "syscall", MOUNT_SETATTR, AT_FDCWD, path.encode(), AT_RECURSIVE, attributes, len(attributes)
  )


# --- the server


def main(control: socket.socket, settings: Mapping[str, Any]) -> None:
  """Says what is enforced here, imports what programs need, then forks for each call until EOF."""
  os.umask(0o022)  # The unprivileged user has to reach what root makes in here.
  signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Supervisors need no waiting for.
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # A program may send it to its supervisor.
  # A supervisor's own parent ends at once: the server inherits it.
  kernel("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
  plan = find_plan(tuple(settings["readable"]))
  wait_for_supervisors()
  control.send(json.dumps(dataclasses.asdict(plan)).encode())
  sys.path.extend(path for path in settings["packages"] if path not in sys.path)
  for name in (*PRELOADED, *settings["preloaded"]):
    with contextlib.suppress(BlockingIOError):
      if not control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
        return  # Closed already: the rest is not awaited.
    with contextlib.suppress(ImportError):
      __import__(name)
  gc.collect()
  gc.freeze()  # Forks then share these pages for longer.
  while True:
    message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    if not message:
      break
    # If no process is left to fork, the caller sees its socket close.
    with socket.socket(fileno=descriptors[0]) as caller, contextlib.suppress(OSError):
      if os.fork() == 0:
        control.close()
        in_child(enter, plan, caller)
  wait_for_supervisors()


def wait_for_supervisors() -> None:
  """Returns when the last child has ended; ignored as they are, none is ever returned."""
  with contextlib.suppress(ChildProcessError):
    os.waitpid(-1, 0)


def in_child(work: Callable[..., None], *arguments: Any) -> None:
  """Does the work and ends the process, whatever happens."""
  code = 70
  try:
    work(*arguments)
    code = 0
  except BaseException:
    traceback.print_exc()
  finally:
    os._exit(code)


def enter(plan: Plan, caller: socket.socket) -> None:
  """Enters fresh namespaces and forks the supervisor there, which is pid 1 then."""
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
  """Leaves the namespaces of the host; the next fork is pid 1. `kind` as in `Plan.namespaces`."""
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
  # Nothing mounted here shows outside.
  mount("none", "/", "none", MS_REC | MS_PRIVATE)


def find_plan(readable: tuple[str, ...]) -> Plan:
  """Tries every layer in a child of its own, the strongest first."""
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
        ours.recv(1)  # Nothing; but then the supervisor has ended.
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
  """Sends one message; `header["blobs"]` lists the lengths of the blobs."""
  text = json.dumps(header).encode()
  channel.sendall(struct.pack("Q", len(text)) + text)
  for blob in blobs:
    channel.sendall(blob)


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[bytes]] | None:
  """Returns one message, or None if the other side went away."""

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
  with contextlib.suppress(OSError):  # A caller that went away needs no answer.
    send(caller, {**header, "blobs": [len(blob) for blob in blobs]}, blobs)


# --- the supervisor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Box:
  """Where a program lives.

  Attributes:
    root: directory that becomes its "/", or "" if it stays in the host's.
    work, temporary: its working directory and its /tmp, as the supervisor sees them.
    inside: its working directory, as the program sees it.
    place: descriptor of its working directory: its path may lead elsewhere once it has run.
    stdin: descriptor of its input.
    processes: a proc file system of its processes alone, or the host's; "" if there is none.
  """

  root: str
  work: str
  temporary: str
  inside: str
  place: int
  stdin: int
  processes: str


def supervise(plan: Plan, caller: socket.socket) -> None:
  """Reads one request, runs the program, and answers with its outcome."""
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
  """Builds the program's root, or a bare directory without namespaces, and puts its files there.

  Args:
    plan: of the server.
    request: the caller's.
    blobs: the source (if there is one), the input, then the contents of the files.
    stage: an empty directory on the host, without namespaces.
  """
  processes = "/proc"
  box = stage
  root = ""
  if plan.namespaces:
    # Any directory that holds nothing of use will do: no other process sees it.
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
  # The input is a file without a name: nothing blocks, and no writer is needed.
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
  """Shows the system and Python in a new root, read-only, each at its place."""
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
  # This mount alone: /box and /tmp stay writable.
  mount("none", root, "none", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID)


def watch(
  plan: Plan, caller: socket.socket, request: Mapping[str, Any], blobs: list[bytes], box: Box
) -> tuple[dict[str, Any], list[bytes]]:
  """Runs the program to its end or to a limit.

  Returns:
    The outcome's fields and its standard output, error and result; both empty if the caller went
    away.
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
    """Takes what is there; False at the end, or when there is too much."""
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
      return {}, []  # Nothing more is ever sent to us: the caller has closed its end.
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
    # All writers are dead, but a pipe that was sent and not received has no end.
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
  """Returns a status if all processes of the program together use too much, else ""."""
  tick, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
  waited = resource.getrusage(resource.RUSAGE_CHILDREN)
  cpu_seconds = waited.ru_utime + waited.ru_stime
  num_tasks = 0
  of_kernel = 0  # Bytes that the kernel holds for all; they may be many where few are resident.
  resident = {}  # Bytes of each process, by a task of it that lives.
  for pid in list_processes(plan, processes):
    with contextlib.suppress(OSError):  # It has ended.
      fields = read_stat(processes, pid)
      cpu_seconds += sum(map(int, fields[11:15])) / tick
      num_tasks += int(fields[17])
      if fields[0] == b"Z" and int(fields[17]) > 1:
        # Its first thread has ended, and says no more what the others hold.
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
  # Where the kernel does not count (root's, for one). Twice, because the sum is no snapshot.
  if num_tasks > 2 * limits["num_processes"]:
    return "killed"
  if sum(resident.values()) + of_kernel <= limits["memory_bytes"]:
    return ""
  # Forks share pages; only now is it worth the time to share them out.
  memory_bytes = of_kernel
  for pid, num_bytes in resident.items():
    try:
      with open(f"{processes}/{pid}/smaps_rollup", "rb") as file:
        lines = [line.split() for line in file]
      memory_bytes += sum(int(line[1]) * 1024 for line in lines if line[0] == b"Pss:")
    except PermissionError:  # It has closed itself to our eyes.
      memory_bytes += num_bytes
    except OSError:  # It has ended.
      pass
  return "memory" if memory_bytes > limits["memory_bytes"] else ""


def count_mappings(path: str) -> int:
  """Returns how many mappings a process has, `MAX_MAPPINGS` if that is not seen or takes long."""
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
  """Returns how many files a process's tasks have open; each task may have its own, and counts."""
  count = 0
  for task in os.listdir(tasks):
    try:
      count += len(os.listdir(f"{tasks}/{task}/fd"))
    except PermissionError:
      count += limits["num_files"]
  return count


def read_stat(processes: str, pid: int) -> list[bytes]:
  """Returns the fields of a process's or a task's stat, from its state on."""
  with open(f"{processes}/{pid}/stat", "rb") as file:
    return file.read().rpartition(b")")[2].split()


def list_processes(plan: Plan, processes: str) -> list[int]:
  """Returns the processes beneath this one."""
  everyone = [int(name) for name in os.listdir(processes) if name.isdigit()]
  if plan.namespaces:
    return [pid for pid in everyone if pid != 1]
  parents = {}
  for pid in everyone:
    with contextlib.suppress(OSError):
      parents[pid] = int(read_stat(processes, pid)[1])
  below = [os.getpid()]
  for pid in below:  # Grows while it is read.
    below += [child for child, parent in parents.items() if parent == pid]
  return below[1:]


def kill_all(plan: Plan, program: int = 0) -> int | None:
  """Kills every process beneath this one and waits for all; returns the exit code of `program`.

  A negative code is the signal that ended it.
  """
  code = None
  while True:
    with contextlib.suppress(ProcessLookupError):
      if plan.namespaces:
        assert os.getpid() == 1, "elsewhere, -1 would be everyone on this machine"
        os.kill(-1, signal.SIGKILL)  # Everyone in this pid namespace but pid 1, which we are.
      else:
        for pid in list_processes(plan, "/proc"):
          os.kill(pid, signal.SIGKILL)
    try:
      # Without a pid namespace, a child may have been missed while /proc was read: look again.
      pid, status = os.waitpid(-1, 0 if plan.namespaces else os.WNOHANG)
    except ChildProcessError:
      return code
    if not pid:
      time.sleep(0.001)
    if pid == program:
      code = os.waitstatus_to_exitcode(status)


def read_outputs(work: int, request: Mapping[str, Any]) -> dict[str, bytes]:
  """Returns what the program left, following no link; what is not a regular file is left out."""
  found = {}
  most = request["limits"]["file_bytes"]
  for name in request["outputs"]:
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
      place = work
      *folders, last = name.split("/")
      for folder in folders:
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
        stack.callback(os.close, place)
      # A pipe would wait for its writer.
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
  """Removes a directory that a program may have made hard to remove: closed, or very deep."""
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
        # To the top, where no path grows too long for the kernel.
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
  """Gives up everything, says so, and then runs what is not trusted."""
  setup, stdout, stderr, result = writers
  try:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # If the machine runs out of memory, this goes first.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
      file.write("1000")
    move_descriptors([box.stdin, stdout, stderr, result, setup])
    stdout, stderr, result, setup = 1, 2, 3, 4
    if box.root:
      pivot(box.root)
    os.chdir(box.inside)
    drop_privileges(plan)
    others = 0 if plan.nests else count_tasks(os.getuid())
    # If the supervisor dies, so does the program; a change of user would forget this.
    kernel("prctl", PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    kernel("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # One byte of a huge page holds all of it: in a pipe, or mapped alone, it evades the sums.
    with contextlib.suppress(OSError):  # Not every kernel has them.
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
  for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; programs do not.
    signal.signal(number, signal.SIG_DFL)
  try:
    os.execvpe(request["command"][0], request["command"], dict(os.environ))
  except OSError as error:
    os.write(2, f"sandbox: got command {request['command'][0]!r}: {error.strerror}\n".encode())
    os._exit(127)


def move_descriptors(wanted: Sequence[int]) -> None:
  """Makes `wanted` the descriptors 0, 1, ..., open across exec up to 2, and closes all others."""
  high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 64) for descriptor in wanted]
  for place, descriptor in enumerate(high):
    os.dup2(descriptor, place, inheritable=place < 3)
  os.closerange(len(wanted), 2**20)


def pivot(root: str) -> None:
  """Makes `root` the root directory and lets go of the old one."""
  kernel("unshare", CLONE_NEWNS)  # The supervisor keeps its own view, to read the outputs.
  os.chdir(root)
  kernel("syscall", {"x86_64": 155, "aarch64": 41}[platform.machine()], b".", b".")
  kernel("umount2", b".", MNT_DETACH)
  os.chdir("/")


def drop_privileges(plan: Plan) -> None:
  """Becomes the user `nobody`, with no capability in any namespace."""
  if os.geteuid() == 0 and plan.namespaces != "user":
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    for capability in range(64):
      if _LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
        break
    os.setresuid(NOBODY, NOBODY, NOBODY)
  if plan.nests:
    kernel("unshare", CLONE_NEWUSER)
  header = struct.pack("Ii", 0x20080522, 0)  # Version 3 of the interface, this thread.
  kernel("capset", header, bytes(24))


def set_limits(limits: Mapping[str, Any], num_others: int) -> None:
  """Sets what the kernel enforces for each process; the supervisor adds up over all.

  Args:
    limits: the fields of `sandbox.Limits`.
    num_others: tasks that the kernel counts with the program's own.
  """
  cpu_seconds = math.ceil(limits["cpu_seconds"])
  memory = limits["memory_bytes"]
  num_processes = num_others + limits["num_processes"]
  for kind, soft, hard in (
    (resource.RLIMIT_CPU, cpu_seconds, cpu_seconds + 1),
    (resource.RLIMIT_DATA, memory, memory),
    # Libraries and read-only mappings need addresses, but hardly memory.
    (resource.RLIMIT_AS, memory + 2**30, memory + 2**30),
    (resource.RLIMIT_FSIZE, limits["file_bytes"], limits["file_bytes"]),
    (resource.RLIMIT_NOFILE, limits["num_files"], limits["num_files"]),
    (resource.RLIMIT_NPROC, num_processes, num_processes),
    (resource.RLIMIT_CORE, 1, 1),  # Unlike 0, this keeps the host's crash reporter out, too.
    (resource.RLIMIT_MEMLOCK, 0, 0),
    (resource.RLIMIT_MSGQUEUE, 0, 0),
    (resource.RLIMIT_SIGPENDING, 1024, 1024),  # Timers, too, which count as no process's memory.
  ):
    most = resource.getrlimit(kind)[1]
    if most != resource.RLIM_INFINITY:
      soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(kind, (soft, hard))


def count_tasks(user: int) -> int:
  """Returns how many tasks the user has in other processes, for the kernel counts them all."""
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
  """Has the kernel refuse every path that is not beneath one of these (Landlock)."""
  handled = max(rights for since, rights in LANDLOCK_RIGHTS.items() if since <= version)
  ruleset = struct.pack("Q", handled)
  if version >= 4:
    ruleset += struct.pack("Q", 3)  # No TCP port may be bound or connected to.
  if version >= 6:
    ruleset += struct.pack("Q", 3)  # Nor abstract sockets and signals of processes outside.
  descriptor = kernel("syscall", LANDLOCK_CREATE, ruleset, len(ruleset), 0)
  rules = [(path, LANDLOCK_READ) for path in read]
  rules += [(path, handled) for path in write]
  rules += [(path, LANDLOCK_OF_FILES) for path in devices]
  for path, rights in rules:
    try:
      place = os.open(path, os.O_PATH)
    except OSError:  # It is not there, or not for us.
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
  """Has the kernel refuse system calls to this process and to all that it starts.

  Needs PR_SET_NO_NEW_PRIVS, or privileges.

  Args:
    machine: of `platform`.
    denied_calls: their numbers, as in `DENIED`.
    kept_signals: whose handling may be asked, but not changed. Children whose end is ignored leave
      no CPU seconds behind.
    kept_options: of prctl(2), that are not set again.
    denied_fcntl: commands of fcntl(2).
  """
  place = {"x86_64": 0, "aarch64": 1}[machine]
  denied = [numbers[place] for numbers in denied_calls.values() if numbers[place] >= 0]
  refuse = (RETURN, 0, 0, DENY | EPERM)
  number, architecture, first_argument = (LOAD, 0, 0, 0), (LOAD, 0, 0, 4), (LOAD, 0, 0, 16)
  second_low, second_high, fourth_argument = (LOAD, 0, 0, 24), (LOAD, 0, 0, 28), (LOAD, 0, 0, 40)
  new_namespaces = (NAMESPACES | CLONE_NEWUSER | 0x80) & 0xFFFFFFFF  # 0x80: of time.
  # (operation, instructions to skip if true, if false, value)
  program = [
    architecture,
    (JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]),
    (RETURN, 0, 0, KILL),
    number,
    (JUMP_AT_LEAST, 0, 1, 0x40000000),  # The x32 calls have numbers of their own.
    (RETURN, 0, 0, DENY | ENOSYS),
    (JUMP_EQUAL, 0, 1, CLONE3),  # Its flags lie in memory; the C library then takes clone.
    (RETURN, 0, 0, DENY | ENOSYS),
    (JUMP_EQUAL, 0, 4, CLONE[place]),
    first_argument,
    (JUMP_BITS, 0, 1, new_namespaces),
    refuse,
    number,
    (JUMP_EQUAL, 0, 4, PRLIMIT[place]),
    first_argument,
    (JUMP_EQUAL, 1, 0, 0),  # Its own limits only.
    refuse,
    number,
    (JUMP_EQUAL, 0, 5, MMAP[place]),  # Shared pages without a file outlive their mapping's sums.
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
      (JUMP_EQUAL, 0, 1, 0),  # No new action: it is asked.
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
  # What the program may have changed is not asked again.
  write, leave, dumps = os.write, os._exit, json.dumps
  code = 1
  try:
    text = source.decode()
    linecache.cache["program.py"] = (len(text), None, text.splitlines(True), "program.py")
    # Forks of one server would share its state; so at least it is always the same.
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


if __name__ == "__main__":
  main(socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2]))
