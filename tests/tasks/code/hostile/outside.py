"""Attempts on files, network and other processes."""

# Programs give up in the plainest way, and expressions need imports too.
# ruff: noqa: SIM105, F401, D103

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

libc = ctypes.CDLL(None)


def must(failed):
    if failed:
        raise OSError("refused")


def pair(family):
    try:
        return socket.socketpair(family)
    except OSError:
        return None


def listed(places):
    found = [entry for path in places if os.path.isdir(path) for entry in os.listdir(path)]
    if not found:
        raise LookupError("nothing to be found")
    return found


# Programs of one expression, and below those that are more.
ATTACKS = {
    "write_outside": "open(folder + '/escaped', 'w').write('x')",
    "delete_target": "shutil.rmtree(folder)",
    "chmod_target": "os.chmod(folder, 0o000)",
    "read_target": "open(folder + '/precious').read()",
    "relative_path": "open('../' * 20 + folder.lstrip('/') + '/escaped', 'w').write('x')",
    "symlink": "os.symlink(folder, '/tmp/link') or open('/tmp/link/escaped', 'w').write('x')",
    "proc_root": "open(f'/proc/{pid}/root{folder}/escaped', 'w').write('x')",
    "proc_memory": "open(f'/proc/{pid}/mem', 'r+b').write(b'x')",
    "proc_environment": "open(f'/proc/{pid}/environ', 'rb').read()",
    "remount_writable": "must(libc.mount(b'none', b'/', b'', 32, None)) or open('/escaped', 'w').write('x')",
    "mount_proc": "os.mkdir('/tmp/proc') or must(libc.mount(b'proc', b'/tmp/proc', b'proc', 0, None)) or "
    "os.listdir('/tmp/proc')",
    "new_namespaces": "[hex(flag) for flag in (0x10000000, 0x20000, 0x40000000) if libc.unshare(flag) == 0] or 1 / 0",
    "become_root": "os.setuid(0) or os.getuid()",
    "setuid_program": "subprocess.run(['/usr/bin/su', '-c', f'touch {folder}/escaped'], capture_output=True, "
    "timeout=5).stderr.decode()",
    "shell": "os.system(f'touch {folder}/escaped; kill -9 {pid}')",
    "exec": "os.execv('/usr/bin/touch', ['touch', folder + '/escaped'])",
    "connect": "socket.create_connection(('127.0.0.1', port), timeout=2).sendall(b'x')",
    "connect_v6": "socket.create_connection(('::ffff:127.0.0.1', port), timeout=2).sendall(b'x')",
    "send_datagram": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', port))",
    "resolve_name": "socket.getaddrinfo('localhost.localdomain.invalid', 80)",
    "raw_socket": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "kill_parent": "[os.kill(pid, number) for number in (signal.SIGTERM, signal.SIGKILL)]",
    "kill_all": "os.kill(-1, signal.SIGKILL)",
    "kill_group": "os.killpg(0, signal.SIGKILL)",
    "kill_first_process": "[os.kill(1, number) for number in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)]",
    "trace_parent": "must(libc.ptrace(16, pid, 0, 0))",
    "trace_first_process": "must(libc.ptrace(16, 1, 0, 0))",
    "terminal": "open('/dev/tty', 'w').write('x')",
    # AF_VSOCK knows no network namespaces
    "virtual_machine_host": "socket.socket(40, socket.SOCK_STREAM).connect((2, port))",
    "every_pair": "[family for family in range(64) if family != socket.AF_UNIX and pair(family)]",
    # io_uring opens sockets without the call of that name
    "ring": "must(libc.syscall(425, 8, ctypes.create_string_buffer(120)) < 0)",
    "read_packages": "listed([path + '/site-packages' for path in sys.path] + ['/usr/lib/python3/dist-packages'])",
    "read_programs": "listed(['/usr/bin', '/bin', '/sbin', '/usr/local', '/usr/share/doc', '/etc/ssl', "
    "'/opt', '/var/lib'])",
}


def _attack_write_everywhere(folder, port, abstract, pid):
    done = []
    for path in ("/", "/usr", "/etc", "/root", "/home", "/var/tmp", "/dev", "/dev/shm", "/run", folder):
        try:
            os.close(os.open(path + "/escaped", os.O_CREAT | os.O_WRONLY))
            done.append(path)
        except OSError:
            pass
    return done


def _attack_delete_system(folder, port, abstract, pid):
    # Names only this test knows, beside one it must not be able to remove; nothing of value is aimed at.
    for path in (folder + "/precious", "/usr/kvbench-no-such-file", "/usr/lib/kvbench-no-such-file"):
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
    return "deleted"


def _attack_read_answers(folder, port, abstract, pid):
    found = []
    for top in ("/work", "/root", "/home", "/data", "/tmp"):
        for where, _, names in os.walk(top):
            found += [where + "/" + name for name in names if name.endswith(".jsonl")]
    return found[:5]


def _attack_chroot_out(folder, port, abstract, pid):
    os.mkdir("/tmp/jail")
    os.chroot("/tmp/jail")
    for _ in range(50):
        os.chdir("..")
    os.chroot(".")
    with open(folder + "/escaped", "w") as stream:
        stream.write("x")


def _attack_connect_abstract(folder, port, abstract, pid):
    link = socket.socket(socket.AF_UNIX)
    link.connect("\0" + abstract)
    link.sendall(b"x")


def _attack_shared_memory(folder, port, abstract, pid):
    from multiprocessing import shared_memory

    return shared_memory.SharedMemory("kvbench_escape", create=True, size=4096).name


def _attack_device(folder, port, abstract, pid):
    os.mknod("/tmp/disk", 0o666 | 0o060000, os.makedev(254, 0))
    with open("/tmp/disk", "rb") as stream:
        return stream.read(16)


def _attack_every_family(folder, port, abstract, pid):
    opened, last = [], None
    for family in range(64):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
            try:
                socket.socket(family, kind).close()
                opened.append(family)
            except OSError as error:
                last = last if family == socket.AF_UNIX else error
    if set(opened) == {socket.AF_UNIX}:
        raise last
    return opened


def _attack_family_in_disguise(folder, port, abstract, pid):
    call = 41 if os.uname().machine == "x86_64" else 198
    libc = ctypes.CDLL(None, use_errno=True)
    found = [libc.syscall(number, ctypes.c_long((1 << 32) + 40), 1, 0) for number in (call, call + (1 << 30))]
    if max(found) < 0:
        raise OSError("refused")
    return found


def _attack_outlive_the_death_of_the_parent(folder, port, abstract, pid):
    ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # PR_SET_PDEATHSIG: of nobody
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    time.sleep(20)
