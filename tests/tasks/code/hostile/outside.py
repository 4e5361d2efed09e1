"""Attempts on files, network and other processes."""

# Hostile programs give up in the plainest way.
# ruff: noqa: SIM105


def _attack_write_outside(folder, port, abstract, pid):
    with open(folder + "/escaped", "w") as stream:
        stream.write("x")


def _attack_write_everywhere(folder, port, abstract, pid):
    import os

    done = []
    for path in ("/", "/usr", "/etc", "/root", "/home", "/var/tmp", "/dev", "/dev/shm", "/run", folder):
        try:
            os.close(os.open(path + "/escaped", os.O_CREAT | os.O_WRONLY))
            done.append(path)
        except OSError:
            pass
    return done


def _attack_delete_target(folder, port, abstract, pid):
    import shutil

    shutil.rmtree(folder)


def _attack_delete_system(folder, port, abstract, pid):
    import os

    # Names only this test knows, beside one it must not be able to remove; nothing of value is aimed at.
    for path in (folder + "/precious", "/usr/kvbench-no-such-file", "/usr/lib/kvbench-no-such-file"):
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
    return "deleted"


def _attack_chmod_target(folder, port, abstract, pid):
    import os

    os.chmod(folder, 0o000)


def _attack_read_target(folder, port, abstract, pid):
    with open(folder + "/precious") as stream:
        return stream.read()


def _attack_read_answers(folder, port, abstract, pid):
    import os

    found = []
    for top in ("/work", "/root", "/home", "/data", "/tmp"):
        for where, _, names in os.walk(top):
            found += [where + "/" + name for name in names if name.endswith(".jsonl")]
    return found[:5]


def _attack_relative_path(folder, port, abstract, pid):
    with open("../" * 20 + folder.lstrip("/") + "/escaped", "w") as stream:
        stream.write("x")


def _attack_symlink(folder, port, abstract, pid):
    import os

    os.symlink(folder, "/tmp/link")
    with open("/tmp/link/escaped", "w") as stream:
        stream.write("x")


def _attack_proc_root(folder, port, abstract, pid):
    with open(f"/proc/{pid}/root{folder}/escaped", "w") as stream:
        stream.write("x")


def _attack_proc_memory(folder, port, abstract, pid):
    with open(f"/proc/{pid}/mem", "r+b") as stream:
        stream.write(b"x")


def _attack_proc_environment(folder, port, abstract, pid):
    with open(f"/proc/{pid}/environ", "rb") as stream:
        return stream.read()


def _attack_mount_proc(folder, port, abstract, pid):
    import ctypes
    import os

    os.mkdir("/tmp/proc")
    if ctypes.CDLL(None).mount(b"proc", b"/tmp/proc", b"proc", 0, None):
        raise OSError("refused")
    return os.listdir("/tmp/proc")


def _attack_remount_writable(folder, port, abstract, pid):
    import ctypes

    if ctypes.CDLL(None).mount(b"none", b"/", b"", 32, None):
        raise OSError("refused")
    with open("/escaped", "w") as stream:
        stream.write("x")


def _attack_chroot_out(folder, port, abstract, pid):
    import os

    os.mkdir("/tmp/jail")
    os.chroot("/tmp/jail")
    for _ in range(50):
        os.chdir("..")
    os.chroot(".")
    with open(folder + "/escaped", "w") as stream:
        stream.write("x")


def _attack_new_namespaces(folder, port, abstract, pid):
    import ctypes

    libc = ctypes.CDLL(None)
    return [hex(flag) for flag in (0x10000000, 0x20000, 0x40000000) if libc.unshare(flag) == 0] or 1 / 0


def _attack_become_root(folder, port, abstract, pid):
    import os

    os.setuid(0)
    return os.getuid()


def _attack_setuid_program(folder, port, abstract, pid):
    import subprocess

    text = subprocess.run(["/usr/bin/su", "-c", f"touch {folder}/escaped"], capture_output=True, timeout=5).stderr
    return text.decode()


def _attack_shell(folder, port, abstract, pid):
    import os

    return os.system(f"touch {folder}/escaped; kill -9 {pid}")


def _attack_exec(folder, port, abstract, pid):
    import os

    os.execv("/usr/bin/touch", ["touch", folder + "/escaped"])


def _attack_connect(folder, port, abstract, pid):
    import socket

    socket.create_connection(("127.0.0.1", port), timeout=2).sendall(b"x")


