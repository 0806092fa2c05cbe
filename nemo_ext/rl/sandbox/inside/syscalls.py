"""Seccomp filter (classic BPF) that blocks programs' dangerous system calls.

It blocks sockets of any kind, access to other processes' memory, namespaces and mounts, kernel keys and modules,
memory that no limit counts (memfd, System V and POSIX queues), and io_uring, which bypasses filters. Blocked calls fail
with EPERM. clone3 fails as not implemented, so that the C library uses clone, whose flags a filter can see.
"""

import errno
import functools
import struct

# By machine: (AUDIT_ARCH of linux/audit.h, {name: number}).
_X86_64 = (
    "ptrace 101 process_vm_readv 310 process_vm_writev 311 mount 165 umount2 166 pivot_root 155 unshare 272 setns 308 "
    "bpf 321 perf_event_open 298 userfaultfd 323 add_key 248 request_key 249 keyctl 250 io_uring_setup 425 "
    "io_uring_enter 426 io_uring_register 427 socket 41 shmget 29 semget 64 msgget 68 mq_open 240 memfd_create 319 "
    "memfd_secret 447 pidfd_getfd 438 pidfd_send_signal 424 kexec_load 246 kexec_file_load 320 init_module 175 "
    "finit_module 313 delete_module 176 syslog 103 quotactl 179 open_by_handle_at 304 fanotify_init 300 fsopen 430 "
    "open_tree 428 move_mount 429 fspick 433 mount_setattr 442 chroot 161 personality 135 kcmp 312 move_pages 279 "
    "migrate_pages 256 acct 163 swapon 167 reboot 169 rt_sigqueueinfo 129 rt_tgsigqueueinfo 297 clone3 435 clone 56 "
    "prlimit64 302 kill 62 tkill 200 tgkill 234 fork 57 vfork 58"
)
_AARCH64 = (
    "ptrace 117 process_vm_readv 270 process_vm_writev 271 mount 40 umount2 39 pivot_root 41 unshare 97 setns 268 "
    "bpf 280 perf_event_open 241 userfaultfd 282 add_key 217 request_key 218 keyctl 219 io_uring_setup 425 "
    "io_uring_enter 426 io_uring_register 427 socket 198 shmget 194 semget 190 msgget 186 mq_open 180 memfd_create 279 "
    "memfd_secret 447 pidfd_getfd 438 pidfd_send_signal 424 kexec_load 104 kexec_file_load 294 init_module 105 "
    "finit_module 273 delete_module 106 syslog 116 quotactl 60 open_by_handle_at 265 fanotify_init 262 fsopen 430 "
    "open_tree 428 move_mount 429 fspick 433 mount_setattr 442 chroot 51 personality 92 kcmp 272 move_pages 239 "
    "migrate_pages 238 acct 89 swapon 224 reboot 142 rt_sigqueueinfo 138 rt_tgsigqueueinfo 240 clone3 435 clone 220 "
    "prlimit64 261 kill 129 tkill 130 tgkill 131"
)
MACHINES = {"x86_64": (0xC000003E, _X86_64), "aarch64": (0xC00000B7, _AARCH64)}

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _FAIL, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
# Offsets in struct seccomp_data: the number, the machine, the low halves of the first arguments.
_NUMBER, _MACHINE, _FIRST = 0, 4, 16
_NEW_NAMESPACES = 0x7E020000
_THREAD = 0x00010000


@functools.cache
def refusals(machine: str, *, signals_only_to: int | None = None, processes: bool = True) -> bytes:
    """Compile the seccomp filter and return its BPF instructions.

    Args:
        machine: machine name from os.uname(), a key of `MACHINES`.
        signals_only_to: ID of the only process that may be signalled; None for all that the user may signal.
        processes: False to block new processes, but not threads.
    """
    architecture, table = MACHINES[machine]
    words = table.split()
    numbers = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    filter = [_step(_LOAD, _MACHINE), _step(_EQUAL, architecture, 1, 0), _step(_RETURN, _KILL), _step(_LOAD, _NUMBER)]
    if machine == "x86_64":
        # First number of the x32 interface.
        filter += [_step(_AT_LEAST, 0x40000000, 0, 1), _step(_RETURN, _KILL)]
    fail, again = _step(_RETURN, _FAIL | errno.EPERM), _step(_RETURN, _FAIL | errno.EAGAIN)
    first, allow = _step(_LOAD, _FIRST), _step(_RETURN, _ALLOW)

    def rule(name: str, steps: list[bytes]) -> None:
        filter.extend([_step(_EQUAL, numbers.pop(name), 0, len(steps)), *steps])

    rule("clone3", [_step(_RETURN, _FAIL | errno.ENOSYS)])
    threads_only = [] if processes else [_step(_ANY_BIT, _THREAD, 1, 0), again]
    rule("clone", [first, _step(_ANY_BIT, _NEW_NAMESPACES, 0, 1), fail, *threads_only, allow])
    rule("prlimit64", [first, _step(_EQUAL, 0, 1, 0), fail, allow])
    for name in ("kill", "tkill", "tgkill"):
        if signals_only_to is None:
            del numbers[name]
        else:
            rule(name, [first, _step(_EQUAL, signals_only_to, 1, 0), fail, allow])
    for name in ("fork", "vfork"):
        if processes:
            numbers.pop(name, None)
        elif name in numbers:
            rule(name, [again])
    for name in list(numbers):
        rule(name, [fail])
    return b"".join([*filter, allow])


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
