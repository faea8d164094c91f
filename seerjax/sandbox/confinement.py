"""Takes privileges, files and system calls from this process for good, and limits it.

Source: man pages landlock(7), seccomp(2), getrlimit(2), capset(2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import contextlib
import ctypes
import math
import os
import resource
import signal
import struct
from typing import Any

from seerjax.sandbox import isolation, linux

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


def drop_privileges(plan: isolation.Plan) -> None:
  """Becomes the user `nobody`, without capabilities in any namespace."""
  if os.geteuid() == 0 and plan.namespaces != "user":
    os.setgroups([])
    os.setresgid(isolation.NOBODY, isolation.NOBODY, isolation.NOBODY)
    for capability in range(64):
      if linux.LIBC.prctl(linux.PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
        break
    os.setresuid(isolation.NOBODY, isolation.NOBODY, isolation.NOBODY)
  if plan.nests:
    linux.kernel("unshare", linux.CLONE_NEWUSER)
  header = struct.pack("Ii", 0x20080522, 0)  # Interface version 3, this thread.
  linux.kernel("capset", header, bytes(24))


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
  descriptor = linux.kernel("syscall", LANDLOCK_CREATE, ruleset, len(ruleset), 0)
  rules = [(path, LANDLOCK_READ) for path in read]
  rules += [(path, handled) for path in write]
  rules += [(path, LANDLOCK_OF_FILES) for path in devices]
  for path, rights in rules:
    try:
      place = os.open(path, os.O_PATH)
    except OSError:  # Missing, or not accessible.
      continue
    rights &= handled if os.path.isdir(path) else handled & LANDLOCK_OF_FILES
    linux.kernel("syscall", LANDLOCK_ADD, descriptor, 1, struct.pack("=Qi", rights, place), 0)
    os.close(place)
  linux.kernel("syscall", LANDLOCK_RESTRICT, descriptor, 0)
  os.close(descriptor)


def filter_calls(
  machine: str,
  denied_calls: Mapping[str, tuple[int, int]] = DENIED,
  kept_signals: Sequence[int] = (signal.SIGCHLD,),
  kept_options: Sequence[int] = (
    linux.PR_SET_THP_DISABLE,
    linux.PR_SET_SECCOMP,
    linux.PR_SET_VMA,
    linux.PR_FUTEX_HASH,
  ),
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
  new_namespaces = (
    linux.NAMESPACES | linux.CLONE_NEWUSER | 0x80
  ) & 0xFFFFFFFF  # 0x80: time namespace.
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
  linux.kernel("prctl", linux.PR_SET_SECCOMP, 2, ctypes.addressof(header), 0, 0)