def _attack_connect_v6(folder, port, abstract, pid):
    import socket

    socket.create_connection(("::ffff:127.0.0.1", port), timeout=2).sendall(b"x")


def _attack_connect_abstract(folder, port, abstract, pid):
    import socket

    link = socket.socket(socket.AF_UNIX)
    link.connect("\0" + abstract)
    link.sendall(b"x")


def _attack_send_datagram(folder, port, abstract, pid):
    import socket

    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", port))


def _attack_resolve_name(folder, port, abstract, pid):
    import socket

    return socket.getaddrinfo("localhost.localdomain.invalid", 80)


def _attack_raw_socket(folder, port, abstract, pid):
    import socket

    socket.socket(socket.AF_PACKET, socket.SOCK_RAW)


def _attack_kill_parent(folder, port, abstract, pid):
    import os
    import signal

    for number in (signal.SIGTERM, signal.SIGKILL):
        os.kill(pid, number)


def _attack_kill_all(folder, port, abstract, pid):
    import os
    import signal

    os.kill(-1, signal.SIGKILL)


def _attack_kill_group(folder, port, abstract, pid):
    import os
    import signal

    os.killpg(0, signal.SIGKILL)


def _attack_kill_first_process(folder, port, abstract, pid):
    import os
    import signal

    for number in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM):
        os.kill(1, number)


def _attack_trace_parent(folder, port, abstract, pid):
    import ctypes

    if ctypes.CDLL(None).ptrace(16, pid, 0, 0):
        raise OSError("refused")


def _attack_trace_first_process(folder, port, abstract, pid):
    import ctypes

    if ctypes.CDLL(None).ptrace(16, 1, 0, 0):
        raise OSError("refused")


def _attack_shared_memory(folder, port, abstract, pid):
    from multiprocessing import shared_memory

    return shared_memory.SharedMemory("kvbench_escape", create=True, size=4096).name


def _attack_device(folder, port, abstract, pid):
    import os

    os.mknod("/tmp/disk", 0o666 | 0o060000, os.makedev(254, 0))
    with open("/tmp/disk", "rb") as stream:
        return stream.read(16)


def _attack_terminal(folder, port, abstract, pid):
    with open("/dev/tty", "w") as stream:
        stream.write("x")


def _attack_virtual_machine_host(folder, port, abstract, pid):
    import socket

    link = socket.socket(40, socket.SOCK_STREAM)  # AF_VSOCK knows no network namespaces
    link.connect((2, port))


def _attack_every_family(folder, port, abstract, pid):
    import socket

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


def _attack_every_pair(folder, port, abstract, pid):
    import socket

    return [family for family in range(64) if family != socket.AF_UNIX and _pair(socket, family)]


def _pair(socket, family):
    try:
        return socket.socketpair(family)
    except OSError:
        return None


def _attack_family_in_disguise(folder, port, abstract, pid):
    import ctypes
    import os

    call = 41 if os.uname().machine == "x86_64" else 198
    libc = ctypes.CDLL(None, use_errno=True)
    found = [libc.syscall(number, ctypes.c_long((1 << 32) + 40), 1, 0) for number in (call, call + (1 << 30))]
    if max(found) < 0:
        raise OSError("refused")
    return found


def _attack_ring(folder, port, abstract, pid):
    import ctypes

    # io_uring opens sockets without the call of that name.
    if ctypes.CDLL(None).syscall(425, 8, ctypes.create_string_buffer(120)) < 0:
        raise OSError("refused")


def _attack_read_packages(folder, port, abstract, pid):
    import os
    import sys

    places = [path + "/site-packages" for path in sys.path] + ["/usr/lib/python3/dist-packages"]
    return _list(os, places)


def _attack_read_programs(folder, port, abstract, pid):
    import os

    return _list(os, ["/usr/bin", "/bin", "/sbin", "/usr/local", "/usr/share/doc", "/etc/ssl", "/opt", "/var/lib"])


def _list(os, places):
    found = [entry for path in places if os.path.isdir(path) for entry in os.listdir(path)]
    if not found:
        raise LookupError("nothing to be found")
    return found


def _attack_outlive_the_death_of_the_parent(folder, port, abstract, pid):
    import ctypes
    import signal
    import time

    ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # PR_SET_PDEATHSIG: of nobody
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    time.sleep(20)
